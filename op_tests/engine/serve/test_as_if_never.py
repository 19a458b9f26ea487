"""A call that is refused, fails or is given up leaves an engine as if it had never been, for those who run and come."""

import contextlib
from functools import partial

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.batch.state import BatchState, RowSampling
from eagle_kernels.engine.requests.request import Request
from eagle_kernels.engine.step.runner import Launch
from eagle_kernels.engine.step.stepper import Stepper
from op_tests.engine.drafters.suffix_oracle import num_states
from op_tests.engine.methods import MIXED, PROVEN, SIZES
from op_tests.engine.toys import DEVICE, LetterTokenizer, RowWalker, Walker, WalkerHead
from op_tests.engine.view import View, free_ids

METHODS = {
    "head": PROVEN["eagle"] | {"share_prefixes": False},
    "several methods": MIXED,
    "table": {"topk": 2, "num_steps": 3, "adaptive": ((1, (2, 3, 8)), (9, (1, 1, 2)))},
}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 1, 4, 1, 5], [2]]


def engine_of(name, **others):
    draft = (Walker if name == "several methods" else WalkerHead)(**SIZES, seed=1, device=DEVICE)
    fields = {"max_batch": 3, "page_size": 4, "prefill_chunk": 5} | METHODS[name] | others
    return EAGLEInference(draft, RowWalker(**SIZES, device=DEVICE), EAGLEConfig(**fields), tokenizer=LetterTokenizer())


def traces(engine) -> dict:
    """What an engine and its surroundings hold that a call could change."""
    session = engine.session
    scheduler = session.scheduler
    rows = [row and (row.request.id, row.num_read, row.is_running, row.num_pending, row.pages.ids, len(row.scores))
            for row in scheduler._rows]  # fmt: skip
    return {
        "scheduler": scheduler,
        "plan": (scheduler.plan, scheduler.max_step_ms, scheduler.last_runner, scheduler.reading),
        "reading": {name: value for name, value in vars(scheduler.reading).items() if name != "_filled"}, "rows": rows,
        "line": (View(engine).waiting, View(engine).unread),
        "counts": (scheduler.num_steps, scheduler.num_cold_steps, scheduler._num_missed, session._num_submitted),
        "pages": (scheduler.pages.num_free, sorted(free_ids(scheduler.pages))),
        "tensors": [tensor.clone() for tensor in scheduler.state.tensors()],
        "phases": list(scheduler.phase_times.held_ms),
        "session": (list(session.outbox), dict(session.plain_steps.known_ms), session.is_speculating,
                    len(session.plans)),
        "lock": (session.lock.is_in_step, len(session.lock._put_off)),
        "torch": (torch.get_num_threads(), torch.is_inference_mode_enabled(), torch.is_grad_enabled()),
        "caches": [(set(cache._requests), num_states(cache)) for cache in session.suffix_caches.values()],
    }  # fmt: skip


def assert_same(before: dict, after: dict) -> None:
    tensors = zip(before.pop("tensors"), after.pop("tensors"), strict=True)
    assert all(torch.equal(*pair) for pair in tensors)
    assert before == after


REFUSED = {
    "an empty prompt": ([[1, 2], []], 4, {}),
    "no token": ([[1, 2], [3, 400]], 4, {}),
    "too long": ([[1, 2], [1] * 400], 4, {}),
    "too many new tokens": ([1, 2], 10**6, {}),
    "no new tokens": ([1, 2], 0, {}),
    "too few seeds": ([[1], [2]], 4, {"seeds": [1]}),
    "no samples": ([1], 4, {"n": 0}),
    "no such field": ([1], 4, {"temprature": 1.0}),
    "no such value": ([1], 4, {"top_p": 0.0}),
    "no such stop": ([1], 4, {"stop_token_ids": (1, 400)}),
    "too many ends": ([1], 4, {"stop_token_ids": tuple(range(65)), "min_new_tokens": 1}),
    "no such place": ([[1, 2, 3], [1]], 4, {"logprob_start_len": 2}),
    "no such drafter": ([1], 4, {"drafter": "mtp"}),
    "no such flag": ([1], 4, {"speculative": 1}),
}
ONLY_BUSY = {
    "other pools": ([1], 4, {"page_size": 8}),
    "other steps": ([1], 4, {"accept_policy": "reject_all"}),
    "another limit": ([1], 4, {"max_step_ms": 3.0}),
}
REFUSED |= ONLY_BUSY


def refuse_submitted(engine):
    for prompt in ([], [400], [1] * 400):
        request = engine.submit(prompt, SamplingParams(max_new_tokens=4))
        assert request.is_finished and request.error and not request.output_ids


GIVEN_UP = {
    "refused": refuse_submitted,
    "aborted": lambda engine: engine.abort(engine.submit([1, 2, 3], SamplingParams(max_new_tokens=4))),
    "closed": lambda engine: engine.stream([[1, 2], [3]], 4).close(),
    "forgotten": lambda engine: engine.stream([[1, 2], [3]], 4),
}


