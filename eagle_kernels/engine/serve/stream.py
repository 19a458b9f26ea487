"""Streams of the tokens or the text of one call, as tokens are committed: for `for` and `async for`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

from ...runtime import check
from ...runtime.values import first_line, read_flag
from ..config.eagle_config import EAGLEConfig
from ..requests.inputs import Asked, Params, Prompts, Seeds, read_prompts, read_samples
from ..requests.request import Request, TokenEvent
from ..requests.sampling_params import Features, SamplingParams
from ..step.phases import synchronize
from .lock import Unique
from .output import GenerationOutput, GenerationStats, Ids
from .scheduler import Scheduler
from .session import Session

_logger = logging.getLogger(__name__)

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


class TokenStream(Stream[TokenEvent], Generic[Ids]):
    """Yields a `TokenEvent` for each new token of some requests; other requests in the batch advance with them.

    `EAGLEInference.stream` makes one. It aborts its requests when it is closed or no longer referenced.

    Attributes:
        requests: The `Request` of each prompt, in their order.
        device: Where the models are.
        is_single: Whether there is one prompt, which came without a batch axis.
    """

    def __init__(
        self,
        session: Session,
        requests: list[Request],
        config: EAGLEConfig,
        speculative: bool,
        is_single: bool,
        caller: str,
        num_samples: int = 1,
        first: int = 0,
    ):
        self.requests, self.device, self.is_single = requests, session.device, is_single
        prompt_of = [first + index // num_samples for index in range(len(requests))]
        find_scheduler = partial(_find_scheduler, session, requests, config, speculative, caller, prompt_of)
        steppers = [runner.stepper for runner in find_scheduler().plan.runners]
        self._stats = GenerationStats(
            num_requests=len(requests),
            num_steps=max(stepper.num_steps for stepper in steppers),
            num_draft_tokens=max(stepper.num_nodes for stepper in steppers),
            seeds=[request.seed for request in requests],
            prompt_tokens=sum(len(request.prompt) for request in requests),
        )
        # the generator must not refer to the stream, which would then never be freed by itself
        self._plain_steps: list[tuple[Any, ...]] = []
        super().__init__(_events(session, requests, self._stats, find_scheduler, self._plain_steps, caller), session)

    def __repr__(self) -> str:
        ended = sum(request.is_finished for request in self.requests)
        tokens = sum(len(request.output_ids) for request in self.requests)
        return f"TokenStream({tokens} tokens, {ended} of {len(self.requests)} requests finished)"

    def close(self) -> None:
        """Ends the iterator, and aborts the requests that have not ended."""
        super().close()
        if not self._session.lock.is_foreign:
            self._session.abort(*self.requests)  # a stream that has not begun has submitted none of them

    def time_plain_step(self) -> None:
        """Times a plain step of the requests as they were after their prompts, of which nothing is kept."""
        session, count = self._session, len(self.requests)
        with session.changing("generate"):
            if self._plain_steps and count not in session.plain_step_ms and not session.has_work:
                session.plain_step_ms[count] = None
                try:
                    time_ms, *conditions = self._plain_steps.pop()
                    session.plain_step_ms[count] = time_ms() and time_ms()(*conditions)
                except Exception as error:  # a number less is no harm
                    _logger.warning("EAGLEInference: no plain step could be timed: %s", first_line(error))

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
        stats.plain_step_ms = self._session.plain_step_ms.get(stats.num_requests)
        tokens = [list(request.output_ids) for request in requests]
        output = GenerationOutput(tokens[0] if self.is_single else tokens, stats)
        for name in {name: None for request in requests for name in request.params.scores}:
            asked = [list(getattr(each, name)) if name in each.params.scores else None for each in requests]
            setattr(output, name, asked[0] if self.is_single else asked)
        return output


def _find_scheduler(
    session: Session,
    requests: list[Request],
    config: EAGLEConfig,
    speculative: bool,
    caller: str,
    prompt_of: list[int],
) -> Scheduler:
    """Returns the scheduler for these requests; raises ValueError if its pools can never hold one of them."""
    scheduler = session.scheduler_for(config, speculative)
    for request, prompt in zip(requests, prompt_of):
        reason = scheduler.why_never(request)
        if reason:
            raise ValueError(f"{caller}: prompt {prompt}: {reason}")
    return scheduler


def _events(
    session: Session,
    requests: list[Request],
    stats: GenerationStats,
    find_scheduler: Callable[[], Scheduler],
    plain_steps: list[tuple],
    caller: str,
) -> Iterator[TokenEvent]:
    """Yields the tokens of all requests, in the order in which they become known; see `_plain_step` for the rest."""
    start_s = time.perf_counter()
    with session.changing(caller):
        scheduler = find_scheduler()  # again, since another stream may have replaced it by now
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
            with session.lock.step(caller):
                # Stops at the first token: steps read prompts as well, and as long as other requests keep
                # arriving, there might always be another prompt to read.
                has_token = any(request.has_news for request in requests)
                if has_token or not scheduler.is_reading or all(request.is_finished for request in requests):
                    break
                is_beside = scheduler.runs_beside(requests)
                scheduler.prepare(is_beside)
                if scheduler.is_reading and is_beside:
                    scheduler.advance(session.is_speculating)
        synchronize(session.device)
        with session.changing(caller):
            # The first tokens are known by now; they need not wait for the first step, which is a timed one.
            scheduler.read_what_is_done()
            # all steps until now were for other requests
            first_step = scheduler.num_steps
            if stats.num_draft_tokens > 1:
                plain_steps += _plain_step(session, scheduler, requests)
        stats.prefill_time_s = time.perf_counter() - start_s
        for request in requests:
            yield from request.collect()
        while not all(request.is_finished for request in requests):
            start_s, num_cold = time.perf_counter(), scheduler.num_cold_steps
            with session.lock.step(caller):
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
        session.plain_step_ms[stats.num_requests] = stats.warm_step_ms


def _plain_step(session: Session, scheduler: Scheduler, requests: list[Request]) -> list[tuple]:
    """Returns how to time a plain step of these requests as they are now, later: a method and arguments.

    The method is held weakly, so that a stream holds no pools. Nothing if one was timed for this number of requests,
    others run beside them, some cannot step, or somebody looks at every step.
    """
    rows, runner, state = scheduler.stepping, scheduler.plan.runners[0], scheduler.state
    is_known, is_full = len(requests) in session.plain_step_ms, len(rows) == min(len(requests), state.num_rows)
    if check.DEBUG:  # a step waits for checks, and the timed one has no page for its own keys
        return []
    if is_known or not is_full or scheduler.runs_beside(requests) or runner.stepper.on_tree is not None:
        return []
    num_rows, features = 1 + max(row.index for row in rows), Features.of([row.request.params for row in rows])
    conditions = num_rows, features, state.lengths.clone(), state.block_table.clone()
    return [(weakref.WeakMethod(runner.time_ms), *conditions)]


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
    requests = [session.make_request(index, *each, config) for index, each in enumerate(zip(prompts, params))]
    with session.changing(caller):
        return TokenStream(session, requests, config, speculative, is_single, caller, num_samples, first)


def open_call(
    session: Session,
    config: EAGLEConfig,
    caller: str,
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
    asked = max_new_tokens, seeds, config, overrides, n, sampling_params
    config, params = session.read_call(caller, len(prompts), *asked)
    prompts = [prompt for prompt in prompts for _ in range(n)]
    return open_stream(session, prompts, params, config, speculative, is_single and n == 1, caller, n)
