"""Builds a token tree of the likeliest paths through the distributions of a block, which a drafter makes in one pass.

Computes: The first num_verify_tokens nodes of a best-first search: a node is a rank at each depth down to its own, and
    its score is the sum of the log-probabilities of these tokens (DDTree, arXiv 2604.12989), with those of a selector
    between neighbours where there is one.
Invariants: A score is at most its parent's, and a tie goes to the lower depth, so a node comes after its parent and
    after its better siblings. So the best node that is not in the tree is the next child of a node in it, and one such
    child of each node is all that has to be compared; the first nodes are the best set of their number, and closed.
Grid: As in select_top_k_tokens, one program scans some chunks of a row of logits, if there are any. Then (B, 1), one
    program builds one tree: it finds the best tokens of all depths, sorts what may follow each of them, and takes one
    node after another. Each of its warps does the last on its own, with all next children in registers, so that no
    warp waits for another. FULL_MASK: (B, 1 + F), the others share the rows' prefix columns.
Launches: 2; 1 for candidates
Traffic: B D V * element size read once, or B D W * 12 (candidates), and B (D - 1) W^2 * 4 (transitions); 8 B N (6 +
    ceil(N / 64)) written, FULL_MASK 1 byte a cell, for D depths, W tokens of each and N nodes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.ordering import bits_value, comparable, ordered_bits
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launcher
from .shared.selection import NUM_LANES, largest_in_rows, scan_rows
from .shared.tree_building import store_links
from .shared.tree_contract import launch_trees, tree_contract, tree_warps
from .shared.tree_mask import TreeMask, TreeMaskMode, fill_prefix

MAX_TOPK = 16
MAX_DEPTH = 64
# Depths of a block that a warp selects tokens for, the warps of a program at most (all of which search), and how many
# numbers are compared at once where the children of a node are sorted. Not measured yet.
TUNING = {"default": {"depths_per_warp": 4, "max_warps": 8, "sorted_at_once": 8192}}

LANES = tl.constexpr(NUM_LANES)
# Below the ordered bits of all scores above -inf: a node that has no next child.
_NONE = tl.constexpr(-(2**31))


class Output(NamedTuple):
    """What `build_tree_from_blocks` returns: the tree, and what its nodes are worth."""

    tree_mask: torch.Tensor
    positions: torch.Tensor
    retrieve_index: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor
    draft_tokens: torch.Tensor
    scores: torch.Tensor


class Block(NamedTuple):
    """The candidates of a request at each depth, and room for the order in which they follow each other."""

    tokens: Any  # [D, W]
    scores: Any  # [D, W] fp32
    transitions: Any  # [D - 1, W, W] fp32 by the rank of the parent and the child's, or None
    steps: Any  # [D, P, W] fp32: scores of what follows each rank of a parent, the best first; P = 1 if it is no matter
    ranks: Any  # [D, P, W] int32: their ranks


@triton.jit
def _select_block(
    request, block, logits_ptr, scan, draft_to_target_ptr, vocab_size, num_chunks,
    DEPTH: tl.constexpr, TOPK: tl.constexpr, BLOCK_SLOT: tl.constexpr,
):  # fmt: skip
    """Writes the TOPK best tokens of each depth of a request, and their log-probabilities, to its `block`."""
    BLOCK_DEPTH: tl.constexpr = next_power_of_2(DEPTH)
    BLOCK_RANK: tl.constexpr = next_power_of_2(TOPK)
    row = tl.arange(0, BLOCK_DEPTH)[None, :, None]
    bits, token, row_max, log_sum = largest_in_rows(
        logits_ptr, vocab_size, vocab_size, num_chunks, scan, request * DEPTH + row, row < DEPTH,
        COUNT=TOPK, BLOCK_SLOT=BLOCK_SLOT,
    )  # fmt: skip
    # the maximum first: its difference from the best logits is exact or nearly so
    score = comparable((bits_value(bits) - row_max) - log_sum)
    score = bits_value(tl.max(ordered_bits(score), axis=2))
    token = tl.max(token, axis=2).to(tl.int64)
    rank = tl.arange(0, BLOCK_RANK)[:, None]
    depth = tl.arange(0, BLOCK_DEPTH)[None, :]
    is_candidate = (rank < TOPK) & (depth < DEPTH)
    if draft_to_target_ptr is not None:
        token += tl.load(draft_to_target_ptr + token, mask=is_candidate, other=0)
    tl.store(block.scores + depth * TOPK + rank, score, mask=is_candidate)
    tl.store(block.tokens + depth * TOPK + rank, token, mask=is_candidate)


@triton.jit
def _sort_block(block, DEPTH: tl.constexpr, TOPK: tl.constexpr, BLOCK_ROW: tl.constexpr):
    """Writes what may follow each parent, the best first and equal ones by rank, to `block`.
    A row is a depth and, with transitions, the rank of a parent."""
    PARENTS: tl.constexpr = 1 if block.transitions is None else TOPK
    BLOCK_RANK: tl.constexpr = next_power_of_2(TOPK)
    rank = tl.arange(0, BLOCK_RANK)
    for start in range(0, DEPTH * PARENTS, BLOCK_ROW):
        row = start + tl.arange(0, BLOCK_ROW)
        depth = row // PARENTS
        is_step = (row < DEPTH * PARENTS)[:, None] & (rank < TOPK)[None, :]
        step = tl.load(block.scores + depth[:, None] * TOPK + rank[None, :], mask=is_step, other=float("-inf"))
        if block.transitions is not None:
            transition = (row - TOPK)[:, None] * TOPK + rank[None, :]
            step += tl.load(block.transitions + transition, mask=is_step & (depth > 0)[:, None], other=0.0)
        step = tl.minimum(comparable(step), 0.0)  # no child is better than its parent
        other, own = step[:, :, None], step[:, None, :]
        is_before = (rank[None, :, None] < TOPK) & (
            (other > own) | ((other == own) & (rank[None, :, None] < rank[None, None, :]))
        )
        place = row[:, None] * TOPK + tl.sum(is_before.to(tl.int32), axis=1)
        tl.store(block.steps + place, step, mask=is_step)
        tl.store(block.ranks + place, tl.zeros_like(place) + rank[None, :], mask=is_step)


@triton.jit
def _most(values):
    """Returns the largest of [slot, warp, lane] in each warp, [1, warp, 1]."""
    return tl.max(tl.max(values, axis=0), axis=1)[None, :, None]


@triton.jit
def _search(block, budget, DEPTH: tl.constexpr, TOPK: tl.constexpr, NUM_NODES: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Takes the best nodes one after another; returns their parents, places among the candidates and scores [node].
    A parent of -1: there is no such node. Every warp computes the same on nodes [slot, warp, lane]."""
    PARENTS: tl.constexpr = 1 if block.transitions is None else TOPK
    BLOCK_NODE: tl.constexpr = next_power_of_2(NUM_NODES, 32)
    SLOTS: tl.constexpr = BLOCK_NODE // LANES
    node = tl.arange(0, SLOTS)[:, None, None] * LANES + tl.arange(0, LANES)[None, None, :]
    node += tl.zeros([SLOTS, NUM_WARPS, LANES], tl.int32)
    parents, places = tl.full(node.shape, -1, tl.int32), tl.zeros(node.shape, tl.int32)
    scores = tl.where(node == 0, 0.0, float("-inf"))
    # The next child of each node: its score, and what decides between equal ones, the less the better: 7 bits of depth,
    # 8 of the parent's number, 4 of its place among the children, 4 of the parent's rank.
    first = tl.load(block.steps + tl.zeros([1, NUM_WARPS, 1], tl.int32))
    best = tl.where((node == 0) & (first > float("-inf")), ordered_bits(first), _NONE)
    names = tl.zeros(node.shape, tl.int32)
    for number in range(1, NUM_NODES):
        bits = _most(best)
        name = -_most(tl.where(best == bits, -names, _NONE))
        is_taken = (bits != _NONE) & (number < budget)
        score = bits_value(tl.where(is_taken, bits, 0))
        depth, parent, order, parent_rank = name >> 16, (name >> 8) & 255, (name >> 4) & 15, name & 15
        step = (depth * PARENTS + (parent_rank if PARENTS > 1 else 0)) * TOPK + order
        rank = tl.load(block.ranks + step, mask=is_taken, other=0)
        child_step = ((depth + 1) * PARENTS + (rank if PARENTS > 1 else 0)) * TOPK
        to_sibling = tl.load(block.steps + step + 1, mask=is_taken & (order + 1 < TOPK), other=float("-inf"))
        to_child = tl.load(block.steps + child_step, mask=is_taken & (depth + 1 < DEPTH), other=float("-inf"))

        is_new = is_taken & (node == number)
        is_changed = is_new | (is_taken & (node == parent))
        scores = tl.where(is_new, score, scores)
        parents = tl.where(is_new, parent, parents)
        places = tl.where(is_new, depth * TOPK + rank, places)
        next_score = scores + tl.where(is_new, to_child, to_sibling)
        next_name = tl.where(is_new, ((depth + 1) << 16) | (number << 8) | rank, name + 16)
        best = tl.where(is_changed, tl.where(next_score > float("-inf"), ordered_bits(next_score), _NONE), best)
        names = tl.where(is_changed, next_name, names)
    scores = bits_value(tl.max(ordered_bits(scores), axis=1))
    parents, places = tl.max(parents, axis=1), tl.max(places, axis=1)
    shape: tl.constexpr = [BLOCK_NODE]
    return tl.reshape(parents, shape), tl.reshape(places, shape), tl.reshape(scores, shape)


