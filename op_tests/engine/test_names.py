"""Names and words of vLLM, SGLang and transformers: taken where they mean the same, else refused with what to use."""

import contextlib
import copy
import dataclasses
import inspect
import pickle
from pathlib import Path

import numpy
import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.requests.inputs import read_call_params
from eagle_kernels.engine.requests.names import agree
from op_tests.engine.toys import LetterTokenizer, ToyModel

PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9]]


@pytest.fixture(scope="module")
def engine():
    return EAGLEInference(ToyModel(seed=1), ToyModel(), EAGLEConfig(topk=2, num_steps=2), tokenizer=LetterTokenizer())


SAME = [
    ({"max_tokens": 5, "min_tokens": 2}, {"max_new_tokens": 5, "min_new_tokens": 2}),
    ({"max_completion_tokens": 5, "max_new_tokens": 5}, {"max_new_tokens": 5}),
    ({"top_k": -1}, {}),
    ({"top_k": numpy.int32(-1), "top_p": None, "min_p": None, "repetition_penalty": None, "logprobs": None,
      "frequency_penalty": None, "presence_penalty": None, "top_logprobs": None, "min_new_tokens": None}, {}),
    ({"stop": "q"}, {"stop": ("q",)}),
    ({"stop_strings": ["q", "r"]}, {"stop": ("q", "r")}),
    ({"stop": None, "stop_token_ids": None, "logprob_start_len": -1}, {}),
    ({"stop_token_ids": 5}, {"stop_token_ids": (5,)}),
    ({"stop_token_ids": numpy.array([4, 5])}, {"stop_token_ids": (4, 5)}),
    ({"stop_token_ids": [torch.tensor(4), numpy.int64(5)]}, {"stop_token_ids": (4, 5)}),
    ({"temperature": torch.tensor(0.5), "top_p": numpy.float32(0.5), "seed": numpy.int64(3)},
     {"temperature": 0.5, "top_p": 0.5, "seed": 3}),
    ({"do_sample": True, "temperature": 0.5}, {"temperature": 0.5}),
    ({"do_sample": False, "num_beams": 1, "n": 1, "best_of": None, "skip_special_tokens": True,
      "spaces_between_special_tokens": False, "return_dict_in_generate": False, "logits_processors": None}, {}),
    ({"stop": "q", "stop_strings": ["q"], "num_beams": numpy.int64(1), "early_stopping": numpy.bool_(False)},
     {"stop": ("q",)}),
    ({"do_sample": numpy.bool_(False)}, {}),
    ({"top_logprobs_num": 3, "return_logprob": False}, {"top_logprobs": 3}),
    ({"top_n_tokens": 3}, {"top_logprobs": 3}),
    ({"max_new_tokens": None, "max_tokens": 5, "max_completion_tokens": None}, {"max_new_tokens": 5}),
    ({"stop_token_ids": [4], "stop": ["q"], "stop_strings": numpy.array(["q"])}, {"stop_token_ids": 4, "stop": "q"}),
]  # fmt: skip


# what their own classes have where a caller says nothing
VLLM = {
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": None, "stop_token_ids": None, "ignore_eos": False,
    "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "flat_logprobs": False,
    "detokenize": True, "skip_special_tokens": True, "spaces_between_special_tokens": True, "logit_bias": None,
    "truncate_prompt_tokens": None, "structured_outputs": None, "allowed_token_ids": None, "extra_args": None,
    "bad_words": None, "include_stop_str_in_output": False, "skip_reading_prefix_cache": None,
}  # fmt: skip
SGLANG = {
    "max_new_tokens": 16, "stop": None, "stop_token_ids": None, "stop_regex": None, "temperature": 1.0, "top_p": 1.0,
    "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
    "min_new_tokens": 0, "n": 1, "json_schema": None, "regex": None, "ebnf": None, "structural_tag": None,
    "ignore_eos": False, "skip_special_tokens": True, "spaces_between_special_tokens": True, "no_stop_trim": False,
    "custom_params": None, "stream_interval": None, "logit_bias": None, "sampling_seed": None,
}  # fmt: skip
TRANSFORMERS = {
    "do_sample": True, "num_beams": 1, "num_beam_groups": 1, "early_stopping": False, "use_cache": True,
    "temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": None, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None,
    "renormalize_logits": False, "output_scores": False, "return_dict_in_generate": False, "max_new_tokens": 16,
    "min_new_tokens": None, "max_time": None, "stop_strings": None, "cache_implementation": None,
    "guidance_scale": None, "attention_mask": None, "pad_token_id": None, "streamer": None, "logits_processor": None,
}  # fmt: skip


