"""Attention of a block of draft tokens: to a paged prefix, which all see, and to the block itself, under a tree mask.

Computes
    softmax(sm_scale * query . key) . value per query row and head, over the slots 0..prefix - 1 and the draft keys that
    the row sees. Prefixes need no mask. All keys of the batch, draft blocks included, are cut into even chunks, one for
    each program that runs at once (shared/chunks.py); partial results merge by their log-sum-exp. The beams of a draft
    level share one reading of the prefix.
Invariants
    Slots past the end are not read, nor those that a row right after the prefix would not see for its window. NaN in a
    query or in a key that is read stays in its request and KV head, or in the heads that are read as one with it, as in
    gqa_decode. Of a request of more than max_query rows, the first
    max_query are attended, and see at most max_query draft keys.
    deterministic: as in gqa_decode; bits do not depend on Nq, on other rows' masks, or on the number of rows either.
    With draft keys in the pool, the prefix and the draft keys that a row sees are read side by side.
Grid
    (Hkv * row tiles, chunks), one program attends a tile of (token, head of the group) rows of one KV head to a chunk.
    deterministic: (.., shares), one program attends it to a share (shared/ordered.py); past 65535, shares take two
    axes; after the shares come programs of single nodes for the shares in which their paths are.
    Merge: (B, programs, column tiles), one program merges some columns of every programs-th tile of a request's rows.
Launches
    2; 1 if no request can have more than one part
Traffic
    2 * element bytes * Hkv * D per slot and draft key, 2 * element bytes * B * Nq * Hq * D, 8 B per mask word, and for
    the partial results of requests with more than one part 2 * 4 B * parts * Nq * Hq * (D + 1)
"""

from __future__ import annotations

import torch

from ...primitives import paging
from ...runtime import check, tuning
from ...runtime.language import triton
from ...runtime.launch import launcher
from .shared import paged_cache
from .shared.attention import Output
from .shared.drafts import check_mask, check_positions, check_rows, seen_slots
from .shared.split_attention import launch_attention

# bench/results/NVIDIA_H100_80GB_HBM3/tuning/attention.txt
# See `split_attention`; deterministic calls use `ordered.TUNING` instead. From tiles of many rows, which read keys less
# often, to tiles of few rows, which give more programs. The first entry is taken whose from_rows rows for a KV head a
# request has, whose least_programs programs, with program_keys keys each, the batch has, and whose max_dim heads have.
_ROW = {"from_rows": 0, "least_programs": 0, "program_keys": 1 << 31, "max_dim": 512, "max_rows": 64, "min_rows": 16,
        "tile_bytes": 16384, "share_keys": 128, "programs": (2, 2), "num_warps": 4, "num_stages": 2,
        "widest": {"min_rows": 16, "max_rows": 32, "programs": (1, 1), "num_warps": 8}}  # fmt: skip
_MANY = _ROW | {"from_rows": 65, "programs": (1, 1), "num_stages": 3}
# rows may be empty, but the tensor cores' large instructions are used
_FEW = _ROW | {"min_rows": 64, "tile_bytes": 8192, "num_stages": 3,
               "wide": {"above": 128, "min_rows": 16, "tile_bytes": 32768, "programs": (1, 1), "num_stages": 3},
               "widest": _ROW["widest"] | {"tile_bytes": 32768, "num_stages": 3}}  # fmt: skip
TUNING = {
    "default": (_ROW,),
    # whose warps have 64 threads
    "gfx942": (_ROW | {"widest": _ROW["widest"] | {"num_warps": 4, "num_stages": 1}},),
    "gfx950": (_ROW | {"widest": _ROW["widest"] | {"num_warps": 4}},),
    "sm_90": (
        _MANY | {"max_dim": 256, "least_programs": 32, "program_keys": 2048, "max_rows": 128, "num_warps": 8},
        _MANY | {"max_dim": 128, "tile_bytes": 8192},
        _FEW | {"from_rows": 65},
        # one tile of 64 rows, as chains of 8 have: more stages of fewer keys in 16 bits
        _FEW | {"from_rows": 33, "wide": _FEW["wide"] | {"tile_bytes": 16384, "num_stages": 4},
                "float8": {"num_stages": 3}},
        _FEW,
    ),
}  # fmt: skip


