"""Steps as CUDA graphs: what they bring is what the same steps bring one launch after another."""

import contextlib
import random
import sys
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.batch.state import BatchState
from eagle_kernels.engine.models.causal_draft import CausalDraft
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.engine.requests.sampling_params import Features
from eagle_kernels.engine.serve.reading import JOINT_TOKENS
from eagle_kernels.engine.serve.threads import running
from eagle_kernels.engine.step.runner import StepRunner, bucket_of, buckets
from eagle_kernels.engine.step.stepper import Stepper
from eagle_kernels.runtime import launch
from op_tests.engine.engines import PARAMS, alone, make, mixed_requests, prompt_of
from op_tests.engine.toys import ToyModel, random_llama
from op_tests.engine.view import View

TREES = [(1, 1, 2), (1, 5, 6), (2, 3, None), (4, 4, 16), (8, 5, 64)]


def test_buckets():
    assert buckets(1) == [1] and buckets(6) == [1, 2, 4, 6] and buckets(8) == [1, 2, 4, 8]
    assert [bucket_of(number, 6) for number in range(1, 7)] == [1, 2, 4, 4, 6, 6]


class StandInStepper:
    """Runs nothing; a step fails while it is captured, as long as there is an `error`."""

    aux_layers, config = (), EAGLEConfig()

    def __init__(self):
        self.target = SimpleNamespace(device=torch.device("cpu"), hidden_size=1)
        self.error: Exception | None = None
        self.resting, self.own = [self], None

    def step(self, *_):
        if self.error is not None and StandInGraph.is_capturing:
            raise self.error

    def make_room(self, state):
        pass

    def catch_up(self, *_):
        self.step()


class StandInGraph:
    """A graph, its capture and its stream, where there is no device."""

    is_capturing, streams = False, []

    def __init__(self, *_, stream=None, **__):
        if stream is not None:
            self.streams.append(stream)

    def __enter__(self):
        StandInGraph.is_capturing = True

    def __exit__(self, *_):
        StandInGraph.is_capturing = False

    def replay(self):
        pass


@pytest.fixture
def stand_in(monkeypatch):
    """A runner of graphs."""
    monkeypatch.setattr(StandInGraph, "streams", [])
    for name in ("CUDAGraph", "graph", "device"):
        monkeypatch.setattr(torch.cuda, name, StandInGraph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    toy = ToyModel()
    state = BatchState(toy, [CausalDraft(toy)], EAGLEConfig(max_batch=4, page_size=16), max_pages=1, num_pages=1)
    return StepRunner(StandInStepper(), state, use_graphs=True)


PLAIN = Features.of([SamplingParams()])


def test_what_has_been_captured_has_run(stand_in):
    """A capture that failed is tried again, and has not run before that; a warm one has."""
    stand_in.stepper.error = RuntimeError("waits")
    for _ in range(2):
        with pytest.raises(ModelError, match=r"a step cannot be captured .* \(waits\); cuda_graph=False"):
            stand_in.run(3, PLAIN)
        assert not stand_in.has_run(3, PLAIN)
    with pytest.raises(ModelError, match="a catch-up cannot be captured"):
        stand_in.catch_up(1, True)
    stand_in.stepper.error = None
    stand_in.warm_up(3, PLAIN)
    assert stand_in.has_run(3, PLAIN) and stand_in.has_run(4, PLAIN) and not stand_in.has_run(2, PLAIN)
    stand_in.run(2, PLAIN)
    assert stand_in.has_run(2, PLAIN)


def test_graphs_share_a_stream(stand_in):
    for num_rows in (1, 2, 4):
        stand_in.warm_up(num_rows, PLAIN, places=[0])
    assert len(StandInGraph.streams) == 3 + 2 * 3 and len(set(StandInGraph.streams)) == 1


def test_a_broken_capture_leaves_nothing_to_the_next(stand_in):
    """Its stream and its memory may still be recording."""
    stand_in.stepper.error = RuntimeError("waits")
    with pytest.raises(ModelError):
        stand_in.run(1, PLAIN)
    stand_in.stepper.error = None
    stand_in.run(1, PLAIN)
    broken, whole = StandInGraph.streams
    assert broken is not whole


@pytest.mark.parametrize("own", [None, 0, 1])
def test_graphs_of_drafts_that_rest_are_freed(stand_in, own):
    """Those of their steps, whose memory takes no new ones then, or those by which they catch up in plain steps."""
    stand_in.stepper.own = None if own is None else SimpleNamespace(number=own)
    stand_in.stepper.resting *= 2
    stand_in.warm_up(1, PLAIN, places=[0, 1])
    stand_in.free([0])
    assert stand_in.has_run(1, PLAIN) == (own != 0)
    assert {place for *_, place in stand_in._catch_ups} == ({1} if own is None else {0, 1})
    stand_in.run(1, PLAIN)
    assert len(set(StandInGraph.streams)) == 1 + (own == 0)


def test_want_of_memory_while_capturing_is_called_so(stand_in):
    stand_in.stepper.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        stand_in.run(1, PLAIN)


@pytest.fixture(scope="module")
def target():
    return random_llama(device="cuda")


@pytest.fixture(scope="module", params=["stranger", "itself"])
def draft(request, target):
    if request.param == "itself":
        return target
    return random_llama(hidden_size=16, num_layers=1, seed=1, device="cuda")


def has_graphs(engine) -> bool:
    """Whether the last speculative steps were replays; without this question a test of graphs may see none."""
    return bool(View(engine).runners[1]._graphs)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("topk, num_steps, nodes", TREES)
def test_a_graph_is_its_launches(target, draft, topk, num_steps, nodes, page_size):
    tree = {"topk": topk, "num_steps": num_steps, "num_draft_tokens": nodes, "page_size": page_size}
    for sampling in ({}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}):
        texts = []
        for cuda_graph in (True, False):
            engine = make(draft, target, **tree, cuda_graph=cuda_graph)
            texts.append(engine.generate([prompt_of(number) for number in range(3)], 20, seeds=3, **sampling))
            assert has_graphs(engine) == cuda_graph
        plain = engine.generate([prompt_of(number) for number in range(3)], 20, seeds=3, speculative=False, **sampling)
        assert texts[0].output_ids == texts[1].output_ids == plain.output_ids
        assert texts[0].stats.accepted_per_depth == texts[1].stats.accepted_per_depth
        assert draft is not target or texts[0].stats.accepted > 0


