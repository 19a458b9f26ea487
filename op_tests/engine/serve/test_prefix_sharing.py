"""Prompts that begin alike are read once, and nothing else changes: texts, scores, acceptance, pages."""

from __future__ import annotations

import dataclasses
import random
from functools import partial

import pytest

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.batch.prefix_cache import Prefix, PrefixCache
from eagle_kernels.engine.requests.request import Request
from op_tests.engine.engines import trees_by_request
from op_tests.engine.methods import PROVEN, SIZES, engine_of
from op_tests.engine.serve.conftest import DEVICE
from op_tests.engine.toys import RowWalker, Walker, WalkerHead, WalkerModules

METHODS = ("eagle", "draft_model", "mtp", "ngram tree", "suffix tree", "hybrid chain", "hybrid tree", "naive")
NUM_REQUESTS = 42  # for each method and page size: 1,008
BASE = [(7 * place) % 20 for place in range(64)]


def prompts_of(coin: random.Random, count: int) -> list[list[int]]:
    """Beginnings of three texts, cut anywhere, with a few tokens of their own; some are there twice."""
    texts = [[coin.randrange(20) for _ in range(48)] for _ in range(3)]
    prompts = []
    for _ in range(count):
        own = [coin.randrange(20) for _ in range(coin.randrange(4))]
        prompts.append(coin.choice(texts)[: coin.randrange(1, 49)] + own if coin.random() < 0.8 or not prompts
                       else list(coin.choice(prompts)))  # fmt: skip
    return prompts


def check_pages(engine, num_users: int = 0) -> None:
    """Every page is free, kept or in use, once."""
    cache = engine.session.scheduler.pages
    held = {page for row in engine.session.scheduler._rows if row is not None for page in row.pages.ids}
    assert sorted([*cache.free_ids(), *held]) == list(range(cache.num_pages))
    assert set(cache._known.values()) >= set(cache._unused) and all(page.is_read for page in cache._unused)
    if not num_users:
        assert cache.num_free == cache.num_pages and not held and len(cache._known) == len(cache._unused)


CROSS = [
    pytest.param(method, size, marks=[] if number % 3 == place else pytest.mark.full)
    for number, method in enumerate(METHODS)
    for place, size in enumerate((4, 1, 16))
]


