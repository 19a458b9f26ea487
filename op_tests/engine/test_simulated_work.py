"""A run with planted acceptance does the work of a real one that accepts as much: launches, rows and keys alike.

The target says what the position says, and the draft knows it down to a level of choice: so a real run accepts exactly
that many drafts a step, and a simulated one beside it, whose draft knows nothing, differs from it in tokens alone.
"""

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.models.causal_draft import CausalDraft
from eagle_kernels.ops.sampling import verify_tree_sampled as sampled
from eagle_kernels.ops.verify import verify_tree_greedy as greedy
from eagle_kernels.runtime import launch
from eagle_kernels.runtime.language import MISSING
from op_tests.engine.toys import ToyModel

PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 10, 11], [4]]
NUM_STEPS = 3
VOCAB = 61
# what a policy adds to a verification
OF_POLICIES = {"accept_policy", "simulated_rates", "seeds", "positions"}
# whose integers say where keys are read, written and moved to, and how many
OF_KEYS = ("write_kv", "tree_attention", "gqa_decode", "prefill_attention", "move_accepted_kv")
SAMPLING = {
    "greedy": {},
    "with penalties": {"temperature": 1.0, "top_k": 3, "presence_penalty": 0.01},
    "with log-probabilities": {"logprobs": True},
}


def scores(positions: torch.Tensor, shift: torch.Tensor | int = 0) -> torch.Tensor:
    """Logits [*, V] of the token after each position: eight that matter, `shift` further on, all others hopeless.

    How far apart they are depends on the position, so no two paths of a tree weigh the same.
    """
    rank = torch.arange(8, device=positions.device)
    tokens = (7 * positions[..., None] + 3 + shift + rank) % VOCAB
    values = -12 * rank**1.37 * (1 + 0.137 * (positions[..., None] % 5))
    return torch.full((*positions.shape, VOCAB), -1e4, device=positions.device).scatter(-1, tokens, values)


class Clock(ToyModel):
    """Attends as ever, and says the time."""

    def forward(self, input_ids, positions, attend, **options):
        output = super().forward(input_ids, positions, attend, **options)
        return output._replace(logits=scores(positions[:, -1:] if options.get("last_only") else positions))


class Guess(CausalDraft):
    """Right at the first `num_right` levels of a tree, and wrong below them, but no less sure of itself."""

    def __init__(self, model, num_right):
        super().__init__(model)
        self._level = 0
        # of tokens; a tensor, as calls with other numbers would not be the same calls
        self._shifts = torch.tensor([0] * num_right + [30] * (NUM_STEPS - num_right), device=model.device)

    def forward(self, input_ids, hidden, positions, attend, *, from_target):
        self._level = 0 if from_target else self._level + 1
        output = super().forward(input_ids, hidden, positions, attend, from_target=from_target)
        return output._replace(logits=scores(positions, self._shifts[self._level]))


def make(num_right, topk, device, **config):
    target = Clock(vocab_size=VOCAB, device=device)
    draft = Guess(ToyModel(vocab_size=VOCAB, seed=1, device=device), num_right)
    config = {"topk": topk, "num_steps": NUM_STEPS, "max_batch": 4, "page_size": 4} | config
    return EAGLEInference(draft, target, EAGLEConfig(**config))


def real_and_planted(depth, topk, device, policy, **config):
    """Two engines that accept `depth` drafts a step: one by a draft that knows, one to order."""
    length = {"simulated_accept_length": depth + 1} if policy == "simulate" else {}
    return make(depth, topk, device, **config), make(0, topk, device, **config, **length, accept_policy=policy)


class Call(NamedTuple):
    """A call of a torch operator: what it is given looks so; of ops that see keys, which rows they are."""

    name: str
    looks: tuple
    rows: dict


class Recorder(TorchDispatchMode):
    """All calls below it, one level deep: what an op does inside is its own."""

    def __init__(self):
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.__name__.split(".")[0]
        names = [argument.name for argument in function._schema.arguments]
        given = dict(zip(names, args)) | kwargs
        if name.startswith("verify_tree"):
            given = {key: value for key, value in given.items() if key not in OF_POLICIES}
        looks = tuple((key, _look(value)) for key, value in given.items())
        rows = {key: _integers(value) for key, value in given.items()} if name in OF_KEYS else {}
        self.calls.append(Call(name, looks, {key: value for key, value in rows.items() if value is not None}))
        return function(*args, **kwargs)


