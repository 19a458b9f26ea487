"""The best drafts after a text, by the counts of a `SuffixAutomaton`.

A match is a string of the last m tokens of the text that occurs elsewhere. It allows a number of drafts, each of which
follows it with some probability. The sum of these is the score of a match. The best score wins, and the longest match
among equal scores. All matches of one state are followed by the same tokens, and no score exceeds the number of drafts
times the probability of the first one. So only few drafts have to be made.
"""

from bisect import bisect_left, bisect_right
from heapq import heappop, heappush
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from .suffix_automaton import Cursor, SuffixAutomaton

# Sums of probabilities are rounded. Two that differ by less are compared by making both drafts.
ROUNDING = 1e-9
# Added to the length of a match times a factor before it is rounded down: 0.1 * 30 must give 3.
ROUNDING_UP = 1e-6
# At most this many candidates are tried one after the other. The bounds of more are tightened first.
FEW = 4

# Matches of one state: an upper bound of their scores, the longest and the shortest of them (for a tree: the one to try
# first), the state, and the most drafts.
Candidate = tuple[float, int, int, int, int]


class SuffixDraft(NamedTuple):
    """Holds drafts after the last token of a text."""

    token_ids: list[int]  # their tokens, parents before their children
    parents: list[int]  # index of each draft's parent; -1: it follows the text
    probs: list[float]  # how often the draft and all above it followed the match, as a share
    score: float  # sum of `probs`
    match_len: int  # number of the text's last tokens that the drafts were found after

    def steps(self) -> tuple[list[int], list[float]]:
        """Returns the depth of each draft, and how often it follows its parent, as a share."""
        depths, shares = [], []
        for parent, prob in zip(self.parents, self.probs):
            depths.append(1 if parent < 0 else depths[parent] + 1)
            shares.append(prob if parent < 0 else prob / self.probs[parent])
        return depths, shares


