"""The tokens of one call, as they are committed: for `for` and for `async for`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from ..models.tokenizer import Tokenizer
from ..requests.request import Request, TokenEvent
from ..step.phases import synchronize
from .output import GenerationOutput, GenerationStats
from .scheduler import Scheduler

if TYPE_CHECKING:
    from ..inference import EAGLEInference


Item = TypeVar("Item")


@dataclass(eq=False)
class _Brought(Generic[Item]):
    """What a step of a generator brought: an item, None at the end, or an error."""

    item: Item | None = None
    error: BaseException | None = None

    def tell(self) -> Item | None:
        """The item, or raises the error; once, since it holds every frame that it passes from then on."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
            return self.item
        finally:
            del error


@dataclass(eq=False)
class _Reader(Generic[Item]):
    """Who waits in an event loop, until it is cancelled."""

    brought: _Brought[Item] | None = None
    is_gone: bool = False


class _Stream(Generic[Item], Iterator[Item], AsyncIterator[Item]):
    """One generator for `for` and `async for`. Threads take turns: who leaves an `async for` in the middle of a step,
    being cancelled, leaves a thread behind that ends it. What that brings is the next reader's, whoever that is."""

    def __init__(self, items: Generator[Item, None, None]):
        self._items, self._turn = items, threading.Lock()
        self._left: deque[_Brought[Item]] = deque()
        # never held while a step runs: an event loop takes it
        self._handing = threading.Lock()

    def __next__(self) -> Item:
        with self._turn:
            brought = self._read()
        item = brought.tell()
        if item is None:
            raise StopIteration
        return item

    async def __anext__(self) -> Item:
        reader = _Reader()
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._bring, reader)
        except BaseException:
            with self._handing:
                reader.is_gone = True
                if reader.brought is not None:  # in the meantime
                    self._left.appendleft(reader.brought)
            raise
        item = reader.brought.tell()
        if item is None:
            raise StopAsyncIteration
        return item

    def _bring(self, reader: _Reader[Item]) -> None:
        with self._turn:
            if reader.is_gone:
                return
            brought = self._read()
            with self._handing:
                if reader.is_gone:
                    self._left.appendleft(brought)
                else:
                    reader.brought = brought

    def _read(self) -> _Brought[Item]:
        """In one's turn."""
        if self._left:
            return self._left.popleft()
        brought = _Brought()
        try:
            brought.item = next(self._items, None)
        except BaseException as error:
            brought.error = error
        return brought

    def close(self) -> None:
        """Aborts what has not ended."""
        with self._turn:
            self._items.close()
            self._left.clear()

    async def aclose(self) -> None:
        """`close`, as `contextlib.aclosing` calls it."""
        await asyncio.to_thread(self.close)


class TokenStream(_Stream[TokenEvent]):
    """Steps the engine until its own requests have ended; those of others that share the batch advance with them.

    A stream that is given up (`close`, or forgotten) aborts its requests.

    find_scheduler  the engine's for these requests: until a stream begins another one may take its place
    """

    def __init__(
        self,
        engine: EAGLEInference,
        find_scheduler: Callable[[], Scheduler],
        requests: list[Request],
        is_single: bool,
    ):
        self.requests, self.device, self._is_single = requests, engine.device, is_single
        self._run = _Run(engine, find_scheduler, requests)
        super().__init__(self._run.events())

    def fits_together(self) -> bool:
        """Whether none of its requests would wait for another one, with the batch for themselves."""
        return self._run.fits_together()

    def close(self) -> None:
        """Aborts what has not ended."""
        super().close()
        for request in self.requests:  # of a stream that has not begun
            request.finish_reason = request.finish_reason or "abort"

    def output(self) -> GenerationOutput:
        """Tokens and statistics, whole once the iterator is exhausted."""
        tokens = [list(request.output_ids) for request in self.requests]
        logprobs = [list(request.logprobs) if request.params.logprobs else None for request in self.requests]
        output = GenerationOutput(tokens[0] if self._is_single else tokens, self._run.counted())
        output.logprobs = logprobs[0] if self._is_single else None if None in logprobs else logprobs
        return output


