"""Calls from places nobody thought of: inside a step, after a fork, by the garbage collector, by a signal."""

import asyncio
import contextlib
import copy
import gc
import os
import pickle
import signal
import sys
import threading
import time
import weakref

import pytest

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.serve.lock import EngineLock
from op_tests.engine.toys import LetterTokenizer, ToyModel
from op_tests.engine.view import View

PROMPT, COUNT = [1, 2, 3], 12


class Calling(ToyModel):
    """A model that runs some code in the middle of its forward, once it is told to."""

    def __init__(self, **others):
        super().__init__(**others)
        self.call = None

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if self.call is not None:
            self.call()
        return output


class CallingTokenizer(LetterTokenizer):
    """What a matcher of stop strings asks, in the middle of a step."""

    call = None

    def decode(self, token_ids):
        if self.call is not None:
            self.call()
        return super().decode(token_ids)


def make(**options) -> EAGLEInference:
    config = EAGLEConfig(topk=2, num_steps=2, **options)
    return EAGLEInference(Calling(seed=1), Calling(), config, tokenizer=CallingTokenizer())


WANT = make().generate(PROMPT, COUNT).output_ids
OTHER = make().generate([4, 5], COUNT).output_ids


@contextlib.contextmanager
def calling(owner, name, call):
    setattr(owner, name, call)
    yield
    setattr(owner, name, None)


def on_tree(engine, call):
    return calling(engine, "on_tree", lambda _: call())


def in_model(engine, call):
    return calling(engine.target, "call", call)


@contextlib.contextmanager
def in_signal(engine, call):
    before = signal.signal(signal.SIGUSR1, lambda *_: call())
    try:
        with in_model(engine, lambda: signal.raise_signal(signal.SIGUSR1)):
            yield
    finally:
        signal.signal(signal.SIGUSR1, before)


class Cyclic:
    """Garbage that calls when it is collected."""

    def __init__(self, call):
        self.call, self.itself = call, self

    def __del__(self):
        self.call()


@contextlib.contextmanager
def in_collector(engine, call):
    def collect():
        Cyclic(call)
        gc.collect(0)

    with in_model(engine, collect):
        yield


@contextlib.contextmanager
def in_weakref(engine, call):
    def drop():
        owned = ToyModel()
        weakref.finalize(owned, call)
        del owned

    with in_model(engine, drop):
        yield


@contextlib.contextmanager
def in_trace(engine, call):
    def trace(frame, event, _):
        if frame.f_code.co_name == "propose":
            sys.settrace(None)
            call()
            sys.settrace(trace)

    before = sys.gettrace()  # a debugger's, or that of whoever counts the lines that tests run
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


PLACES = {
    "on_tree": on_tree,
    "target": in_model,
    "draft": lambda engine, call: calling(engine.draft.model, "call", call),
    "tokenizer": lambda engine, call: calling(engine.tokenizer, "call", call),
    "signal": in_signal,
    "collector": in_collector,
    "weakref": in_weakref,
    "trace": in_trace,
}
REFUSED = {
    "generate": lambda e, _: e.generate([4], 3),
    "step": lambda e, _: e.step(),
    "collect": lambda e, _: e.collect(),
    "warmup": lambda e, _: e.warmup(),
    "benchmark": lambda e, _: e.benchmark([[4]], 3, progress=False),
    "stream": lambda e, stream: next(stream),
    "stream ": lambda e, stream: asyncio.run(anext_of(stream)),
    "stream  ": lambda e, _: next(e.stream([4], 3)),
    "stream   ": lambda e, _: list(e.stream_text("A", 3)),
    "next_token_logits": lambda e, _: e.next_token_logits([4]),
    "forget_prefixes": lambda e, _: e.forget_prefixes(),
}


async def anext_of(stream):
    return await anext(stream)


def once(seen: list, call):
    """Calls at the first two times, and keeps what came of it."""

    def calls():
        if len(seen) < 2:
            seen.append(None)  # whatever is called may call again
            try:
                seen[-1] = call()
            except Exception as error:
                seen[-1] = error

    return calls


@pytest.mark.parametrize(
    ("place", "name"), [*((place, "generate") for place in PLACES), *(("target", n) for n in REFUSED)]
)
def test_what_steps_is_refused_inside_a_step(place, name):
    """With the name of the call, and the step goes on as if nothing had happened."""
    engine, seen = make(), []
    stream = engine.stream(PROMPT, COUNT, stop=("none",))
    with PLACES[place](engine, once(seen, lambda: REFUSED[name](engine, stream))):
        tokens = [event.token_id for event in stream]
    told = f"{name.strip()}: must not be called inside a step of the same engine"
    assert seen and all(isinstance(error, RuntimeError) and str(error).startswith(told) for error in seen), seen
    assert tokens == WANT and not engine.has_work
    assert engine.generate(PROMPT, COUNT).output_ids == WANT


