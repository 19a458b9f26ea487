"""The tokens of one call, as they are committed: for `for` and for `async for`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from ..config.eagle_config import EAGLEConfig
from ..models.tokenizer import Tokenizer
from ..requests.request import Request, TokenEvent
from ..requests.sampling_params import SamplingParams
from ..step.phases import synchronize
from .output import GenerationOutput, GenerationStats
from .scheduler import Scheduler
from .session import Session

Item = TypeVar("Item")


class _Stream(Generic[Item], Iterator[Item], AsyncIterator[Item]):
    """Serves one generator to `for` and `async for`; one thread at a time reads it.

    If an `async for` is cancelled in the middle of a step, its thread still ends the step, and the next reader gets the
    outcome, be it an item, the end or an error.
    """

    def __init__(self, items: Generator[Item, None, None]):
        self._items = items
        # held while a step runs, so an event loop must never wait for it
        self._turn = threading.Lock()
        # outcomes whose readers were cancelled, each known once its reader's thread has given up `_turn`
        self._left: deque[Future[Item | None]] = deque()

    def __next__(self) -> Item:
        with self._turn:
            item = self._read()
        if item is None:
            raise StopIteration
        return item

    async def __anext__(self) -> Item:
        outcome = Future()
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._bring, outcome)
        except BaseException:
            if not outcome.cancel():  # it is being read, or has been
                self._left.appendleft(outcome)
            raise
        try:
            item = outcome.result()
        finally:
            del outcome  # else an error, which holds this frame, would hold itself
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
        """Aborts what has not ended."""
        with self._turn:
            self._items.close()
            self._left.clear()

    async def aclose(self) -> None:
        """Does what `close` does, for `contextlib.aclosing`."""
        await asyncio.to_thread(self.close)


class TokenStream(_Stream[TokenEvent]):
    """The tokens of some requests as they are committed; requests of others that share the batch advance with them.

    A stream that is closed or forgotten aborts its requests.
    """

    def __init__(
        self, session: Session, requests: list[Request], config: EAGLEConfig, speculative: bool, is_single: bool
    ):
        self.requests, self.device, self._is_single = requests, session.device, is_single
        self._run = _Run(session, requests, config, speculative)
        super().__init__(self._run.events())

    def fits_together(self) -> bool:
        """Returns whether all its requests can run at once, with the batch for themselves."""
        return self._run.fits_together()

    def close(self) -> None:
        """Aborts what has not ended."""
        super().close()
        for request in self.requests:  # of a stream that has not begun
            request.finish_reason = request.finish_reason or "abort"

    def output(self) -> GenerationOutput:
        """Returns tokens and statistics, complete once the iterator is exhausted."""
        tokens = [list(request.output_ids) for request in self.requests]
        logprobs = [list(request.logprobs) if request.params.logprobs else None for request in self.requests]
        output = GenerationOutput(tokens[0] if self._is_single else tokens, self._run.statistics())
        output.logprobs = logprobs[0] if self._is_single else None if None in logprobs else logprobs
        return output


class _Run:
    """The work of a stream. The stream's generator holds this and not the stream, so a forgotten stream is closed."""

    def __init__(self, session: Session, requests: list[Request], config: EAGLEConfig, speculative: bool):
        self._session, self._requests, self._config, self._speculative = session, requests, config, speculative
        steppers = [runner.stepper for runner in self._find_scheduler().plan.runners]
        self._stats = GenerationStats(
            num_requests=len(requests),
            num_steps=max(stepper.num_steps for stepper in steppers),
            num_draft_tokens=max(stepper.num_nodes for stepper in steppers),
            seeds=[request.seed for request in requests],
            prompt_tokens=sum(len(request.prompt) for request in requests),
        )

    def events(self) -> Iterator[TokenEvent]:
        """Yields the tokens of all requests, in the order in which they become known."""
        stats, session, requests = self._stats, self._session, self._requests
        start_s = time.perf_counter()
        with session.lock:
            scheduler = self._find_scheduler()  # until now another stream may have made a new one
            scheduler.start_timing()
            for request in requests:
                scheduler.submit(request)
            first_step, first_cold, cold_s = scheduler.num_steps, scheduler.num_cold_steps, 0.0
        try:
            while self._reads_prompts(scheduler):
                pass
            synchronize(session.device)
            with session.lock:
                # the first tokens are known: the first step, which is timed, would keep them back
                scheduler.read_what_is_done()
                # the steps so far were for others
                first_step, first_cold = scheduler.num_steps, scheduler.num_cold_steps
            stats.prefill_time_s = time.perf_counter() - start_s
            for request in requests:
                yield from request.collect()
            while not all(request.is_finished for request in requests):
                start_s, num_cold = time.perf_counter(), scheduler.num_cold_steps
                with session.lock:
                    # another stream's step may have brought something
                    if not any(request.has_news for request in requests):
                        scheduler.step(session.is_speculating)
                elapsed_s = time.perf_counter() - start_s
                stats.decode_time_s += elapsed_s
                cold_s += elapsed_s if scheduler.num_cold_steps > num_cold else 0.0
                stats.batch_steps = scheduler.num_steps - first_step
                for request in requests:
                    yield from request.collect()
            for request in requests:
                yield from request.collect()
                request.raise_error()
        finally:
            with session.lock:
                for request in requests:
                    scheduler.abort(request)
                scheduler.drain()
                stats.phase_time_ms = scheduler.take_phase_times_ms(stats.batch_steps)
            num_warm = stats.batch_steps - (scheduler.num_cold_steps - first_cold)
            if stats.num_draft_tokens == 1 and num_warm > 0:
                session.note_plain_step(stats.num_requests, 1e3 * (stats.decode_time_s - cold_s) / num_warm)

    def fits_together(self) -> bool:
        with self._session.lock:
            return self._find_scheduler().holds(self._requests)

    def statistics(self) -> GenerationStats:
        """Returns the statistics so far, with what the requests count themselves."""
        stats, requests = self._stats, self._requests
        counts = [count for request in requests for count in request.accepted]
        stats.generated_tokens = sum(len(request.output_ids) for request in requests)
        stats.steps, stats.accepted = len(counts), sum(counts)
        stats.levels = sum(request.levels for request in requests)
        stats.drafted = sum(request.drafted for request in requests)
        stats.accepted_per_depth = [sum(count > depth for count in counts) for depth in range(stats.num_steps)]
        stats.finish_reasons = [request.finish_reason for request in requests]
        stats.plain_step_ms = self._session.plain_step_ms(stats.num_requests)
        return stats

    def _find_scheduler(self) -> Scheduler:
        """Returns the scheduler for these requests; raises ValueError where its pools can never hold one of them."""
        scheduler = self._session.scheduler_for(self._config, self._speculative)
        for request in self._requests:
            reason = scheduler.why_never(request)
            if reason:
                raise ValueError(f"generate: prompt {request.id}: {reason}")
        return scheduler

    def _reads_prompts(self, scheduler: Scheduler) -> bool:
        """Reads a part of the prompts, then lets other requests step; returns whether to go on.

        It ends as soon as an own request has a token: steps admit waiting requests, so there may be prompts for ever.
        """
        session, requests = self._session, self._requests
        with session.lock:
            is_over = any(request.has_news for request in requests) or all(request.is_finished for request in requests)
            if is_over or not scheduler.is_reading:
                return False
            scheduler.prepare()
            if scheduler.is_reading and scheduler.runs_beside(requests):
                scheduler.advance(session.is_speculating)
        return True


