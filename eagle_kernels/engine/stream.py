"""The tokens of one call, as they are committed: for `for` and for `async for`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from .models.tokenizer import Tokenizer
from .output import GenerationOutput, GenerationStats, TokenEvent
from .request import Request
from .scheduler import Scheduler
from .timing import synchronize

if TYPE_CHECKING:
    from .inference import EAGLEInference


class TokenStream(Iterator[TokenEvent], AsyncIterator[TokenEvent]):
    """Steps the engine until its own requests have ended; those of others that share the batch advance with them.

    A stream that is given up (`close`, or forgotten) aborts its requests.
    """

    def __init__(self, engine: EAGLEInference, scheduler: Scheduler, requests: list[Request], is_single: bool):
        self.requests, self._is_single = requests, is_single
        self._run = _Run(engine, scheduler, requests)
        self._events = self._run.events()

    def __next__(self) -> TokenEvent:
        return next(self._events)

    async def __anext__(self) -> TokenEvent:
        event = await asyncio.to_thread(next, self._events, None)
        if event is None:
            raise StopAsyncIteration
        return event

    def close(self) -> None:
        """Aborts what has not ended."""
        self._events.close()

    def output(self) -> GenerationOutput:
        """Tokens and statistics, whole once the iterator is exhausted."""
        tokens = [list(request.output_ids) for request in self.requests]
        return GenerationOutput(tokens[0] if self._is_single else tokens, self._run.counted())


class _Run:
    """What a stream does; apart from it, so that nothing but its owner holds a stream, and it ends when forgotten."""

    def __init__(self, engine: EAGLEInference, scheduler: Scheduler, requests: list[Request]):
        self._engine, self._scheduler, self._requests = engine, scheduler, requests
        self._steps = scheduler.steps
        steppers = [runner.stepper for runner in scheduler.steps.runners]
        self._stats = GenerationStats(
            num_requests=len(requests),
            num_steps=max(stepper.num_steps for stepper in steppers),
            num_draft_tokens=max(stepper.num_nodes for stepper in steppers),
            seeds=[request.seed for request in requests],
            prompt_tokens=sum(len(request.prompt) for request in requests),
        )

    def events(self) -> Iterator[TokenEvent]:
        scheduler, stats, engine, requests = self._scheduler, self._stats, self._engine, self._requests
        first_step = scheduler.num_steps
        try:
            start_s = time.perf_counter()
            with engine.lock:
                scheduler.use(self._steps)
                scheduler.start_timing()
                for request in requests:
                    scheduler.submit(request)
            while self._reads_prompts():
                pass
            synchronize(engine.device)
            stats.prefill_time_s = time.perf_counter() - start_s
            while not all(request.is_finished for request in requests):
                start_s = time.perf_counter()
                with engine.lock:
                    # another stream's step may have brought something
                    if not any(request.has_news for request in requests):
                        scheduler.step(engine.is_speculating)
                stats.decode_time_s += time.perf_counter() - start_s
                stats.batch_steps = scheduler.num_steps - first_step
                for request in requests:
                    yield from request.collect()
            for request in requests:
                yield from request.collect()
                if request.exception is not None:
                    raise request.exception
        finally:
            with engine.lock:
                for request in requests:
                    scheduler.abort(request)
                scheduler.drain()
                stats.phase_time_ms = scheduler.take_phase_times_ms(stats.batch_steps)
            engine.note_plain_step(self.counted())

    def _reads_prompts(self) -> bool:
        """Reads a part of the prompts that can be read now; whether there was one."""
        with self._engine.lock:
            is_reading = self._scheduler.is_reading
            if is_reading:
                self._scheduler.prepare()
        return is_reading

    def counted(self) -> GenerationStats:
        """The statistics with what the requests tell."""
        stats, requests = self._stats, self._requests
        counts = [count for request in requests for count in request.accepted]
        stats.generated_tokens = sum(len(request.output_ids) for request in requests)
        stats.steps, stats.accepted = len(counts), sum(counts)
        stats.drafted = sum(request.drafted for request in requests)
        stats.accepted_per_depth = [sum(count > depth for count in counts) for depth in range(stats.num_steps)]
        stats.finish_reasons = [request.finish_reason for request in requests]
        stats.plain_step_ms = self._engine.plain_step_ms(stats.num_requests)
        return stats


class TextStream(Iterator[str], AsyncIterator[str]):
    """The text of a `TokenStream` of one request, in pieces of whole characters; it ends before a stop string.

    Where text may turn out to begin a stop string it is held back until that is known.
    """

    def __init__(self, tokens: TokenStream, tokenizer: Tokenizer):
        self._tokens = tokens
        self._pieces = _pieces(tokens, tokenizer)

    def __next__(self) -> str:
        return next(self._pieces)

    async def __anext__(self) -> str:
        piece = await asyncio.to_thread(next, self._pieces, None)
        if piece is None:
            raise StopAsyncIteration
        return piece

    def close(self) -> None:
        """Aborts the request, if it has not ended."""
        self._pieces.close()
        self._tokens.close()

    def output(self) -> GenerationOutput:
        """As of the tokens."""
        return self._tokens.output()


def _pieces(tokens: TokenStream, tokenizer: Tokenizer) -> Iterator[str]:
    (request,) = tokens.requests
    if request.text is None:
        detokenizer = tokenizer.detokenizer()
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
