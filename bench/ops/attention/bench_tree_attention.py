"""tree_attention of a verify step, the tree's keys behind the prefix: 32 query heads, 8 KV heads of 128."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.harness.inputs import contiguous_cache, drafts, paged_cache
from bench.run import main
from eagle_kernels import reference

PAGE_SIZE = 16
# the tree that nodes come from: enough candidates for 64 of them
TOPK, SPEC_STEPS = 8, 5


def make(device, batch_size, prefix, num_nodes, num_heads, num_kv_heads, head_dim):
    values = paged_cache(device, batch_size, prefix + num_nodes, PAGE_SIZE, num_kv_heads, head_dim)
    tree = reference.ops.tree.build_tree.build_tree(**drafts("cpu", batch_size, TOPK, SPEC_STEPS, num_nodes))
    query = torch.randn(batch_size, num_nodes, num_heads, head_dim, device=device)
    return values | {
        "query": query.to(values["k_cache"].dtype),
        "tree_mask": tree.tree_mask.to(device),
        "num_draft_keys": num_nodes,
        "seq_lens": torch.full((batch_size,), prefix, dtype=torch.int32, device=device),
    }


def count_bytes(batch_size, prefix, num_nodes, num_heads, num_kv_heads, head_dim):
    return 2 * 2 * batch_size * head_dim * ((prefix + num_nodes) * num_kv_heads + num_nodes * num_heads)


def prepare_torch(values):
    """Scaled dot product attention on contiguous keys and values, with a bool mask over the prefix and the tree."""
    num_nodes, prefix = values["num_draft_keys"], int(values["seq_lens"][0])
    key, value = contiguous_cache(values, prefix + num_nodes)
    node = torch.arange(num_nodes, device=key.device)
    visible = ((values["tree_mask"][:, :, node // 64] >> (node % 64)) & 1).bool()
    mask = torch.nn.functional.pad(visible, (prefix, 0), value=True)[:, None]
    query = values["query"].transpose(1, 2)
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: {"output": attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)}


def _case(batch_size, prefix, num_nodes, num_heads=32, num_kv_heads=8, head_dim=128):
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    name = f"B={batch_size} L={prefix} N={num_nodes}"
    return Case(name, {"batch_size": batch_size, "prefix": prefix, "num_nodes": num_nodes} | sizes)


BENCHMARK = Benchmark(
    path="attention.tree_attention",
    cases=[
        _case(batch_size, prefix * 1024, num_nodes)
        for batch_size, prefix, num_nodes in (
            (1, 1, 64), (1, 8, 64), (1, 32, 64), (8, 1, 64), (8, 8, 64), (32, 1, 64), (32, 4, 64),
            (8, 8, 8), (32, 4, 8),
        )
    ],
    small_cases=[_case(2, 20, 12, num_heads=4, num_kv_heads=2, head_dim=32)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
