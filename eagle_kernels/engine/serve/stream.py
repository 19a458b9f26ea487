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
from typing import Any, Generic, NamedTuple, overload

from typing_extensions import TypeVar

from ...runtime.values import is_terminal, read_flag
from ..config.eagle_config import EAGLEConfig
from ..models.tokenizer import Tokenizer
from ..requests.request import Request, TokenEvent
from ..requests.sampling_params import SamplingParams
from ..step.phases import synchronize
from .lock import Unique
from .output import GenerationOutput, GenerationStats, Ids
from .scheduler import Scheduler
from .session import Session


class TextPiece(NamedTuple):
    """Holds new text from one of several requests.

    Attributes:
        request: The index of its prompt; with n samples, prompt * n + sample.
        text: The text, in whole characters.
    """

    request: int
    text: str


Item = TypeVar("Item", covariant=True)
Piece = TypeVar("Piece", covariant=True, default=str | TextPiece)


class Stream(Unique, Generic[Item], Iterator[Item], AsyncIterator[Item]):
    """Serves one generator to `for` and `async for`; one thread at a time reads it. If an `async for` is cancelled in
    the middle of a step, its thread still finishes the step, and the next reader gets the outcome: an item, the end or
    an error."""

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


class Call:
    """Serves the requests of one call, and measures the steps that they take.
    caller: what errors name.
    first: the number of the first prompt, as errors tell it.
    num_samples: how many of the requests, one after another, have the same prompt."""

    def __init__(
        self, session: Session, config: EAGLEConfig, caller: str, requests: list[Request], speculative: bool,
        first: int, num_samples: int,
    ):  # fmt: skip
        self.session, self.requests = session, requests
        self._config, self._caller, self._speculative = config, caller, speculative
        self._first, self._num_samples = first, num_samples
        steppers = [runner.stepper for runner in self._scheduler().plan.runners]
        self._num_steps = max(stepper.num_steps for stepper in steppers)
        self._num_draft_tokens = max(stepper.num_nodes for stepper in steppers)
        self._times: dict[str, Any] = {"batch_steps": 0, "cold_steps": 0, "decode_time_s": 0.0, "cold_time_s": 0.0}

    def _scheduler(self) -> Scheduler:
        """Returns the scheduler for the requests; raises ValueError if its pools can never hold one of them."""
        scheduler = self.session.scheduler_for(self._config, self._speculative)
        for index, request in enumerate(self.requests):
            reason = scheduler.why_never(request)
            if reason:
                raise ValueError(f"{self._caller}: prompt {self._first + index // self._num_samples}: {reason}")
        return scheduler

    def events(self) -> Iterator[TokenEvent]:
        """Yields the tokens of all requests, in the order in which they become known."""
        session, requests, times, start_s = self.session, self.requests, self._times, time.perf_counter()
        with session.changing(self._caller):
            scheduler = self._scheduler()  # again, since another stream may have replaced it by now
            scheduler.phase_times.restart()
            try:
                for request in requests:
                    scheduler.submit(request)
            except BaseException:  # Ctrl-C: none may stay that nobody would end
                scheduler.drop(requests)
                raise
            waiting = contextlib.nullcontext()
        try:
            while True:  # reads prompts
                with session.lock.step(self._caller):
                    # Stops at the first token: steps read prompts as well, and as long as other requests keep
                    # arriving, there might always be another prompt to read.
                    has_token = any(request.has_news for request in requests)
                    if has_token or not scheduler.is_reading or all(request.is_finished for request in requests):
                        break
                    scheduler.step(session.is_speculating, requests)
            synchronize(session.device)
            with session.changing(self._caller):
                # The first tokens are known by now; they need not wait for the first step, which is a timed one.
                scheduler.read_what_is_done()
                # all steps until now were for other requests
                first_step = scheduler.num_steps
                if self._num_draft_tokens > 1:
                    session.plain_steps.note(scheduler, requests)
            times["prefill_time_s"] = time.perf_counter() - start_s
            for request in requests:
                yield from request.collect()
            while not all(request.is_finished for request in requests):
                start_s, num_cold = time.perf_counter(), scheduler.num_cold_steps
                with session.lock.step(self._caller):
                    # no step is needed if another stream's step has brought something
                    if not any(request.has_news for request in requests):
                        scheduler.step(session.is_speculating)
                elapsed_s = time.perf_counter() - start_s
                times["decode_time_s"] += elapsed_s
                if scheduler.num_cold_steps > num_cold:
                    times["cold_time_s"] += elapsed_s
                    times["cold_steps"] += scheduler.num_cold_steps - num_cold
                times["batch_steps"] = scheduler.num_steps - first_step
                for request in requests:
                    yield from request.collect()
            for request in requests:
                yield from request.collect()
                request.raise_error()
            waiting = session.lock
        finally:  # the garbage collector may come in the middle of a step, and must not wait for another thread's
            with waiting:
                session.lock.later(partial(self._end, scheduler))

    def _end(self, scheduler: Scheduler) -> None:
        """Ends the requests, and completes the statistics."""
        scheduler.drop(self.requests)
        scheduler.drain()
        self._times["phase_time_ms"] = scheduler.phase_times.take_ms(self._times["batch_steps"])
        if self._num_draft_tokens == 1 and self._times["batch_steps"] > self._times["cold_steps"]:
            self.session.plain_steps.known_ms[len(self.requests)] = self.stats().warm_step_ms

    def stats(self) -> GenerationStats:
        """Returns the statistics so far."""
        requests = self.requests
        counts = [count for request in requests for count in request.accepted]
        stats = GenerationStats(
            num_requests=len(requests), num_steps=self._num_steps, num_draft_tokens=self._num_draft_tokens,
            seeds=[request.seed for request in requests],
            prompt_tokens=sum(len(request.prompt) for request in requests),
            generated_tokens=sum(len(request.output_ids) for request in requests),
            shared_tokens=sum(request.shared_tokens for request in requests),
            steps=len(counts), levels=sum(request.levels for request in requests),
            drafted=sum(request.drafted for request in requests), accepted=sum(counts),
            accepted_per_depth=[sum(count > depth for count in counts) for depth in range(self._num_steps)],
            finish_reasons=[request.finish_reason for request in requests],
            plain_step_ms=self.session.plain_steps.known_ms.get(len(requests)), **self._times,
        )  # fmt: skip
        # a stream times no plain step, since somebody may time the stream
        return stats.measured_by(self.session.time_plain_step) if self._caller == "generate" else stats


