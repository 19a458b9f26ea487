"""How many drafts a step makes: what is fastest is found soon, and limits hold to one request."""

import itertools
import operator
import random
import statistics
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels import EAGLEConfig, SamplingParams
from eagle_kernels.engine.serve.reading import JOINT_TOKENS
from eagle_kernels.engine.serve.threads import running
from eagle_kernels.engine.step.choice import PROBE_AFTER, Fastest
from eagle_kernels.engine.step.plan import warn_of_eager_steps
from eagle_kernels.engine.step.runner import Launch
from op_tests.engine.engines import make, prompt_of
from op_tests.engine.toys import DEVICE, RowWalker, random_llama
from op_tests.engine.view import View


def test_which_steps_are_waited_for(target, lag, monkeypatch):
    """The first and every eighth after it; where the host is never behind, all."""
    monkeypatch.setattr("eagle_kernels.engine.step.phases.TIMED_STEPS", 7)
    engine = make(target, target)
    for _ in range(2):
        engine.submit([1], SamplingParams(max_new_tokens=24))
        scheduler, timed = View(engine).scheduler, []
        scheduler.phase_times.restart()
        first = scheduler.num_steps
        while scheduler.has_work:
            count = len(scheduler.phase_times.held_ms)
            scheduler.step(is_speculating=False)
            if len(scheduler.phase_times.held_ms) > count:
                timed.append(scheduler.num_steps - first - 1)
                assert not View(engine).unread
        assert timed == list(range(0, 23, 8 if lag else 1))


@pytest.mark.cross
def test_steps_whose_phases_nobody_wants_to_know(target, lag, monkeypatch):
    """No event is recorded, none is waited for, and the text is the same."""
    text, stats = make(target, target).generate([1, 2], 30)
    assert set(stats.phase_time_ms) == {"draft", "verify", "sample", "bookkeeping"}

    def refuse(*_):
        raise AssertionError("somebody looks at a clock between phases")

    monkeypatch.setattr("eagle_kernels.engine.step.phases.mark", refuse)
    engine = make(target, target, phase_times=False)
    request = engine.submit([1, 2], SamplingParams(max_new_tokens=30))
    with running(target):
        while not request.is_finished:
            View(engine).scheduler.step()
    assert request.output_ids == text and not View(engine).scheduler.phase_times.held_ms


@pytest.mark.parametrize("waits, cuda_graph", [("", None), ("target", None), ("draft", None), ("target", False)])
def test_models_that_wait_are_warned_of(waits, cuda_graph, caplog):
    """By the name of their class; nobody who has asked for eager steps hears of it."""
    models = {
        role: SimpleNamespace(device=torch.device("cuda"), can_be_captured=role != waits)
        for role in ("target", "draft")
    }
    warn_of_eager_steps(models["target"], [models["draft"]], EAGLEConfig(cuda_graph=cuda_graph))
    told = [f"steps run eagerly, not as CUDA graphs: the forward of the {waits}, SimpleNamespace, waits"]
    assert [record.getMessage()[16 : 16 + len(told[0])] for record in caplog.records] == told * (
        waits != "" and cuda_graph is None
    )


@pytest.mark.parametrize("plain", [{"max_spec_batch": 0}, {"adaptive": ((8, None),)}])
def test_a_draft_that_is_never_asked_sets_no_limit(target, plain):
    """Else it is named, and what goes without it."""
    short = random_llama(hidden_size=16, num_layers=1, max_length=96, seed=1, device=DEVICE)
    engine, prompt = make(short, target), (prompt_of(4) * 9)[:100]
    reason = "of 100 tokens .*=8 exceed the 96 tokens that the draft allows; without drafts .* 256 are"
    with pytest.raises(ValueError, match=reason):
        engine.generate(prompt, 8)
    with pytest.raises(ValueError, match="exceed the 90 tokens that the target and max_length allow"):
        engine.generate(prompt, 8, max_length=90)
    want = engine.generate(prompt, 8, speculative=False).output_ids
    assert engine.generate(prompt, 8, **plain).output_ids == want
    request = make(short, target, **plain).submit(prompt, SamplingParams(max_new_tokens=8))
    assert request.error is None


def test_the_switch_outlives_pools_and_configurations(target):
    engine = make(target, target, topk=1, num_steps=3)
    stream = engine.stream(prompt_of(1), 30, topk=2)
    next(stream)
    engine.is_speculating = False  # while another configuration runs
    stream.close()
    _, stats = engine.generate(prompt_of(1), 10, max_batch=2)
    assert stats.drafted == 0 and not engine.is_speculating


def simulate(choice, num_steps, step_ms, tokens, num_rows=4):
    """Time and tokens of a request in `num_steps` steps, and the numbers that were chosen."""
    total_ms, total, chosen = 0.0, 0.0, []
    for _ in range(num_steps):
        number = choice.choose(num_rows)
        choice.note(number, num_rows, step_ms[number], tokens[number])
        total_ms, total = total_ms + step_ms[number], total + tokens[number]
        chosen.append(number)
    return total_ms, total, chosen


