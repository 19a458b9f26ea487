"""What drafts of several kinds bring: tokens a step and a second, as chains and as trees of as many nodes."""

from __future__ import annotations

from collections.abc import Sequence
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
    folder: Path, kind: str, target: Decoder, prompts: Sequence[list[int]], levels: int, new_tokens: int
) -> list[dict[str, Any]]:
    """Returns a row for each tree and number of requests: tokens a step, and tokens a second beside plain decoding.

    Texts are greedy, without end tokens; the engine reads the draft from its folder, as a user's does.
    """
    draft, longest, rows = KINDS[kind].load(folder, target), max(map(len, prompts)) + new_tokens, []
    for requests in BATCH_SIZES:
        plain = None
        for name, shape in shapes_of(levels).items():
            config = EAGLEConfig(**shape, eos_token_ids=(), max_batch=requests, max_length=longest)
            engine = EAGLEInference(draft, target, config)
            plain = plain or decode_all(engine, prompts, requests, new_tokens, speculative=False)
            made = decode_all(engine, prompts, requests, new_tokens)
            same = [text == other for text, other in zip(made.texts, plain.texts, strict=True)]
            rows.append({
                "kind": kind, "drafts": name, "requests": requests, "nodes": shape["num_draft_tokens"],
                "tokens_a_step": round(made.tokens / made.steps, 4),
                "tokens_a_second": round(made.tokens_a_second, 1),
                "of_plain": round(made.tokens_a_second / plain.tokens_a_second, 4),
                "same_as_plain": round(sum(same) / len(same), 4),
            })  # fmt: skip
    return rows


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
    lines = ["| kind | drafts | requests | tokens a step | tokens a second | of plain |", "|---|---|---|---|---|---|"]
    return "\n".join(lines + [
        f"| {row['kind']} | {row['drafts']} | {row['requests']} | {row['tokens_a_step']:.2f} | "
        f"{row['tokens_a_second']:.0f} | {row['of_plain']:.2f}x |"
        for row in rows
    ])  # fmt: skip


def best_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the row with the most tokens a second for one request."""
    return max((row for row in rows if row["requests"] == 1), key=lambda row: row["tokens_a_second"])
