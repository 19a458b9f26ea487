"""Where requests end, whoever drafts: cut at any place of a block, nothing of what is dropped is left to others.

And what they end in: pools and caches that hold fewer of them than there are.
"""

import copy
import functools
import random
from collections import defaultdict

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.drafters.suffix import SuffixCache
from op_tests.engine.drafters.suffix_oracle import num_states
from op_tests.engine.methods import MIXED, engine_of, plain_of
from op_tests.engine.methods import PROVEN as METHODS
from op_tests.engine.methods import SIZES as SMALL
from op_tests.engine.toys import LetterTokenizer, RowWalker, ToyModel, Walker, WalkerHead, WalkerModules
from op_tests.engine.view import View

TOKENIZER = LetterTokenizer()
# a walk that says no token twice, for longer than a block of any method
SIZES = {"vocab_size": 60, "walk": 28}
PROMPT = [*range(28), *range(12)]
TEXT = list(range(12, 29))
# behind these the text is what attention makes of them
JUMPERS = [[30, 39], [38, 35], [28, 49], [36, 30]]
DRAFTING = [name for name in METHODS if name != "naive"]
# on a CPU chains of a head and of suffix trees have to do
MOST = [name for name in DRAFTING if torch.cuda.is_available() or name not in ("ngram chain", "hybrid chain")]


def endings(text: list[int], last: int, **others) -> dict[str, SamplingParams]:
    """All that can end the text with its token `last`, by the reason that is given for it."""
    # with the last letter of the token before, unless there is none
    stop = TOKENIZER.decode(text[max(last - 1, 0) : last + 1])[-2:]
    return {
        "eos": SamplingParams(max_new_tokens=40, stop_token_ids=(text[last],), **others),
        "stop": SamplingParams(max_new_tokens=40, stop=(stop,), **others),
        "length": SamplingParams(max_new_tokens=last + 1, **others),
    }


