"""Verifies trees whose children were drawn from the draft's distribution: recursive rejection.

Computes
    At each node, with p the target's and q the draft's distribution there, the children t in sibling order:
    accept t if coin * q(t) < p(t) (strictly, so a token of p = 0 never); on rejection p <- norm((p - q)+), and
    without replacement     q(t) <- 0, q <- norm(q): the children were drawn one after the other, each from what those
                            before it had left (`sample_children`). Recursive rejection sampling: RSD (arXiv
                            2402.14160, Alg. 2), Sequoia (arXiv 2402.12374, Alg. 2)
    with replacement        q stays; the children are independent draws, and two may be alike. Multi-step speculative
                            sampling: SpecInfer (arXiv 2305.09781, Alg. 2), EAGLE-1 (arXiv 2401.15077, Alg. 1)
    If no child is accepted, a token drawn from what is left of p ends the walk as the bonus; at a leaf, and after
    spec_steps drafts, one drawn from the node's p. The emitted text has the target's distribution if the children were
    drawn as described, from this q. After rejections p is, but for normalisation, (p - a q)+ with the first p and q,
    one number a, and 0 at the rejected tokens: nothing of the vocabulary's size is written to memory.
Invariants
    Probabilities are taken as they are, without a temperature; they should sum to 1. NaN logits count as -inf, +inf as
    the largest finite number, probabilities that are NaN, negative or above 1.001 as 0.
    A draft temperature below 1e-5, without replacement: the children were not drawn but chosen, as top-k trees are.
    Each counts as proposed with certainty (q one-hot at it, EAGLE-2's rule), and the draft's rows are not read, be they
    logits or probabilities.
    A child with q(t) = 0 was not drawn from q: it ends the list of its siblings and takes nothing from p. So do
    repeated tokens without replacement and tokens outside the reduced vocabulary. A child without a token (-1, outside
    the vocabulary) is passed over.
    Independent draws may be verified without replacement as well: a repeated token costs only the children after it.
    If p = q but for rounding, (p - q)+ may have no mass, and rejection no probability: the child is then accepted if
    p(t) > 0, else p stays as it was.
    Without replacement q is summed anew after every rejection, and on another scale once the tokens left have less than
    1e-9 of it: if it comes from logits, it does not run out before the vocabulary does.
    A sampled row of the target that is nothing but -inf accepts nothing, and its bonus is token 0; a greedy one has its
    argmax at token 0. Malformed links and dead rows as in verify_tree_greedy. Results of a request do not depend on the
    batch around it.
    The coin of a child is keyed by (seed, its position, its node), the bonus by (seed, its position, token).
Grid
    (B,), one program walks one tree.
Launches
    1; 2 with d2t, whose inverse int32 [V] is made first
Traffic
    For each visited node with children both rows (V and Vd, times their element sizes) are read once for statistics,
    once more for each rejected child, and at the last node once for the draw; probabilities need no statistics.
"""

from __future__ import annotations

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher
from .shared.draws import residual_key
from .shared.prepare_pair import check_pair, pair_arguments, scan_pair, slice_arguments
from .shared.rejection_rounds import allocate_level_scans, allocate_rounds, launch_level_scan, launch_rounds
from .shared.rejection_steps import (
    ALONE,
    DONE,
    STATE_WORDS,
    Inputs,
    finish_alone,
    first_state,
    load_state,
    open_children,
    select_state,
    settle_found,
    visit,
)
from .shared.rows import Rows, in_units
from .shared.slices import Found, merge_found, turn
from .shared.tree_walk import (
    Links,
    Output,
    Walk,
    check_tree,
    is_own,
    load_nodes,
    output_arguments,
    store_walk,
    tree_arguments,
)

_WORDS = tl.constexpr(STATE_WORDS)

# One program reads whole rows one after another: as many bytes in flight as one program can have.
TUNING = {"default": {"BLOCK_VOCAB": 4096, "num_warps": 8}}

