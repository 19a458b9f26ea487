"""Grammars on token trees: what a grammar allows after every node, as one bit per token.

The bitmask is int32 [B * N, ceil(V / 32)], the layout of xgrammar and llguidance: bit v % 32 of word v // 32 of a row
is set if token v may follow the row's node. Rows are in the order of the target's logits, node i of request b at
b * N + i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..runtime import check
from ..runtime.calls import with_kinds

_METHODS = ("accept_token", "rollback", "fill_next_token_bitmask", "is_terminated")


class Matcher(Protocol):
    """Holds a grammar and a request's state in it, such as xgrammar's GrammarMatcher."""

    def accept_token(self, token: int) -> bool:
        """Advances by `token` and returns True, or stays put and returns False if the grammar refuses it."""

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last accepted tokens, including one that ended the grammar."""

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int) -> object:
        """Writes row `index` of `bitmask`; its result is ignored."""

    def is_terminated(self) -> bool:
        """Returns whether the grammar has ended, by accepting a stop token."""


@with_kinds
def generate_token_bitmask(
    matchers: Sequence[Matcher | None],
    draft_tokens: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    *,
    vocab_size: int,
    out: Tensor | None = None,
) -> Tensor:
    """Returns what each request's grammar allows after every node of its tree, as one bit per token.

    Walks each tree depth first, with the request's matcher. It runs on the CPU, where all tensors must be, and can
    overlap the target's forward pass on a GPU.

    Symbols: B requests, N nodes of a tree, its root included.

    Args:
        matchers: One per request; None allows everything. A matcher must have accepted the committed tokens and the
            root, and is left in that state, even after an error. It must be able to roll back one token per tree level.
        draft_tokens: [B, N] or [B * N], int32 or int64. Tokens of the nodes, as `build_tree` returns them.
        retrieve_next_token: [B, N] int32 or int64. First child of each node.
        retrieve_next_sibling: [B, N] int32 or int64. Next sibling of each node. Links that do not point forward are
            ignored.
        vocab_size: V, the width of the target's logits.
        out: [B * N, ceil(V / 32)] int32. The tensor to write into, which may be pinned.

    Returns:
        [B * N, ceil(V / 32)] int32. Bit v % 32 of word v // 32 is set if token v may follow the node. All bits of a row
        are set, even from V on, if there is no grammar, after its end (what follows a stop token is cut off), and at a
        node that cannot be accepted, because the grammar refuses its token or one above it or nothing links to it.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Example:
        >>> class EvenTokens:  # a grammar; xgrammar's GrammarMatcher has the same four methods
        ...     def accept_token(self, token): return token % 2 == 0
        ...     def rollback(self, num_tokens): pass
        ...     def fill_next_token_bitmask(self, bitmask, index): bitmask[index] = 0b0101
        ...     def is_terminated(self): return False
        >>> tokens, first_child, sibling = torch.tensor([[[0, 2, 3]], [[1, -1, -1]], [[-1, 2, -1]]])
        >>> eagle_kernels.generate_token_bitmask([EvenTokens()], tokens, first_child, sibling, vocab_size=4)
        tensor([[ 5],
                [ 5],
                [-1]], dtype=torch.int32)
    """
    args = check.Arguments("generate_token_bitmask", locals())
    args.integer("vocab_size", 1)
    links = [args.tensor(name, ("B", "N"), check.INTEGER) for name in ("retrieve_next_token", "retrieve_next_sibling")]
    batch_size, num_nodes = args.size("B"), args.size("N")
    is_flat = isinstance(draft_tokens, Tensor) and draft_tokens.dim() == 1
    args.tensor("draft_tokens", (batch_size * num_nodes,) if is_flat else ("B", "N"), check.INTEGER)
    if args.device.type != "cpu":
        args.fail(
            "retrieve_next_token", "be on the cpu, like all tensors here: grammar matchers work there", args.device
        )
    if len(matchers) != batch_size:
        args.fail("matchers", f"hold one matcher or None for each of {batch_size} requests", len(matchers))
    for index, matcher in enumerate(matchers):
        missing = [name for name in _METHODS if not callable(getattr(matcher, name, None))]
        if matcher is not None and missing:
            args.fail(f"matchers[{index}]", f"have {', '.join(missing)}", type(matcher).__name__, TypeError)

    spec = args.spec((batch_size * num_nodes, -(-vocab_size // 32)), torch.int32)
    bitmask = check.allocate("generate_token_bitmask", spec, out).fill_(-1)
    trees = zip(*(tensor.view(batch_size, num_nodes).tolist() for tensor in (draft_tokens, *links)))
    for request, (matcher, tree) in enumerate(zip(matchers, trees)):
        if matcher is not None and num_nodes > 0:
            _fill_tree(matcher, tree, vocab_size, bitmask, request * num_nodes)
    return bitmask


def _fill_tree(
    matcher: Matcher, tree: tuple[list[int], list[int], list[int]], vocab_size: int, bitmask: Tensor, first_row: int
) -> None:
    """Fills the rows of one tree. Each node is met once, by the first link to it, so every walk ends."""
    tokens, children, siblings = tree
    pending = [(0, 0)]  # node, and how many tokens the matcher holds above it
    met = {0}
    held = 0

    def follow(link: int, node: int, num_above: int) -> None:
        if node < link < len(tokens) and link not in met:
            met.add(link)
            pending.append((link, num_above))

    try:
        while pending:
            node, num_above = pending.pop()
            if held > num_above:
                matcher.rollback(held - num_above)
                held = num_above
            if node > 0:
                follow(siblings[node], node, num_above)
                if not 0 <= tokens[node] < vocab_size or not matcher.accept_token(tokens[node]):
                    continue
                held += 1
            if not matcher.is_terminated():
                matcher.fill_next_token_bitmask(bitmask, first_row + node)
                follow(children[node], node, held)
    finally:
        if held > 0:
            matcher.rollback(held)