class SuffixSearch(NamedTuple):
    """Searches for the best path, which follows the most frequent token again and again, or for the best tree, which
    takes the most probable drafts wherever they are."""

    counts: SuffixAutomaton
    drafts: list[int]  # most drafts for a match of length 0 .. max_length - 1; never falls with the length
    reach: list[int]  # most drafts in one path, so that the match and the path have at most max_length tokens
    min_prob: float
    is_tree: bool

    def best_draft(self, match: Cursor, other: SuffixDraft) -> SuffixDraft:
        """Returns the best draft after the longest match or a shorter one, or `other` if none has a higher score."""
        best, candidates, is_tight = other, sorted(self._candidates(match, other.score)), False
        while candidates and candidates[-1][0] >= best.score:
            draft = self.draft_of(candidates.pop(), best.score)
            is_equal = draft.score == best.score and best is not other
            if draft.score > best.score or (is_equal and draft.match_len > best.match_len):
                best = draft
            if len(candidates) > FEW and not is_tight:
                candidates = [candidate for candidate in candidates if candidate[0] >= best.score]
                if len(candidates) > FEW:
                    candidates = self.tightened(candidates)
                is_tight = True
        return best

    def draft_of(self, candidate: Candidate, least_score: float) -> SuffixDraft:
        """Makes the draft of a candidate, or some draft of a lower score if it cannot reach `least_score`."""
        return (self._tree if self.is_tree else self._path)(candidate, least_score)

    def _candidates(self, match: Cursor, score: float) -> list[Candidate]:
        """Returns the matches whose score may reach `score`."""
        counts, drafts, reach, min_prob, is_tree = self
        link, length, count, target = counts.link, counts.length, counts.count, counts.target
        found = []
        state, high = match
        while state and drafts[high] >= score:
            shorter, follower = link[state], target[state]
            low = length[shorter] + 1
            first_prob = count[follower] / count[state] if follower else -1.0
            if first_prob >= min_prob and is_tree:
                for most, longest, shortest in ((drafts[low], low, low),) if low == high else self._spans(low, high):
                    bound = min(most * first_prob, counts.max_length - shortest) * (1 + ROUNDING)
                    if bound >= score:
                        found.append((bound, longest, shortest, state, most))
            elif first_prob >= min_prob:
                most = reach[low] if low == high else max(reach[low : high + 1])
                bound = most * first_prob * (1 + ROUNDING)
                if bound >= score:
                    found.append((bound, high, low, state, most))
            state, high = shorter, low - 1
        return found

    def _spans(self, low: int, high: int) -> list[tuple[int, int, int]]:
        """Returns the lengths low .. high of which one has the best tree: most drafts, longest and shortest length.
        More drafts never lower the score, and neither do deeper ones. So the shortest of several lengths that allow
        equally many drafts is best, and the longest of those whose depth is no limit."""
        drafts = self.drafts
        first = bisect_left(drafts, drafts[high], low, high)
        found = [(drafts[high], high, first)]
        while first > low and drafts[first] > self.counts.max_length - first:
            first -= 1
            found.append((drafts[first], first, first))
        return found

    def _path(self, candidate: Candidate, least_score: float) -> SuffixDraft:
        counts, min_prob = self.counts, self.min_prob
        count, token, target = counts.count, counts.token, counts.target
        _, longest, _, state, most = candidate
        tokens, probs = [], []
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
        longest = min(longest, counts.max_length - len(tokens))
        return SuffixDraft(tokens, list(range(-1, len(tokens) - 1)), probs, score, longest)

    def _tree(self, candidate: Candidate, least_score: float) -> SuffixDraft:
        """Makes the tree of the shortest match, with the longest match that has a tree of the same score. A longer
        match has the same tree until its depth cuts something off. Then its tree is worse, unless drafts that are as
        probable take the place of what was cut."""
        _, longest, shortest, state, _ = candidate
        draft, depths, waiting = self._grow(state, shortest, least_score)
        deepest, max_length = max(depths, default=0), self.counts.max_length
        low = min(longest, max_length - deepest)
        best = draft._replace(match_len=low)
        if low == longest or draft.score < least_score:
            return best
        too_probable = ROUNDING * draft.score + max((-node[0] for node in waiting if node[-1] < deepest), default=0.0)
        needed = max((depth for depth, prob in zip(depths, draft.probs) if prob > too_probable), default=1)
        high = min(longest, max_length - needed)
        while low < high:
            middle = (low + high + 1) // 2
            longer, _, _ = self._grow(state, middle, draft.score)
            if longer.score == draft.score:
                best, low = longer, middle
            else:
                high = middle - 1
        return best

    def _grow(self, state: int, length: int, least_score: float) -> tuple[SuffixDraft, list[int], list[tuple]]:
        """Makes the tree of a match of `length` tokens. Always adds the most probable draft, of equal ones the one that
        was found first. Ends early, with a lower score, if it cannot reach `least_score`. Returns the drafts, their
        depths, and what was left out: (minus the probability, .., the depth) of each."""
        counts, min_prob = self.counts, self.min_prob
        count, token, target, all_others = counts.count, counts.token, counts.target, counts.others
        most, deepest = self.drafts[length], counts.max_length - length
        tokens, parents, probs, depths = [], [], [], []
        # minus probability, parent, rank among its children, state, token, depth
        waiting: list[tuple[float, int, int, int, int, int]] = []
        prob, depth, score, parent = 1.0, 0, 0.0, -1
        for left in range(most, -1, -1):
            follower = target[state]
            if follower and depth < deepest:
                total = count[state]
                first_prob = prob * (count[follower] / total)
                if first_prob >= min_prob:
                    heappush(waiting, (-first_prob, parent, 0, follower, token[state], depth + 1))
                    if others := all_others[state]:
                        # slightly too few, since the exact quotient decides
                        least = max(1, int(min_prob * total / prob * (1 - ROUNDING)))
                        if total - count[follower] >= least:
                            for rank, other in enumerate(counts.rank_others(state, least, left), start=1):
                                end = others[other]
                                other_prob = prob * (count[end] / total)
                                if other_prob < min_prob:
                                    break
                                heappush(waiting, (-other_prob, parent, rank, end, other, depth + 1))
            if not left or not waiting:
                break
            minus_prob, parent, _, state, new_token, depth = heappop(waiting)
            prob = -minus_prob
            if (score + left * prob) * (1 + ROUNDING) < least_score:
                break
            tokens.append(new_token)
            parents.append(parent)
            probs.append(prob)
            depths.append(depth)
            score += prob
            parent = most - left
        return SuffixDraft(tokens, parents, probs, score, length), depths, waiting

    def tightened(self, candidates: list[Candidate]) -> list[Candidate]:
        """Returns the candidates in the order of bounds that are nearly their scores. A text that repeats itself has
        many matches, all followed by much the same. The path of one match is a piece of the path of a shorter one, and
        its score is the sum of the counts in that piece. Drafts of a tree that leave the path follow one of its states
        less often than the path's next token does. All these together count what is lost from that state to the next,
        so none of them counts more."""
        counts, _, _, min_prob, is_tree = self
        count, target, others, max_length = counts.count, counts.target, counts.others, counts.max_length
        path = [target[min(candidates, key=itemgetter(2))[3]]]
        while (beyond := target[path[-1]]) and len(path) < max_length:
            path.append(beyond)
        places = {state: place for place, state in enumerate(path)}
        falling = [-count[state] for state in path]  # negative, since bisect needs an ascending list
        sums = list(accumulate(falling, initial=0))
        lost = [count[state] - count[target[state]] if is_tree and others[state] else 0 for state in path]
        is_lossless = not any(lost)
        found = []
        for bound, longest, shortest, state, most in candidates:
            follower = target[state]
            if follower in places:
                first, total = places[follower], count[state]
                last = first + most
                aside = 0 if is_lossless else max(lost[first:last], default=0)
                if is_tree and others[state]:
                    aside = max(aside, total - count[follower])
                if last > len(path):
                    last, aside = len(path), max(aside, count[beyond])
                # a draft must be at least as probable
                least = min_prob * total * (1 - ROUNDING)
                end = bisect_right(falling, -max(aside, least), first, last)
                sum_counts = sums[first] - sums[end]
                if aside >= least:
                    sum_counts += aside * (first + most - end)
                bound = min(bound, sum_counts / total * (1 + ROUNDING))
            found.append((bound, longest, shortest, state, most))
        found.sort()
        return found
