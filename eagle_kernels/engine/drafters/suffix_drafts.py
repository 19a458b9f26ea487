"""The best continuation of a context among those that the counts of a `SuffixAutomaton` suggest.

Every match, the last m tokens of the context that occur, allows limits[m] drafts, which follow it with certain
probabilities; their sum is the score, and of equal scores the longest match wins. Matches of one state are followed by
the same, and no score exceeds the number of drafts times the first one's probability: so few drafts are really made.
"""

from __future__ import annotations

from heapq import heappop, heappush, heappushpop
from typing import NamedTuple

from .suffix_automaton import Cursor, SuffixAutomaton

# Sums of probabilities are rounded; two that differ by less are compared by making both drafts.
ROUNDING = 1e-9


class SuffixDraft(NamedTuple):
    """Drafts behind the last token of a context.

    token_ids  a parent before its children
    parents    of each the index of the one before it; -1: it follows the context
    probs      how often it and those above it followed the match, as a share
    score      their sum
    match_len  how many tokens of the context they were found behind
    """

    token_ids: list[int]
    parents: list[int]
    probs: list[float]
    score: float
    match_len: int


class Limits(NamedTuple):
    """By the length of the match, 0 .. max_length - 1.

    drafts  how many at most; never falls
    reach   and in a path, so that it and the match are no longer than max_length
    """

    max_length: int
    drafts: list[int]
    reach: list[int]


def limits_of(max_length: int, max_spec_tokens: int, max_spec_factor: float, max_spec_offset: float) -> Limits:
    drafts = [
        max(0, int(min(max_spec_tokens, length * max_spec_factor + max_spec_offset + 1e-6)))
        for length in range(max_length)
    ]
    return Limits(max_length, drafts, [min(most, max_length - length) for length, most in enumerate(drafts)])


def best_path(
    counts: SuffixAutomaton, match: Cursor, limits: Limits, min_prob: float, other: SuffixDraft | None = None
) -> SuffixDraft:
    """The most frequent next token again and again; `other` where no path has a higher score."""
    best = SuffixDraft([], [], [], 0.0, match.size) if other is None else other
    reach, candidates = limits.reach, []
    for state, low, high, first in _followed(counts, match, limits, min_prob, best.score):
        most = reach[low] if low == high else max(reach[low : high + 1])
        candidates.append((most * first * (1 + ROUNDING), high, state, most))
    candidates.sort(reverse=True)
    for bound, high, state, most in candidates:
        if bound < best.score:
            break
        tokens, probs, score = _walk(counts, state, most, min_prob, best.score)
        if score < best.score or not tokens:
            continue
        length = high
        while reach[length] < len(tokens):  # none of which is too improbable to add to the score
            length -= 1
        if score > best.score or (other is not best and length > best.match_len):
            best = SuffixDraft(tokens, list(range(-1, len(tokens) - 1)), probs, score, length)
    return best


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


def _walk(
    counts: SuffixAutomaton, state: int, most: int, min_prob: float, least_score: float
) -> tuple[list[int], list[float], float]:
    """Tokens, probabilities and score; ends early, with a lower score, where that cannot be as high as the least."""
    count, token, target = counts.count, counts.token, counts.target
    tokens: list[int] = []
    probs: list[float] = []
    prob, score, total = 1.0, 0.0, count[state]
    for left in range(most, 0, -1):
        follower = target[state]
        if not follower:
            break
        num_followed = count[follower]
        if num_followed != total:
            prob *= num_followed / total
            if prob < min_prob or (score + left * prob) * (1 + ROUNDING) < least_score:
                break
            total = num_followed
        tokens.append(token[state])
        probs.append(prob)
        score += prob
        state = follower
    return tokens, probs, score


class _Tree(NamedTuple):
    """A draft of one match, how deep each of it lies, and the best of those left out that lie less deep than some."""

    draft: SuffixDraft
    depths: list[int]
    next_prob: float


