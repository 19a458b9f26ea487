"""The search for the best match in texts that repeat themselves, where every length matches: exact, and short."""

import random

import pytest

from eagle_kernels.engine.drafters.suffix import SuffixCache
from eagle_kernels.engine.drafters.suffix_drafts import FEW, SuffixSearch

from .suffix_oracle import OracleCache

REPEATING = {
    "one token": lambda rng: [7] * 36,
    "two in turn": lambda rng: [7, 8] * 18,
    "a rare one": lambda rng: [7 + (rng.random() < 0.1) for _ in range(54)],
    "runs": lambda rng: ([7] * 11 + [8]) * 3,
    "two in turn, then another": lambda rng: [token for _ in range(5) for token in [7, 8] * rng.choice((3, 6)) + [9]],
}


@pytest.mark.parametrize("text", REPEATING)
def test_texts_that_repeat_themselves_equal_the_definition(text, monkeypatch):
    """Their many matches have bounds of another kind, which no draft's score exceeds."""
    tighten, bounded = SuffixSearch.tightened, []

    def tightened(search, candidates):
        found = tighten(search, candidates)
        for candidate in found:
            draft = search.draft_of(candidate, 0.0)
            assert draft.score <= candidate[0]
            bounded.append(draft.score / candidate[0])
        assert len(found) == len(candidates) and found == sorted(found)
        return found

    monkeypatch.setattr(SuffixSearch, "tightened", tightened)
    rng = random.Random(0)
    caches = SuffixCache(16), OracleCache(16, -1)
    for request in range(2):
        prompt, response = [rng.randrange(5, 10) for _ in range(20)], REPEATING[text](rng)
        for cache in caches:
            cache.start(request, prompt)
        for start in range(0, len(response), 6):
            for cache in caches:
                cache.extend(request, response[start : start + 6])
            options = {
                "max_spec_tokens": rng.choice((8, 12, 20)), "max_spec_offset": rng.choice((0.0, 4.0)),
                "min_token_prob": rng.choice((0.0, 0.1, 0.1, 0.5)), "use_tree": rng.random() < 0.6,
            }  # fmt: skip
            ours, expected = (cache.speculate(request, **options) for cache in caches)
            assert ours == expected, options
        for cache in caches:
            cache.stop(request)
    assert sum(share > 1 - 1e-6 for share in bounded) > len(bounded) / 4 > 0


@pytest.mark.parametrize("use_tree", [False, True])
def test_few_drafts_are_made_for_a_text_of_one_token(use_tree, monkeypatch):
    """Though each of up to 63 tokens is a match, in the own text and in what others have said."""
    made, draft_of = [], SuffixSearch.draft_of
    monkeypatch.setattr(SuffixSearch, "draft_of", lambda *arguments: made.append(1) or draft_of(*arguments))
    cache, most_made = SuffixCache(), 0
    for request in range(2):
        cache.start(request, list(range(100)))
        for _ in range(60):
            cache.extend(request, [7] * 3)
            made.clear()
            cache.speculate(request, max_spec_tokens=32, use_tree=use_tree)
            most_made = max(most_made, len(made))
    assert most_made <= 2 * (FEW + 2)
