"""Streams of the text of one call, over the stream of its tokens."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, overload

from typing_extensions import TypeVar

from ..models.tokenizer import Tokenizer
from ..requests.request import Request
from .output import GenerationOutput
from .session import Session
from .stream import Stream, TokenStream


class TextPiece(NamedTuple):
    """Holds new text from one of several requests.

    Attributes:
        request: The index of its prompt; with n samples, prompt * n + sample.
        text: The text, in whole characters.
    """

    request: int
    text: str


Piece = TypeVar("Piece", covariant=True, default=str | TextPiece)


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