# The most rounds that are launched; children rejected after them are a program's alone. Then what decides between all
# nodes at once and level by level: microseconds of a launch, and bytes that are read in one.
ROUND_TUNING = {"default": {"rounds": 8, "launch_us": 2.0, "bytes_per_us": 2.0e6}}


@triton.jit(
    do_not_specialize=[
        "round", "level", "num_places", "num_ids", "num_target_scans", "vocab_size", "draft_vocab_size",
        "stride_target", "stride_draft",
    ]
)  # fmt: skip
def _verify_tree_rejection_walk_kernel(
    # inputs
    candidates_ptr,
    retrieve_index_ptr,
    retrieve_next_token_ptr,
    retrieve_next_sibling_ptr,
    target_ptr,
    draft_ptr,
    positions_ptr,
    seeds_ptr,
    temperature_ptr,
    draft_temperature_ptr,
    target_to_draft_ptr,
    # scratch
    scans_ptr,
    depth_ptr,
    emitted_ptr,
    states_ptr,
    sums_ptr,
    keys_ptr,
    # outputs
    predicts_ptr,
    accept_index_ptr,
    accept_token_num_ptr,
    # sizes
    round,
    level,
    num_places,
    num_ids,
    num_target_scans,
    vocab_size,
    draft_vocab_size,
    stride_target,
    stride_draft,
    TARGET_IS_PROBS: tl.constexpr,
    DRAFT_IS_PROBS: tl.constexpr,
    TARGET_UNIT: tl.constexpr,
    DRAFT_UNIT: tl.constexpr,
    KEEPS_DRAFT: tl.constexpr,
    HAS_ROUNDS: tl.constexpr,
    BY_LEVEL: tl.constexpr,
    SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_SLICE: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Walks one tree, or with BY_LEVEL takes its step from this level on, and writes the outputs.

    What the rounds have not done at a node is done here.
    """
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, BLOCK_NODE)
    is_node = nodes < NUM_NODES
    first = request * NUM_NODES
    since = turn(round + 1, num_places)
    UNIT: tl.constexpr = TARGET_UNIT if TARGET_UNIT < DRAFT_UNIT else DRAFT_UNIT
    if HAS_ROUNDS:
        # what the rounds have found of all nodes, so that the walk waits for memory once
        places = request + 0 * nodes if BY_LEVEL else first + nodes
        words_ptr = states_ptr + (since + places) * _WORDS
        phases = tl.load(words_ptr, mask=is_node, other=0)
        children_found = tl.load(words_ptr + 1, mask=is_node, other=0)
        tokens_found = tl.load(words_ptr + 4, mask=is_node, other=0)
    trees = Links(candidates_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr)
    tree = load_nodes(trees, request, NUM_NODES, BLOCK_NODE)
    depth = tl.where((nodes == 0) & is_own(tree.retrieved, request, NUM_NODES), 0, -1)
    emitted = tl.full([BLOCK_NODE], -1, tl.int32)
    accepted = tl.zeros([], tl.int32)
    if BY_LEVEL:
        is_later = is_node & (level > 0)
        depth = tl.where(is_later, tl.load(depth_ptr + first + nodes, mask=is_later, other=-1), depth)
        emitted = tl.load(emitted_ptr + first + nodes, mask=is_later, other=-1)
        accepted += level
    current = tl.max(tl.where(depth == accepted, nodes, -1))
    is_walking = current >= 0
    while is_walking:
        is_current = nodes == current
        first_child = tl.sum(tl.where(is_current, tree.links, 0)) >> 16
        child = tl.where(accepted < SPEC_STEPS, first_child, 0)
        chosen = tl.zeros([], tl.int32)
        token = tl.zeros([], tl.int32)
        is_done = chosen > 0
        if HAS_ROUNDS:
            # all nodes at once do not know which of them is as deep as a walk may come
            is_known = BY_LEVEL or child == first_child
            is_done = is_known & (tl.sum(tl.where(is_current, phases, 0)) == DONE)
            chosen = tl.sum(tl.where(is_current, children_found, 0))
            token = tl.sum(tl.where(is_current, tokens_found, 0))
        if is_done == 0:
            row = first + current
            first_scan = request - row if BY_LEVEL else row * 0
            target_rows = Rows(
                target_ptr, in_units(stride_target, TARGET_UNIT), in_units(vocab_size, TARGET_UNIT), temperature_ptr,
                scans_ptr, first_scan,
            )  # fmt: skip
            draft_rows = Rows(
                draft_ptr, in_units(stride_draft, DRAFT_UNIT), in_units(draft_vocab_size, DRAFT_UNIT),
                draft_temperature_ptr, scans_ptr, first_scan + num_target_scans,
            )  # fmt: skip
            inputs = Inputs(
                target_rows, draft_rows, target_to_draft_ptr, positions_ptr, seeds_ptr, in_units(num_ids, UNIT),
            )  # fmt: skip
            children = open_children(
                inputs, tree, request, current, child, TARGET_IS_PROBS, DRAFT_IS_PROBS, KEEPS_DRAFT,
                NUM_NODES=NUM_NODES, NUM_SLICES=NUM_SLICES, BLOCK_SLICE=BLOCK_SLICE, BLOCK_VOCAB=BLOCK_VOCAB,
                HAS_SCANS=HAS_ROUNDS,
            )  # fmt: skip
            fresh = visit(children, first_state(child), TARGET_IS_PROBS, DRAFT_IS_PROBS, KEEPS_DRAFT)
            if HAS_ROUNDS:
                place = since + (request if BY_LEVEL else row)
                left = load_state(states_ptr + place * _WORDS)
                found = merge_found(Found(sums_ptr, keys_ptr), place, NUM_SLICES, BLOCK_SLICE)
                settled = settle_found(children, left, found, TARGET_IS_PROBS, DRAFT_IS_PROBS, KEEPS_DRAFT)
                at = select_state(is_known, select_state(left.phase == ALONE, left, settled), fresh)
            else:
                at = fresh
            noise_key = residual_key(children.seed, tl.load(children.positions + current).to(tl.int64) + 1)
            chosen, token = finish_alone(
                children, at, noise_key, TARGET_IS_PROBS, DRAFT_IS_PROBS, KEEPS_DRAFT, BLOCK_VOCAB
            )
        token = tl.where(chosen > 0, tl.sum(tl.where(nodes == chosen, tree.tokens, 0)), token)
        emitted = tl.where(is_current, token, emitted)
        accepted += (chosen > 0).to(tl.int32)
        depth = tl.where((nodes == chosen) & (chosen > 0), accepted, depth)
        is_walking = (chosen > 0) & (BY_LEVEL == 0)
        current = chosen
    if BY_LEVEL:
        tl.debug_barrier()  # other threads may still read what stood there
        tl.store(depth_ptr + first + nodes, depth, mask=is_node)
        tl.store(emitted_ptr + first + nodes, emitted, mask=is_node)
    out = Output(predicts_ptr, accept_index_ptr, accept_token_num_ptr)
    walk = Walk(tree.retrieved, emitted, depth)
    store_walk(out, request, walk, SPEC_STEPS, NUM_NODES, False, BLOCK_DEPTH)


def _goes_by_level(pair: dict, num_rounds: int, spec_steps: int, batch_size: int) -> bool:
    """Tells whether reading the rows of the walks alone, with more launches, takes less time than reading all rows."""
    model = tuning.row(ROUND_TUNING, pair["target_ptr"].device)
    num_rows, vocab_size = pair["target_ptr"].shape
    row_us = vocab_size * pair["target_ptr"].element_size() / model["bytes_per_us"]
    # each row is scanned, and read by one or two passes
    all_us = 3 * num_rows * row_us + num_rounds * model["launch_us"]
    level_us = 5 * batch_size * row_us + (num_rounds + 2) * model["launch_us"]
    return all_us > (spec_steps + 1) * level_us


def contract(values: dict) -> Output:
    """Checks the arguments of `verify_tree_rejection` and describes its outputs."""
    args = check.Arguments("verify_tree_rejection", values)
    output = check_tree(args)
    num_rows = args.size("B") * args.size("N")
    check_pair(args, num_rows, num_rows)
    args.tensor("temperature", ("B",), (torch.float32,))  # read whatever the rows are
    if values["d2t"] is not None:
        token = range(args.size("V"))
        args.debug("d2t", "lead to tokens of the target", lambda: _lead_into(values["d2t"], token))
    return output


def _lead_into(d2t: torch.Tensor, tokens: range) -> torch.Tensor:
    """Tells of each draft token whether d2t maps it to one of `tokens`."""
    target = torch.arange(len(d2t), device=d2t.device) + d2t
    return (target >= tokens.start) & (target < tokens.stop)


@launcher
def verify_tree_rejection(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_logits: torch.Tensor | None,
    draft_logits: torch.Tensor | None,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    draft_temperature: torch.Tensor | None = None,
    target_probs: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    *,
    spec_steps: int,
    replacement: bool = False,
    out: Output | None = None,
) -> Output:
    """Verifies token trees whose children were drawn from the draft's distribution, without loss: recursive rejection.

    At each node a child t is accepted if coin * q(t) < p(t), p being the target's and q the draft's distribution; if it
    is rejected, p becomes what q leaves of it, and the next sibling is compared. If none is accepted, the bonus is
    drawn from what is left of p. The text follows the target's distribution if the children were drawn from this q, in
    sibling order, with the noise of `sample_children` or any other that is independent of this op's.
    Symbols: B requests, N nodes of a tree (1..1024), its root (node 0) included, V and Vd vocabularies of target and
    draft (1..2^20), S = spec_steps. Integers may be int32 or int64.

    Args:
        candidates: [B, N] int. Tokens of the nodes; node 0 is the root.
        retrieve_index: [B, N] int. b * N + i for node i of request b.
        retrieve_next_token: [B, N] int. First child of each node, -1 for none.
        retrieve_next_sibling: [B, N] int. Next sibling of each node, -1 for none.
        target_logits: None or [B * N, V] fp32, fp16 or bf16. Unit stride along V. NaN counts as -inf. Given instead of
            target_probs.
        draft_logits: None or [B * N, Vd] fp32, fp16 or bf16. Unit stride along Vd, by draft ids. Row of a node: what
            its children were drawn from. Given instead of draft_probs.
        positions: [B * N] int. Position of each node; the token emitted after it has position + 1.
        seeds: [B] int. Seed of each request.
        temperature: [B] fp32. Of target_logits; below 1e-5 a row is one-hot at its argmax. Needed with probabilities,
            too.
        draft_temperature: None or [B] fp32. Of draft_logits. None: temperature. Below 1e-5, without replacement,
            children count as chosen, as those of top-k trees are, and neither draft_logits nor draft_probs are read.
        target_probs: None or [B * N, V] fp32. Unit stride along V, used as they are. This op does not filter: for
            top-k, top-p or min-p pass rows from the renorm ops.
        draft_probs: None or [B * N, Vd] fp32. Likewise, by draft ids.
        d2t: None or [Vd] int. Target id minus draft id, one to one, for a reduced vocabulary. None: the ids are the
            same.
        spec_steps: S, 0..1024: the most drafts that can be accepted.
        replacement: how the children were drawn, as in `sample_children`. If not set, each was drawn from what those
            before it left of q; else independently.
        out: three tensors to write into.

    Returns:
        A named tuple, every element of which is written:
        predicts: [B * N] int32. The token that follows every node of the path, -1 elsewhere.
        accept_index: [B, S + 1] int32. retrieve_index of the path's nodes, root first, -1 padded.
        accept_token_num: [B] int32. Accepted drafts; the bonus is not counted.
        A child that cannot have been drawn (q(t) is 0, NaN, negative or above 1.001; a repeated token without
        replacement) ends the list of its siblings; one without a token of the vocabulary is passed over. A link that
        does not point forward within the tree counts as none. A row whose root has a retrieve_index outside the request
        is dead, with predicts and accept_index -1, accept_token_num 0.

    Raises:
        ValueError, TypeError: an argument of a wrong shape, dtype, device or range, or both or neither of logits and
            probs of the target or of the draft; the message names the argument.
        Not checked, unless EAGLE_KERNELS_DEBUG=1: that temperatures are numbers of at least 0, and that d2t leads to
        tokens of the target.
        Whether probabilities sum to 1 is never checked.

    Source:
        Without replacement: RSD, https://arxiv.org/abs/2402.14160, algorithm 2; Sequoia,
        https://arxiv.org/abs/2402.12374, algorithm 2. With replacement: SpecInfer, https://arxiv.org/abs/2305.09781,
        algorithm 2; EAGLE, https://arxiv.org/abs/2401.15077, algorithm 1. Links as in SGLang; coins and noise are
        eagle_kernels' own.

    Example:
        >>> tree = (torch.tensor([[0, 1, 2]]), torch.arange(3)[None],  # two children of the root, of tokens 1 and 2
        ...         torch.tensor([[1, -1, -1]]), torch.tensor([[-1, 2, -1]]))
        >>> p = torch.eye(4)[[2, 0, 3]]  # the target is sure of 2 after the root, and of 3 after that
        >>> q = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).repeat(3, 1)
        >>> step = eagle_kernels.verify_tree_rejection(
        ...     *tree, None, None, torch.tensor([5, 6, 6]), torch.tensor([1]), torch.tensor([1.0]), target_probs=p,
        ...     draft_probs=q, spec_steps=1)
        >>> step.predicts.tolist(), step.accept_index.tolist(), step.accept_token_num.tolist()
        ([2, -1, 3], [[0, 2]], [1])
    """
    contracted = contract(locals())
    out = check.allocate("verify_tree_rejection", contracted, out)
    batch_size, num_nodes = candidates.shape
    device = candidates.device
    pair = pair_arguments("verify_tree_rejection", locals())
    pair |= slice_arguments(pair)
    # a slice is read by one program as fast as by one program of many
    num_rounds = 0 if pair["NUM_SLICES"] == 1 else min(tuning.row(ROUND_TUNING, device)["rounds"], max(num_nodes - 1, 1))
    by_level = num_rounds > 0 and _goes_by_level(pair, num_rounds, spec_steps, batch_size)
    num_places = 0
    depth = emitted = scans = None
    if by_level:
        num_places = batch_size
        scans, pair["num_target_scans"] = allocate_level_scans(pair, batch_size)
        depth = torch.empty((batch_size, num_nodes), dtype=torch.int32, device=device)
        emitted = torch.empty_like(depth)
    elif num_rounds > 0:
        num_places = batch_size * num_nodes
        scans = scan_pair(
            "verify_tree_rejection", pair, num_nodes, num_nodes, retrieve_next_token, skips_greedy_draft=not replacement
        )
    shared = {
        "positions_ptr": positions,
        "seeds_ptr": seeds,
        "scans_ptr": scans,
        "depth_ptr": depth,
        # the draft may have probability on ids that the target does not have
        "num_ids": max(pair["vocab_size"], pair["draft_vocab_size"]) if d2t is None else pair["vocab_size"],
        "KEEPS_DRAFT": replacement,
        "BY_LEVEL": by_level,
        "SPEC_STEPS": spec_steps,
        **tree_arguments(locals()),
        **allocate_rounds(num_places, pair["NUM_SLICES"], device),
        **pair,
    }
    tile = dict(tuning.row(TUNING, device))
    tile["BLOCK_VOCAB"] = min(tile["BLOCK_VOCAB"], next_power_of_2(shared["num_ids"]))
    for level in range(spec_steps + 1) if by_level else (0,):
        if by_level:
            launch_level_scan(shared, level)
        launch_rounds(shared, num_rounds, level)
        launch(
            "verify_tree_rejection",
            _verify_tree_rejection_walk_kernel,
            (batch_size,),
            round=num_rounds,
            level=level,
            emitted_ptr=emitted,
            HAS_ROUNDS=num_rounds > 0,
            **(shared | output_arguments(out)),
            **tile,
        )
    return out
