"""Verifies trees whose children were drawn from the draft's distribution: recursive rejection.

Computes: On rejection of a child t, p <- norm((p - q)+); without replacement also q(t) <- 0, q <- norm(q). Nothing of
    the vocabulary's size is written to memory (`rejection.py`). At a leaf, and after spec_steps drafts, the bonus is
    drawn from the node's p.
Invariants: Comparisons are strict, so a token of p = 0 is never accepted. +inf counts as the largest finite number.
    Children that were not drawn but chosen count as proposed with certainty: q is one-hot at each (EAGLE-2's rule). A
    child with q(t) = 0 takes nothing from p. Independent draws may be verified without replacement as well: a repeated
    token costs only the children after it. If p = q but for rounding, (p - q)+ may have no mass, and rejection no
    probability: the child is then accepted if p(t) > 0, else p stays as it was. Without replacement q is summed anew
    after every rejection, and on another scale once the tokens left have less than 1e-9 of it: if it comes from logits,
    it does not run out before the vocabulary does. A sampled row of the target that is nothing but -inf accepts
    nothing, and its bonus is token 0; a greedy one has its argmax at token 0. Results of a request do not depend on the
    batch around it. The coin of a child is keyed by (seed, its position, its node), the bonus by (seed, its position,
    token).
Grid: walk (B,), one program walks one tree. For a vocabulary of one slice that is all. Else rows are read in slices
    before: scan (rows of logits, slices) finds every row's maximum and sum; a round (nodes, slices) takes each node to
    its next rejection, and sums and draws from what that leaves (`rejection_rounds.py`). What comes of a node does not
    depend on the path to it, so all nodes make their rounds at once; where they are too many to read, only those at
    which the walks have arrived, level by level. Shapes alone decide, and both give the same bits.
Launches: 1: walk; for more than one slice R + 2 with R = min(N - 1, 8) rounds, at least 1 (R + 1 without logits); level
    by level S + 1 times that number; one more for d2t, whose inverse int32 [V] is made first
Traffic: Rows of all nodes (of visited ones only, level by level): those of the target, and the draft's where there are
    children, once each for statistics, which probabilities need not have, and once for each rejected child, or for a
    draw where no child is rejected. Extra memory: 32 bytes per slice and node, and 64 per node.
"""

from __future__ import annotations

import torch

from ...primitives.random import Coins
from ...primitives.tree_walk import Output, check_tree, output_arguments, tree_arguments
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2
from ...runtime.launch import bundle, launcher
from .shared.prepare_pair import allocate_scans, check_pair, pair_arguments, scan_pair
from .shared.rejection_rounds import allocate_rounds, launch_rounds_and_walks

# One program reads whole rows one after another: the tile is the largest that fits in its registers.
TUNING = {"default": {"BLOCK_VOCAB": 4096, "num_warps": 8}}

# The most rounds that are launched; children rejected after them are a program's alone. Then what decides between all
# nodes at once and level by level: microseconds of a launch, and tokens of a node's rows, all rounds together, in one.
# bench/results/NVIDIA_H100_80GB_HBM3/tuning/verify_tree_rejection.txt
ROUND_TUNING = {"default": {"rounds": 8, "launch_us": 1.8, "tokens_per_us": 7.0e4}}


def goes_by_level(target: torch.Tensor, num_rounds: int, spec_steps: int, batch_size: int) -> bool:
    """Tells whether reading the rows of the walks alone, with more launches, takes less time than reading all rows."""
    model = tuning.row(ROUND_TUNING, target.device)
    num_rows, vocab_size = target.shape
    launches_us, row_us = (num_rounds + 2) * model["launch_us"], vocab_size / model["tokens_per_us"]
    return launches_us + num_rows * row_us > (spec_steps + 1) * (launches_us + batch_size * row_us)