def known_behind(cache: SuffixCache, token: int) -> set[tuple]:
    """All paths that responses went behind a token, and how probable each is."""
    cache.start("asks", [token])
    draft = cache.speculate("asks", max_spec_tokens=4096, max_spec_factor=4096, min_token_prob=0, use_tree=True)
    cache.stop("asks")
    paths = []
    for token, parent in zip(draft.token_ids, draft.parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(zip(paths, draft.probs))


def check_cache(engine, responses: list[list[int]]) -> None:
    """The engine's suffix cache knows these responses and no more."""
    (cache,), fresh = engine.session.suffix_caches.values(), SuffixCache()
    assert num_states(cache)[0] == 0
    cache = copy.deepcopy(cache)
    cache.max_cached_requests = -1  # so that it drops none for those that ask
    for number, response in enumerate(responses):
        fresh.start(number, [])
        fresh.extend(number, response)
        fresh.stop(number)
    for token in range(engine.target.vocab_size):
        assert known_behind(cache, token) == known_behind(fresh, token), token


# the host's lag, and how tokens are drawn
WAYS = [(0, {"temperature": 0.7}), (1, {})]
if torch.cuda.is_available():
    WAYS += [(1, {"temperature": 0.7}), (0, {})]


@pytest.mark.cross
@pytest.mark.parametrize(("lag", "drawn"), WAYS, indirect=["lag"])
@pytest.mark.parametrize("name", MOST)
def test_every_place_of_a_block(name, drawn, lag, device):
    """By an end token, a stop string and the length; beside each goes a request whose text shows any wrong key."""
    seeds = drawn and {"seed": 5}
    engine = engine_of(name, device, SIZES, TOKENIZER, max_batch=3)
    num_steps = engine.config.num_steps
    alone = engine_of(name, device, SIZES).generate(JUMPERS, 9, seeds=5, **drawn)
    plain = plain_of(device, SIZES)
    want = plain.generate(JUMPERS, 9, seeds=5, **drawn).output_ids
    assert plain.generate(PROMPT, len(TEXT)).output_ids == TEXT and alone.output_ids == want
    assert all(sum(token >= SIZES["walk"] for token in tokens) > 2 for tokens in want), want
    cut, beside = [], []
    for last in range(num_steps + 3):
        for reason, params in endings(TEXT, last, **drawn, **seeds).items():
            cut.append((last, reason, engine.submit(PROMPT, params)))
            number = len(beside) % len(JUMPERS)
            beside.append((number, engine.submit(JUMPERS[number], SamplingParams(max_new_tokens=9, **drawn, **seeds))))
    engine.collect()
    for last, reason, request in cut:
        where = f"{reason} at {last}: {request}"
        assert request.output_ids == TEXT[: last + 1] and request.finish_reason == reason, where
        assert [event.token_id for event in request.collect()] == request.output_ids, where
        # a place of a block is what the case says only if the first one is whole
        assert len(request.accepted) == -(-last // (num_steps + 1)), where
        assert request.accepted[:1] == [num_steps][:last], where
        if reason == "stop":
            assert request.text + request.params.stop[0] == TOKENIZER.decode(request.output_ids)
    for number, request in beside:
        assert request.output_ids == want[number], f"{number}: {request}"
    View(engine).check_is_empty()
    if "suffix" in name:
        check_cache(engine, [request.output_ids for *_, request in cut + beside])
        return
    # drafts owe nothing to what others left either
    again = [engine.submit(prompt, SamplingParams(max_new_tokens=9, **drawn, **seeds)) for prompt in JUMPERS]
    engine.collect()
    assert sum(sum(request.accepted) for request in again) == alone.stats.accepted


# those that a table of positions or of tokens would not hold
AT_THE_END = METHODS | {
    "several methods": MIXED,
    "shared nodes": {key: value for key, value in MIXED.items() if key != "num_model_steps"}
    | {"method": ("draft_model", "ngram", "suffix"), "share_nodes": True},
    "shared rows": {"method": "eagle", "topk": 3, "num_steps": 3, "num_draft_tokens": 9, "mean_draft_tokens": 4},
    "several modules": {"method": "mtp", "topk": 1, "num_steps": 3},
    "table": {"method": "eagle", "adaptive": ((2, (1, 5, 6)), (4, (2, 3, 7)))},
    "rejection": {"method": "eagle", "topk": 2, "num_steps": 3, "verify_strategy": "rejection", "temperature": 1.0},
}


@pytest.mark.parametrize("lag", [1], indirect=True)  # so that steps follow the last one
@pytest.mark.parametrize("name", AT_THE_END)
def test_no_model_is_asked_for_what_its_tables_do_not_hold(name, lag, device, monkeypatch):
    """Requests that end at the last position, after any number of tokens, of a target or a draft that is longer."""
    asked = defaultdict(set)  # of each model: positions and tokens

    def noting(call):
        def noted(model, input_ids, *arguments, **options):
            positions = next(each for each in reversed(arguments) if isinstance(each, torch.Tensor))
            asked[model] |= {("position", each) for each in positions.unique().tolist()}
            asked[model] |= {("token", each) for each in input_ids.unique().tolist()}
            arguments = [each.clamp(0, model.max_length - 1) if each is positions else each for each in arguments]
            return call(model, input_ids.clamp(0, model.vocab_size - 1), *arguments, **options)

        return functools.wraps(call)(noted)

    monkeypatch.setattr(ToyModel, "forward", noting(ToyModel.forward))
    monkeypatch.setattr(WalkerModules, "advance", noting(WalkerModules.advance))
    config = EAGLEConfig(max_batch=4, page_size=4, prefill_chunk=9, **AT_THE_END[name])
    for target_length, draft_length in ((24, 21), (21, 24)) if config.needs_model else ((24, 24),):
        kind = Walker if config.methods[0] == "draft_model" or name == "hybrid tree" else WalkerHead
        kind = functools.partial(WalkerModules, 3) if name == "several modules" else kind
        draft = kind(**SMALL, max_length=draft_length, seed=1, device=device) if config.needs_model else None
        target = RowWalker(**SMALL, max_length=target_length, device=device)
        engine, length = EAGLEInference(draft, target, config), min(target_length, draft_length)
        for is_mixed in (False, True):  # with plain steps between, of which drafts learn later
            requests = [
                engine.submit([token % 20 for token in range(count, length)], SamplingParams(max_new_tokens=count))
                for count in range(1, 8)
            ]
            while engine.has_work:
                engine.is_speculating = not (is_mixed and engine.is_speculating)
                engine.step()
            assert [len(request.output_ids) for request in requests] == [*range(1, 8)]
        engine.is_speculating = True
        assert engine.submit([1] * (length - 1), SamplingParams(max_new_tokens=2)).error
        for model in asked:
            most = {"position": model.max_length, "token": model.vocab_size}
            wrong = {(kind, number) for kind, number in asked[model] if not 0 <= number < most[kind]}
            assert not wrong, (type(model).__name__, wrong)
        assert ("position", length - 2) in asked[target]


@pytest.mark.slow
def test_more_requests_than_pools_and_caches_hold(lag, device):
    """Of five methods: most wait for pages, some are aborted while they wait, are read or run, and the suffix cache
    lets go of the oldest response, that of a request which still runs too."""
    coin, count = random.Random(5), 600 if torch.cuda.is_available() else 50
    sizes, ends = {"vocab_size": 20, "walk": 8}, (19,)
    options = MIXED | {"max_batch": 6, "eos_token_ids": ends, "page_size": 4, "prefill_chunk": 5}
    options |= {"suffix_decoding_max_cached_requests": 2, "kv_cache_bytes": 28 << 10}
    target, draft = (Walker(**sizes, seed=seed, device=device) for seed in range(2))
    engine, plain = EAGLEInference(draft, target, EAGLEConfig(**options)), plain_of(device, sizes, eos_token_ids=ends)
    engine.generate([0], 2)
    view, feed = View(engine), View(engine).plan.feed
    assert view.pages.num_pages == 28, "it would hold more than three requests"
    begun, start = [], feed.start
    feed.start = lambda request: begun.append(request) or start(request)
    requests, wanted, most_running, aborted = [], [], 0, {"waiting": [], "being read": [], "running": []}
    while len(requests) < count or engine.has_work:
        if len(requests) < count:
            prompt = [coin.randrange(20) for _ in range(coin.choice((1, 2, 2, 9, 20)))]
            drawn = {"max_new_tokens": coin.choice((1, 5, 25, 25)), "temperature": coin.choice((0.0, 0.9))}
            drawn["seed"] = len(requests)
            requests.append(engine.submit(prompt, SamplingParams(**drawn, drafter=coin.choice(MIXED["method"]))))
            wanted.append(plain.submit(prompt, SamplingParams(**drawn)))
        engine.step()
        most_running = max(most_running, len(view.rows))
        found = {
            "waiting": view.waiting,
            "being read": [row.request for row in view.rows if not row.is_running],
            "running": [row.request for row in view.rows if row.is_running],
        }
        state = coin.choice(list(found))
        if found[state] and coin.random() < 0.2:
            aborted[state].append(coin.choice(found[state]))
            engine.abort(aborted[state][-1])
    plain.collect()
    assert all(aborted.values()) and 2 < most_running < 6
    dropped = sum(aborted.values(), [])
    for request, want in zip(requests, wanted):
        expected = want.output_ids[: len(request.output_ids)] if request in dropped else want.output_ids
        assert request.output_ids == expected, request
        assert request.finish_reason == ("abort" if request in dropped else want.finish_reason)
    accepted = dict.fromkeys(MIXED["method"], 0)
    for request in requests:
        accepted[request.params.drafter] += sum(request.accepted)
    assert accepted.pop("naive") == 0 and all(accepted.values()), accepted
    assert {request.finish_reason for request in requests} == {"abort", "eos", "length"}
    View(engine).check_is_empty()
    assert not feed._made and not feed._cache._requests
    # first in, first out: of those that have begun, in this order, the last two
    assert begun == [request for request in requests if request in begun]
    check_cache(engine, [request.output_ids for request in begun[-2:]])
