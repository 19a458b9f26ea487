"""SuffixCache against the definition, exactly, on random work; worked examples, eviction, memory and bad arguments."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
import torch

from eagle_kernels.engine.drafters import suffix_automaton, suffix_drafts
from eagle_kernels.engine.drafters.suffix_automaton import Cursor, SuffixAutomaton
from eagle_kernels.engine.drafters.suffix_cache import SuffixCache

from .suffix_oracle import OracleCache

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
                "max_spec_tokens": rng.choice((0, 1, 2, 4, 8, 12)),
                "max_spec_factor": rng.choice((0, 0.5, 1, 1, 2.5)),
                "max_spec_offset": rng.choice((0, 0, -1, 2, 6)),
                "min_token_prob": rng.choice((0, 0.1, 0.1, 0.3, 0.5, 1.0)),
                "use_tree": rng.random() < 0.5,
            }
            ours, expected = (cache.speculate(running[-1], **options) for cache in caches)
            assert ours == expected, f"seed {seed}, depth {depth}, {most_cached} cached, {options}"
            note_draft(ours)
            matches = {cache.longest_match(running[-1]) for cache in caches}
            assert len(matches) == 1, f"seed {seed}, depth {depth}, {most_cached} cached, {matches}"


@pytest.mark.parametrize("part", range(10))
def test_equals_the_definition(part, monkeypatch):
    """Every second time the bounds of all candidates are tightened, and not of many alone."""
    drafts = []
    if part % 2:
        monkeypatch.setattr(suffix_drafts, "FEW", 0)
    for seed in range(40 * part, 40 * part + 40):
        compare(seed, 40, drafts.append)
    assert sum(draft.score > 1 for draft in drafts) > 20
    assert any(draft.parents != list(range(-1, len(draft.parents) - 1)) for draft in drafts)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_states_with_many_next_tokens_equal_the_definition(part, monkeypatch):
    """Of which only a few are known by rank: here all that have more than one."""
    monkeypatch.setattr(suffix_automaton, "MANY_TOKENS", 1)
    for seed in range(1000 + 20 * part, 1020 + 20 * part):
        compare(seed, 120)


@pytest.mark.cross
@pytest.mark.parametrize("depth", [4, 16])
def test_many_next_tokens_stay_in_order(depth, monkeypatch):
    """More than are looked at in one go, while counts rise and responses are removed."""
    monkeypatch.setattr(suffix_automaton, "MANY_TOKENS", 8)
    rng = random.Random(depth)
    caches = SuffixCache(depth, 2), OracleCache(depth, 2)
    options = {"max_spec_tokens": 6, "max_spec_offset": 6}
    for request in range(4):
        response = [token for _ in range(20) for token in (7, 10 + int(60 * rng.random() ** 2))]
        for cache in caches:
            cache.start(request, [])
            cache.extend(request, response)
        for new, (min_prob, use_tree) in enumerate(((0.0, True), (0.02, True), (0.0, False)), start=500):
            for cache in caches:
                cache.extend(request, [new, 7])
            given = options | {"min_token_prob": min_prob, "use_tree": use_tree}
            ours, expected = (cache.speculate(request, **given) for cache in caches)
            assert ours == expected and len(ours.token_ids) > 1
    assert caches[0]._counts._leaders


def test_worked_example():
    """1 2 occurs four times: twice before 3, once before 4 and once at the end; 1 2 3 before 1, and later before 5."""
    cache = SuffixCache(max_cached_requests=0)
    cache.start("a", [1, 2, 3, 1, 2, 4])
    cache.extend("a", [1, 2, 3, 5, 1])
    cache.extend("a", [2])
    path = cache.speculate("a", max_spec_tokens=8)
    assert path == ([3, 5], [-1, 0], [0.5, 0.25], 0.75, 2)
    tree = cache.speculate("a", max_spec_tokens=8, max_spec_offset=3, use_tree=True)
    assert tree == ([3, 4, 5, 1, 1], [-1, -1, 0, 0, 1], [0.5, 0.25, 0.25, 0.25, 0.25], 1.5, 2)


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
    before = cache.num_states
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
        assert cache.num_states == before


def test_the_own_text_wins_ties_and_loses_to_more():
    cache = SuffixCache()
    cache.start("past", [])
    cache.extend("past", [1, 2, 3, 4, 1, 2])
    cache.stop("past")
    cache.start("now", [1, 2, 9, 9, 1, 2])
    assert cache.speculate("now", max_spec_tokens=1).token_ids == [9]
    assert cache.speculate("now", max_spec_tokens=4).token_ids == [9, 9]
    cache.start("other", [2, 9, 0, 1, 2])  # a match of one token in its own text, of two in the past one
    assert cache.speculate("other", max_spec_tokens=4).token_ids == [3, 4]


def test_match_and_drafts_share_the_depth():
    cache = SuffixCache(max_tree_depth=8)
    cache.start(0, list(range(100, 120)) + list(range(100, 110)))
    draft = cache.speculate(0, max_spec_tokens=32)
    assert draft == ([110, 111, 112, 113], [-1, 0, 1, 2], [0.5] * 4, 2.0, 4)
    assert cache.speculate(0, max_spec_tokens=32, use_tree=True) == draft
    assert cache.speculate(0, max_spec_tokens=2).match_len == 6
    assert cache.speculate(0, max_spec_tokens=32, max_spec_factor=0.0, max_spec_offset=9.0).match_len == 1


def test_a_longer_match_wins_if_what_it_cuts_off_has_a_substitute():
    """Of the same probability but found later: 4 lies three deep, 6 two deep."""
    cache = SuffixCache(max_tree_depth=8, max_cached_requests=0)
    match, text = list(range(10, 16)), []
    for number, follow in enumerate(2 * [[2, 3, 4]] + [[2, 3]] * 3 + 2 * [[5, 6]] + [[5]] * 2, start=20):
        text += [100 + number, *match, *follow, 200 + number]
    cache.start(0, [*text, 100, *match])
    draft = cache.speculate(0, max_spec_tokens=4, min_token_prob=0.0, use_tree=True)
    assert draft.token_ids == [2, 3, 5, 6] and draft.parents == [-1, 0, -1, 2] and draft.match_len == 6
    deeper = cache.speculate(0, max_spec_tokens=5, min_token_prob=0.0, use_tree=True)
    assert deeper.token_ids == [2, 3, 5, 4, 6] and deeper.match_len == 5


@pytest.mark.parametrize("most_known", [1, 4, 8, 64])
def test_next_tokens_are_ranked_while_counts_change(most_known, monkeypatch):
    monkeypatch.setattr(suffix_automaton, "MANY_TOKENS", most_known)
    rng = random.Random(most_known)
    counts, texts, last, now = SuffixAutomaton(4), [], {}, 0
    for step in range(600):
        if step % 4 == 3 and len(texts) > 30:
            counts.remove(texts.pop(rng.randrange(len(texts))))
        else:
            texts.append([7, 8 + (step // 20 + int(20 * rng.random() ** 3)) % 20, 0] * rng.randint(1, 3))
            counts.extend(Cursor(), texts[-1])
            for token in texts[-1]:
                now += 1
                last[token] = now
        if step % 16 < 8:  # some rise far between two looks
            continue
        followers = Counter(token for text in texts for token in text[1::3])
        ranked = sorted(followers, key=lambda token: (followers[token], last[token]), reverse=True)
        state = counts.match([7]).state
        assert counts.token[state] == ranked[0]
        least, most = rng.choice(((1, 40), (1, 1), (2, 40), (4, 2), (8, 40), (1, 3)))
        expected = [token for token in ranked[1:] if followers[token] >= least][:most]
        assert counts.rank_others(state, least, most) == expected


@pytest.mark.parametrize("use_tree", [False, True])
def test_nothing_to_go_by(use_tree):
    cache = SuffixCache()
    options = {"max_spec_tokens": 4, "use_tree": use_tree}
    cache.start(0, [])
    assert cache.speculate(0, **options) == ([], [], [], 0.0, 0)
    cache.extend(0, [])
    assert cache.speculate(0, **options).match_len == 0
    cache.start(1, [5])
    assert cache.speculate(1, **options) == ([], [], [], 0.0, 1)
    cache.extend(1, torch.tensor([5]))
    assert cache.speculate(1, **options) == ([5], [-1], [0.5], 0.5, 1)
    cache.extend(1, [])
    assert cache.speculate(1, **options).token_ids == [5]
    assert cache.speculate(1, max_spec_tokens=0, use_tree=use_tree).token_ids == []


def test_an_evicted_request_goes_on_alone():
    cache = SuffixCache(max_cached_requests=1)
    cache.start("first", [1])
    cache.extend("first", [2, 3, 4])
    cache.start("second", [2])
    assert cache.speculate("second", max_spec_tokens=4).token_ids == []
    cache.extend("first", [2, 3, 4, 2])
    assert cache.speculate("first", max_spec_tokens=4).token_ids == [3, 4, 2]
    assert cache.speculate("second", max_spec_tokens=4).token_ids == []
    cache.extend("second", [3, 9])
    cache.extend("first", [8, 7, 3])
    assert cache.speculate("first", max_spec_tokens=1) == ([9], [-1], [1.0], 1.0, 1)
    cache.stop("second")
    cache.start("second", [3])  # an id may be used again; its past response makes room
    assert cache.speculate("second", max_spec_tokens=4).token_ids == []


def test_no_global_automaton():
    cache = SuffixCache(max_cached_requests=0)
    cache.start(0, [1, 2, 3])
    cache.extend(0, [1, 2, 3])
    cache.start(1, [1, 2])
    assert cache.speculate(1, max_spec_tokens=4).token_ids == []
    assert cache.speculate(0, max_spec_tokens=4) == ([1, 2, 3], [-1, 0, 1], [0.5] * 3, 1.5, 3)
    assert cache.num_states[1] == 0


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
    assert cache.num_states[0] > 0 and 0 < cache.num_states[1] < len(counts.link)
    assert sum(others is not None for others in counts.others) <= cache.num_states[1] + 1
    for request in (58, 59):
        cache.stop(request)
    for request in range(4):
        cache.start(request, [])
        cache.stop(request)
    assert cache.num_states == (0, 0)
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
    assert cache.num_states[0] < 2 * num_tokens
    cache.extend(0, prompt[500:540])
    if text == "mixed":
        assert cache.speculate(0, max_spec_tokens=8).token_ids == prompt[540:548]
    else:
        assert cache.speculate(0, max_spec_tokens=8).token_ids == [0] * 8
        assert cache.num_states[0] == 16


BAD = [
    (lambda cache: SuffixCache(1), "SuffixCache: max_tree_depth must lie in 2..65536, got 1"),
    (lambda cache: SuffixCache(2.5), "SuffixCache: max_tree_depth must be an int, got float"),
    (lambda cache: SuffixCache(8, -2), "SuffixCache: max_cached_requests must be at least -1, got -2"),
    (lambda cache: cache.start("a", []), "SuffixCache.start: request must not be running already, got 'a'"),
    (lambda cache: cache.start("b", [1, -1]), "SuffixCache.start: prompt must hold token ids in 0..2147483647, got -1"),
    (lambda cache: cache.start("b", None), "SuffixCache.start: prompt must be a sequence of ints, got NoneType"),
    (lambda cache: cache.extend("b", [1]), "SuffixCache.extend: request must be running (start begins one), got 'b'"),
    (lambda cache: cache.extend("a", [1 << 31]), "SuffixCache.extend: tokens must hold token ids in 0..2147483647"),
    (lambda cache: cache.extend("a", [1.5]), "SuffixCache.extend: tokens must be a sequence of ints, got list"),
    (lambda cache: cache.stop("b"), "SuffixCache.stop: request must be running (start begins one), got 'b'"),
    (lambda cache: cache.speculate("b", max_spec_tokens=1), "SuffixCache.speculate: request must be running"),
    (lambda cache: cache.speculate("a", max_spec_tokens=-1), "SuffixCache.speculate: max_spec_tokens must be at least"),
    (lambda cache: cache.speculate("a", max_spec_tokens=True), "max_spec_tokens must be an int, got bool"),
    (lambda cache: cache.speculate("a", max_spec_tokens=[]), "max_spec_tokens must be an int, got list"),
    (lambda cache: cache.speculate("a", max_spec_tokens=1, max_spec_factor=-1), "max_spec_factor must be at least 0"),
    (
        lambda cache: cache.speculate("a", max_spec_tokens=1, max_spec_offset=float("inf")),
        "max_spec_offset must be a finite number, got inf",
    ),
    (lambda cache: cache.speculate("a", max_spec_tokens=1, min_token_prob=float("nan")), "min_token_prob must be a"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=range(len(BAD)))
def test_bad_arguments(call, message):
    cache = SuffixCache()
    cache.start("a", [1])
    cache.speculate("a", max_spec_tokens=1)
    with pytest.raises((ValueError, TypeError)) as caught:
        call(cache)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert list(cache._requests) == ["a"] and cache.num_states == (1, 0)


def test_a_refused_prompt_evicts_nothing():
    cache = SuffixCache(max_cached_requests=1)
    cache.start(0, [])
    cache.extend(0, [1, 2, 3])
    with pytest.raises(ValueError):
        cache.start(1, [-5])
    assert cache.num_states[1] > 0