@pytest.mark.parametrize(("method", "is_busy"), [("head", True), ("several methods", True), ("table", False)])
def test_refused_calls_change_nothing(method, is_busy):
    """Whether others run, wait and have tokens that nobody has collected, or nobody does; and then these go on."""
    texts = []
    for is_disturbed in (False, True):
        engine = engine_of(method)
        requests = [
            engine.submit(prompt, SamplingParams(max_new_tokens=25, temperature=0.9, seed=number, logprobs=True))
            for number, prompt in enumerate([*PROMPTS, [7, 8]])
        ]
        for _ in range(3):
            View(engine).scheduler.step()
        if not is_busy:
            engine.collect()
        calls = [engine.generate, engine.stream, engine.stream_text] + [engine.benchmark] * is_busy
        for name, (prompts, max_new_tokens, options) in REFUSED.items() if is_disturbed else ():
            before = traces(engine)
            for call in calls if is_busy or name not in ONLY_BUSY else ():
                given = {} if call == engine.benchmark and name == "no samples" else options
                with pytest.raises((ValueError, RuntimeError)):
                    call(prompts, max_new_tokens, **given)
            assert_same(before, traces(engine))
        for give_up in GIVEN_UP.values() if is_busy and is_disturbed else ():
            before = traces(engine)
            give_up(engine)
            session, num_before = engine.session, before["counts"][-1]
            assert session._num_submitted - num_before in range(4)
            session._num_submitted = num_before  # the next one's number is all that is left
            assert_same(before, traces(engine))
        if is_busy and is_disturbed:  # who measures needs an empty batch
            before = traces(engine)
            for call in (engine.warmup, partial(engine.warmup, page_size=8), partial(engine.warmup, most_requests=0)):
                with pytest.raises((ValueError, RuntimeError)):
                    call()
            assert_same(before, traces(engine))
        engine.collect()
        texts.append([(each.output_ids, each.logprobs, each.finish_reason, each.accepted) for each in requests])
        texts[-1].append(View(engine).num_steps)
    assert texts[0] == texts[1]


class Failure(RuntimeError):
    """Comes from somewhere within a call."""


# what may fail, at any of the times that it is called
PLACES = {
    "target": lambda engine: (engine.target, "forward"),
    "draft": lambda engine: (engine.draft, "forward"),
    "verification": lambda engine: (Stepper, "_run_target"),
    "first tokens": lambda engine: (Stepper, "draw_first"),
    "parameters": lambda engine: (RowSampling, "set_row"),
    "rows": lambda engine: (BatchState, "begin"),
    "copies": lambda engine: (Launch, "__init__"),
    "tokens": lambda engine: (Request, "push"),
}
CASES = [("head", place) for place in PLACES]
CASES += [("several methods", "rows"), ("several methods", "parameters"), ("table", "verification")]
CALL = {"temperature": 0.8, "frequency_penalty": 0.3, "min_new_tokens": 3, "seeds": 5, "stop_token_ids": (1,)}


def told(output) -> tuple:
    """All of an output but times."""
    stats = output.stats.to_dict()
    counts = {name: value for name, value in stats.items() if not name.endswith(("_s", "_ms", "_second", "speedup"))}
    counts.pop("cold_steps")
    return output.output_ids, counts


@pytest.mark.parametrize(("method", "place"), CASES)
def test_what_fails_leaves_nothing_behind(method, place, monkeypatch):
    """Whenever it fails: no row and no page; its statistics are of what was there, and the next call is as ever."""
    others = {"suffix_decoding_max_cached_requests": 0} if method == "several methods" else {}
    engine = engine_of(method, **others)
    wanted = told(engine.generate(PROMPTS, 6, **CALL))
    engine.forget_prefixes()
    owner, name = PLACES[place](engine)
    call = getattr(owner, name)
    clean = traces(engine)
    for time in (0, 1, 2, 5):
        count = 0

        def fails(*args, time=time, **options):
            nonlocal count
            count += 1
            if count > time:
                raise Failure
            return call(*args, **options)

        engine.is_speculating = time != 5
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails)
            if time % 2:
                stream = engine.stream(PROMPTS, 6, **CALL)
                requests = stream.requests
                with contextlib.suppress(Failure):
                    list(stream)
                tokens, stats = stream.output()
                assert stats.steps == sum(len(request.accepted) for request in requests)
                assert stats.generated_tokens == sum(map(len, tokens))
                assert ("error" in stats.finish_reasons) == (count > time)
            else:
                params = SamplingParams(max_new_tokens=6, temperature=0.8)
                requests = [engine.submit(prompt, params) for prompt in PROMPTS]
                engine.collect()
                failed = [request.finish_reason == "error" for request in requests]
                assert any(failed) == (count > time)
                assert place != "parameters" or failed == [number >= time for number in range(3)]  # alone
        engine.is_speculating = True
        assert {request.finish_reason for request in requests} <= {"error", "eos", "length", "abort"}
        after = traces(engine)
        # steps have run, and some ways are not tried again
        after |= {part: clean[part] for part in ("counts", "plan", "reading", "phases", "session")}
        state = View(engine).state
        assert not state.is_live.any() and not state.lengths.any() and not state.num_behind.any()
        assert (state.block_table == -1).all()
        assert_same({**clean, "tensors": []}, {**after, "tensors": []})
        engine.forget_prefixes()
        assert told(engine.generate(PROMPTS, 6, **CALL)) == wanted, time
        engine.forget_prefixes()


def test_suffix_trees_know_the_texts():
    """As far as they go, whatever their last steps brought; and a text that was given up as far as it came."""
    engine = engine_of("several methods", suffix_decoding_max_cached_requests=9)
    free = engine.generate(PROMPTS, 20).output_ids
    asked = [SamplingParams(max_new_tokens=count, stop_token_ids=(text[end],))
             for count, end, text in zip((20, 4, 7), (5, 9, 2), free)]  # fmt: skip
    requests = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS, asked)]
    engine.collect()
    (cache,) = engine.session.suffix_caches.values()
    assert [list(response) for response in cache._responses] == [*free, *(request.output_ids for request in requests)]
    assert not cache._requests and any(request.finish_reason == "eos" for request in requests)
