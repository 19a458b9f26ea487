"""Chooses the tree of a step: by a table of batch sizes, or whichever has been fastest so far."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

# A tree is judged after PROBE_STEPS measured steps. A tree that is not in use is measured again for PROBE_STEPS steps
# after PROBE_AFTER others; later if the time lost by measuring would otherwise exceed PROBE_SHARE of the total.
PROBE_STEPS = 4
PROBE_AFTER = 256
PROBE_SHARE = 0.01
# One that would lose with every draft accepted, by its times so far, has one step after LOSER_AFTER others.
LOSER_AFTER = 8 * PROBE_AFTER
# Most rows of a step that takes little longer than one of few rows: the tree that is tried first has no more.
FREE_ROWS = 256
# ... nor does it read more weights than this many times those of a plain step: rows of experts are not free.
FREE_BYTES = 2.0
# A tree that has to be captured first, which takes about as long as this number of steps, is tried after them.
COLD_AFTER = 128
# The least weight of a new step time in the mean; a GPU takes about the same time for the same work.
TIME_WEIGHT = 0.25
# A busy machine makes steps longer, never shorter. So a step that took more than this many times the mean counts as one
# that took this many times as long, and a step that took that much less replaces the mean.
OUTLIER = 2.0
# Tokens per step are averaged over this many rows, but at least this many steps, since rows may share a text.
TOKEN_ROWS, TOKEN_STEPS = 64, 16
# A tree that was slower than this share of a smaller tree's speed is not measured as soon as the batch grows, since
# larger batches make large trees even more expensive.
HOPELESS = 0.8
# Tokens per step are known to this many standard errors, once TOKEN_STEPS steps have been measured.
SURE = 3.0


class Outlook(NamedTuple):
    """Says how many tokens per millisecond a request gets: in steps of one number at most, by the tokens and times that
    are known; in those of the best number in use at least, and in the mean."""

    most: float
    least: float
    mean: float


class Tokens:
    """Holds what the steps of each number bring a request, in batches of any size.

    mean     tokens per step, averaged as TOKEN_ROWS says
    error    the square of its standard error
    resting  the numbers that are left out
    """

    def __init__(self) -> None:
        self.mean, self.error = {0: 1.0}, dict[int, float]()
        self.rows, self.steps = Counter(), Counter()
        self.resting: set[int] = set()

    def note(self, number: int, num_rows: int, tokens: float) -> None:
        """Notes the mean number of tokens per request of a step with drafts."""
        self.rows[number] += num_rows
        self.steps[number] += 1
        weight = max(num_rows / self.rows[number], min(1 / TOKEN_STEPS, num_rows / TOKEN_ROWS))
        change = weight * (tokens - self.mean.get(number, tokens))
        self.mean[number] = self.mean.get(number, tokens) + change
        self.error[number] = (1 - weight) ** 2 * self.error.get(number, 0.0) + change**2

    def bounds(self, number: int, most: int) -> tuple[float, float]:
        """Returns the least and the most that the mean of steps of this number may be; most: what none exceeds."""
        if self.steps[number] < TOKEN_STEPS:
            return 1.0, float(most)
        margin = SURE * math.sqrt(self.error[number])
        return max(1.0, self.mean[number] - margin), min(most, self.mean[number] + margin)

    def forget(self, numbers: Collection[int]) -> None:
        """Forgets what steps of these numbers brought, and lets them rest no longer."""
        self.resting.difference_update(numbers)
        for table in (self.mean, self.error, self.rows, self.steps):
            for number in numbers:
                table.pop(number, None)


class Choice:
    """Chooses among the runners of a plan by their numbers, of which 0 is plain decoding: from an ascending table of
    (most rows, number), beyond whose last entry batches are decoded plainly."""

    def __init__(self, table: Sequence[tuple[int | None, int]]):
        self._table = table
        self.steps: Counter[int] = Counter()  # by number

    def choose(self, num_rows: int) -> int:
        """Returns the number of the runner for a step of `num_rows` rows, including dead rows among them."""
        return next((number for most, number in self._table if most is None or num_rows <= most), 0)

    def note(self, number: int, num_rows: int, step_ms: float | None, tokens: float) -> None:
        """Notes the time of such a step (None: it was not measured) and the mean number of tokens per request."""
        self.steps[number] += 1

    def tokens_of(self, number: int) -> float | None:
        """Returns the mean tokens per step and request of late; None: not known."""
        return None

    def expect(self, number: int, num_rows: int, least_ms: float) -> None:
        """Notes what such a step takes at least, as measured without any request."""

    def fits(self, number: int, num_rows: int) -> bool:
        """Returns False if such a step is not to be taken: its draft rests, or memory does not suffice."""
        return True

    def give_up(self, number: int, num_rows: int) -> bool:
        """Notes that such a step does not fit; returns whether there are others to choose from."""
        return False

    def beside_prompts(self) -> Choice:
        """Returns the choice for steps that read prompts as well, which take other times for the same tokens."""
        return self


class Fastest(Choice):
    """Chooses the number with the most tokens per second, from step times by batch size and tokens over all sizes.

    The other numbers are probed (measured again) now and then, the slower ones more rarely, so that a change in the
    texts is noticed. A number that lost in smaller batches is not measured first, but left to these probes, which are
    as rare as its times in smaller batches suggest: larger batches may differ. What would lose with every draft
    accepted has a step now and then, since texts grow and shrink, and times with them. Larger numbers are larger trees.
    Without a warm-up the first steps are those of the largest tree whose rows are free, and the others are captured one
    by one, each once enough steps have gone by.

    most_tokens  of each number: the tokens that a step brings a request in the mean, at most
    most_rows    larger batches are decoded plainly; None: there is no limit
    rows         of each number: the rows of a request in a step; None: no step has to be captured
    read_bytes   the bytes of weights that a step of this many rows reads, by a call that may wait for the device;
                 None: rows make no difference
    kinds        of each number: the draft model that drafts; only trees of one are compared by their sizes. None: one
    tokens       what steps bring, see `Tokens`; None: nothing is known yet
    """

    def __init__(
        self, most_tokens: Sequence[int], most_rows: int | None, rows: Sequence[int] | None = None,
        tokens: Tokens | None = None,
        read_bytes: Callable[[float], float] | None = None, kinds: Sequence[int | None] | None = None,
    ):  # fmt: skip
        super().__init__(())
        self._count, self._most_tokens, self._most_rows, self._rows = len(most_tokens), most_tokens, most_rows, rows
        self._read_bytes, self._kinds = read_bytes, kinds or [None] * len(most_tokens)
        self._tokens = tokens or Tokens()
        # by (batch size class, number): mean, least and expected time, steps timed and noted, steps since it was in use
        self._step_ms: dict[tuple[int, int], float] = {}
        self._least_ms: dict[tuple[int, int], float] = {}
        self._expected_ms: dict[tuple[int, int], float] = {}
        self._num_timed, self._num_seen, self._num_unseen = Counter(), Counter(), Counter()
        self._probe: tuple[int, int, int] | None = None  # batch size class, number, steps left
        # by number: the least class of batch sizes that memory does not suffice for
        self._too_large: dict[int, int] = {}

    def beside_prompts(self) -> Fastest:
        return Fastest(
            self._most_tokens, self._most_rows, self._rows, self._tokens, self._read_bytes, self._kinds,
        )  # fmt: skip

    def choose(self, num_rows: int) -> int:
        if self._most_rows is not None and num_rows > self._most_rows:
            return 0
        size = _size_class(num_rows)
        if self._probe is not None and self._probe[0] == size and self.fits(self._probe[1], num_rows):
            return self._probe[1]
        fitting = [number for number in range(self._count) if self.fits(number, num_rows)]
        numbers = [number for number in fitting if self._is_warm(size, number) or self._is_due(size)]
        if not numbers:
            return max(number for number in fitting if number == 0 or self._is_free(number, num_rows))
        for number in numbers:
            is_young = self._num_seen[size, number] < PROBE_STEPS
            if is_young and not self._is_hopeless(size, number) and self._may_win(size, number):
                return number
        best = max(numbers, key=lambda number: self._speed(size, number))
        num_others = self._count - len(self._tokens.resting) - 1
        for number in numbers:
            key = size, number
            self._num_unseen[key] = 0 if number == best else self._num_unseen[key] + 1
            if self._num_unseen[key] <= PROBE_AFTER:
                continue
            may_win = self._may_win(size, number)
            steps, rest = (PROBE_STEPS, PROBE_AFTER) if may_win else (1, LOSER_AFTER)
            lost_steps = steps * self._lost_steps(size, number, best)
            if self._num_unseen[key] > max(rest, lost_steps * num_others / PROBE_SHARE):
                self._num_unseen[key] = 0
                self._probe = (*key, steps)
                return number
        return best

    def note(self, number: int, num_rows: int, step_ms: float | None, tokens: float) -> None:
        super().note(number, num_rows, step_ms, tokens)
        key = (_size_class(num_rows), number)
        self._num_seen[key] += 1
        if number:
            self._tokens.note(number, num_rows, tokens)
        if step_ms is not None:
            self._num_timed[key] += 1
            mean_ms, weight = self._step_ms.get(key, step_ms), max(1 / self._num_timed[key], TIME_WEIGHT)
            weight = 1.0 if step_ms * OUTLIER < mean_ms else weight
            self._step_ms[key] = _mean(mean_ms, min(step_ms, OUTLIER * mean_ms), weight)
            self._least_ms[key] = min(self._least_ms.get(key, step_ms), step_ms)
        if self._probe is not None and self._probe[:2] == key:
            left = self._probe[2] - 1
            self._probe = (*key, left) if left else None

    def tokens_of(self, number: int) -> float | None:
        return self._tokens.mean.get(number)

    def expect(self, number: int, num_rows: int, least_ms: float) -> None:
        self._expected_ms[_size_class(num_rows), number] = least_ms

    def fits(self, number: int, num_rows: int) -> bool:
        size = _size_class(num_rows)
        return number not in self._tokens.resting and size < self._too_large.get(number, size + 1)

    def give_up(self, number: int, num_rows: int) -> bool:
        if number:
            size = _size_class(num_rows)
            self._too_large[number], self._probe = min(size, self._too_large.get(number, size)), None
        return number > 0

    def outlooks(self, numbers: Collection[int], num_steps: float) -> list[Outlook]:
        """Returns how each of these numbers may do at each size of batches that had num_steps steps or more, by its
        shortest step there, or the least that `_shortest_ms` allows."""
        found, steps, timed = [], Counter(), {key for key, count in self._num_timed.items() if count > 1}
        for (size, _), count in self._num_seen.items():
            steps[size] += count
        for size, count in steps.items():
            if count < num_steps or (self._most_rows is not None and size > _size_class(self._most_rows)):
                continue
            used = [number for key, number in timed if key == size and number not in self._tokens.resting]
            least = max((self._bounds(number)[0] / self._step_ms[size, number] for number in used), default=0.0)
            mean = max((self._speed(size, number) for number in used), default=0.0)
            for number in numbers:
                if size < self._too_large.get(number, size + 1):
                    key = size, number
                    least_ms = self._least_ms[key] if key in timed else self._shortest_ms(*key)
                    most = self._bounds(number)[1] / least_ms if least_ms else math.inf
                    found.append(Outlook(most, least, mean))
        return found

    def rest(self, numbers: Collection[int]) -> None:
        """Leaves these numbers out from now on, also beside prompts."""
        self._tokens.resting.update(numbers)

    def retry(self, numbers: Collection[int]) -> None:
        """Tries these numbers as if for the first time: what was known of them is of other texts, and their graphs are
        gone."""
        self._tokens.forget(numbers)
        for table in (self._step_ms, self._least_ms, self._expected_ms, self._num_timed, self._num_seen):
            for key in [key for key in table if key[1] in numbers]:
                del table[key]

    def _bounds(self, number: int) -> tuple[float, float]:
        return self._tokens.bounds(number, self._most_tokens[number])

    def _is_free(self, number: int, num_rows: int) -> bool:
        """Returns whether the rows of such a step take little longer than those of a plain one."""
        rows = self._rows[number] * num_rows
        is_read = self._read_bytes is None or self._read_bytes(rows) <= FREE_BYTES * self._read_bytes(num_rows)
        return rows <= FREE_ROWS and is_read

    def _is_smaller(self, other: int, number: int) -> bool:
        """Returns whether the other number is plain decoding or a tree of the same draft model, and no larger."""
        return other <= number and (other == 0 or self._kinds[other] == self._kinds[number])

    def _is_warm(self, size: int, number: int) -> bool:
        """Returns whether such a step has nothing left to capture."""
        return self._rows is None or self._num_seen[size, number] > 0 or (size, number) in self._expected_ms

    def _is_due(self, size: int) -> bool:
        """Returns whether another number may be captured: after the first, one for each COLD_AFTER steps."""
        num_warm = sum(self._is_warm(size, number) for number in range(self._count))
        num_steps = sum(self._num_seen[size, number] for number in range(self._count))
        return num_warm > 0 and num_steps >= COLD_AFTER * num_warm

    def _is_hopeless(self, size: int, number: int) -> bool:
        """Returns whether the number lost to a smaller tree in a smaller batch, by its present tokens per step."""
        for fewer in range(size - 1, -1, -1):
            speed = self._speed(fewer, number)
            if speed:
                smaller = [other for other in range(number) if self._is_smaller(other, number)]
                return any(speed < HOPELESS * self._speed(fewer, other) for other in smaller)
        return False

    def _may_win(self, size: int, number: int) -> bool:
        """Returns whether the number could be the fastest if all its drafts were accepted."""
        others = self._tokens.resting.union((number,))
        speeds = [self._speed(size, other) for other in range(self._count) if other not in others]
        return self._most_tokens[number] >= max(speeds, default=0.0) * self._shortest_ms(size, number)

    def _shortest_ms(self, size: int, number: int) -> float:
        """Returns the least that a step may take: no less than those of smaller trees, and of smaller batches, have
        taken. One step alone proves nothing: the machine may have been busy."""
        known = [(key, ms) for key, ms in self._least_ms.items() if self._num_timed[key] > 1]
        known += self._expected_ms.items()
        times = [ms for (fewer, other), ms in known if fewer <= size and self._is_smaller(other, number)]
        return max(times, default=0.0)

    def _lost_steps(self, size: int, number: int, best: int) -> float:
        """Returns how many of the best steps one of this number loses, given the tokens it brings; 0 if unknown."""
        step_ms, best_ms = self._step_ms.get((size, number)), self._step_ms.get((size, best))
        if best_ms is None:
            return 0.0
        if step_ms is None:
            step_ms = best_ms + self._extra_ms(size, number, best)
        return step_ms / best_ms - self._tokens.mean.get(number, 1.0) / self._tokens.mean.get(best, 1.0)

    def _extra_ms(self, size: int, number: int, best: int) -> float:
        """Estimates how much longer than the best step one of this number takes, by the times of a smaller batch."""
        for fewer in range(size - 1, -1, -1):
            times = [self._step_ms.get((fewer, each)) for each in (number, best)]
            if None not in times:
                return (times[0] - times[1]) * 2 ** (size - fewer)
        return 0.0

    def _speed(self, size: int, number: int) -> float:
        step_ms = self._step_ms.get((size, number))
        return self._tokens.mean.get(number, 1.0) / step_ms if step_ms else 0.0


def _size_class(num_rows: int) -> int:
    """Returns the same number for all batch sizes that share a graph."""
    return (num_rows - 1).bit_length()


def _mean(old: float, new: float, weight: float) -> float:
    return old + weight * (new - old)
