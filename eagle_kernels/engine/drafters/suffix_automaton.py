"""Counts of every short string of tokens in texts that grow, and of what mostly follows it.

All strings of 1 .. max_length tokens that occur end somewhere; strings that end at the same places are one *state*.
They are ends of one string: the longest has `length` tokens, the shortest one more than the state's `link`, which is
the state of the longest string that ends at more places. Hence the strings that end where a text ends lie on one chain
of links, and it is short: a new token creates or splits a state or two and counts one up on every state of its chain.

A state keeps its most frequent next token in two lists, where following it costs no look-up, and all others in a dict.
The lists are not arrays, which would take two thirds of the memory and twice the time.
"""

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

# A state with more other next tokens than this remembers the most frequent of them, about that number.
MANY_TOKENS = 64
# States are allocated in blocks of this size.
NEW_STATES = 128


class Cursor(NamedTuple):
    """Holds the end of a text: the state of its last `size` tokens, which are the whole text or max_length - 1."""

    state: int = 0
    size: int = 0


class SuffixAutomaton:
    """Counts the strings of several texts. State 0 is the empty string; nothing leads to it, so it needs no count.

    link     state of the longest shorter end of this state's strings that ends at more places; -1 for state 0
    length   length of the longest string
    count    how often each of the strings occurs
    last     when one occurred last: tokens are numbered as they come, and a removed text keeps its numbers
    token    the most frequent next token, of equals the one that came last; -1: none, and in state 0
    target   the state that this token leads to
    others   the other next tokens and the states they lead to; None: there are none

    `_leaders` holds, for a state with many others, a count and all others above it, perhaps also former ones.
    """

    def __init__(self, max_length: int):
        self.max_length = max_length
        self._clear()

    def _clear(self) -> None:
        self.link, self.length, self.count = [-1], [0], [0]
        self.token, self.target, self.last = [-1], [0], [0]
        self.others: list[dict[int, int] | None] = [{}]
        self._free: list[int] = []
        self._leaders: dict[int, tuple[float, set[int]]] = {}
        self._now = 0

    @property
    def num_states(self) -> int:
        """Number of states in use, without state 0."""
        return len(self.link) - 1 - len(self._free)

    def extend(self, cursor: Cursor, tokens: Sequence[int]) -> Cursor:
        """Appends tokens to the text that ends at `cursor`, and returns its new end."""
        link, length, count, last, free = self.link, self.length, self.count, self.last, self._free
        next_token, target, others, leaders = self.token, self.target, self.others, self._leaders
        most, now = self.max_length - 1, self._now
        state, size = cursor
        for token in tokens:
            while size and length[link[state]] >= size:  # the state was split after the cursor was made
                state = link[state]
            now += 1
            new = end = 0
            while True:  # until a state that this token has followed before
                if next_token[state] == token:
                    end = target[state]
                    break
                more = others[state]
                if more and token in more:
                    end = more[token]
                    break
                if not new:
                    new = free.pop() if free else self._new_state()
                    length[new], count[new], last[new], link[new] = size + 1, 1, now, 0
                if not state:
                    more[token] = new
                    break
                best = target[state]
                if not best:
                    next_token[state], target[state] = token, new
                else:
                    if more is None:
                        more = others[state] = {}
                    if count[best] > 1:
                        more[token] = new
                    else:
                        more[next_token[state]] = best
                        next_token[state], target[state] = token, new
                state = link[state]

            if end:
                longest = length[state] + 1 if new else size + 1
                if length[end] > longest:
                    end = self._split(state, token, end, longest)
                if new:
                    link[new] = end
                current = end
                while current:
                    count[current] += 1
                    last[current] = now
                    current = link[current]
                while state:
                    if next_token[state] != token:
                        more, best = others[state], target[state]
                        follower = more[token]
                        if count[follower] >= count[best]:
                            del more[token]
                            more[next_token[state]] = best
                            if state in leaders:
                                leaders[state][1].add(next_token[state])
                            next_token[state], target[state] = token, follower
                        elif state in leaders and count[follower] > leaders[state][0]:
                            leaders[state][1].add(token)
                    state = link[state]
            state = new or end
            size = size + 1 if size < most else most
        self._now = now
        return Cursor(state, size)

    def _new_state(self) -> int:
        """Returns a state that is not in use, and allocates some if there is none."""
        if not self._free:
            first = len(self.link)
            for values in (self.link, self.length, self.count, self.target, self.last):
                values += [0] * NEW_STATES
            self.token += [-1] * NEW_STATES
            self.others += [None] * NEW_STATES
            self._free += range(first + NEW_STATES - 1, first - 1, -1)
        return self._free.pop()

    def _split(self, state: int, token: int, end: int, length: int) -> int:
        """Moves the strings of `end` of at most this length into a state of their own, and returns it."""
        new = self._new_state()
        self.length[new], self.link[new], self.link[end] = length, self.link[end], new
        self.count[new] = self.count[end]  # the caller counts it up and sets `last`
        self.token[new], self.target[new] = self.token[end], self.target[end]
        self.others[new] = dict(self.others[end]) if self.others[end] else None
        while state >= 0:
            if self.token[state] == token:
                if self.target[state] != end:
                    break
                self.target[state] = new
            else:
                others = self.others[state]
                if others[token] != end:
                    break
                others[token] = new
            state = self.link[state]
        return new

    def remove(self, tokens: Sequence[int]) -> None:
        """Takes a whole text out of the counts."""
        link, length, count = self.link, self.length, self.count
        state, size, vanished = 0, 0, []
        for token in tokens:
            while size and length[link[state]] >= size:
                state = link[state]
            end = current = self.target[state] if self.token[state] == token else self.others[state][token]
            while current:
                count[current] -= 1
                if not count[current]:
                    vanished.append(current)
                current = link[current]
            while state >= 0:
                if not state or count[state]:  # a vanishing state loses all its next tokens
                    self._count_down(state, token)
                state = link[state]
            state, size = end, min(size + 1, self.max_length - 1)
        for state in vanished:
            self.token[state], self.target[state], self.others[state] = -1, 0, None
            self._leaders.pop(state, None)
        self._free += vanished
        if not self.num_states:
            self._clear()

    def _count_down(self, state: int, token: int) -> None:
        """Updates the order of a state's next tokens after an occurrence of `token` was taken away."""
        others, best = self.others[state], self.target[state]
        if self.token[state] == token:
            second = self.rank_others(state, 1, 1)
            if second and self._key(others[second[0]]) > self._key(best):
                self.token[state], self.target[state] = second[0], others.pop(second[0])
                others[token] = best
                if state in self._leaders:
                    self._leaders[state][1].add(token)
            elif not self.count[best]:
                self.token[state], self.target[state] = -1, 0
        if others and token in others and not self.count[others[token]]:
            del others[token]
            if state and not others:
                self.others[state] = None

    def _key(self, state: int) -> tuple[int, int]:
        return self.count[state], self.last[state]

    def rank_others(self, state: int, least_count: int, most: int) -> list[int]:
        """Returns up to `most` next tokens apart from the most frequent one, in order, that occur often enough."""
        others, count = self.others[state] or {}, self.count
        tokens = others
        if len(others) > MANY_TOKENS:
            bound, leaders = self._leaders.get(state, (inf, ()))
            frequent = [token for token in leaders if token in others and count[others[token]] > bound]
            if len(leaders) > 4 * MANY_TOKENS or (bound >= least_count and len(frequent) < most):
                # sorting all is fastest here, since it calls no Python function
                bound = sorted(map(count.__getitem__, others.values()))[-MANY_TOKENS]
                frequent = {token for token, end in others.items() if count[end] > bound}
                self._leaders[state] = bound, frequent
            if bound < least_count or len(frequent) >= most:
                tokens = frequent
        ranked = [token for token in tokens if count[others[token]] >= least_count]
        ranked.sort(key=lambda token: self._key(others[token]), reverse=True)
        return ranked[:most]

    def followed(self, cursor: Cursor) -> Cursor:
        """Returns the longest end of the cursor's string that something follows."""
        state, size = cursor
        while state and (self.length[self.link[state]] >= size or not self.target[state]):
            state = self.link[state]
            size = min(size, self.length[state])
        return Cursor(state, size)

    def match(self, tokens: Iterable[int]) -> Cursor:
        """Returns the longest end that occurs of at most max_length - 1 tokens."""
        next_token, target, all_others = self.token, self.target, self.others
        state = size = 0
        for token in tokens:
            while True:
                others = all_others[state]
                end = target[state] if next_token[state] == token else others and others.get(token)
                if end or not state:
                    break
                state = self.link[state]
                size = self.length[state]
            if end:
                state, size = end, size + 1
        return Cursor(state, size)
