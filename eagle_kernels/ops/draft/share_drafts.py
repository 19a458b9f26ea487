"""Merges the tries of several drafters into one, and keeps the drafts that are likeliest to be accepted.

Computes: Nodes of the same path are one node. Once its parent is accepted, the target accepts it with the highest
    probability that a drafter gives it, p[d] factors[d, depth], at most 1. Its score is the product of these along its
    path. The num_speculative_tokens nodes of the highest scores stay, equal ones in the order of drafters and nodes.
Invariants: Parents precede their children, siblings differ. Scores never rise along a path, so no node stays without
    its parent.
Grid: (B,), one program merges the tries of one row, a node at a time, then ranks all of them.
Launches: 1
Traffic: B P M (2 * index size + 4) read, B K (20 + 4 P) + 4 B written, for P drafters of M drafts and K =
    num_speculative_tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.ordering import is_among_best
from ...primitives.tree import depths
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher
from .shared.ngram import erase_drafts


class Output(NamedTuple):
    """What `share_drafts` returns."""

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    probs: torch.Tensor
    num_drafts: torch.Tensor


MAX_DRAFTERS, MAX_CANDIDATES, MAX_KEPT = 8, 1023, 255

# Not measured: few warps, since nodes depend on each other. With twice the nodes LLVM fails for gfx942 and gfx950.
TUNING = {"default": {"nodes_per_warp": 128}}


class Drafts(NamedTuple):
    """Pointers to the tries of all requests, drafter after drafter, node i + 1 at place i."""

    tokens: Any
    parents: Any
    probs: Any


class Merged(NamedTuple):
    """The nodes of all tries in one, root first."""

    tokens: Any  # [BLOCK_NODE] int64
    parents: Any  # [BLOCK_NODE] int32, -1 for the root and where there is no node
    probs: Any  # [BLOCK_DRAFTER, BLOCK_NODE] fp32: what each drafter says, 0 where it does not draft the node
    count: Any  # of drafts


@triton.jit
def _merge(drafts, request, NUM_DRAFTERS: tl.constexpr, NUM_DRAFTS: tl.constexpr):
    """Puts the tries of a request into an empty one, a node at a time."""
    NUM_CANDIDATES: tl.constexpr = NUM_DRAFTERS * NUM_DRAFTS
    node = tl.arange(0, next_power_of_2(NUM_CANDIDATES + 1, 16))
    drafter = tl.arange(0, next_power_of_2(NUM_DRAFTERS))
    tokens, parents = tl.full(node.shape, -1, tl.int64), tl.full(node.shape, -1, tl.int32)
    probs = tl.zeros([drafter.shape[0], node.shape[0]], tl.float32)
    count = tl.full([], 0, tl.int32)
    # the node that candidate i - 1 has become, -1 for none; 0 is the root
    moved = tl.where(node == 0, 0, -1)
    first = request * NUM_CANDIDATES
    for place in range(NUM_CANDIDATES):
        token = tl.load(drafts.tokens + first + place).to(tl.int64)
        named = tl.load(drafts.parents + first + place).to(tl.int64)
        prob = tl.load(drafts.probs + first + place)
        own_drafter = place // NUM_DRAFTS
        own_first = own_drafter * NUM_DRAFTS
        if (token >= 0) & (prob > 0) & (named >= 0) & (named <= place - own_first):
            parent = tl.max(tl.where(node == tl.where(named > 0, own_first + named, 0), moved, -1))
            is_twin = (node > 0) & (node <= count) & (parents == parent) & (tokens == token)
            twin = tl.max(tl.where(is_twin, node, 0))
            is_new = (parent >= 0) & (twin == 0)
            count += is_new.to(tl.int32)
            target = tl.where(is_new, count, tl.where(parent >= 0, twin, -1))
            tokens = tl.where((node == target) & is_new, token, tokens)
            parents = tl.where((node == target) & is_new, parent, parents)
            is_said = (drafter == own_drafter)[:, None] & (node == target)[None, :]
            probs = tl.where(is_said, tl.maximum(probs, tl.minimum(prob, 1.0)), probs)
            moved = tl.where(node == place + 1, target, moved)
    return Merged(tokens, parents, probs, count)


@triton.jit
def _score(merged, factors_ptr, num_levels, NUM_DRAFTERS: tl.constexpr, NUM_NODES: tl.constexpr):
    """Returns the scores fp32 of the merged nodes: 1 for the root, 0 where there is no node."""
    depth = depths(merged.parents, NUM_NODES)
    promised = merged.probs
    if factors_ptr is not None:
        drafter = tl.arange(0, promised.shape[0])[:, None]
        level = tl.minimum(tl.maximum(depth, 1), num_levels) - 1
        factors = tl.load(factors_ptr + drafter * num_levels + level[None, :], mask=drafter < NUM_DRAFTERS, other=0.0)
        promised = promised * factors
    best = tl.max(tl.where(promised > 0, tl.minimum(promised, 1.0), 0.0), axis=0)
    score = tl.where(tl.arange(0, depth.shape[0]) == 0, 1.0, 0.0)
    # level by level, so that all products are taken from the root down
    for level in range(1, tl.max(depth) + 1):
        above = tl.gather(score, tl.maximum(merged.parents, 0), 0)
        score = tl.where(depth == level, above * best, score)
    return score


@triton.jit(do_not_specialize=["num_levels"])
def _share_drafts_kernel(
    drafts, factors_ptr, out,
    num_levels,
    NUM_DRAFTERS: tl.constexpr, NUM_DRAFTS: tl.constexpr, NUM_KEPT: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    merged = _merge(drafts, request, NUM_DRAFTERS, NUM_DRAFTS)
    score = _score(merged, factors_ptr, num_levels, NUM_DRAFTERS, NUM_DRAFTERS * NUM_DRAFTS + 1)

    node = tl.arange(0, score.shape[0])
    is_worth = (node > 0) & (score > 0)
    is_kept = is_among_best(score, is_worth, NUM_KEPT) & is_worth
    number = tl.where(is_kept, tl.cumsum(is_kept.to(tl.int32), 0), 0)
    new_parent = tl.gather(number, tl.maximum(merged.parents, 0), 0)
    offset = request * NUM_KEPT + number - 1
    tl.store(out.tokens + offset, merged.tokens, mask=is_kept)
    tl.store(out.parents + offset, new_parent.to(tl.int64), mask=is_kept)
    tl.store(out.scores + offset, score, mask=is_kept)
    drafter = tl.arange(0, next_power_of_2(NUM_DRAFTERS))[:, None]
    probs_ptr = out.probs + (request * NUM_DRAFTERS + drafter) * NUM_KEPT
    is_drafter = drafter < NUM_DRAFTERS
    tl.store(probs_ptr + number[None, :] - 1, merged.probs, mask=is_drafter & is_kept[None, :])

    count = tl.max(number)
    tl.store(out.num_drafts + request, count)
    erase_drafts(out, request, count, NUM_KEPT, NUM_KEPT)
    place = tl.arange(0, next_power_of_2(NUM_KEPT))
    is_left = (place >= count) & (place < NUM_KEPT)
    tl.store(out.scores + request * NUM_KEPT + place, tl.zeros(place.shape, tl.float32), mask=is_left)
    nothing = tl.zeros([drafter.shape[0], place.shape[0]], tl.float32)
    tl.store(probs_ptr + place[None, :], nothing, mask=is_drafter & is_left[None, :])


def contract(values: dict) -> Output:
    args = check.Arguments("share_drafts", values)
    num_kept = args.integer("num_speculative_tokens", 1, MAX_KEPT)
    args.tensor("tokens", ("B", "P", "M"), check.INTEGER)
    batch_size, num_drafters, num_drafts = (args.size(axis) for axis in ("B", "P", "M"))
    if not 1 <= num_drafters <= MAX_DRAFTERS:
        args.fail("tokens", f"have P in 1..{MAX_DRAFTERS}", num_drafters)
    if num_drafters * num_drafts > MAX_CANDIDATES:
        args.fail("tokens", f"have at most P * M = {MAX_CANDIDATES} drafts a request", num_drafters * num_drafts)
    args.tensor("parents", ("B", "P", "M"), check.INTEGER)
    args.tensor("probs", ("B", "P", "M"), (torch.float32,))
    if args.tensor("factors", ("P", "T"), (torch.float32,), optional=True) is not None and args.size("T") == 0:
        args.fail("factors", "have at least one level", list(values["factors"].shape))
    node = args.spec((batch_size, num_kept), torch.int64)
    return Output(
        node, node, args.spec((batch_size, num_kept), torch.float32),
        args.spec((batch_size, num_drafters, num_kept), torch.float32), args.spec((batch_size,), torch.int32),
    )  # fmt: skip


@launcher
def share_drafts(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    probs: torch.Tensor,
    factors: torch.Tensor | None = None,
    *,
    num_speculative_tokens: int,
    out: Output | None = None,
) -> Output:
    """Merges the tries of several drafters per request, and keeps the drafts that are likeliest to be accepted.

    So each drafter gets nodes for what it brings: many where it is sure and the others are not, none where its drafts
    are improbable. Drafts that several of them make are one node.

    Args:
        tokens: [B, P, M] int, P <= 8, P * M <= 1023. Tokens of nodes 1..M of each drafter's trie.
        parents: [B, P, M] int. Their parents, 0 for the root; -1 padded.
        probs: [B, P, M] fp32. The probability that the drafter gives each draft once all above it are accepted. More
            than 1 counts as 1.
        factors: [P, T] fp32. What the probabilities of each drafter are multiplied by at depths 1..T and, by the last,
            at greater ones: such as how often its drafts are accepted there, divided by how often it says so. None: 1.
        num_speculative_tokens: K, the most drafts kept, 1..255.
        out: five tensors to write into.

    Returns:
        A named tuple:
        tokens: [B, K] int64. Tokens of the new trie, -1 padded. Siblings differ.
        parents: [B, K] int64. Their parents, -1 padded.
        scores: [B, K] fp32. The product, along each path, of the highest p * factor that a drafter gives the draft, at
            most 1; 0 padded. `prune_trees` takes them to share a budget among requests.
        probs: [B, P, K] fp32. What each drafter said of each draft; 0 where it did not make it.
        num_drafts: [B] int32. Their number.
        Drafts with a negative token, without an earlier parent or with a probability that is not above 0 are left out,
        with all that the drafter has below them; so are those whose score is 0 or NaN. Ties go to the earlier drafter,
        then to the earlier draft.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Source:
        eagle_kernels' own; scores as in EAGLE-2, https://arxiv.org/abs/2406.16858, compared across drafters.

    Example:
        >>> shared = eagle_kernels.share_drafts(  # one says 5, then 6; the other one 5, then 8, and is surer of that
        ...     torch.tensor([[[5, 6], [5, 8]]]), torch.tensor([[[0, 1], [0, 1]]]),
        ...     torch.tensor([[[0.5, 0.25], [0.25, 1.0]]]), num_speculative_tokens=2)
        >>> shared.tokens.tolist(), shared.scores.tolist()
        ([[5, 8]], [[0.5, 0.5]])
    """
    out = check.allocate("share_drafts", contract(locals()), out)
    batch_size, num_drafters, num_drafts = tokens.shape
    block_node = next_power_of_2(num_drafters * num_drafts + 1, 16)
    launch(
        "share_drafts", _share_drafts_kernel, (batch_size,),
        drafts=Drafts(tokens, parents, probs), factors_ptr=factors, out=out,
        num_levels=1 if factors is None else factors.shape[1],
        NUM_DRAFTERS=num_drafters, NUM_DRAFTS=num_drafts, NUM_KEPT=num_speculative_tokens,
        num_warps=max(block_node // tuning.row(TUNING, tokens.device)["nodes_per_warp"], 1),
    )  # fmt: skip
    return out
