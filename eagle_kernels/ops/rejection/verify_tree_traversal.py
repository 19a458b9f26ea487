"""Verifies trees of sampled drafts from their leaves up, without loss: traversal verification.

Computes:
    Traversal verification (Weng et al., arXiv 2505.12398, algorithms 1 and 2). Every node has a target distribution P,
    the draft distribution Q that its children were drawn from one after another without replacement, and an acceptance
    a: that of the root is 1, that of a child c is min(a P(c) / Q(c), 1) by its parent's numbers. The first leaf in
    depth-first order is compared with its coin. If the coin is below a, the whole path to the leaf is accepted and the
    next token is drawn from its P. Else the leaf is deleted, and with R = (a P - Q)+ and S its sum, its parent has
        P <- R / S,  a <- S / (S + 1 - a) (1 for 0 / 0),  Q <- Q without the leaf's token, renormalised
    from then on, and is a leaf itself when no child is left. The root's coin always succeeds. Coins and noise are those
    of primitives/random.py, keyed by seed, position of the token, node with its depth, and streams that drafting does
    not use.
Invariants: A draft of target probability 0 is never accepted. If rounding leaves no residual P stays as it was. +inf
    counts as the largest finite number; a sampled row of nothing but -inf gives token 0. A link to a node that was met
    before ends the list of siblings. Results of a request do not depend on the batch around it.
Grid: map (parts of V,) inverts d2t; scan (rows of logits, slices) finds every row's maximum and sum; walk (B,), one
    program walks one tree. For vocabularies of more than one slice, before the walk: edges (B, N) looks up every node's
    probabilities in its parent's rows; a round (B, slices) takes each walk to the next node that it deletes, and sums
    and draws from what that leaves of its parent's rows (`traversal_rounds.py`).
Launches: 1: walk; one more each: scan for logits, map for d2t; for more than one slice edges and R = min(N - 1, 24)
    rounds, at least 1
Traffic: every row of the target once and of the draft where there are children, two rows for every deleted node, one or
    two for the draw where the accepted node is not the last one's parent.
"""

from __future__ import annotations

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.random import Coins
from ...primitives.rows import Rows, in_units
from ...primitives.tree_walk import Output, Walk, all_nodes, check_tree, output_arguments, store_walk, tree_arguments
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import bundle, launch, launcher
from .shared.deletions import no_deletion, store_deletion
from .shared.pair import PairRows
from .shared.prepare_pair import check_pair, pair_arguments, scan_pair
from .shared.slices import merge_found, turn
from .shared.traversal_rounds import allocate_rounds, launch_rounds, open_request
from .shared.traversal_steps import (
    AT_WORDS,
    DONE,
    PATH_WORDS,
    descend,
    finish_alone,
    first_at,
    first_path,
    load_walk,
    settle_found,
)

# One program reads whole rows one after another: the tile is the largest that fits in its registers.
TUNING = {"default": {"BLOCK_VOCAB": 4096, "num_warps": 8}}

# The most rounds that are launched; nodes deleted after them are a program's alone.
ROUND_TUNING = {"default": {"rounds": 24}}

_WORDS = tl.constexpr(AT_WORDS)
_NODE_WORDS = tl.constexpr(PATH_WORDS)


@triton.jit(do_not_specialize=["round", "num_places", "num_ids", "vocab_size", "draft_vocab_size", "stride_target",
                               "stride_draft"])  # fmt: skip