def _look(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    return [_look(item) for item in value] if isinstance(value, (list, tuple)) else value


def _integers(value):
    is_kept = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point
    return value.tolist() if is_kept else None


def submit(engine, **sampling) -> list:
    params = SamplingParams(max_new_tokens=1 + 2 * (NUM_STEPS + 1), seed=3, **sampling)
    return [engine.submit(prompt, params) for prompt in PROMPTS]


def record(engine, **sampling) -> tuple[list[Call], list[int]]:
    """The calls of a run from prompts to ends, and how many drafts its steps accepted."""
    submit(engine, **sampling)
    engine.collect()  # what comes once only
    requests = submit(engine, **sampling)
    with Recorder() as recorder:
        engine.collect()
    return recorder.calls, [count for request in requests for count in request.accepted]


def moved_rows(call: Call) -> int:
    """Rows that one `move_accepted_kv` copies, of each layer's keys; the same number of values goes with them."""
    looks, rows = dict(call.looks), call.rows
    num_nodes = looks["num_verify_tokens"]
    paths = zip(rows["accept_index"], rows["accept_token_num"])
    return sum(
        index - request * num_nodes != depth
        for request, (path, count) in enumerate(paths)
        for depth, index in enumerate(path[: count + 1])
    )


CASES = [(1, NUM_STEPS, "simulate"), (4, 0, "reject_all"), (4, NUM_STEPS, "accept_all")]
CASES += [(4, depth, "simulate") for depth in (0, 2, NUM_STEPS)]


@pytest.mark.cross
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("topk, depth, policy", CASES)
def test_calls_and_keys_are_those_of_a_real_run(topk, depth, policy, sampling, device):
    """Every operator, one after another, on tensors of the same looks; every key read, written and moved is the same.

    Rows: the slots that are written, the lengths, pages and masks that are read by, the paths that move.
    """
    engines = real_and_planted(depth, topk, device, policy, cuda_graph=False)
    (real, counts), (simulated, planted) = (record(engine, **SAMPLING[sampling]) for engine in engines)
    assert set(counts) == {depth} and planted == counts
    for number, (one, other) in enumerate(zip(real, simulated)):
        assert one == other, f"call {number}"
    assert len(real) == len(simulated)
    seen = Counter(call.name for call in real)
    assert {"write_kv", "tree_attention", "move_accepted_kv"} <= seen.keys(), "the case proves little"
    moved = [sum(moved_rows(call) for call in calls if call.name == "move_accepted_kv") for calls in (real, simulated)]
    assert moved[0] == moved[1] and (moved[0] > 0) == (topk > 1 and depth > 1)


def test_other_lengths_are_other_work(device):
    """What the comparison sees: two runs that differ in what they accept alone."""
    runs = [record(make(depth, 4, device, cuda_graph=False)) for depth in (1, 2)]
    paths = [[call.rows["accept_token_num"] for call in calls if call.name == "move_accepted_kv"] for calls, _ in runs]
    assert paths[0][0] == [1, 1, 1] and paths[1][0] == [2, 2, 2]
    assert len(runs[0][0]) > len(runs[1][0]), "fewer tokens a step, so more steps"


def kernels_of(engine, **sampling) -> Counter:
    """Names of what a whole run launched on the GPU, copies and fills too, and how often."""
    submit(engine, **sampling)
    engine.collect()  # compiles and captures
    submit(engine, **sampling)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine.collect()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    # within a graph the driver copies by an engine or by a kernel of its own, as it likes
    return Counter("copy" if name.startswith(("Memcpy DtoD", "memcpy32_post")) else name for name in names)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("topk, depth, policy", CASES)
def test_kernels_are_those_of_a_real_run(topk, depth, policy, sampling, cuda_graph, device):
    real, simulated = (
        kernels_of(engine, **SAMPLING[sampling])
        for engine in real_and_planted(depth, topk, device, policy, cuda_graph=cuda_graph)
    )
    assert real == simulated
    for part in ("move_accepted_kv", "write_kv", "_attention_kernel", "verify_tree"):
        assert any(part in name for name in real), f"no kernel of {part} was seen"


def paths_of(depth: int, topk: int, **policy) -> dict:
    """Arguments of two walks over trees of `topk` children to every first child, each with a token of its own.

    The target follows first children to `depth`; with a policy it says what no child does.
    """
    num_nodes = 1 + NUM_STEPS * topk
    first_child, next_sibling = torch.full((2, num_nodes), -1), torch.full((2, num_nodes), -1)
    for first in range(1, num_nodes, topk):
        first_child[:, max(first - topk, 0)] = first
        next_sibling[:, first : first + topk - 1] = torch.arange(first + 1, first + topk)
    logits = torch.zeros(2, num_nodes, 97)
    logits[..., 96] = 1.0
    node = 0
    for _ in range(0 if policy else depth):
        logits[:, node, first_child[0, node]] = 2.0
        node = int(first_child[0, node])
    nodes = torch.arange(num_nodes)
    links = {"candidates": nodes.repeat(2, 1), "retrieve_index": torch.stack([nodes, nodes + num_nodes])}
    links |= {"retrieve_next_token": first_child, "retrieve_next_sibling": next_sibling}
    return {**links, "target_logits": logits.flatten(0, 1), "spec_steps": NUM_STEPS, **policy}


def launches_of(values: dict, device) -> tuple[list, list[int], list[int]]:
    """Kernels and grids of a greedy verification, the nodes that it scanned, a level after another, and its counts."""
    launched, scratch = [], []

    def run(op, kernel, grid, arguments):
        launched.append((kernel.__name__, grid))
        scratch.append(arguments.get("path_ptr"))
        with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
            kernel[grid](**arguments)

    values = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in values.items()}
    with launch.intercept(run):
        output = greedy.verify_tree_greedy(**values)
    nodes = None if scratch[-1] is None else (scratch[-1] >= 0).sum(1).tolist()
    return launched, nodes, output.accept_token_num.tolist()