class TokenStream(Stream[TokenEvent], Generic[Ids]):
    """Yields a `TokenEvent` for each new token of some requests; other requests in the batch advance with them.

    Returned by `EAGLEInference.stream`. Aborts its requests when it is closed or no longer referenced.

    Attributes:
        requests: The `Request` of each prompt, in their order.
        device: Where the models are.
        is_single: Whether there is one prompt, which came without a batch axis.
    """

    def __init__(self, call: Call, is_single: bool):
        self.requests, self.device, self.is_single = call.requests, call.session.device, is_single
        self._call = call
        # the generator must not refer to the stream, which would then never be freed by itself
        super().__init__(call.events(), call.session)

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
        requests = self.requests
        tokens = [list(request.output_ids) for request in requests]
        scores = {
            name: [list(getattr(each, name)) if name in each.params.scores else None for each in requests]
            for name in {name: None for request in requests for name in request.params.scores}
        }
        if self.is_single:
            tokens, scores = tokens[0], {name: values[0] for name, values in scores.items()}
        return GenerationOutput(tokens, self._call.stats()).with_scores(scores)


def open_stream(
    session: Session, prompts: list[list[int]], params: Sequence[SamplingParams], config: EAGLEConfig,
    speculative: bool, is_single: bool = False, caller: str = "generate", num_samples: int = 1, first: int = 0,
) -> TokenStream:  # fmt: skip
    """Returns a stream for some prompts, each with its params; raises ValueError for a prompt that can never run.
    caller, num_samples, first: as in `Call`."""
    for index, (prompt, wanted) in enumerate(zip(prompts, params)):
        reason = session.why_unfit(prompt, wanted.max_new_tokens, config, speculative)
        if reason:
            raise ValueError(f"{caller}: {reason}".replace("the prompt", f"prompt {first + index // num_samples}"))
    requests = [session.make_request(index, *each, config) for index, each in enumerate(zip(prompts, params))]
    with session.changing(caller):
        return TokenStream(Call(session, config, caller, requests, speculative, first, num_samples), is_single)