@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_allowed_inside_a_step(place, aborts):
    """Requests join and leave there; switches are read by the next step or call."""
    engine, seen, requests = make(), [], []
    params = SamplingParams(max_new_tokens=COUNT, stop=("none",))

    def call():
        requests.append(engine.submit([4, 5], params))
        engine.is_speculating = not engine.is_speculating
        assert engine.has_work and repr(engine) and engine.workspace_bytes()["total"] > 0
        if aborts and len(requests) == 3:
            for request in requests[:2]:
                engine.abort(request)
                assert request.finish_reason == "abort"

    with PLACES[place](engine, once(seen, call)):
        requests.append(engine.submit(PROMPT, params))
        engine.collect()
    View(engine).check_is_empty()
    assert seen == [None, None]
    for request, want, is_kept in zip(requests, (WANT, OTHER, OTHER), (not aborts, not aborts, True)):
        assert request.output_ids == want[: None if is_kept else len(request.output_ids)]


def test_submitting_with_another_configuration_inside_a_step():
    engine, seen = make(), []
    with on_tree(engine, once(seen, lambda: engine.submit([4, 5]))):
        assert engine.generate(PROMPT, COUNT, topk=1).output_ids == WANT
    assert all("submit: a step with another configuration is running" in str(error) for error in seen) and seen
    assert not engine.has_work


@pytest.mark.parametrize("how", ["dropped", "collected", "closed"])
@pytest.mark.parametrize("place", ["on_tree", "draft", "signal"])
def test_a_stream_that_ends_inside_a_step(how, place):
    """Its generator cleans up there and then, or after the step: the rows of a step stay what they are."""
    engine, seen, streams = make(), [], []

    def end():
        stream = streams.pop()
        if how == "closed":
            stream.close()
            assert {request.finish_reason for request in stream.requests} == {"abort"}
        if how == "collected":
            stream.itself = stream
        del stream
        gc.collect(0)

    with PLACES[place](engine, lambda: once(seen, end)() if len(streams) + len(seen) == 2 else None):
        streams += [engine.stream([4, 5], COUNT) for _ in range(2)]
        for stream in streams:
            next(stream)
        del stream
        assert engine.generate(PROMPT, COUNT).output_ids == WANT
    View(engine).check_is_empty()
    assert seen == [None, None] and not engine.has_work


def test_a_stream_is_closed_inside_its_own_step():
    engine, seen = make(), []
    stream = engine.stream(PROMPT, COUNT)
    with on_tree(engine, once(seen, stream.close)):
        tokens = [event.token_id for event in stream]
    assert seen[0] is None and tokens == WANT[: len(tokens)] and len(tokens) < COUNT and not engine.has_work
    assert stream.requests[0].finish_reason == "abort"


def test_the_collector_waits_for_no_other_thread():
    """Two engines whose threads collect each other's streams would wait for each other."""
    engine, seen = make(), []
    streams = []

    def drop():
        thread = threading.Thread(target=streams.clear)
        thread.start()
        thread.join(10)
        return thread.is_alive()

    with on_tree(engine, lambda: streams and seen.append(drop())):
        stream = engine.stream(PROMPT, COUNT)
        tokens = [next(stream).token_id]
        streams.append(engine.stream([4, 5], COUNT))
        next(streams[0])
        assert tokens + [event.token_id for event in stream] == WANT
    assert seen == [False] and not engine.has_work


def test_engines_call_each_other_and_other_threads_wait():
    engine, other, seen, joined = make(), make(), [], []

    def call():
        thread = threading.Thread(target=lambda: joined.append(engine.generate([4, 5], COUNT).output_ids))
        thread.start()
        thread.join(0.05)
        return thread, other.generate([4, 5], COUNT).output_ids, list(joined)

    with on_tree(engine, once(seen, call)):
        assert engine.generate(PROMPT, COUNT).output_ids == WANT
        for thread, text, before in seen:
            thread.join(20)
            assert text == OTHER and before == []
    assert joined == [OTHER, OTHER] and not engine.has_work


def test_the_lock_is_one_like_those_of_threading():
    lock = EngineLock()
    told = threading.Condition(lock)
    waited = []
    with lock, told:
        threading.Thread(target=lock.later, args=[lambda: waited.append(1)]).start()
        assert lock._is_owned() and not told.wait(0.1) and not lock.is_in_step
        assert waited == [1]  # while the lock was free
    assert not lock._is_owned() and lock.acquire(blocking=False) and lock.acquire(timeout=1)
    lock.release()
    lock.release()
    with pytest.raises(RuntimeError, match="un-acquired"):
        lock.release()
    done = []
    with lock.step("one"):
        lock.later(lambda: done.append(lock.is_in_step))
        lock.later(lambda: done[3])
        assert not done and lock.is_in_step
    assert done == [True] and not lock.is_in_step
    with pytest.raises(KeyboardInterrupt), lock.step("two"):
        raise KeyboardInterrupt
    lock.refuse("three")
    with lock.step("four"), pytest.raises(RuntimeError, match="^five: must not be called inside a step"):
        lock.refuse("five")


