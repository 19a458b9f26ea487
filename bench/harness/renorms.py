"""What the benchmarks of the renormalising filters share: rows of probabilities, and their cases."""

import torch

from .declaration import grid
from .inputs import LARGE_VOCABULARY, ODD_BATCH, VOCABULARY, of_vocabulary

KINDS = ["flat", "50 nonzeros"]
CASES = [
    *grid(kind=KINDS, rows=[8, 64, 256, 1024, 2048], vocab_size=VOCABULARY),
    *grid(kind=KINDS, rows=8 * ODD_BATCH, vocab_size=LARGE_VOCABULARY),
]
SMALL_CASES = grid(kind=KINDS, rows=2, vocab_size=300)


def name(rows: int, vocab_size: int, kind: str, **parameter) -> str:
    (named,) = (f"{name}={value}" for name, value in parameter.items())
    return f"rows={rows} {kind} {named}{of_vocabulary(vocab_size)}"


def make_probs(device, rows: int, vocab_size: int, kind: str) -> torch.Tensor:
    """flat: softmax of normal logits, 0.9 of it in 40% of the ids. 50 nonzeros: of that the most likely ids alone."""
    probs = torch.softmax(torch.randn(rows, vocab_size, device=device), dim=-1)
    if kind == "flat":
        return probs
    values, ids = probs.topk(min(50, vocab_size))
    return torch.zeros_like(probs).scatter_(1, ids, values / values.sum(dim=1, keepdim=True))


def count_bytes(rows: int, vocab_size: int, **others) -> int:
    """One read and one write of fp32."""
    return rows * vocab_size * 8


def is_checked(rows: int, **others) -> bool:
    return rows <= 64


def divided(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)
