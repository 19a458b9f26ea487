"""How often every short string of tokens occurs in texts that grow, and what mostly follows it.

All strings of 1 .. max_length tokens that occur end somewhere; strings that end at the same places are one *state*.
They are the last so many tokens of one string, from `length` of the state down to one more than that of its `link`, the
state of the longest one that ends at more places. Hence the strings that end where a text ends lie on one chain of
links, and it is short: a new token creates or splits a state or two and counts one up on every state of its chain.

A state keeps its most frequent next token in two lists, where following it costs no look-up, and all others in a dict.

What is known of states lies in lists, not in arrays: these take two thirds of the memory and twice the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

# More next tokens than this are not all looked at where the first few are asked for; so many of the first are known.
MANY_TOKENS = 64
# States are made by so many.
NEW_STATES = 128


class Cursor(NamedTuple):
    """Where a text is: the state of its last `size` tokens; these are all of it, or max_length - 1."""

    state: int = 0
    size: int = 0


class _Leaders:
    """All next tokens of a state that occur there more often than `bound`, and perhaps some that no longer do."""

    def __init__(self, bound: int, tokens: Iterable[int]):
        self.bound, self.tokens = bound, set(tokens)


class SuffixAutomaton:
    """The counts of several texts. State 0 is the empty string; it is never followed, and so needs no count.

    link     the state of the longest shorter string at the end of this one's that ends at more places; -1 of state 0
    length   of its longest string
    count    how often each of its strings occurs
    last     when one occurred last: tokens are numbered as they come; removed texts are not forgotten
    token    what follows most often, of equals what did so last; -1: nothing, and in state 0
    target   the state of that
    others   the other next tokens and their states, None where there are none
    """

    def __init__(self, max_length: int):
        self.max_length = max_length
        self._clear()

    def _clear(self) -> None:
        self.link, self.length, self.count = [-1], [0], [0]
        self.token, self.target, self.last = [-1], [0], [0]
        self.others: list[dict[int, int] | None] = [{}]
        self._free: list[int] = []
        self._leaders: dict[int, _Leaders] = {}
        self._now = 0

    @property
    def num_states(self) -> int:
        """Those in use, without state 0."""
        return len(self.link) - 1 - len(self._free)

    def extend(self, cursor: Cursor, tokens: Sequence[int]) -> Cursor:
        """Appends tokens to the text at whose end `cursor` is, and returns where it ends now."""
        link, length, count, last, free = self.link, self.length, self.count, self.last, self._free
        next_token, target, others, leaders = self.token, self.target, self.others, self._leaders
        most, now = self.max_length - 1, self._now
        state, size = cursor
        for token in tokens:
            while size and length[link[state]] >= size:  # it has been split since
                state = link[state]
            now += 1
            new = end = 0
            while True:  # up to a state that this token has followed before
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
                                leaders[state].tokens.add(next_token[state])
                            next_token[state], target[state] = token, follower
                        elif leaders and state in leaders and count[follower] > leaders[state].bound:
                            leaders[state].tokens.add(token)
                    state = link[state]
            state = new or end
            size = size + 1 if size < most else most
        self._now = now
        return Cursor(state, size)

    def _new_state(self) -> int:
        """A state that is not in use; makes some if there is none."""
        if not self._free:
            first = len(self.link)
            for values in (self.link, self.length, self.count, self.target, self.last):
                values += [0] * NEW_STATES
            self.token += [-1] * NEW_STATES
            self.others += [None] * NEW_STATES
            self._free += range(first + NEW_STATES - 1, first - 1, -1)
        return self._free.pop()

    def _split(self, state: int, token: int, end: int, length: int) -> int:
        """Moves the strings of `end` up to this length into a state of their own, which is returned."""
        new = self._new_state()
        self.length[new], self.link[new], self.link[end] = length, self.link[end], new
        self.count[new] = self.count[end]  # `last` is set by who counts it up next
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
        """Takes a whole text out again."""
        link, length, count = self.link, self.length, self.count
        next_token, target, others = self.token, self.target, self.others
        state, size, unused = 0, 0, []
        for token in tokens:
            while size and length[link[state]] >= size:
                state = link[state]
            end = current = target[state] if next_token[state] == token else others[state][token]
            vanished = []
            while current:
                count[current] -= 1
                if not count[current]:
                    vanished.append(current)
                current = link[current]
            while state >= 0:
                if not state or count[state]:  # of those that vanish all transitions do
                    self._count_down(state, token)
                state = link[state]
            self._release(unused)
            state, size, unused = end, min(size + 1, self.max_length - 1), vanished
        self._release(unused)
        if not self.num_states:
            self._clear()

    def _count_down(self, state: int, token: int) -> None:
        """What `state` knows of its next token `token` is put right, one occurrence of which was taken away."""
        others = self.others[state]
        if self.token[state] != token:
            if not self.count[others[token]]:
                del others[token]
                if state and not others:
                    self.others[state] = None
            return
        target = self.target[state]
        if not others:
            if not self.count[target]:
                self.token[state], self.target[state] = -1, 0
            return
        best = self.rank_others(state, 1, 1)[0]
        if self._key(others[best]) > self._key(target):
            self.token[state], self.target[state] = best, others.pop(best)
            if self.count[target]:
                others[token] = target
                if state in self._leaders:
                    self._leaders[state].tokens.add(token)
            elif not others:
                self.others[state] = None

    def _key(self, state: int) -> tuple[int, int]:
        return self.count[state], self.last[state]

    def _release(self, states: list[int]) -> None:
        for state in states:
            self.token[state], self.target[state], self.others[state] = -1, 0, None
            self._leaders.pop(state, None)
        self._free += states

    def rank_others(self, state: int, least_count: int, most: int) -> list[int]:
        """Next tokens apart from the most frequent one, the first `most` of those that occur so often, in order."""
        others, count = self.others[state], self.count
        if not others:
            return []
        tokens: Iterable[int] = others
        if len(others) > MANY_TOKENS:
            leaders = self._leaders.get(state)
            known = () if leaders is None else self._known(others, leaders)
            if (
                leaders is None
                or len(leaders.tokens) > 4 * MANY_TOKENS
                or (len(known) < most and leaders.bound >= least_count)
            ):
                leaders = self._leaders[state] = self._find_leaders(others)
                known = self._known(others, leaders)
            if leaders.bound < least_count or len(known) >= most:
                tokens = known
        ranked = [token for token in tokens if count[others[token]] >= least_count]
        ranked.sort(key=lambda token: self._key(others[token]), reverse=True)
        return ranked[:most]

    def _known(self, others: dict[int, int], leaders: _Leaders) -> list[int]:
        return [token for token in leaders.tokens if token in others and self.count[others[token]] > leaders.bound]

    def _find_leaders(self, others: dict[int, int]) -> _Leaders:
        count = self.count
        # of many that are all looked at this once, sorting is the quickest: it calls no Python
        bound = sorted(map(count.__getitem__, others.values()))[-MANY_TOKENS]
        return _Leaders(bound, [token for token, end in others.items() if count[end] > bound])

    def settle(self, cursor: Cursor) -> Cursor:
        """The cursor after whatever happened since to other texts."""
        state, size = cursor
        while size and self.length[self.link[state]] >= size:
            state = self.link[state]
        return Cursor(state, size)

    def followed(self, cursor: Cursor) -> Cursor:
        """The longest end of its string behind which something comes."""
        state, size = cursor
        while state and not self.target[state]:
            state = self.link[state]
            size = self.length[state]
        return Cursor(state, size)

    def match(self, tokens: Sequence[int]) -> Cursor:
        """The longest string that occurs and at which `tokens` end, of at most max_length - 1 tokens."""
        next_token, target, others = self.token, self.target, self.others
        state = size = 0
        for token in tokens[1 - self.max_length :]:
            while True:
                if next_token[state] == token:
                    state = target[state]
                    size += 1
                    break
                more = others[state]
                if more and token in more:
                    state = more[token]
                    size += 1
                    break
                if not state:
                    break
                state = self.link[state]
                size = self.length[state]
        return Cursor(state, size)
