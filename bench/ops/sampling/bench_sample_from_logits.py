"""sample_from_logits with and without filters.

Every row is all but decided, so that providers can be compared, but for rows that are flat: standard normal noise, of
which filters keep tens of thousands of tokens.
"""

import torch

from bench.harness import grid
from bench.harness.inputs import LARGE_VOCABULARY, NARROW_LEAD, ODD_BATCH, VOCABULARY, decisive_logits, of_vocabulary
from bench.harness.torch_forms import sample

FILTERS = ["no filters", "top-k 50 top-p 0.9"]
FLAT = "flat, T 0.8 top-p 0.95"
CASES = [
    *grid(filters=FILTERS, rows=[1, 32, 256], vocab_size=VOCABULARY),
    *grid(filters=FILTERS, rows=ODD_BATCH, vocab_size=LARGE_VOCABULARY),
    *grid(filters=FLAT, rows=[1, 64], vocab_size=VOCABULARY),
]
SMALL_CASES = grid(filters=FILTERS, rows=3, vocab_size=300)


def name(rows, filters, vocab_size):
    return f"rows={rows} {filters}{of_vocabulary(vocab_size)}"


def is_checked(rows, filters, vocab_size):
    return rows <= 64 and filters != FLAT


def make(device, rows, filters, vocab_size):
    values = {
        "logits": decisive_logits(torch.randint(vocab_size, (rows,), device=device), vocab_size, NARROW_LEAD),
        "positions": torch.randint(4096, (rows,), device=device),
        "seeds": torch.randint(2**60, (rows,), device=device),
        "temperature": torch.ones(rows, device=device),
    }
    if filters == FLAT:
        values["logits"] = torch.randn(rows, vocab_size, device=device).to(torch.bfloat16)
        values["temperature"], values["top_p"] = (torch.full((rows,), part, device=device) for part in (0.8, 0.95))
    elif filters == FILTERS[1]:
        values["top_k"] = torch.full((rows,), 50, dtype=torch.int32, device=device)
        values["top_p"] = torch.full((rows,), 0.9, device=device)
    return values


def count_bytes(rows, filters, vocab_size):
    return rows * vocab_size * 2


def prepare_torch(values):
    return lambda: sample(values["logits"], values["temperature"], values.get("top_k"), values.get("top_p"))
