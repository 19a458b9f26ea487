"""Tokenizers of the demo pair (bytes), of Hugging Face checkpoints (`tokenizer.json`), and those of other packages."""

from __future__ import annotations

import copy
import filecmp
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from ...runtime.values import first_line, is_integer, shown, utf8_fault
from .chat_template import Chats, ChatTemplate, FolderChat, chat_template_of
from .checkpoint import brief, check_file_size, naming, read_config, read_folder, read_json
from .detokenizer import Chain, ChainDetokenizer, WindowDetokenizer, join_bytes
from .end_tokens import read_eos_token_ids
from .protocol import ModelError
from .settings import is_off, read_value


class Detokenizer(Protocol):
    """Decodes ids that arrive in pieces.

    The joined texts, with that of `finish` last, equal `Tokenizer.decode` of all ids at once. After a context they are
    what decode(context + ids) has beyond the common prefix with decode(context). So special tokens, which have no text,
    change nothing, wherever they occur.
    """

    def push(self, token_ids: Iterable[int]) -> str:
        """Returns the text that these ids make certain; an incomplete character waits for the next call."""

    def finish(self) -> str:
        """Returns the rest, with U+FFFD for an incomplete character, and changes nothing."""


class Tokenizer(Protocol):
    """Names the members of a tokenizer that the engine and the command line use.

    Two more are optional: `special_tokens` maps ids of special tokens, whose text is not shown, to the names by which
    stop strings find them; `encode_chat(messages, add_generation_prompt, **variables)` returns the ids of a
    conversation, for `EAGLEInference.encode_chat`.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Returns the ids; raises ValueError for text that UTF-8 cannot represent."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text; raises ValueError for ids that neither the tokenizer nor the model has."""

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """Returns a detokenizer for ids that follow `context`; some tokenizers strip a space at the start of a text."""


ReadChat = Callable[[], ChatTemplate | None]


class ByteTokenizer(Chats):
    """Encodes text as its bytes in UTF-8, which are ids 0..255; 256 is `<|endoftext|>`, which separates texts."""

    eos_token_ids: tuple[int, ...] = (256,)
    special_tokens: Mapping[int, str] = MappingProxyType({256: "<|endoftext|>"})

    def __init__(self, num_ids: int = 257, read_chat: ReadChat | None = None) -> None:
        super().__init__(257, num_ids, read_chat)

    def encode(self, text: str) -> list[int]:
        return list(_checked_text(text).encode("utf-8"))

    def encode_with_spans(self, text: str, is_marked: bool) -> tuple[list[int], list[tuple[int, int]]]:
        ids, spans, mark = [], [], self.special_tokens[256]
        for piece in re.finditer(re.escape(mark) + "|." if is_marked else ".", _checked_text(text), re.DOTALL):
            token_ids = [256] if piece[0] == mark else piece[0].encode("utf-8")
            ids += token_ids
            spans += [piece.span()] * len(token_ids)
        return ids, spans

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(each for each in _checked_ids(token_ids, self.num_ids) if each < 256).decode("utf-8", "replace")

    def detokenizer(self, context: Sequence[int] = ()) -> ChainDetokenizer:
        return ChainDetokenizer(BYTES, list, context)


BYTES = Chain(
    lambda token_id: chr(token_id) if 0 <= token_id < 256 else None,
    [partial(join_bytes, methodcaller("encode", "latin-1"))],
)


def _checked_text(text: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"encode: text must be a string, got {shown(text)}")
    fault = utf8_fault(text)
    if fault is not None:
        raise ValueError(f"encode: text must be UTF-8, {fault}")
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


class FileTokenizer(Chats):
    """Encodes by a `tokenizers.Tokenizer`, such as that of a Hugging Face `tokenizer.json`."""

    def __init__(
        self, backend: Any, eos_token_ids: tuple[int, ...], num_ids: int = 0, read_chat: ReadChat | None = None
    ) -> None:
        backend.no_padding()  # some files have settings of training, which would cut a prompt or fill it
        backend.no_truncation()
        super().__init__(backend.get_vocab_size(), num_ids, read_chat)
        self._tokenizer, self.eos_token_ids = backend, eos_token_ids
        added = backend.get_added_tokens_decoder()
        self.special_tokens = {token_id: token.content for token_id, token in added.items() if token.special}
        self._chain = Chain.of(backend.decoder, self._token_of)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(_checked_text(text)).ids

    def encode_with_spans(self, text: str, is_marked: bool) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._tokenizer.encode(_checked_text(text), add_special_tokens=not is_marked)
        return encoding.ids, encoding.offsets

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(_checked_ids(token_ids, self.num_ids), skip_special_tokens=True)

    def detokenizer(self, context: Sequence[int] = ()) -> ChainDetokenizer:
        return ChainDetokenizer(self._chain, partial(_checked_ids, num_ids=self.num_ids), context)

    def _token_of(self, token_id: int) -> str | None:
        if token_id in self.special_tokens or not 0 <= token_id < self.num_ids:
            return None
        return self._tokenizer.id_to_token(token_id)