@pytest.mark.gpu
@pytest.mark.parametrize("accept_policy", ["accept_all", "reject_all", "simulate"])
def test_policies(target, draft, accept_policy):
    policy = {"accept_policy": accept_policy}
    if accept_policy == "simulate":
        policy["simulated_accept_length"] = 2.2
    runs = []
    for cuda_graph in (True, False):
        engine = make(draft, target, topk=1, cuda_graph=cuda_graph, **policy)
        text, stats = engine.generate([prompt_of(number) for number in range(3)], 24, seeds=3)
        assert has_graphs(engine) == cuda_graph
        runs.append((text, stats.steps, stats.accepted_per_depth))
    assert runs[0] == runs[1]
    _, steps, accepted = runs[0]
    if accept_policy == "simulate":  # a draft or two, by coins
        assert accepted[0] == steps > accepted[1] and accepted[2] == 0
    else:
        assert accepted == [steps if accept_policy == "accept_all" else 0] * 3


@pytest.mark.gpu
def test_requests_join_and_leave(target, draft):
    """Through every number of rows, in any mixture of features, one after another."""
    engine = make(draft, target, max_batch=6)
    expected = [alone(engine, prompt_of(number), PARAMS[number % len(PARAMS)]) for number in range(40)]
    coin, waiting, requests = random.Random(0), list(range(40)), []
    while waiting or engine.has_work:
        for _ in range(coin.randrange(4) if requests else 1):
            if waiting:
                number = waiting.pop(0)
                requests.append(engine.submit(prompt_of(number), PARAMS[number % len(PARAMS)]))
        engine.step()
    graphs = View(engine).runners[1]._graphs
    assert len({kind.num_rows for kind in graphs}) > 2 and len({kind.features for kind in graphs}) > 2
    for number, (request, (tokens, logprobs)) in enumerate(zip(requests, expected)):
        assert request.output_ids == tokens, f"request {number}"
        assert request.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.fixture