def contract(values: dict) -> Output:
    """Checks the arguments of `tree_attention` and describes its outputs."""
    args = check.Arguments("tree_attention", values)
    rows = check_rows(args)
    query, is_ragged, num_keys = rows.query, rows.is_ragged, rows.num_keys
    paged_cache.check_cache(args, query.dtype, rows.batch)
    paged_cache.check_logits(args)
    paged_cache.check_plan(args, rows.batch if is_ragged else args.size("B"))
    check_mask(args, rows)
    if (values["draft_key"] is None) != (values["draft_value"] is None):
        missing, given = ("draft_key", "draft_value")[:: 1 if values["draft_key"] is None else -1]
        args.fail(missing, f"be given with {given}", None)
    for name in ("draft_key", "draft_value"):
        shape = ("T", "Hkv", "D") if is_ragged else ("B", num_keys, "Hkv", "D")
        draft = args.tensor(name, shape, (query.dtype,), optional=True, contiguous=2)
        if draft is not None:
            paging.check_row_strides(args, name, draft, len(rows.axes))
    check_positions(args, rows)
    is_beside = values["draft_key"] is not None
    paged_cache.debug_cache(args, lambda filled: seen_slots(values, filled, num_keys, is_beside))
    return Output(args.spec(tuple(query.shape), query.dtype), args.spec(tuple(query.shape[:-1]), torch.float32))


