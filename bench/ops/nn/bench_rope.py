"""rope of the heads of an 8B model, parts of a fused projection, over tokens."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.harness.inputs import half_dtype, rotary_tables
from bench.peers import sglang_ops
from bench.peers.torch_compile import compiled
from bench.run import main

NUM_POSITIONS = 8192


def make(device, num_tokens, num_heads, num_kv_heads, head_dim, is_interleaved):
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=device).to(half_dtype(device))
    return rotary_tables(device, NUM_POSITIONS, head_dim) | {
        "query": heads[:, :num_heads],
        "key": heads[:, num_heads : num_heads + num_kv_heads],
        "positions": torch.randint(NUM_POSITIONS, (num_tokens,), device=device),
        "is_interleaved": is_interleaved,
    }


def count_bytes(num_tokens, num_heads, num_kv_heads, head_dim, is_interleaved):
    return num_tokens * (2 * 2 * (num_heads + num_kv_heads) * head_dim + 2 * head_dim + 8)


def prepare_torch(values):
    """As Hugging Face's models do it, on tables that hold each column twice."""
    positions, is_interleaved = values["positions"], values["is_interleaved"]
    wide = [torch.cat((table, table), dim=-1) for table in (values["cos"], values["sin"])]
    if is_interleaved:
        wide = [table.repeat_interleave(2, dim=-1) for table in (values["cos"], values["sin"])]

    def rotate_half(heads):
        if is_interleaved:
            return torch.stack((-heads[..., 1::2], heads[..., 0::2]), dim=-1).flatten(-2)
        low, high = heads.chunk(2, dim=-1)
        return torch.cat((-high, low), dim=-1)

    def run():
        cos, sin = (table[positions][:, None] for table in wide)
        return {name: values[name] * cos + rotate_half(values[name]) * sin for name in ("query", "key")}

    return run


def _case(num_tokens, is_interleaved=False, num_heads=32, num_kv_heads=8, head_dim=128):
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    sizes |= {"num_tokens": num_tokens, "is_interleaved": is_interleaved}
    return Case(f"T={num_tokens}" + (" interleaved" if is_interleaved else ""), sizes)


BENCHMARK = Benchmark(
    path="nn.rope",
    cases=[*(_case(tokens) for tokens in (1, 8, 64, 512, 4096)), *(_case(tokens, True) for tokens in (1, 64, 4096))],
    small_cases=[_case(3, flag, num_heads=4, num_kv_heads=2, head_dim=32) for flag in (False, True)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    peers={"torch_compile": compiled(prepare_torch), "sglang": sglang_ops.rope},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
