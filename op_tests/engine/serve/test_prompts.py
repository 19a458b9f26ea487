"""Prompts that are read at once or in parts, beside steps that must not take too long: texts do not notice."""

import functools

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.batch.kv_pool import JointAttend, PrefillAttend
from eagle_kernels.engine.serve import prompts as reading
from eagle_kernels.engine.serve import reading as choosing
from eagle_kernels.engine.serve.reading import Pace
from eagle_kernels.engine.step.runner import Launch
from op_tests.engine.engines import PARAMS, make, prompt_of
from op_tests.engine.toys import ToyModel, random_modules
from op_tests.engine.view import View


def note_reading(monkeypatch, target) -> list[int]:
    """Notes how many tokens of prompts each call of the target reads: those whose logits are those of last rows."""
    sizes, forward = [], target.forward

    @functools.wraps(forward)
    def noting(input_ids, positions, attend, **options):
        if options.get("last_only") or options.get("last_rows") is not None:
            sizes.append(input_ids.numel() - (attend._step._slots.numel() if isinstance(attend, JointAttend) else 0))
        return forward(input_ids, positions, attend, **options)

    monkeypatch.setattr(target, "forward", noting)
    return sizes


@pytest.mark.parametrize("chunk", [5, 2048])
def test_scores_of_prompts_are_queued_before_the_first_token_is_marked(target, draft, chunk, monkeypatch):
    """The host waits for that mark alone, and then reads both."""
    order = []

    def noting(name, function):
        return lambda *args: order.append(name) or function(*args)

    monkeypatch.setattr(reading, "score", noting("score", reading.score))
    monkeypatch.setattr(reading, "Launch", noting("mark", reading.Launch))
    engine = make(draft, target, prefill_chunk=chunk)
    params = SamplingParams(max_new_tokens=3, logprob_start_len=0)
    requests = [engine.submit(prompt_of(number), params) for number in range(2)]
    engine.collect()
    assert all(len(request.prompt_logprobs) == len(request.prompt) for request in requests)
    assert order.count("mark") in (1, 2) and order.count("score") >= order.count("mark") and order[-1] == "mark"


def test_a_target_without_last_rows_reads_one_by_one(monkeypatch):
    target = ToyModel()
    engine = EAGLEInference(ToyModel(seed=1), target, EAGLEConfig(topk=2, num_steps=2, method="draft_model"))
    prompts = [[1, 2, 3], [4, 5], [6]]
    want = [engine.generate(prompt, 6)[0] for prompt in prompts]
    sizes = note_reading(monkeypatch, target)
    assert engine.generate(prompts, 6)[0] == want
    assert sizes == [3, 2, 1]


def test_a_deterministic_engine_reads_one_by_one(target, draft, monkeypatch):
    engine = make(draft, target)
    prompts = [[1, 2, 3], [4, 5], [6]]
    engine.generate(prompts, 2)
    monkeypatch.setattr(View(engine).plan.plain, "config", EAGLEConfig(deterministic=True))
    View(engine).scheduler.use(View(engine).plan)
    sizes = note_reading(monkeypatch, target)
    engine.generate(prompts, 2)
    assert sizes == [3, 2, 1]


def texts(engine, between=lambda: None) -> list:
    """Tokens of a request of each kind; what is done after each has come."""
    requests = []
    for number, params in enumerate(PARAMS):
        requests.append(engine.submit(prompt_of(number), params))
        between()
    engine.collect()
    return [request.output_ids for request in requests]