@pytest.mark.parametrize("theirs", [VLLM, SGLANG, TRANSFORMERS], ids=["vllm", "sglang", "transformers"])
def test_what_says_nothing_is_taken(theirs):
    assert SamplingParams(**theirs) == SamplingParams(temperature=1, max_new_tokens=16)


@pytest.mark.parametrize(("theirs", "ours"), SAME)
def test_params_have_one_form(theirs, ours):
    """Whatever names and types they came in: fields of Python's own types, equal, hashed, copied and pickled alike."""
    given, wanted = SamplingParams(**theirs), SamplingParams(**ours)
    assert given == wanted and hash(given) == hash(wanted) and repr(given) == repr(wanted)
    assert pickle.loads(pickle.dumps(given)) == copy.deepcopy(given) == dataclasses.replace(given) == wanted
    for each in dataclasses.fields(given):
        assert type(getattr(given, each.name)) in (int, float, bool, str, tuple, type(None))


def test_a_copy_is_changed_by_either_name():
    params = dataclasses.replace(SamplingParams(max_tokens=5), max_tokens=7, temperature=1)
    assert params == SamplingParams(max_new_tokens=7, temperature=1)
    config = dataclasses.replace(EAGLEConfig(topk=4), speculative_eagle_topk=2, max_num_seqs=3)
    assert config == EAGLEConfig(topk=2, max_batch=3)
    assert list(inspect.signature(EAGLEConfig).parameters)[:2] == ["topk", "num_steps"]


