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

import math

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher
from .shared.draws import accept_coin, residual_key
from .shared.pair import Pair
from .shared.prepare_pair import check_pair, invert_draft_map
from .shared.rejection import Node, draw_left, left_probs, reject
from .shared.rows import GREEDY_BELOW, open_row, scan_logits
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

TUNING = {"default": {"BLOCK_VOCAB": 4096, "num_warps": 8}}


@triton.jit(do_not_specialize=["stride_target_row", "stride_draft_row"])
def _verify_tree_rejection_kernel(
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
    # outputs
    predicts_ptr,
    accept_index_ptr,
    accept_token_num_ptr,
    # sizes
    stride_target_row,
    stride_draft_row,
    SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    DRAFT_VOCAB_SIZE: tl.constexpr,
    NUM_IDS: tl.constexpr,
    TARGET_IS_PROBS: tl.constexpr,
    DRAFT_IS_PROBS: tl.constexpr,
    KEEPS_DRAFT: tl.constexpr,
    TARGET_ALIGNMENT: tl.constexpr,
    DRAFT_ALIGNMENT: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    offset = request * NUM_NODES
    seed = tl.load(seeds_ptr + request)
    temperature = tl.load(temperature_ptr + request)
    draft_temperature = tl.load(draft_temperature_ptr + request)
    # whether children were chosen, not drawn; a NaN counts as below
    is_certain = (draft_temperature >= GREEDY_BELOW) == 0
    if KEEPS_DRAFT:
        is_certain = request < 0
    nodes = tl.arange(0, BLOCK_NODE)
    trees = Links(candidates_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr)
    retrieved, tokens, links = load_nodes(trees, request, NUM_NODES, BLOCK_NODE)
    depth = tl.where((nodes == 0) & is_own(retrieved, request, NUM_NODES), 0, -1)
    is_walking = tl.max(depth) == 0
    emitted = tl.full([BLOCK_NODE], -1, tl.int32)
    current = tl.zeros([], tl.int32)
    accepted = tl.zeros([], tl.int32)
    while is_walking:
        child = tl.sum(tl.where(nodes == current, links, 0)) >> 16
        child = tl.where(accepted < SPEC_STEPS, child, 0)
        first_child = child
        target_row_ptr = target_ptr + tl.multiple_of((offset + current) * stride_target_row, TARGET_ALIGNMENT)
        draft_row_ptr = draft_ptr + tl.multiple_of((offset + current) * stride_draft_row, DRAFT_ALIGNMENT)
        # size 0: the row is not read
        draft_size = tl.where((child == 0) | is_certain, 0, DRAFT_VOCAB_SIZE)
        target_max, target_total, target_best = tl.zeros([], tl.float32), tl.zeros([], tl.float32), child
        draft_max, draft_total, draft_best = target_max, target_total, child
        if not TARGET_IS_PROBS:
            target_max, target_total, target_best = scan_logits(target_row_ptr, 0, VOCAB_SIZE, temperature, BLOCK_VOCAB)
        if not DRAFT_IS_PROBS:
            draft_max, draft_total, draft_best = scan_logits(
                draft_row_ptr, 0, draft_size, draft_temperature, BLOCK_VOCAB
            )
        target_row = open_row(target_row_ptr, VOCAB_SIZE, temperature, target_max, target_total, target_best)

        # what is left of p and q: see shared/rejection.py, Node
        mass = tl.full([], 1.0, tl.float32)
        draft_mass = tl.full([], 1.0, tl.float32)
        scale = tl.zeros([], tl.float32)
        num_seen = tl.zeros([], tl.int32)
        num_rejected = tl.zeros([], tl.int32)
        chosen = tl.zeros([], tl.int32)
        token = tl.zeros([], tl.int32)
        if SPEC_STEPS > 0:  # triton 3.6 does not compile loads in a loop that it can tell to be never entered
            while child > 0:
                is_child = nodes == child
                token = tl.sum(tl.where(is_child, tokens, 0))
                following = tl.sum(tl.where(is_child, links, 0)) & 0xFFFF
                num_seen += 1
                if (token >= 0) & (token < NUM_IDS):
                    draft_row = open_row(
                        draft_row_ptr, draft_size, draft_temperature, draft_max, draft_total, draft_best
                    )
                    node = Node(
                        Pair(target_row, draft_row, target_to_draft_ptr), is_certain, candidates_ptr + offset,
                        retrieve_next_sibling_ptr + offset, first_child, num_rejected, scale, mass, draft_mass,
                    )  # fmt: skip
                    target_prob, draft_prob = left_probs(node, token, TARGET_IS_PROBS, DRAFT_IS_PROBS, KEEPS_DRAFT)
                    coin = accept_coin(seed, tl.load(positions_ptr + offset + child), child)
                    is_accepted = (coin * draft_prob < target_prob) & (draft_prob > 0.0)
                    if (draft_prob > 0.0) & (is_accepted == 0):
                        is_spent, scale, mass, draft_mass, draft_max, draft_total = reject(
                            node, num_seen, NUM_IDS, TARGET_IS_PROBS, DRAFT_IS_PROBS, KEEPS_DRAFT, BLOCK_VOCAB
                        )
                        is_accepted = is_spent & (target_prob > 0.0)
                        num_rejected = num_seen
                    chosen = tl.where(is_accepted, child, chosen)
                    following = tl.where(is_accepted | (draft_prob == 0.0), 0, following)
                child = following

        accepted += (chosen > 0).to(tl.int32)
        if chosen == 0:
            left_row = open_row(draft_row_ptr, draft_size, draft_temperature, draft_max, draft_total, draft_best)
            last = Node(
                Pair(target_row, left_row, target_to_draft_ptr), is_certain, candidates_ptr + offset,
                retrieve_next_sibling_ptr + offset, first_child, num_rejected, scale, mass, draft_mass,
            )  # fmt: skip
            noise_key = residual_key(seed, tl.load(positions_ptr + offset + current).to(tl.int64) + 1)
            token = draw_left(last, noise_key, NUM_IDS, TARGET_IS_PROBS, DRAFT_IS_PROBS, KEEPS_DRAFT, BLOCK_VOCAB)
        emitted = tl.where(nodes == current, token, emitted)
        depth = tl.where((nodes == chosen) & (chosen > 0), accepted, depth)
        is_walking = chosen > 0
        current = chosen
    out = Output(predicts_ptr, accept_index_ptr, accept_token_num_ptr)
    walk = Walk(retrieved, emitted, depth)
    store_walk(out, request, walk, SPEC_STEPS, NUM_NODES, False, BLOCK_DEPTH)


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
    target = target_logits if target_probs is None else target_probs
    draft = draft_logits if draft_probs is None else draft_probs
    vocab_size, draft_vocab_size = target.shape[1], draft.shape[1]
    # the draft may have probability on ids that the target does not have
    num_ids = vocab_size if d2t is not None else max(vocab_size, draft_vocab_size)
    scan = dict(tuning.row(TUNING, candidates.device))
    scan["BLOCK_VOCAB"] = min(scan["BLOCK_VOCAB"], next_power_of_2(num_ids))
    target_to_draft = invert_draft_map("verify_tree_rejection", d2t, vocab_size)
    launch(
        "verify_tree_rejection",
        _verify_tree_rejection_kernel,
        (len(candidates),),
        target_ptr=target,
        draft_ptr=draft,
        positions_ptr=positions,
        seeds_ptr=seeds,
        temperature_ptr=temperature,
        draft_temperature_ptr=temperature if draft_temperature is None else draft_temperature,
        target_to_draft_ptr=target_to_draft,
        stride_target_row=target.stride(0),
        stride_draft_row=draft.stride(0),
        VOCAB_SIZE=vocab_size,
        DRAFT_VOCAB_SIZE=draft_vocab_size,
        NUM_IDS=num_ids,
        TARGET_IS_PROBS=target_probs is not None,
        DRAFT_IS_PROBS=draft_probs is not None,
        KEEPS_DRAFT=replacement,
        # divisors of every row's offset, so that loads can be wide
        TARGET_ALIGNMENT=math.gcd(target.stride(0), 16),
        DRAFT_ALIGNMENT=math.gcd(draft.stride(0), 16),
        **tree_arguments(locals()),
        **output_arguments(out),
        **scan,
    )
    return out
