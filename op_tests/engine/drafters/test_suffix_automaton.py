"""`SuffixAutomaton` against its definition: every string, count and next token, while texts grow and go."""

import random
from collections import defaultdict

import pytest

from eagle_kernels.engine.drafters.suffix_automaton import Cursor, SuffixAutomaton


class Texts:
    """Several texts, and where each of their tokens came; an automaton holds what `check` finds in them."""

    def __init__(self, max_length: int):
        self.max_length, self.now = max_length, 0
        self.was_removed = False  # a text, whose numbers stay
        self.texts: list[list[tuple[int, int]]] = []  # (token, when it came)

    def check(self, counts: SuffixAutomaton, ends: list[Cursor]) -> None:
        """Compares what is known of each string of at most max_length tokens, and that nothing else is."""
        found: dict[tuple[int, ...], list[tuple[int, int, int]]] = defaultdict(list)  # (when, text, place) of its ends
        for number, text in enumerate(self.texts):
            tokens = [token for token, _ in text]
            for stop in range(1, len(text) + 1):
                for start in range(max(0, stop - self.max_length), stop):
                    found[tuple(tokens[start:stop])].append((text[stop - 1][1], number, stop))
        state_of, strings = {(): 0}, defaultdict(list)
        for string in sorted(found, key=len):
            before = state_of[string[:-1]]
            others = counts.others[before] or {}
            state = counts.target[before] if counts.token[before] == string[-1] else others[string[-1]]
            state_of[string] = state
            strings[state].append(string)
        followers = defaultdict(set)
        for string in found:
            followers[string[:-1]].add(string[-1])
        for state, those in strings.items():
            longest, shortest = max(those, key=len), min(those, key=len)
            places = [sorted(found[string]) for string in those]
            assert all(each == places[0] for each in places), "strings of one state end at the same places"
            assert counts.count[state] == len(places[0])
            assert counts.last[state] == places[0][-1][0] or (
                self.was_removed and counts.last[state] > places[0][-1][0]
            )
            assert counts.length[state] == len(longest) and len(those) == 1 + len(longest) - len(shortest)
            assert counts.link[state] == state_of[shortest[1:]]
            if len(shortest) == self.max_length:
                continue  # nobody asks what follows it
            after = [state_of[(*shortest, token)] for token in followers[shortest]]
            others = counts.others[state] or {}
            assert others.keys() | {counts.token[state]} == (followers[shortest] or {-1})
            assert len(others) == max(len(after) - 1, 0) and counts.token[state] not in others
            if after:
                best = max((counts.count[each], counts.last[each]) for each in after)
                assert (counts.count[counts.target[state]], counts.last[counts.target[state]]) == best
        assert (counts.others[0] or {}).keys() == followers[()] and counts.token[0] == -1
        assert counts.num_states == len(strings)
        in_use = {0, *strings}
        assert in_use.isdisjoint(counts._free) and len(in_use) + len(counts._free) == len(counts.link)
        for text, end in zip(self.texts, ends):
            tokens = [token for token, _ in text][-(self.max_length - 1) :]
            assert end.size == len(tokens) and counts.followed(end) == _longest_followed(tokens, followers, state_of)


def _longest_followed(tokens: list[int], followers: dict, state_of: dict) -> Cursor:
    """The longest end of a text that something follows."""
    for start in range(len(tokens)):
        if followers.get(tuple(tokens[start:])):
            return Cursor(state_of[tuple(tokens[start:])], len(tokens) - start)
    return Cursor()


@pytest.mark.parametrize("will_remove", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 9])
@pytest.mark.parametrize("max_length", [2, 3, 5, 12])
def test_an_automaton_holds_its_texts_and_nothing_else(max_length, num_tokens, will_remove):
    """Strings that end at the same places may keep states of their own once other texts are gone."""
    rng = random.Random(max_length + 100 * num_tokens)
    for _ in range(4):
        counts, texts, ends = SuffixAutomaton(max_length), Texts(max_length), []
        for _ in range(25):
            if len(ends) < 4 and rng.random() < 0.4:
                texts.texts.append([])
                ends.append(Cursor())
            if not ends:
                continue
            chosen = rng.randrange(len(ends))
            added = [rng.randrange(num_tokens) for _ in range(rng.randrange(7))]
            if rng.random() < 0.3:
                added = [added[0] if added else 0] * 5
            ends[chosen] = counts.extend(ends[chosen], added)
            for token in added:
                texts.now += 1
                texts.texts[chosen].append((token, texts.now))
            if rng.random() < 0.15 and will_remove:
                gone = rng.randrange(len(ends))
                counts.remove([token for token, _ in texts.texts.pop(gone)])
                ends.pop(gone)
                texts.was_removed = True
                texts.now = texts.now if any(texts.texts) else 0  # then it begins anew
            texts.check(counts, ends)
