"""Training data of a head: texts and conversations from the user's files, as tokens with a mask.

| file | holds | learnt |
|---|---|---|
| `.txt` | plain text | every token |
| `.jsonl` | `{"text": ...}` a line | every token |
| `.jsonl` | `{"prompt": ..., "response": ...}` a line | the response |
| `.jsonl` | `{"conversations": [{"from": ..., "value": ...}, ...]}` a line | the answers |

Conversations may also use the keys `messages`, `role` and `content`. Examples longer than a window are cut into
several. An error about a line names it as file:line.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_kernels.runtime.values import parse_json, shown

from .chat import ChatFormat, FolderTokenizer, Turn, encode_prompt, encode_turns

TEXT_PROMPT_TOKENS = 64  # the most tokens of a text that are used as a prompt
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


class Example(NamedTuple):
    """At most a window of tokens."""

    tokens: Tensor  # [T] int32
    is_learnt: Tensor  # [T] bool: whether the token after this one is; True at the end of a text, all of which is
    turns: tuple[Turn, ...] | None = None  # of a conversation in its first window, () in its later ones; None: a text

    @property
    def digest(self) -> str:
        contents = self.tokens.numpy().tobytes() + self.is_learnt.numpy().tobytes()
        return hashlib.sha256(contents + repr(self.turns).encode()).hexdigest()


class Batch(NamedTuple):
    """Examples side by side, padded at the end."""

    tokens: Tensor  # [B, T] int64
    is_learnt: Tensor  # [B, T] bool, as of `Example`, False in the padding


def read_examples(
    paths: Sequence[Path], tokenizer: FolderTokenizer, chat: ChatFormat, window: int, *, needs_answers: bool
) -> list[Example]:
    """Returns all examples of the files, in order.

    needs_answers   refuses conversations without an answer; otherwise they may end in a question
    """
    examples = []
    for path in paths:
        if path.suffix not in (".txt", ".jsonl"):
            raise ValueError(f"{path}: data files must end in .txt or .jsonl")
        texts = _read_utf8(path)
        if path.suffix == ".txt":
            examples += _text_windows(texts, tokenizer, window)
            continue
        for number, line in enumerate(texts.split("\n"), start=1):
            if line.strip():
                try:
                    examples += _read_line(line, tokenizer, chat, window, needs_answers)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}") from None
    if len(examples) < 2:
        raise ValueError(
            f"{', '.join(map(str, paths))}: {len(examples)} examples of up to {window} tokens; there must be at least "
            "one for training and one for validation"
        )
    return examples


def split_held_out(examples: list[Example], share: float) -> tuple[list[Example], list[Example]]:
    """Splits into (training, held out), at least one example each; equal examples are on the same side."""
    digests = [example.digest for example in examples]
    ordered = sorted(set(digests))
    count = min(max(1, round(share * len(ordered))), len(ordered) - 1)
    if count < 1:
        raise ValueError("all examples of the data are equal, so none can be held out for validation")
    chosen = set(ordered[:count])
    sides = ([], [])
    for example, digest in zip(examples, digests):
        sides[digest in chosen].append(example)
    return sides


def teaches(example: Example) -> bool:
    """Tells whether an example teaches anything: its second token is never drafted, since that row would need the
    feature of a token before the first."""
    return bool(example.is_learnt[1:].any())


def prompts_of(example: Example, tokenizer: FolderTokenizer, chat: ChatFormat, most: int) -> list[list[int]]:
    """Returns prompts for the target: the turns before each answer of a conversation, which are never cut, or the
    beginning of a text, of at most `most` tokens."""
    if not example.turns:
        half = len(example.tokens) // 2 if example.turns is None else 0
        return [example.tokens[: min(TEXT_PROMPT_TOKENS, half, most)].tolist()] if half else []
    asked = [index for index, turn in enumerate(example.turns) if turn.is_answer]
    if not example.turns[-1].is_answer:
        asked.append(len(example.turns))
    return [encode_prompt(example.turns[:index], chat, tokenizer) for index in asked if index > 0]


def count_tokens(examples: list[Example], vocab_size: int) -> Tensor:
    """Counts how often each token is to be learnt, [V] int64."""
    learnt = torch.cat([example.tokens[1:][example.is_learnt[:-1]] for example in examples])
    return torch.bincount(learnt, minlength=vocab_size)


def collate(examples: list[Example], shortest: int) -> Batch:
    """Pads the examples to one batch, at least `shortest` tokens wide; causal rows do not see the padding."""
    width = max(shortest, *(len(example.tokens) for example in examples))
    tokens = torch.zeros(len(examples), width, dtype=torch.int64, device="cpu")
    is_learnt = torch.zeros(len(examples), width, dtype=torch.bool, device="cpu")
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = example.tokens
        is_learnt[row, : len(example.tokens)] = example.is_learnt
    return Batch(tokens, is_learnt)


def learn_answer(prompt: list[int], answer: list[int]) -> Example:
    """Returns the example of a prompt and the target's answer."""
    is_answer = [False] * len(prompt) + [True] * len(answer)
    return Example(torch.tensor(prompt + answer, dtype=torch.int32, device="cpu"), _before(is_answer))