def _verify_tree_traversal_walk_kernel(
    links, target, draft, target_to_draft_ptr, coins, scratch, out,
    round, num_places, num_ids, vocab_size, draft_vocab_size, stride_target, stride_draft,
    TARGET_UNIT: tl.constexpr, DRAFT_UNIT: tl.constexpr, SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr,
    NUM_SLICES: tl.constexpr, BLOCK_VOCAB: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Walks one tree depth first, from where the rounds have left it, and writes the outputs."""
    await_predecessor(ENABLE_PDL)
    num_ids = in_units(num_ids, TARGET_UNIT if TARGET_UNIT < DRAFT_UNIT else DRAFT_UNIT)
    HAS_ROUNDS: tl.constexpr = scratch.walks is not None
    node = all_nodes(NUM_NODES)
    of, is_live = open_request(links, scratch, coins, NUM_NODES)
    if HAS_ROUNDS:
        since = turn(round + 1, num_places) + of.request
        WORDS: tl.constexpr = _WORDS + _NODE_WORDS * NUM_NODES
        at, path = load_walk(scratch.walks + since * WORDS, NUM_NODES)
        found = merge_found(scratch, since, NUM_SLICES)
    else:
        at, path = first_at(of, is_live), first_path(of.tree)
    current, place, token, parents = at.current, at.accepted, at.token, path.parents
    if at.phase != DONE:
        target_rows = Rows(target, in_units(stride_target, TARGET_UNIT), in_units(vocab_size, TARGET_UNIT), 0)
        draft_rows = Rows(draft, in_units(stride_draft, DRAFT_UNIT), in_units(draft_vocab_size, DRAFT_UNIT), 0)
        rows = PairRows(target_rows, draft_rows, target_to_draft_ptr, num_ids)
        if HAS_ROUNDS:
            next_at, next_path, latest = settle_found(rows, of, at, path, found, SPEC_STEPS, NUM_SLICES)
            if latest.slot >= 0:
                store_deletion(of.deletions_ptr, latest)
        else:
            next_at, next_path = descend(rows, of, at, path, no_deletion(), SPEC_STEPS, NUM_SLICES)
        current, place, token, parents = finish_alone(rows, of, next_at, next_path, SPEC_STEPS, NUM_SLICES, BLOCK_VOCAB)

    # up the path; each node's token follows its parent
    depth = tl.full(node.shape, -1, tl.int32)
    predicted = tl.full(node.shape, -1, tl.int32)
    current = tl.where(is_live, current, -1)
    while current >= 0:
        is_current = node == current
        depth = tl.where(is_current, place, depth)
        predicted = tl.where(is_current, token, predicted)
        token = tl.sum(tl.where(is_current, of.tree.tokens, 0))
        current = tl.sum(tl.where(is_current, parents, 0))
        place -= 1
    store_walk(out, of.request, Walk(of.tree.retrieved, predicted, depth), SPEC_STEPS, NUM_NODES)


def contract(values: dict) -> Output:
    args = check.Arguments("verify_tree_traversal", values)
    output = check_tree(args)
    num_rows = args.size("B") * args.size("N")
    check_pair(args, num_rows, num_rows)
    return output


@launcher
def verify_tree_traversal(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_logits: torch.Tensor | None,
    draft_logits: torch.Tensor | None,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor | None,
    draft_temperature: torch.Tensor | None = None,
    target_probs: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    *,
    spec_steps: int,
    out: Output | None = None,
) -> Output:
    """Verifies token trees of sampled drafts from their leaves up, without loss: traversal verification.

    A leaf is accepted with its whole path, or deleted; then the next leaf is tried. On a chain this is block
    verification (`verify_chain`), and as there, a position must have a different node in each round, see
    `sample_children`. Otherwise, draw drafts and pass arguments as for `verify_tree_rejection` without replacement.
    Symbols: B requests, N nodes of a tree (1..1024), V and Vd vocabularies of target and draft (1..2^20).

    Args:
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling: [B, N] int. Trees, as in `verify_tree`.
        target_logits: None or [B * N, V] fp32, fp16 or bf16.
        draft_logits: None or [B * N, Vd] fp32, fp16 or bf16.
        positions: [B * N] int.
        seeds: [B] int.
        temperature: None or [B] fp32. None if no logits need it.
        draft_temperature: None or [B] fp32. Below 1e-5 a row is one-hot at its argmax.
        target_probs: None or [B * N, V] fp32.
        draft_probs: None or [B * N, Vd] fp32.
        d2t: None or [Vd] int.
        spec_steps: S, 0..1024: the most drafts to accept. Deeper nodes are not looked at.
        out: three tensors to write into.

    Returns:
        A named tuple, as from `verify_tree`:
        predicts: [B * N] int32. The tokens emitted, -1 off the path.
        accept_index: [B, S + 1] int32. -1 padded.
        accept_token_num: [B] int32.

        A child that cannot have been drawn (its probability is 0, NaN, negative or above 1.001; a repeated token) is
        skipped with all nodes below it.

    Raises:
        ValueError, TypeError: an argument breaks a rule above. EAGLE_KERNELS_DEBUG=1 also checks links and
            temperatures; d2t and sums of probabilities are unchecked.

    Source:
        Weng et al., https://arxiv.org/abs/2505.12398, algorithms 1 and 2. Links as in SGLang; coins and noise are
        eagle_kernels' own.

    Example:
        >>> tree = [torch.tensor([x]) for x in ([0, 1, 2], [0, 1, 2], [1, -1, -1], [-1, 2, -1])]  # 0 above 1 and 2
        >>> p = torch.eye(4)[[2, 0, 3]]  # the target is sure of 2 after the root, and of 3 after that
        >>> q = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).repeat(3, 1)
        >>> eagle_kernels.verify_tree_traversal(
        ...     *tree, None, None, torch.tensor([5, 6, 6]), torch.tensor([1]), None, target_probs=p, draft_probs=q,
        ...     spec_steps=1).predicts.tolist()
        [2, -1, 3]
    """
    values = locals()
    out = check.allocate("verify_tree_traversal", contract(values), out)
    device, (batch_size, num_nodes) = candidates.device, candidates.shape
    pair = pair_arguments("verify_tree_traversal", values)
    scan_pair("verify_tree_traversal", pair, num_nodes, num_nodes, retrieve_next_token)
    # each node but the root can be deleted once; a slice is read by one program as fast as by one program of many
    num_rounds = min(tuning.row(ROUND_TUNING, device)["rounds"], max(num_nodes - 1, 1))
    if pair["NUM_SLICES"] == 1:
        num_rounds = 0
    shared = {
        "coins": bundle(Coins, values), "scratch": allocate_rounds(candidates, pair["NUM_SLICES"], num_rounds),
        "num_places": batch_size,
        # the draft may have probability on ids that the target does not have
        "num_ids": max(pair["vocab_size"], pair["draft_vocab_size"]) if d2t is None else pair["vocab_size"],
        "SPEC_STEPS": spec_steps, **tree_arguments(values), **pair,
    }  # fmt: skip
    if num_rounds > 0:
        launch_rounds(shared, num_rounds)
    walk = shared | output_arguments(out) | tuning.row(TUNING, device) | {"round": num_rounds}
    launch("verify_tree_traversal", _verify_tree_traversal_walk_kernel, (batch_size,), **walk)
    return out
