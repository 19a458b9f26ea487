"""prefill_attention of whole prompts, of contiguous keys and of paged ones; torch's fused attention beside it."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case, Unavailable
from bench.harness.inputs import HEADS, ODD_BATCH, SMALL_HEADS, lengths, paged_cache
from bench.peers import flashinfer
from bench.run import main


def make(device, batch_size, length, page_size, num_heads, num_kv_heads, head_dim, spread):
    seq_lens = lengths(batch_size, length, spread)
    bounds = torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0)).to(device, torch.int32)
    cache = paged_cache(device, batch_size, seq_lens, page_size or 16, num_kv_heads, head_dim)
    dtype, total = cache["k_cache"].dtype, int(seq_lens.sum())
    query = torch.randn(total, num_heads, head_dim, device=device).to(dtype)
    values = {"query": query, "qo_indptr": bounds, "max_query": length}
    if page_size:
        return values | cache | {"seq_lens": seq_lens.to(device)}
    keys = torch.randn(2, total, num_kv_heads, head_dim, device=device).to(dtype)
    return values | {"key": keys[0], "value": keys[1]}


def count_bytes(batch_size, length, page_size, num_heads, num_kv_heads, head_dim, spread):
    return 2 * 2 * int(lengths(batch_size, length, spread).sum()) * head_dim * (num_heads + num_kv_heads)


def prepare_torch(values):
    """Scaled dot product attention, causal, on requests of equal length; heads before tokens are views of the rows."""
    batch_size, length = len(values["qo_indptr"]) - 1, values["max_query"]
    if len(values["query"]) < batch_size * length:
        raise Unavailable("takes one length for all requests")
    if "key" in values:
        keys = [values[name].unflatten(0, (batch_size, length)) for name in ("key", "value")]
    else:
        table = values["block_table"].long()
        keys = [values[name][table].flatten(1, 2)[:, :length] for name in ("k_cache", "v_cache")]
    query, key, value = (rows.transpose(1, 2) for rows in (values["query"].unflatten(0, (batch_size, length)), *keys))
    attention = torch.nn.functional.scaled_dot_product_attention

    def run():
        output = attention(query, key, value, is_causal=True, enable_gqa=True)
        return {"output": output.transpose(1, 2).flatten(0, 1)}

    return run


def _case(batch_size, length, page_size=None, heads="32/8/128", spread="equal"):
    num_heads, num_kv_heads, head_dim = (HEADS | SMALL_HEADS)[heads]
    sizes = {"batch_size": batch_size, "length": length, "page_size": page_size, "num_heads": num_heads}
    sizes |= {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "spread": spread}
    pages = f" page {page_size}" if page_size else ""
    name = f"B={batch_size} L={length}{pages} heads {heads}" + ("" if spread == "equal" else f" {spread}")
    # the reference holds a float32 matrix of all queries and keys
    return Case(name, sizes, length <= 1024, length == 4096 and not page_size)


_SHAPES = [(1, 1024), (1, 4096), (8, 2048), (1, 16384)]

BENCHMARK = Benchmark(
    path="attention.prefill_attention",
    cases=[
        *(_case(*shape, page_size) for page_size in (None, 16, 64) for shape in _SHAPES),
        *(_case(ODD_BATCH, 4096, page_size, heads, "ragged") for page_size in (None, 16) for heads in HEADS),
        _case(64, 8192, 16, spread="long tail"),
    ],
    small_cases=[
        _case(2, 40, heads="4/2/32"),
        _case(2, 40, 16, heads="4/2/32"),
        _case(3, 40, heads="4/2/32", spread="ragged"),
        _case(3, 40, 16, heads="4/2/32", spread="long tail"),
    ],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    peers={"flashinfer": flashinfer.prefill_attention},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
