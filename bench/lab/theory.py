"""The numbers of THEORY.md: `python -m bench.lab.theory` writes them into the page, `--check` tells whether they are up
to date.

The example runs the library's own reference of verification, with every outcome of its draws enumerated; the
predictions use what `python -m bench.run --app generation` has measured.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from eagle_kernels.reference.enumeration import (
    EnumeratedDraws,
    completed,
    enumerate_outcomes,
    text_law,
    total_variation,
)
from eagle_kernels.reference.ops.rejection.verify_chain import verify_request

from ..harness.markdown import fill_page
from .predictions import CONTEXT_TOKENS, GB_PER_S, intensity, measured_lines, of_presets
from .speedup import expected_tokens_of_chain, ideal_speedup

PAGE = Path(__file__).with_name("THEORY.md")
WORDS = "abc"
# P(next | last): rows and columns in the order of WORDS
TARGET = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.3, 0.3, 0.4]], dtype=torch.float64)
DRAFT = torch.tensor([[0.5, 0.4, 0.1], [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], dtype=torch.float64)
NUM_DRAFTS = 4
# of a large product on that GPU, as the model below finds it
TFLOP_PER_S = 620


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 1 from `--check` if a number differs."""
    return fill_page("bench.lab.theory", PAGE, arguments, parts)


def parts() -> dict[str, str]:
    """Returns what stands between the marks of the page."""
    model = of_presets(measured_lines("generation"))
    return {"intensity": intensities(), "example": worked_example(), "model": model}


def intensities() -> str:
    """Returns operations a byte of some steps, and what share of the arithmetic each leaves in use, as Markdown."""
    shape, reach = "llama-3.1-8b", 1e3 * TFLOP_PER_S / GB_PER_S
    steps = {f"the 8B shape here, {rows} × 1 row": (rows, 1) for rows in (1, 32, 256)}
    steps |= {f"the same, 1 × {nodes} rows: a tree": (1, nodes) for nodes in (8, 64, 256)}
    lines = ["| step | operations a byte | breaks even at | in use |", "|---|--:|--:|--:|"]
    lines.append(f"| 7 billion weights of fp16, 1 row, by data sheets | 1.0 | {1e3 / 3:.0f} | {3 / 1e3:.1%} |")
    for name, (requests, rows) in steps.items():
        found = intensity(shape, requests, rows)
        lines.append(f"| {name} | {found:.1f} | {reach:.0f} | {min(1.0, found / reach):.1%} |")
    about = f"{GB_PER_S / 1e3:.2f} TB/s and {TFLOP_PER_S} TFLOP/s, measured on an H100; {CONTEXT_TOKENS} tokens each."
    return "\n".join([*lines, "", f"Here: {about}"])


def worked_example() -> str:
    """Returns the example of K = 4 drafts over three words, as Markdown."""
    accepted = torch.minimum(TARGET, DRAFT)
    residual = (TARGET - DRAFT)[0].clamp(min=0)
    rows = {
        "target p": TARGET[0],
        "draft q": DRAFT[0],
        "min(p, q): drawn and kept": accepted[0],
        "max(p - q, 0)": residual,
        "residual, drawn where it is not kept": residual / residual.sum(),
    }
    lines = ["| after `a` | " + " | ".join(f"`{word}`" for word in WORDS) + " | sum |", "|---|" + "--:|" * 4]
    for name, probs in rows.items():
        shown = [f"{prob:.3f}" for prob in (*probs.tolist(), float(probs.sum()))]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    likeliest = torch.nn.functional.one_hot(DRAFT.argmax(1), len(WORDS)).to(DRAFT.dtype)
    ways = {
        "rejection, drafts drawn from q": (accepted, _rejection_step),
        "sample and match, drafts drawn from q": (TARGET * DRAFT, partial(_match_step, DRAFT)),
        "sample and match, the draft's likeliest": (TARGET * likeliest, partial(_match_step, likeliest)),
    }
    lines += ["", "| K = 4, after `a` | P(1, 2, 3, 4 drafts kept) | tokens a step | enumerated | distance |"]
    lines += ["|---|---|--:|--:|--:|"]
    for name, (kept, step) in ways.items():
        shares = shares_kept(kept)
        law = enumerate_outcomes(step)
        enumerated = sum(probability * len(text) for text, probability in law.items())
        shown = ", ".join(f"{share:.4f}" for share in shares)
        distance = _distance(law)
        lines.append(f"| {name} | {shown} | {1 + sum(shares):.4f} | {enumerated:.4f} | {_told(distance)} |")
    wrong = _distance(enumerate_outcomes(_wrong_step))
    lines.append(f"| *wrong*: rejection that draws from p where a draft is not kept | | | | {wrong:.3f} |")
    rate = float(accepted[0].sum())
    tokens, speedup = expected_tokens_of_chain(rate, NUM_DRAFTS), ideal_speedup(rate, NUM_DRAFTS, 0.05)
    lines += ["", f"The rate after `a`, {rate:.1f}, at every depth would bring {tokens:.3f} tokens a step: with drafts"]
    lines += [f"that cost 0.05 of a step each, {speedup:.2f} times the speed, if verification were free."]
    return "\n".join(lines)


def shares_kept(kept: Tensor) -> list[float]:
    """Returns P(the first 1, 2, .. K drafts are kept) after `a`; kept [V, V]: P(next is drafted and kept | last)."""
    reached, shares = torch.eye(len(WORDS), dtype=torch.float64)[0], []
    for _ in range(NUM_DRAFTS):
        reached = reached @ kept
        shares.append(float(reached.sum()))
    return shares


def _rejection_step(source) -> tuple[int, ...]:
    tokens = [0]
    for _ in range(NUM_DRAFTS):
        tokens.append(source.choose(DRAFT[tokens[-1]]))
    positions = list(range(NUM_DRAFTS + 1))
    accepted, bonus = verify_request(
        tokens, TARGET[tokens], DRAFT[tokens[:-1]], positions, EnumeratedDraws(source), "standard"
    )
    return (*tokens[1 : accepted + 1], bonus)


def _wrong_step(source) -> tuple[int, ...]:
    tokens = [0]
    for _ in range(NUM_DRAFTS):
        last, draft = tokens[-1], source.choose(DRAFT[tokens[-1]])
        if not source.uniform() < float(TARGET[last, draft] / DRAFT[last, draft]):
            break
        tokens.append(draft)
    return (*tokens[1:], source.choose(TARGET[tokens[-1]]))


def _match_step(draft: Tensor, source) -> tuple[int, ...]:
    """Draws a step: the target's own tokens, up to the first that differs from the draft."""
    drafts = [0]
    for _ in range(NUM_DRAFTS):
        drafts.append(source.choose(draft[drafts[-1]]))
    text = [0]
    for guess in (*drafts[1:], None):
        text.append(source.choose(TARGET[text[-1]]))
        if text[-1] != guess:
            break
    return tuple(text[1:])


def _distance(law: dict[tuple[int, ...], float]) -> float:
    """Returns the total variation between texts of the target, and those that a step begins and the target ends."""
    target = _Texts()
    return total_variation(completed(law, target, NUM_DRAFTS + 1), text_law(target, NUM_DRAFTS + 1))


class _Texts(dict):
    """The target's law after every text that follows `a`."""

    def __missing__(self, text: tuple[int, ...]) -> Tensor:
        return TARGET[text[-1] if text else 0]


def _told(distance: float) -> str:
    return f"{distance:.3f}" if distance > 1e-9 else "0 (below 1e-12)" if distance < 1e-12 else f"{distance:.0e}"


if __name__ == "__main__":
    sys.exit(main())
