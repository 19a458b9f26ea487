"""Chooses the tree of a step: always the same, by a table of batch sizes, or the fastest so far."""

from __future__ import annotations

from typing import Protocol

# A tree is judged after so many measured steps. One that is not in use is measured again, with as many steps, after
# PROBE_AFTER others, or as many more as keep the time lost by that below PROBE_SHARE of all.
PROBE_STEPS = 4
PROBE_AFTER = 256
PROBE_SHARE = 0.01
# The least weight of a new step time; GPUs take about the same time for the same work.
TIME_WEIGHT = 0.25
# Tokens of a step are averaged over so many rows, and at least so many steps: rows may have the same text.
TOKEN_ROWS, TOKEN_STEPS = 64, 16
# A tree below this share of a smaller one's speed is not measured at once with more requests, which make it dearer.
HOPELESS = 0.8


class Choice(Protocol):
    """A choice among steppers by number; number 0 is plain decoding."""

    def choose(self, num_rows: int) -> int:
        """Returns the number for a step of `num_rows` rows, dead rows between others included."""

    def note(self, number: int, num_rows: int, step_ms: float | None, tokens: float) -> None:
        """Notes what such a step took, None if not measured, and how many tokens it brought a request."""


class ByBatchSize:
    """A choice by a table of (most rows, number), ascending; batches beyond its last entry are decoded plainly."""

    def __init__(self, table: tuple[tuple[int | None, int], ...]):
        self._table = table

    def choose(self, num_rows: int) -> int:
        for most, number in self._table:
            if most is None or num_rows <= most:
                return number
        return 0

    def note(self, number: int, num_rows: int, step_ms: float | None, tokens: float) -> None:
        pass


class Fastest:
    """A choice of the number with most tokens a second: step times by batch size, tokens over all batch sizes.

    The others are measured again now and then, so that a change of the texts is noticed; the slower ones more rarely.
    A number that lost in smaller batches is first measured by these probes, as rarely as its times there suggest: texts
    of larger batches may differ. Larger numbers stand for trees of more nodes.

    most_rows  batches beyond it are decoded plainly; None: none are
    """

    def __init__(self, count: int, most_rows: int | None):
        self._count, self._most_rows = count, most_rows
        self._tokens: dict[int, float] = {0: 1.0}
        self._rows_seen: dict[int, int] = {}
        self._step_ms: dict[tuple[int, int], float] = {}
        self._num_timed: dict[tuple[int, int], int] = {}
        self._num_seen: dict[tuple[int, int], int] = {}
        self._num_unseen: dict[tuple[int, int], int] = {}
        self._probe: tuple[int, int, int] | None = None  # batch size class, number, steps left

    def choose(self, num_rows: int) -> int:
        if self._most_rows is not None and num_rows > self._most_rows:
            return 0
        size = _size_class(num_rows)
        if self._probe is not None and self._probe[0] == size:
            return self._probe[1]
        numbers = range(self._count)
        for number in numbers:
            if self._num_seen.get((size, number), 0) < PROBE_STEPS and not self._is_hopeless(size, number):
                return number
        best = max(numbers, key=lambda number: self._speed(size, number))
        for number in numbers:
            key = size, number
            self._num_unseen[key] = 0 if number == best else self._num_unseen.get(key, 0) + 1
            lost_steps = PROBE_STEPS * self._lost_steps(size, number, best)
            if self._num_unseen[key] > max(PROBE_AFTER, lost_steps * (self._count - 1) / PROBE_SHARE):
                self._num_unseen[key] = 0
                self._probe = (*key, PROBE_STEPS)
                return number
        return best

    def note(self, number: int, num_rows: int, step_ms: float | None, tokens: float) -> None:
        key = (_size_class(num_rows), number)
        self._num_seen[key] = self._num_seen.get(key, 0) + 1
        if number:
            seen = self._rows_seen[number] = self._rows_seen.get(number, 0) + num_rows
            weight = max(num_rows / seen, min(1 / TOKEN_STEPS, num_rows / TOKEN_ROWS))
            self._tokens[number] = _mean(self._tokens.get(number, tokens), tokens, weight)
        if step_ms is not None:
            timed = self._num_timed[key] = self._num_timed.get(key, 0) + 1
            self._step_ms[key] = _mean(self._step_ms.get(key, step_ms), step_ms, max(1 / timed, TIME_WEIGHT))
        if self._probe is not None and self._probe[:2] == key:
            left = self._probe[2] - 1
            self._probe = (*key, left) if left else None

    def _is_hopeless(self, size: int, number: int) -> bool:
        """Returns whether it lost against a smaller tree in a smaller batch, with the tokens that it brings by now."""
        for fewer in range(size - 1, -1, -1):
            speed = self._speed(fewer, number)
            if speed:
                return any(speed < HOPELESS * self._speed(fewer, other) for other in range(number))
        return False

    def _lost_steps(self, size: int, number: int, best: int) -> float:
        """Returns the time that a step loses against the best one for the same tokens, in steps; 0 if not known."""
        step_ms, best_ms = self._step_ms.get((size, number)), self._step_ms.get((size, best))
        if best_ms is None:
            return 0.0
        if step_ms is None:
            step_ms = best_ms + self._extra_ms(size, number, best)
        return step_ms / best_ms - self._tokens.get(number, 1.0) / self._tokens.get(best, 1.0)

    def _extra_ms(self, size: int, number: int, best: int) -> float:
        """Returns how much longer than the best one's a step may take, by each request of the next smaller batch."""
        for fewer in range(size - 1, -1, -1):
            times = [self._step_ms.get((fewer, each)) for each in (number, best)]
            if None not in times:
                return (times[0] - times[1]) * 2 ** (size - fewer)
        return 0.0

    def _speed(self, size: int, number: int) -> float:
        step_ms = self._step_ms.get((size, number))
        return self._tokens.get(number, 1.0) / step_ms if step_ms else 0.0


def _size_class(num_rows: int) -> int:
    """Returns one number for all batch sizes that share a graph."""
    return (num_rows - 1).bit_length()


def _mean(old: float, new: float, weight: float) -> float:
    return old + weight * (new - old)
