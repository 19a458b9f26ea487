"""Attention of a block of draft tokens: to a paged prefix, which all see, and to the block itself, under a tree mask.

Computes
    output = softmax(sm_scale * query . key) . value per request, query row and head, over every prefix slot
    0..prefix - 1 and the draft keys that the row sees: those whose bit is set in its mask, or (is_causal, for chains)
    those up to its own. Tree attention (SpecInfer, arXiv 2305.09781) on Flash-Decoding: prefix and draft block are cut
    into shares (shared/shares.py), the prefix needs no mask, and partial results merge by their log-sum-exp. One op
    for the target's verification (Nk = Nq = N), for the draft's own levels (Nq = K beams see Nk = level * K keys; all
    of them share one reading of the prefix), and for chains.
    soft_cap, sinks, k_scale, v_scale: as in gqa_decode; the scales are those of the pool, separate draft keys have
    none. window: a row at position p sees keys at positions above p - window; siblings share a position.
Shapes
    query          [B, Nq, Hq, D]                  float  Nq in 1..256; D in 16..256; Hq a multiple of Hkv;
                                                          the axes B and Nq may be strided; or, with qo_indptr,
                   [T, Hq, D]                             the rows of all requests one after another
    qo_indptr      [B + 1]                         int    where a request's rows start; its draft block has as many keys
    k_cache        [num_pages, page_size, Hkv, D]  as query, or fp8 with 16-bit queries; page_size a power of
                                                          two in 1..256; pages may be strided
    v_cache        as k_cache
    tree_mask      [B, Nq, W] or [T, W]            int64  bit j % 64 of word j // 64: the row sees draft key j;
                                                          W >= ceil(Nk / 64), bits from Nk on are ignored
    num_draft_keys int                                    Nk in 1..512, by default Nq; at least Nq with is_causal;
                                                          not with qo_indptr
    draft_key      [B, Nk, Hkv, D] or [T, Hkv, D]  as query; the draft block's keys, all axes but the last two may be
                                                          strided; without it they are in the pool, at the slots
                                                          prefix..prefix + Nk - 1
    draft_value    as draft_key
    positions      [B * Nq] or [T]                 int    of rows, at or past the prefix; needed with window and
                                                          tree_mask; chains: by default they follow the prefix
    key_positions  [B * Nk]                        int    of draft keys, where they are not those of the rows
    block_table    [B, max_pages]                  int    page ids, with
    seq_lens       [B]                             int    prefix
    kv_indptr      [B + 1]                         int    or: where a request's page ids start, with
    kv_indices     [*]                             int    page ids, and
    last_page_len  [B]                             int    filled slots of the last page; all filled slots,
                                                          (pages - 1) * page_size + last_page_len, are the prefix, and
                                                          without draft_key the draft block
    sinks          [Hq]                            float  or None
    k_scale        [1] or [Hkv]                    fp32   or None
    v_scale        as k_scale
    -> output      as query
    -> lse         [B, Nq, Hq] or [T, Hq]          fp32, natural logarithm
Invariants
    A row that sees no key has output 0 and lse -inf (or its sink). Slots past the end are not read, nor those that a
    row right after the prefix would not see for its window, nor pages outside the pool; page ids of the other slots of
    the prefix must lie within it. Values of draft keys must be finite, seen or not. NaN in a query or in a key that is
    read stays in its request and KV head.
    Ragged: of a request of more than max_query rows that many are attended, and see as many draft keys at most; rows of
    no request are not written.
    deterministic: as in gqa_decode; bits do not depend on Nq, on other rows' masks, or on the number of rows either.
Grid
    (Hkv * row tiles, shares), one program attends a tile of (token, head of the group) rows of one KV head to a share;
    merge: (B, programs), one program merges every programs-th tile of a request's rows.
Launches
    2; 1 if no request can have more than one share
Traffic
    2 * element bytes * Hkv * D per slot and draft key, 2 * element bytes * B * Nq * Hq * D, 8 B per mask word, and for
    the partial results of requests with more than one share 2 * 4 B * shares * Nq * Hq * (D + 1).
"""

from __future__ import annotations

import torch

from ...primitives import paging
from ...runtime import check, tuning
from ...runtime.language import triton
from ...runtime.launch import launcher
from .shared import paged_cache
from .shared.attention import Output
from .shared.split_attention import launch_attention

MAX_QUERY = 256
MAX_DRAFT_KEYS = 512

# See `split_attention.ORDERED_TUNING`. From tiles of many rows, which read keys less often, to tiles of few rows, which
# give more programs. The first entry is taken whose from_rows rows for a KV head a request has, and whose
# least_programs programs, with program_keys keys each, the batch has.
_ROW = {"from_rows": 0, "least_programs": 0, "program_keys": 1 << 31, "max_rows": 64, "min_rows": 16,
        "tile_bytes": 16384, "share_keys": 128, "programs": 264, "merged_rows": 4, "merged_parts": 16, "num_warps": 4,
        "num_stages": 2}  # fmt: skip
