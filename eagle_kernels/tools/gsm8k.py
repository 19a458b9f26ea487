"""Questions of GSM8K (arXiv 2110.14168): few-shot prompts, the answers in the texts, and how many are right. A file has
one JSON object a line, {"question": .., "answer": ..}, whose answer ends with "#### " and a number. The first examples
of the file are shown in every prompt, with their answers; the others are asked."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..engine.inference import EAGLEInference
from ..runtime.values import parse_json, shown

# a text that goes on with another question has said its answer
STOP = ("Question:",)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Example(NamedTuple):
    """Holds a question, its worked answer, and the number that this ends with."""

    question: str
    answer: str
    value: float


@dataclass
class Accuracy:
    """Holds how many questions were answered, and how."""

    questions: int
    correct: int  # answered with the right number
    invalid: int  # texts without a number
    output_tokens: int
    time_s: float
    mean_accept_length: float  # mean tokens per step, bonus token included
    texts: list[str]  # after each prompt

    @property
    def accuracy(self) -> float:
        return self.correct / self.questions

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.time_s


def read_examples(path: str | Path) -> list[Example]:
    """Reads a file of examples; raises ValueError where there is none, or for a line that is no example, by number."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file of questions") from None
    except ValueError as error:
        raise ValueError(f"{path}: must be UTF-8 text: {error}") from None
    return [_example(f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()]


def _example(place: str, line: str) -> Example:
    try:
        fields = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{place}: must be a JSON object, got {shown(line)} ({error})") from None
    if not isinstance(fields, dict) or not all(isinstance(fields.get(name), str) for name in ("question", "answer")):
        raise ValueError(f"{place}: must be a JSON object with texts 'question' and 'answer', got {shown(line)}")
    value = last_number(fields["answer"].rpartition("####")[2]) if "####" in fields["answer"] else None
    if value is None:
        raise ValueError(f"{place}: answer must end with '#### ' and a number, got {shown(fields['answer'])}")
    return Example(fields["question"], fields["answer"], value)


def last_number(text: str) -> float | None:
    """Returns the last number in a text, without commas between digits; None if there is none."""
    numbers = _NUMBER.findall(re.sub(r"(?<=\d),(?=\d)", "", text))
    return float(numbers[-1]) if numbers else None


def prompts_of(
    examples: Sequence[Example], num_shots: int, num_questions: int | None
) -> tuple[list[str], list[Example]]:
    """Returns a prompt for each question after the first num_shots, and these questions; raises ValueError for none."""
    asked = list(examples[num_shots:] if num_questions is None else examples[num_shots : num_shots + num_questions])
    if num_shots < 0 or not asked:
        raise ValueError(f"--num-shots must leave a question to ask, got {num_shots} of {len(examples)} examples")
    shots = "".join(f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in examples[:num_shots])
    return [f"{shots}Question: {example.question}\nAnswer:" for example in asked], asked


def evaluate(
    engine: EAGLEInference, prompts: Sequence[str], asked: Sequence[Example], max_new_tokens: int, **options
) -> Accuracy:
    """Answers all prompts at once; `options` are those of `EAGLEInference.generate`, such as speculative=False."""
    engine.forget_prefixes()  # of an earlier run
    start_s = time.perf_counter()
    stream = engine.stream(
        [engine.tokenizer.encode(prompt) for prompt in prompts], max_new_tokens, stop=STOP, **options
    )
    for _ in stream:
        pass
    time_s, stats = time.perf_counter() - start_s, stream.output().stats
    texts = [request.text or "" for request in stream.requests]
    values = [last_number(text) for text in texts]
    return Accuracy(
        questions=len(asked), correct=sum(value == example.value for value, example in zip(values, asked)),
        invalid=sum(value is None for value in values), output_tokens=stats.generated_tokens,
        time_s=time_s, mean_accept_length=stats.mean_accept_length, texts=texts,
    )  # fmt: skip
