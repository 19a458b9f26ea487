"""Choices that learn from what they are told, against the same rules looked up in the whole history, at every step."""

import itertools
import random
from types import SimpleNamespace

import pytest

from eagle_kernels.engine.serve import reading
from eagle_kernels.engine.step import choice as rules
from eagle_kernels.engine.step.choice import Fastest


class History:
    """The rules of `Fastest`, written a second time: what is noted is kept as it came, and looked up when it counts."""

    def __init__(self, most_tokens, most_rows, rows, brought=None):
        self.most_tokens, self.most_rows, self.rows = most_tokens, most_rows, rows
        self.numbers = range(len(most_tokens))
        self.brought = [] if brought is None else brought  # (number, rows, tokens), of steps with and without prompts
        self.steps = []  # (size, number, milliseconds or None)
        self.expected, self.refused = {}, []
        self.unseen, self.probe = {}, None

    def beside_prompts(self):
        return History(self.most_tokens, self.most_rows, self.rows, self.brought)

    def note(self, number, num_rows, step_ms, tokens):
        size = size_of(num_rows)
        self.steps.append((size, number, step_ms))
        self.brought.append((number, num_rows, tokens))
        if self.probe is not None and self.probe[:2] == (size, number):
            self.probe = (size, number, self.probe[2] - 1) if self.probe[2] > 1 else None

    def expect(self, number, num_rows, least_ms):
        self.expected[size_of(num_rows), number] = least_ms

    def give_up(self, number, num_rows):
        if number > 0:
            self.refused.append((number, size_of(num_rows)))
            self.probe = None
        return number > 0

    def fits(self, number, num_rows):
        return not any(number == refused and size_of(num_rows) >= least for refused, least in self.refused)

    def choose(self, num_rows):
        size = size_of(num_rows)
        if self.most_rows is not None and self.most_rows < num_rows:
            return 0
        if self.probe is not None and self.probe[0] == size:
            return self.probe[1]
        fitting = [n for n in self.numbers if self.fits(n, num_rows)]
        warm = [n for n in self.numbers if self.is_warm(size, n)]
        taken = sum(step[0] == size for step in self.steps)
        is_due = len(warm) > 0 and taken >= rules.COLD_AFTER * len(warm)
        ready = [n for n in fitting if n in warm or is_due]
        if not ready:
            free = [n for n in fitting if n > 0 and self.rows[n] * num_rows <= rules.FREE_ROWS]
            return max([0, *free])
        for number in ready:
            seen = sum(step[:2] == (size, number) for step in self.steps)
            if seen < rules.PROBE_STEPS and self.may_win(size, number) and not self.is_hopeless(size, number):
                return number
        speeds = [self.speed(size, n) for n in ready]
        best = ready[speeds.index(max(speeds))]
        for number in ready:
            place = size, number
            self.unseen[place] = self.unseen.get(place, 0) + 1 if number != best else 0
            may_win = self.may_win(size, number)
            steps, least = (rules.PROBE_STEPS, rules.PROBE_AFTER) if may_win else (1, rules.LOSER_AFTER)
            lost = steps * self.lost_steps(size, number, best) * (len(self.numbers) - 1) / rules.PROBE_SHARE
            if self.unseen[place] > rules.PROBE_AFTER and self.unseen[place] > max(least, lost):
                self.unseen[place], self.probe = 0, (size, number, steps)
                return number
        return best

    def is_warm(self, size, number):
        return self.rows is None or (size, number) in self.expected or self.is_seen(size, number)

    def is_seen(self, size, number):
        return any(step[:2] == (size, number) for step in self.steps)

    def times(self, size, number):
        return [ms for *place, ms in self.steps if place == [size, number] and ms is not None]

    def mean_ms(self, size, number):
        """Returns None where no step was timed."""
        mean = None
        for count, step_ms in enumerate(self.times(size, number), start=1):
            if mean is None or rules.OUTLIER * step_ms < mean:
                mean = step_ms
            else:
                share = max(1 / count, rules.TIME_WEIGHT)
                mean += share * (min(step_ms, rules.OUTLIER * mean) - mean)
        return mean

    def tokens(self, number):
        """Returns those of a step; nothing is known of a number that nobody has tried."""
        mean, seen = 1.0, 0
        for rows, tokens in [note[1:] for note in self.brought if note[0] == number > 0]:
            mean, seen = mean if seen else tokens, seen + rows
            mean += max(rows / seen, min(1 / rules.TOKEN_STEPS, rows / rules.TOKEN_ROWS)) * (tokens - mean)
        return mean

    def speed(self, size, number):
        step_ms = self.mean_ms(size, number)
        return 0.0 if step_ms is None else self.tokens(number) / step_ms

    def is_hopeless(self, size, number):
        """By the largest of the smaller sizes where it was timed."""
        known = [fewer for fewer in range(size) if self.times(fewer, number)]
        if not known:
            return False
        own = self.speed(known[-1], number)
        return any(own < rules.HOPELESS * self.speed(known[-1], other) for other in range(number))

    def may_win(self, size, number):
        within = list(itertools.product(range(size + 1), range(number + 1)))
        least = [min(self.times(*place)) for place in within if len(self.times(*place)) > 1]
        least += [self.expected[place] for place in within if place in self.expected]
        others = [self.speed(size, other) for other in self.numbers if other != number]
        return self.most_tokens[number] >= max(others, default=0.0) * max(least, default=0.0)

    def lost_steps(self, size, number, best):
        own, best_ms = self.mean_ms(size, number), self.mean_ms(size, best)
        if best_ms is None:
            return 0.0
        if own is None:
            known = [fewer for fewer in range(size) if self.times(fewer, number) and self.times(fewer, best)]
            own = best_ms
            if known:
                own += (self.mean_ms(known[-1], number) - self.mean_ms(known[-1], best)) * 2 ** (size - known[-1])
        return own / best_ms - self.tokens(number) / self.tokens(best)