def test_configurations_have_one_form():
    theirs = {"speculative_eagle_topk": 2, "speculative_num_steps": 3, "speculative_num_draft_tokens": 6, "top_k": -1,
              "eos_token_id": numpy.int64(2), "max_model_len": 64, "block_size": 8, "max_running_requests": 4,
              "enable_prefix_caching": False, "tensor_parallel_size": 1, "enforce_eager": False}  # fmt: skip
    ours = EAGLEConfig(2, 3, 6, eos_token_ids=(2,), max_length=64, page_size=8, max_batch=4, share_prefixes=False)
    assert EAGLEConfig(**theirs) == ours and hash(EAGLEConfig(**theirs)) == hash(ours)
    assert EAGLEConfig(eos_token_ids=torch.tensor([2, 3])).eos_token_ids == (2, 3)
    assert EAGLEConfig.chain(3, max_num_seqs=4) == EAGLEConfig.chain(3, max_batch=4)
    assert EAGLEConfig.chain(num_speculative_tokens=3) == EAGLEConfig.chain(3, topk=1, speculative_num_steps=3)
    assert EAGLEConfig.naive_eagle(block_size=8) == EAGLEConfig(1, 1, 2, page_size=8)
    assert EAGLEConfig.tree(speculative_eagle_topk=5, num_steps=3) == EAGLEConfig(5, 3, 56)
    assert EAGLEConfig.tree(method=numpy.array(["ngram", "suffix"])).num_verify_tokens == 41


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (Path("a"), "a", True),
        ("a/", Path("a"), True),
        ("a", "b", False),
        (torch.float32, "float32", True),
        ("torch.half", torch.float16, True),
        (torch.float32, "half", False),
        ([[1, 2]], torch.tensor([[1, 2]]), True),
        ([[1, 2]], numpy.array([1, 2]), False),
        (1, True, False),
        (1, 1.0, False),
        (EAGLEConfig(2), EAGLEConfig(2), True),
        (EAGLEConfig(2), EAGLEConfig(3), False),
        ({"a": numpy.zeros(2)}, {"a": numpy.zeros(2)}, False),
        (torch.zeros(2, device="meta"), torch.zeros(2, device="meta"), False),
        (10**5000, 10**5000, True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_agree_whatever_their_types(one, other, is_same):
    assert agree(one, other) is agree(other, one) is is_same


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: SamplingParams(temprature=1), "SamplingParams: there is no field temprature; did you mean temperat"),
        (lambda e: SamplingParams(maxTokens=1), "there is no field maxTokens; did you mean max_new_tokens?"),
        (lambda e: SamplingParams(colour=1), "SamplingParams: there is no field colour; there are drafter, frequ"),
        (lambda e: SamplingParams(speculative_eagle_topk=1), "no field speculative_eagle_topk; EAGLEConfig has topk"),
        (lambda e: SamplingParams(max_tokens=1, max_new_tokens=2), "max_tokens must agree with max_new_tokens = 2, si"),
        (lambda e: SamplingParams(max_tokens=1, max_completion_tokens=2), "max_completion_tokens must agree with"),
        (lambda e: SamplingParams(max_tokens=None), "max_new_tokens must be an int of at least 1, got None"),
        (lambda e: SamplingParams(top_k=-1.0), "top_k must be an int of at least 0 (0: off), below 2^31, got -1.0"),
        (lambda e: SamplingParams(temperature=torch.ones(1)), "temperature must be a finite int or float, got tensor"),
        (lambda e: SamplingParams(stop_token_ids={5: 1}), "stop_token_ids must be a tuple of token ids, got {5: 1}"),
        (lambda e: SamplingParams(ignore_eos=1), "ignore_eos must be True or False, got 1"),
        (lambda e: SamplingParams(logprobs=5), "'raw'; top_logprobs=N adds the N likeliest tokens, got 5"),
        (lambda e: SamplingParams(prompt_logprobs=5), "since logprob_start_len=0 scores the prompt"),
        (lambda e: SamplingParams(n=2), "n must be 1 or absent, since n of generate, "),
        (lambda e: SamplingParams(num_beams=2), "num_beams must be 1 or absent, since there is no beam search, got 2"),
        (lambda e: SamplingParams(num_beams=True), "num_beams must be 1 or absent"),
        (lambda e: SamplingParams(logit_bias={3: 1}), "logit_bias must be None or absent, since tokens cannot be bann"),
        (lambda e: SamplingParams(do_sample=True), "do_sample must agree with temperature=0.0, which decodes greedily"),
        (lambda e: SamplingParams(do_sample=1), "do_sample must be True or False, got 1"),
        (lambda e: EAGLEConfig(do_sample=False, temperature=1.0), "do_sample must agree with temperature=1.0, which s"),
        (lambda e: SamplingParams(**{"a\n" * 99: 1}), r"SamplingParams: there is no field a\na\n"),
        (lambda e: EAGLEConfig(prompt_lookup_max=3), "prompt_lookup_max must be None or absent, since max_ngram"),
        (lambda e: EAGLEConfig(num_drafts=3), "there is no field num_drafts; EAGLEConfig.chain has num_drafts"),
        (lambda e: EAGLEConfig.chain(3, topk=2), "EAGLEConfig.chain: topk must be 1 or absent, since chain"),
        (lambda e: EAGLEConfig.chain(3, speculative_num_steps=2), "num_steps must be 3 or absent, since chain"),
        (lambda e: EAGLEConfig.chain(3, num_draft_tokens=5), "num_draft_tokens must be 4 or absent, since"),
        (lambda e: EAGLEConfig.chain(3, colour=2), "EAGLEConfig.chain: there is no field colour; there are"),
        (lambda e: EAGLEConfig.naive_eagle(topk=2), "naive_eagle: topk must be 1 or absent, since naive"),
        (lambda e: EAGLEConfig.tree(2, speculative_eagle_topk=3), "tree: speculative_eagle_topk must agree with"),
        (lambda e: EAGLEConfig(max_tokens=3), "EAGLEConfig: there is no field max_tokens; SamplingParams has max_new"),
        (lambda e: EAGLEConfig(num_speculative_tokens=3), "since EAGLEConfig.chain(N) drafts N tokens"),
        (lambda e: EAGLEConfig(4, speculative_eagle_topk=5), "speculative_eagle_topk must agree with topk = 4"),
        (lambda e: EAGLEConfig(eos_token_ids={2: 1}), "eos_token_ids must be None or a tuple of token ids"),
        (lambda e: e.generate([1], temprature=1), "generate: there is no field temprature in EAGLEConfig or SamplingP"),
        (lambda e: e.generate([1], topp=1), "there is no field topp in EAGLEConfig or SamplingParams; did you mean to"),
        (lambda e: e.generate([1], 4, max_tokens=3), "generate: max_tokens must agree with max_new_tokens = 4, since"),
        (lambda e: e.generate([1], prompts=[2]), "generate: prompts must agree with input_ids = [1], since both"),
        (lambda e: e.generate([1], speculative=1), "generate: speculative must be True or False, got 1"),
        (lambda e: e.generate([1], do_sample=True), "generate: do_sample must agree with temperature=0.0"),
        (lambda e: e.generate([1], seed=3, seeds=4), "generate: seed must agree with seeds = 4"),
        (lambda e: e.generate([1], stream=True), "stream must be False or absent, since stream and stream_text of the"),
        (lambda e: e.generate([1], attention_mask=[1]), "since prompts are lists of any lengths, without padding"),
        (lambda e: list(e.stream([1], num_beams=4)), "stream: num_beams must be 1 or absent"),
        (lambda e: e.generate([1], progres=1), "in EAGLEConfig or SamplingParams; did you mean progress?"),
        (lambda e: e.benchmark([1], batchsize=2), "in EAGLEConfig or SamplingParams; did you mean batch_size?"),
        (lambda e: e.warmup(temprature=1), "warmup: there is no field temprature in EAGLEConfig or SamplingParams; di"),
        (lambda e: e.benchmark([1], 2, use_beam_search=True), "benchmark: use_beam_search must be False or absent"),
        (lambda e: e.submit([1], temperature=1), "submit: there is no argument temperature; SamplingParams and EAGLEC"),
        (lambda e: e.submit([1], parms=None), "submit: there is no argument parms; did you mean params?"),
        (lambda e: EAGLEInference(None, e.target, tensor_parallel_size=2), "since an engine has one device, got 2"),
        (lambda e: EAGLEInference(None, e.target, max_num_seqs=2), "there is no argument max_num_seqs; EAGLEConfig ha"),
        (lambda e: EAGLEInference.from_pretrained(None, "", device_map="auto"), "device_map must be None or absent, s"),
        (lambda e: EAGLEInference.from_pretrained(None, "", dtype="half", torch_dtype="float"), "torch_dtype must agr"),
        (lambda e: EAGLEInference.from_pretrained(None, "", trust_remote_code=True), "no remote code is run, got True"),
        (lambda e: EAGLEInference.from_pretrained(None, "", quantization="fp8"), "quantization must be None or absent"),
    ],
)  # fmt: skip
def test_what_means_something_else_is_refused(engine, call, message):
    with pytest.raises(ValueError) as error:
        call(engine)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not engine.has_work


