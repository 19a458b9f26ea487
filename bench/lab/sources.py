"""Where prompts come from: files, data sets of the Hugging Face hub, and texts of our own where neither is there."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

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


def read_questions(path: str | Path) -> list[tuple[str, str]]:
    """(domain, first turn) of a file in the manner of MT-bench: an object a line with `turns`, maybe `category`."""

    def read(values: dict) -> tuple[str, str]:
        category = str(values.get("category") or "").lower()
        return _CATEGORY_DOMAINS.get(category, "conversation"), _texts(values, "turns")[0]

    return _read_lines(path, read, "turns")


def read_file(path: str | Path) -> list[str]:
    """Prompts of a file: .jsonl of questions (first turns) or of objects with `prompt` or `text`; else as
    `read_prompts_file`, a .json list or one a line."""
    if Path(path).suffix != ".jsonl":
        return read_prompts_file(Path(path))

    def read(values: dict) -> list[str]:
        if "turns" in values:
            return _texts(values, "turns")[:1]
        return _texts(values, "prompt" if "prompt" in values else "text")

    return [text for texts in _read_lines(path, read, "prompt, text or turns") for text in texts]


def _read_lines(path: str | Path, read: Callable[[dict], Any], fields: str) -> list[Any]:
    """What is read of the object in each line."""
    found = []
    for number, line in enumerate(json_lines(path), 1):
        if line.strip():
            try:
                found.append(read(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(
                    f"{path}, line {number}: an object with {fields} was expected, got {line:.60}"
                ) from None
    if not found:
        raise ValueError(f"{path}: there is no prompt in it")
    return found


def _texts(values: dict, name: str) -> list[str]:
    """A string alone is a list of one."""
    texts = [values[name]] if isinstance(values[name], str) else values[name]
    if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts) and texts and texts[0].strip()):
        raise ValueError
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
    return list(itertools.islice(_wanted(map(prompt_of, rows), domain, count_tokens), count))


def _wanted(texts: Iterator[str | None], domain: str, count_tokens: Callable[[str], int]) -> Iterator[str]:
    for text in texts:
        if not text or not text.strip():
            continue
        if domain != "summarization":
            yield text
        elif count_tokens(text) <= _MOST_ARTICLE_TOKENS:
            yield text + _ASK_FOR_SUMMARY