def best_tree(
    counts: SuffixAutomaton, match: Cursor, limits: Limits, min_prob: float, other: SuffixDraft | None = None
) -> SuffixDraft:
    """The most probable continuations of all, whatever they follow; `other` where no tree has a higher score."""
    best = SuffixDraft([], [], [], 0.0, match.size) if other is None else other
    candidates = []
    for state, low, high, first in _followed(counts, match, limits, min_prob, best.score):
        for length, longest in _matches_to_try(limits, low, high):
            most = min(limits.drafts[length] * first, limits.max_length - length)
            candidates.append((most * (1 + ROUNDING), longest, length, state))
    candidates.sort(reverse=True)
    for bound, longest, length, state in candidates:
        if bound < best.score:
            break
        tree = _grow(counts, state, length, limits, min_prob)
        if tree.draft.score < best.score or not tree.draft.token_ids:
            continue
        draft = _longest_alike(counts, state, tree, longest, limits, min_prob)
        if draft.score > best.score or (other is not best and draft.match_len > best.match_len):
            best = draft
    return best


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


def _grow(counts: SuffixAutomaton, state: int, length: int, limits: Limits, min_prob: float) -> _Tree:
    """The tree of a match: always the most probable next, of equals what was found first."""
    count, token, target = counts.count, counts.token, counts.target
    most, deepest = limits.drafts[length], limits.max_length - length
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    depths: list[int] = []
    # minus probability, parent, rank among its children, state, token, depth
    waiting: list[tuple[float, int, int, int, int, int]] = []
    first: tuple[float, int, int, int, int, int] | None = None
    prob, depth, score = 1.0, 0, 0.0
    while True:
        follower = target[state]
        if follower and depth < deepest:
            total = count[state]
            next_prob = prob * (count[follower] / total)
            if next_prob >= min_prob:
                parent, left = len(tokens) - 1, most - len(tokens)
                first = (-next_prob, parent, 0, follower, token[state], depth + 1)
                others = counts.others[state]
                # a bit too few, since the exact quotient decides
                least = max(1, int(min_prob * total / prob * (1 - ROUNDING)))
                if others and total - count[follower] >= least:
                    for rank, other in enumerate(counts.rank_others(state, least, left), start=1):
                        follower = others[other]
                        next_prob = prob * (count[follower] / total)
                        if next_prob < min_prob:
                            break
                        heappush(waiting, (-next_prob, parent, rank, follower, other, depth + 1))
        if len(tokens) == most:
            break
        if first is not None:
            item = heappushpop(waiting, first)
            first = None
        elif waiting:
            item = heappop(waiting)
        else:
            break
        minus_prob, parent, _, state, new_token, depth = item
        prob = -minus_prob
        tokens.append(new_token)
        parents.append(parent)
        probs.append(prob)
        depths.append(depth)
        score += prob
    if first is not None:
        waiting.append(first)
    deepest = max(depths, default=0)
    next_prob = max((-item[0] for item in waiting if item[5] < deepest), default=0.0)
    return _Tree(SuffixDraft(tokens, parents, probs, score, length), depths, next_prob)


def _longest_alike(
    counts: SuffixAutomaton, state: int, tree: _Tree, longest: int, limits: Limits, min_prob: float
) -> SuffixDraft:
    """The draft of the longest match of this state, up to `longest`, that has the score of `tree` and as many drafts.

    A longer one is the same until its depth cuts something off. Then it is worse, unless what takes the place of that
    is as probable, which happens in ties.
    """
    draft, depths = tree.draft, tree.depths
    match_len = min(longest, limits.max_length - max(depths))
    best = draft._replace(match_len=match_len)
    needed = max(
        (depth for depth, prob in zip(depths, draft.probs) if prob > tree.next_prob + ROUNDING * draft.score), default=1
    )
    low, high = match_len, min(longest, limits.max_length - needed)
    while low < high:
        middle = (low + high + 1) // 2
        longer = _grow(counts, state, middle, limits, min_prob).draft
        if longer.score == draft.score:
            best, low = longer, middle
        else:
            high = middle - 1
    return best