@contextmanager
def progress_bar(caller: str, total: int, unit: str, wanted: bool | None) -> Iterator[Any]:
    """Gives a bar of tqdm until the block ends or fails, or None; for `wanted` None only a terminal has a bar."""
    if wanted is not None:
        wanted = read_flag(f"{caller}: progress", wanted)
    bar = contextlib.nullcontext()
    if wanted or wanted is None and is_terminal(sys.stderr):
        try:
            from tqdm import tqdm
        except ImportError:
            if wanted:
                raise ValueError(f"{caller}: progress=True needs tqdm: pip install tqdm") from None
        else:
            bar = tqdm(total=total, unit=unit, file=sys.stderr)
    with bar as shown:
        yield shown


class TextStream(Stream[Piece]):
    """Yields the text of one request, or `TextPiece`s for several, up to a stop string.

    Returned by `EAGLEInference.stream_text`. Text that might begin a stop string is held back until that is certain.
    """

    def __init__(self, tokens: TokenStream, tokenizer: Tokenizer, session: Session):
        self._tokens = tokens
        pieces = _pieces(tokens, tokenizer)
        super().__init__((piece.text for piece in pieces) if tokens.is_single else pieces, session)

    def close(self) -> None:
        """Ends the iterator, and aborts the requests that have not ended."""
        super().close()
        self._tokens.close()

    @overload
    def output(self: TextStream[str]) -> GenerationOutput[list[int]]: ...
    @overload
    def output(self: TextStream[TextPiece]) -> GenerationOutput[list[list[int]]]: ...
    @overload
    def output(self) -> GenerationOutput: ...

    def output(self) -> GenerationOutput:
        """Returns the tokens and statistics so far, as `generate` would."""
        return self._tokens.output()


class _Text:
    """Holds how much of a request's text has been handed out."""

    def __init__(self, request: Request, tokenizer: Tokenizer):
        self._request, self._num_tokens, self._num_shown = request, 0, 0
        self._detokenizer = tokenizer.detokenizer(request.prompt) if request.text is None else None
        self._has_ended = False

    def push(self, token: int) -> str:
        """Returns the text that is certain after one more token."""
        self._num_tokens += 1
        if self._detokenizer is None:
            return self._new(self._request.is_finished)
        is_last = self._request.is_finished and self._num_tokens == len(self._request.output_ids)
        return self._detokenizer.push([token]) + (self.finish() if is_last else "")

    def finish(self) -> str:
        """Returns the rest, once."""
        if self._detokenizer is None:
            return self._new(True)
        rest = "" if self._has_ended else self._detokenizer.finish()
        self._has_ended = True
        return rest

    def _new(self, ends: bool) -> str:
        text = self._request.text
        sure = max(self._num_shown, len(text) if ends else self._request.stop_strings.num_certain)
        new, self._num_shown = text[self._num_shown : sure], sure
        return new


def _pieces(tokens: TokenStream, tokenizer: Tokenizer) -> Generator[TextPiece, None, None]:
    """Yields the text of each request, without the part that a stop string cuts off."""
    texts = [_Text(request, tokenizer) for request in tokens.requests]
    for event in tokens:
        piece = texts[event.request].push(event.token_id)
        if piece:
            yield TextPiece(event.request, piece)
    for number, text in enumerate(texts):
        rest = text.finish()
        if rest:
            yield TextPiece(number, rest)
