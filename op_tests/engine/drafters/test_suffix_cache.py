"""SuffixCache against the definition, exactly, on random work; what it forgets, and long prompts."""

import random
import time

import pytest

from eagle_kernels.engine.drafters import suffix_automaton, suffix_drafts
from eagle_kernels.engine.drafters.suffix import SuffixCache

from .suffix_oracle import OracleCache, num_states

DEPTHS = (2, 3, 4, 5, 6, 8, 16, 64)


def compare(seed, num_actions, note_draft=lambda draft: None):
    """Requests that come, grow, are stopped and forgotten in a random order."""
    rng = random.Random(seed)
    depth, most_cached, num_tokens = rng.choice(DEPTHS), rng.choice((-1, 0, 1, 3)), rng.choice((1, 2, 2, 3, 4, 5))
    caches = SuffixCache(depth, most_cached), OracleCache(depth, most_cached)
    running, num_started = [], 0

    def tokens(most):
        return [rng.randrange(num_tokens) for _ in range(rng.randrange(most + 1))]

    for _ in range(num_actions):
        action = rng.random()
        if not running or (action < 0.12 and len(running) < 4):
            prompt = tokens(8) if rng.random() < 0.8 else [0] * rng.randrange(10)
            for cache in caches:
                cache.start(num_started, prompt)
            running.append(num_started)
            num_started += 1
        elif action < 0.55:
            request, accepted = rng.choice(running), tokens(4)
            for cache in caches:
                cache.extend(request, accepted)
        elif action < 0.62:
            request = running.pop(rng.randrange(len(running)))
            for cache in caches:
                cache.stop(request)
        else:
            options = {
                "max_spec_tokens": rng.choice((0, 1, 2, 4, 8, 12)), "max_spec_factor": rng.choice((0, 0.5, 1, 1, 2.5)),
                "max_spec_offset": rng.choice((0, 0, -1, 2, 6)),
                "min_token_prob": rng.choice((0, 0.1, 0.1, 0.3, 0.5, 1.0)), "use_tree": rng.random() < 0.5,
            }  # fmt: skip
            ours, expected = (cache.speculate(running[-1], **options) for cache in caches)
            assert ours == expected, f"seed {seed}, depth {depth}, {most_cached} cached, {options}"
            note_draft(ours)
            matches = {cache.longest_match(running[-1]) for cache in caches}
            assert len(matches) == 1, f"seed {seed}, depth {depth}, {most_cached} cached, {matches}"


@pytest.mark.parametrize("part", range(10))
def test_equals_the_definition(part, monkeypatch):
    """At times all bounds are tightened, not those of many candidates alone, and all next tokens but one are ranked."""
    drafts = []
    if part % 2:
        monkeypatch.setattr(suffix_drafts, "FEW", 0)
    if part % 3:
        monkeypatch.setattr(suffix_automaton, "MANY_TOKENS", 1)
    for seed in range(40 * part, 40 * part + 40):
        compare(seed, 40, drafts.append)
    assert sum(draft.score > 1 for draft in drafts) > 20
    assert any(draft.parents != list(range(-1, len(draft.parents) - 1)) for draft in drafts)


@pytest.mark.parametrize("most_cached", [-1, 8])
def test_forgetting(most_cached):
    """Within, nothing is known of before, and afterwards everything of it and no more."""

    def respond(request, response):
        cache.start(request, [])
        cache.extend(request, response)

    def behind(token):
        cache.start("asks", [token])
        try:
            return cache.speculate("asks", max_spec_tokens=4, max_spec_offset=4).token_ids
        finally:
            cache.stop("asks")

    cache = SuffixCache(max_cached_requests=most_cached)
    respond("before", [1, 2, 3])
    with pytest.raises(RuntimeError, match="forgetting must begin while no request runs, got 1"), cache.forgetting():
        pass
    cache.stop("before")
    before = num_states(cache)
    with cache.forgetting():
        assert behind(1) == []
        respond("within", [1, 7, 8])
        cache.stop("within")
        assert behind(1) == [7, 8]
        respond("goes on", [1, 5])
    assert behind(1) == [2, 3]
    cache.extend("goes on", [6, 5])
    assert cache.speculate("goes on", max_spec_tokens=4, max_spec_offset=4).token_ids == [6, 5]
    cache.stop("goes on")
    assert behind(1) == [2, 3]
    if most_cached < 0:
        assert num_states(cache) == before


def test_nothing_stays(monkeypatch):
    """All is forgotten with the last response, and what was removed makes room for what comes."""
    monkeypatch.setattr(suffix_automaton, "MANY_TOKENS", 1)
    rng = random.Random(0)
    cache = SuffixCache(max_tree_depth=16, max_cached_requests=4)
    counts = cache._counts
    sizes = []
    for request in range(60):
        cache.start(request, [rng.randrange(50) for _ in range(20)])
        cache.extend(request, [min(int(rng.expovariate(0.1)), 60) for _ in range(100)])
        cache.speculate(request, max_spec_tokens=8, use_tree=True)
        if request >= 2:
            cache.stop(request - 2)
        sizes.append(len(counts.link))
        assert all(counts.count[state] for state in counts._leaders)
    assert max(sizes[10:]) < 1.5 * max(sizes[:10])
    assert num_states(cache)[0] > 0 and 0 < num_states(cache)[1] < len(counts.link)
    assert sum(others is not None for others in counts.others) <= num_states(cache)[1] + 1
    for request in (58, 59):
        cache.stop(request)
    for request in range(4):
        cache.start(request, [])
        cache.stop(request)
    assert num_states(cache) == (0, 0)
    assert len(counts.link) == len(counts.others) == 1 and not counts.others[0] and not counts._leaders
    assert not cache._requests and sum(map(len, cache._responses)) == 0


@pytest.mark.parametrize("text", ["mixed", "one token"])
def test_a_long_prompt(text, note):
    num_tokens = 1 << 17
    rng = random.Random(0)
    prompt = [0] * num_tokens if text == "one token" else [rng.randrange(1000) for _ in range(num_tokens)]
    cache = SuffixCache(max_tree_depth=16)
    start_s = time.perf_counter()
    cache.start(0, prompt)
    note(f"{num_tokens} tokens in {time.perf_counter() - start_s:.2f} s")
    assert num_states(cache)[0] < 2 * num_tokens
    cache.extend(0, prompt[500:540])
    if text == "mixed":
        assert cache.speculate(0, max_spec_tokens=8).token_ids == prompt[540:548]
    else:
        assert cache.speculate(0, max_spec_tokens=8).token_ids == [0] * 8
        assert num_states(cache)[0] == 16
