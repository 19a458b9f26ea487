"""Merges two tries of drafts into one: a model's, and what retrieval found after or beside it.

Computes: The nodes of the first trie, then those of the other one, whose root is node attach[b] of the first, are put
    into an empty trie one after another: one whose parent is not in it is left out, one whose parent has a child of its
    token already becomes that child, any other becomes the next node, until there are num_speculative_tokens of them.
Invariants: Parents precede their children, siblings differ.
Grid: (B,), one program merges the tries of one row, a node at a time.
Launches: 1
Traffic: 2 * B * (M + M2) * index size read, 16 B K + 4 B written, for tries of M and M2 drafts and K =
    num_speculative_tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher


class Output(NamedTuple):
    """What `merge_drafts` returns."""

    tokens: torch.Tensor
    parents: torch.Tensor
    num_drafts: torch.Tensor


MAX_DRAFTS = 255

# Not measured. One warp: nodes depend on each other, and reductions within a warp are the quickest.
TUNING = {"default": {"num_warps": 1}}


class Drafts(NamedTuple):
    """Pointers to the tries of all requests, node i + 1 at place i of a row."""

    tokens: Any
    parents: Any


class Trie(NamedTuple):
    """The nodes of one trie, likewise."""

    tokens: Any  # [BLOCK_KEPT] int64
    parents: Any  # [BLOCK_KEPT] int32
    count: Any


@triton.jit
def _insert(trie, drafts, request, root, NUM_DRAFTS: tl.constexpr, NUM_KEPT: tl.constexpr):
    """Puts the drafts of a request below node `root` (-1: nowhere).
    Returns the trie with them, and of each of their nodes, root first, its node there (-1: none)."""
    kept_tokens, kept_parents, count = trie
    tokens_ptr, parents_ptr = drafts.tokens + request * NUM_DRAFTS, drafts.parents + request * NUM_DRAFTS
    node = tl.arange(0, next_power_of_2(NUM_DRAFTS + 1))
    place = tl.arange(0, kept_tokens.shape[0])
    moved = tl.where(node == 0, root, -1)
    for index in range(NUM_DRAFTS):
        token = tl.load(tokens_ptr + index).to(tl.int64)
        named = tl.load(parents_ptr + index).to(tl.int64)
        parent = tl.max(tl.where((node == named) & (node <= index), moved, -1))
        is_twin = (place < count) & (kept_parents == parent) & (kept_tokens == token)
        twin = tl.max(tl.where(is_twin, place + 1, 0))
        exists = (parent >= 0) & (token >= 0)
        is_new = exists & (twin == 0) & (count < NUM_KEPT)
        kept_tokens = tl.where((place == count) & is_new, token, kept_tokens)
        kept_parents = tl.where((place == count) & is_new, parent, kept_parents)
        count += is_new.to(tl.int32)
        target = tl.where(is_new, count, tl.where(exists & (twin > 0), twin, -1))
        moved = tl.where(node == index + 1, target, moved)
    return Trie(kept_tokens, kept_parents, count), moved


@triton.jit
def _merge_drafts_kernel(
    drafts, others, attach_ptr, out,
    NUM_DRAFTS: tl.constexpr, NUM_OTHERS: tl.constexpr, NUM_KEPT: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    BLOCK_KEPT: tl.constexpr = next_power_of_2(NUM_KEPT)
    trie = Trie(tl.full([BLOCK_KEPT], -1, tl.int64), tl.full([BLOCK_KEPT], -1, tl.int32), tl.full([], 0, tl.int32))
    trie, moved = _insert(trie, drafts, request, 0, NUM_DRAFTS, NUM_KEPT)
    attach = tl.load(attach_ptr + request).to(tl.int64)
    root = tl.max(tl.where(tl.arange(0, moved.shape[0]) == attach, moved, -1))
    trie, _ = _insert(trie, others, request, root, NUM_OTHERS, NUM_KEPT)
    place = tl.arange(0, BLOCK_KEPT)
    offset = request * NUM_KEPT + place
    tl.store(out.tokens + offset, trie.tokens, mask=place < NUM_KEPT)
    tl.store(out.parents + offset, trie.parents.to(tl.int64), mask=place < NUM_KEPT)
    tl.store(out.num_drafts + request, trie.count)


def contract(values: dict) -> Output:
    args = check.Arguments("merge_drafts", values)
    num_kept = args.integer("num_speculative_tokens", 1, MAX_DRAFTS)
    for prefix, axis in (("", "M"), ("other_", "M2")):
        count = args.tensor(f"{prefix}tokens", ("B", axis), check.INTEGER).shape[1]
        if count > MAX_DRAFTS:
            args.fail(f"{prefix}tokens", f"have {axis} in 0..{MAX_DRAFTS}", count)
        args.tensor(f"{prefix}parents", ("B", axis), check.INTEGER)
    args.tensor("attach", ("B",), check.INTEGER)
    node = args.spec((args.size("B"), num_kept), torch.int64)
    return Output(node, node, args.spec((args.size("B"),), torch.int32))


@launcher
def merge_drafts(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    other_tokens: torch.Tensor,
    other_parents: torch.Tensor,
    attach: torch.Tensor,
    *,
    num_speculative_tokens: int,
    out: Output | None = None,
) -> Output:
    """Merges two tries per request: the other one goes below a node of the first.

    Args:
        tokens: [B, M] int, M <= 255. Tokens of nodes 1..M of the first trie.
        parents: [B, M] int. Their parents, 0 for the root; -1 padded.
        other_tokens, other_parents: [B, M2] int, M2 <= 255. The same of the other trie.
        attach: [B] int. Node of the first trie that is the other one's root. If it goes, so does the other trie.
        num_speculative_tokens: K, the most drafts kept, 1..255; the first trie's go first.
        out: three tensors to write into.

    Returns:
        A named tuple:
        tokens: [B, K] int64. Tokens of the new trie, -1 padded. Siblings differ.
        parents: [B, K] int64. Their parents, -1 padded.
        num_drafts: [B] int32. Their number.
        Nodes with a negative token or without an earlier parent are left out, with all below them.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Source:
        eagle_kernels' own. FastDeploy's hybrid of MTP and n-gram drafts appends to a chain.

    Example:
        >>> merged = eagle_kernels.merge_drafts(
        ...     torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 0]]), torch.tensor([[5, 8]]), torch.tensor([[0, 1]]),
        ...     torch.tensor([0]), num_speculative_tokens=6)
        >>> merged.tokens.tolist()  # both tries have a 5 below the root; 8 follows it
        [[5, 6, 7, 8, -1, -1]]
    """
    out = check.allocate("merge_drafts", contract(locals()), out)
    launch(
        "merge_drafts", _merge_drafts_kernel, (tokens.shape[0],),
        drafts=Drafts(tokens, parents), others=Drafts(other_tokens, other_parents), attach_ptr=attach, out=out,
        NUM_DRAFTS=tokens.shape[1], NUM_OTHERS=other_tokens.shape[1], NUM_KEPT=num_speculative_tokens,
        **tuning.row(TUNING, tokens.device),
    )  # fmt: skip
    return out
