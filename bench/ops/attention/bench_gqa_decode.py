"""gqa_decode over batch sizes, lengths, equal and not, page sizes and head layouts; bf16 keys, and 8-bit ones."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case, Floor, Unavailable
from bench.harness.inputs import HEADS, ODD_BATCH, SMALL_HEADS, contiguous_cache, lengths, paged_cache
from bench.peers import flashinfer, sglang_triton
from bench.run import main


def make(device, batch_size, length, page_size, num_heads, num_kv_heads, head_dim, is_float8, is_deterministic, spread):
    seq_lens = lengths(batch_size, length, spread)
    values = paged_cache(device, batch_size, seq_lens, page_size, num_kv_heads, head_dim)
    values["query"] = torch.randn(batch_size, num_heads, head_dim, device=device).to(values["k_cache"].dtype)
    values["seq_lens"] = seq_lens.to(device)
    if is_float8:
        values |= {name: values[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
        values |= {name: torch.ones(1, device=device) for name in ("k_scale", "v_scale")}
    if is_deterministic:
        values["deterministic"] = True
    return values


def count_bytes(batch_size, length, page_size, num_heads, num_kv_heads, head_dim, is_float8, is_deterministic, spread):
    num_keys = int(lengths(batch_size, length, spread).sum())
    return 2 * head_dim * ((1 if is_float8 else 2) * num_keys * num_kv_heads + 2 * batch_size * num_heads)


def prepare_torch(values):
    """Scaled dot product attention on contiguous keys and values: no pages to follow. Unequal lengths are a mask."""
    seq_lens = values["seq_lens"]
    longest = int(seq_lens.max())
    if len(seq_lens) * longest > 1 << 22:
        raise Unavailable("takes one length for all requests, and as much memory")
    key, value = contiguous_cache(values, longest)
    query = values["query"][:, :, None]
    key, value = key.to(query.dtype), value.to(query.dtype)
    mask = None
    if int(seq_lens.min()) < longest:
        mask = (torch.arange(longest, device=query.device) < seq_lens[:, None])[:, None, None]
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: {"output": attention(query, key, value, attn_mask=mask, enable_gqa=True)[:, :, 0]}


def _case(batch_size, length, page_size=16, heads="32/8/128", is_float8=False, is_deterministic=False, spread="equal"):
    num_heads, num_kv_heads, head_dim = (HEADS | SMALL_HEADS)[heads]
    sizes = {"batch_size": batch_size, "length": length, "page_size": page_size, "num_heads": num_heads}
    sizes |= {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
    sizes |= {"is_float8": is_float8, "is_deterministic": is_deterministic, "spread": spread}
    name = f"B={batch_size} L={length} page {page_size} heads {heads}"
    name += " float8" if is_float8 else ""
    name += " deterministic" if is_deterministic else ""
    name += "" if spread == "equal" else f" {spread}"
    is_headline = heads == "32/8/128" and page_size == 16 and (batch_size, length) in ((8, 8192), (32, 8192))
    # the reference gathers every key in float32
    return Case(name, sizes, batch_size * length <= 1 << 17, is_headline)


_SHAPES = [
    (batch_size, length * 1024)
    for batch_size, lengths in ((1, (1, 8, 32, 128)), (8, (1, 8, 32)), (32, (1, 4, 8)), (128, (1, 4)))
    for length in lengths
]

# batch, longest, page size, heads
_RAGGED = (
    (64, 2048, 1, "32/8/128"), (48, 2000, 16, "32/8/128"), (ODD_BATCH, 20000, 16, "28/4/128"),
    (16, 8192, 64, "64/8/128"), (6, 6000, 1, "16/2/256"), (ODD_BATCH, 20000, 16, "16/2/256"),
)  # fmt: skip
_LONG_TAILED = ((64, 32768, 16, "32/8/128"), (256, 131072, 16, "28/4/128"), (ODD_BATCH, 65536, 1, "16/2/256"))

BENCHMARK = Benchmark(
    path="attention.gqa_decode",
    cases=[
        *(_case(*shape, page_size) for page_size in (1, 16) for shape in _SHAPES),
        *(_case(*shape, heads=heads) for heads in list(HEADS)[1:] for shape in _SHAPES),
        *(_case(*shape, is_float8=True) for shape in ((8, 8192), (32, 8192))),
        *(_case(*shape, is_deterministic=True) for shape in ((1, 8192), (8, 8192), (32, 8192))),
        *(_case(*shape) for shape in ((3, 8192), (ODD_BATCH, 8192))),
        *(_case(*shape, spread="ragged") for shape in _RAGGED),
        *(_case(*shape, spread="long tail") for shape in _LONG_TAILED),
    ],
    small_cases=[
        _case(2, 40, heads="4/2/32"),
        _case(2, 300, page_size=1, heads="4/2/32"),
        _case(3, 300, heads="4/2/32", spread="ragged"),
        _case(3, 300, page_size=1, heads="4/2/32", spread="long tail"),
    ],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    peers={"flashinfer": flashinfer.gqa_decode, "sglang_triton": sglang_triton.gqa_decode},
    floor=Floor("read", 0.0),
    sweep=[_case(batch_size, 1 << exponent) for batch_size in (1, 8, 32) for exponent in range(9, 18)
           if batch_size << exponent <= 1 << 20 and (batch_size, 1 << exponent) not in _SHAPES],
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