@triton.jit(do_not_specialize=["mask_size", "vocab_size", "num_chunks"])
def _build_tree_from_blocks_kernel(
    verified_id_ptr, logits_ptr, scan, draft_to_target_ptr, blocks, num_nodes_ptr, seq_lens_ptr, out,
    mask_size, vocab_size, num_chunks,
    DEPTH: tl.constexpr, TOPK: tl.constexpr, NUM_NODES: tl.constexpr, NUM_WARPS: tl.constexpr,
    BLOCK_SLOT: tl.constexpr, BLOCK_ROW: tl.constexpr,
    MASK_MODE: tl.constexpr, IS_ALIGNED: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    mask = TreeMask(out.tree_mask, seq_lens_ptr, mask_size)
    if tl.program_id(1) == 0:
        tokens_ptr = blocks.tokens + request * (DEPTH * TOPK)
        scores_ptr = blocks.scores + request * (DEPTH * TOPK)
        transitions_ptr = None
        num_steps = DEPTH * TOPK
        if blocks.transitions is not None:
            transitions_ptr = blocks.transitions + request * ((DEPTH - 1) * TOPK * TOPK)
            num_steps = DEPTH * TOPK * TOPK
        steps_ptr, ranks_ptr = blocks.steps + request * num_steps, blocks.ranks + request * num_steps
        block = Block(tokens_ptr, scores_ptr, transitions_ptr, steps_ptr, ranks_ptr)
        if logits_ptr is not None:
            _select_block(
                request, block, logits_ptr, scan, draft_to_target_ptr, vocab_size, num_chunks,
                DEPTH=DEPTH, TOPK=TOPK, BLOCK_SLOT=BLOCK_SLOT,
            )  # fmt: skip
            tl.debug_barrier()  # the candidates have been written
        _sort_block(block, DEPTH, TOPK, BLOCK_ROW)
        tl.debug_barrier()  # and their order
        budget = tl.full([], NUM_NODES, tl.int64)
        if num_nodes_ptr is not None:
            budget = tl.minimum(tl.load(num_nodes_ptr + request).to(tl.int64), NUM_NODES)
        parent, place, score = _search(block, budget, DEPTH, TOPK, NUM_NODES, NUM_WARPS)

        node = tl.arange(0, parent.shape[0])
        is_node = node < NUM_NODES
        is_taken = is_node & (parent >= 0)
        offset = request * NUM_NODES + node
        token = tl.load(block.tokens + place, mask=is_taken, other=0).to(tl.int64)
        root_token = tl.load(verified_id_ptr + request).to(tl.int64)
        seq_len = tl.load(seq_lens_ptr + request).to(tl.int64)
        tl.store(out.draft_tokens + offset, tl.where(is_taken, token, root_token), mask=is_node)
        tl.store(out.retrieve_index + offset, offset, mask=is_node)
        tl.store(out.scores + request * (NUM_NODES - 1) + node - 1, score, mask=is_node & (node > 0))
        store_links(request, parent, seq_len, mask, out, NUM_NODES, MASK_MODE, KEEP_LOOSE=False)
    elif MASK_MODE == "full_mask":
        fill_prefix(mask, request, tl.program_id(1) - 1, tl.num_programs(1) - 1, NUM_NODES, IS_ALIGNED)


def contract(values: dict) -> Output:
    args = check.Arguments("build_tree_from_blocks", values)
    topk = args.integer("topk", 1, MAX_TOPK)
    tree = tree_contract(args)
    if args.exactly_one("logits", "candidate_scores") == "logits":
        args.tensor("logits", ("B", "D", "Vd"), check.FLOAT)
        args.debug("logits", "be a number below infinity", lambda: values["logits"] < math.inf)
        for name in ("candidate_tokens", "transition_scores"):
            if values[name] is not None:
                args.fail(name, "come with candidate_scores, not with logits", "a tensor")
        if args.size("Vd") < topk:
            args.fail("topk", f"be at most the draft vocabulary, {args.size('Vd')}", topk)
        args.tensor("draft_to_target", ("Vd",), (torch.int64,), optional=True)
    else:
        args.tensor("candidate_scores", ("B", "D", topk), (torch.float32,))
        args.debug("candidate_scores", "be at most 0", lambda: values["candidate_scores"] <= 0)
        args.tensor("candidate_tokens", ("B", "D", topk), check.INTEGER)
        if values["draft_to_target"] is not None:
            args.fail("draft_to_target", "come with logits, not with candidate_tokens", "a tensor")
    depth, name = args.size("D"), "candidate_scores" if values["logits"] is None else "logits"
    if not 1 <= depth <= MAX_DEPTH:
        args.fail(name, f"have D in 1..{MAX_DEPTH}", depth)
    if args.tensor("transition_scores", ("B", depth - 1, topk, topk), (torch.float32,), optional=True) is not None:
        args.debug("transition_scores", "be a number below infinity", lambda: values["transition_scores"] < math.inf)
    args.tensor("num_nodes", ("B",), check.INTEGER, optional=True)
    args.debug_numbers("num_nodes", 1)
    return Output(*tree, args.spec((args.size("B"), values["num_verify_tokens"] - 1), torch.float32))


@launcher
def build_tree_from_blocks(
    verified_id: torch.Tensor,
    logits: torch.Tensor | None,
    seq_lens: torch.Tensor,
    seq_lens_sum: int | None = None,
    candidate_tokens: torch.Tensor | None = None,
    candidate_scores: torch.Tensor | None = None,
    transition_scores: torch.Tensor | None = None,
    num_nodes: torch.Tensor | None = None,
    draft_to_target: torch.Tensor | None = None,
    *,
    topk: int,
    num_verify_tokens: int,
    tree_mask_mode: str = TreeMaskMode.PACKED,
    prefix_is_set: bool = False,
    out: Output | None = None,
) -> Output:
    """Builds the verification trees of drafts that were made in one pass, which gives a distribution for each depth.

    Of all paths through the `topk` best tokens of each depth, a tree holds the likeliest. Nodes are numbered from the
    best down, so the first nodes of a tree are the best smaller tree.

    Args:
        verified_id: [B] int. Token of the root, the last committed one.
        logits: [B, D, Vd] fp16, bf16 or fp32, D in 1..64. What the drafter says of the next D tokens. NaN counts as
            -inf. None: `candidate_tokens` and `candidate_scores` are given.
        seq_lens: [B] int. Committed tokens, the root not counted.
        seq_lens_sum: their sum, for a "full_mask" without `out`.
        candidate_tokens: [B, D, W] int, W = topk. Tokens for each depth, in any order: their place is their rank.
        candidate_scores: [B, D, W] fp32. Their log-probabilities. NaN counts as -inf, what is above 0 as 0.
        transition_scores: [B, D - 1, W, W] fp32. What is added to the score of a candidate of depth 1.. by the rank of
            its parent, then its own: a selector's corrections; -inf where it must not follow. Sums above 0 count as 0.
        num_nodes: [B] int. The most nodes of each tree, the root counted, clamped to 1..N; those of `prune_trees` are
            an example. None: N.
        draft_to_target: [Vd] int64. Offsets from draft ids to target ids, for logits of a draft vocabulary.
        topk: W, tokens of each depth, 1..16.
        num_verify_tokens: N, nodes of a tree, 1..256.
        tree_mask_mode, prefix_is_set: as in `build_tree`.
        out: seven tensors to write into.

    Returns:
        A named tuple:
        tree_mask, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling: [B, N, ceil(N / 64)] (if
            packed), [B * N] and thrice [B, N] int64. The tree, as in `build_tree`.
        draft_tokens: [B * N] int64. verified_id, then the tokens of the nodes; verified_id where there is no node.
        scores: [B, N - 1] fp32. The sum of the log-probabilities along each path, descending; -inf where there is no
            node. `prune_trees` takes them to share a budget among requests.
        Ties go to the lower depth, then to the earlier parent, then to the candidate with the higher score there, then
        to the lower rank. Where there is no node, because the budget is spent or all other paths have score -inf, its
        place sees itself, is linked to nothing, and has the root's position.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        EAGLE_KERNELS_DEBUG=1 also checks logits, candidate_scores, transition_scores, num_nodes, seq_lens, seq_lens_sum
        and the size of a "full_mask"; of scores only -inf may be infinite.

    Source:
        The trees of DDTree, https://arxiv.org/abs/2604.12989, and of JetSpec, https://arxiv.org/abs/2606.18394.

    Example:
        >>> tree = eagle_kernels.build_tree_from_blocks(
        ...     torch.tensor([9]), torch.tensor([[[0.6, 0.4], [0.1, 0.9]]]).log(), torch.tensor([4]),
        ...     topk=2, num_verify_tokens=5)
        >>> tree.scores.exp().mul(100).round().tolist()  # 0.6, 0.6 * 0.9, 0.4, 0.4 * 0.9
        [[60.0, 54.0, 40.0, 36.0]]
        >>> tree.draft_tokens.tolist(), tree.positions.tolist()
        ([9, 0, 1, 1, 1], [4, 5, 6, 5, 6])
    """
    values = locals()
    out = check.allocate("build_tree_from_blocks", contract(values), out)
    device, batch_size = seq_lens.device, seq_lens.shape[0]
    depth = (candidate_scores if logits is None else logits).shape[1]
    num_rows = depth * (1 if transition_scores is None else topk)
    scan, num_chunks, vocab_size = None, 1, 0
    if logits is not None:
        vocab_size = logits.shape[2]
        scan = scan_rows("build_tree_from_blocks", logits.view(batch_size * depth, vocab_size))
        num_chunks = scan.chunk_max.shape[1]
        candidate_tokens = torch.empty((batch_size, depth, topk), dtype=torch.int64, device=device)
        candidate_scores = torch.empty((batch_size, depth, topk), dtype=torch.float32, device=device)
    steps = torch.empty((batch_size, num_rows, topk), dtype=torch.float32, device=device)
    ranks = torch.empty((batch_size, num_rows, topk), dtype=torch.int32, device=device)
    tuned = tuning.row(TUNING, device)
    num_warps = min(next_power_of_2(triton.cdiv(depth, tuned["depths_per_warp"])), tuned["max_warps"])
    num_warps = tree_warps(num_verify_tokens, device, num_warps)
    launch_trees(
        "build_tree_from_blocks", _build_tree_from_blocks_kernel, values, out, num_warps,
        logits_ptr=logits, scan=scan, draft_to_target_ptr=draft_to_target, num_nodes_ptr=num_nodes,
        blocks=Block(candidate_tokens, candidate_scores, transition_scores, steps, ranks),
        vocab_size=vocab_size, num_chunks=num_chunks,
        DEPTH=depth, TOPK=topk, NUM_WARPS=num_warps, BLOCK_SLOT=next_power_of_2(triton.cdiv(num_chunks, NUM_LANES)),
        BLOCK_ROW=min(next_power_of_2(num_rows), tuned["sorted_at_once"] // next_power_of_2(topk) ** 2),
    )  # fmt: skip
    return out