@pytest.mark.parametrize(
    "forms",
    [
        [((False,), {}, 0), ((), {"blocking": False}, 0), ((True, 0), {}, 0), ((), {"timeout": 0.05}, 0.05)],
        [((), {}, None)],
        [((True, -1), {}, None)],
        [((), {"timeout": 20}, None)],
    ],
    ids=["limited", "bare", "unlimited", "long"],
)
def test_who_asks_for_the_lock_waits_as_long_as_they_say(forms):
    """While another thread holds it; those who set no limit, or a long one, until it is free (a limit of None)."""
    lock, is_held, may_let_go = EngineLock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            is_held.set()
            may_let_go.wait(9)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(20)
    for arguments, options, limit_s in forms:
        if limit_s is None:
            threading.Timer(0.1, may_let_go.set).start()
        start_s = time.perf_counter()
        assert lock.acquire(*arguments, **options) == lock._is_owned() == (limit_s is None)
        assert time.perf_counter() - start_s >= 0.9 * (limit_s or 0) and may_let_go.is_set() == (limit_s is None)
    may_let_go.set()
    thread.join(20)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("when", ["idle", "in a step of another thread", "in a step"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_forked_process_is_told_whose_the_engine_is(when):
    """torch's threads are not in it, so that a large product would never end; nor is the thread that had the lock."""
    engine = make()
    idle = engine.stream([4], COUNT)
    calls = [*REFUSED.values(), lambda e, _: e.submit([4]), lambda e, _: e.abort(idle.requests[0])]

    def child() -> int:
        signal.alarm(20)
        for call in calls:
            try:
                call(engine, idle)
            except RuntimeError as error:
                if "belongs to the process that made it" not in str(error):
                    return 2
            else:
                return 3
        idle.close()
        fresh = make().generate(PROMPT, 4).output_ids  # one of its own
        return int(fresh != WANT[:4])

    def fork() -> int:
        process = os.fork()
        if process == 0:
            status = 4
            try:
                status = child()
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    seen = []
    if when == "idle":
        seen.append(fork())
    elif when == "in a step":
        with on_tree(engine, once(seen, fork)):
            engine.generate([4, 5], COUNT)
    else:
        is_inside, may_go_on = threading.Event(), threading.Event()
        with on_tree(engine, lambda: (is_inside.set(), may_go_on.wait(20))):
            thread = threading.Thread(target=engine.generate, args=([4, 5], COUNT))
            thread.start()
            assert is_inside.wait(20)
            seen.append(fork())
            may_go_on.set()
            thread.join(20)
    assert set(seen) == {0}, seen
    idle.close()
    assert engine.generate(PROMPT, COUNT).output_ids == WANT and not engine.has_work


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_belongs_to_one_process_is_not_copied(make_copy):
    engine = make()
    stream, request = engine.stream(PROMPT, 3), engine.submit(PROMPT, SamplingParams(max_new_tokens=3, stop=("none",)))
    for each in (engine, stream, engine.stream_text("A", 3), engine.lock, engine.session):
        with pytest.raises(TypeError, match=f"^{type(each).__name__}: must not be copied, pickled or sent to another"):
            make_copy(each)
    with pytest.raises(TypeError, match="^Request: must have ended before it is copied"):
        make_copy(request)
    engine.collect()
    ended = make_copy(request)
    ended = pickle.loads(ended) if isinstance(ended, bytes) else ended
    assert (ended.output_ids, ended.text, ended.finish_reason) == (request.output_ids, request.text, "length")
    assert ended.outbox is None and list(stream) and engine.generate(PROMPT, 3).output_ids == WANT[:3]


def test_log_probabilities_are_shown_with_the_results():
    engine, asked = make(), {"logprobs": "raw", "top_logprobs": 2, "logprob_start_len": 0}
    output = engine.generate(PROMPT, 5, **asked)
    first = ", ".join(f"{value:.4g}" for value in output.logprobs[:3])
    told = repr(output)
    assert told.startswith("GenerationOutput(num_requests=1, generated_tokens=5, mean_accept_length=")
    assert f", .logprobs=[{first}, ... 5 in all], .top_logprobs=[[(" in told and "\n" not in told
    assert f", .prompt_logprobs=[None, {output.prompt_logprobs[1]:.4g}, " in told
    assert ".prompt_top_logprobs=[None, [(" in told
    assert repr(engine.generate(PROMPT, 5)).count("=") == 3
    many = repr(engine.generate([PROMPT] * 9, 5, **asked))
    assert "... 9 in all], .top" in many and len(many) < 1500