class _Run:
    """What a stream does; apart from it, so that nothing but its owner holds a stream, and it ends when forgotten."""

    def __init__(self, engine: EAGLEInference, find_scheduler: Callable[[], Scheduler], requests: list[Request]):
        self._engine, self._find_scheduler, self._requests = engine, find_scheduler, requests
        steppers = [runner.stepper for runner in find_scheduler().steps.runners]
        self._stats = GenerationStats(
            num_requests=len(requests),
            num_steps=max(stepper.num_steps for stepper in steppers),
            num_draft_tokens=max(stepper.num_nodes for stepper in steppers),
            seeds=[request.seed for request in requests],
            prompt_tokens=sum(len(request.prompt) for request in requests),
        )

    def events(self) -> Iterator[TokenEvent]:
        stats, engine, requests = self._stats, self._engine, self._requests
        start_s = time.perf_counter()
        with engine.lock:
            scheduler = self._find_scheduler()
            scheduler.start_timing()
            for request in requests:
                scheduler.submit(request)
            first_step, first_cold, cold_s = scheduler.num_steps, scheduler.num_cold_steps, 0.0
        try:
            while self._reads_prompts(scheduler):
                pass
            synchronize(engine.device)
            with engine.lock:  # the first tokens, which are known: the first step, which is timed, would keep them back
                scheduler.read_what_is_done()
                # the steps so far were for others
                first_step, first_cold = scheduler.num_steps, scheduler.num_cold_steps
            stats.prefill_time_s = time.perf_counter() - start_s
            for request in requests:
                yield from request.collect()
            while not all(request.is_finished for request in requests):
                start_s, num_cold = time.perf_counter(), scheduler.num_cold_steps
                with engine.lock:
                    # another stream's step may have brought something
                    if not any(request.has_news for request in requests):
                        scheduler.step(engine.is_speculating)
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
            with engine.lock:
                for request in requests:
                    scheduler.abort(request)
                scheduler.drain()
                stats.phase_time_ms = scheduler.take_phase_times_ms(stats.batch_steps)
            num_warm = stats.batch_steps - (scheduler.num_cold_steps - first_cold)
            if stats.num_draft_tokens == 1 and num_warm > 0:
                engine.note_plain_step(stats.num_requests, 1e3 * (stats.decode_time_s - cold_s) / num_warm)

    def fits_together(self) -> bool:
        with self._engine.lock:
            return self._find_scheduler().holds(self._requests)

    def _reads_prompts(self, scheduler: Scheduler) -> bool:
        """Reads a part of the prompts that can be read now, and lets others step before the next; whether there was one
        and its own requests have nothing to tell yet: steps let in who waits, so there may be a part for ever."""
        requests = self._requests
        with self._engine.lock:
            is_over = any(request.has_news for request in requests) or all(request.is_finished for request in requests)
            if is_over or not scheduler.is_reading:
                return False
            scheduler.prepare()
            if scheduler.is_reading and scheduler.runs_beside(requests):
                scheduler.advance(self._engine.is_speculating)
        return True

    def counted(self) -> GenerationStats:
        """The statistics with what the requests tell."""
        stats, requests = self._stats, self._requests
        counts = [count for request in requests for count in request.accepted]
        stats.generated_tokens = sum(len(request.output_ids) for request in requests)
        stats.steps, stats.accepted = len(counts), sum(counts)
        stats.levels = sum(request.levels for request in requests)
        stats.drafted = sum(request.drafted for request in requests)
        stats.accepted_per_depth = [sum(count > depth for count in counts) for depth in range(stats.num_steps)]
        stats.finish_reasons = [request.finish_reason for request in requests]
        stats.plain_step_ms = self._engine.plain_step_ms(stats.num_requests)
        return stats


class TextStream(_Stream[str]):
    """The text of a `TokenStream` of one request, in pieces of whole characters; it ends before a stop string.

    Where text may turn out to begin a stop string it is held back until that is known.
    """

    def __init__(self, tokens: TokenStream, tokenizer: Tokenizer):
        self._tokens = tokens
        super().__init__(_pieces(tokens, tokenizer))

    def close(self) -> None:
        """Aborts the request, if it has not ended."""
        super().close()
        self._tokens.close()

    def output(self) -> GenerationOutput:
        """As of the tokens."""
        return self._tokens.output()


def _pieces(tokens: TokenStream, tokenizer: Tokenizer) -> Iterator[str]:
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
