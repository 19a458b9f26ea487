"""EAGLEInference on a GPU that is not the current one, and engines on two GPUs of a process: the texts of the first."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.models.loading import demo_pair

FIRST, SECOND = "cuda:0", "cuda:1"
NEW_TOKENS, NUM_PROMPTS, ROUNDS = 48, 6, 4
SAMPLING = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.2, "min_p": 0.02},
}
CONFIGS = {"graphs": {"cuda_graph": True}, "no graphs": {"cuda_graph": False}, "chosen": None}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def load(device: str, name: str = "graphs") -> EAGLEInference:
    """The pair in fp32. chosen: the engine times trees on its device, and chooses among them as it goes."""
    options = CONFIGS[name]
    config = EAGLEConfig() if options is None else EAGLEConfig(num_draft_tokens=32, **options)
    return EAGLEInference.from_pretrained(*reversed(demo_pair()), config, device=device, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    texts = json.loads((demo_pair()[0].parent / "prompts.json").read_text(encoding="utf-8"))
    return [list(text.encode()) for text in texts[:NUM_PROMPTS]]


def texts(engine: EAGLEInference, prompts: list[list[int]], sampling: str) -> list[list[int]]:
    return engine.generate(prompts, NEW_TOKENS, seeds=range(len(prompts)), **SAMPLING[sampling]).output_ids


@pytest.fixture(scope="module")
def expected(prompts) -> dict[str, list[list[int]]]:
    """What an engine on the first GPU, the current one, makes of the prompts."""
    engine = load(FIRST)
    return {sampling: texts(engine, prompts, sampling) for sampling in SAMPLING}


@pytest.fixture(autouse=True)
def first_is_current():
    """Before each test, and still after it."""
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_on_a_device_that_is_not_current(name, prompts, expected):
    before = torch.cuda.memory_allocated(0)
    engine = load(SECOND, name)
    assert engine.device == torch.device(SECOND)
    for sampling, wanted in expected.items():
        assert texts(engine, prompts, sampling) == wanted
    assert torch.cuda.memory_allocated(0) <= before, "something lies on the current device"


def test_requests_that_join(prompts, expected):
    """By submit and step, with the other device current in between."""
    engine = load(SECOND)
    requests = []
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(max_new_tokens=NEW_TOKENS, seed=seed, **SAMPLING["sampled"])
        requests.append(engine.submit(prompt, params))
        torch.cuda.set_device(seed % 2)
        engine.step()
    torch.cuda.set_device(0)
    engine.collect()
    assert [request.output_ids for request in requests] == expected["sampled"]


def test_two_engines_in_turn(prompts, expected):
    engines = [load(FIRST), load(SECOND)]
    for sampling in list(SAMPLING) * 2:
        for engine in engines:
            assert texts(engine, prompts, sampling) == expected[sampling]
    streams = [engine.stream(prompts[0], NEW_TOKENS, seeds=0, **SAMPLING["sampled"]) for engine in engines]
    pairs = list(zip(*streams))  # a step of one, then a step of the other
    assert [[event.token_id for event in events] for events in zip(*pairs)] == [expected["sampled"][0]] * 2


def test_two_engines_in_two_threads(prompts, expected):
    """Each in a thread of its own, from its start on: kernels compile and graphs are captured at the same time."""

    def run(device: str) -> list[dict[str, list[list[int]]]]:
        engine = load(device)
        return [{sampling: texts(engine, prompts, sampling) for sampling in SAMPLING} for _ in range(ROUNDS)]

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(run, (FIRST, SECOND)):
            assert found == [expected] * ROUNDS
