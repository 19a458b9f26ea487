"""Decoding of ids that arrive in pieces, exactly as all of them at once would be decoded, in linear work.

A decoder of the package `tokenizers` is a chain of steps from tokens to tokens, whose results are joined. Here each
step reads tokens as they arrive and keeps back what later tokens could still change: the bytes of an unfinished
character; with byte fallback a run of byte tokens, each of which becomes U+FFFD if the whole run is not UTF-8.
"""

from __future__ import annotations

import codecs
import copy
import functools
import json
import os.path
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x(\+?[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")


class _Step(Protocol):
    """A step of a decoder. Its state is of values that are replaced and not changed, so that `copy.copy` keeps it."""

    def read(self, tokens: list[str], ends: bool) -> list[str]:
        """Returns what is certain after these tokens; with `ends`, all that is left."""
        ...


class ByteStep:
    """Joins byte strings and decodes them as UTF-8, with U+FFFD for what is none."""

    def __init__(self, bytes_of: Callable[[str], bytes]) -> None:
        self._bytes_of, self._left = bytes_of, b""

    def read(self, tokens: list[str], ends: bool) -> list[str]:
        data = self._left + b"".join(map(self._bytes_of, tokens))
        text, num_read = codecs.utf_8_decode(data, "replace", ends)
        self._left = data[num_read:]
        return [text]


class _ByteRuns:
    """Decodes runs of byte tokens such as `<0xE6>`, each as a whole (ByteFallback)."""

    def __init__(self) -> None:
        self._text, self._left, self._count, self._is_broken = "", b"", 0, False

    def read(self, tokens: list[str], ends: bool) -> list[str]:
        texts = []
        for token in tokens:
            byte = _BYTE_TOKEN.fullmatch(token) if len(token) == 6 else None
            texts += self._end_run() + [token] if byte is None else self._add(int(byte[1], 16))
        return texts + self._end_run() if ends else texts

    def _add(self, byte: int) -> list[str]:
        if self._is_broken:
            return [_BROKEN]
        self._count += 1
        data = self._left + bytes([byte])
        try:
            text, num_read = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            self._is_broken = True
            return [_BROKEN] * self._count
        self._text, self._left = self._text + text, data[num_read:]
        return []

    def _end_run(self) -> list[str]:
        texts = [_BROKEN] * self._count if self._left else [self._text] * (self._count > 0)
        texts = [] if self._is_broken else texts
        self._text, self._left, self._count, self._is_broken = "", b"", 0, False
        return texts


class _EachToken:
    """Decodes every token by itself; the first one may be decoded in another way."""

    def __init__(self, text_of: Callable[[str, bool], str]) -> None:
        self._text_of, self._is_first = text_of, True

    def read(self, tokens: list[str], ends: bool) -> list[str]:
        texts = []
        for token in tokens:
            texts.append(self._text_of(token, self._is_first))
            self._is_first = False
        return texts


class _AllButLast:
    """Decodes every token by itself, the last one in another way (BPEDecoder); what both ways share is certain."""

    def __init__(self, suffix: str) -> None:
        self._suffix, self._inner, self._last = suffix, "", ""

    def read(self, tokens: list[str], ends: bool) -> list[str]:
        texts = []
        for token in tokens:
            texts.append(self._inner)
            inner, last = token.replace(self._suffix, " "), token.replace(self._suffix, "")
            shared = len(os.path.commonprefix([inner, last]))
            texts.append(inner[:shared])
            self._inner, self._last = inner[shared:], last[shared:]
        return texts + [self._last] if ends else texts


class _Join:
    """Joins all tokens (Fuse): what arrives later is of the same token, which steps for joined tokens know."""

    def read(self, tokens: list[str], ends: bool) -> list[str]:
        return ["".join(tokens)]


class _StripJoined:
    """Strips a character from both ends of the joined tokens."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop, self._tail = content, start, stop, ""

    def read(self, tokens: list[str], ends: bool) -> list[str]:
        text = "".join(tokens)
        while text and self._start:
            is_content = text[0] == self._content
            text, self._start = (text[1:], self._start - 1) if is_content else (text, 0)
        text = self._tail + text
        size = len(text)
        while size > max(0, len(text) - self._stop) and text[size - 1] == self._content:
            size -= 1
        self._tail = text[size:]
        return [text[:size]]


class _ReplaceJoined:
    """Replaces a text in the joined tokens."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content, self._tail = pattern, content, ""

    def read(self, tokens: list[str], ends: bool) -> list[str]:
        *parts, rest = (self._tail + "".join(tokens)).split(self._pattern)
        most = 0 if ends else min(len(rest), len(self._pattern) - 1)
        size = next((size for size in range(most, 0, -1) if self._pattern.startswith(rest[-size:])), 0)
        self._tail = rest[len(rest) - size :]
        return [self._content.join([*parts, rest[: len(rest) - size]])]


class _AtTheEnd:
    """Decodes nothing before the last token: steps whose reach is unknown."""

    def __init__(self, decode: Callable[[list[str]], str], is_joined: bool) -> None:
        self._decode, self._is_joined = decode, is_joined
        self._all: list[str] = []  # shared by copies, of which only one reads on

    def read(self, tokens: list[str], ends: bool) -> list[str]:
        if not ends:
            self._all.extend(tokens)
            return []
        tokens = self._all + tokens
        return [self._decode(["".join(tokens)] if self._is_joined else tokens)]


class Chain:
    """Holds the steps of a decoder, to be read in pieces.

    token_of  returns the token of an id, or None for an id without text
    makers    make the steps
    touched   characters that steps replace or strip
    is_local  whether steps look no further than runs of bytes, characters, and whether a token is the first or last
    """

    def __init__(
        self, token_of: Callable[[int], str | None], makers: Sequence[Callable[[], Any]], touched: str = "",
        is_local: bool = True,
    ) -> None:  # fmt: skip
        self.token_of, self._makers, self._touched, self._is_local = token_of, makers, touched, is_local

    @classmethod
    def of(cls, decoder: Any, token_of: Callable[[int], str | None]) -> Chain:
        """Returns the chain of a decoder of the package `tokenizers`; None joins tokens with spaces."""
        if decoder is None:
            return cls(token_of, [partial(_EachToken, _text_of(" ".join))])
        try:
            parts = _parts_of(json.loads(decoder.__getstate__()))
        except Exception:  # written in Python; the package raises nothing narrower
            return cls(token_of, [partial(_AtTheEnd, decoder.decode, False)], is_local=False)
        makers: list[Callable[[], Any]] = []
        is_joined, touched = False, ""
        for index, part in enumerate(parts):
            maker = _maker_of(part, is_joined, index == len(parts) - 1)
            if maker is None:
                rest = _decoder_of({"type": "Sequence", "decoders": parts[index:]})
                return cls(token_of, [*makers, partial(_AtTheEnd, rest.decode, is_joined)], is_local=False)
            makers.append(maker)
            is_joined = is_joined or part["type"] in ("ByteLevel", "Fuse")
            touched += part.get("content", "") + part.get("pattern", {}).get("String", "")
        return cls(token_of, makers, touched)

    def steps(self) -> list[_Step]:
        """Returns steps that have read nothing."""
        return [make() for make in self._makers]

    def tokens_before(self, context: Sequence[int]) -> list[str]:
        """Returns the last tokens of a context, those that matter to what follows it. A letter that no step touches
        ends whatever went on before it: a run of bytes, a character, spaces to strip."""
        tokens = []
        for token_id in reversed(context):
            token = self.token_of(token_id)
            if token is not None:
                tokens.append(token)
                is_end = self._is_local and _BYTE_TOKEN.fullmatch(token) is None
                if is_end and any(each.isascii() and each.isalnum() and each not in self._touched for each in token):
                    break
        return tokens[::-1]


def _parts_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the steps of a decoder, with those of sequences in it."""
    if state["type"] != "Sequence":
        return [state]
    return [part for each in state["decoders"] for part in _parts_of(each)]


def _maker_of(part: dict[str, Any], is_joined: bool, is_last: bool) -> Callable[[], Any] | None:
    """Returns what makes the step for a part of a decoder; None if it cannot be read in pieces, given whether an
    earlier step joins all tokens, and whether no step follows."""
    kind, content, pattern = part["type"], part.get("content"), part.get("pattern", {}).get("String")
    if kind == "Fuse":
        return _Join
    if is_joined:
        joined = {
            "Strip": partial(_StripJoined, content, part.get("start"), part.get("stop")),
            "Replace": partial(_ReplaceJoined, pattern, content) if pattern else None,
        }
        return joined.get(kind)
    if kind in ("Replace", "Strip", "Metaspace", "WordPiece"):
        return partial(_EachToken, _text_of(_decoder_of(part).decode))
    if kind == "BPEDecoder" and is_last:
        return partial(_AllButLast, part["suffix"])
    return {"ByteLevel": partial(ByteStep, _bytes_of), "ByteFallback": _ByteRuns}.get(kind)


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
        self._token_of, self._read_ids = chain.token_of, read_ids
        # what the context would end with, of which the pieces have nothing
        self._steps, self._before = chain.steps(), ""
        _read(self._steps, chain.tokens_before(context), ends=False)
        self._before = self.finish()

    def push(self, token_ids: Iterable[int]) -> str:
        tokens = [self._token_of(token_id) for token_id in self._read_ids(token_ids)]
        text = _read(self._steps, [token for token in tokens if token is not None], ends=False)
        if self._before and text:
            shared = len(os.path.commonprefix([self._before, text]))
            self._before = self._before[shared:] if shared == len(text) else ""
            return text[shared:]
        return text

    def finish(self) -> str:
        text = _read([copy.copy(step) for step in self._steps], [], ends=True)
        return text[len(os.path.commonprefix([self._before, text])) :]


def _read(steps: list[_Step], tokens: list[str], ends: bool) -> str:
    for step in steps:
        tokens = step.read(tokens, ends)
    return "".join(tokens)


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