def _choose_tuning(values: dict, num_query: int) -> dict:
    """Returns the tuning entry for the most rows and keys that there can be."""
    query, table = values["query"], values["block_table"]
    num_heads, head_dim = query.shape[-2:]
    _, page_size, num_kv_heads, _ = values["k_cache"].shape
    num_rows = num_query * (num_heads // num_kv_heads)
    # the CSR form has the pages of all requests together
    batch_size, num_pages = (1, len(values["kv_indices"])) if table is None else table.shape
    *rows, last = tuning.row(TUNING, query.device)
    for row in rows:
        row_tiles = batch_size * num_kv_heads * triton.cdiv(num_rows, row["max_rows"])
        programs = row_tiles * triton.cdiv(num_pages * page_size, row["program_keys"])
        if head_dim <= row["max_dim"] and num_rows >= row["from_rows"] and programs >= row["least_programs"]:
            return row
    return last


@launcher
def tree_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tree_mask: torch.Tensor | None = None,
    *,
    num_draft_keys: int | None = None,
    draft_key: torch.Tensor | None = None,
    draft_value: torch.Tensor | None = None,
    qo_indptr: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    last_page_len: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    is_causal: bool = False,
    max_query: int | None = None,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    deterministic: bool = False,
    plan: torch.Tensor | None = None,
    out: Output | None = None,
) -> Output:
    """Attends draft tokens to the prefix in the KV cache and to the draft keys that a tree mask allows.

    It serves verification (Nk = Nq nodes), levels of a draft (Nq beams see the draft keys of all levels so far) and
    chains (`is_causal`).

    Symbols: B requests, Nq = 1..256 rows (draft tokens) and Nk draft keys of each, Hq query heads, a multiple of the
    Hkv KV heads, of D = 4..512 elements. Calls with `qo_indptr` are ragged: T rows of all requests, one request after
    another, each with a draft key for each row.

    Args:
        query: [B, Nq, Hq, D] fp16, bf16 or fp32; ragged [T, Hq, D]. All axes but the last two may be strided.
        k_cache, v_cache: [num_pages, page_size, Hkv, D], dtype of `query`, or float8_e4m3fn, float8_e4m3fnuz or int8
            if `query` is 16-bit. page_size: a power of two, 1..256. Pages, slots and heads may be strided by multiples
            of D, slots and heads of both caches alike: as parts of one tensor, or heads outside of slots.
        tree_mask: None or [B, Nq, W] int64; ragged [T, W]. Bit j % 64 of word j // 64: the row sees draft key j. W is
            at least ceil(Nk / 64), ragged ceil(max_query / 64); bits from Nk on are ignored. None: `is_causal`.
        num_draft_keys: Nk, 1..512. None: Nq. Not for ragged calls.
        draft_key, draft_value: None or [B, Nk, Hkv, D], dtype of `query`; ragged [T, Hkv, D]. The draft block, which
            may be strided as `query`; both or neither. None: it is in the pool.
        qo_indptr: None or [B + 1] int. Request b has the rows query[qo_indptr[b]:qo_indptr[b + 1]].
        positions: None or [B * Nq] int; ragged [T]. Positions of the rows, none within the prefix. Read only with
            `window`, where a `tree_mask` needs them; a chain without them follows the prefix.
        key_positions: None or [B * Nk] int. Positions of the draft keys; None: those of the rows. Read only with
            `window`, and needed there with `positions` if Nk is not Nq. Not for ragged calls.
        block_table, seq_lens: None, or [B, max_pages] and [B] int. A page table as in vLLM: page ids (rows may be
            strided) and slots of each request's prefix. Without `draft_key` the draft block is in the slots after it.
        kv_indptr, kv_indices, last_page_len: None, or [B + 1], [*] and [B] int. A CSR one, as in FlashInfer and SGLang:
            request b has the pages kv_indices[kv_indptr[b]:kv_indptr[b + 1]], the last with last_page_len[b] filled
            slots. These are the prefix; without `draft_key` the last ones are the draft block.
        sinks: None or [Hq] fp16, bf16 or fp32. An extra logit per head, without a value.
        k_scale, v_scale: None, or [1] or [Hkv] fp32. Factors of cached keys and values, not of `draft_key` and
            `draft_value`; at least 0; both or neither.
        is_causal: the draft block is a chain: rows are its last Nq keys, and see those up to their own. No `tree_mask`.
        max_query: the most rows of a request, 1..256. Only if ragged, and needed then.
        sm_scale: factor of the logits, above 0. None: 1 / sqrt(D).
        soft_cap: above 0; makes logits soft_cap * tanh(logits / soft_cap). None: off.
        window: at least 1; a row at position p sees the keys at positions above p - window. None: all.
        deterministic: a row's bits do not depend on rows around it; with draft keys in the pool they equal those of
            `gqa_decode` over the keys it sees, and so those of plain decoding along a node's path, even with `window`.
            Takes longer.
        plan: None or [B + 1] int32. From `plan_attention`, with the same lengths, draft keys and window. Not used if
            deterministic.
        out: two tensors to write into.

    Returns:
        A named tuple:
        output: [B, Nq, Hq, D], dtype of `query`; ragged [T, Hq, D]. The values, weighted by the softmax of the logits.
        lse: [B, Nq, Hq] fp32; ragged [T, Hq]. Log of the sum of exp(logits), sink included.
        A row that sees no key has output 0 and lse -inf (or its sink). Ragged rows of no request, and those past
        max_query of a request, are not written.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        A float8 dtype that the GPU lacks is refused. Not checked: each indptr, max_query, lengths (0 to what the pages
        hold, with draft keys in the pool), and ids of seen pages; nothing outside the pool is read. A row of
        `block_table` that is -1 throughout, or has no prefix, may pad the batch: its draft keys are not checked. Nor
        are values of draft keys, which must be finite, whether a row sees them or not.

    Source:
        SpecInfer, https://arxiv.org/abs/2305.09781 (tree attention), on Flash-Decoding; sinks as in gpt-oss. The packed
        mask is eagle_kernels' own.

    Example:
        >>> zeros, k_cache, mask = torch.zeros(1, 3, 1, 4), torch.zeros(1, 1, 1, 4), torch.tensor([[[1], [3], [5]]])
        >>> draft_value = torch.tensor([0.0, 5.0, 8.0]).repeat_interleave(4).view(1, 3, 1, 4)
        >>> result = eagle_kernels.tree_attention(
        ...     zeros, k_cache, k_cache + 4, mask, draft_key=zeros, draft_value=draft_value,
        ...     block_table=torch.tensor([[0]]), seq_lens=torch.tensor([1]))  # a prefix of one key, value 4
        >>> result.output[0, :, 0, 0].round(decimals=3).tolist()  # of 4, 0; of 4, 0, 5; of 4, 0, 8
        [2.0, 3.0, 4.0]
    """
    values = locals()
    out = check.allocate("tree_attention", contract(values), out)
    num_query = query.shape[1] if qo_indptr is None else max_query
    launch_attention(
        "tree_attention",
        values,
        out,
        tuned=_choose_tuning(values, num_query),
        num_query=num_query,
        num_drafts=num_query if num_draft_keys is None else num_draft_keys,
        drafts="beside" if draft_key is not None else "after" if kv_indptr is None else "counted",
    )
    return out
