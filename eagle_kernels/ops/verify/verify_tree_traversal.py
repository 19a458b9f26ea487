"""Verifies trees of sampled drafts from their leaves up, without loss: traversal verification.

Computes
    Traversal verification (Weng et al., arXiv 2505.12398, algorithms 1 and 2). Every node has a target distribution P,
    the draft distribution Q that its children were drawn from one after another without replacement, and an acceptance
    a: that of the root is 1, that of a child c is min(a P(c) / Q(c), 1) by its parent's numbers. The first leaf in
    depth-first order is compared with its coin. If the coin is below a, the whole path to the leaf is accepted and the
    next token is drawn from its P. Else the leaf is deleted, and with R = (a P - Q)+ and S its sum, its parent has
        P <- R / S,  a <- S / (S + 1 - a) (1 for 0 / 0),  Q <- Q without the leaf's token, renormalised
    from then on, and is a leaf itself when no child is left. The root's coin always succeeds.
    The emitted tokens have the target's distribution if every node's children were drawn from its row of q, in sibling
    order, each from what those before it left, and if coins, residual draws and drafts are independent. On a chain this
    is block verification (verify_chain). Coins and noise are those of shared/random.py, keyed by seed, position of the
    token, node with its depth, and stream: drafts must be drawn with another stream (STREAM_DRAFT), and no two rounds
    may draw at one position for one node (`sample_children`), as this looks at drafts beyond those that it accepts.
Invariants
    Nodes deeper than spec_steps are not looked at. A draft of target probability 0 is never accepted. A child that
    cannot have been drawn (its probability in its parent's Q is 0, NaN, negative or above 1.001: also a second sibling
    of the same token, -1, or a token outside the draft vocabulary) is passed over, and so are all nodes below it. If
    rounding leaves no residual P stays as it was. NaN logits count as -inf, +inf as the largest finite number; a
    sampled row of nothing but -inf gives token 0. Links that do not point forward within the tree, or point to a node
    that was met before, end the list of siblings. A row whose root has a retrieve_index outside the request is dead:
    predicts and accept_index -1, accept_token_num 0. Results of a request do not depend on the batch around it.
Grid
    map (parts of V,) inverts d2t; scan (rows of logits, slices) finds every row's maximum and sum; walk (B,), one
    program walks one tree, and reads the parent's rows once for every node that it deletes.
Launches
    1: walk; one more each: scan for logits, map for d2t
Traffic
    every row of the target once and of the draft where there are children, two rows for every deleted node, one or two
    for the draw.
"""

from __future__ import annotations

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.ordering import LOWEST_KEY
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher
from .shared.deletions import DELETION_WORDS, Deletions, apply_deletions, masses_left, store_deletion
from .shared.draws import accept_coin, draw_keys, drawn_token, residual_key
from .shared.pair import Pair, load_probs
from .shared.prepare_pair import check_pair, prepare_pair
from .shared.rows import Rows, load_row, row_probs
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

# A coin is keyed by depth * this + node. If the next round drafts for a position again, that position has another depth
# there, whatever the shapes of the trees; so no coin decides twice.
_NODES = tl.constexpr(65536)

# One program reads whole rows one after another: as many bytes in flight as one program can have.
TUNING = {"default": {"BLOCK_VOCAB": 4096, "num_warps": 8}}


