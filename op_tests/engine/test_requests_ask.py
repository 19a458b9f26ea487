"""What a request may ask for beside tokens: a least length, likely tokens, the prompt's scores, several samples."""

import dataclasses
import itertools
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.drafters.model_drafter import SampledDrafter
from eagle_kernels.engine.step.verification import _filtered, _params_of_nodes, score
from eagle_kernels.tools.trees.view import _target_law
from op_tests.engine.engines import make
from op_tests.engine.request_law import check_end, check_tokens
from op_tests.engine.toys import DEVICE, LetterTokenizer, Markov, ToyModel, plain_logits

PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9], [4], list(range(30))]


@pytest.fixture(scope="module")
def target():
    return ToyModel(device=DEVICE)


@pytest.fixture(scope="module", params=["itself", "a stranger"])
def engine(request, target):
    """With a draft whose tokens are all accepted, and one whose are not."""
    return make(target if request.param == "itself" else ToyModel(seed=1, device=target.device), target, page_size=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_probabilities_of_half_precision_logits_are_not_rounded_to_it(temperature, dtype):
    """Scores, what strategies verify by, and what a drawn tree says of itself, against the same logits in float64."""
    logits = (3 * torch.randn(6, 500, generator=torch.Generator().manual_seed(1))).to(dtype)
    exact, tokens = logits.double(), torch.arange(6)
    close = partial(torch.testing.assert_close, atol=1e-5, rtol=0, check_dtype=False)

    order = exact.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    scores = score(logits, tokens, True)
    assert scores.logprobs.dtype == scores.top_logprobs.dtype == torch.float32
    close(scores.logprobs, exact.log_softmax(-1)[tokens, tokens])
    close(scores.top_logprobs, order.values[:, :20])
    assert torch.equal(scores.top_ids, order.indices[:, :20])

    law = (exact / (temperature or 1.0)).softmax(-1)
    numbers = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    row = SimpleNamespace(numbers=lambda name: torch.tensor([numbers[name]]), seeds=torch.zeros(1, dtype=torch.int64))
    tree = SimpleNamespace(retrieve_index=torch.arange(6)[None])
    proposal, none = SimpleNamespace(tree=tree), SimpleNamespace(penalties=False, minimum=False)
    seen = SimpleNamespace(batch=row, proposal=proposal, logits=logits, features=none)
    close(_target_law(seen, [4, 0, 2]), law[[4, 0, 2]])
    best = torch.nn.functional.one_hot(logits.argmax(-1), 500)
    close(_filtered(logits, *_params_of_nodes(row, proposal)), law if temperature else best.double())

    drafter = SampledDrafter.__new__(SampledDrafter)
    drafter._topk, drafter._parents = 2, torch.tensor([[0, 0, 1, 2, 3]])
    drafts = torch.tensor([[7, 9, 11, 13, 15]])
    own = law[drafter._parents[0], drafts[0]]
    probs = drafter._path_probs(drafts, logits[None], None, torch.tensor([temperature] * 2))
    paths = [own[0], own[1], own[0] * own[2], own[1] * own[3], own[0] * own[2] * own[4]]
    torch.testing.assert_close(probs[0].double(), torch.stack(paths), atol=0, rtol=1e-4)


@pytest.mark.parametrize("size", [3, 20, 40])
def test_of_equally_likely_tokens_the_lowest_ids_come_first(size):
    """Of all tokens, not of those alone that are shown, as a stable sort has them; also where none or few may come."""
    logits = torch.randint(0, 3, (2, 50, size)).float()
    logits[0, :3] = torch.tensor([[0.0], [-torch.inf], [torch.nan]])
    logits[0, 3, ::2] = -torch.inf
    scores = score(logits, torch.zeros(2, 50, dtype=torch.int64), True)
    ordered = logits.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    count = min(20, size)
    is_number = ~logits.isnan().any(-1) & (logits > -torch.inf).any(-1)
    assert torch.equal(scores.top_ids[is_number], ordered.indices[..., :count][is_number])
    torch.testing.assert_close(scores.top_logprobs[is_number], ordered.values[..., :count][is_number])
    assert (scores.top_ids >= 0).all() and (scores.top_ids < size).all()


@pytest.mark.parametrize("speculative", [True, False])
def test_likely_tokens_of_a_text_with_ties(speculative):
    """Its own tokens, the first one included, and those of the prompt."""
    target = Markov(vocab_size=50, max_length=128)
    target.table = target.table.round()
    draft = Markov(vocab_size=50, max_length=128, seed=1, near=target)
    engine = make(draft, target, method="draft_model")
    asked = {"top_logprobs": 20, "logprob_start_len": 0, "speculative": speculative}
    output = engine.generate([3, 1, 4, 1], 12, temperature=1.0, seeds=1, **asked)
    text = [3, 1, 4, 1, *output.output_ids]
    order = target.table.log_softmax(-1).sort(dim=-1, descending=True, stable=True).indices[:, :20].tolist()
    likely = [*output.prompt_top_logprobs[1:], *output.top_logprobs]
    assert [[token for token, _ in top] for top in likely] == [order[token] for token in text[:-1]]


# what may be asked for, and the scores that it brings
SCORES = [
    ({}, ()),
    ({"logprobs": True}, ("logprobs",)),
    ({"top_logprobs": 2}, ("top_logprobs",)),
    ({"logprob_start_len": 0}, ("prompt_logprobs",)),
    ({"top_logprobs": 1, "logprob_start_len": 1}, ("top_logprobs", "prompt_logprobs", "prompt_top_logprobs")),
]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_request_is_told_the_scores_that_it_asks_for(size, n):
    """In any order, whatever those beside it ask for; it has None for others, and scores that nobody wants are None."""
    target = Markov(vocab_size=20, max_length=64)
    engine = EAGLEInference(None, target, EAGLEConfig(method="naive", max_batch=6))
    prompts = [[1 + place, 2, 3] for place in range(size)]
    for kinds in itertools.permutations(SCORES, size):
        stream = engine.stream(prompts, [SamplingParams(max_new_tokens=3, **asked) for asked, _ in kinds], n=n)
        for _ in stream:
            pass
        output, brought = stream.output(), [names for _, names in kinds for _ in range(n)]
        assert output.output_ids == [request.output_ids for request in stream.requests]
        for name in ("logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs"):
            own = [getattr(each, name) if name in names else None for each, names in zip(stream.requests, brought)]
            assert getattr(output, name) == (own if any(name in names for names in brought) else None), (name, kinds)
            assert all(own[index] for index, names in enumerate(brought) if name in names)


def test_scores_of_a_long_prompt():
    """More tokens than are scored at once, in one part and in several, from anywhere on."""
    target = ToyModel(max_length=700)
    prompt = [(7 * place + place // 11) % 40 for place in range(600)]
    logprobs = plain_logits(make(target, target), prompt).log_softmax(-1)
    wanted = [logprobs[place - 1, token].item() for place, token in enumerate(prompt) if place]
    for chunk, start in ((2048, 0), (2048, 300), (290, 5)):
        engine = make(target, target, prefill_chunk=chunk)
        found = engine.generate(prompt, 1, logprob_start_len=start, top_logprobs=1)
        assert found.prompt_logprobs[start == 0 :] == pytest.approx(wanted[max(start, 1) - 1 :], abs=1e-3)
        assert len(found.prompt_top_logprobs) == 600 - start


@pytest.mark.cross
@pytest.mark.parametrize("count", [3, 1])
def test_samples_are_requests_with_the_seeds_that_follow(engine, count):
    """Of each prompt one after another, whether the seeds are the call's or in the params of each prompt."""
    options, first = {"temperature": 1.0, "logprobs": True, "top_k": 20}, [2**63 - 1, -1]
    output = engine.generate(PROMPTS[1:3], 6, n=count, seeds=first, **options)
    seeds = [(seed + sample + 2**63) % 2**64 - 2**63 for seed in first for sample in range(count)]
    assert output.stats.seeds == seeds and output.stats.num_requests == 2 * count
    prompts = [prompt for prompt in PROMPTS[1:3] for _ in range(count)]
    for prompt, seed, tokens, own in zip(prompts, seeds, output.output_ids, output.logprobs):
        single = engine.generate(prompt, 6, seeds=seed, **options)
        assert single.output_ids == tokens and single.logprobs == pytest.approx(own, abs=1e-4)
    single = engine.generate(PROMPTS[1], 6, n=count, seeds=first[0], **options).output_ids
    assert single == (output.output_ids[0] if count == 1 else output.output_ids[:count])
    params = [SamplingParams(max_new_tokens=6, seed=seed, **options) for seed in first]
    assert engine.generate(PROMPTS[1:3], params, n=count).output_ids == output.output_ids
    params = [dataclasses.replace(each, seed=None) for each in params]
    assert engine.generate(PROMPTS[1:3], params, n=count, seeds=first).output_ids == output.output_ids


@pytest.mark.parametrize("method", ["generate", "stream", "stream_text", "benchmark"])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_refused_prompts_have_their_numbers(target, count, place, method):
    """Whatever is wrong with one, however many samples there are of each; in benchmarks, in whichever batch it is."""
    engine = EAGLEInference(target, target, EAGLEConfig.chain(1, max_batch=4), tokenizer=LetterTokenizer())
    options, caller = {"batch_size": count} if method == "benchmark" else {"n": count}, method.removesuffix("_text")
    for wrong, limits, reason in (
        ([], {}, "is empty"),
        ([3, 40], {}, "holds 40"),
        ([-1, 3], {}, "holds -1"),
        ([1] * 120, {}, "of 120 tokens"),
        ([1] * 50, {"max_length": 60}, "of 50 tokens"),
        ([1] * 60, {"kv_cache_bytes": 1 << 14, "page_size": 1}, ": 60 tokens"),
    ):
        prompts = [[1, 2], [3], [4, 5]]
        prompts[place] = wrong
        with pytest.raises(ValueError, match=rf"^{caller}: .*prompt {place} ?{reason}") as caught:
            getattr(engine, method)(prompts, 20, **options, **limits)
        assert re.findall(r"prompt (\d+)", str(caught.value)) == [str(place)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_new_tokens": -1}, "min_new_tokens must be an int of at least 0, got -1"),
        ({"min_new_tokens": 9}, "min_new_tokens must be at most max_new_tokens = 8, got 9"),
        ({"top_logprobs": 21}, "top_logprobs must be an int in 0..20, got 21"),
        ({"top_logprobs": True}, "top_logprobs must be an int in 0..20, got True"),
        ({"logprob_start_len": -2}, "logprob_start_len must be None or an int of at least 0, got -2"),
        ({"logprob_start_len": 3}, "logprob_start_len must be below the 3 tokens of its prompt, got 3"),
        ({"n": 0}, "generate: n must be an int of at least 1, got 0"),
        ({"min_new_tokens": 2, "stop_token_ids": range(39), "eos_token_ids": (38,)}, None),
    ],
    ids=str,
)
def test_bad_values_are_named(engine, options, message):
    options = {name: tuple(value) if isinstance(value, range) else value for name, value in options.items()}
    if message is None:  # as many end tokens as fit
        assert engine.generate(PROMPTS[0], 8, **options).output_ids[:2] == [39, 39]
        return
    with pytest.raises(ValueError, match=message):
        engine.generate(PROMPTS[0], 8, **options)


def test_too_many_end_tokens_to_keep_back():
    target = ToyModel(vocab_size=99)
    engine = EAGLEInference(target, target, EAGLEConfig(topk=2, num_steps=2))
    ends = tuple(range(65))
    assert len(engine.generate([1, 2], 30, stop_token_ids=ends).output_ids) <= 30
    with pytest.raises(ValueError, match="min_new_tokens serves at most 64 end tokens, got 65"):
        engine.generate([1, 2], 3, stop_token_ids=ends, min_new_tokens=1)


ENDS = (0, 5, 10, 15)
# values on both sides of what does nothing, and whether greedy tokens show them, too
SETTINGS = {
    "temperature": ((0.4, 2.5), False), "top_k": ((1, 3), False), "top_p": ((0.2, 0.8), False),
    "min_p": ((0.1, 0.7), False), "repetition_penalty": ((0.4, 3.0), True), "frequency_penalty": ((-3.0, 3.0), True),
    "presence_penalty": ((-9.0, 9.0), True), "min_new_tokens": ((5,), True), "ignore_eos": ((True,), True),
    "stop_token_ids": ((tuple(range(20, 40)),), True), "stop": ((tuple(map(chr, range(84, 104))),), True),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_has_its_effect_alone(target, name):
    """Of either sign, greedily and drawn, where nothing else is set: tokens and ends are what the law says."""
    values, shows_greedily = SETTINGS[name]
    config = EAGLEConfig(topk=2, num_steps=2, eos_token_ids=ENDS, max_batch=4)
    engine = EAGLEInference(target, target, config, tokenizer=LetterTokenizer())
    for temperature in (0.0, 1.0)[not shows_greedily :]:
        told = []
        for own in ({}, *({name: value} for value in values)):
            params = SamplingParams(**{"max_new_tokens": 8, "temperature": temperature} | own)
            stream = engine.stream(PROMPTS[:3], [dataclasses.replace(params, seed=seed) for seed in range(3)])
            for _ in stream:
                pass
            for request in stream.requests:
                text = request.prompt + request.output_ids
                check_tokens(request, plain_logits(engine, text[:-1])[len(request.prompt) - 1 :].cpu())
                check_end(request, LetterTokenizer(), ENDS)
            told.append([(request.output_ids, request.finish_reason) for request in stream.requests])
        assert all(each not in told[:index] for index, each in enumerate(told)), (temperature, values)