def _read_utf8(path: Path) -> str:
    contents = path.read_bytes()
    try:
        return contents.decode("utf-8")
    except UnicodeDecodeError as error:
        line = contents.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: not UTF-8: {error.reason}") from None


def _read_line(
    line: str, tokenizer: FolderTokenizer, chat: ChatFormat, window: int, needs_answers: bool
) -> Iterator[Example]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    kinds = [name for name in ("text", "prompt", "conversations", "messages") if name in record]
    if len(kinds) != 1:
        raise ValueError(f"needs one of text, prompt, conversations or messages, has {' and '.join(kinds) or 'none'}")
    if kinds == ["text"]:
        return _text_windows(_read_string(record, "text"), tokenizer, window)
    turns = _read_pair(record) if kinds == ["prompt"] else _read_conversation(record[kinds[0]], kinds[0])
    if needs_answers and not any(turn.is_answer for turn in turns):
        raise ValueError("there is no answer to learn from (with --regenerate the target writes the answers)")
    ids, is_answer = encode_turns(turns, chat, tokenizer)
    windows = _windows_of(ids, _before(is_answer), window, turns)
    return (example for example in windows if teaches(example) or not needs_answers)


def _read_pair(record: dict[str, Any]) -> tuple[Turn, ...]:
    prompt = Turn("prompt", _read_string(record, "prompt"))
    return (prompt, Turn("response", _read_string(record, "response"))) if "response" in record else (prompt,)


def _read_conversation(entries: Any, name: str) -> tuple[Turn, ...]:
    if not (isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries)):
        raise ValueError(f"{name} must be a list of objects that is not empty")
    turns = []
    for entry in entries:
        role = entry.get("role", entry.get("from"))
        if not (isinstance(role, str) and role in ROLES):
            raise ValueError(f"{name}: role must be one of {', '.join(ROLES)}, got {shown(role)}")
        turns.append(Turn(ROLES[role], _read_string(entry, "content" if "content" in entry else "value")))
    if turns[0].role == "assistant":
        raise ValueError(f"{name} must not begin with an answer")
    return tuple(turns)


def _read_string(record: dict[str, Any], name: str) -> str:
    value = record.get(name)
    if not (isinstance(value, str) and value.strip()):
        raise ValueError(f"{name} must be a string that is not blank, got {shown(value)}")
    return value


def _text_windows(text: str, tokenizer: FolderTokenizer, window: int) -> Iterator[Example]:
    ids = tokenizer.encode(text) + list(tokenizer.eos_token_ids[:1])
    return filter(teaches, _windows_of(ids, torch.ones(len(ids), dtype=torch.bool, device="cpu"), window))


def _before(is_answer: list[bool]) -> Tensor:
    """Tells for each token whether the next one is an answer's, [T] bool; False for the last."""
    return torch.tensor([*is_answer[1:], False], dtype=torch.bool, device="cpu")


def _windows_of(
    ids: list[int], is_learnt: Tensor, window: int, turns: tuple[Turn, ...] | None = None
) -> Iterator[Example]:
    tokens = torch.tensor(ids, dtype=torch.int32, device="cpu")
    for start in range(0, len(ids), window):
        rest = turns and ()
        yield Example(tokens[start : start + window], is_learnt[start : start + window], rest if start else turns)
