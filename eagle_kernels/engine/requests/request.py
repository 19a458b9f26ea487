"""One request from its prompt to its last token, as its owner sees it."""

from __future__ import annotations

import copy
import itertools
import traceback
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...runtime.values import text_of
from ..models.tokenizer import Tokenizer
from .sampling_params import SamplingParams


class TokenEvent(NamedTuple):
    """Holds one new token of a request.

    Attributes:
        request: The `id` of its request.
        token_id: The token.
        is_draft: Whether it was an accepted draft.
        logprob: Its log-probability, if `SamplingParams.logprobs` asks for it.
        top_logprobs: (token, raw log-probability) of the most likely tokens at its position, if `top_logprobs` asks.
    """

    request: int
    token_id: int
    is_draft: bool
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None


@dataclass(eq=False)
class Request:
    """Holds a request, as `EAGLEInference.submit` returns it; the engine fills it in as it steps.

    Attributes:
        id: Its number among submitted requests; in a stream, the index of its prompt or, with n samples,
            prompt * n + sample.
        prompt: [L] token ids.
        params: How it samples and ends, as asked for.
        seed: The seed in use.
        end_token_ids: The tokens that end it, from configuration and params.
        output_ids: The new tokens so far.
        logprobs: Their log-probabilities, if params.logprobs asks for them.
        top_logprobs: (token, raw log-probability) of the most likely tokens at the position of each, likewise.
        prompt_logprobs, prompt_top_logprobs: The same, raw, for the prompt's tokens from logprob_start_len on, once
            they have been read; None for its first token.
        shared_tokens: How many of the prompt's first tokens another request with the same tokens had read.
        finish_reason: "eos" (one of end_token_ids), "stop" (a stop string), "length", "abort", "error"; None: not yet.
        error: Why it failed.
        accepted: How many drafts each of its steps accepted.
        levels: How many drafts its steps could have accepted, given each step's tree.
        drafted: How many drafts were verified in its steps; with mean_draft_tokens, the mean over the requests.
        stop_strings, outbox, exception: The engine's own.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    end_token_ids: frozenset[int]
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: list[list[tuple[int, float]] | None] = field(default_factory=list)
    shared_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    accepted: list[int] = field(default_factory=list)
    levels: int = 0
    drafted: int = 0
    stop_strings: StopStrings | None = None
    # events that its owner has not collected yet; those of submitted requests go to a list of the engine as well
    _events: list[TokenEvent] = field(default_factory=list)
    outbox: list[TokenEvent] | None = None
    # the error that ended it, until it is raised
    exception: Exception | None = None

    def __repr__(self) -> str:
        sizes = f"{len(self.prompt)} prompt tokens, {len(self.output_ids)} new tokens"
        return f"Request(id={self.id}, {sizes}, finish_reason={self.finish_reason!r})"

    def __getstate__(self) -> dict[str, Any]:
        if not self.is_finished:
            rule = "must have ended before it is copied or pickled, since the engine fills in only the original"
            raise TypeError(f"Request: {rule}; its output_ids, list(request.output_ids), may be copied at any time")
        return vars(self) | {"outbox": None, "exception": None}

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.finish_reason is not None

    @property
    def text(self) -> str | None:
        """The text of the output up to a stop string; None if params has no stop strings: then decode output_ids."""
        return None if self.stop_strings is None else self.stop_strings.text

    @property
    def has_news(self) -> bool:
        """Whether `collect` has tokens to return."""
        return bool(self._events)

    def collect(self) -> list[TokenEvent]:
        """Returns the tokens since the last call."""
        events, self._events = self._events, []
        return events

    def end(self, reason: str, error: str | None = None) -> None:
        """Ends the request, unless it has ended, for a `reason`, such as an `error`; the engine calls this."""
        if not self.is_finished:
            self.finish_reason, self.error = reason, error

    def fail(self, error: Exception) -> None:
        """Ends the request with an error; the engine calls this."""
        self.finish_reason, self.exception = "error", error
        self.error = f"{type(error).__name__}: {text_of(error).partition(chr(10))[0]}"
        # frames would hold the activations and pools of the failed step for as long as the request lives
        try:
            told = "".join(traceback.format_exception(error))
        except Exception:  # a caller's own error, which cannot even be printed
            told = "".join(traceback.format_tb(error.__traceback__))
        origin = _Origin("\n" + told)
        traceback.clear_frames(error.__traceback__)
        error.__traceback__, error.__context__, error.__cause__ = None, None, origin

    def raise_error(self) -> None:
        """Raises the error that ended the request, if any; only once, since an error holds all frames it passes."""
        error, self.exception = self.exception, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    def count_step(self, accepted: int, levels: int, drafted: int) -> None:
        """Counts a step: `accepted` of `drafted` drafts, where `levels` was the most; the engine calls this."""
        self.accepted.append(accepted)
        self.levels += levels
        self.drafted += drafted

    def push(
        self, tokens: list[int], logprobs: list[float] | None = None, raw_logprobs: list[float] | None = None,
        top_ids: list[list[int]] | None = None, top_logprobs: list[list[float]] | None = None,
    ) -> None:  # fmt: skip
        """Adds a step's tokens, until the request ends; the engine calls this.

        Args:
            tokens: Those of the step, all of them drafts but the last.
            logprobs, raw_logprobs: Their log-probabilities of both kinds.
            top_ids, top_logprobs: The most likely tokens in the place of each.
        """
        events, has_top = [], self.params.top_logprobs > 0
        logprobs = raw_logprobs if self.params.logprobs == "raw" else logprobs
        for index, token in enumerate(tokens):
            self.output_ids.append(token)
            logprob = top = None
            if self.params.logprobs and logprobs is not None:
                logprob = logprobs[index]
                self.logprobs.append(logprob)
            if has_top:
                top = self._top(top_ids[index], top_logprobs[index])
                self.top_logprobs.append(top)
            events.append(TokenEvent(self.id, token, index < len(tokens) - 1, logprob, top))
            # an end token may have text, too
            is_stopped = self.stop_strings is not None and self.stop_strings.push(token)
            if token in self.end_token_ids:
                self.end("eos")
            elif is_stopped:
                self.end("stop")
            elif len(self.output_ids) == self.params.max_new_tokens:
                self.end("length")
            if self.is_finished:
                if self.stop_strings is not None and not is_stopped and self.stop_strings.finish():
                    self.finish_reason = "stop"
                break
        self._events += events
        if self.outbox is not None:
            self.outbox += events

    def score_prompt(
        self, logprobs: list[float], top_ids: list[list[int]] | None, top_logprobs: list[list[float]] | None
    ) -> None:
        """Adds the `logprobs` of the prompt's tokens, all at once, and with them `top_ids` and `top_logprobs`."""
        first = [None] if self.params.logprob_start_len == 0 else []
        self.prompt_logprobs = first + logprobs
        if self.params.top_logprobs:
            self.prompt_top_logprobs = first + [self._top(*each) for each in zip(top_ids, top_logprobs)]

    def _top(self, ids: list[int], logprobs: list[float]) -> list[tuple[int, float]]:
        return list(zip(ids, logprobs))[: self.params.top_logprobs]


