"""gqa_decode over batch sizes and lengths: 32 query heads, 8 KV heads of 128."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.harness.inputs import contiguous_cache, paged_cache
from bench.peers import flashinfer
from bench.run import main

PAGE_SIZE = 16


def make(device, batch_size, length, num_heads, num_kv_heads, head_dim):
    values = paged_cache(device, batch_size, length, PAGE_SIZE, num_kv_heads, head_dim)
    query = torch.randn(batch_size, num_heads, head_dim, device=device).to(values["k_cache"].dtype)
    return values | {"query": query, "seq_lens": torch.full((batch_size,), length, dtype=torch.int32, device=device)}


def count_bytes(batch_size, length, num_heads, num_kv_heads, head_dim):
    return 2 * 2 * batch_size * head_dim * (length * num_kv_heads + num_heads)


def prepare_torch(values):
    """Scaled dot product attention on contiguous keys and values: no pages to follow."""
    key, value = contiguous_cache(values, int(values["seq_lens"][0]))
    query = values["query"][:, :, None]
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: {"output": attention(query, key, value, enable_gqa=True)[:, :, 0]}


def _case(batch_size, length, num_heads=32, num_kv_heads=8, head_dim=128):
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return Case(f"B={batch_size} L={length}", {"batch_size": batch_size, "length": length} | sizes)


BENCHMARK = Benchmark(
    path="attention.gqa_decode",
    cases=[
        _case(batch_size, length * 1024)
        for batch_size, lengths in ((1, (1, 8, 32, 128)), (8, (1, 8, 32)), (32, (1, 4, 8)), (128, (1, 4)))
        for length in lengths
    ],
    small_cases=[_case(2, 40, num_heads=4, num_kv_heads=2, head_dim=32)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    peers={"flashinfer": flashinfer.gqa_decode},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
