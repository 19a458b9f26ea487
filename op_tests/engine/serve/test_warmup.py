"""The warm-up, which leaves nothing to compile, and the memory that steps need."""

import random
from dataclasses import replace

import pytest

from eagle_kernels import EAGLEConfig, SamplingParams
from eagle_kernels.engine.models.causal_draft import CausalDraft
from eagle_kernels.engine.requests.sampling_params import Features
from eagle_kernels.engine.serve.warmup import COMMON_PARAMS
from op_tests.engine.engines import PARAMS, make, mixed_requests, prompt_of, steps_known
from op_tests.engine.view import View


@pytest.mark.slow
def test_warmup_and_workspace(target, draft):
    engine = make(draft, target)
    want = engine.generate(prompt_of(3), 6, temperature=1.0, seeds=2)[0]
    engine.warmup(*PARAMS)
    engine.warmup(speculative=False)
    assert engine.generate(prompt_of(3), 6, temperature=1.0, seeds=2)[0] == want
    sizes = engine.workspace_bytes()
    pool = View(engine).state
    held = [pool.target_pool.k_cache, pool.target_pool.v_cache, pool.draft_pool.k_cache, pool.draft_pool.v_cache]
    assert sizes["kv_cache"] == sum(tensor.numel() * tensor.element_size() for tensor in held)
    rows = sum(tensor.numel() * tensor.element_size() for tensor in pool.tensors())
    penalties = sum(pool.sampling.tensors()[index].numel() * 4 for index in (-1, -2))
    assert sizes["rows"] == rows - penalties
    assert sizes["total"] == sizes["kv_cache"] + sizes["rows"] + sizes["step"]
    request = engine.submit([1], SamplingParams(max_new_tokens=3))
    for options, message in (
        ({"logprobs": True}, "logprobs must be set in the given params, got True"),
        ({"nonsense": 1}, "there is no field nonsense in EAGLEConfig or SamplingParams"),
        ({"most_requests": 0}, "most_requests must be None or an int of at least 1, got 0"),
        ({"most_requests": -3}, "most_requests must be None or an int of at least 1, got -3"),
        ({"most_requests": 2.0}, "most_requests must be None or an int of at least 1, got 2.0"),
    ):
        with pytest.raises(ValueError, match="warmup: " + message):
            engine.warmup(SamplingParams(), **options)
    with pytest.raises(RuntimeError, match="warmup: the batch must be empty"):
        engine.warmup()
    engine.collect()
    assert request.finish_reason == "length"


METHODS = (None, "ngram", "suffix", "hybrid", "naive", ("draft_model", "ngram"), ("naive", "suffix"))


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_workspace_of_every_method(target, method):
    """Methods that read the text keep it beside each row."""
    fields = {"num_model_steps": 1} if method == "hybrid" else {}
    engine = make(CausalDraft(target), target, method=method, num_draft_tokens=8, **fields)
    engine.generate(prompt_of(3), 6)
    held = View(engine).state.tensors()
    assert engine.workspace_bytes()["rows"] == sum(tensor.nbytes for tensor in held)
    never = engine.workspace_bytes(replace(engine.config, max_spec_batch=0))["rows"]
    history = View(engine).state.history
    assert (history is not None) == (method not in (None, "naive"))
    assert history is None or never <= sum(tensor.nbytes for tensor in held) - history.nbytes


