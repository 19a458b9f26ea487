"""Decoding of ids that arrive in pieces, exactly as all of them at once would be decoded, in linear work. A decoder of
the package `tokenizers` is a chain of steps from tokens to tokens, whose results are joined. Here each step reads
tokens as they arrive and keeps back what later tokens could still change: the bytes of an unfinished character; with
byte fallback a run of byte tokens, each of which becomes U+FFFD if the whole run is not UTF-8."""

from __future__ import annotations

import codecs
import functools
import json
import os.path
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

_BROKEN = "\N{REPLACEMENT CHARACTER}"
# of byte tokens: their text, the bytes of an unfinished character (None: the run is broken), and their number
_NO_RUN = ("", b"", 0)
_BYTE_TOKEN = re.compile(r"<0x(\+?[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")


# A step of a decoder: from its state (None at first), tokens, and whether they are the last ones, to what is certain
# after these tokens (all that is left, after the last ones), and its next state.
_Step = Callable[[Any, list[str], bool], tuple[list[str], Any]]


def join_bytes(bytes_of: Callable[[str], bytes], left: bytes | None, tokens: list[str], ends: bool) -> tuple:
    """Joins byte strings and decodes them as UTF-8, with U+FFFD for what is none."""
    data = (left or b"") + b"".join(map(bytes_of, tokens))
    text, num_read = codecs.utf_8_decode(data, "replace", ends)
    return [text], data[num_read:]


def _join_byte_runs(run: tuple[str, bytes | None, int] | None, tokens: list[str], ends: bool) -> tuple:
    """Decodes runs of byte tokens such as `<0xE6>`, each as a whole (ByteFallback)."""
    (text, left, count), texts = run or _NO_RUN, []
    for token in tokens:
        byte = _BYTE_TOKEN.fullmatch(token) if len(token) == 6 else None
        if byte is None:
            texts += [*_end_of_run(text, left, count), token]
            text, left, count = _NO_RUN
        elif left is None:
            texts.append(_BROKEN)
        else:
            data, count = left + bytes([int(byte[1], 16)]), count + 1
            try:
                more, num_read = codecs.utf_8_decode(data, "strict", False)
                text, left = text + more, data[num_read:]
            except UnicodeDecodeError:
                texts += [_BROKEN] * count
                left = None
    return texts + _end_of_run(text, left, count) if ends else texts, (text, left, count)


def _end_of_run(text: str, left: bytes | None, count: int) -> list[str]:
    """Returns the rest of a run of bytes: what came out as broken has none, and what is incomplete is broken, too."""
    if left is None or count == 0:
        return []
    return [_BROKEN] * count if left else [text]


def _decode_each(text_of: Callable[[str, bool], str], has_begun: bool, tokens: list[str], ends: bool) -> tuple:
    """Decodes every token by itself; the first one may be decoded in another way."""
    texts = [text_of(token, index == 0 and not has_begun) for index, token in enumerate(tokens)]
    return texts, has_begun or bool(tokens)


def _decode_last(suffix: str, held: tuple[str, str] | None, tokens: list[str], ends: bool) -> tuple:
    """Decodes every token by itself, the last one in another way (BPEDecoder); what both ways share is certain."""
    (inner, last), texts = held or ("", ""), []
    for token in tokens:
        texts.append(inner)
        inner, last = token.replace(suffix, " "), token.replace(suffix, "")
        shared = len(os.path.commonprefix([inner, last]))
        texts.append(inner[:shared])
        inner, last = inner[shared:], last[shared:]
    return texts + [last] if ends else texts, (inner, last)


def _join(_: None, tokens: list[str], ends: bool) -> tuple:
    """Joins all tokens (Fuse): what arrives later is of the same token, which steps for joined tokens know."""
    return ["".join(tokens)], None


def _strip_joined(
    content: str, start: int, stop: int, state: tuple[int, str] | None, tokens: list[str], ends: bool
) -> tuple:
    """Strips a character from both ends of the joined tokens, at most `start` and `stop` times."""
    (start, tail), text = state or (start, ""), "".join(tokens)
    while text and start:
        text, start = (text[1:], start - 1) if text[0] == content else (text, 0)
    text = tail + text
    size = len(text)
    while size > max(0, len(text) - stop) and text[size - 1] == content:
        size -= 1
    return [text[:size]], (start, text[size:])


