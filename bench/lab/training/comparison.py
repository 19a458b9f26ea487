"""What drafts of several kinds bring: tokens a step and a second, as chains and as trees of as many nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle_kernels.engine.config.eagle_config import EAGLEConfig
from eagle_kernels.engine.inference import EAGLEInference
from eagle_kernels.engine.models.decoder import Decoder

from .kinds import KINDS

BATCH_SIZES = (1, 8)


class Decoded(NamedTuple):
    """Holds texts, the steps of their requests, the tokens that these brought, and the seconds that they took."""

    texts: list[list[int]]
    steps: int
    tokens: int
    seconds: float

    @property
    def tokens_a_second(self) -> float:
        return self.tokens / self.seconds


def shapes_of(levels: int) -> dict[str, dict[str, int]]:
    """Returns the trees that are compared: a chain, a tree of as many nodes, and a larger one."""
    return {
        f"chain of {levels}": {"topk": 1, "num_steps": levels, "num_draft_tokens": levels + 1},
        f"tree of {levels + 1} nodes": {"topk": 4, "num_steps": levels, "num_draft_tokens": levels + 1},
        "tree of 32 nodes": {"topk": 8, "num_steps": levels, "num_draft_tokens": 32},
    }


def compare(
    folder: Path, kind: str, target: Decoder, prompts: Mapping[str, list[list[int]]], levels: int, new_tokens: int
) -> list[dict[str, Any]]:
    """Returns a row for each tree and number of requests: tokens a step, and tokens a second beside plain decoding.

    prompts: by the domain of the text. Each has its tokens a step in `by_domain`.

    Texts are greedy, without end tokens; the engine reads the draft from its folder, as a user's does.
    """
    longest = max(len(prompt) for some in prompts.values() for prompt in some) + new_tokens
    draft, rows = KINDS[kind].load(folder, target), []
    for requests in BATCH_SIZES:
        plain = None
        for name, shape in shapes_of(levels).items():
            config = EAGLEConfig(**shape, eos_token_ids=(), max_batch=requests, max_length=longest)
            engine = EAGLEInference(draft, target, config)
            plain = plain or _total(
                [decode_all(engine, some, requests, new_tokens, speculative=False) for some in prompts.values()]
            )
            parts = {name: decode_all(engine, some, requests, new_tokens) for name, some in prompts.items()}
            made = _total([*parts.values()])
            same = [text == other for text, other in zip(made.texts, plain.texts, strict=True)]
            rows.append({
                "kind": kind, "drafts": name, "requests": requests, "nodes": shape["num_draft_tokens"],
                "tokens_a_step": round(made.tokens / made.steps, 4),
                "tokens_a_second": round(made.tokens_a_second, 1),
                "of_plain": round(made.tokens_a_second / plain.tokens_a_second, 4),
                "same_as_plain": round(sum(same) / len(same), 4),
                "by_domain": {domain: round(part.tokens / part.steps, 4) for domain, part in parts.items()},
            })  # fmt: skip
    return rows


def _total(parts: Sequence[Decoded]) -> Decoded:
    texts = [text for part in parts for text in part.texts]
    return Decoded(texts, *(sum(numbers) for numbers in zip(*(part[1:] for part in parts))))


def decode_all(
    engine: EAGLEInference, prompts: Sequence[list[int]], requests: int, new_tokens: int, speculative: bool = True
) -> Decoded:
    """Decodes the prompts, so many at a time; the first ones are decoded before, to warm up."""
    options = {"speculative": speculative, "progress": False}
    engine.generate(list(prompts[:requests]), min(8, new_tokens), **options)
    texts, steps, accepted, seconds = [], 0, 0, 0.0
    for first in range(0, len(prompts), requests):
        output = engine.generate(list(prompts[first : first + requests]), new_tokens, **options)
        texts += output.output_ids
        steps += output.stats.steps
        accepted += output.stats.accepted
        seconds += output.stats.decode_time_s
    return Decoded(texts, steps, steps + accepted, seconds)


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Returns rows of `compare` as a Markdown table."""
    domains = list(dict.fromkeys(domain for row in rows for domain in row["by_domain"]))
    domains = domains if len(domains) > 1 else []
    heads = ["kind", "drafts", "requests", "tokens a step", *(f"in {domain}" for domain in domains), "tokens a second",
             "of plain"]  # fmt: skip
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        steps = [f"{row['by_domain'][domain]:.2f}" if domain in row["by_domain"] else "-" for domain in domains]
        lines.append([row["kind"], row["drafts"], str(row["requests"]), f"{row['tokens_a_step']:.2f}", *steps,
                      f"{row['tokens_a_second']:.0f}", f"{row['of_plain']:.2f}x"])  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def best_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the row with the most tokens a second for one request."""
    return max((row for row in rows if row["requests"] == 1), key=lambda row: row["tokens_a_second"])