def num_wrong(chosen, step_ms, tokens) -> int:
    """How many steps were more than a tenth slower than the best ones."""
    speeds = [count / ms for count, ms in zip(tokens, step_ms)]
    return sum(speeds[number] < 0.9 * max(speeds) for number in chosen)


USUAL = (6.0, 7.0, 9.0), (1.0, 1.5, 4.0)


@pytest.mark.parametrize("before", [20, 300, 4000])
@pytest.mark.parametrize(
    "after", [((6.0, 7.0, 60.0), USUAL[1]), ((6.0, 7.0, 14.0), (1.0, 1.5, 2.0)), (USUAL[0], (1.0, 1.5, 1.0))], ids=str
)
def test_what_becomes_worse_is_left_soon(before, after):
    """A tree that was best for however long: its steps take longer, or its drafts are wrong, or both."""
    choice = Fastest((1, 10, 10), None)
    simulate(choice, before, *USUAL)
    *_, chosen = simulate(choice, 3000, *after)
    assert chosen[0] == 2 and num_wrong(chosen, *after) <= 90


def test_what_becomes_better_is_found_in_time():
    """Trees whose times and tokens all change, three times: the best one or its like has nine steps of ten."""
    coin, num_steps, wrong = random.Random(0), 6000, []
    for _ in range(6):
        choice = Fastest((1, 10, 10, 10), None)
        for _ in range(3):
            step_ms = [*itertools.accumulate((coin.uniform(1, 2) for _ in range(3)), operator.mul, initial=6.0)]
            tokens = [1.0, *sorted(coin.uniform(1, 5) for _ in range(3))]
            *_, chosen = simulate(choice, num_steps, step_ms, tokens)
            wrong.append(num_wrong(chosen, step_ms, tokens) / num_steps)
    assert statistics.fmean(wrong) < 0.1 and statistics.median(wrong) < 0.02, wrong


@pytest.mark.parametrize(("old", "new"), itertools.permutations(range(1, 4), 2))
def test_any_tree_may_become_the_best(old, new):
    """The drafts of one are right for a while, then those of another."""
    choice, step_ms = Fastest((1, 4, 4, 4), None), (6.0, 6.5, 7.0, 7.5)
    tokens = [tuple(3.0 if number == best else 1.0 for number in range(4)) for best in (old, new)]
    simulate(choice, 1000, step_ms, tokens[0])
    *_, chosen = simulate(choice, 2000, step_ms, tokens[1])
    assert num_wrong(chosen, step_ms, tokens[1]) <= 2 * PROBE_AFTER


@pytest.mark.parametrize(("step_ms", "tokens"), [USUAL, ((6.0, 9.0), (1.0, 4.0)), ((6.0, 9.0), (1.0, 1.2))])
def test_one_busy_step_decides_nothing(step_ms, tokens):
    """Any one of the first, of whichever tree, that takes ten times as long."""
    for busy in range(20):
        choice, chosen = Fastest((1, 4, 10)[: len(tokens)], None), []
        for number in range(500):
            chosen.append(choice.choose(4))
            slow = 10 if number == busy else 1
            choice.note(chosen[-1], 4, slow * step_ms[chosen[-1]], tokens[chosen[-1]])
        assert num_wrong(chosen, step_ms, tokens) <= 4 * len(tokens), busy


# tokens of a step of 1, 2, 4, 8, 16 and 64 nodes, on average and at most
MEAN_TOKENS, MOST_TOKENS = (1.0, 1.7, 2.6, 2.5, 3.0, 4.0), (1, 2, 4, 4, 5, 6)
# milliseconds of these steps by the number of requests: the shape of Llama-3.1-8B on an H100, those of 8 and 16 nodes
# between those of 4 and 64 (bench/results, generation.jsonl at 9b61047)
RECORDED_MS = {
    requests: (plain, two, four, four + (many - four) / 15, four + (many - four) / 5, many)
    for requests, plain, two, four, many in (
        (1, 5.37, 6.3, 6.9, 8.34), (2, 5.93, 6.36, 7.02, 8.93), (4, 6.02, 6.48, 7.22, 10.39),
        (8, 6.19, 6.74, 7.67, 15.22), (16, 6.52, 7.19, 8.02, 27.97), (32, 7.15, 7.86, 9.09, 54.09),
        (64, 8.07, 9.38, 11.66, 102.5), (128, 10.1, 12.82, 19.11, 207.13), (256, 14.37, 22.24, 36.32, 412.38),
    )
}  # fmt: skip


def noisy_steps(choice, coin: random.Random, num_steps: int, num_rows: int) -> tuple[float, list[int]]:
    """Tokens a millisecond of `num_steps` steps as recorded, with noise; and the numbers chosen."""
    total, total_ms, chosen = 0.0, 0.0, []
    for _ in range(num_steps):
        number = choice.choose(num_rows)
        mean, step_ms = MEAN_TOKENS[number], RECORDED_MS[num_rows][number] * coin.uniform(0.97, 1.05)
        tokens = sum(int(mean) + (coin.random() < mean % 1) for _ in range(num_rows)) / num_rows
        choice.note(number, num_rows, step_ms, tokens)
        total, total_ms = total + tokens, total_ms + step_ms
        chosen.append(number)
    return total / total_ms, chosen