def _replace_joined(pattern: str, content: str, tail: str | None, tokens: list[str], ends: bool) -> tuple:
    """Replaces a text in the joined tokens."""
    *parts, rest = ((tail or "") + "".join(tokens)).split(pattern)
    most = 0 if ends else min(len(rest), len(pattern) - 1)
    size = next((size for size in range(most, 0, -1) if pattern.startswith(rest[-size:])), 0)
    return [content.join([*parts, rest[: len(rest) - size]])], rest[len(rest) - size :]


def _decode_at_the_end(
    decode: Callable[[list[str]], str], is_joined: bool, held: list[str] | None, tokens: list[str], ends: bool
) -> tuple:
    """Decodes nothing before the last token: steps whose reach is unknown."""
    held = [] if held is None else held
    if not ends:
        held += tokens  # in place: all steps before this one are past
        return [], held
    return [decode(["".join(held + tokens)] if is_joined else held + tokens)], held


class Chain(NamedTuple):
    """Holds the steps of a decoder, to be read in pieces."""

    token_of: Callable[[int], str | None]  # returns the token of an id, or None for an id without text
    steps: Sequence[_Step]
    touched: str = ""  # characters that steps replace or strip
    # whether steps look no further than runs of bytes, characters, and whether a token is the first or last
    is_local: bool = True

    @classmethod
    def of(cls, decoder: Any, token_of: Callable[[int], str | None]) -> Chain:
        """Returns the chain of a decoder of the package `tokenizers`; None joins tokens with spaces."""
        if decoder is None:
            return cls(token_of, [partial(_decode_each, _text_of(" ".join))])
        try:
            parts = _parts_of(json.loads(decoder.__getstate__()))
        except Exception:  # written in Python; the package raises nothing narrower
            return cls(token_of, [partial(_decode_at_the_end, decoder.decode, False)], is_local=False)
        steps: list[_Step] = []
        is_joined, touched = False, ""
        for index, part in enumerate(parts):
            step = _step_of(part, is_joined, index == len(parts) - 1)
            if step is None:
                rest = _decoder_of({"type": "Sequence", "decoders": parts[index:]})
                return cls(token_of, [*steps, partial(_decode_at_the_end, rest.decode, is_joined)], is_local=False)
            steps.append(step)
            is_joined = is_joined or part["type"] in ("ByteLevel", "Fuse")
            touched += part.get("content", "") + part.get("pattern", {}).get("String", "")
        return cls(token_of, steps, touched)

    def tokens_before(self, context: Sequence[int]) -> list[str]:
        """Returns the last tokens of a context, those that matter to what follows it. A letter that no step touches
        ends whatever went on before it: a run of bytes, a character, spaces to strip."""
        tokens = []
        for token_id in reversed(context):
            token = self.token_of(token_id)
            if token is not None:
                tokens.append(token)
                is_end = self.is_local and _BYTE_TOKEN.fullmatch(token) is None
                if is_end and any(each.isascii() and each.isalnum() and each not in self.touched for each in token):
                    break
        return tokens[::-1]


