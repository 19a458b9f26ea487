"""Tokenizers of the demo pair (bytes) and of Hugging Face checkpoints (`tokenizer.json`)."""

from __future__ import annotations

import codecs
import filecmp
import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...runtime.values import first_line, is_integer, shown
from .checkpoint import brief, check_file_size, naming, read_config, read_folder, read_json
from .decoder_config import read_value
from .loading import read_eos_token_ids
from .protocol import ModelError


class Detokenizer(Protocol):
    """Decodes ids that arrive in pieces; the texts joined equal what `Tokenizer.decode` makes of all ids at once."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Returns the text that these ids complete; a character that lacks some bytes waits for the next call."""

    def finish(self) -> str:
        """Returns the rest, with U+FFFD for an unfinished character."""


class Tokenizer(Protocol):
    """Names the members that the engine and the command line use of a tokenizer."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Returns the ids; ValueError for text that UTF-8 cannot represent."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text; ValueError for ids that neither the tokenizer nor the model has."""

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """Returns a detokenizer of ids that follow `context`; some tokenizers strip a space at the start of a text."""


class ByteTokenizer:
    """Encodes text as its bytes in UTF-8, which are ids 0..255; 256 is `<|endoftext|>`, which separates texts.

    num_ids  how many ids the model has, if more
    """

    vocab_size = 257
    eos_token_ids: tuple[int, ...] = (256,)

    def __init__(self, num_ids: int = 257) -> None:
        self._num_ids = max(num_ids, self.vocab_size)

    def encode(self, text: str) -> list[int]:
        return list(_checked_text(text).encode("utf-8"))

    def decode(self, token_ids: Sequence[int]) -> str:
        detokenizer = ByteDetokenizer()
        return detokenizer.push(_checked_ids(token_ids, self._num_ids)) + detokenizer.finish()

    def detokenizer(self, context: Sequence[int] = ()) -> ByteDetokenizer:
        return ByteDetokenizer()


class ByteDetokenizer:
    """Decodes the ids of a `ByteTokenizer` (a `Detokenizer`)."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        return self._decoder.decode(bytes(token_id for token_id in token_ids if token_id < 256))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def _checked_text(text: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"encode: text must be a string, got {shown(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # Python decodes damaged command lines and JSON to such strings.
        half = f"its character {error.start} is {text[error.start]!r}, half of a surrogate pair"
        raise ValueError(f"encode: text must be UTF-8, {half}") from None
    return text


def _checked_ids(token_ids: Sequence[int], num_ids: int) -> list[int]:
    try:
        items = list(token_ids)
    except TypeError:
        raise ValueError(f"decode: token_ids must be a sequence of integers, got {shown(token_ids)}") from None
    for place, item in enumerate(items):
        try:
            items[place] = operator.index(item)
        except TypeError:
            raise ValueError(f"decode: token_ids must be integers, got {shown(item)}") from None
        if not 0 <= items[place] < num_ids:
            raise ValueError(f"decode: token_ids must lie in 0..{num_ids - 1}, got {items[place]}")
    return items


class FileTokenizer:
    """Encodes by a Hugging Face `tokenizer.json`, through the package `tokenizers`.

    num_ids  how many ids the model has, if more
    """

    def __init__(self, path: Path, eos_token_ids: tuple[int, ...], num_ids: int = 0) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ModelError(f"reading {path} needs tokenizers: pip install 'eagle_kernels[models]'") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise ModelError(f"{path} cannot be read: {first_line(error)}") from None
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self._num_ids = max(num_ids, self.vocab_size)
        self.eos_token_ids = eos_token_ids

    def encode(self, text: str) -> list[int]:
        return self.encoding_of(text).ids

    def encoding_of(self, text: str, **options: Any) -> Any:
        """Returns the `tokenizers.Encoding` of a text."""
        return self._tokenizer.encode(_checked_text(text), **options)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(_checked_ids(token_ids, self._num_ids), skip_special_tokens=True)

    def detokenizer(self, context: Sequence[int] = ()) -> FileDetokenizer:
        return FileDetokenizer(self, context)


_MOST_CONTEXT = 8  # ids: the last ones may be special ones without text, or the bytes of one character


class FileDetokenizer:
    """Decodes the ids of a `FileTokenizer` (a `Detokenizer`).

    The text of an id can depend on its neighbours (spaces, multi-byte characters). So recent ids are decoded with and
    without the new ones: the difference is the new text, unless it ends inside a character.
    """

    def __init__(self, tokenizer: FileTokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._settled = self._last_text(context)  # ids whose text was returned, as context of the next
        self._pending: list[int] = []  # ids whose text was not

    def push(self, token_ids: Iterable[int]) -> str:
        self._pending.extend(token_ids)
        text = self.finish()  # which leaves the ids pending
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._settled, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        before = self._tokenizer.decode(self._settled)
        return self._tokenizer.decode(self._settled + self._pending)[len(before) :]

    def _last_text(self, context: Sequence[int]) -> list[int]:
        """Returns the last ids whose text is whole characters: half a character would change with the next id."""
        for size in range(1, min(len(context), _MOST_CONTEXT) + 1):
            text = self._tokenizer.decode(context[-size:])
            if text and "\N{REPLACEMENT CHARACTER}" not in text:
                return list(context[-size:])
        return []


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Returns the tokenizer of a model's `folder`: `ByteTokenizer` if its config names that, else `tokenizer.json`; a
    ModelError says if there is neither."""
    folder = read_folder("load_tokenizer: folder", folder)
    with naming(folder):
        num_ids = read_config(folder, is_optional=True).get("vocab_size")
    num_ids = num_ids if is_integer(num_ids) else 0
    if holds_bytes(folder):
        return ByteTokenizer(num_ids)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{brief(str(folder), 250)} holds no tokenizer.json, and its config names no ByteTokenizer")
    with naming(folder):
        check_file_size(path)
    return FileTokenizer(path, read_eos_token_ids(folder), num_ids)


