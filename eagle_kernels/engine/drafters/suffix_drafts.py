"""What follows one match, by the counts of a `SuffixAutomaton`: the most frequent path, the most probable tree."""

from __future__ import annotations

from heapq import heappop, heappush, heappushpop
from typing import NamedTuple

from .suffix_automaton import SuffixAutomaton

# Sums of probabilities are rounded; two that differ by less are compared by making both drafts.
ROUNDING = 1e-9
# To the length of a match times a factor, before it is rounded down: 0.1 * 30 are 3.
ROUNDING_UP = 1e-6

# Matches of one state: a bound of their scores, the longest of them, the one to try, the state, and drafts at most.
Candidate = tuple[float, int, int, int, int]


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
        max(0, int(min(max_spec_tokens, length * max_spec_factor + max_spec_offset + ROUNDING_UP)))
        for length in range(max_length)
    ]
    return Limits(max_length, drafts, [min(most, max_length - length) for length, most in enumerate(drafts)])


def path_of(
    counts: SuffixAutomaton, candidate: Candidate, limits: Limits, min_prob: float, least_score: float
) -> SuffixDraft:
    """The most frequent next token again and again; anything of a lower score where that is below the least."""
    _, length, _, state, most = candidate
    tokens, probs, score = _walk(counts, state, most, min_prob, least_score)
    while limits.reach[length] < len(tokens):  # none of which is too improbable to add to the score
        length -= 1
    return SuffixDraft(tokens, list(range(-1, len(tokens) - 1)), probs, score, length)


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


def tree_of(
    counts: SuffixAutomaton, candidate: Candidate, limits: Limits, min_prob: float, least_score: float
) -> SuffixDraft:
    """The most probable drafts, whatever they follow; anything of a lower score where that is below the least."""
    _, longest, length, state, _ = candidate
    tree = _grow(counts, state, length, limits, min_prob, least_score)
    if tree.draft.score < least_score or not tree.draft.token_ids:
        return tree.draft
    return _longest_alike(counts, state, tree, longest, limits, min_prob)


def _grow(
    counts: SuffixAutomaton, state: int, length: int, limits: Limits, min_prob: float, least_score: float
) -> _Tree:
    """The tree of a match: always the most probable next, of equals what was found first. Ends early, with a lower
    score, where that cannot be as high as the least."""
    count, token, target, all_others = counts.count, counts.token, counts.target, counts.others
    most, deepest = limits.drafts[length], limits.max_length - length
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    depths: list[int] = []
    # minus probability, parent, rank among its children, state, token, depth
    waiting: list[tuple[float, int, int, int, int, int]] = []
    prob, depth, score, parent = 1.0, 0, 0.0, -1
    while True:
        next_prob, follower = 0.0, target[state]
        if follower and depth < deepest:
            total = count[state]
            next_prob = prob * (count[follower] / total)
            if next_prob < min_prob:
                next_prob = 0.0
            elif others := all_others[state]:
                # a bit too few, since the exact quotient decides
                least = max(1, int(min_prob * total / prob * (1 - ROUNDING)))
                if total - count[follower] >= least:
                    for rank, other in enumerate(counts.rank_others(state, least, most - len(tokens)), start=1):
                        end = others[other]
                        other_prob = prob * (count[end] / total)
                        if other_prob < min_prob:
                            break
                        heappush(waiting, (-other_prob, parent, rank, end, other, depth + 1))
        if len(tokens) == most:
            break
        if next_prob and (not waiting or next_prob > -waiting[0][0]):
            new_token, state, prob, depth = token[state], follower, next_prob, depth + 1
        elif next_prob or waiting:
            first = (-next_prob, parent, 0, follower, token[state], depth + 1)
            item = heappushpop(waiting, first) if next_prob else heappop(waiting)
            minus_prob, parent, _, state, new_token, depth = item
            prob = -minus_prob
        else:
            break
        if (score + (most - len(tokens)) * prob) * (1 + ROUNDING) < least_score:
            break
        tokens.append(new_token)
        parents.append(parent)
        probs.append(prob)
        depths.append(depth)
        score += prob
        parent = len(tokens) - 1
    if next_prob and len(tokens) == most:
        waiting.append((-next_prob, parent, 0, follower, token[state], depth + 1))
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
        longer = _grow(counts, state, middle, limits, min_prob, draft.score).draft
        if longer.score == draft.score:
            best, low = longer, middle
        else:
            high = middle - 1
    return best
