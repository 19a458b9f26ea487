"""The match with the best continuation among those that the counts of a `SuffixAutomaton` know.

Every match, the last m tokens of the context that occur, allows limits[m] drafts, which follow it with certain
probabilities; their sum is the score, and of equal scores the longest match wins. Matches of one state are followed by
the same, and no score exceeds the number of drafts times the first one's probability: so few drafts are really made.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from operator import itemgetter

from .suffix_automaton import Cursor, SuffixAutomaton
from .suffix_drafts import ROUNDING, Candidate, Limits, SuffixDraft, path_of, tree_of

# So many candidates are tried one after the other; the bounds of more are made tighter first.
FEW = 4


def best_path(
    counts: SuffixAutomaton, match: Cursor, limits: Limits, min_prob: float, other: SuffixDraft | None = None
) -> SuffixDraft:
    """The most frequent next token again and again; `other` where no path has a higher score."""
    best = SuffixDraft([], [], [], 0.0, match.size) if other is None else other
    reach, candidates = limits.reach, []
    for state, low, high, first in _followed(counts, match, limits, min_prob, best.score):
        most = reach[low] if low == high else max(reach[low : high + 1])
        bound = most * first * (1 + ROUNDING)
        if bound >= best.score:
            candidates.append((bound, high, low, state, most))
    return _best_of(counts, candidates, False, limits, min_prob, best)


def best_tree(
    counts: SuffixAutomaton, match: Cursor, limits: Limits, min_prob: float, other: SuffixDraft | None = None
) -> SuffixDraft:
    """The most probable continuations of all, whatever they follow; `other` where no tree has a higher score."""
    best = SuffixDraft([], [], [], 0.0, match.size) if other is None else other
    candidates = []
    for state, low, high, first in _followed(counts, match, limits, min_prob, best.score):
        for length, longest in ((low, high),) if low == high else _matches_to_try(limits, low, high):
            most = limits.drafts[length]
            bound = min(most * first, limits.max_length - length) * (1 + ROUNDING)
            if bound >= best.score:
                candidates.append((bound, longest, length, state, most))
    return _best_of(counts, candidates, True, limits, min_prob, best)


def _followed(
    counts: SuffixAutomaton, match: Cursor, limits: Limits, min_prob: float, score: float
) -> list[tuple[int, int, int, float]]:
    """States whose matches may score as much: the shortest and longest one, and how probable a first draft is."""
    link, length, count, target = counts.link, counts.length, counts.count, counts.target
    found = []
    state, high = match
    while state and limits.drafts[high] >= score:
        shorter = link[state]
        low = length[shorter]
        if target[state]:
            first = count[target[state]] / count[state]
            if first >= min_prob:
                found.append((state, low + 1, high, first))
        state, high = shorter, low
    return found


def _matches_to_try(limits: Limits, low: int, high: int) -> list[tuple[int, int]]:
    """Lengths of which one has the best score of a state; with each the longest that may have no more drafts.

    More drafts are no loss, nor are deeper ones. So of lengths with one limit the shortest is best, and of those whose
    depth is no limit the longest.
    """
    drafts = limits.drafts
    first = high
    while first > low and drafts[first - 1] == drafts[high]:
        first -= 1
    found = [(first, high)]
    while first > low and drafts[first] > limits.max_length - first:
        first -= 1
        found.append((first, first))
    return found


def _best_of(
    counts: SuffixAutomaton,
    candidates: list[Candidate],
    is_tree: bool,
    limits: Limits,
    min_prob: float,
    other: SuffixDraft,
) -> SuffixDraft:
    """The best draft of all candidates, of equal ones that of the longest match; `other` where none is better."""
    best, draft_of, is_tight = other, tree_of if is_tree else path_of, False
    candidates.sort()
    while candidates:
        candidate = candidates.pop()
        if candidate[0] < best.score:
            break
        draft = draft_of(counts, candidate, limits, min_prob, best.score)
        is_equal = draft.score == best.score and best is not other
        if draft.score > best.score or (is_equal and draft.match_len > best.match_len):
            best = draft
        if len(candidates) > FEW and not is_tight:
            candidates = [candidate for candidate in candidates if candidate[0] >= best.score]
            if len(candidates) > FEW:
                candidates = _tightened(counts, candidates, min_prob, is_tree)
            is_tight = True
    return best


def _tightened(counts: SuffixAutomaton, candidates: list[Candidate], min_prob: float, is_tree: bool) -> list[Candidate]:
    """In order of bounds that are nearly scores.

    A text that repeats itself has many matches, all followed by much the same: the path of one is a piece of a shorter
    one's path, and its score the sum of the counts in that piece. Drafts of a tree that leave the path are followers of
    one of its states that are less frequent than its next; all of these together count what is lost from that state to
    the next, so none of them counts more.
    """
    count, target, others = counts.count, counts.target, counts.others
    path = [target[min(candidates, key=itemgetter(2))[3]]]
    while (beyond := target[path[-1]]) and len(path) < counts.max_length:
        path.append(beyond)
    places = {state: place for place, state in enumerate(path)}
    falling = [-count[state] for state in path]  # negative since bisect wants what rises
    sums = list(accumulate(falling, initial=0))
    lost = [count[state] - count[target[state]] if is_tree and others[state] else 0 for state in path]
    is_lossless = not any(lost)
    found = []
    for bound, longest, length, state, most in candidates:
        follower = target[state]
        if follower in places:
            first, total = places[follower], count[state]
            last = first + most
            aside = 0 if is_lossless else max(lost[first:last], default=0)
            if is_tree and others[state]:
                aside = max(aside, total - count[follower])
            if last > len(path):
                last, aside = len(path), max(aside, count[beyond])
            # what is less probable than this is no draft
            least = min_prob * total * (1 - ROUNDING)
            end = bisect_right(falling, -max(aside, least), first, last)
            sum_counts = sums[first] - sums[end]
            if aside >= least:
                sum_counts += aside * (first + most - end)
            bound = min(bound, sum_counts / total * (1 + ROUNDING))
        found.append((bound, longest, length, state, most))
    found.sort()
    return found