# what fails beside others: the owner of a call, None for the draft's reader, the call, and when it fails
FAILING = {
    "at once": (PrefillAttend, "__call__", lambda attend, layer, *_: len(attend._bounds) > 2 and layer == 0),
    "in a step": (JointAttend, "__call__", lambda attend, layer, *_: layer == 1),
    "by the draft at once": (None, "read_prompts", lambda state, parts: len(parts) > 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", FAILING)
def test_what_fails_only_beside_others_is_no_longer_tried(where, target, draft, lag, monkeypatch, caplog):
    """After a layer has written its keys; draws and penalties come once, and nothing is said twice."""
    engine, failed = make(draft, target, max_batch=4 if where == "in a step" else 7), []
    want, (owner, name, fails) = texts(engine, engine.collect), FAILING[where]
    owner = owner or View(engine).plan.readers[0].reader
    call = getattr(owner, name)

    def failing(*arguments, **options):
        result = call(*arguments, **options)
        if fails(*arguments):
            failed.append(where)
            raise MemoryError("too many")
        return result

    monkeypatch.setattr(owner, name, failing)
    for _ in range(2):
        assert texts(engine, *[engine.step] * (where == "in a step")) == want
    assert failed == [where]
    assert [record.args for record in caplog.records] == [
        (1 if where == "in a step" else 7, where, "MemoryError: too many")
    ]


def read_prompts(engine):
    """Reads a part of each prompt, as for a stream of all requests."""
    view = View(engine)
    view.scheduler.step(True, [*view.waiting, *(row.request for row in view.rows)])


@pytest.mark.cross
def test_what_fails_after_the_draft_has_read_changes_nothing(target, draft, lag, monkeypatch):
    """A copy for the host that finds no memory: first tokens and scores come once, when the parts are taken again."""
    engine, calls = make(draft, target, max_batch=3), []
    asked = [SamplingParams(max_new_tokens=6, temperature=0.8, seed=seed, frequency_penalty=0.9, logprob_start_len=0)
             for seed in range(3)]  # fmt: skip
    want = []
    for number, params in enumerate(asked):
        want.append(engine.submit(prompt_of(number), params))
        engine.collect()

    class Failing(Launch):
        def __init__(self, result, rows, *others):
            calls.append(len(rows))
            if len(calls) == 1:
                raise RuntimeError("no pinned memory")
            super().__init__(result, rows, *others)

    monkeypatch.setattr("eagle_kernels.engine.serve.prompts.Launch", Failing)
    requests = [engine.submit(prompt_of(number), params) for number, params in enumerate(asked)]
    engine.collect()
    assert calls == [3, 1, 1, 1]
    for request, other in zip(requests, want):
        assert request.output_ids == other.output_ids
        assert request.prompt_logprobs[1:] == pytest.approx(other.prompt_logprobs[1:], abs=1e-4)


def test_modules_read_again_what_failed_beside_others(target, monkeypatch):
    """A first part fails once, beside the second part of another: keys and kept tokens are as without that."""
    keys = []
    for fails in (False, True):
        torch.manual_seed(0)
        modules = random_modules(target, num_modules=3)
        engine = EAGLEInference(modules, target, EAGLEConfig.chain(3, method="mtp", prefill_chunk=40, max_batch=2))
        advance, calls = modules.advance, []

        def failing(*arguments, advance=advance, calls=calls, fails=fails, **options):
            calls.append(1)  # by three modules: a first part alone, its second part, and the other's first one
            if fails and len(calls) == 9:
                raise RuntimeError("once")
            return advance(*arguments, **options)

        monkeypatch.setattr(modules, "advance", failing)
        for number in (4, 9):
            engine.submit(prompt_of(number) * 2, SamplingParams(max_new_tokens=4))
        while sum(row.is_running for row in View(engine).rows) < 2:
            read_prompts(engine)
        state = View(engine).state
        kept = state.kept[View(engine).plan.readers[0].reader.num_kept]
        keys.append([state.draft_pool.k_cache, kept.tokens[:, :2], kept.features[:, :2], state.num_behind])
        assert len(calls) == 12 + 6 * fails
    for one, other in zip(*keys):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_warmup_reads_prompts_alone_and_at_once(target, draft, monkeypatch):
    """Few rows and many, of one request and of several, may be other kernels."""
    engine, sizes = make(draft, target), note_reading(monkeypatch, target)
    engine.warmup()
    long = max(sizes) - 1
    assert long > 100 and {1, long, 1 + long} <= set(sizes)


BUDGETS = range(64, 2049, 64)


class Card:
    """A device whose step takes step_ms and whose reading takes fixed_ms and token_ms a token, more in long texts."""

    def __init__(self, monkeypatch, step_ms, fixed_ms, token_ms):
        self.step_ms, self.fixed_ms, self.token_ms, self.now = step_ms, fixed_ms, token_ms, 0.0
        monkeypatch.setattr(choosing, "mark", lambda device: self.now)

    def gaps(self, chosen: Pace, prompt: int) -> list[float]:
        """Reads a prompt beside steps; returns the time from each step to the next."""
        gaps, read = [], 0
        while read < prompt:
            size = min(chosen.budget(), prompt - read)
            start = chosen.begin()
            read_ms = self.fixed_ms + size * self.token_ms * (1 + read / 10_000)
            self.now += read_ms / 1e3
            chosen.end(start, size)
            chosen.note_step(self.step_ms)
            gaps.append(read_ms + self.step_ms)
            read += size
        return gaps


@pytest.mark.parametrize(("step_ms", "fixed_ms", "token_ms"), [(5.4, 5.0, 0.03), (7.0, 5.0, 0.03), (1.0, 0.1, 0.08)])
def test_a_pace_fills_the_limit_and_keeps_it(step_ms, fixed_ms, token_ms, monkeypatch):
    card, limit_ms = Card(monkeypatch, step_ms, fixed_ms, token_ms), 40.0
    gaps = card.gaps(Pace(limit_ms, BUDGETS, torch.device("cpu")), 60_000)
    settled = gaps[8:-1]
    too_long = [gap for gap in settled if gap > limit_ms]  # texts grow, and 64 tokens more are tried now and then
    assert len(too_long) <= len(settled) / 8 and max(gaps) <= limit_ms + 64 * token_ms * 7
    assert min(settled) >= 0.5 * limit_ms  # budgets are multiples of 64 tokens


def test_a_pace_follows_the_card(monkeypatch):
    """Slower from one step to the next, and fast again; the rest of a prompt changes nothing."""
    card = Card(monkeypatch, 5.0, 1.0, 0.02)
    chosen = Pace(30.0, BUDGETS, torch.device("cpu"))
    card.gaps(chosen, 20_000)
    fast = chosen.budget()
    card.token_ms = 0.2
    assert max(card.gaps(chosen, 3000)[3:]) <= 30.0 + 64 * 0.2 * 1.3
    slow = chosen.budget()
    assert slow < fast / 3
    card.token_ms = 0.02
    card.gaps(chosen, 20_000)
    again = chosen.budget()
    assert again > 2 * slow
    card.gaps(chosen, 3)
    assert chosen.budget() == again


def test_who_is_alone_is_read_whole_whatever_the_limit(target, draft, monkeypatch):
    """Also where several prompts of one call wait for each other; and another limit needs no other steps."""
    engine = make(draft, target, prefill_chunk=200, max_step_ms=1e-6)
    prompts = [[(7 * at + shift) % 61 for at in range(110)] for shift in (1, 2, 3)]
    sizes = note_reading(monkeypatch, target)
    engine.generate(prompts, 2)
    assert sizes == [200, 130]
    num_plans = len(engine.session.plans)
    engine.generate(prompts, 2, max_step_ms=7.0)
    assert len(engine.session.plans) == num_plans