def holds_bytes(folder: Path) -> bool:
    """Tells whether the tokenizer of a model folder is `ByteTokenizer`."""
    with naming(folder):
        configs = [read_json(folder / name, is_optional=True) for name in ("config.json", "tokenizer_config.json")]
    return any(config.get("tokenizer_class") == "ByteTokenizer" for config in configs)


def check_same_vocabulary(folder: str | Path, other: str | Path) -> bool:
    """Refuses two model folders whose ids mean different text; returns False if the folders do not tell it."""
    folders = Path(folder), Path(other)
    first, second = map(_vocabulary, folders)
    rule = " and ".join(brief(str(each), 150) for each in folders) + " must have the same tokenizer"
    if first is None and second is None:
        return all(map(holds_bytes, folders)) or any(_is_same_file(name, *folders) for name in _OLD_FILES)
    if first is None or second is None:
        raise ModelError(f"{rule}, but only one of them has a tokenizer.json")
    for token in first.keys() & second.keys():
        if first[token] != second[token]:
            raise ModelError(f"{rule}, but {shown(token)} is {first[token]} in one and {second[token]} in the other")
    rest = sorted(first.keys() ^ second.keys())
    if rest:
        raise ModelError(f"{rule}, but only one of them has {shown(rest[0])}")
    return True


_OLD_FILES = ("tokenizer.model", "vocab.json", "tekken.json", "vocab.txt")  # of tokenizers without a tokenizer.json


def _is_same_file(name: str, *folders: Path) -> bool:
    paths = [folder / name for folder in folders]
    return all(path.is_file() for path in paths) and filecmp.cmp(*paths, shallow=False)


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Returns the ids of the tokens in tokenizer.json; None if there is no such file."""
    with naming(folder):
        content = read_json(folder / "tokenizer.json", is_optional=True)
        if not content:
            return None
        added = content.get("added_tokens") or []
        known = read_value(content, "model", dict, "tokenizer.json").get("vocab") or {}
        if isinstance(known, list) and all(isinstance(entry, list) and entry for entry in known):  # (unigram, score)
            known = {str(entry[0]): number for number, entry in enumerate(known)}
        if not isinstance(known, dict):
            raise ModelError(f"tokenizer.json: vocab must be a table of tokens, got {shown(known)}")
        entries = added if isinstance(added, list) else [None]
        if not all(isinstance(each, dict) and {"content", "id"} <= each.keys() for each in entries):
            raise ModelError(f"tokenizer.json: added_tokens must be objects with content and id, got {shown(added)}")
        return known | {str(each["content"]): each["id"] for each in added}
