"""The exact law of a function that draws: every outcome it can have, and the probability of each.

`enumerate_outcomes(function)` calls `function(source)` again and again, where `source` stands in for a random
generator. What it hands out has no value yet: a `LazyUniform` is an interval that only the comparisons made with it cut
down. Each comparison whose answer is open is a branch; a replay takes one way at every branch, and all replays together
take all ways. So shipped code is enumerated as it is, if it does nothing with a uniform but compare it (`u < x`) and
scale it (`u * x < y`). With float64 numbers in the function, the probabilities are exact to about 1e-15.

Uniforms lie in [0, 1) and comparisons with one number have no width: `<=` for `<` does not show here, only with a coin
that stands on the edge.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch


def enumerate_outcomes(function: Callable[[Source], Hashable], *, most: int = 1_000_000) -> dict[Hashable, float]:
    """Returns the probability of every outcome of `function`, which must depend on nothing but its source's draws.
    Raises RuntimeError if there are more than `most` ways through it. Every way must end."""
    law: dict[Hashable, float] = {}
    way: list[_Branch] | None = []
    for _ in range(most):
        source = Source(way)
        outcome = function(source)
        probability = 1.0
        for branch in source.branches:
            probability *= branch.options[branch.taken][1]
        law[outcome] = law.get(outcome, 0.0) + probability
        way = _next_way(source.branches)
        if way is None:
            return law
    raise RuntimeError(f"more than {most} ways through {function}")


def total_variation(law: dict[Hashable, float], other: dict[Hashable, float]) -> float:
    """Returns half the summed difference of two laws."""
    return 0.5 * sum(abs(law.get(outcome, 0.0) - other.get(outcome, 0.0)) for outcome in law.keys() | other.keys())


def text_law(law: dict[tuple, torch.Tensor], length: int) -> dict[tuple, float]:
    """Returns the probability of every text of `length` tokens."""
    return completed({(): 1.0}, law, length)


def completed(emitted: dict[tuple, float], law: dict[tuple, torch.Tensor], length: int) -> dict[tuple, float]:
    """Returns the law of texts of `length` tokens that begin as `emitted` and go on as plain sampling from `law`."""
    whole: dict[tuple, float] = {}
    for text, probability in emitted.items():
        if len(text) < length:
            ways = {(*text, token): probability * float(prob) for token, prob in enumerate(law[text])}
            ways = completed(ways, law, length)
        else:
            ways = {text[:length]: probability}
        for way, share in ways.items():
            whole[way] = whole.get(way, 0.0) + share
    return whole


class Source:
    """The draws of one replay: it takes the branches of `way` as they stand, and the first option of each later one."""

    def __init__(self, way: Sequence[_Branch] = ()):
        self._way = list(way)
        self.branches: list[_Branch] = []

    def uniform(self) -> LazyUniform:
        """Returns a uniform in [0, 1), independent of all others."""
        return LazyUniform(self)

    def choose(self, probs: torch.Tensor | Sequence[float]) -> int:
        """Returns an index drawn by these probabilities."""
        return self.branch([(index, float(prob)) for index, prob in enumerate(probs)])

    def branch(self, options: list[tuple[Hashable, float]]) -> Hashable:
        """Returns one of the options, pairs of an outcome and its probability; one of probability 0 is never taken."""
        options = [(option, probability) for option, probability in options if probability > 0.0]
        if len(options) == 1:
            return options[0][0]
        place = len(self.branches)
        branch = self._way[place] if place < len(self._way) else _Branch(options)
        assert branch.options == options, "the function does not do the same when its draws are the same"
        self.branches.append(branch)
        return branch.options[branch.taken][0]


class EnumeratedDraws:
    """A stand-in for a reference's `Draws`, which draws from a source that enumerates all outcomes.
    No two draws of one request may have the same key, in whatever rounds, or one of them would tell the other."""

    def __init__(self, source):
        self._source, self._keys = source, set()

    def uniform(self, position, draw=0):
        self._use(("accept", position, draw))
        return self._source.uniform()

    def choose(self, weights, position):
        self._use(("residual", position))
        return self._source.choose(weights / weights.sum())

    def _use(self, key):
        assert key not in self._keys, f"the draw {key} is used twice"
        self._keys.add(key)


class LazyUniform:
    """A uniform that lies anywhere in [low, high): only the answers given so far are known."""

    def __init__(self, source: Source):
        self._source, self.low, self.high = source, 0.0, 1.0

    def __lt__(self, edge) -> bool:
        edge = float(edge)
        if edge >= self.high:
            return True
        if not edge > self.low:  # a NaN is above nothing
            return False
        below = (edge - self.low) / (self.high - self.low)
        is_below = self._source.branch([(True, below), (False, 1.0 - below)])
        if is_below:
            self.high = edge
        else:
            self.low = edge
        return is_below

    def __mul__(self, scale) -> _Scaled:
        return _Scaled(self, float(scale))

    __rmul__ = __mul__


class _Scaled:
    """A positive multiple of a uniform."""

    def __init__(self, uniform: LazyUniform, scale: float):
        assert scale > 0.0, f"a uniform scaled by {scale}"
        self._uniform, self._scale = uniform, scale

    def __lt__(self, edge) -> bool:
        return self._uniform < float(edge) / self._scale


class _Branch:
    """A point where a replay had a choice, and which option it took."""

    def __init__(self, options: list[tuple[Hashable, float]], taken: int = 0):
        self.options, self.taken = options, taken


def _next_way(branches: list[_Branch]) -> list[_Branch] | None:
    """Returns the branches up to the last one with an option left, with that option taken; None after the last way."""
    while branches:
        last = branches[-1]
        if last.taken + 1 < len(last.options):
            return branches[:-1] + [_Branch(last.options, last.taken + 1)]
        branches = branches[:-1]
    return None