def test_an_unknown_name_is_what_python_calls_it():
    with pytest.raises(TypeError, match="there is no field colour"):
        SamplingParams(colour=3)
    with pytest.raises(TypeError, match="got multiple values for argument 'input_ids'"):
        EAGLEInference.generate(None, [1], input_ids=[1])


def test_models_and_folders_by_other_names(engine):
    for names in (
        {"draft": engine.draft, "target": engine.target, "config": {"topk": 2}},
        {"speculative_model": engine.draft, "model": engine.target, "speculative_config": {"topk": 2}},
        {"draft_model": engine.draft, "model": engine.target, "tensor_parallel_size": 1, "config": EAGLEConfig(topk=2)},
    ):
        made = EAGLEInference(**names)
        assert (made.draft, made.target, made.config.topk) == (engine.draft, engine.target, 2)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, EAGLEConfig()),
        ({"topk": 4, "max_num_seqs": 3}, EAGLEConfig(topk=4, max_batch=3)),
        ({"method": "ngram"}, EAGLEConfig.chain(1, method="ngram")),
        ({"method": "ngram", "num_speculative_tokens": 3}, EAGLEConfig.chain(3, method="ngram")),
        ({"method": "ngram", "speculative_eagle_topk": 2, "page_size": 8}, EAGLEConfig(2, method="ngram", page_size=8)),
        ({"method": "ngram", "draft_tensor_parallel_size": 1}, EAGLEConfig.chain(1, method="ngram")),
        ({"num_speculative_tokens": 3}, "speculative_config: method must be given, got None"),
        (dataclasses.asdict(EAGLEConfig(2, method="ngram")), EAGLEConfig(2, method="ngram")),
        (dataclasses.asdict(EAGLEConfig(topk=3)), EAGLEConfig(topk=3)),
        ({"topkk": 4}, "EAGLEConfig: there is no field topkk; did you mean topk"),
        ({4: 4}, "EAGLEConfig: there is no field 4; there are accept_policy, "),
        ({"topk": 99}, "EAGLEConfig: topk must lie in 1..16, got 99"),
        ("topk=4", "EAGLEInference: config must be None, an EAGLEConfig or a dict, got 'topk=4'"),
    ],
)
def test_a_dict_as_configuration(engine, given, wanted):
    """With `method`, or what servers alone have, it is a server's; otherwise it has fields of `EAGLEConfig`."""
    if isinstance(wanted, str):
        with pytest.raises(ValueError) as error:
            EAGLEInference(engine.draft, engine.target, given)
        assert wanted in str(error.value)
    else:
        assert EAGLEInference(engine.draft, engine.target, given).config == wanted
        assert engine.workspace_bytes(given) == engine.workspace_bytes(wanted)


