"""Attention whose keys are split over programs: what gqa_decode launches, and tree_attention with its draft block.

A program attends with a tile of rows to shares of requests' keys (`share.py`): even chunks of the batch (`chunks.py`),
or, where bits must not depend on the batch, shares that positions alone decide (`ordered.py`). A second kernel merges
the rows of requests that have several parts (`merge_shares.py`).
"""

from __future__ import annotations

import torch

from ....primitives.fp8 import FP8
from ....runtime import tuning
from ....runtime.language import is_interpreting
from . import ordered
from .chunks import launch_chunks
from .paged_cache import cache_arguments
from .softmax import LOG2_E, tile_sizes

# A row of an op's TUNING has the compiler's options, and
#     for tiles       at most max_rows and at least min_rows rows, and tile_bytes of keys
#     for chunks      at least share_keys keys, and `programs` programs for a multiprocessor, see `chunks.count_chunks`
#     float8, wide    what differs with keys of 8 bits, and with heads of more elements than its `above`


def launch_attention(
    op: str,
    values: dict,
    out: tuple[torch.Tensor, torch.Tensor],
    *,
    tuned: dict,
    num_query: int,
    num_drafts: int,
    drafts: str,
) -> None:
    """Launches the attention that an op's checked arguments describe, into `out`, (output, lse).

    values: the op's arguments, None where it has none. tuned: the op's tuning row. num_query: tokens of a request, at
    most. num_drafts: draft keys of a request, if ragged at most. drafts: where they are, see `batch.slot_range`.
    """
    query, draft_key, draft_value = values["query"], values.get("draft_key"), values.get("draft_value")
    positions, tree_mask, key_positions = (values.get(name) for name in ("positions", "tree_mask", "key_positions"))
    window, k_scale = values["window"], values["k_scale"]
    num_heads, head_dim = query.shape[-2:]
    cache = cache_arguments(values)
    group_size = num_heads // cache["NUM_KV_HEADS"]
    is_ordered = values["deterministic"]
    if is_ordered:
        tuned = tuning.row(ordered.TUNING, query.device)
    else:
        wide = tuned.get("wide", {"above": head_dim})
        tuned = tuned | (wide if head_dim > wide["above"] else {})
        tuned |= tuned.get("float8", {}) if values["k_cache"].dtype in FP8 else {}

    def stride(tensor, axis):
        """Returns the stride of an axis before the last two, in rows of HEAD_DIM."""
        return 0 if tensor is None or tensor.dim() < axis + 3 else tensor.stride(axis) // head_dim

    token_axis = 0 if query.dim() == 3 else 1
    arguments = {
        "query_ptr": query,
        "tree_mask_ptr": tree_mask,
        "draft_key_ptr": draft_key,
        "draft_value_ptr": draft_value,
        "qo_indptr_ptr": values.get("qo_indptr"),
        "positions_ptr": positions,
        "key_positions_ptr": positions if key_positions is None else key_positions,
        "sinks_ptr": values["sinks"],
        "k_scale_ptr": k_scale,
        "v_scale_ptr": values["v_scale"],
        "output_ptr": out[0],
        "lse_ptr": out[1],
        "scale": (head_dim**-0.5 if values["sm_scale"] is None else values["sm_scale"]) * LOG2_E,
        "soft_cap": None if values["soft_cap"] is None else float(values["soft_cap"]),
        "window": window,
        "reach": None if window is None else window - (drafts != ""),
        "batch_size": len(cache["lengths_ptr"]),
        "num_query": num_query,
        "num_rows": out[1].numel() // max(num_heads, 1),
        "num_drafts": num_drafts,
        "num_words": 0 if tree_mask is None else tree_mask.shape[-1],
        "stride_query_batch": query.stride(0) // head_dim,
        "stride_query_token": query.stride(token_axis) // head_dim,
        "stride_draft_key_batch": stride(draft_key, 0),
        "stride_draft_key_token": stride(draft_key, token_axis),
        "stride_draft_value_batch": stride(draft_value, 0),
        "stride_draft_value_token": stride(draft_value, token_axis),
        "GROUP_SIZE": group_size,
        "DRAFTS": drafts,
        "IS_WIDENED": is_interpreting() and query.dtype == torch.bfloat16,
        "ONE_SCALE": k_scale is None or len(k_scale) == 1,
        **tile_sizes(num_query * group_size, head_dim, query.element_size(), tuned),
    }
    most_drafts_beside = num_drafts if drafts == "beside" else 0
    if is_ordered:
        ordered.launch_ordered(op, arguments, cache, tuned, most_drafts_beside=most_drafts_beside)
    else:
        arguments["plan_ptr"] = values["plan"]
        launch_chunks(op, arguments, cache, tuned, most_drafts_beside=most_drafts_beside)
