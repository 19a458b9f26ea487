"""How fast speculation should be: tokens a step by what is accepted, the time of a step by what other steps took.

A step verifies r = B N rows of B requests. Its time is that of

    the target  t(r) + B c        t: as measured in plain steps, less c; of more rows than these reading the weights and
                                  their arithmetic, s ms a row, overlap in part: their squares are added, which is what
                                  the measured steps do where both take their time. c: one request's keys and values at
                                  the bandwidth of a read
    the draft   d(B (S + 1)) + (S - 1) d(B K)
                                  reads the accepted path, then drafts S - 1 further levels of K beams. d: as measured
                                  in steps with one draft, whose second row makes the target's part known

and speed-up is tokens a step over its time in plain steps. So plain decoding and single drafts at some batch sizes, and
one tree in a batch large enough to be limited by arithmetic, predict every other tree at every batch size.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# (topk, num_steps, num_draft_tokens)
Tree = tuple[int, int, int]


def expected_tokens(rates: Sequence[float]) -> float:
    """Tokens a step, bonus included; rates: P(draft at depth 1, 2, .. accepted, given those above it)."""
    return 1.0 + sum(itertools.accumulate(rates, lambda share, rate: share * rate))


def expected_tokens_of_chain(alpha: float, num_drafts: int) -> float:
    """The same for one rate at all depths: (1 - alpha^(K + 1)) / (1 - alpha) (arXiv 2211.17192, equation 1)."""
    return expected_tokens([alpha] * num_drafts)


def ideal_speedup(alpha: float, num_drafts: int, draft_cost: float) -> float:
    """Over plain decoding where verification is free: a step takes 1 + K c plain ones (arXiv 2211.17192, theorem 3.8).

    draft_cost: time of one draft over that of a plain step.
    """
    return expected_tokens_of_chain(alpha, num_drafts) / (1.0 + num_drafts * draft_cost)


@dataclass(frozen=True)
class StepModel:
    """Measured times of a target and a draft, in ms; see the module's docstring."""

    target_ms: tuple[tuple[int, float], ...]  # (rows, t) ascending
    draft_ms: tuple[tuple[int, float], ...]  # (rows, d) ascending
    request_ms: float  # c
    row_ms: float  # s, what a row takes the target where arithmetic limits it
    draft_row_ms: float  # likewise the draft

    @classmethod
    def fit(
        cls,
        plain_ms: Mapping[int, float],
        single_ms: Mapping[int, float],
        large: tuple[Tree, int, float],
        *,
        request_ms: float,
        draft_share: float,
    ) -> StepModel:
        """plain_ms, single_ms: step times by batch size, without drafts and with one each (2 nodes); large: a tree, a
        batch size and its step time, limited by arithmetic; draft_share: of a row's arithmetic, draft over target."""
        target = tuple((size, time - size * request_ms) for size, time in sorted(plain_ms.items()))
        known = cls(target, ((1, 0.0),), request_ms, 0.0, 0.0)
        draft = tuple(
            (2 * size, time - known._target(2 * size) - size * request_ms)
            for size, time in sorted(single_ms.items())
            if 2 * size <= target[-1][0]
        )
        tree, size, measured_ms = large

        def with_row_ms(row_ms: float) -> StepModel:
            return cls(target, draft, request_ms, row_ms, draft_share * row_ms)

        low, high = 0.0, measured_ms
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if with_row_ms(middle).step_ms(tree, size) < measured_ms else (low, middle)
        return with_row_ms(high)

    def plain_ms(self, batch_size: int) -> float:
        """Predicts the time of a step of `batch_size` requests without drafts."""
        return self._target(batch_size) + batch_size * self.request_ms

    def step_ms(self, tree: Tree, batch_size: int) -> float:
        """Predicts the time of a step of `batch_size` requests with this tree."""
        topk, num_steps, num_nodes = tree
        draft = self._draft(batch_size * (num_steps + 1)) + (num_steps - 1) * self._draft(batch_size * topk)
        return self._target(batch_size * num_nodes) + batch_size * self.request_ms + draft

    def speedup(self, tree: Tree, batch_size: int, tokens_per_step: float) -> float:
        """Over plain decoding of the same batch."""
        return tokens_per_step * self.plain_ms(batch_size) / self.step_ms(tree, batch_size)

    def best(self, trees: Iterable[tuple[Tree, float]], batch_size: int) -> Tree | None:
        """Of (tree, tokens a step) the fastest; None: plain decoding is."""
        speeds = {tree: self.speedup(tree, batch_size, tokens) for tree, tokens in trees}
        fastest = max(speeds, key=speeds.__getitem__, default=None)
        return fastest if fastest is not None and speeds[fastest] > 1 else None

    def _target(self, rows: int) -> float:
        return _between(self.target_ms, rows, self.row_ms)

    def _draft(self, rows: int) -> float:
        return _between(self.draft_ms, rows, self.draft_row_ms)


def _between(points: Sequence[tuple[int, float]], x: int, slope: float) -> float:
    """Linear between the points, the first one's value before them; behind them the squares of slope x are added to
    what is left of the last one's square without them."""
    (first, value), (last, top) = points[0], points[-1]
    if x <= first:
        return value
    if x >= last:
        return math.sqrt(top**2 + slope**2 * (x**2 - last**2))
    index = bisect.bisect_right([place for place, _ in points], x)
    (low, below), (high, above) = points[index - 1 : index + 1]
    return below + (above - below) * (x - low) / (high - low)
