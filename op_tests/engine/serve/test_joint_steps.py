"""Steps that read prompts in the same pass of the target: no text notices, and what fails there fails alone."""

import random
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels import SamplingParams
from eagle_kernels.engine.batch.kv_pool import KVPool, PrefillAttend, RaggedAttend
from eagle_kernels.engine.models.protocol import KVShape
from eagle_kernels.engine.requests.request import Request
from eagle_kernels.engine.serve import reading, scheduler
from eagle_kernels.engine.serve.reading import FEW_STEPS, JOINT_TOKENS, Pace
from eagle_kernels.engine.step import runner
from eagle_kernels.engine.step.choice import Fastest
from eagle_kernels.engine.step.runner import bucket_of
from eagle_kernels.engine.step.stepper import Stepper
from op_tests.engine.engines import make
from op_tests.engine.toys import RowWalker, Walker, WalkerHead
from op_tests.engine.view import View


@pytest.mark.parametrize("window", [None, 1, 7])
def test_parts_attend_as_they_do_by_themselves(window, device):
    torch.manual_seed(0)
    pool = KVPool(KVShape(1, 2, 16), 24, 4, torch.float32, device)
    pool.k_cache.normal_(), pool.v_cache.normal_()
    other = KVPool(KVShape(1, 2, 16), 24, 4, torch.float32, device)
    other.k_cache.copy_(pool.k_cache), other.v_cache.copy_(pool.v_cache)
    tables = torch.randperm(24, device=device).to(torch.int32).view(3, 8)
    parts = [(9, 6), (0, 11), (20, 1)]
    query, key, value = (torch.randn(1, 18, heads, 16, device=device) for heads in (4, 2, 2))
    want = PrefillAttend(pool, tables, parts)(0, query, key, value, window=window)
    bounds = torch.tensor([0, 6, 17, 18, 18], device=device)
    positions = torch.cat([torch.arange(start, start + count, device=device) for start, count in parts])
    part_of = torch.tensor([0] * 6 + [1] * 11 + [2], device=device)
    slots = tables[part_of, positions // 4] * 4 + positions % 4
    # and two rows of no part
    padded = [torch.cat([tensor, torch.randn_like(tensor[:, :2])], dim=1) for tensor in (query, key, value)]
    attend = RaggedAttend(
        other, torch.nn.functional.pad(tables, (0, 0, 0, 1)), torch.tensor([9, 0, 20, 0], device=device), bounds,
        torch.nn.functional.pad(slots, (0, 2), value=-1)[None], torch.nn.functional.pad(positions, (0, 2))[None], 20,
    )  # fmt: skip
    torch.testing.assert_close(attend(0, *padded, window=window)[:, :18], want)
    torch.testing.assert_close(other.k_cache, pool.k_cache, rtol=0, atol=0)
    torch.testing.assert_close(other.v_cache, pool.v_cache, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "limit_ms", "lag"),
    [(RowWalker, 30.0, 0), (RowWalker, 30.0, 1), (RowWalker, None, 1), (Walker, 30.0, 1)],
    indirect=["lag"],
)
def test_times_of_steps_reach_those_who_judge_by_them(kind, limit_ms, lag, monkeypatch):
    """By a clock of its own: a step's time goes to the choice among steps like it, that of one without prompts to the
    pace, as does what reading took; what compiles is told to nobody."""
    now_ms, steps, noted, paced, ended, alone = [0.0], [], [], [], [], []
    run_target, read_parts, note, end = Stepper._run_target, reading.read_parts, Fastest.note, Pace.end
    note_step, note_reading = Pace.note_step, Pace._note_reading

    def running(stepper, batch, proposal, prompts):
        num_tokens = 0 if prompts is None else prompts.num_tokens
        kind_of = stepper, bucket_of(len(batch), 6), num_tokens > 0
        spent_ms = 5 + stepper.mean_nodes * len(batch) / 8 + num_tokens / 16
        is_new = kind_of not in [known for known, *_ in steps]
        steps.append((kind_of, len(batch), num_tokens, None if is_new else spent_ms))
        now_ms[0] += spent_ms
        return run_target(stepper, batch, proposal, prompts)

    def parts_read(stepper, state, parts):
        alone.append(sum(size for _, size in parts))
        now_ms[0] += alone[-1] / 4
        return read_parts(stepper, state, parts)

    def ending(pace, start, tokens, *, is_joint=False):
        if start is not None:
            ended.append((tokens, now_ms[0] - 1e3 * start, is_joint))
        end(pace, start, tokens, is_joint=is_joint)

    def reading_noted(pace, tokens, read_ms):
        paced.append((tokens, read_ms, pace._step_ms))
        note_reading(pace, tokens, read_ms)

    for module in (scheduler, runner, reading):
        monkeypatch.setattr(module, "mark", lambda device: now_ms[0] / 1e3)
    monkeypatch.setattr(Stepper, "_run_target", running)
    monkeypatch.setattr(reading, "read_parts", parts_read)
    monkeypatch.setattr(Fastest, "note", lambda choice, *told: noted.append((choice, *told)) or note(choice, *told))
    monkeypatch.setattr(Pace, "end", ending)
    monkeypatch.setattr(Pace, "note_step", lambda pace, step_ms: plain.append(step_ms) or note_step(pace, step_ms))
    monkeypatch.setattr(Pace, "_note_reading", reading_noted)
    sizes, coin, plain = {"vocab_size": 20, "walk": 8, "max_length": 512}, random.Random(lag), []
    options = {"adaptive": "auto", "topk": 2, "num_steps": 3, "num_draft_tokens": 6, "cuda_graph": False}
    engine = make(
        WalkerHead(seed=1, **sizes), kind(**sizes), **options, max_batch=6, max_step_ms=limit_ms, prefill_chunk=200
    )
    while len(steps) < 40 or engine.has_work:
        for _ in range(coin.choice((0, 0, 0, 3)) if len(steps) < 40 else 0):
            count, first = coin.randrange(1, 20), coin.choice((None, None, None, 0))
            params = SamplingParams(max_new_tokens=count, logprob_start_len=first)
            engine.submit([coin.randrange(20) for _ in range(coin.choice((1, 5, 40, 70, 200)))], params)
        engine.is_speculating = coin.random() < 0.8
        is_beside, count = engine.has_work and bool(View(engine).scheduler.stepping), len(alone)
        engine.step()
        alone[count:] = [sum(alone[count:])] if is_beside and alone[count:] else []
    plan, sizes = View(engine).plan, JOINT_TOKENS if limit_ms else JOINT_TOKENS[-1:]
    numbers = {runner.stepper: number for number, runner in enumerate(plan.runners)}
    assert len(noted) == len(steps) == len(plain)
    for ((stepper, *_), num_rows, num_tokens, step_ms), told, plain_ms in zip(steps, noted, plain):
        beside = next(size for size in (0, *sizes) if size >= num_tokens)
        assert told[0] is plan.choices[beside] and told[1:3] == (numbers[stepper], num_rows)
        assert told[3] == (step_ms and pytest.approx(step_ms))
        assert plain_ms == (None if num_tokens else told[3])
    joint = [(num_tokens, pytest.approx(step_ms)) for *_, num_tokens, step_ms in steps if num_tokens and step_ms]
    assert [part[:2] for part in ended if part[2]] == joint
    waited = [(num_tokens, pytest.approx(num_tokens / 4)) for num_tokens in alone]
    assert [part[:2] for part in ended if not part[2]] == (waited if limit_ms else []) and waited
    for (tokens, spent_ms, is_joint), (read, read_ms, step_ms) in zip(ended, paced):
        assert (read, read_ms) == (tokens, pytest.approx(spent_ms - (step_ms if is_joint else 0)))
    assert bool(joint) == (kind is RowWalker) and len({number for _, number, *_ in noted}) > 1
    assert len(ended) - len(paced) in range(3) if limit_ms else not paced