@triton.jit(
    do_not_specialize=[
        "num_target_scans", "vocab_size", "draft_vocab_size", "num_ids", "stride_target", "stride_draft"
    ]
)  # fmt: skip
def _verify_tree_traversal_kernel(
    # inputs
    candidates_ptr,
    retrieve_index_ptr,
    retrieve_next_token_ptr,
    retrieve_next_sibling_ptr,
    positions_ptr,
    seeds_ptr,
    target_ptr,
    draft_ptr,
    temperature_ptr,
    draft_temperature_ptr,
    target_to_draft_ptr,
    # scratch
    scans_ptr,
    deletions_ptr,
    # outputs
    predicts_ptr,
    accept_index_ptr,
    accept_token_num_ptr,
    # sizes
    num_target_scans,
    vocab_size,
    draft_vocab_size,
    num_ids,
    stride_target,
    stride_draft,
    TARGET_IS_PROBS: tl.constexpr,
    DRAFT_IS_PROBS: tl.constexpr,
    SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_SLICE: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Walks one tree depth first.

    deletions [B, N, 4] is a stack: the deletions of the nodes of the current path, in order. A deleted node's own
    deletions are dropped, so those of a node of the path lie side by side, after its parent's.
    """
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    first_row = request * NUM_NODES
    node = tl.arange(0, BLOCK_NODE)
    trees = Links(candidates_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr)
    retrieved, tokens, links = load_nodes(trees, request, NUM_NODES, BLOCK_NODE)
    seed = tl.load(seeds_ptr + request)
    target_rows = Rows(target_ptr, stride_target, vocab_size, temperature_ptr, scans_ptr, 0)
    draft_rows = Rows(draft_ptr, stride_draft, draft_vocab_size, draft_temperature_ptr, scans_ptr, num_target_scans)
    deletions_ptr += first_row * DELETION_WORDS

    # for every node: its parent, its acceptance when the walk went below it, where its deletions begin
    parents = tl.full([BLOCK_NODE], -1, tl.int32)
    acceptances = tl.full([BLOCK_NODE], 1.0, tl.float32)
    bases = tl.zeros([BLOCK_NODE], tl.int32)
    is_entered = node < 0
    # for the current node
    current = tl.zeros([], tl.int32)
    acceptance = tl.full([], 1.0, tl.float32)
    base = tl.zeros([], tl.int32)
    accepted = tl.zeros([], tl.int32)  # its depth
    top = tl.zeros([], tl.int32)
    child = tl.sum(tl.where(node == 0, links, 0)) >> 16

    is_live = tl.max(((node == 0) & is_own(retrieved, request, NUM_NODES)).to(tl.int32)) > 0
    is_walking = is_live
    while is_walking:
        is_child = node == child
        child_links = tl.sum(tl.where(is_child, links, 0))
        is_new = (child > 0) & (tl.max((is_child & is_entered).to(tl.int32)) == 0)
        if (is_new & (accepted < SPEC_STEPS)) & (acceptance > 0.0):
            is_entered = is_entered | is_child
            token = tl.sum(tl.where(is_child, tokens, 0))
            row = first_row + current
            target_row = load_row(target_rows, request, row, NUM_SLICES, BLOCK_SLICE, TARGET_IS_PROBS)
            draft_row = load_row(draft_rows, request, row, NUM_SLICES, BLOCK_SLICE, DRAFT_IS_PROBS)
            pair = Pair(target_row, draft_row, target_to_draft_ptr)
            target_prob, draft_prob = load_probs(pair, token, token >= 0, TARGET_IS_PROBS, DRAFT_IS_PROBS)
            deletions = Deletions(deletions_ptr + base * DELETION_WORDS, top - base)
            target_prob, draft_prob = apply_deletions(target_prob, draft_prob, token, deletions)
            is_drawn = draft_prob > 0.0
            ratio = tl.math.div_rn(target_prob, tl.where(is_drawn, draft_prob, 1.0))
            is_left = node == tl.where(is_drawn, current, -1)
            is_reached = node == tl.where(is_drawn, child, -1)
            acceptances = tl.where(is_left, acceptance, acceptances)
            parents = tl.where(is_reached, current, parents)
            bases = tl.where(is_reached, top, bases)
            acceptance = tl.where(is_drawn, tl.minimum(acceptance * ratio, 1.0), acceptance)
            base = tl.where(is_drawn, top, base)
            accepted += is_drawn.to(tl.int32)
            current = tl.where(is_drawn, child, current)
            child = tl.where(is_drawn, child_links >> 16, child_links & 0xFFFF)
        else:
            coin = accept_coin(seed, tl.load(positions_ptr + first_row + current), accepted * _NODES + current)
            is_walking = (current > 0) & (coin >= acceptance)
            if is_walking:
                is_current = node == current
                token = tl.sum(tl.where(is_current, tokens, 0))
                child = tl.sum(tl.where(is_current, links, 0)) & 0xFFFF
                parent = tl.sum(tl.where(is_current, parents, 0))
                is_parent = node == parent
                share = tl.sum(tl.where(is_parent, acceptances, 0.0))
                top = base
                base = tl.sum(tl.where(is_parent, bases, 0))
                row = first_row + parent
                target_row = load_row(target_rows, request, row, NUM_SLICES, BLOCK_SLICE, TARGET_IS_PROBS)
                draft_row = load_row(draft_rows, request, row, NUM_SLICES, BLOCK_SLICE, DRAFT_IS_PROBS)
                parent_pair = Pair(target_row, draft_row, target_to_draft_ptr)
                before = Deletions(deletions_ptr + base * DELETION_WORDS, top - base)
                target_mass, draft_mass = masses_left(
                    parent_pair, before, share, token, num_ids, TARGET_IS_PROBS, DRAFT_IS_PROBS, BLOCK_VOCAB
                )
                store_deletion(deletions_ptr + top * DELETION_WORDS, share, target_mass, draft_mass, token)
                divisor = target_mass + (1.0 - share)
                has_chance = divisor > 0.0
                acceptance = tl.where(has_chance, tl.math.div_rn(target_mass, tl.where(has_chance, divisor, 1.0)), 1.0)
                top += 1
                accepted -= 1
                current = parent

    # the token after the path, from what is left of P
    depth = tl.full([BLOCK_NODE], -1, tl.int32)
    predicted = tl.full([BLOCK_NODE], -1, tl.int32)
    if is_live:
        target_row = load_row(target_rows, request, first_row + current, NUM_SLICES, BLOCK_SLICE, TARGET_IS_PROBS)
        noise_key = residual_key(seed, tl.load(positions_ptr + first_row + current) + 1)
        best = tl.full([BLOCK_VOCAB], LOWEST_KEY, tl.int64)
        if top > base:
            draft_row = load_row(draft_rows, request, first_row + current, NUM_SLICES, BLOCK_SLICE, DRAFT_IS_PROBS)
            last_pair = Pair(target_row, draft_row, target_to_draft_ptr)
            last_deletions = Deletions(deletions_ptr + base * DELETION_WORDS, top - base)
            for first in range(0, vocab_size, BLOCK_VOCAB):
                ids = first + tl.arange(0, BLOCK_VOCAB)
                target_probs, draft_probs = load_probs(
                    last_pair, ids, ids < vocab_size, TARGET_IS_PROBS, DRAFT_IS_PROBS
                )
                left, _ = apply_deletions(target_probs, draft_probs, ids, last_deletions)
                best = tl.maximum(best, draw_keys(left, ids, noise_key))
        else:  # the draft's row is not read: it may have no meaning
            for first in range(0, vocab_size, BLOCK_VOCAB):
                ids = first + tl.arange(0, BLOCK_VOCAB)
                target_probs = row_probs(target_row, ids, ids < vocab_size, TARGET_IS_PROBS)
                best = tl.maximum(best, draw_keys(target_probs, ids, noise_key))
        token = drawn_token(tl.max(best))
        place = accepted
        while current >= 0:
            is_current = node == current
            depth = tl.where(is_current, place, depth)
            predicted = tl.where(is_current, token, predicted)
            token = tl.sum(tl.where(is_current, tokens, 0))
            current = tl.sum(tl.where(is_current, parents, 0))
            place -= 1
    out = Output(predicts_ptr, accept_index_ptr, accept_token_num_ptr)
    walk = Walk(retrieved, predicted, depth)
    store_walk(out, request, walk, SPEC_STEPS, NUM_NODES, False, BLOCK_DEPTH)


def contract(values: dict) -> Output:
    """Checks the arguments of `verify_tree_traversal` and describes its outputs."""
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

    A leaf is accepted with its whole path, or deleted; then the next leaf is compared. On a chain this is block
    verification (`verify_chain`), and as there a position must be drafted for another node in each round, see
    `sample_children`. The text follows the target's distribution if every node's children were drawn from its row of
    the draft, in sibling order, each from what those before it left, with the noise of `sample_children` or any other
    that is independent of this op's.
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
        temperature: None or [B] fp32. Of logits; below 1e-5 a row is one-hot at its argmax. None if no logits need it.
        draft_temperature: None or [B] fp32. Of draft_logits. None: temperature.
        target_probs: None or [B * N, V] fp32. Unit stride along V, used as they are. This op does not filter: for
            top-k, top-p or min-p pass rows from the renorm ops.
        draft_probs: None or [B * N, Vd] fp32. Likewise, by draft ids.
        d2t: None or [Vd] int. Target id minus draft id, one to one, for a reduced vocabulary. None: the ids are the
            same.
        spec_steps: S, 0..1024: the most drafts that can be accepted. Deeper nodes are not looked at.
        out: three tensors to write into.

    Returns:
        A named tuple, every element of which is written:
        predicts: [B * N] int32. The token emitted after every node of the path, -1 elsewhere.
        accept_index: [B, S + 1] int32. retrieve_index of the path's nodes, root first, -1 padded.
        accept_token_num: [B] int32. Accepted drafts; the token after them is not counted.
        A child that cannot have been drawn (its probability is 0, NaN, negative or above 1.001; a repeated token) is
        passed over with all nodes below it. A link that does not point forward within the tree counts as none. A row
        whose root has a retrieve_index outside the request is dead, with predicts and accept_index -1, accept_token_num
        0.

    Raises:
        ValueError, TypeError: an argument of a wrong shape, dtype, device or range, both or neither of logits and probs
            of the target or of the draft, or no temperature where logits need it; the message names the argument.
        Not checked, unless EAGLE_KERNELS_DEBUG=1: that temperatures are numbers of at least 0.
        Where d2t leads to, and whether probabilities sum to 1, is never checked.

    Source:
        Weng et al., https://arxiv.org/abs/2505.12398, algorithms 1 and 2. Links as in SGLang; coins and noise are
        eagle_kernels' own.

    Example:
        >>> tree = (torch.tensor([[0, 1, 2]]), torch.arange(3)[None],  # two children of the root, of tokens 1 and 2
        ...         torch.tensor([[1, -1, -1]]), torch.tensor([[-1, 2, -1]]))
        >>> p = torch.eye(4)[[2, 0, 3]]  # the target is sure of 2 after the root, and of 3 after that
        >>> q = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).repeat(3, 1)
        >>> step = eagle_kernels.verify_tree_traversal(
        ...     *tree, None, None, torch.tensor([5, 6, 6]), torch.tensor([1]), None, target_probs=p,
        ...     draft_probs=q, spec_steps=1)
        >>> step.predicts.tolist(), step.accept_index.tolist(), step.accept_token_num.tolist()
        ([2, -1, 3], [[0, 2]], [1])
    """
    contracted = contract(locals())
    out = check.allocate("verify_tree_traversal", contracted, out)
    batch_size, num_nodes = candidates.shape
    pair = prepare_pair("verify_tree_traversal", locals(), num_nodes, num_nodes, retrieve_next_token)
    vocab_size, draft_vocab_size = pair["vocab_size"], pair["draft_vocab_size"]
    launch(
        "verify_tree_traversal",
        _verify_tree_traversal_kernel,
        (batch_size,),
        positions_ptr=positions,
        seeds_ptr=seeds,
        deletions_ptr=torch.empty((batch_size, num_nodes, 4), dtype=torch.int32, device=candidates.device),
        # the draft may have probability on ids that the target does not have
        num_ids=max(vocab_size, draft_vocab_size) if d2t is None else vocab_size,
        **tree_arguments(locals()),
        **output_arguments(out),
        **pair,
        **tuning.row(TUNING, candidates.device),
    )
    return out