def test_prompts_and_limits_by_other_names(engine):
    wanted = engine.generate(PROMPTS, 4, seeds=3, temperature=1.0).output_ids
    for call in (
        {"prompts": PROMPTS, "max_tokens": 4, "seed": 3, "temperature": numpy.float64(1), "use_tqdm": False},
        {"inputs": PROMPTS, "max_new_tokens": 4, "seeds": [3, 3], "temperature": 1, "do_sample": True, "num_beams": 1},
        {"prompts": PROMPTS, "max_tokens": numpy.int64(4), "seed": torch.tensor(3), "temperature": numpy.float32(1),
         "n": numpy.int8(1), "speculative": numpy.False_, "logprobs": numpy.True_},
        {"prompt_token_ids": PROMPTS, "sampling_params": {"max_tokens": 4, "temperature": 1.0, "seed": 3}},
    ):  # fmt: skip
        assert engine.generate(**call).output_ids == wanted
    assert engine.generate(PROMPTS, 4, num_return_sequences=2).stats.num_requests == 4
    assert engine.generate(PROMPTS, 4, speculative_num_steps=1).stats.num_steps == 1
    sampling = EAGLEInference(engine.draft, engine.target, {"temperature": 1.0})
    assert sampling.generate(PROMPTS, 4, seeds=3, do_sample=True).output_ids == wanted
    request = engine.submit(PROMPTS[0], sampling_params=SamplingParams(max_tokens=4, temperature=1.0, seed=3))
    engine.collect()
    assert request.output_ids == wanted[0]
    engine.warmup(SamplingParams(logprob_start_len=9), {"max_tokens": 3}, max_num_seqs=2)
    assert engine.benchmark(PROMPTS, max_tokens=3, max_num_seqs=2, batch_size=2).max_batch == 2