def test_where_prompts_are_read(target, draft):
    """In steps that are few or, of a single prompt, cheap; and always where their time is limited."""

    def unread(*sizes):
        requests = [Request(0, [0] * (size + 5), SamplingParams(), 0, frozenset()) for size in sizes]
        return [SimpleNamespace(request=each, num_read=5, number=number) for number, each in enumerate(requests)]

    engine = make(draft, target, max_batch=3)
    engine.generate([1, 2], 2)
    reading, few = View(engine).reading, FEW_STEPS * JOINT_TOKENS[-1]
    for sizes, num_rows, is_in_step in (
        ([few], 10**6, True), ([few - 9, 9], 10**6, True), ([few - 8, 9], 1, False), ([10**6], 64, True),
        ([10**6], 65, False), ([10**6, 1], 64, False),
    ):  # fmt: skip
        rows = unread(*sizes)
        assert reading.is_in_step(rows, num_rows) == is_in_step, (sizes, num_rows)
        rows[0].request.params = SamplingParams(logprob_start_len=9)
        assert not reading.is_in_step(rows, num_rows)
        rows[0].number = len(rows)  # only where it is the oldest; beside others it waits
        assert reading.is_in_step(rows, num_rows) == (is_in_step and len(rows) > 1)
        assert all(row is not rows[0] for row, _ in reading.next_parts(rows, True, True))
    limited = make(draft, target, max_batch=3, max_step_ms=9.0)
    limited.generate([1, 2], 2)
    assert limited.session.scheduler.reading.is_in_step(unread(10**6, 10**6), 10**6)


def test_a_limit_after_steps_have_given_up_reading(target, draft, monkeypatch):
    """Prompts are then read between steps, as many tokens as fit."""
    engine = make(draft, target, max_batch=3, max_step_ms=1e6, prefill_chunk=500)
    engine.generate([1, 2], 2)
    reading = View(engine).reading
    assert reading.pace._budgets == [*JOINT_TOKENS]
    reading.give_up_steps()
    assert reading.pace._budgets == [*range(64, 500, 64), 500] and not reading.rows_in_use()


@pytest.mark.parametrize(
    ("chunk", "limit", "sizes"),
    [(2048, None, [1]), (2048, 5.0, [0, 1]), (50, None, [0]), (64, 5.0, [0]), (100, 5.0, [0, 1]), (100, None, [1])],
)
def test_sizes_of_steps_that_read(target, chunk, limit, sizes):
    """Those that are used are those that a warm-up captures."""
    engine = make(target, target, prefill_chunk=chunk, max_step_ms=limit)
    engine.generate([1, 2], 2)
    reading = View(engine).reading
    assert reading._joint_sizes == [JOINT_TOKENS[number] for number in sizes]
    assert reading.joint_size([]) == 0 and reading.joint_size([(None, 3)]) == reading._joint_sizes[0]
