"""Streams of the tokens or the text of one call, as tokens are committed: for `for` and `async for`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from ...runtime.values import is_terminal, read_flag
from ..config.eagle_config import EAGLEConfig
from ..requests.inputs import Asked, Params, Prompts, Seeds, read_prompts, read_samples
from ..requests.request import Request, TokenEvent
from ..requests.sampling_params import SamplingParams
from ..step.phases import synchronize
from .lock import Unique
from .output import GenerationOutput, GenerationStats, Ids
from .scheduler import Scheduler
from .session import Session

Item = TypeVar("Item", covariant=True)


class Stream(Unique, Generic[Item], Iterator[Item], AsyncIterator[Item]):
    """Serves one generator to `for` and `async for`; one thread at a time reads it.

    If an `async for` is cancelled in the middle of a step, its thread still finishes the step, and the next reader gets
    the outcome: an item, the end or an error.
    """

    def __init__(self, items: Generator[Item, None, None], session: Session):
        self._items, self._session = items, session
        # held while a step runs, so an event loop must never wait for it; code inside the step finds the items running
        self._turn = threading.RLock()
        # outcomes whose readers were cancelled; complete for whoever holds `_turn`
        self._left: deque[Future[Item | None]] = deque()

    def __next__(self) -> Item:
        self._session.lock.refuse("stream")
        with self._turn:
            item = self._read()
        if item is None:
            raise StopIteration
        return item

    async def __anext__(self) -> Item:
        self._session.lock.refuse("stream")
        outcome = Future()
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._bring, outcome)
        except BaseException:
            if not outcome.cancel():  # reading has begun
                self._left.appendleft(outcome)
            raise
        else:
            item = outcome.result()
        finally:
            del outcome  # an error holds this frame, so the frame must not hold the error
        if item is None:
            raise StopAsyncIteration
        return item

    def _bring(self, outcome: Future[Item | None]) -> None:
        """Reads into `outcome`, unless its reader has been cancelled in the meantime."""
        with self._turn:
            if outcome.set_running_or_notify_cancel():
                try:
                    outcome.set_result(self._read())
                except BaseException as error:
                    outcome.set_exception(error)
                finally:
                    del outcome  # as above

    def _read(self) -> Item | None:
        """Returns the next item, None at the end, or raises the next error; the caller holds `_turn`."""
        return self._left.popleft().result() if self._left else next(self._items, None)

    def close(self) -> None:
        """Ends the iterator, and drops what nobody has received; one that is being read inside a step ends later."""
        lock = self._session.lock
        if not lock.is_foreign and self._turn.acquire(blocking=not lock.is_in_step):
            try:
                if not self._items.gi_running:
                    self._items.close()
                    self._left.clear()
            finally:
                self._turn.release()

    async def aclose(self) -> None:
        """Does what `close` does, for `contextlib.aclosing`."""
        await asyncio.to_thread(self.close)


class Call(NamedTuple):
    """Holds the requests of a call, and what they are decoded with.

    caller       what errors name
    first        the number of the first prompt, as errors tell it
    num_samples  how many of the requests, one after another, have the same prompt
    """

    caller: str
    requests: list[Request]
    config: EAGLEConfig
    speculative: bool
    first: int
    num_samples: int

    def scheduler_of(self, session: Session) -> Scheduler:
        """Returns the scheduler for the requests; raises ValueError if its pools can never hold one of them."""
        scheduler = session.scheduler_for(self.config, self.speculative)
        for index, request in enumerate(self.requests):
            reason = scheduler.why_never(request)
            if reason:
                raise ValueError(f"{self.caller}: prompt {self.first + index // self.num_samples}: {reason}")
        return scheduler


class TokenStream(Stream[TokenEvent], Generic[Ids]):
    """Yields a `TokenEvent` for each new token of some requests; other requests in the batch advance with them.

    Returned by `EAGLEInference.stream`. Aborts its requests when it is closed or no longer referenced.

    Attributes:
        requests: The `Request` of each prompt, in their order.
        device: Where the models are.
        is_single: Whether there is one prompt, which came without a batch axis.
    """

    def __init__(self, session: Session, call: Call, is_single: bool):
        self.requests, self.device, self.is_single = call.requests, session.device, is_single
        steppers = [runner.stepper for runner in call.scheduler_of(session).plan.runners]
        self._stats = GenerationStats(
            num_requests=len(call.requests),
            num_steps=max(stepper.num_steps for stepper in steppers),
            num_draft_tokens=max(stepper.num_nodes for stepper in steppers),
            seeds=[request.seed for request in call.requests],
            prompt_tokens=sum(len(request.prompt) for request in call.requests),
        )
        if call.caller == "generate":  # a stream times no plain step, since somebody may time the stream
            self._stats.measured_by(session.time_plain_step)
        # the generator must not refer to the stream, which would then never be freed by itself
        super().__init__(_events(session, call, self._stats), session)

    def __repr__(self) -> str:
        ended = sum(request.is_finished for request in self.requests)
        tokens = sum(len(request.output_ids) for request in self.requests)
        return f"TokenStream({tokens} tokens, {ended} of {len(self.requests)} requests finished)"

    def close(self) -> None:
        """Ends the iterator, and aborts the requests that have not ended."""
        super().close()
        if not self._session.lock.is_foreign:
            self._session.abort(*self.requests)  # a stream that has not begun has submitted none of them

    def output(self) -> GenerationOutput[Ids]:
        """Returns the tokens and statistics so far, which are complete after the last token."""
        stats, requests = self._stats, self.requests
        counts = [count for request in requests for count in request.accepted]
        stats.shared_tokens = sum(request.shared_tokens for request in requests)
        stats.generated_tokens = sum(len(request.output_ids) for request in requests)
        stats.steps, stats.accepted = len(counts), sum(counts)
        stats.levels = sum(request.levels for request in requests)
        stats.drafted = sum(request.drafted for request in requests)
        stats.accepted_per_depth = [sum(count > depth for count in counts) for depth in range(stats.num_steps)]
        stats.finish_reasons = [request.finish_reason for request in requests]
        stats.plain_step_ms = self._session.plain_steps.known_ms.get(stats.num_requests)
        tokens = [list(request.output_ids) for request in requests]
        output = GenerationOutput(tokens[0] if self.is_single else tokens, stats)
        for name in {name: None for request in requests for name in request.params.scores}:
            asked = [list(getattr(each, name)) if name in each.params.scores else None for each in requests]
            setattr(output, name, asked[0] if self.is_single else asked)
        return output


def _events(session: Session, call: Call, stats: GenerationStats) -> Iterator[TokenEvent]:
    """Yields the tokens of all requests of a call, in the order in which they become known."""
    requests, start_s = call.requests, time.perf_counter()
    with session.changing(call.caller):
        scheduler = call.scheduler_of(session)  # again, since another stream may have replaced it by now
        scheduler.phase_times.restart()
        try:
            for request in requests:
                scheduler.submit(request)
        except BaseException:  # Ctrl-C: none may stay that nobody would end
            scheduler.drop(requests)
            raise
        first_step, waiting = scheduler.num_steps, contextlib.nullcontext()
    try:
        while True:  # reads prompts
            with session.lock.step(call.caller):
                # Stops at the first token: steps read prompts as well, and as long as other requests keep
                # arriving, there might always be another prompt to read.
                has_token = any(request.has_news for request in requests)
                if has_token or not scheduler.is_reading or all(request.is_finished for request in requests):
                    break
                scheduler.step(session.is_speculating, requests)
        synchronize(session.device)
        with session.changing(call.caller):
            # The first tokens are known by now; they need not wait for the first step, which is a timed one.
            scheduler.read_what_is_done()
            # all steps until now were for other requests
            first_step = scheduler.num_steps
            if stats.num_draft_tokens > 1:
                session.plain_steps.note(scheduler, requests)
        stats.prefill_time_s = time.perf_counter() - start_s
        for request in requests:
            yield from request.collect()
        while not all(request.is_finished for request in requests):
            start_s, num_cold = time.perf_counter(), scheduler.num_cold_steps
            with session.lock.step(call.caller):
                # no step is needed if another stream's step has brought something
                if not any(request.has_news for request in requests):
                    scheduler.step(session.is_speculating)
            elapsed_s = time.perf_counter() - start_s
            stats.decode_time_s += elapsed_s
            if scheduler.num_cold_steps > num_cold:
                stats.cold_time_s += elapsed_s
                stats.cold_steps += scheduler.num_cold_steps - num_cold
            stats.batch_steps = scheduler.num_steps - first_step
            for request in requests:
                yield from request.collect()
        for request in requests:
            yield from request.collect()
            request.raise_error()
        waiting = session.lock
    finally:  # the garbage collector may come in the middle of a step, and must not wait for another thread's
        with waiting:
            session.lock.later(partial(_end, session, scheduler, requests, stats))


def _end(session: Session, scheduler: Scheduler, requests: list[Request], stats: GenerationStats) -> None:
    """Ends the requests of a stream, and completes its statistics."""
    scheduler.drop(requests)
    scheduler.drain()
    stats.phase_time_ms = scheduler.phase_times.take_ms(stats.batch_steps)
    if stats.num_draft_tokens == 1 and stats.batch_steps > stats.cold_steps:
        session.plain_steps.known_ms[stats.num_requests] = stats.warm_step_ms


def open_stream(
    session: Session,
    prompts: list[list[int]],
    params: Sequence[SamplingParams],
    config: EAGLEConfig,
    speculative: bool,
    is_single: bool = False,
    caller: str = "generate",
    num_samples: int = 1,
    first: int = 0,
) -> TokenStream:
    """Returns a stream for some prompts, each with its params; raises ValueError for a prompt that can never run.

    caller, num_samples, first: what the errors name, how many of the prompts, one after another, are the same, and the
    number of the first one.
    """
    for index, (prompt, wanted) in enumerate(zip(prompts, params)):
        reason = session.why_unfit(prompt, wanted.max_new_tokens, config, speculative)
        if reason:
            raise ValueError(f"{caller}: {reason}".replace("the prompt", f"prompt {first + index // num_samples}"))
    requests = [
        session.make_request(index, prompt, wanted, config)
        for index, (prompt, wanted) in enumerate(zip(prompts, params))
    ]
    with session.changing(caller):
        return TokenStream(session, Call(caller, requests, config, speculative, first, num_samples), is_single)


def open_call(
    session: Session,
    config: EAGLEConfig,
    caller: str,
    *,
    input_ids: Prompts,
    max_new_tokens: Asked,
    sampling_params: Params,
    n: int,
    seeds: Seeds,
    speculative: bool,
    overrides: dict[str, Any],
) -> TokenStream:
    """Returns the stream of a call with these arguments; see `EAGLEInference.generate`."""
    session.lock.refuse(caller)
    speculative = read_flag(f"{caller}: speculative", speculative)
    prompts, is_single = read_prompts(input_ids, f"{caller}: input_ids", session.tokenizer_for)
    n = read_samples(n, len(prompts), caller)
    config, params = session.read_call(
        caller,
        config,
        count=len(prompts),
        max_new_tokens=max_new_tokens,
        seeds=seeds,
        overrides=overrides,
        num_samples=n,
        sampling_params=sampling_params,
    )
    prompts = [prompt for prompt in prompts for _ in range(n)]
    return open_stream(session, prompts, params, config, speculative, is_single and n == 1, caller, n)


@contextmanager
def progress_bar(caller: str, total: int, unit: str, wanted: bool | None) -> Iterator[Any]:
    """Gives a bar of tqdm until the block ends or fails, or None; for `wanted` None only a terminal has a bar."""
    if wanted is not None:
        wanted = read_flag(f"{caller}: progress", wanted)
    if wanted is False or wanted is None and not is_terminal(sys.stderr):
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        if wanted:
            raise ValueError(f"{caller}: progress=True needs tqdm: pip install tqdm") from None
        yield None
        return
    with tqdm(total=total, unit=unit, file=sys.stderr) as bar:
        yield bar


def run(stream: TokenStream, caller: str, num_samples: int, wanted: bool | None) -> None:
    """Reads a stream to its end. Of several prompts, or if `wanted`, a bar counts the requests that have ended."""
    wanted = False if wanted is None and len(stream.requests) == num_samples else wanted
    with progress_bar(caller, len(stream.requests), "request", wanted) as bar:
        if bar is None:
            for _ in stream:
                pass
            return
        start_s, ended = time.perf_counter(), set()
        for count, event in enumerate(stream, start=1):
            if stream.requests[event.request].is_finished and event.request not in ended:
                ended.add(event.request)
                speed = count / (time.perf_counter() - start_s)
                bar.set_postfix_str(f"{speed:.1f} tokens/s", refresh=False)
                bar.update()