def _parts_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the steps of a decoder, with those of sequences in it."""
    if state["type"] != "Sequence":
        return [state]
    return [part for each in state["decoders"] for part in _parts_of(each)]


def _step_of(part: dict[str, Any], is_joined: bool, is_last: bool) -> _Step | None:
    """Returns the step for a part of a decoder; None if it cannot be read in pieces, given whether an earlier step
    joins all tokens, and whether no step follows."""
    kind, content, pattern = part["type"], part.get("content"), part.get("pattern", {}).get("String")
    if kind == "Fuse":
        return _join
    if is_joined:
        joined = {
            "Strip": partial(_strip_joined, content, part.get("start"), part.get("stop")),
            "Replace": partial(_replace_joined, pattern, content) if pattern else None,
        }
        return joined.get(kind)
    if kind in ("Replace", "Strip", "Metaspace", "WordPiece"):
        return partial(_decode_each, _text_of(_decoder_of(part).decode))
    if kind == "BPEDecoder" and is_last:
        return partial(_decode_last, part["suffix"])
    return {"ByteLevel": partial(join_bytes, _bytes_of), "ByteFallback": _join_byte_runs}.get(kind)


def _decoder_of(state: dict[str, Any]) -> Any:
    from tokenizers import decoders

    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps(state).encode())  # of whichever class; all of them have `decode`
    return decoder


def _text_of(decode: Callable[[list[str]], str]) -> Callable[[str, bool], str]:
    """Returns the function from a token, and whether it is the first, to its text."""
    before = len(decode(["a"]))

    @functools.cache
    def text_of(token: str, is_first: bool) -> str:
        return decode([token]) if is_first else decode(["a", token])[before:]

    return text_of


@functools.cache
def _byte_of() -> dict[str, int]:
    """Returns the bytes of the characters that stand for them in byte-level tokens: printable ones for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _bytes_of(token: str) -> bytes:
    try:
        return bytes(map(_byte_of().__getitem__, token))
    except KeyError:  # an added token
        return token.encode("utf-8")


class ChainDetokenizer:
    """Decodes ids by the steps of a decoder (a `Detokenizer`)."""

    def __init__(self, chain: Chain, read_ids: Callable[[Iterable[int]], list[int]], context: Sequence[int]) -> None:
        self._chain, self._read_ids = chain, read_ids
        self._states: list[Any] = [None] * len(chain.steps)
        self._before = ""  # what the context would end with, of which the pieces have nothing
        _, self._states = self._read(chain.tokens_before(context), ends=False)
        self._before = self.finish()

    def push(self, token_ids: Iterable[int]) -> str:
        tokens = [self._chain.token_of(token_id) for token_id in self._read_ids(token_ids)]
        text, self._states = self._read([token for token in tokens if token is not None], ends=False)
        if self._before and text:
            shared = len(os.path.commonprefix([self._before, text]))
            self._before = self._before[shared:] if shared == len(text) else ""
            return text[shared:]
        return text

    def finish(self) -> str:
        text, _ = self._read([], ends=True)
        return text[len(os.path.commonprefix([self._before, text])) :]

    def _read(self, tokens: list[str], ends: bool) -> tuple[str, list[Any]]:
        """Returns the text that tokens make certain, and the states of the steps after them."""
        states = []
        for step, state in zip(self._chain.steps, self._states):
            tokens, state = step(state, tokens, ends)
            states.append(state)
        return "".join(tokens), states


_MOST_BEFORE = 8  # ids
_MOST_OPEN = 3  # ids that can be bytes of one unfinished character


class WindowDetokenizer:
    """Decodes ids by a function of which nothing is known but that the text of an id depends on its near neighbours.
    Recent ids are decoded with and without the new ones: the difference is the new text, except for what may be an
    unfinished character. `read_ids` leaves out the ids without text; the context has none."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], read_ids: Callable[[Iterable[int]], list[int]],
        context: Sequence[int],
    ) -> None:  # fmt: skip
        self._decode, self._read_ids = decode, read_ids
        self._settled = list(context[-_MOST_BEFORE:])
        self._pending: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        self._pending += self._read_ids(token_ids)
        text = self.finish()
        num_done = len(self._pending)
        if not text or text.endswith(_BROKEN):
            # the last ids may begin a character; where the text of those before them is certain, it goes out
            sizes = range(num_done - _MOST_OPEN, num_done) if num_done > _MOST_OPEN else ()
            texts = {size: self._text(size) for size in sizes}
            num_done = next((size for size, part in texts.items() if text.startswith(part)), 0)
            text = texts.get(num_done, "")
        self._settled = (self._settled + self._pending[:num_done])[-_MOST_BEFORE:]
        del self._pending[:num_done]
        return text

    def finish(self) -> str:
        return self._text(len(self._pending))

    def _text(self, count: int) -> str:
        before, whole = self._decode(self._settled), self._decode(self._settled + self._pending[:count])
        return whole[len(os.path.commonprefix([before, whole])) :]  # less than `before`: it may end inside a character
