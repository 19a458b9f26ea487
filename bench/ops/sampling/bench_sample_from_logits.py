"""sample_from_logits with and without filters.

Every row is all but decided, so that providers can be compared, but for rows that are flat: standard normal noise, of
which filters keep tens of thousands of tokens.
"""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.harness.inputs import (
    LARGE_VOCABULARY,
    NARROW_LEAD,
    ODD_BATCH,
    VOCABULARY,
    decisive_logits,
    of_vocabulary,
)
from bench.harness.torch_sampling import sample
from bench.run import main


def make(device, rows, vocab_size, is_filtered, is_flat):
    values = {
        "logits": decisive_logits(torch.randint(vocab_size, (rows,), device=device), vocab_size, NARROW_LEAD),
        "positions": torch.randint(4096, (rows,), device=device),
        "seeds": torch.randint(2**60, (rows,), device=device),
        "temperature": torch.ones(rows, device=device),
    }
    if is_flat:
        values["logits"] = torch.randn(rows, vocab_size, device=device).to(torch.bfloat16)
        values["temperature"], values["top_p"] = (torch.full((rows,), part, device=device) for part in (0.8, 0.95))
    elif is_filtered:
        values["top_k"] = torch.full((rows,), 50, dtype=torch.int32, device=device)
        values["top_p"] = torch.full((rows,), 0.9, device=device)
    return values


def count_bytes(rows, vocab_size, is_filtered, is_flat):
    return rows * vocab_size * 2


def prepare_torch(values):
    return lambda: sample(values["logits"], values["temperature"], values.get("top_k"), values.get("top_p"))


def _case(rows, is_filtered, vocab_size=VOCABULARY, is_flat=False):
    filters = "flat, T 0.8 top-p 0.95" if is_flat else "top-k 50 top-p 0.9" if is_filtered else "no filters"
    sizes = {"rows": rows, "vocab_size": vocab_size, "is_filtered": is_filtered, "is_flat": is_flat}
    return Case(f"rows={rows} {filters}{of_vocabulary(vocab_size)}", sizes, is_checked=rows <= 64 and not is_flat)


BENCHMARK = Benchmark(
    path="sampling.sample_from_logits",
    cases=[
        *(_case(rows, is_filtered) for is_filtered in (False, True) for rows in (1, 32, 256)),
        *(_case(ODD_BATCH, is_filtered, LARGE_VOCABULARY) for is_filtered in (False, True)),
        *(_case(rows, True, is_flat=True) for rows in (1, 64)),
    ],
    small_cases=[_case(3, is_filtered, vocab_size=300) for is_filtered in (False, True)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
