"""Moves a trie of drafts to a later root: keeps what is below the tokens that were committed since it was made.

Computes: A drafter on the host is a step behind the device: while it looks for drafts, the tokens of that step are
    verified. The new trie has the first num_speculative_tokens descendants of the node at the end of the path, at most
    spec_steps below it.
Invariants: Parents precede their children.
Grid: (B,), one program moves one trie.
Launches: 1
Traffic: 2 * B * M * index size and B * T * index size read, 16 B K + 4 B written, for tries of M drafts, paths of T
    tokens and K = num_speculative_tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.tree import ancestor_word, depths
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher
from .shared.ngram import erase_drafts


class Output(NamedTuple):
    """What `reroot_drafts` returns."""

    tokens: torch.Tensor
    parents: torch.Tensor
    num_drafts: torch.Tensor


MAX_DRAFTS = 1023

# Not measured.
TUNING = {"default": {"nodes_per_warp": 128}}


@triton.jit(do_not_specialize=["path_size", "spec_steps"])
def _reroot_drafts_kernel(
    tokens_ptr, parents_ptr, path_ptr, out,
    path_size, spec_steps,
    NUM_DRAFTS: tl.constexpr, NUM_KEPT: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    BLOCK_NODE: tl.constexpr = next_power_of_2(NUM_DRAFTS + 1, 16)
    node = tl.arange(0, BLOCK_NODE)
    is_draft = (node > 0) & (node <= NUM_DRAFTS)
    offset = request * NUM_DRAFTS + node - 1
    token = tl.load(tokens_ptr + offset, mask=is_draft, other=-1).to(tl.int64)
    named = tl.load(parents_ptr + offset, mask=is_draft, other=-1).to(tl.int64)
    parent = tl.where((named >= 0) & (named < node) & (token >= 0), named, -1).to(tl.int32)

    # BLOCK_NODE: the path has left the trie
    root, place = 0, 0
    committed = tl.full([], 0, tl.int64)
    while (place < path_size) & (committed >= 0) & (root < BLOCK_NODE):
        committed = tl.load(path_ptr + request * path_size + place).to(tl.int64)
        if committed >= 0:
            root = tl.min(tl.where((parent == root) & (token == committed), node, BLOCK_NODE))
        place += 1

    # paths that end at the new root
    below = tl.where(node == root, -1, parent)
    depth = depths(below, NUM_DRAFTS + 1)
    is_under = ancestor_word((node == root).to(tl.int32), below, NUM_DRAFTS + 1) != 0
    is_kept = is_under & (depth > 0) & (depth <= spec_steps)
    # the number of the root is 0, and that of nodes that are not kept too
    number = tl.where(is_kept, tl.cumsum(is_kept.to(tl.int32), 0), 0)
    new_parent = tl.gather(number, tl.maximum(parent, 0), 0)
    first = request * NUM_KEPT
    is_written = is_kept & (number <= NUM_KEPT)
    tl.store(out.tokens + first + number - 1, token, mask=is_written)
    tl.store(out.parents + first + number - 1, new_parent.to(tl.int64), mask=is_written)
    count = tl.minimum(tl.max(number), NUM_KEPT)
    tl.store(out.num_drafts + request, count)
    erase_drafts(out, request, count, NUM_KEPT, NUM_KEPT)


def contract(values: dict) -> Output:
    args = check.Arguments("reroot_drafts", values)
    num_kept = args.integer("num_speculative_tokens", 1, MAX_DRAFTS)
    args.integer("spec_steps", 1)
    num_drafts = args.tensor("tokens", ("B", "M"), check.INTEGER).shape[1]
    if num_drafts > MAX_DRAFTS:
        args.fail("tokens", f"have M in 0..{MAX_DRAFTS}", num_drafts)
    args.tensor("parents", ("B", "M"), check.INTEGER)
    args.tensor("path", ("B", "T"), check.INTEGER)
    node = args.spec((args.size("B"), num_kept), torch.int64)
    return Output(node, node, args.spec((args.size("B"),), torch.int32))


@launcher
def reroot_drafts(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    path: torch.Tensor,
    *,
    num_speculative_tokens: int,
    spec_steps: int,
    out: Output | None = None,
) -> Output:
    """Moves the trie of every request to a later root: keeps what is below the tokens committed since.

    Args:
        tokens: [B, M] int, M <= 1023. Tokens of nodes 1..M.
        parents: [B, M] int. Their parents, 0 for the root; -1 padded.
        path: [B, T] int. The tokens committed since, up to the first negative one. They lead from the root down to the
            new one, each to the first child that carries it.
        num_speculative_tokens: K, the most drafts kept, 1..1023.
        spec_steps: the most levels kept, at least 1.
        out: three tensors to write into.

    Returns:
        A named tuple:
        tokens: [B, K] int64. Tokens of the new trie, in their old order, -1 padded.
        parents: [B, K] int64. Their parents, -1 padded.
        num_drafts: [B] int32. Their number; 0 where the path leaves the old trie.
        Nodes with a negative token or without an earlier parent are left out, with all below them.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Source:
        eagle_kernels' own.

    Example:
        >>> moved = eagle_kernels.reroot_drafts(
        ...     torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 3]]), torch.tensor([[5]]),
        ...     num_speculative_tokens=4, spec_steps=4)
        >>> moved.tokens.tolist()  # 5 was committed; 7 follows it, and 8 follows 7
        [[7, 8, -1, -1]]
    """
    out = check.allocate("reroot_drafts", contract(locals()), out)
    batch_size, num_drafts = tokens.shape
    launch(
        "reroot_drafts", _reroot_drafts_kernel, (batch_size,),
        tokens_ptr=tokens, parents_ptr=parents, path_ptr=path, out=out, path_size=path.shape[1],
        spec_steps=min(spec_steps, MAX_DRAFTS),
        NUM_DRAFTS=num_drafts, NUM_KEPT=num_speculative_tokens,
        num_warps=max(next_power_of_2(num_drafts + 1) // tuning.row(TUNING, tokens.device)["nodes_per_warp"], 1),
    )  # fmt: skip
    return out