def size_of(num_rows):
    """The exponent of the next power of two, which is the size of the graph."""
    return next(power for power in itertools.count() if num_rows <= 2**power)


@pytest.fixture
def soon(monkeypatch):
    """All that takes hundreds of steps takes a few."""
    for name, value in (("PROBE_AFTER", 5), ("PROBE_SHARE", 0.5), ("COLD_AFTER", 3), ("LOSER_AFTER", 9),
                        ("TOKEN_STEPS", 3), ("TOKEN_ROWS", 20), ("FREE_ROWS", 24), ("PROBE_STEPS", 3)):  # fmt: skip
        monkeypatch.setattr(rules, name, value)


@pytest.mark.parametrize("rows", [None, (1, 2, 5, 8)], ids=["eager", "graphs"])
@pytest.mark.parametrize("most_rows", [None, 9])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_chosen_follows_from_all_that_was_noted(seed, most_rows, rows, soon):
    """Sizes of batches change every few steps, steps are cold, slow, equal or untimed, and trees are given up."""
    always = {2: (4.0, 4.0, 8.0, 16.0), 3: (4.0, 8.0, 8.0, 8.0), 4: (None,) * 4}.get(seed)  # so that many are equal
    coin, most = random.Random(seed), (1, 2, 3, 5)
    pairs = [(Fastest(most, most_rows, rows), History(most, most_rows, rows))]
    pairs.append(tuple(each.beside_prompts() for each in pairs[0]))
    which, num_rows, chosen = 0, 1, []
    for step in range(450):
        if step == 80:  # for another size of prompts, made late
            pairs.append(tuple(each.beside_prompts() for each in pairs[coin.randrange(2)]))
        if coin.random() < 0.15:
            which, num_rows = coin.randrange(len(pairs)), coin.choice((1, 1, 2, 3, 4, 5, 8, 9, 10))
        act, (choice, history) = coin.random(), pairs[which]
        number = choice.choose(num_rows)
        assert number == history.choose(num_rows), f"after {chosen}"
        chosen.append(number)
        changes = []
        if act < 0.015:
            changes.append(("give_up", *coin.choice(((number, num_rows), (coin.randrange(4), coin.randrange(1, 11))))))
        elif act < 0.03:
            changes.append(("expect", coin.randrange(4), num_rows, float(coin.randrange(1, 9))))
        elif act < 0.97:  # in whole milliseconds, of which some are equal
            step_ms = coin.choice((None, 4.0, 5.0 + number, 5.0 + 2 * number + coin.randrange(3), 40.0))
            tokens = coin.choice((1.0, 1.0 + number / 2, 1.0 + number))
            if always is not None:
                step_ms, tokens = always[number], (1.0, 2.0, 2.0, 4.0)[number]
            changes.append(("note", number, num_rows, step_ms, tokens))
        for name, *arguments in changes:
            assert getattr(choice, name)(*arguments) == getattr(history, name)(*arguments)
        for place in itertools.product(range(4), (1, 2, 3, 4, 5, 8, 9, 16, 17)):
            assert choice.fits(*place) == history.fits(*place)
    assert set(chosen) == {0, 1, 2, 3}