class PythonTokenizer(Chats):
    """Encodes by a tokenizer of transformers that is written in Python."""

    def __init__(self, tokenizer: Any, num_ids: int = 0) -> None:
        super().__init__(len(tokenizer), num_ids, partial(chat_template_of, tokenizer))
        self._tokenizer, self.eos_token_ids = tokenizer, _end_of(tokenizer)
        self.special_tokens = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(_checked_text(text)))

    def encode_with_spans(self, text: str, is_marked: bool) -> tuple[list[int], list[tuple[int, int]]]:
        ids = list(self._tokenizer.encode(_checked_text(text), add_special_tokens=not is_marked))
        return ids, [(0, len(text))] * len(ids)  # it does not tell

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._decode(self._read_ids(token_ids))

    def detokenizer(self, context: Sequence[int] = ()) -> WindowDetokenizer:
        return WindowDetokenizer(self._decode, self._read_ids, self._with_text(context))

    def _read_ids(self, token_ids: Iterable[int]) -> list[int]:
        return self._with_text(_checked_ids(token_ids, self.num_ids))

    def _with_text(self, token_ids: Sequence[int]) -> list[int]:
        return [each for each in token_ids if 0 <= each < self.vocab_size and each not in self.special_tokens]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def load_tokenizer(folder: str | Path, num_ids: int = 0) -> Tokenizer:
    """Returns the tokenizer of a model's `folder`: `ByteTokenizer` if its config names that, else `tokenizer.json`.

    Raises ModelError if there is neither. `num_ids`: how many ids the model has, if its config does not say.
    """
    folder = read_folder("load_tokenizer: folder", folder)
    with naming(folder):
        size = read_config(folder, is_optional=True).get("vocab_size")
    num_ids = max(num_ids, size if is_integer(size) else 0)
    if holds_bytes(folder):
        return ByteTokenizer(num_ids, FolderChat(folder))
    path = folder / "tokenizer.json"
    if not path.is_file():
        with naming(folder):
            has_code = not is_off(read_json(folder / "tokenizer_config.json", is_optional=True).get("auto_map"))
        way = "pass token ids, or as tokenizer what AutoTokenizer.from_pretrained(.., trust_remote_code=True) returns"
        own = f"the code that its auto_map names is not run: {way}"
        fault = own if has_code else "its config names no ByteTokenizer"
        raise ModelError(f"{brief(str(folder), 250)} holds no tokenizer.json, and {fault}")
    with naming(folder):
        check_file_size(path)
    try:
        import tokenizers
    except ImportError:
        fault = f"reading {brief(str(path), 250)} needs tokenizers: pip install 'eagle_kernels[models]'"
        raise ModelError(fault) from None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise ModelError(f"{brief(str(path), 250)} cannot be read: {first_line(error)}") from None
    return FileTokenizer(backend, read_eos_token_ids(folder), num_ids, FolderChat(folder))


_MEMBERS = ("encode", "decode", "detokenizer", "vocab_size", "eos_token_ids")


def as_tokenizer(tokenizer: Any, num_ids: int, caller: str) -> Tokenizer:
    """Returns what keeps the protocol as it is, a wrapper of a tokenizer of transformers or `tokenizers`, and what
    `load_tokenizer` makes of a folder. `num_ids`: how many ids the model has."""
    if isinstance(tokenizer, (str, Path)):
        return load_tokenizer(tokenizer, num_ids)

    def has(*names: str) -> bool:
        return not isinstance(tokenizer, type) and all(hasattr(tokenizer, name) for name in names)

    if has(*_MEMBERS):
        if isinstance(tokenizer, Chats):  # ours; the model may have more ids than its folder said
            tokenizer.allow(num_ids)
        return tokenizer
    if has("backend_tokenizer", "special_tokens_map"):  # of transformers
        backend, chat = tokenizer.backend_tokenizer, partial(chat_template_of, tokenizer)
        return FileTokenizer(_copy(backend), _end_of(tokenizer), num_ids, chat)
    if has("all_special_ids", "special_tokens_map", "encode", "decode", "__len__"):
        return PythonTokenizer(tokenizer, num_ids)
    if has("id_to_token", "get_added_tokens_decoder", "decoder"):
        return FileTokenizer(_copy(tokenizer), (), num_ids)
    lacks = ", ".join(name for name in _MEMBERS if not has(name))
    rule = f"be a folder, a tokenizer of transformers or tokenizers, or have {lacks}"
    raise ValueError(f"{caller}: tokenizer must {rule}, got {shown(tokenizer)}")


def _copy(backend: Any) -> Any:
    """Returns a copy that the caller's changes do not reach, or the original if it has parts that cannot be copied."""
    try:
        return copy.deepcopy(backend)
    except Exception:  # the package raises nothing narrower
        return backend


def _end_of(tokenizer: Any) -> tuple[int, ...]:
    """Returns the end token of a tokenizer of transformers."""
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


def holds_bytes(folder: Path) -> bool:
    """Returns whether the tokenizer of a model folder is `ByteTokenizer`."""
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
        raise ModelError(f"{rule}, but only the {'first' if second is None else 'second'} has a tokenizer.json")
    for token in first.keys() & second.keys():
        if first[token] != second[token]:
            raise ModelError(f"{rule}, but {shown(token)} is {first[token]} in one and {second[token]} in the other")
    rest = sorted(first.keys() ^ second.keys())
    if rest:
        raise ModelError(f"{rule}, but only the {'first' if rest[0] in first else 'second'} has {shown(rest[0])}")
    return True


# of tokenizers without a tokenizer.json
_OLD_FILES = ("tokenizer.model", "tiktoken.model", "vocab.json", "tekken.json", "vocab.txt")


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
