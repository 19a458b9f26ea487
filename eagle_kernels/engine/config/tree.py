"""The sizes of a drafting tree."""

from __future__ import annotations

from typing import NamedTuple


class Tree(NamedTuple):
    """The sizes of a tree: `num_steps` levels of `topk` nodes with `topk` children each, of which the best
    `num_draft_tokens` nodes are verified, the root included."""

    topk: int
    num_steps: int
    num_draft_tokens: int

    @property
    def most_accepted(self) -> int:
        """The most drafts that a step accepts: one a level, and no more than there are."""
        return min(self.num_steps, self.num_draft_tokens - 1)


# what adaptive="auto" tries beside the configuration's own tree
SMALLER_TREES = (Tree(1, 1, 2), Tree(1, 3, 4), Tree(4, 3, 8), Tree(4, 4, 16))


def rates_of_mean_length(mean: float, spec_steps: int) -> list[float]:
    """Returns P(at least 1, 2, .. spec_steps drafts accepted) for a mean accept length, bonus included.

    mean - 1 = k + f drafts: k are always accepted, one more with probability f. No rates of this mean spread less.
    """
    return [min(max(mean - 1 - depth, 0.0), 1.0) for depth in range(spec_steps)]
