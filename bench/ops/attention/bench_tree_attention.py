"""tree_attention of a verify step, the tree's keys after the prefix, over lengths, head layouts and page sizes."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case, Floor
from bench.harness.inputs import (
    HEADS,
    ODD_BATCH,
    SMALL_HEADS,
    contiguous_cache,
    drafts,
    lengths,
    paged_cache,
    visible_drafts,
)
from bench.peers import flashinfer, sglang_triton
from bench.run import main
from eagle_kernels import reference

# the tree that nodes come from: enough candidates for 64 of them
TOPK, SPEC_STEPS = 8, 5


def make(device, batch_size, prefix, num_nodes, page_size, num_heads, num_kv_heads, head_dim, spread):
    seq_lens = lengths(batch_size, prefix, spread)
    values = paged_cache(device, batch_size, seq_lens + num_nodes, page_size, num_kv_heads, head_dim)
    tree = reference.ops.tree.build_tree.build_tree(**drafts("cpu", batch_size, TOPK, SPEC_STEPS, num_nodes))
    query = torch.randn(batch_size, num_nodes, num_heads, head_dim, device=device)
    return values | {
        "query": query.to(values["k_cache"].dtype),
        "tree_mask": tree.tree_mask.to(device),
        "num_draft_keys": num_nodes,
        "seq_lens": seq_lens.to(device),
    }


def count_bytes(batch_size, prefix, num_nodes, page_size, num_heads, num_kv_heads, head_dim, spread):
    num_keys = int(lengths(batch_size, prefix, spread).sum()) + batch_size * num_nodes
    return 2 * 2 * head_dim * (num_keys * num_kv_heads + batch_size * num_nodes * num_heads)


def prepare_torch(values):
    """Scaled dot product attention on contiguous keys and values, with a bool mask over the prefix and the tree."""
    num_nodes, seq_lens = values["num_draft_keys"], values["seq_lens"]
    longest = int(seq_lens.max()) + num_nodes
    key, value = contiguous_cache(values, longest)
    draft = torch.arange(longest, device=seq_lens.device) - seq_lens[:, None]  # [B, slot]
    is_draft = ((draft >= 0) & (draft < num_nodes))[:, None]
    visible = visible_drafts(values).gather(2, draft.clamp(0, num_nodes - 1)[:, None].expand(-1, num_nodes, -1).long())
    mask = torch.where(is_draft, visible, draft[:, None] < 0)[:, None]
    query = values["query"].transpose(1, 2)
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: {"output": attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)}


def _case(batch_size, prefix, num_nodes, page_size=16, heads="32/8/128", spread="equal"):
    num_heads, num_kv_heads, head_dim = (HEADS | SMALL_HEADS)[heads]
    sizes = {"batch_size": batch_size, "prefix": prefix, "num_nodes": num_nodes, "page_size": page_size}
    sizes |= {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "spread": spread}
    name = f"B={batch_size} L={prefix} N={num_nodes} page {page_size} heads {heads}"
    name += "" if spread == "equal" else f" {spread}"
    is_headline = heads == "32/8/128" and (batch_size, prefix) == (8, 8192)
    # the reference gathers every key in float32
    return Case(name, sizes, batch_size * prefix * num_nodes <= 1 << 20, is_headline)


_SHAPES = [
    (batch_size, prefix * 1024, num_nodes)
    for batch_size, prefix, num_nodes in (
        (1, 1, 64), (1, 8, 64), (1, 32, 64), (8, 1, 64), (8, 8, 64), (32, 1, 64), (32, 4, 64),
        (8, 8, 8), (32, 4, 8),
    )
]  # fmt: skip

# batch, longest prefix, nodes, page size, heads
_RAGGED = (
    (48, 2000, 6, 16, "32/8/128"), (ODD_BATCH, 20000, 32, 16, "28/4/128"), (6, 6000, 60, 1, "64/8/128"),
    (4, 6000, 64, 16, "16/2/256"),
)  # fmt: skip

BENCHMARK = Benchmark(
    path="attention.tree_attention",
    cases=[
        *(_case(*shape) for shape in _SHAPES),
        *(_case(*shape, heads=heads) for heads in list(HEADS)[1:] for shape in _SHAPES),
        *(_case(*shape, page_size=1) for shape in _SHAPES),
        *(_case(*shape, spread="ragged") for shape in _RAGGED),
        _case(64, 32768, 8, spread="long tail"),
    ],
    small_cases=[
        _case(2, 20, 12, heads="4/2/32"),
        _case(2, 300, 12, page_size=1, heads="4/2/32"),
        _case(3, 300, 12, heads="4/2/32", spread="ragged"),
    ],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    peers={"flashinfer": flashinfer.tree_attention, "sglang_triton": sglang_triton.tree_attention},
    floor=Floor("read", 0.0),
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
