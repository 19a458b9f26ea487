"""Attention whose keys are split over programs: what gqa_decode launches, and tree_attention with its draft block.

A program attends with a tile of rows to shares of requests' keys (`share.py`): even chunks of the batch (`chunks.py`),
or, where bits must not depend on the batch, shares that positions alone decide (`ordered.py`). A second kernel merges
the rows of requests that have several parts (`merge_shares.py`).
"""

from __future__ import annotations

import torch

from ....primitives.paging import slot_strides
from ....runtime import tuning
from ....runtime.launch import bundle
from . import ordered
from .attention import Output
from .batch import Shape
from .chunks import launch_chunks
from .paged_cache import Lengths, cache_arguments
from .share import Inputs
from .softmax import LOG2_E, tile_sizes, tuned_for

JOINED_COLUMNS = 128  # of heads that are read as one, at most

# A row of an op's TUNING has the compiler's options, and
#     for tiles       at most max_rows and at least min_rows rows, and tile_bytes of keys
#     for chunks      at least share_keys keys, and `programs` programs for a multiprocessor, see `chunks.count_chunks`
#     wide, float8    what differs with heads of more elements than its `above`, and with keys of 8 bits
#     widest          with heads past 256 elements: registers hold the sums of 32 rows


def launch_attention(
    op: str, values: dict, out: Output, *, tuned: dict, num_query: int, num_drafts: int, drafts: str
) -> None:
    """Launches the attention that an op's checked arguments describe, into `out`.

    values: the op's arguments, None where it has none; v_cache is None where values are the first elements of the keys.
    tuned: the op's tuning row. num_query: tokens of a request, at most. num_drafts: draft keys of a request, if ragged
    at most. drafts: where they are, see `batch.slot_range`.
    """
    query, draft_key, draft_value = values["query"], values.get("draft_key"), values.get("draft_value")
    tree_mask, window = values.get("tree_mask"), values["window"]
    k_cache, v_cache = values["k_cache"], values["v_cache"]
    one_scale = values["k_scale"] is None or len(values["k_scale"]) == 1
    is_csr, is_ordered = values["block_table"] is None, values["deterministic"]
    if is_ordered:
        tuned = tuning.row(ordered.TUNING, query.device)
    tuned = tuned_for(tuned, k_cache.shape[-1], k_cache.element_size() == 1)
    joined = 1
    if not is_ordered and one_scale and query.element_size() == 2:
        tensors = [tensor for tensor in (k_cache, v_cache, draft_key, draft_value) if tensor is not None]
        joined = _num_joined(num_query * query.shape[-2], tensors, tuned["min_rows"])
        k_cache, v_cache, draft_key, draft_value = (
            _join(tensor, joined) for tensor in (k_cache, v_cache, draft_key, draft_value)
        )
    _, page_size, num_kv_heads, head_dim = k_cache.shape
    group_size, token_axis = query.shape[-2] // num_kv_heads, query.dim() - 3
    block_row, block_key = tile_sizes(num_query * group_size, head_dim, query.element_size(), tuned)
    share_tiles = max(1, tuned["share_keys"] // block_key) if is_ordered else 0

    def stride(tensor, axis):
        """Returns the stride of an axis before the last two, in rows of HEAD_DIM."""
        return 0 if tensor is None else tensor.stride(axis) // tensor.shape[-1]

    arguments = {
        "inputs": bundle(Inputs, values),
        "lengths": bundle(Lengths, values),
        "out": out,
        "scale": (query.shape[-1] ** -0.5 if values["sm_scale"] is None else values["sm_scale"]) * LOG2_E,
        "soft_cap": None if values["soft_cap"] is None else float(values["soft_cap"]),
        "window": window,
        "reach": None if window is None else window - (drafts != ""),
        "batch_size": len(values["last_page_len" if is_csr else "seq_lens"]),
        "num_query": num_query,
        "num_rows": out.lse.numel() // max(query.shape[-2], 1),
        "num_drafts": num_drafts,
        "num_words": 0 if tree_mask is None else tree_mask.shape[-1],
        **cache_arguments(
            k_cache, k_cache if v_cache is None else v_cache, values["kv_indices" if is_csr else "block_table"]
        ),
        "stride_query_batch": stride(query, 0),
        "stride_query_token": stride(query, token_axis),
        "stride_draft_key_batch": stride(draft_key, 0),
        "stride_draft_key_token": stride(draft_key, token_axis),
        "stride_draft_value_batch": stride(draft_value, 0),
        "stride_draft_value_token": stride(draft_value, token_axis),
        "SHAPE": Shape(
            group_size,
            num_kv_heads,
            head_dim,
            page_size,
            *slot_strides(k_cache),
            one_scale,
            block_key,
            drafts,
            share_tiles,
            joined,
            out.output.shape[-1] if v_cache is None else 0,
        ),
        "BLOCK_ROW": block_row,
    }
    launch_parts = ordered.launch_ordered if is_ordered else launch_chunks
    launch_parts(op, arguments, tuned)


def _num_joined(num_rows: int, tensors: list[torch.Tensor], min_rows: int) -> int:
    """Returns how many KV heads count as one head, so that their rows fill a tile of min_rows rows and of 128 columns.

    num_rows: of all heads of a request. tensors: keys and values [.., Hkv, D].
    """
    num_heads, head_dim = tensors[0].shape[-2:]
    joined = 1
    if head_dim not in (16, 32, 64):  # without columns that count as 0
        return joined
    while (
        2 * joined * head_dim <= JOINED_COLUMNS
        and 2 * joined * num_rows <= min_rows * num_heads
        and num_heads % (2 * joined) == 0
        and all(tensor.stride(-2) == head_dim for tensor in tensors)
        and all(stride % (2 * joined * head_dim) == 0 for tensor in tensors for stride in tensor.stride()[:-2])
    ):
        joined *= 2
    return joined


def _join(tensor: torch.Tensor | None, joined: int) -> torch.Tensor | None:
    return tensor if joined == 1 or tensor is None else tensor.unflatten(-2, (-1, joined)).flatten(-2)