def compiled(monkeypatch):
    """The kernels that are compiled from now on, as in a process that has run none; afterwards all is as it was."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in sys.modules.items() if name.startswith("eagle_kernels")]
    for kernel in [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]:
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    # plans would launch what was compiled for them before
    monkeypatch.setattr(launch, "_can_plan", lambda: False)
    seen: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **arguments: seen.append(arguments["repr"]))
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("speculative", [True, False])
def test_nothing_compiles_after_warmup(target, draft, speculative, compiled):
    engine = make(draft, target, max_batch=4)
    engine.warmup(*PARAMS, speculative=speculative)
    assert compiled, "the hook is not called"
    compiled.clear()
    runners = View(engine).runners
    captured = [(set(runner._graphs), set(runner._catch_ups)) for runner in runners]
    kinds = {(num_rows, prompt_tokens) for num_rows in (1, 2, 4) for prompt_tokens in (0, JOINT_TOKENS[-1])}
    assert all({(kind.num_rows, kind.prompt_tokens) for kind in graphs} == kinds for graphs, _ in captured)
    catch_ups = {(num_rows, is_wanted) for num_rows in (1, 2, 4) for is_wanted in (True, False)}
    assert captured[0][1] == (catch_ups if speculative else set())
    coin = random.Random(1)
    for number in range(30):
        engine.is_speculating = coin.random() < 0.7  # drafts that have rested catch up
        count = coin.randrange(1, 6)
        for params in coin.sample(PARAMS, count):
            wanted = {name: getattr(params, name) for name in params.__dataclass_fields__ if name != "seed"}
            engine.generate(prompt_of(number), seeds=number, speculative=speculative, **wanted)
        if speculative:
            for other in range(count):
                engine.submit(prompt_of(number + other), coin.choice(PARAMS))
            engine.step()
            engine.is_speculating = True
            engine.collect()
    assert not compiled
    assert [(set(runner._graphs), set(runner._catch_ups)) for runner in runners] == captured


@pytest.mark.gpu
@pytest.mark.parametrize("phase_times", [True, False])
def test_an_error_while_a_step_is_captured(target, draft, phase_times, monkeypatch):
    """In the middle of a phase, whose events the broken graph names; the engine goes on."""
    engine, run = make(draft, target, phase_times=phase_times), Stepper._run_target

    def fail(*arguments):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("no such thing")
        return run(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Stepper, "_run_target", fail)
        with pytest.raises(ModelError, match=r"a step cannot be captured .*no such thing"):
            engine.generate(prompt_of(1), 9)
    assert engine.generate(prompt_of(1), 9)[0] == engine.generate(prompt_of(1), 9, speculative=False)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("adaptive", [None, "auto"])
def test_a_bare_warmup_is_for_what_is_common(target, draft, adaptive, compiled):
    """Greedy, sampled, with filters and with logprobs, in any mixture, while drafts rest and come back."""
    engine = make(draft, target, max_batch=4, adaptive=adaptive)
    engine.warmup()
    assert compiled, "the hook is not called"
    compiled.clear()
    runners = View(engine).runners
    captured = [(set(runner._graphs), set(runner._catch_ups)) for runner in runners]
    assert len(runners) > (2 if adaptive else 1)
    assert all(len(graphs) == 6 * 3 * 2 for graphs, _ in captured), "of six sets of features at three sizes"
    mixed_requests(engine, random.Random(3), 80)
    assert not compiled
    assert [(set(runner._graphs), set(runner._catch_ups)) for runner in runners] == captured


@pytest.mark.gpu
def test_phases_are_timed_inside_the_graph(target, draft):
    engine = make(draft, target)
    _, stats = engine.generate(prompt_of(1), 60)
    assert set(stats.phase_time_ms) == {"draft", "verify", "sample", "bookkeeping"}
    assert all(time_ms > 0 for time_ms in stats.phase_time_ms.values())
    assert sum(stats.phase_time_ms.values()) < 1.5e3 * stats.decode_time_s


@pytest.mark.gpu
def test_a_step_of_the_scheduler_never_waits(target, draft):
    """Between the first tokens and the last ones; a timed step is waited for."""
    engine = make(draft, target)
    requests = [engine.submit(prompt_of(number), SamplingParams(max_new_tokens=40)) for number in range(3)]
    for _ in range(2):  # reads prompts, captures, and is timed
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        before = View(engine).num_steps
        with running(target):
            for _ in range(3):
                View(engine).scheduler.step()
        assert View(engine).num_steps == before + 3
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.collect()
    plain = [engine.generate(prompt_of(number), 40, speculative=False)[0] for number in range(3)]
    assert [request.output_ids for request in requests] == plain


@pytest.mark.gpu
def test_two_engines_share_a_device(target, draft):
    one, two = make(draft, target), make(draft, target, topk=2)
    want = one.generate(prompt_of(3), 20, speculative=False)[0]
    streams = [engine.stream(prompt_of(3), 20) for engine in (one, two)]
    for _ in range(20):
        for stream in streams:
            next(stream, None)
    assert [stream.output().output_ids for stream in streams] == [want, want]


@pytest.mark.gpu
def test_bfloat16_pair_in_graphs():
    """A pair in bf16: graphs and launches have the same bits, so the same text."""
    target = random_llama(device="cuda").bfloat16()
    texts = []
    for cuda_graph in (True, False):
        engine = EAGLEInference(target, target, EAGLEConfig(topk=4, num_steps=3, cuda_graph=cuda_graph))
        texts.append(engine.generate([prompt_of(number) for number in range(4)], 40)[0])
        assert has_graphs(engine) == cuda_graph
    assert texts[0] == texts[1]