@pytest.mark.cross
@pytest.mark.parametrize(("method", "page_size"), CROSS)
def test_requests_are_those_without_sharing(method, page_size):
    """With aborts, and a pool that is too small for all that could be kept."""
    coin = random.Random(f"{method} {page_size}")
    prompts = prompts_of(coin, NUM_REQUESTS)
    asked = [
        SamplingParams(max_new_tokens=coin.randrange(1, 9), temperature=coin.choice((0, 0, 1.0)), seed=number,
                       logprobs=coin.choice((False, "raw")),
                       logprob_start_len=coin.choice((None, None, min(9, len(prompt) - 1))))
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip
    sizes = {"page_size": page_size, "max_batch": 5, "prefill_chunk": coin.choice((7, 2048)), "max_length": 64}
    plain = engine_of(method, DEVICE, **sizes, share_prefixes=False)
    wanted = [plain.submit(*each) for each in zip(prompts, asked)]
    plain.collect()
    engine = engine_of(method, DEVICE, **sizes)
    engine = engine_of(method, DEVICE, **sizes, kv_cache_bytes=small_pool(engine, 3))
    requests, aborted = [], set()
    for each in zip(prompts, asked):
        requests.append(engine.submit(*each))
        for _ in range(coin.randrange(3)):
            engine.step()
        alive = [request for request in requests if not request.is_finished]
        if alive and coin.random() < 0.25:
            victim = coin.choice(alive)
            aborted.add(victim.id)
            engine.abort(victim)
        check_pages(engine, num_users=1)
    engine.collect()
    check_pages(engine)
    assert aborted and sum(request.shared_tokens for request in requests) > 100
    for request, other in zip(requests, wanted):
        count = len(request.output_ids)
        assert request.output_ids == other.output_ids[:count] and request.shared_tokens < len(request.prompt)
        assert request.logprobs == pytest.approx(other.logprobs[:count], abs=1e-4)
        if "suffix" not in method:  # whose offers depend on when the host learns of others' texts
            assert request.accepted == other.accepted[: len(request.accepted)]
        if request.id not in aborted:
            assert count == len(other.output_ids) and request.finish_reason == other.finish_reason
            assert request.prompt_logprobs[1:] == pytest.approx(other.prompt_logprobs[1:], abs=1e-4)


def small_pool(engine, num_requests: int) -> int:
    """Bytes that hold so many requests of full length."""
    engine.generate([1], 1)
    state = engine.session.scheduler.state
    pools = [pool for pool in (state.target_pool, state.draft_pool) if pool is not None]
    page = sum(2 * pool.k_cache[:, 0].numel() * pool.k_cache.element_size() for pool in pools)
    return num_requests * state.block_table.shape[1] * page


@pytest.fixture
def counted(monkeypatch):
    """Counts the tokens that a target reads; returns an engine and the list."""

    def counting(method="eagle", **options):
        engine, read = engine_of(method, DEVICE, **{"page_size": 4, "max_batch": 16} | options), []
        forward = engine.target.forward

        def count(input_ids, *arguments, **keywords):
            read.append(input_ids.numel())
            return forward(input_ids, *arguments, **keywords)

        monkeypatch.setattr(engine.target, "forward", count)
        return engine, read

    return counting


@pytest.mark.cross
@pytest.mark.parametrize("chunk", [8, 2048])
def test_requests_that_arrive_together_read_once(counted, chunk):
    """The first one reads, the others wait for it: 60 common tokens and 5 of each."""
    engine, read = counted(prefill_chunk=chunk)
    prompts = [BASE[:60] + [number, 3, 1, 4, 1] for number in range(10)]
    output = engine.generate(prompts, 1)
    assert output.stats.shared_tokens == 9 * 56 and sum(read) <= 65 + 9 * 9
    again = engine.generate(prompts, 1)
    assert again.stats.shared_tokens == 10 * 64 and again.output_ids == output.output_ids
    alone = engine.generate(prompts, 1, share_prefixes=False)
    assert alone.output_ids == output.output_ids and alone.stats.shared_tokens == 0


def test_the_token_after_a_page_counts_where_a_draft_reads_it(counted):
    """A head's keys of token i are made of token i + 1; a language model's are not, and plain decoding has no draft."""
    for method, shared in (("eagle", 4), ("draft_model", 8), ("naive", 8)):
        engine, _ = counted(method)
        engine.generate(BASE[:20], 1)
        other = BASE[:8] + [19 - BASE[8]] * 9
        assert engine.generate(other, 1).stats.shared_tokens == shared, method


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_drafts_keys_are_not_those_of_plain_decoding(counted, method):
    """Which has read none; each shares with its own kind."""
    engine, _ = counted(method)
    for speculative, shared in ((False, 0), (True, 0), (False, 16), (True, 16)):
        assert engine.generate(BASE[:20], 2, speculative=speculative).stats.shared_tokens == shared


DRAFTERS = {
    "eagle": WalkerHead, "draft_model": Walker, "hybrid tree": Walker, "ngram tree": None,
    "2 modules": partial(WalkerModules, 2), "3 modules": partial(WalkerModules, 3), "drawn": WalkerHead,
}  # fmt: skip
OPTIONS = {
    "2 modules": EAGLEConfig.chain(2, method="mtp"), "3 modules": EAGLEConfig.chain(3, method="mtp"),
    "drawn": EAGLEConfig(topk=2, num_steps=3, verify_strategy="rejection"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("drafter", "page_size", "chunk"),
    [
        pytest.param(drafter, *sizes, marks=[] if number % 2 == place else pytest.mark.slow)
        for number, drafter in enumerate(DRAFTERS)
        for place, sizes in enumerate(((1, 2048), (4, 7)))
    ],
)
def test_trees_are_those_without_sharing(drafter, page_size, chunk, monkeypatch):
    """Of all drafters but suffix trees, which learn of others, with evictions and aborts; text alone would not tell."""
    coin, kind = random.Random(f"{drafter} {page_size}"), DRAFTERS[drafter]
    config = OPTIONS.get(drafter) or EAGLEConfig(**PROVEN[drafter])
    sizes = {"page_size": page_size, "prefill_chunk": chunk, "max_batch": 4, "max_length": 64}
    config = dataclasses.replace(config, **sizes, cuda_graph=False)
    target, draft = RowWalker(**SIZES, device=DEVICE), kind and kind(**SIZES, seed=1, device=DEVICE)
    prompts = prompts_of(coin, 24)
    asked = [SamplingParams(max_new_tokens=coin.randrange(1, 7), seed=number, temperature=float(drafter == "drawn"))
             for number in range(len(prompts))]  # fmt: skip
    plain = EAGLEInference(draft, target, dataclasses.replace(config, share_prefixes=False))
    wanted = trees_by_request(plain, monkeypatch)
    alone = [plain.submit(*each) for each in zip(prompts, asked)]
    plain.collect()
    engine = EAGLEInference(draft, target, config)
    engine = EAGLEInference(draft, target, dataclasses.replace(config, kv_cache_bytes=small_pool(engine, 2)))
    trees, requests = trees_by_request(engine, monkeypatch), []
    for each in zip(prompts, asked):
        requests.append(engine.submit(*each))
        for _ in range(coin.randrange(3)):
            engine.step()
        alive = [request for request in requests if not request.is_finished]
        if alive and coin.random() < 0.3:
            engine.abort(coin.choice(alive))
    engine.collect()
    check_pages(engine)
    aborted = [request for request in requests if request.finish_reason == "abort"]
    num_shared, num_steps = sum(request.shared_tokens for request in requests), sum(map(len, trees.values()))
    assert aborted and num_shared > 50 and num_steps > 15
    for request, other in zip(requests, alone):
        count = len(request.accepted)
        assert trees[request.id][:count] == wanted[other.id][:count] and request.accepted == other.accepted[:count]
        assert request in aborted or count == len(other.accepted)


@pytest.mark.parametrize(("num_modules", "page_size", "chunk"), [(3, 1, 1), (3, 1, 5), (2, 2, 6)])
def test_modules_read_on_where_another_request_ends(num_modules, page_size, chunk, monkeypatch):
    """Keys of its last rows lacked tokens: whoever reads on makes these anew, wherever in its prompt it is given up."""
    sizes = {"page_size": page_size, "prefill_chunk": chunk, "max_batch": 2}
    config = EAGLEConfig.chain(num_modules, method="mtp", **sizes, cuda_graph=False)
    target, draft = (kind(**SIZES, device=DEVICE) for kind in (RowWalker, partial(WalkerModules, num_modules, seed=1)))
    engine, asked = EAGLEInference(draft, target, config), SamplingParams(max_new_tokens=4)
    trees = trees_by_request(engine, monkeypatch)
    for num_steps in range(min(5, 17 // chunk + 1)):
        first, other = engine.submit(BASE[:17], asked), engine.submit(BASE[:17], asked)
        for _ in range(num_steps):
            engine.step()
        engine.abort(first)
        engine.collect()
        engine.forget_prefixes()
        alone = engine.submit(BASE[:17], asked)
        engine.collect()
        engine.forget_prefixes()
        assert trees[other.id] == trees[alone.id] != [] and other.accepted == alone.accepted


@pytest.mark.parametrize("is_failure", [False, True], ids=["aborted", "failed"])
def test_another_request_reads_on_if_the_first_one_ends(counted, is_failure, monkeypatch):
    """From the last page that was read; the others wait for the new one."""
    engine, read = counted(prefill_chunk=8)
    prompts = [BASE[:48] + [number] * 3 for number in range(4)]
    wanted = [engine.generate(prompt, 6, share_prefixes=False).output_ids for prompt in prompts]
    requests = [engine.submit(prompt, SamplingParams(max_new_tokens=6)) for prompt in prompts]
    engine.step()
    engine.step()
    assert [request.shared_tokens for request in requests] == [0] * 4 and not requests[0].output_ids
    if is_failure:
        forward, is_first = engine.target.forward, [True]

        def fail_once(*arguments, **keywords):
            if is_first.pop() if is_first else False:
                raise RuntimeError("no memory")
            return forward(*arguments, **keywords)

        monkeypatch.setattr(engine.target, "forward", fail_once)
    else:
        engine.abort(requests[0])
    read.clear()
    engine.collect()
    assert requests[0].finish_reason == ("error" if is_failure else "abort")
    assert [request.output_ids for request in requests[1:]] == wanted[1:]
    assert requests[1].shared_tokens == 16 and [request.shared_tokens for request in requests[2:]] == [44, 44]
    check_pages(engine)


@pytest.mark.parametrize("page_size", [1, 4])
def test_scores_of_a_prompt_are_read_for(counted, page_size):
    """From whatever token on: pages that end before the one in front of it are shared, all others are read again."""
    engine, _ = counted(page_size=page_size, prefill_chunk=9)
    asked = {"logprob_start_len": 0, "top_logprobs": 2}
    wanted = engine.generate(BASE[:23], 2, **asked, share_prefixes=False)
    engine.generate(BASE[:23], 2)
    for start in range(23):
        output = engine.generate(BASE[:23], 2, **asked | {"logprob_start_len": start})
        assert output.stats.shared_tokens == max(start - 1, 0) // page_size * page_size
        assert output.output_ids == wanted.output_ids and len(output.prompt_logprobs) == 23 - start
        begin = max(start, 1)  # the first token has no score
        own, likely = (scores[begin - start :] for scores in (output.prompt_logprobs, output.prompt_top_logprobs))
        assert own == pytest.approx(wanted.prompt_logprobs[begin:], abs=1e-4)
        assert [[token for token, _ in top] for top in likely] == [
            [token for token, _ in top] for top in wanted.prompt_top_logprobs[begin:]
        ]
        check_pages(engine)


def test_samples_share_their_prompt(counted):
    engine, read = counted()
    output = engine.generate(BASE[:41], 1, n=6, temperature=1.0, seeds=3)
    assert output.stats.shared_tokens == 5 * 40 and sum(read) <= 41 + 5


def test_what_was_used_longest_ago_makes_room_first():
    cache = PrefixCache(8, 4)
    prompts = [[number] * 9 for number in range(4)]
    for prompt in prompts:  # two full pages of each are kept
        held = cache.take(Prefix(prompt, most=9), 3)
        cache.note_read(held, 9)
        cache.give_back(held)
    assert cache.num_free == 8
    held = cache.take(Prefix(prompts[0], most=9), 3)  # which was the first to go, as its last page has by now
    assert len(held.shared) == 2 and cache.start(held) in (4, None)
    cache.give_back(held)
    for prompt, shared in ((prompts[3], 8), (prompts[2], 8)):
        held = cache.take(Prefix(prompt, most=9), 2)
        assert cache.start(held) == shared
        cache.give_back(held)


def test_a_share_is_a_multiple_of_the_unit(monkeypatch):
    """With `deterministic`, bits depend on where a prompt is cut: only whole chunks are shared, and only so."""
    sizes = {"page_size": 4, "prefill_chunk": 12}
    engine = engine_of("draft_model", DEVICE, **sizes, share_prefixes=True)
    engine.generate(BASE[:40], 1)
    reading = engine.session.scheduler.reading
    config = dataclasses.replace(EAGLEConfig(), deterministic=True)
    monkeypatch.setattr(reading._plan.plain, "config", config)
    cache = PrefixCache(20, 4)
    request = Request(0, BASE[:40], SamplingParams(), 0, frozenset())
    assert reading.prefix(request).kind[0] and len(reading.prefix(request).prompt) == 37
    first = cache.take(reading.prefix(request), 10)
    cache.note_read(first, 40)
    assert len(first.shared) == 9
    for length, start in ((40, 36), (38, 36), (36, 24), (13, 12), (12, 0)):
        request.prompt = BASE[:length]
        held = cache.take(reading.prefix(request), 10)
        assert cache.start(held) == start == 4 * len(held.shared)
        cache.give_back(held)


def test_measurements_read_their_prompts(counted):
    """Warm-up reads prompts that are alike, a benchmark the same ones several times."""
    engine, read = counted()
    engine.warmup(SamplingParams())
    assert max(read) >= 64 and engine.session.scheduler.pages.num_free == engine.session.scheduler.pages.num_pages
    assert engine.generate([0] * 50, 1).stats.shared_tokens == 0
    prompts = [BASE[:40], BASE[:40]]
    read.clear()
    engine.benchmark(prompts, 2, batch_size=2)
    assert sum(count for count in read if count >= 40) >= 2 * 4 * 40


def test_forgotten_prefixes_are_read_again(counted):
    """As they must be where weights have changed."""
    engine, _ = counted()
    engine.generate(BASE[:20], 1)
    running = engine.submit(BASE[:20], SamplingParams(max_new_tokens=9))
    engine.step()
    engine.forget_prefixes()
    assert engine.generate(BASE[:20], 1).stats.shared_tokens == 0 and running.shared_tokens == 16
    engine.collect()
    assert len(running.output_ids) == 9 and engine.generate(BASE[:20], 1).stats.shared_tokens == 16
    check_pages(engine)


def test_bad_values_are_named():
    with pytest.raises(ValueError, match="EAGLEConfig: share_prefixes must be True or False, got 1"):
        EAGLEConfig(share_prefixes=1)
