"""Streams: given up, forgotten, cancelled, made under the lock."""

import asyncio
import concurrent.futures
import contextlib
import gc
import pkgutil
import threading
import time
import weakref

import pytest

from eagle_kernels import SamplingParams
from op_tests.engine.engines import all_of, make, prompt_of
from op_tests.engine.view import View


def test_streams_and_requests_are_shown_in_one_line(target, draft):
    engine = make(draft, target)
    stream = engine.stream([prompt_of(1), prompt_of(2)], 5)
    assert repr(stream) == "TokenStream(0 tokens, 0 of 2 requests finished)"
    for _ in stream:
        pass
    assert repr(stream) == "TokenStream(10 tokens, 2 of 2 requests finished)"
    request = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=4))
    assert repr(request) == "Request(id=0, 3 prompt tokens, 0 new tokens, finish_reason=None)"
    engine.collect()
    assert repr(request) == "Request(id=0, 3 prompt tokens, 4 new tokens, finish_reason='length')"


@pytest.mark.parametrize("way", ["closed", "forgotten"])
def test_a_stream_that_is_given_up(target, draft, lag, way):
    """Nothing but its owner holds it, so it ends there and then, not whenever a collector comes along."""
    engine = make(draft, target)
    stream = engine.stream([prompt_of(1), prompt_of(2)], 30)
    next(stream)
    requests = stream.requests
    if way == "closed":
        stream.close()
        assert stream.output().stats.finish_reasons == ["abort", "abort"]
    else:
        del stream
    assert not engine.has_work and {request.finish_reason for request in requests} == {"abort"}
    engine.generate(prompt_of(1), 3, topk=2)


@pytest.mark.slow
def test_a_stream_holds_no_pools_before_and_after(target, draft):
    """It begins with those that the engine has then, and lets go of them when it has ended."""
    engine = make(draft, target)
    early, ended = engine.stream(prompt_of(1), 5), engine.stream(prompt_of(1), 5)
    want = list(ended)
    held = weakref.ref(View(engine).state)
    engine.generate(prompt_of(2), 3, page_size=4)
    gc.collect()
    assert held() is None and ended.output().output_ids == [event.token_id for event in want]
    running = engine.submit(prompt_of(2), SamplingParams(max_new_tokens=3))
    assert list(early) == want and early.requests[0].finish_reason == "length"
    engine.collect()
    assert running.finish_reason == "length"


def test_a_stream_is_checked_again_when_it_begins(target, draft):
    """What fitted into the pools that there were may wait for ever for the next ones."""
    engine = make(draft, target)
    stream = engine.stream(prompt_of(1), 100)
    engine.submit([1], SamplingParams(max_new_tokens=9))
    with pytest.raises(RuntimeError, match="another configuration"):
        next(engine.stream(prompt_of(1), 5, topk=2))
    engine.collect()
    View(engine).pages.num_pages = 1
    with pytest.raises(ValueError, match="prompt 0: .* kv_cache_bytes makes it larger"):
        next(stream)


def test_a_stream_is_made_under_the_lock(target, draft, monkeypatch):
    """Another thread may change the configuration at any other time."""
    engine, is_locked = make(draft, target), []
    for name in ("TokenStream", "Scheduler.why_never"):
        path = f"eagle_kernels.engine.serve.stream.{name}"
        made = pkgutil.resolve_name(path)
        monkeypatch.setattr(path, lambda *args, made=made: is_locked.append(engine.lock._is_owned()) or made(*args))
    stream = engine.stream(prompt_of(1), 5)
    assert len(is_locked) > 1 and all(is_locked)
    stream.close()


@pytest.mark.cross
def test_a_reader_that_is_cancelled_in_a_step_leaves_nothing(target, draft, lag):
    """As where a server's client hangs up."""
    engine, is_stepping, may_go_on = make(draft, target), threading.Event(), threading.Event()
    want = engine.generate(prompt_of(2), 12)[0]
    step = View(engine).scheduler.step

    def slow(*arguments):
        is_stepping.set()
        assert may_go_on.wait(60)
        step(*arguments)

    async def read(stream):
        async with contextlib.aclosing(stream):
            async for _ in stream:
                pass

    async def hang_up():
        stream = engine.stream(prompt_of(1), 100)
        reader = asyncio.create_task(read(stream))
        await asyncio.to_thread(is_stepping.wait, 60)
        reader.cancel()
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await reader
        return stream.output().stats.finish_reasons

    View(engine).scheduler.step = slow
    assert asyncio.run(hang_up()) == ["abort"] and not engine.has_work
    assert engine.generate(prompt_of(2), 12)[0] == want


@pytest.mark.slow
@pytest.mark.parametrize(
    "rest_of",
    [lambda stream: asyncio.run(all_of(stream)), lambda stream: [event.token_id for event in stream]],
    ids=["another event loop", "none"],
)
def test_a_reader_that_is_cancelled_and_goes_on_misses_nothing(target, draft, lag, monkeypatch, rest_of):
    """As where a server waits for a token with a time limit, and tries again; also in another loop, or in none."""
    engine = make(draft, target)
    want = engine.generate(prompt_of(1), 20)[0]
    stream, step, tokens, num_cancelled = engine.stream(prompt_of(1), 20), View(engine).scheduler.step, [], 0

    def slow(*arguments):
        time.sleep(0.05)
        step(*arguments)

    async def read():
        return await asyncio.wait_for(stream.__anext__(), 0.01)

    async def read_on():
        nonlocal num_cancelled
        while len(tokens) < 12:
            try:
                tokens.append((await read()).token_id)
            except asyncio.TimeoutError:
                num_cancelled += 1
        with contextlib.suppress(asyncio.TimeoutError):
            tokens.append((await read()).token_id)

    monkeypatch.setattr(View(engine).scheduler, "step", slow)
    asyncio.run(read_on())
    tokens += rest_of(stream)
    assert tokens == want and num_cancelled and not engine.has_work


@pytest.mark.cross
def test_a_reader_that_is_cancelled_before_its_turn_keeps_nobody_waiting(target, draft):
    """Where all threads of an event loop are busy."""
    engine, may_go_on = make(draft, target), threading.Event()
    want = engine.generate(prompt_of(1), 20)[0]
    stream = engine.stream(prompt_of(1), 20)

    async def read():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, may_go_on.wait, 60)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(stream.__anext__(), 0.01)
        tokens = [event.token_id for event in stream]
        may_go_on.set()
        await busy
        return tokens

    assert asyncio.run(read()) == want and not engine.has_work


def test_what_a_cancelled_reader_would_have_been_told_the_next_one_is(target, draft, monkeypatch):
    engine, is_stepping, may_go_on = make(draft, target), threading.Event(), threading.Event()
    stream = engine.stream(prompt_of(1), 20)
    next(stream)

    def fail(*arguments):
        is_stepping.set()
        assert may_go_on.wait(60)
        raise MemoryError("in a step")

    async def read():
        item = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(is_stepping.wait, 60)
        item.cancel()
        await asyncio.wait((item,))
        may_go_on.set()
        with pytest.raises(MemoryError, match="in a step"):
            await anext(stream)
        return await anext(stream, "the end")

    monkeypatch.setattr(View(engine).scheduler, "step", fail)
    assert asyncio.run(read()) == "the end" and not engine.has_work