def test_the_workspace_of_the_largest_step(target):
    """Of a table's trees, each with as many rows as it is for."""
    small, large = (1, 1, 2), (3, 3, 16)

    def step_bytes(**fields) -> int:
        return make(target, target, max_batch=8, **fields).workspace_bytes()["step"]

    def tree(size: tuple[int, int, int]) -> dict:
        return dict(zip(("topk", "num_steps", "num_draft_tokens"), size))

    assert step_bytes(**tree(small), adaptive=((8, large),)) == step_bytes(**tree(large))
    assert step_bytes(**tree(large), adaptive=((2, large), (8, small))) == step_bytes(**tree(large)) // 4
    assert step_bytes(**tree(large), adaptive=((1, large), (8, small))) == step_bytes(**tree(small))
    per_node = (step_bytes(**tree((3, 3, 17))) - step_bytes(**tree(large))) // 8
    assert step_bytes(**tree(large), mean_draft_tokens=5) == step_bytes(**tree(large)) + 5 * 8 * per_node
    assert step_bytes(**tree(large), max_spec_batch=0) == 8 * target.vocab_size * target.dtype.itemsize


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [None, "auto"])
def test_after_a_bare_warmup_no_common_request_is_cold(target, adaptive):
    engine = make(target, target, adaptive=adaptive)
    engine.warmup()
    assert View(engine).num_steps == 0, "those that choose would count steps that nobody timed"
    mixed_requests(engine, random.Random(2), 16)
    assert View(engine).num_steps > 16 and View(engine).scheduler.num_cold_steps == 0


@pytest.mark.slow
def test_how_to_warm_less(target):
    """Given params, or sampling among the overrides, it is these alone."""
    for params, options, warmed in (
        ([SamplingParams()], {}, {Features()}),
        ([], {"temperature": 0.5}, {Features(sampling=True)}),
        ([], {"temperature": 0.5, "top_k": 0, "logprobs": True}, {Features(sampling=True, logprobs=True)}),
        ([], {"topk": 2}, {Features.of([params]) for params in COMMON_PARAMS}),
    ):
        engine = make(target, target, max_batch=1)
        engine.warmup(*params, **options)
        for runner in View(engine).runners:
            assert steps_known(runner) == warmed


def test_what_does_nothing_needs_no_step_of_its_own(target):
    """A step is chosen by what requests need, not by what they name."""
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0, "repetition_penalty": 1, "frequency_penalty": 0.0}
    for temperature, others, features in (
        (0.8, off, Features(sampling=True)),
        (0.0, off, Features()),
        (0.0, {"top_k": 5, "top_p": 0.5, "min_p": 0.1}, Features()),  # of greedy requests filters change nothing
        (0.8, off | {"top_p": 0.5}, Features(sampling=True, filters=True)),
    ):
        engine = make(target, target)
        engine.generate(prompt_of(1), 4, temperature=temperature, seeds=1, **others)
        assert steps_known(View(engine).runners[1]) == {features}


def test_pools_and_rows_must_fit_into_free_memory(target, monkeypatch):
    """Before anything is allocated; the engine goes on with what fits."""
    engine = make(target, target, max_batch=2)
    want = engine.generate(prompt_of(1), 4).output_ids
    for options in ({"kv_cache_bytes": 1 << 50, "max_batch": 10**9}, {"kv_cache_bytes": 1, "max_batch": 10**10}):
        with pytest.raises(ValueError, match=r"kv_cache_bytes and the rows of max_batch=10+ must fit .* GiB free on c"):
            engine.generate(prompt_of(1), 4, **options)
        assert not engine.has_work and engine.generate(prompt_of(1), 4).output_ids == want
    monkeypatch.setattr("eagle_kernels.engine.serve.memory.free_memory_bytes", lambda device: None)
    options = {"max_batch": 1, "kv_cache_bytes": 1 << 20}
    assert engine.generate(prompt_of(1), 4, **options).output_ids == want, "where nobody says what is free"


def test_the_workspace_of_pools_that_there_are_is_theirs(target, monkeypatch):
    """Half of what is free is less once they are there."""
    engine = make(target, target)
    before = engine.workspace_bytes()
    engine.generate(prompt_of(1), 2)
    monkeypatch.setattr("eagle_kernels.engine.serve.memory._CPU_CACHE_BYTES", 1 << 16)
    monkeypatch.setattr("eagle_kernels.engine.serve.memory.free_memory_bytes", lambda device: 1 << 17)
    assert engine.workspace_bytes() == before
    assert engine.workspace_bytes(EAGLEConfig(max_batch=2))["kv_cache"] <= 1 << 16
