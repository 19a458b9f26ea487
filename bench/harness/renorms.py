"""What the benchmarks of the renormalising filters share: rows of probabilities, and their cases."""

from __future__ import annotations

import torch

from .declaration import Case
from .inputs import LARGE_VOCABULARY, ODD_BATCH, VOCABULARY, of_vocabulary

KINDS = ("flat", "50 nonzeros")


def make_probs(device, rows: int, vocab_size: int, kind: str) -> torch.Tensor:
    """flat: softmax of normal logits, 0.9 of it in 40% of the ids. 50 nonzeros: of that the most likely ids alone."""
    probs = torch.softmax(torch.randn(rows, vocab_size, device=device), dim=-1)
    if kind == "flat":
        return probs
    values, ids = probs.topk(min(50, vocab_size))
    return torch.zeros_like(probs).scatter_(1, ids, values / values.sum(dim=1, keepdim=True))


def count_bytes(rows: int, vocab_size: int, kind: str, **parameters) -> int:
    """One read and one write of fp32."""
    return rows * vocab_size * 8


def cases(**parameters) -> list[Case]:
    return [
        *(_case(rows, VOCABULARY, kind, parameters) for kind in KINDS for rows in (8, 64, 256, 1024, 2048)),
        *(_case(8 * ODD_BATCH, LARGE_VOCABULARY, kind, parameters) for kind in KINDS),
    ]


def small_cases(**parameters) -> list[Case]:
    return [_case(2, 300, kind, parameters) for kind in KINDS]


def divided(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)


def _case(rows: int, vocab_size: int, kind: str, parameters: dict) -> Case:
    named = " ".join(f"{name}={value}" for name, value in parameters.items())
    sizes = {"rows": rows, "vocab_size": vocab_size, "kind": kind, **parameters}
    return Case(f"rows={rows} {kind} {named}{of_vocabulary(vocab_size)}", sizes, is_checked=rows <= 64)
