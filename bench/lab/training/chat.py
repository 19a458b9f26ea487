"""Conversations as tokens, and the tokens that belong to answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eagle_kernels.engine.models.chat_template import ChatTemplate, read_chat_template
from eagle_kernels.engine.models.tokenizer import ByteTokenizer, FileTokenizer

FolderTokenizer = ByteTokenizer | FileTokenizer  # what `load_tokenizer` returns


class Turn(NamedTuple):
    """A turn of one side; `role` is system, user or assistant, or prompt or response in a bare pair."""

    role: str
    text: str

    @property
    def is_answer(self) -> bool:
        return self.role in ("assistant", "response")


class PlainFormat:
    """Format with `role:`, a newline and the text; newlines join turns. A response follows its prompt directly."""

    is_complete = False  # whether the text has the target's marks of beginning and end

    def write(self, turns: Sequence[Turn], *, asks: bool = False) -> str:
        """Returns the text of the turns; with `asks`, up to where the next answer begins."""
        if turns[0].role == "prompt":
            return "".join(turn.text for turn in turns)
        lines = [f"{turn.role}:\n{turn.text}" for turn in turns]
        return "\n".join([*lines, "assistant:\n"] if asks else lines)


class TemplateFormat:
    """The chat template of the target's folder."""

    is_complete = True

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def write(self, turns: Sequence[Turn], *, asks: bool = False) -> str:
        roles = {"prompt": "user", "response": "assistant"}
        messages = [{"role": roles.get(turn.role, turn.role), "content": turn.text} for turn in turns]
        return self._template.write(messages, add_generation_prompt=asks)


ChatFormat = PlainFormat | TemplateFormat


def chat_format_of(folder: Path) -> tuple[ChatFormat, str]:
    """Returns the chat format of the target in this folder, and a description of it."""
    template = read_chat_template(folder)
    if template is None:
        return PlainFormat(), "roles and newlines (the target has no chat template)"
    return TemplateFormat(template), "the target's chat template"


def encode_turns(turns: Sequence[Turn], chat: ChatFormat, tokenizer: FolderTokenizer) -> tuple[list[int], list[bool]]:
    """Returns the ids, and whether each belongs to an answer or is the token after it, which ends the turn."""
    text, places = _places(turns, chat)
    ids, spans = tokenizer.encode_with_spans(text, chat.is_complete)
    if not chat.is_complete and turns[-1].is_answer:
        ids, spans = ids + list(tokenizer.eos_token_ids[:1]), spans + [(len(text), len(text))]
    is_answer = [False] * len(ids)
    for turn, (begin, end) in zip(turns, places):
        if turn.is_answer:
            touched = [index for index, (low, high) in enumerate(spans) if low < end and high > begin]
            for index in (*touched, touched[-1] + 1):
                if index < len(ids):
                    is_answer[index] = True
    return ids, is_answer


def _places(turns: Sequence[Turn], chat: ChatFormat) -> tuple[str, list[tuple[int, int]]]:
    """Returns the text of the turns, and the range of each turn's own text in it. To find the text between them, the
    turns are also written with marks in place of their texts, which no text contains."""
    text = chat.write(turns)
    marks = [f"\ue000{index}\ue001" for index in range(len(turns))]
    frame = chat.write([turn._replace(text=mark) for turn, mark in zip(turns, marks)])
    between = []
    for mark in marks:
        before, _, frame = frame.partition(mark)
        between.append(before)
    for said in ([turn.text for turn in turns], [turn.text.strip() for turn in turns]):  # some templates trim
        places, written = [], ""
        for before, part in zip(between, said):
            written += before
            places.append((len(written), len(written) + len(part)))
            written += part
        if written + frame == text:
            return text, places
    raise ValueError("the chat template changes the messages, so answers cannot be found in its text")


def encode_prompt(turns: Sequence[Turn], chat: ChatFormat, tokenizer: FolderTokenizer) -> list[int]:
    """Returns the ids after which the target is to answer."""
    return tokenizer.encode_with_spans(chat.write(turns, asks=True), chat.is_complete)[0]
