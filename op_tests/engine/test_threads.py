"""Steps see nothing of what a program sets in torch around them, and take few threads on the CPU."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.models.loading import demo_pair, load_target
from eagle_kernels.engine.serve.threads import few_threads, most_threads
from op_tests.engine.toys import DEVICE


def model(hidden_size: int, device: str = "cpu") -> SimpleNamespace:
    return SimpleNamespace(hidden_size=hidden_size, device=torch.device(device))


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_they_follow_the_models_width():
    assert [most_threads(model(size)) for size in (32, 256, 512, 896, 4096)] == [1, 1, 3, 9, 192]
    with few_threads(model(420)):
        assert torch.get_num_threads() == 2
    with few_threads(model(4096)):
        assert torch.get_num_threads() == 3, "never more than there are"
    with few_threads(model(32, "cuda")):
        assert torch.get_num_threads() == 3


def test_they_come_back_after_an_error_and_one_by_one():
    with pytest.raises(ValueError), few_threads(model(420)):
        with few_threads(model(32)):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        raise ValueError
    assert torch.get_num_threads() == 3


def test_a_thread_that_begins_within_a_step_of_another_gets_all_back():
    """It inherits the limit, as the number of threads that PyTorch had at its first operator."""
    seen = []

    def run():
        with few_threads(model(32)):
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())

    for _ in range(2):
        with few_threads(model(32)):
            other = threading.Thread(target=run)
            other.start()
            other.join()
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    assert seen == [1, 3, 1, 3]
    last = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    last.start()
    last.join()
    assert seen[-1] == 3, "what a new thread begins with"


@contextlib.contextmanager
def setting(setter, value, before):
    setter(value)
    try:
        yield
    finally:
        setter(before)


@contextlib.contextmanager
def all_at_once():
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu", dtype=torch.float16))
        for name in ("autocast", "grad", "inference", "deterministic", "float64", "default device"):
            stack.enter_context(STATES[name]())
        yield


STATES = {
    "bfloat16": lambda: setting(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "float64": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": lambda: setting(torch.set_default_device, "meta", None),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast of GPUs": lambda: torch.autocast("cuda", dtype=torch.bfloat16),
    "grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "all": all_at_once,
}
# what has tensors of its own; a drafter of another's model, and one without
ENGINES = {
    "head": {"topk": 2, "num_steps": 2},
    "sampled": {"topk": 2, "num_steps": 2, "temperature": 0.8, "verify_strategy": "rejection"},
    "hybrid": {"method": "hybrid", "topk": 1, "num_steps": 4, "num_model_steps": 2},
    "suffix": {"method": "suffix", "topk": 1, "num_steps": 3},
    "draft_model": {"method": "draft_model", "topk": 2, "num_steps": 2},
}
PROMPT = list(b"import os\n\nimport os")


def engine_of(name: str) -> EAGLEInference:
    target, draft = demo_pair()
    config = EAGLEConfig(**ENGINES[name], page_size=16, max_batch=2)
    if name == "draft_model":
        return EAGLEInference(load_target(target, device=DEVICE), load_target(target, device=DEVICE), config)
    return EAGLEInference.from_pretrained(None if name == "suffix" else draft, target, config, device=DEVICE)


def said_by(engine: EAGLEInference, in_all_ways: bool) -> list:
    scores = {} if engine.config.verify_strategy == "rejection" else {"logprobs": "raw", "top_logprobs": 2}
    output = engine.generate(PROMPT, 5, seeds=3, **scores)
    said = [output.output_ids, output.logprobs, output.top_logprobs]
    if in_all_ways:
        engine.warmup(SamplingParams(), most_requests=1)
        params = SamplingParams(max_new_tokens=3, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, seed=4)
        request = engine.submit(PROMPT, params)
        engine.collect()
        said += [request.output_ids, request.error, engine.next_token_logits(PROMPT).tolist()]
        said.append([event.token_id for event in engine.stream(PROMPT[:7], 3, seeds=1)])
        said.append(engine.benchmark([PROMPT], 2, progress=False).identical)
    return said


WANT = {}


@pytest.mark.parametrize(
    ("name", "state"), [*(("head", state) for state in STATES), *((n, "all") for n in ENGINES if n != "head")]
)
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_steps_see_nothing_of_what_a_program_sets(name, state):
    """Made, loaded and used under it, and used without it afterwards."""
    if name not in WANT:
        engine = engine_of(name)
        WANT[name] = said_by(engine, name == "head"), said_by(engine, False)
    with STATES[state]():
        engine = engine_of(name)
        said = said_by(engine, name == "head")
    assert (said, said_by(engine, False)) == WANT[name]


def test_transforms_are_refused():
    engine = engine_of("head")
    for transform in (torch.func.vmap, torch.func.grad, torch.func.jacfwd):
        with pytest.raises(RuntimeError, match=r"^generate: must not run inside a transform of torch\.func"):
            transform(lambda x: engine.generate(PROMPT, 3) and x.sum())(torch.ones(2))
    assert engine.generate(PROMPT, 3).output_ids and not engine.has_work
