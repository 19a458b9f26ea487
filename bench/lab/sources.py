"""Where prompts come from: files, data sets of the Hugging Face hub, and texts of our own where neither is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from eagle_kernels.tools.inspection import read_prompts_file

from .log import json_lines

Domain = Literal["code", "conversation", "summarization"]
DOMAINS: tuple[str, ...] = get_args(Domain)

_TEXTS = Path(__file__).parent / "texts"
_ASK_FOR_SUMMARY = "\n\nSummarize the above article:"
# longer articles are left out, not cut
_MOST_ARTICLE_TOKENS = 512
# of MT-bench, Spec-Bench and the like; all others are conversation
_CATEGORY_DOMAINS = {"coding": "code", "code": "code", "humaneval": "code", "summarization": "summarization"}

# the hub's name, configuration, split; the prompt in a row, None: the row has none
_DATASETS: dict[str, tuple[str, str | None, str, Callable[[dict], str | None]]] = {
    "code": ("openai/openai_humaneval", None, "test", lambda row: row["prompt"]),
    "conversation": ("tatsu-lab/alpaca", None, "train", lambda row: None if row["input"] else row["instruction"]),
    "summarization": ("abisee/cnn_dailymail", "3.0.0", "validation", lambda row: row["article"]),
}


class Question(NamedTuple):
    """A line of a `question.jsonl`: what is asked, turn by turn, and what the file says beside."""

    question_id: str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()

    @property
    def domain(self) -> str:
        return _CATEGORY_DOMAINS.get(self.category.lower(), "conversation")


def read_questions(path: str | Path) -> list[Question]:
    """Of a file in the manner of MT-bench: a JSON object a line with question_id, category, turns, maybe reference."""
    path, questions = Path(path), []
    for number, line in enumerate(json_lines(path), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            turns = _texts(values, "turns")
            if not turns or not turns[0].strip():
                raise ValueError("the first turn is empty")
            category = str(values.get("category") or "")
            reference = () if values.get("reference") is None else _texts(values, "reference")
            questions.append(Question(str(values["question_id"]), category, turns, reference))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
            raise ValueError(
                f"read_questions: {path}, line {number}: an object with question_id and turns was expected: {reason}"
            ) from None
    if not questions:
        raise ValueError(f"read_questions: {path}: there is no question in it")
    return questions


def _texts(values: Any, name: str) -> tuple[str, ...]:
    """A string alone is a list of one."""
    texts = [values[name]] if isinstance(values[name], str) else values[name]
    if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        raise ValueError(f"{name} must be a list of strings, got {texts!r:.60}")
    return tuple(texts)


def read_file(path: str | Path) -> list[str]:
    """Prompts of a file: .jsonl of questions (first turns) or of objects with `prompt` or `text`; else as
    `read_prompts_file`, a .json list or one a line."""
    path = Path(path)
    if path.suffix != ".jsonl":
        return read_prompts_file(path)
    lines = json_lines(path)
    first = next((line for line in lines if line.strip()), "")
    if '"turns"' in first:
        return [question.turns[0] for question in read_questions(path)]
    texts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                values = json.loads(line)
                texts += _texts(values, "prompt" if "prompt" in values else "text")
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"read_file: {path}, line {number}: an object with prompt, text or turns was expected"
                ) from None
    if not texts:
        raise ValueError(f"read_file: {path}: there is no prompt in it")
    return texts


def builtin_texts(domain: str) -> list[str]:
    """Written for this project; articles come with what is asked about them."""
    texts = (_TEXTS / f"{domain}.txt").read_text(encoding="utf-8").split("\n%%\n")
    ending = {"code": "\n", "summarization": _ASK_FOR_SUMMARY}.get(domain, "")
    return [text.rstrip("\n") + ending for text in texts]


def downloaded_texts(domain: str, count: int, count_tokens: Callable[[str], int]) -> list[str]:
    """The first `count` prompts of the domain's data set; raises whatever the hub or `datasets` raises."""
    import datasets

    name, configuration, split, prompt_of = _DATASETS[domain]
    rows = datasets.load_dataset(name, configuration, split=split, streaming=True)
    texts: list[str] = []
    for text in _wanted(map(prompt_of, rows), domain, count_tokens):
        texts.append(text)
        if len(texts) == count:
            break
    return texts


def _wanted(texts: Iterator[str | None], domain: str, count_tokens: Callable[[str], int]) -> Iterator[str]:
    for text in texts:
        if not text or not text.strip():
            continue
        if domain != "summarization":
            yield text
        elif count_tokens(text) <= _MOST_ARTICLE_TOKENS:
            yield text + _ASK_FOR_SUMMARY