class _Origin(Exception):
    """Holds the traceback of an error, as text."""


def twin(error: Exception) -> Exception:
    """Copies an error for another request, since a raised error holds the frames that it passes through."""
    try:
        twin = copy.copy(error)
    except Exception:  # the constructor of its class takes other arguments than the error keeps
        twin = None
    if not isinstance(twin, Exception):
        twin = RuntimeError(f"{type(error).__name__}: {text_of(error)}")
    twin.__cause__ = error.__cause__  # holds the traceback as text
    return twin


class StopStrings:
    """Searches the text of a request for the strings that end it, in whichever tokens they begin and end.

    A string may be, or hold, names of special tokens, which have no text. So it is also searched for in the text with
    these names in their places, of which it must hold whole ones.
    """

    def __init__(self, strings: tuple[str, ...], tokenizer: Tokenizer, prompt: list[int]):
        self._strings, self._longest = strings, max(map(len, strings))
        self._detokenizer = tokenizer.detokenizer(prompt)
        special = getattr(tokenizer, "special_tokens", {})
        self._names = {token: name for token, name in special.items() if name and any(name in each for each in strings)}
        self._seen: list[tuple[int, str]] = []  # recent names, and how much text is before each
        self.text = ""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_detokenizer": None}  # of a request that has ended

    def push(self, token: int) -> bool:
        """Returns whether this token completes a string; the text then ends before the earliest one."""
        text = self.text + self._detokenizer.push([token])
        if token not in self._names:
            return self._ends(text, text)
        whole = text + self._detokenizer.finish()  # if the request ends here
        self._seen.append((len(whole), self._names[token]))
        return self._ends(text, whole)

    def finish(self) -> bool:
        """Returns the same after the last token, for bytes held back, such as those of half a character."""
        text = self.text + self._detokenizer.finish()
        return self._ends(text, text)

    @property
    def num_certain(self) -> int:
        """Returns how many characters no later token can remove: those after them may begin a stop string."""
        begin = self._begin
        named, spans = self._named(self.text, begin)
        return min(self._begun(self.text, begin, []), _unnamed(self._begun(named, begin, spans), spans))

    @property
    def _begin(self) -> int:
        """Returns the earliest place where a string that is not complete yet may begin."""
        return max(0, len(self.text) - self._longest + 1)

    def _named(self, text: str, begin: int) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text with the names that are seen after `begin`, and the range of each in it."""
        self._seen = [(place, name) for place, name in self._seen if place >= begin]
        named, spans, done = "", [], 0
        for place, name in self._seen:
            if place <= len(text):
                named += text[done:place] + name
                spans.append((len(named) - len(name), len(named)))
                done = place
        return named + text[done:], spans

    def _begun(self, text: str, begin: int, spans: list[tuple[int, int]]) -> int:
        """Returns where the first string begins of which the text ends with a part; else the text's length."""
        for place in range(begin, len(text)):
            is_inside = any(first < place < last for first, last in spans)
            if not is_inside and any(string.startswith(text[place:]) for string in self._strings):
                return place
        return len(text)

    def _ends(self, text: str, whole: str) -> bool:
        """Adds to the text, up to a string; names may also be found in `whole`, which has the text held back, too."""
        begin = self._begin
        found = [place for place in (text.find(string, begin) for string in self._strings) if place >= 0]
        if self._seen:
            named, spans = self._named(whole, begin)
            for string, place in itertools.product(self._strings, range(begin, len(named))):
                end = place + len(string)
                is_cut = any(first < edge < last for first, last in spans for edge in (place, end))
                has_name = any(place <= first and last <= end for first, last in spans)
                if has_name and not is_cut and named.startswith(string, place):
                    found.append(_unnamed(place, spans))
        self.text = whole[: min(found)] if found else text
        return bool(found)


def _unnamed(place: int, spans: list[tuple[int, int]]) -> int:
    """Returns where a place in a text with names is in the text without them."""
    return place - sum(last - first for first, last in spans if last <= place)