def open_stream(
    session: Session,
    prompts: list[list[int]],
    params: Sequence[SamplingParams],
    config: EAGLEConfig,
    speculative: bool,
    is_single: bool = False,
) -> TokenStream:
    """Returns the stream of some prompts, each with its params; raises ValueError for one that can never run."""
    for index, (prompt, wanted) in enumerate(zip(prompts, params)):
        reason = session.why_unfit(prompt, wanted.max_new_tokens, config, speculative)
        if reason:
            raise ValueError(f"generate: {reason}".replace("the prompt", f"prompt {index}"))
    requests = [session.make_request(index, *each, config) for index, each in enumerate(zip(prompts, params))]
    with session.lock:
        return TokenStream(session, requests, config, speculative, is_single)


class TextStream(_Stream[str]):
    """The text of a `TokenStream` of one request, in pieces of whole characters; it ends before a stop string.

    Text that may turn out to begin a stop string is held back until that is known.
    """

    def __init__(self, tokens: TokenStream, tokenizer: Tokenizer):
        self._tokens = tokens
        super().__init__(_pieces(tokens, tokenizer))

    def close(self) -> None:
        """Aborts the request, if it has not ended."""
        super().close()
        self._tokens.close()

    def output(self) -> GenerationOutput:
        """Returns what the stream of tokens returns."""
        return self._tokens.output()


def _pieces(tokens: TokenStream, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the text of a stream of one request, without what a stop string cuts off."""
    (request,) = tokens.requests
    if request.text is None:
        detokenizer = tokenizer.detokenizer(request.prompt)
        for event in tokens:
            piece = detokenizer.push([event.token_id])
            if piece:
                yield piece
        rest = detokenizer.finish()
        if rest:
            yield rest
        return
    shown, held = 0, max(map(len, request.params.stop)) - 1
    for _ in tokens:
        sure = len(request.text) - (0 if request.is_finished else held)
        if sure > shown:
            yield request.text[shown:sure]
            shown = sure
    if len(request.text) > shown:
        yield request.text[shown:]
