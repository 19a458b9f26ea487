"""Lossy verification by membership: a draft is taken if it is among the target's most likely tokens.

Computes: FastDeploy's strategy TOPP, on trees. The second candidate need not be within candidate_lens. A chain gives
    what FastDeploy gives, and after a window the walk goes on at its last node, as in FastDeploy's Python (its kernel
    skips the next row).
Invariants: An id outside int32 counts as -1. Results of a request do not depend on the batch around it.
Grid: (B,), one program walks one tree.
Launches: 1
Traffic: 5 words a node and the first candidates of all, all candidates of the at most S + 1 visited nodes.
"""

from __future__ import annotations

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.tree_walk import (
    Output,
    Walk,
    all_nodes,
    check_tree,
    find_child,
    is_own,
    load_nodes,
    output_arguments,
    store_walk,
    token_ids,
    tree_arguments,
)
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher

MAX_CANDIDATES = 1024

# One warp walks: what it looks up lies in its own registers.
TUNING = {"default": {"num_warps": 1}}


@triton.jit
def _verify_tree_topp_kernel(
    links, candidate_ids_ptr, candidate_lens_ptr, target_predict_ptr, out,
    SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr, NUM_CANDIDATES: tl.constexpr, VERIFY_WINDOW: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    offset = request * NUM_NODES
    node = all_nodes(NUM_NODES)
    rank = tl.arange(0, next_power_of_2(NUM_CANDIDATES))
    tree = load_nodes(links, request, NUM_NODES)
    is_node = node < NUM_NODES
    predicted = token_ids(tl.load(target_predict_ptr + offset + node, mask=is_node, other=-1))
    first_candidate = token_ids(tl.load(candidate_ids_ptr + (offset + node) * NUM_CANDIDATES, mask=is_node, other=-1))
    depth = tl.where((node == 0) & is_own(tree.retrieved, request, NUM_NODES), 0, -1)
    is_walking = tl.max(depth) == 0
    current = tl.zeros([], dtype=tl.int32)
    accepted = tl.zeros([], dtype=tl.int32)
    in_window = tl.zeros([], dtype=tl.int32)  # nodes of a window that are still to be walked
    if SPEC_STEPS > 0:  # triton 3.6 does not compile loads in a loop that it can tell to be never entered
        while is_walking:
            first = tl.sum(tl.where(node == current, first_candidate, 0))
            if in_window > 0:
                child = find_child(tree, current, first)
                in_window -= 1
            else:
                place = (offset + current) * NUM_CANDIDATES + rank
                ids = token_ids(tl.load(candidate_ids_ptr + place, mask=rank < NUM_CANDIDATES, other=-1))
                is_candidate = (rank < tl.load(candidate_lens_ptr + offset + current)) & (rank < NUM_CANDIDATES)
                child = _find_member(tree, current, ids, is_candidate)
                if (child == 0) & (NUM_CANDIDATES >= 2):
                    second = find_child(tree, current, tl.sum(tl.where(rank == 1, ids, 0)))
                    at = second
                    num_matched = tl.zeros([], dtype=tl.int32)
                    while (at > 0) & (num_matched < VERIFY_WINDOW):
                        at = find_child(tree, at, tl.sum(tl.where(node == at, first_candidate, 0)))
                        num_matched += (at > 0).to(tl.int32)
                    is_window = (at > 0) & (accepted + 1 + VERIFY_WINDOW <= SPEC_STEPS)
                    child = tl.where(is_window, second, 0)
                    in_window = tl.where(is_window, VERIFY_WINDOW, 0)
            is_accepted = child > 0
            accepted += is_accepted.to(tl.int32)
            depth = tl.where((node == child) & is_accepted, accepted, depth)
            child_token = tl.sum(tl.where(node == child, tree.tokens, 0))
            predicted = tl.where((node == current) & is_accepted, child_token, predicted)
            current = child
            is_walking = is_accepted & (accepted < SPEC_STEPS)
    store_walk(out, request, Walk(tree.retrieved, predicted, depth), SPEC_STEPS, NUM_NODES)


@triton.jit
def _find_member(tree, node, ids, is_candidate):
    """Returns the first child of `node` whose token is among the candidates, 0 if none is."""
    nodes = tl.arange(0, tree.links.shape[0])
    match = tl.zeros([], dtype=tl.int32)
    child = tl.sum(tl.where(nodes == node, tree.links, 0)) >> 16
    while child > 0:
        is_child = nodes == child
        is_match = tl.max((is_candidate & (ids == tl.sum(tl.where(is_child, tree.tokens, 0)))).to(tl.int32)) > 0
        sibling = tl.sum(tl.where(is_child, tree.links, 0)) & 0xFFFF
        match = tl.where(is_match, child, match)
        child = tl.where(is_match, 0, sibling)
    return match


def contract(values: dict) -> Output:
    args = check.Arguments("verify_tree_topp", values)
    output = check_tree(args)
    args.integer("verify_window", 0)
    num_rows = args.size("B") * args.size("N")
    args.tensor("candidate_ids", (num_rows, "C"), check.INTEGER)
    if not 1 <= args.size("C") <= MAX_CANDIDATES:
        args.fail("candidate_ids", f"hold 1 to {MAX_CANDIDATES} candidates a row", list(values["candidate_ids"].shape))
    args.tensor("candidate_lens", (num_rows,), check.INTEGER)
    args.tensor("target_predict", ("B", "N"), check.INTEGER)
    return output


@launcher
def verify_tree_topp(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    candidate_ids: torch.Tensor,
    candidate_lens: torch.Tensor,
    target_predict: torch.Tensor,
    *,
    spec_steps: int,
    verify_window: int = 2,
    out: Output | None = None,
) -> Output:
    """LOSSY: Accepts drafts that are among the target's most likely tokens, whatever their probability.

    The text does not follow the target's distribution; that of `verify_tree_sampled` does. At each node the first child
    whose token is a candidate is accepted. If there is none, a child with the second candidate is, together with
    verify_window nodes below it, if each of those carries its parent's first candidate. Otherwise the node's
    target_predict ends the walk as the bonus.
    Symbols: B requests, N nodes of a tree (1..1024), C candidates (1..1024).

    Args:
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling: [B, N] int. Trees, as in `verify_tree`.
        candidate_ids: [B * N, C] int. The target's most likely tokens at every node, in order.
        candidate_lens: [B * N] int. How many of these, from the first on, are candidates (top-p). Above C: all.
        target_predict: [B, N] int. The target's own token at every node.
        spec_steps: S, 0..1024: the most drafts to accept. A window that would go deeper does not count.
        verify_window: how many nodes, 0 or more, must agree below a second candidate.
        out: three tensors to write into.

    Returns:
        A named tuple, as from `verify_tree`:
        predicts: [B * N] int32. At each path node the draft that follows, or the bonus; -1 off the path.
        accept_index: [B, S + 1] int32. -1 padded.
        accept_token_num: [B] int32.

        End tokens are left to the caller.

    Raises:
        ValueError, TypeError: an argument breaks a rule above. EAGLE_KERNELS_DEBUG=1 also checks links.

    Source:
        FastDeploy's strategy TOPP for chains, as in its Python code; trees are eagle_kernels' own.

    Example:
        >>> tree = [torch.tensor([x]) for x in ([9, 1, 2], [0, 1, 2], [1, -1, -1], [-1, 2, -1])]  # 9 above 1 and 2
        >>> ids, lens = torch.tensor([[3, 2], [0, 1], [0, 1]]), torch.tensor([2, 1, 1])
        >>> eagle_kernels.verify_tree_topp(  # the target's token is 3, but 2 is the other candidate
        ...     *tree, ids, lens, torch.tensor([[3, 0, 0]]), spec_steps=1).predicts.tolist()
        [2, -1, 0]
    """
    values = locals()
    out = check.allocate("verify_tree_topp", contract(values), out)
    launch(
        "verify_tree_topp", _verify_tree_topp_kernel, (len(candidates),),
        candidate_ids_ptr=candidate_ids, candidate_lens_ptr=candidate_lens, target_predict_ptr=target_predict,
        NUM_CANDIDATES=candidate_ids.shape[1], VERIFY_WINDOW=verify_window,
        **tree_arguments(values), **output_arguments(out), **tuning.row(TUNING, candidates.device),
    )  # fmt: skip
    return out
