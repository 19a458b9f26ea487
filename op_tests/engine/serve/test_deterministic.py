"""deterministic=True: speculative text in 16 bits is plain text, whatever drafts and requests are beside it."""

import json

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.models.layers.linear import Linear
from eagle_kernels.engine.models.loading import demo_pair
from eagle_kernels.engine.step.stepper import Stepper
from op_tests.engine.engines import make, prompt_of
from op_tests.engine.view import View

TREES = {
    "tree": {"topk": 8, "num_steps": 5, "num_draft_tokens": 64},
    "small tree": {"topk": 4, "num_steps": 3, "num_draft_tokens": 8, "page_size": 1},
    "chain": {"topk": 1, "num_steps": 5, "num_draft_tokens": 6},
    "n-grams": {"method": "ngram", "topk": 2, "num_steps": 4, "num_draft_tokens": 8},
    "no graphs": {"topk": 4, "num_steps": 3, "num_draft_tokens": 16, "cuda_graph": False},
}
SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95}}


def pair(dtype: torch.dtype) -> EAGLEInference:
    target, draft = demo_pair()
    config = EAGLEConfig(deterministic=True, max_batch=24)
    return EAGLEInference.from_pretrained(draft, target, config, device="cuda", dtype=dtype)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    texts = json.loads((demo_pair()[0].parent / "prompts.json").read_text(encoding="utf-8"))
    return [list(text.encode()) for text in texts]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sampling", list(SAMPLING))
def test_text_is_plain_text(dtype, sampling, prompts):
    """Of 40 requests, of which 24 run at once, with each tree; and of plain decoding one by one."""
    engine, options = pair(dtype), {"seeds": 7, "eos_token_ids": (), **SAMPLING[sampling]}
    some, length = (prompts * 40)[:40], 128
    plain = engine.generate(some, length, speculative=False, **options).output_ids
    for number in (0, 39):
        assert engine.generate(some[number], length, speculative=False, **options)[0] == plain[number]
    for name, tree in TREES.items():
        texts = engine.generate(some, length, **options, **tree).output_ids
        wrong = sum(one != other for text, wanted in zip(texts, plain) for one, other in zip(text, wanted))
        assert texts == plain, f"{name}: {wrong} of {sum(map(len, plain))} tokens differ"


@pytest.mark.gpu
def test_text_without_it_may_differ_but_runs(prompts):
    """The same engine serves both; nothing of one is kept for the other."""
    engine = pair(torch.bfloat16)
    first = engine.generate(prompts[:4], 32, seeds=1).output_ids
    engine.generate(prompts[:4], 32, seeds=1, deterministic=False)
    assert engine.generate(prompts[:4], 32, seeds=1).output_ids == first


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU")
def test_the_cpu_is_refused(target, draft):
    with pytest.raises(ValueError, match="deterministic must be False on the CPU"):
        make(draft, target, deterministic=True)
    with pytest.raises(ValueError, match="deterministic must be False on the CPU"):
        make(draft, target).generate([1, 2], 2, deterministic=True)


def test_other_targets_are_refused(target, draft, monkeypatch):
    monkeypatch.setattr(type(target), "can_be_deterministic", False)
    told = "deterministic must be False for a target with layers from outside this library"
    with pytest.raises(ValueError, match=told):
        make(draft, target, deterministic=True)


def test_autocast_is_refused():
    x, linear = torch.randn(1, 2, 8), Linear(8, 4)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="deterministic must be False in tr"):
        linear(x, deterministic=True)


@pytest.mark.cross
def test_a_prompt_is_cut_alike_whatever_is_read_beside_it(target, draft, monkeypatch):
    """And the oldest is read first, so that none waits for ever. Engines that are not deterministic read several."""
    monkeypatch.setattr(Stepper, "reads_several", False)
    engine = make(draft, target, prefill_chunk=8, max_batch=4)
    engine.generate(prompt_of(1), 2)
    scheduler, sizes = View(engine).scheduler, {}
    read = scheduler._read_prompts

    def noting(parts, *rest):
        for row, size in parts:
            sizes.setdefault(row.request.id, []).append(size)
        return read(parts, *rest)

    monkeypatch.setattr(scheduler, "_read_prompts", noting)
    prompts = [prompt_of(4) * repeats for repeats in (1, 3, 2, 5)]
    requests = [engine.submit(prompt, SamplingParams(max_new_tokens=3)) for prompt in prompts]
    engine.collect()
    for request, prompt in zip(requests, prompts):
        whole, rest = divmod(len(prompt), 8)
        assert sizes[request.id] == [8] * whole + [rest] * bool(rest)
    assert list(sizes) == [request.id for request in requests]
