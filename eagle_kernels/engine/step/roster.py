"""Which of several drafts rest for long, since they cannot win, and when they are tried again."""

from collections.abc import Collection, Mapping, Sequence

from .choice import PROBE_AFTER, PROBE_SHARE, Fastest, Outlook

# A draft that rests is tried again after TRY_AFTER steps of the batch, or after SOON_AFTER if it might win by what is
# measured of the others now. A try takes about as long as a thousand steps: graphs are captured, prompts that were
# shared are read again, and the draft keeps up until enough of its steps have been measured. So tries take 1 % of the
# time, and up to 6 % while texts keep changing.
TRY_AFTER = 512 * PROBE_AFTER
SOON_AFTER = TRY_AFTER // 8


class Roster:
    """Lets a draft rest if none of its trees can be the fastest, by bounds of its tokens and its shortest steps, at any
    size of batches that had PROBE_SHARE of the steps. Such a draft neither drafts nor reads. When it is tried again, it
    reads what joins, and drafts once it has read all texts in the batch.

    trees    the numbers of the steps of each draft; empty: there is no choice of drafts, and none rests
    choices  those of the plan, by rows of prompts
    """

    def __init__(self, trees: Mapping[int, Sequence[int]], choices: Mapping[int, Fastest]):
        self._trees, self._choices, self._num_steps = trees, choices, 0
        self._since: dict[int, int] = {}  # of drafts that do not draft: the step
        self.reasons: dict[int, str] = {}  # ... by the numbers of their steps: why
        self.absent: set[int] = set()  # drafts that do not read either

    def is_due(self) -> bool:
        """Counts a step; returns whether `review` should follow, now and then."""
        self._num_steps += 1
        return len(self._trees) > 0 and self._num_steps % PROBE_AFTER == 0

    def review(self, known: Collection[int]) -> tuple[list[int], list[int]]:
        """Returns the drafts that rest from now on, and those that read again; known: those that have read all texts
        in the batch."""
        resting, reading = [], []
        for draft, numbers in self._trees.items():
            outlook = self._outlook(numbers)
            if draft not in self._since:
                if outlook.most < outlook.least:
                    self._rest(draft, outlook)
                    resting.append(draft)
            elif draft in self.absent:
                rest = TRY_AFTER if outlook.most < outlook.mean else SOON_AFTER
                if self._num_steps - self._since[draft] >= rest:
                    self.absent.remove(draft)
                    reading.append(draft)
            elif draft in known:
                self._retry(draft)
        return resting, reading

    def _outlook(self, numbers: Sequence[int]) -> Outlook:
        """Returns how a draft may do where it does best; no worse than others while nothing is known."""
        num_steps = max(PROBE_AFTER, PROBE_SHARE * self._num_steps)
        found = [each for choice in self._choices.values() for each in choice.outlooks(numbers, num_steps)]
        return max(found, key=lambda each: each.most - each.least, default=Outlook(0.0, 0.0, 0.0))

    def _rest(self, draft: int, outlook: Outlook) -> None:
        numbers, (most, least, _) = self._trees[draft], outlook
        reason = f"at most {1e3 * most:.1f} tokens/s of a request, others at least {1e3 * least:.1f}"
        self._choices[0].rest(numbers)
        self._since[draft] = self._num_steps
        self.reasons |= dict.fromkeys(numbers, reason)
        self.absent.add(draft)

    def _retry(self, draft: int) -> None:
        del self._since[draft]
        for number in self._trees[draft]:
            del self.reasons[number]
        for choice in self._choices.values():
            choice.retry(self._trees[draft])