ASKED = [SamplingParams(max_tokens=3, logprobs=True), {"max_tokens": 5, "temperature": 1.0, "seed": 3}]


def test_params_of_a_call(engine):
    """For all prompts or one for each, as in `submit`, wherever they stand."""
    single = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS, ASKED)]
    engine.collect()
    texts = [request.output_ids for request in single]
    for output in (
        engine.generate(PROMPTS, ASKED),
        engine.generate(PROMPTS, sampling_params=tuple(ASKED), speculative=False),
        engine.generate(PROMPTS, ASKED, topk=1),
    ):
        assert output.output_ids == texts
        assert output.logprobs == [pytest.approx(single[0].logprobs, abs=1e-5), None]
    assert engine.generate(PROMPTS[1], ASKED[1]).output_ids == texts[1]
    assert [event.token_id for event in engine.stream(PROMPTS[1], sampling_params=ASKED[1:])] == texts[1]
    assert "".join(engine.stream_text("ab", ASKED[0])) == "".join(engine.stream_text("ab", 3))
    sampled = SamplingParams(temperature=1.0, max_tokens=3)
    assert engine.generate(PROMPTS, sampled, seeds=[4, 5], n=2).stats.seeds == [4, 5, 5, 6]
    assert engine.generate(PROMPTS, [ASKED[1], ASKED[1]], n=2).stats.seeds == [3, 4, 3, 4]
    result = engine.benchmark(PROMPTS, ASKED, batch_size=2)
    assert (result.max_new_tokens, result.plain.tokens, result.identical) == (5, 8, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": ASKED[:1]}, "sampling_params must be one for all or one per prompt, got 1 for 2 prompts"),
        ({"max_new_tokens": ASKED[0], "sampling_params": ASKED[0]}, "sampling_params must be absent when max_new_tok"),
        ({"max_new_tokens": 4, "sampling_params": ASKED[0]}, "max_new_tokens must be that of the given params"),
        ({"max_new_tokens": 128, "sampling_params": ASKED[0]}, "max_new_tokens must be that of the given .*, got 128"),
        ({"sampling_params": ASKED[0], "temperature": 1.0}, "temperature must be set in the given params"),
        ({"sampling_params": ASKED[0], "min_tokens": 1}, "min_new_tokens must be set in the given params"),
        ({"sampling_params": ASKED[1], "seeds": 3}, "seeds must be None when params have a seed, got 3"),
        ({"sampling_params": 3}, "sampling_params must be SamplingParams or a dict of its fields, got 3"),
        ({"sampling_params": {"temprature": 3}}, "SamplingParams: there is no field temprature; did you mean temper"),
        ({"max_new_tokens": [3, 4]}, r"max_new_tokens must be an int, got \[3, 4\]"),
    ],
)  # fmt: skip
def test_params_that_contradict_the_call(engine, options, message):
    for call in (engine.generate, engine.stream):
        with pytest.raises(ValueError, match=message):
            call(PROMPTS, **options)


@pytest.mark.parametrize("limits", [(3, 3), (3, 4), (4, 3), (4, 4)])
def test_a_limit_beside_params_is_that_of_each(limits):
    """One that differs from any of them is refused, wherever that one stands."""
    params, taken = [SamplingParams(max_new_tokens=limit) for limit in limits], []
    for limit in (2, 3, 4, 5):
        with contextlib.suppress(ValueError):
            assert read_call_params("generate", limit, params, 2, ()) == params
            taken.append(limit)
    assert taken == ([limits[0]] if limits[0] == limits[1] else [])