class Readings:
    """The rules of `Pace`, written a second time."""

    def __init__(self, limit_ms, budgets):
        self.limit_ms, self.budgets, self.now = limit_ms, budgets, budgets[0]
        self.step_ms, self.too_many, self.fitting = None, None, 0

    def note_step(self, step_ms):
        if step_ms is not None:
            share = 1.0 if self.step_ms is None else reading.TIME_WEIGHT
            self.step_ms = (self.step_ms or 0.0) + share * (step_ms - (self.step_ms or 0.0))

    def read(self, tokens, read_ms, is_joint):
        """Notes a reading, of which a joint one took the time of a step as well."""
        step_ms = self.step_ms or 0.0
        read_ms, allowed_ms = read_ms - step_ms * is_joint, self.limit_ms - step_ms
        wanted = tokens * allowed_ms / max(read_ms, 1e-3)
        if read_ms > allowed_ms:
            self.too_many, self.fitting = tokens, 0
        elif tokens < self.now / 2:
            return
        else:
            self.fitting += 1
            if self.fitting > reading.REMEMBERED:
                self.too_many = None
            larger = [budget for budget in self.budgets if budget > tokens]
            wanted = min(wanted, reading.GROWTH * max(tokens, self.now))
            wanted = max(wanted, larger[0] if larger else tokens)
            if self.too_many is not None:
                wanted = max(tokens, min(wanted, self.too_many - 1))
        self.now = max([self.budgets[0], *(budget for budget in self.budgets if budget <= wanted)])


class Device:
    """Passes the marks in their order, some time after they were made."""

    def __init__(self, monkeypatch):
        self.now_ms, self.passed = 0.0, 0
        monkeypatch.setattr(
            reading, "mark", lambda device: SimpleNamespace(at=self.now_ms, query=self.is_over(self.now_ms))
        )
        monkeypatch.setattr(reading, "elapsed_ms", lambda start, end: end.at - start.at)

    def is_over(self, at):
        return lambda: at <= self.passed


@pytest.mark.parametrize("budgets", [range(64, 1025, 64), (64, 192), (16,), (10, 11, 40, 50)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_a_budget_follows_from_all_that_was_read(seed, budgets, monkeypatch):
    """By itself and beside steps, whole budgets and rests, just as long as is allowed, and noticed late."""
    coin, limit_ms, seen = random.Random(seed), 16.0, set()
    device, readings = Device(monkeypatch), Readings(limit_ms, budgets)
    chosen, unlimited = (reading.Pace(limit, budgets, "a device") for limit in (limit_ms, None))
    unread = []
    for _ in range(300):
        if coin.random() < 0.3:
            step_ms = coin.choice((None, 2.0, 4.0, 17.0, 1.0))
            for each in (chosen, readings):
                each.note_step(step_ms)
        for _ in range(coin.choice((0, 1, 1, 2))):
            tokens = coin.choice((readings.now, readings.now, max(1, readings.now // 2), 3, budgets[-1]))
            is_joint, start, step_ms = coin.random() < 0.5, chosen.begin(), readings.step_ms or 0.0
            just = limit_ms - step_ms * (not is_joint)
            device.now_ms += coin.choice((0.0, 8.0, just, just, 15.0, tokens / 64, 3.0)) if just > 0 else 1.0
            chosen.end(start, tokens, is_joint=is_joint)
            unread.append((device.now_ms, tokens, device.now_ms - start.at, is_joint))
            chosen.end(start, 0)
            chosen.end(None, tokens)
        if coin.random() < 0.6:
            device.passed = device.now_ms
        while unread and unread[0][0] <= device.passed:
            readings.read(*unread.pop(0)[1:])
        assert chosen.budget() == readings.now
        seen.add(readings.now)
    assert len(seen) >= min(4, len(budgets))
    assert unlimited.begin() is None and unlimited.budget() == budgets[-1]
