"""Prunes the trees of a batch to a number of rows in all: the drafts whose paths are worth most stay.

Computes: The max_rows - B drafts with the highest scores of the whole batch stay, equal ones in the order of requests
    and nodes, where all of their ancestors do. That is the case by itself where scores fall along paths, such as the
    path probabilities of EAGLE-2 (arXiv 2406.16858).
Invariants: A draft that does not see its root never stays. The sum of num_nodes is at most max_rows.
Grid: (1,), one program finds the lowest score that stays, by bisection of its bits; (B,), one program prunes a tree.
Launches: 2
Traffic: 4 B (N - 1) read, again by the last programs where scores are equal (from the cache), 16 B N (1 + ceil(N / 64))
    read and written, for trees of N nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.ordering import ordered_bits
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher
from .shared.tree_contract import MAX_NODES


class Output(NamedTuple):
    """What `prune_trees` returns."""

    draft_tokens: torch.Tensor
    tree_mask: torch.Tensor
    num_nodes: torch.Tensor


# Scores that are read at once; warps of the first kernel; nodes of a warp of the second, as in `tree_from_mask`.
TUNING = {"default": {"BLOCK_SCORE": 1024, "num_warps": 8, "nodes_per_warp": 16, "most_warps": 16}}
# the keys of scores that never stay, and of the lowest that may
NEVER = tl.constexpr(-(2**31))


@triton.jit
def _load_keys(scores_ptr, place, is_place):
    """Returns int32 keys in the order of the scores; NEVER for NaN and -inf."""
    score = tl.load(scores_ptr + place, mask=is_place, other=float("-inf")) + 0.0  # -0.0 is 0.0
    return tl.where(score > float("-inf"), ordered_bits(score), NEVER)


@triton.jit
def _count_keys(scores_ptr, stop, least, BLOCK_SCORE: tl.constexpr):
    """Returns how many of the first `stop` keys are at least `least` (int64)."""
    count = tl.zeros([BLOCK_SCORE], tl.int32)
    for start in range(0, stop, BLOCK_SCORE):
        place = start + tl.arange(0, BLOCK_SCORE)
        count += (_load_keys(scores_ptr, place, place < stop) >= least).to(tl.int32)
    return tl.sum(count)


@triton.jit(do_not_specialize=["num_scores", "num_wanted"])
def _find_cut_kernel(
    scores_ptr, max_drafts_ptr, cut_ptr, num_scores, num_wanted, BLOCK_SCORE: tl.constexpr, ENABLE_PDL: tl.constexpr
):
    """Stores the highest key that num_wanted keys reach, and how many keys that equal it stay."""
    await_predecessor(ENABLE_PDL)
    if max_drafts_ptr is not None:
        num_wanted = tl.minimum(tl.maximum(tl.load(max_drafts_ptr), 0), num_wanted).to(tl.int32)
    low = tl.full([], -(2**31) + 1, tl.int64)
    high = tl.full([], 2**31 - 1, tl.int64)
    for _ in range(32):
        middle = low + (high - low + 1) // 2
        is_reached = _count_keys(scores_ptr, num_scores, middle, BLOCK_SCORE) >= num_wanted
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle - 1)
    tl.store(cut_ptr, low)
    tl.store(cut_ptr + 1, (num_wanted - _count_keys(scores_ptr, num_scores, low + 1, BLOCK_SCORE)).to(tl.int64))


@triton.jit
def _share(scratch_ptr, values, NUM_NODES: tl.constexpr, BLOCK_NODE: tl.constexpr):
    """Lets `_shared` find the values of the nodes. Trees of one word need no memory for that."""
    if BLOCK_NODE > 64:
        node = tl.arange(0, BLOCK_NODE)
        tl.debug_barrier()  # what was shared before has been read
        tl.store(scratch_ptr + node, values.to(tl.int64), mask=node < NUM_NODES)
        tl.debug_barrier()


@triton.jit
def _shared(scratch_ptr, values, word: tl.constexpr, NUM_NODES: tl.constexpr, BLOCK_NODE: tl.constexpr):
    """Returns (nodes, their values int32) of a word: more at once would not fit into registers."""
    if BLOCK_NODE > 64:
        node = word * 64 + tl.arange(0, 64)
        return node, tl.load(scratch_ptr + node, mask=node < NUM_NODES, other=-1).to(tl.int32)
    else:
        return tl.arange(0, BLOCK_NODE), values


@triton.jit
def _load_seen(masks_ptr, node, other, word, WORDS: tl.constexpr, NUM_NODES: tl.constexpr):
    """Returns whether each node sees each other one, which are of one word."""
    bits = tl.load(masks_ptr + node * WORDS + word, mask=node < NUM_NODES, other=0)
    return ((bits[:, None] >> (other % 64).to(tl.int64)[None, :]) & 1 != 0) & (other < NUM_NODES)[None, :]


@triton.jit(do_not_specialize=["stride_draft_tokens_batch"])
def _prune_trees_kernel(
    draft_tokens_ptr, tree_mask_ptr, scores_ptr, cut_ptr, out,
    stride_draft_tokens_batch,
    NUM_NODES: tl.constexpr, BLOCK_SCORE: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Keeps and moves the nodes of one tree; until its tokens are written, their place holds what warps share."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    cut, num_equal = tl.load(cut_ptr), tl.load(cut_ptr + 1)
    BLOCK_NODE: tl.constexpr = next_power_of_2(NUM_NODES, 16)
    node = tl.arange(0, BLOCK_NODE)
    is_node = node < NUM_NODES
    first = request * (NUM_NODES - 1)
    key = _load_keys(scores_ptr, first + node - 1, (node > 0) & is_node).to(tl.int64)
    is_equal = key == cut
    if tl.max(is_equal.to(tl.int32)) > 0:
        before = _count_keys(scores_ptr, first, cut, BLOCK_SCORE) - _count_keys(scores_ptr, first, cut + 1, BLOCK_SCORE)
        earlier = before + tl.cumsum(is_equal.to(tl.int32)) - 1
        is_equal = is_equal & (earlier < num_equal)
    is_best = (key > cut) | is_equal | (node == 0)

    WORDS: tl.constexpr = (NUM_NODES + 63) // 64
    scratch_ptr = out.draft_tokens + request * NUM_NODES
    masks_ptr = tree_mask_ptr + request * NUM_NODES * WORDS
    _share(scratch_ptr, is_best.to(tl.int32), NUM_NODES, BLOCK_NODE)
    num_lost = tl.zeros([BLOCK_NODE], tl.int32)
    sees_root = node < 0
    for word in tl.static_range(WORDS):
        other, is_best_other = _shared(scratch_ptr, is_best.to(tl.int32), word, NUM_NODES, BLOCK_NODE)
        is_above = _load_seen(masks_ptr, node, other, word, WORDS, NUM_NODES) & (other[None, :] < node[:, None])
        num_lost += tl.sum((is_above & (is_best_other == 0)[None, :]).to(tl.int32), axis=1)
        sees_root = sees_root | (tl.max((is_above & (other == 0)[None, :]).to(tl.int32), axis=1) > 0)
    is_kept = is_node & ((node == 0) | (is_best & sees_root & (num_lost == 0)))

    count = tl.sum(is_kept.to(tl.int32))
    rank = tl.where(is_kept, tl.cumsum(is_kept.to(tl.int32)) - 1, -1)
    _share(scratch_ptr, rank, NUM_NODES, BLOCK_NODE)
    is_left = is_node & (node >= count)
    new_masks_ptr = out.tree_mask + request * NUM_NODES * WORDS
    for new_word in tl.static_range(WORDS):
        bits = tl.zeros([BLOCK_NODE], tl.int64)
        for word in tl.static_range(new_word, WORDS):  # nodes move forward
            other, other_rank = _shared(scratch_ptr, rank, word, NUM_NODES, BLOCK_NODE)
            is_bit = _load_seen(masks_ptr, node, other, word, WORDS, NUM_NODES) & (other[None, :] <= node[:, None])
            is_bit = is_bit & ((other_rank >= 0) & (other_rank // 64 == new_word))[None, :]
            bit = tl.full(other.shape, 1, tl.int64) << (other_rank % 64).to(tl.int64)
            bits += tl.sum(tl.where(is_bit, bit[None, :], 0), axis=1)
        tl.store(new_masks_ptr + rank * WORDS + new_word, bits, mask=is_kept)
        tl.store(new_masks_ptr + node * WORDS + new_word, tl.zeros([BLOCK_NODE], tl.int64), mask=is_left)
    if BLOCK_NODE > 64:
        tl.debug_barrier()  # all have been read
    token = tl.load(draft_tokens_ptr + request * stride_draft_tokens_batch + node, mask=is_kept, other=0)
    tl.store(scratch_ptr + rank, token.to(tl.int64), mask=is_kept)
    tl.store(scratch_ptr + node, tl.full([BLOCK_NODE], -1, tl.int64), mask=is_left)
    tl.store(out.num_nodes + request, count)


def contract(values: dict) -> Output:
    args = check.Arguments("prune_trees", values)
    args.tensor("draft_tokens", ("B", "N"), check.INTEGER, contiguous=1)
    batch_size, num_nodes = args.size("B"), args.size("N")
    if not 1 <= num_nodes <= MAX_NODES:
        args.fail("draft_tokens", f"have N in 1..{MAX_NODES}", num_nodes)
    num_words = -(-num_nodes // 64)
    args.tensor("tree_mask", ("B", "N", num_words), (torch.int64,))
    args.tensor("scores", ("B", num_nodes - 1), (torch.float32,))
    most = 2**31 - 1
    if batch_size * num_nodes > most:
        args.fail("draft_tokens", f"have at most {most} elements", batch_size * num_nodes)
    args.tensor("max_drafts", (1,), check.INTEGER, optional=True)
    max_rows = args.integer("max_rows", 0, most)
    if max_rows < batch_size:
        args.fail("max_rows", f"be at least B = {batch_size}, as every request keeps its root", max_rows)
    return Output(
        args.spec((batch_size, num_nodes), torch.int64),
        args.spec((batch_size, num_nodes, num_words), torch.int64),
        args.spec((batch_size,), torch.int32),
    )


@launcher
def prune_trees(
    draft_tokens: torch.Tensor,
    tree_mask: torch.Tensor,
    scores: torch.Tensor,
    max_drafts: torch.Tensor | None = None,
    *,
    max_rows: int,
    out: Output | None = None,
) -> Output:
    """Prunes the trees of a batch to max_rows nodes in all; the drafts with the highest scores stay.

    So requests with likely drafts get more of a step. `tree_from_mask` then gives links and positions,
    `pack_verify_rows` the target's rows.

    Args:
        draft_tokens: [B, N] int, N nodes of a tree. The root, then the drafts; ancestors come before their descendants.
            Requests may be strided.
        tree_mask: [B, N, ceil(N / 64)] int64, packed. Bits of later nodes are ignored.
        scores: [B, N - 1] fp32. The value of each draft and all above it together, such as its path's log-probability.
            Drafts with NaN or -inf never stay.
        max_drafts: None or [1] int. The most drafts that stay, for a limit decided on the device, clamped to
            0..max_rows - B. None: max_rows - B.
        max_rows: the most nodes that stay over all requests, at least B.
        out: three tensors to write into.

    Returns:
        A named tuple:
        draft_tokens: [B, N] int64. Tokens of the nodes that stay, in their order, -1 padded.
        tree_mask: [B, N, ceil(N / 64)] int64. Their masks, 0 padded, with bits of the nodes that stay.
        num_nodes: [B] int32. Nodes of each request that stay, at least 1.
        A draft stays only with all of its ancestors; ties go to the earlier request, then to the earlier node. So fewer
        than max_rows stay if an ancestor has a lower score than its descendant, or if few drafts have a score.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Source:
        eagle_kernels' own; scores as in EAGLE-2, https://arxiv.org/abs/2406.16858, compared across requests.

    Example:
        >>> pruned = eagle_kernels.prune_trees(  # two chains of three; five rows in all
        ...     torch.tensor([[7, 8, 9], [4, 5, 6]]), torch.tensor([[[1], [3], [7]], [[1], [3], [7]]]),
        ...     torch.tensor([[-0.1, -0.3], [-0.2, -1.6]]), max_rows=5)
        >>> pruned.num_nodes.tolist(), pruned.draft_tokens.tolist()
        ([3, 2], [[7, 8, 9], [4, 5, -1]])
    """
    out = check.allocate("prune_trees", contract(locals()), out)
    batch_size, num_nodes = draft_tokens.shape
    row = tuning.row(TUNING, draft_tokens.device)
    cut = torch.empty(2, dtype=torch.int64, device=draft_tokens.device)
    launch(
        "prune_trees", _find_cut_kernel, (1,),
        scores_ptr=scores, max_drafts_ptr=max_drafts, cut_ptr=cut, num_scores=scores.numel(),
        num_wanted=max_rows - batch_size,
        BLOCK_SCORE=row["BLOCK_SCORE"], num_warps=row["num_warps"],
    )  # fmt: skip
    launch(
        "prune_trees", _prune_trees_kernel, (batch_size,),
        draft_tokens_ptr=draft_tokens, tree_mask_ptr=tree_mask, scores_ptr=scores, cut_ptr=cut, out=out,
        stride_draft_tokens_batch=draft_tokens.stride(0),
        NUM_NODES=num_nodes, BLOCK_SCORE=row["BLOCK_SCORE"],
        num_warps=min(max(next_power_of_2(num_nodes) // row["nodes_per_warp"], 4), row["most_warps"]),
    )  # fmt: skip
    return out