def contract(values: dict) -> Output:
    args = check.Arguments("verify_tree_rejection", values)
    output = check_tree(args)
    num_rows = args.size("B") * args.size("N")
    check_pair(args, num_rows, num_rows)
    args.tensor("temperature", ("B",), (torch.float32,))  # read whatever the rows are
    if values["d2t"] is not None:
        token = range(args.size("V"))
        args.debug("d2t", "map to tokens of the target", lambda: _lead_into(values["d2t"], token))
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
    is rejected, p becomes what q leaves of it, and the next sibling is tried. If none is accepted, the bonus is drawn
    from what is left of p. The text follows the target's distribution if the children were drawn from this q, in
    sibling order, with the noise of `sample_children` or any other that is independent of this op's.
    Symbols: B requests, N nodes of a tree (1..1024), V and Vd vocabularies of target and draft (1..2^20).

    Args:
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling: [B, N] int. Trees, as in `verify_tree`.
        target_logits: None or [B * N, V] fp32, fp16 or bf16. This or target_probs. Unit stride along V; NaN counts as
            -inf.
        draft_logits: None or [B * N, Vd] fp32, fp16 or bf16. This or draft_probs, likewise, by draft ids. A node's row
            is what its children were drawn from.
        positions: [B * N] int. Position of each node; the token emitted after it has position + 1.
        seeds: [B] int. Seed of each request.
        temperature: [B] fp32. Below 1e-5 a row of logits is one-hot at its argmax. Needed even with probabilities.
        draft_temperature: None or [B] fp32. For draft_logits. None: temperature. Below 1e-5, without replacement,
            children count as chosen rather than drawn, as in top-k trees, and the draft's rows are not read.
        target_probs: None or [B * N, V] fp32. Unit stride along V, used as they are. This op does not filter: for
            top-k, top-p or min-p pass rows from the renorm ops.
        draft_probs: None or [B * N, Vd] fp32. Likewise, by draft ids.
        d2t: None or [Vd] int. Target id minus draft id, one to one, for a reduced vocabulary. None: 0.
        spec_steps: S, 0..1024: the most drafts to accept.
        replacement: how the children were drawn, as in `sample_children`: independently, or each from what the earlier
            ones left of q.
        out: three tensors to write into.

    Returns:
        A named tuple, as from `verify_tree`:
        predicts: [B * N] int32. The tokens emitted, -1 off the path.
        accept_index: [B, S + 1] int32. -1 padded.
        accept_token_num: [B] int32.

        A child that cannot have been drawn (q(t) is 0, NaN, negative or above 1.001; a repeated token without
        replacement) ends the list of its siblings; one whose token is not in the vocabulary is skipped.

    Raises:
        ValueError, TypeError: an argument breaks a rule above. EAGLE_KERNELS_DEBUG=1 also checks links, temperatures,
            and that d2t maps to target ids; sums of probabilities are unchecked.

    Source:
        Without replacement: RSD, https://arxiv.org/abs/2402.14160, algorithm 2; Sequoia,
        https://arxiv.org/abs/2402.12374, algorithm 2. With replacement: SpecInfer, https://arxiv.org/abs/2305.09781,
        algorithm 2; EAGLE, https://arxiv.org/abs/2401.15077, algorithm 1. Links as in SGLang; coins and noise are
        eagle_kernels' own.

    Example:
        >>> tree = [torch.tensor([x]) for x in ([0, 1, 2], [0, 1, 2], [1, -1, -1], [-1, 2, -1])]  # 0 above 1 and 2
        >>> p = torch.eye(4)[[2, 0, 3]]  # the target is sure of 2 after the root, and of 3 after that
        >>> q = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).repeat(3, 1)
        >>> eagle_kernels.verify_tree_rejection(
        ...     *tree, None, None, torch.tensor([5, 6, 6]), torch.tensor([1]), torch.tensor([1.0]), target_probs=p,
        ...     draft_probs=q, spec_steps=1).predicts.tolist()
        [2, -1, 3]
    """
    values = locals()
    out = check.allocate("verify_tree_rejection", contract(values), out)
    device, (batch_size, num_nodes) = candidates.device, candidates.shape
    pair = pair_arguments("verify_tree_rejection", values)
    # a slice is read by one program as fast as by one program of many
    num_rounds = num_places = 0
    by_level = False
    if pair["NUM_SLICES"] > 1:
        num_rounds = min(tuning.row(ROUND_TUNING, device)["rounds"], max(num_nodes - 1, 1))
        target = target_logits if target_probs is None else target_probs
        by_level = goes_by_level(target, num_rounds, spec_steps, batch_size)
        num_places = batch_size if by_level else batch_size * num_nodes
        if by_level:
            allocate_scans(pair, batch_size)
        else:
            scan_pair("verify_tree_rejection", pair, num_nodes, num_nodes, retrieve_next_token, not replacement)
    shared = {
        "coins": bundle(Coins, values),
        "scratch": allocate_rounds(candidates, num_places, pair["NUM_SLICES"], by_level),
        "num_places": num_places,
        # the draft may have probability on ids that the target does not have
        "num_ids": max(pair["vocab_size"], pair["draft_vocab_size"]) if d2t is None else pair["vocab_size"],
        "KEEPS_DRAFT": replacement, "BY_LEVEL": by_level, "SPEC_STEPS": spec_steps, **tree_arguments(values), **pair,
    }  # fmt: skip
    tile = dict(tuning.row(TUNING, device))
    tile["BLOCK_VOCAB"] = min(tile["BLOCK_VOCAB"], next_power_of_2(shared["num_ids"]))
    launch_rounds_and_walks(shared, output_arguments(out) | tile, num_rounds)
    return out
