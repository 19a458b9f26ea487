"""Attention of a block of draft tokens: to a paged prefix, which all see, and to the block itself, under a tree mask.

Computes
    output = softmax(sm_scale * query . key) . value per request, query row and head, over every prefix slot
    0..prefix - 1 and the draft keys that the row sees: those whose bit is set in its mask, or (is_causal, for chains)
    those up to its own. Tree attention (SpecInfer, arXiv 2305.09781) on Flash-Decoding: the keys of the batch, prefixes
    and draft blocks, are cut into even chunks, one for each program that runs at once (shared/chunks.py), prefixes need
    no mask, and partial results merge by their log-sum-exp. One op for the target's verification (Nk = Nq = N nodes),
    for the draft's own levels (Nq = K beams see Nk = level * K keys; all of them share one reading of the prefix), and
    for chains.
Invariants
    Slots past the end are not read, nor those that a row right after the prefix would not see for its window. NaN in a
    query or in a key that is read stays in its request and KV head. Of a request of more than max_query rows, the first
    max_query are attended, and see as many draft keys at most.
    deterministic: as in gqa_decode; bits do not depend on Nq, on other rows' masks, or on the number of rows either.
    With draft keys in the pool, a row has the bits of gqa_decode over the prefix and the draft keys that it sees, side
    by side (shared/paths.py): a node those of plain decoding along its path.
Grid
    (Hkv * row tiles, chunks), one program attends a tile of (token, head of the group) rows of one KV head to a chunk.
    deterministic: (.., shares), one program attends it to a share (shared/ordered.py); past 65535, shares take two
    axes; behind the shares, programs of single nodes for the shares in which their paths are.
    Merge: (B, programs, column tiles), one program merges some columns of every programs-th tile of a request's rows.
Launches
    2; 1 if no request can have more than one part
Traffic
    2 * element bytes * Hkv * D per slot and draft key, 2 * element bytes * B * Nq * Hq * D, 8 B per mask word, and for
    the partial results of requests with more than one part 2 * 4 B * parts * Nq * Hq * (D + 1); for Nq rows of a
    request, Hq query heads and Hkv KV heads of D elements.
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

# See `split_attention`; deterministic calls use `ordered.TUNING` instead. From tiles of many rows, which read keys less
# often, to tiles of few rows, which give more programs. The first entry is taken whose from_rows rows for a KV head a
# request has, whose least_programs programs, with program_keys keys each, the batch has, and whose max_dim heads have.
_ROW = {"from_rows": 0, "least_programs": 0, "program_keys": 1 << 31, "max_dim": 256, "max_rows": 64, "min_rows": 16,
        "tile_bytes": 16384, "share_keys": 128, "programs": (2, 2), "num_warps": 4, "num_stages": 2}  # fmt: skip
_MANY = _ROW | {"from_rows": 65, "programs": (1, 1), "num_stages": 3}
TUNING = {
    "default": (_ROW,),
    "sm_90": (
        _MANY | {"least_programs": 32, "program_keys": 2048, "max_rows": 128, "num_warps": 8},
        _MANY | {"max_dim": 128, "tile_bytes": 8192},
        # rows may be empty, but the tensor cores' large instructions are used
        _ROW | {"min_rows": 64, "tile_bytes": 8192, "num_stages": 3,
                "wide": {"above": 128, "tile_bytes": 16384, "programs": (1, 1), "num_stages": 4}},
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
            args.fail("num_draft_keys", "not be given with qo_indptr, from which it follows", values["num_draft_keys"])
        if values["key_positions"] is not None:
            args.fail("key_positions", "not be given with qo_indptr: keys are at the positions of the rows", "a tensor")
        num_keys = "T"
    else:
        query = args.tensor("query", ("B", "Nq", "Hq", "D"), check.FLOAT, contiguous=2)
        batch, num_query, rows = "B", args.size("Nq"), ("B", "Nq")
        if values["max_query"] is not None:
            args.fail("max_query", "not be given without qo_indptr, where Nq says it", values["max_query"])
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
    paged_cache.check_plan(args, batch if is_ragged else args.size("B"))
    num_rows = query.shape[0] if is_ragged else args.size("B") * num_query
    if bool(values["is_causal"]) == (values["tree_mask"] is not None):
        given = "both" if values["is_causal"] else "neither"
        args.fail("exactly one of tree_mask and is_causal=True", "be given", given)
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
            args.fail("positions", "be given with window and tree_mask, as a mask does not hold depths", None)
        if positions is not None and num_keys not in (num_query, "T") and values["key_positions"] is None:
            args.fail("key_positions", "be given with window where the numbers of rows and draft keys differ", None)
    paged_cache.debug_cache(args, lambda filled: _seen_slots(values, filled, num_keys))
    return Output(args.spec(tuple(query.shape), query.dtype), args.spec(tuple(query.shape[:-1]), torch.float32))


def _seen_slots(values: dict, filled: torch.Tensor, num_keys) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first slot that each request's rows see, and the end of them, the draft block's included."""
    if values["qo_indptr"] is None:
        counted = most = torch.full_like(filled, num_keys)
    else:
        counted = values["qo_indptr"].diff().clamp(min=0).to(torch.int64)
        most = counted.clamp(max=values["max_query"])
    prefix, stop = filled, filled
    if values["draft_key"] is None and values["kv_indptr"] is not None:
        prefix = (filled - counted).clamp(min=0)
    elif values["draft_key"] is None:
        stop = torch.where(filled > 0, filled + most, 0)
    return paged_cache.first_seen(prefix, values["window"]), torch.where(counted > 0, stop, 0)


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

    Symbols: B requests, Nq rows of a request (draft tokens, 1..256), Nk draft keys of a request, Hq query heads, Hkv
    KV heads (Hq is a multiple of Hkv), D elements of a head, 4..256. Integers may be int32 or int64. The page table
    is either `block_table` with `seq_lens`, or `kv_indptr` with `kv_indices` and `last_page_len`. With `qo_indptr`
    requests differ in their number of rows, and all T rows come one after another.

    This serves verification (Nk = Nq nodes of a tree), the levels of a draft (Nq beams see the draft keys of all levels
    so far) and chains (`is_causal`).

    Args:
        query: [B, Nq, Hq, D] fp16, bf16 or fp32; [T, Hq, D] with `qo_indptr`. All axes but the last two may be strided.
        k_cache, v_cache: [num_pages, page_size, Hkv, D] fp16, bf16 or fp32 as `query`, or fp8 with a 16-bit `query`:
            float8_e4m3fn or float8_e4m3fnuz. page_size is a power of two in 1..256. Pages may be strided.
        tree_mask: None or [B, Nq, W] int64; [T, W] with `qo_indptr`. Bit j % 64 of word j // 64: the row sees draft key
            j. W is at least ceil(Nk / 64), with `qo_indptr` ceil(max_query / 64); bits from Nk on are ignored. Either
            this or `is_causal`.
        num_draft_keys: Nk, 1..512. None: Nq. Not with `qo_indptr`, where a request has as many draft keys as rows.
        draft_key, draft_value: None or [B, Nk, Hkv, D] fp16, bf16 or fp32 as `query`; [T, Hkv, D] with `qo_indptr`. The
            draft block; both or neither. All axes but the last two may be strided. None: it is in the pool.
        qo_indptr: None or [B + 1] int. Request b has the rows query[qo_indptr[b]:qo_indptr[b + 1]].
        positions: None or [B * Nq] int; [T] with `qo_indptr`. Positions of the rows, none of them within the prefix.
            Read only with `window`, where a `tree_mask` needs them; a chain without them follows the prefix.
        key_positions: None or [B * Nk] int. Positions of the draft keys; None: those of the rows. Read only with
            `window`, and needed there with `positions` if Nk is not Nq. Not with `qo_indptr`.
        block_table: None or [B, max_pages] int. Page ids of each request. Rows may be strided.
        seq_lens: None or [B] int. Slots of each request's prefix. Without `draft_key` the draft block is in the slots
            after it.
        kv_indptr: None or [B + 1] int. Request b has the page ids kv_indices[kv_indptr[b]:kv_indptr[b + 1]].
        kv_indices: None or [*] int. Page ids of all requests.
        last_page_len: None or [B] int. Filled slots of each request's last page. Its filled slots,
            (pages - 1) * page_size + last_page_len, are the prefix; without `draft_key` the last ones are the draft
            block.
        sinks: None or [Hq] fp16, bf16 or fp32. One more logit of each head, which takes probability and has no value.
        k_scale, v_scale: None, or [1] or [Hkv] fp32. Factors of the cached keys and values, at least 0; both or
            neither. Not applied to `draft_key` and `draft_value`.
        is_causal: the draft block is a chain, and its rows are the last Nq of the Nk draft keys; each sees those up to
            its own.
        max_query: the most rows of a request, 1..256. Needed with `qo_indptr`, and only there.
        sm_scale: factor of the logits, above 0. None: 1 / sqrt(D).
        soft_cap: above 0; logits become soft_cap * tanh(logits / soft_cap). None: they stay.
        window: at least 1; a row at position p sees the keys at positions above p - window. None: all.
        deterministic: a row's bits do not depend on the batch or the rows around it. With draft keys in the pool they
            are those of `gqa_decode` over the keys that the row sees: of plain decoding along a node's path, with
            sliding windows, too. Takes longer.
        plan: None or [B + 1] int32. What `plan_attention` made of the same lengths and draft keys, for all layers that
            have one window; without it every call sums up the lengths. A deterministic call does not need it.
        out: two tensors to write into.

    Returns:
        A named tuple:
        output: [B, Nq, Hq, D] fp16, bf16 or fp32, as `query`; [T, Hq, D] with `qo_indptr`. Sum of the values, weighted
            by the softmax of the logits.
        lse: [B, Nq, Hq] fp32; [T, Hq] with `qo_indptr`. Natural logarithm of the sum of exp(logits), with the sink.
        A row that sees no key has output 0 and lse -inf (or its sink). All rows are written, but with `qo_indptr` not
        those of no request, nor those past the first max_query of a request.

    Raises:
        ValueError, TypeError: an argument of a wrong shape, dtype, device or range, none or two forms of a page table,
            arguments that exclude or need each other as above, or a float8 dtype that the GPU does not have; the
            message names the argument.
        Not checked, unless EAGLE_KERNELS_DEBUG=1: that `qo_indptr` ascends within 0..T and `kv_indptr` within
        0..len(kv_indices), that no request has more than max_query rows, that lengths are not negative and at most what
        the page table holds, with the draft keys where they are in the pool, and that page ids of slots that are seen
        lie within the pool. Pages outside it are never read. A row of block_table that is -1 throughout, and one
        without a prefix, may pad the batch: its draft keys are not checked.
        Never checked: values of draft keys must be finite, whether a row sees them or not.

    Source:
        SpecInfer, https://arxiv.org/abs/2305.09781 (tree attention), on Flash-Decoding; sinks as in gpt-oss. Page
        tables are those of vLLM (block_table) and of FlashInfer and SGLang (kv_indptr). The packed mask is
        eagle_kernels' own.

    Example:
        >>> k_cache, v_cache = torch.zeros(1, 1, 1, 16), torch.full((1, 1, 1, 16), 4.0)  # a prefix of one key, value 4
        >>> draft_value = torch.tensor([0.0, 5.0, 8.0]).repeat_interleave(16).view(1, 3, 1, 16)
        >>> result = eagle_kernels.tree_attention(
        ...     torch.zeros(1, 3, 1, 16), k_cache, v_cache, torch.tensor([[[0b001], [0b011], [0b101]]]),
        ...     draft_key=torch.zeros(1, 3, 1, 16), draft_value=draft_value,
        ...     block_table=torch.tensor([[0]]), seq_lens=torch.tensor([1]))
        >>> [round(mean, 3) for mean in result.output[0, :, 0, 0].tolist()]  # of 4, 0; of 4, 0, 5; of 4, 0, 8
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
        drafts="beside" if draft_key is not None else "behind" if kv_indptr is None else "counted",
    )
    return out