_MANY = _ROW | {"from_rows": 65, "programs": 132}
TUNING = {
    "default": (_ROW,),
    "sm_90": (
        _MANY | {"from_rows": 129, "least_programs": 132, "max_rows": 256, "num_warps": 16, "num_stages": 3,
                 "maxnreg": 128},
        _MANY | {"least_programs": 32, "program_keys": 2048, "max_rows": 128, "num_warps": 8, "num_stages": 4},
        _MANY | {"tile_bytes": 8192, "merged_parts": 4, "num_stages": 3},
        # for few rows, and for large heads: rows may be empty, but the tensor cores' large instructions are used
        _ROW | {"min_rows": 64, "programs": 132, "num_stages": 4},
    ),
}  # fmt: skip


def contract(values: dict) -> Output:
    """Checks the arguments of `tree_attention` and describes its outputs."""
    args = check.Arguments("tree_attention", values)
    is_ragged = values["qo_indptr"] is not None
    if is_ragged:
        query = args.tensor("query", ("T", "Hq", "D"), check.FLOAT, contiguous=2)
        num_query, rows = args.integer("max_query", 1, MAX_QUERY), ("T",)
        batch = paged_cache.check_bounds(args, args.size("T"))
        if values["num_draft_keys"] is not None:
            args.fail("num_draft_keys", "not be given with qo_indptr, which tells it", values["num_draft_keys"])
        if values["key_positions"] is not None:
            args.fail("key_positions", "not be given with qo_indptr: keys are at the positions of the rows", "a tensor")
        num_keys = "T"
    else:
        query = args.tensor("query", ("B", "Nq", "Hq", "D"), check.FLOAT, contiguous=2)
        batch, num_query, rows = "B", args.size("Nq"), ("B", "Nq")
        if values["max_query"] is not None:
            args.fail("max_query", "be given with qo_indptr, else Nq tells it", values["max_query"])
        if not 1 <= num_query <= MAX_QUERY:
            args.fail("query", f"have Nq in 1..{MAX_QUERY}", num_query)
        num_keys = num_query
        if values["num_draft_keys"] is not None:
            num_keys = args.integer("num_draft_keys", 1, MAX_DRAFT_KEYS)
            if values["is_causal"] and num_keys < num_query:
                args.fail("num_draft_keys", f"be at least Nq = {num_query} with is_causal", num_keys)
    paging.check_row_strides(args, "query", query, len(rows))
    paged_cache.check_cache(args, query.dtype, batch)
    paged_cache.check_logits(args)
    num_rows = query.shape[0] if is_ragged else args.size("B") * num_query
    if bool(values["is_causal"]) == (values["tree_mask"] is not None):
        args.fail("tree_mask", "be given, or is_causal be True, and not both", f"is_causal={values['is_causal']}")
    tree_mask = args.tensor("tree_mask", (*rows, None), (torch.int64,), optional=True)
    most_keys = num_query if is_ragged else num_keys
    if tree_mask is not None and tree_mask.shape[-1] * 64 < most_keys:
        args.fail("tree_mask", f"hold a bit for each of {most_keys} draft keys", f"{tree_mask.shape[-1]} words")
    if (values["draft_key"] is None) != (values["draft_value"] is None):
        missing, given = ("draft_key", "draft_value")[:: 1 if values["draft_key"] is None else -1]
        args.fail(missing, f"be given with {given}", None)
    for name in ("draft_key", "draft_value"):
        shape = ("T", "Hkv", "D") if is_ragged else ("B", num_keys, "Hkv", "D")
        draft = args.tensor(name, shape, (query.dtype,), optional=True, contiguous=2)
        if draft is not None:
            paging.check_row_strides(args, name, draft, len(rows))
    positions = args.tensor("positions", (num_rows,), check.INTEGER, optional=True)
    if not is_ragged:
        args.tensor("key_positions", (args.size("B") * num_keys,), check.INTEGER, optional=True)
    if values["window"] is not None:
        if positions is None and tree_mask is not None:
            args.fail("positions", "be given with window and tree_mask: depths are not in the mask", None)
        if positions is not None and num_keys not in (num_query, "T") and values["key_positions"] is None:
            args.fail("key_positions", "be given with window where rows and draft keys differ", None)
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
        # registers do not hold as many rows of larger heads
        if head_dim <= 128 and num_rows >= row["from_rows"] and programs >= row["least_programs"]:
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
    out: Output | None = None,
) -> Output:
    """Attends draft tokens to their prefix and their ancestors; shapes and layouts are in the module's docstring.

    num_draft_keys: Nk, keys of the draft block: the tree's nodes, or the beams of all levels drafted so far.
    draft_key, draft_value: the draft block; without them it is read from the pool, after the prefix.
    max_query: with qo_indptr, the most rows that a request can have.
    The page table is either block_table with seq_lens, or kv_indptr with kv_indices and last_page_len.
    sm_scale: factor of the logits, by default 1 / sqrt(D).
    deterministic: a row's bits do not depend on the batch around it; takes longer.
    """
    values = locals()
    contracted = contract(values)
    out = check.allocate("tree_attention", contracted, out)
    device = query.device
    num_query = query.shape[1] if qo_indptr is None else max_query
    drafts = "beside" if draft_key is not None else "behind" if kv_indptr is None else "counted"
    launch_attention(
        "tree_attention",
        values,
        out,
        tuned=_choose_tuning(values, num_query),
        num_query=num_query,
        num_drafts=num_query if num_draft_keys is None else num_draft_keys,
        drafts=drafts,
    )
    return out