@pytest.mark.skipif(MISSING is not None, reason="needs triton")
@pytest.mark.parametrize("scans", ["all rows", "level by level"])
@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("depth", range(NUM_STEPS + 1))
def test_the_walk_reads_as_many_rows(depth, topk, scans, device, monkeypatch):
    """Level by level a walk's rows of logits are its nodes, whose number is what it accepts and the root."""
    monkeypatch.setattr(greedy, "scans_all_rows", lambda *sizes: scans == "all rows")
    rates = torch.tensor([1.0] * depth + [0.0] * (NUM_STEPS - depth))
    coins = {"seeds": torch.tensor([5, 6]), "positions": torch.arange(2 * (1 + NUM_STEPS * topk))}
    real = launches_of(paths_of(depth, topk), device)
    simulated = launches_of(paths_of(depth, topk, accept_policy="simulate", simulated_rates=rates, **coins), device)
    assert real == simulated and real[2] == [depth] * 2
    if scans == "all rows":
        assert real[1] is None
    else:
        assert real[1] == [2] * (depth + 1) + [0] * (NUM_STEPS - depth)


SCAN, DRAW, PATH = (f"verify_tree_sampled_{kernel}" for kernel in ("scan", "draw", "path"))
WALKS = {
    "all rows": ({}, True, ["sample_rows_scan", "sample_rows_draw", "verify_tree_sampled_walk"]),
    "level by level": ({}, False, [SCAN] * (NUM_STEPS + 1) + [PATH]),
    "with filters": ({"top_k": torch.tensor([5, 5])}, False, [SCAN, DRAW] * (NUM_STEPS + 1)),
}


@pytest.mark.skipif(MISSING is not None, reason="needs triton")
@pytest.mark.parametrize("walk", WALKS)
def test_sampled_walks_launch_as_much(walk, device, monkeypatch):
    """Without penalties and log-probabilities too, which need launches of their own."""
    filters, is_at_once, kernels = WALKS[walk]
    monkeypatch.setattr(sampled, "draws_all_rows", lambda *sizes: is_at_once)
    values = paths_of(2, 3) | {"positions": torch.arange(2 * (1 + NUM_STEPS * 3)), "seeds": torch.tensor([5, 6])}
    values |= {"temperature": torch.ones(2), **filters}
    values = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in values.items()}
    rates = torch.tensor([1.0, 1.0, 0.0], device=device)
    launches = []
    for policy in ({}, {"accept_policy": "simulate", "simulated_rates": rates}):
        launched = []
        with launch.intercept(lambda op, kernel, grid, arguments, to=launched: to.append((kernel.__name__, grid))):
            sampled.verify_tree_sampled(**values, **policy)
        launches.append(launched)
    assert launches[0] == launches[1]
    assert [name for name, _ in launches[0]] == [f"_{kernel}_kernel" for kernel in kernels]
