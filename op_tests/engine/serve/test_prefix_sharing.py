"""Prompts that begin alike are read once, and nothing else changes: texts, scores, acceptance, pages."""

import dataclasses
import random
from functools import partial

import pytest

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from op_tests.engine.engines import trees_by_request
from op_tests.engine.methods import PROVEN, SIZES, engine_of
from op_tests.engine.toys import DEVICE, RowWalker, Walker, WalkerBlock, WalkerHead, WalkerModules
from op_tests.engine.view import View

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
    view, cache = View(engine), View(engine).pages
    view.check_pages()
    assert set(cache._known.values()) >= set(cache._unused) and all(page.is_read for page in cache._unused)
    if not num_users:
        assert cache.num_free == cache.num_pages and not view.pages_held and len(cache._known) == len(cache._unused)


def small_pool(engine, num_requests: int) -> int:
    """Bytes that hold this number of requests of full length."""
    engine.generate([1], 1)
    state = View(engine).state
    pools = [pool for pool in (state.target_pool, state.draft_pool) if pool is not None]
    page = sum(2 * pool.k_cache[:, 0].numel() * pool.k_cache.element_size() for pool in pools)
    return num_requests * state.block_table.shape[1] * page


def sharing(method="eagle", **options):
    return engine_of(method, DEVICE, **{"page_size": 4, "max_batch": 16} | options)


def test_the_token_after_a_page_counts_where_a_draft_reads_it():
    """A head's keys of token i are made of token i + 1; a language model's are not, and plain decoding has no draft."""
    for method, shared in (("eagle", 4), ("draft_model", 8), ("naive", 8)):
        engine = sharing(method)
        engine.generate(BASE[:20], 1)
        other = BASE[:8] + [19 - BASE[8]] * 9
        assert engine.generate(other, 1).stats.shared_tokens == shared, method


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_drafts_keys_are_not_those_of_plain_decoding(method):
    """Which has read none; each shares with its own kind."""
    engine = sharing(method)
    for speculative, shared in ((False, 0), (True, 0), (False, 16), (True, 16)):
        assert engine.generate(BASE[:20], 2, speculative=speculative).stats.shared_tokens == shared


DRAFTERS = {
    "eagle": WalkerHead, "draft_model": Walker, "hybrid tree": Walker, "ngram tree": None,
    "2 modules": partial(WalkerModules, 2), "3 modules": partial(WalkerModules, 3), "drawn": WalkerHead,
    "medusa tree": WalkerBlock,
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
    target, sizes = RowWalker(**SIZES, device=DEVICE), {**SIZES, "seed": 1, "device": DEVICE}
    draft = kind and kind(**sizes, **({"of": target} if kind is WalkerBlock else {}))
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


@pytest.mark.parametrize("page_size", [1, 4])
def test_scores_of_a_prompt_are_read_for(page_size):
    """From whatever token on: pages that end before the one in front of it are shared, all others are read again."""
    engine = sharing(page_size=page_size, prefill_chunk=9)
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


def test_forgotten_prefixes_are_read_again():
    """As they must be where weights have changed."""
    engine = sharing()
    engine.generate(BASE[:20], 1)
    running = engine.submit(BASE[:20], SamplingParams(max_new_tokens=9))
    engine.step()
    engine.forget_prefixes()
    assert engine.generate(BASE[:20], 1).stats.shared_tokens == 0 and running.shared_tokens == 16
    engine.collect()
    assert len(running.output_ids) == 9 and engine.generate(BASE[:20], 1).stats.shared_tokens == 16
    check_pages(engine)