@pytest.mark.parametrize("num_rows", RECORDED_MS)
def test_the_best_static_tree_is_hardly_faster(num_rows):
    """From the first step on, with times and acceptance as recorded; and the choice does not waver."""
    speed, chosen = noisy_steps(Fastest(MOST_TOKENS, None), random.Random(num_rows), 1500, num_rows)
    best = max(tokens / step_ms for tokens, step_ms in zip(MEAN_TOKENS, RECORDED_MS[num_rows]))
    assert speed >= 0.985 * best / 1.01  # the noise makes steps 1 % longer
    assert sum(one != other for one, other in itertools.pairwise(chosen)) < 90


def test_what_a_warm_up_rules_out_costs_nothing():
    """The times of empty steps, which are a little less: a tree that they rule out is not tried at all."""
    choice = Fastest(MOST_TOKENS, None)
    for num_rows, times in RECORDED_MS.items():
        for number, step_ms in enumerate(times):
            choice.expect(number, num_rows, 0.9 * step_ms)
    for num_rows in (256, 128, 64, 32):  # the largest first, so that smaller ones have told nothing
        speed, chosen = noisy_steps(choice, random.Random(num_rows), 300, num_rows)
        best = max(tokens / step_ms for tokens, step_ms in zip(MEAN_TOKENS, RECORDED_MS[num_rows]))
        assert 5 not in chosen and speed >= 0.97 * best / 1.01
    _, chosen = noisy_steps(choice, random.Random(0), 300, 1)
    assert chosen[-1] == 5


# for a limit: the fields that set it, and the nodes of the trees of batches up to it, of one more, and of two more
WAYS = {
    "one tree": lambda limit: ({"max_spec_batch": limit}, (8, 1, 1)),
    "shared rows": lambda limit: ({"max_spec_batch": limit, "mean_draft_tokens": 3}, (8, 1, 1)),
    "automatic": lambda limit: ({"max_spec_batch": limit, "adaptive": "auto"}, (8, 1, 1)),
    "end of a table": lambda limit: ({"adaptive": ((limit, (2, 3, 8)),)}, (8, 1, 1)),
    "within a table": lambda limit: ({"adaptive": ((limit, (2, 3, 8)), (limit + 1, (1, 2, 3)))}, (8, 3, 1)),
    "plain in a table": lambda limit: (
        {"adaptive": ((limit, (2, 3, 8)), (limit + 1, None), (9, (1, 1, 2)))},
        (8, 1, 2),
    ),
}
LIMITS = [(way, limit) for way in WAYS for limit in (0, 2) if limit or "table" not in way]


@pytest.mark.parametrize(("way", "limit"), LIMITS)
def test_limits_on_requests_hold_to_one_request(way, limit, monkeypatch):
    """One fewer, the same number and one more: what steps verify, and what is chosen for steps that read prompts."""
    monkeypatch.setattr(Launch, "step_ms", 5.0)
    fields, nodes = WAYS[way](limit)
    target, seen = RowWalker(device=DEVICE), []
    engine = make(target, target, topk=2, num_steps=3, num_draft_tokens=8, max_batch=4, **fields)
    engine.on_tree = lambda step: seen.append((len(step.batch), step.proposal.tree.retrieve_index.shape[1]))
    for num_rows in range(max(1, limit - 1), limit + 3):
        seen.clear()
        engine.generate([[1, 2]] * num_rows, 45 if way == "automatic" else 9)
        wanted = nodes[max(0, num_rows - limit)]
        assert max(size for rows, size in seen if rows == num_rows) == wanted
        assert all(size <= nodes[max(0, rows - limit)] for rows, size in seen)  # some end sooner than others
        plan = View(engine).plan
        sizes = [runner.stepper.num_nodes for runner in plan.runners]
        for choice in map(plan.choice_beside, (0, *JOINT_TOKENS)):
            *_, chosen = simulate(choice, 40, [5.0] * len(sizes), range(1, 1 + len(sizes)), num_rows)
            assert max(sizes[number] for number in chosen) == wanted


@pytest.mark.gpu
def test_a_warm_up_tells_the_choice_what_steps_take(target):
    engine = make(target, target, adaptive="auto", topk=2, num_steps=3, num_draft_tokens=6, max_batch=4)
    engine.warmup()
    choices = View(engine).plan.choices
    assert set(choices) == {0, JOINT_TOKENS[-1]}
    for choice in choices.values():
        assert set(choice._expected_ms) == set(itertools.product((0, 1, 2), range(4)))
        assert all(0 < step_ms < 1000 for step_ms in choice._expected_ms.values())
