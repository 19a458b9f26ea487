"""tree_attention of a verify step, the drafts' keys after the prefix: trees and chains, over lengths, heads, pages."""

import math

import torch

from bench.harness import Floor, grid
from bench.harness.inputs import (
    HEADS,
    ODD_BATCH,
    SMALL_HEADS,
    Heads,
    Tree,
    built_tree,
    contiguous_cache,
    draw_batch,
    lengths,
    paged_cache,
    planned,
    visible_drafts,
)
from bench.peers import fa3, flashinfer, sglang_triton, vllm_triton
from eagle_kernels.raw import tree_attention

_SHAPES = [
    (batch_size, prefix * 1024, num_nodes)
    for batch_size, prefix, num_nodes in (
        (1, 1, 64), (1, 8, 64), (1, 32, 64), (8, 1, 64), (8, 8, 64), (32, 1, 64), (32, 4, 64), (8, 8, 8), (32, 4, 8)
    )
]  # fmt: skip

# shape: requests, tokens of the longest prefix, nodes
DEFAULTS = {"page_size": 16, "heads": HEADS[0], "spread": "equal", "drafts": "tree"}
CASES = [
    *grid(shape=_SHAPES),
    *grid(heads=HEADS[1:], shape=_SHAPES),
    *grid(page_size=1, shape=_SHAPES),
    {"shape": (48, 2000, 6), "spread": "ragged"},
    {"shape": (ODD_BATCH, 20000, 32), "heads": Heads(28, 4, 128), "spread": "ragged"},
    {"shape": (6, 6000, 60), "page_size": 1, "heads": Heads(64, 8, 128), "spread": "ragged"},
    {"shape": (4, 6000, 64), "heads": Heads(16, 2, 256), "spread": "ragged"},
    {"shape": (64, 32768, 8), "spread": "long tail"},
]
SMALL_CASES = [
    {"shape": (2, 20, 12), "heads": SMALL_HEADS},
    {"shape": (2, 300, 12), "heads": SMALL_HEADS, "page_size": 1},
    {"shape": (3, 300, 12), "heads": SMALL_HEADS, "spread": "ragged"},
    {"shape": (3, 300, 4), "heads": SMALL_HEADS, "spread": "one long", "drafts": "chain"},
]
HEADLINES = [f"B=8 L=8192 N={num_nodes} page {size} heads 32/8/128" for num_nodes in (64, 8) for size in (16, 1)]
FLOOR = Floor("read", 0.0)
PEERS = {
    "fa3": fa3.tree_attention,
    "flashinfer": flashinfer.tree_attention,
    "sglang_triton": sglang_triton.tree_attention,
    "vllm_triton": vllm_triton.tree_attention,
}


def draw(coin):
    sizes = draw_batch(coin)
    drafts, num_nodes = coin.choice((("chain", 4), ("chain", 8), ("tree", 12), ("tree", 48), ("tree", 64)))
    return sizes | {"shape": (*sizes["shape"], num_nodes), "drafts": drafts}


def name(shape, page_size, heads, spread, drafts):
    words = ["B={} L={} N={} page {} heads {}".format(*shape, page_size, heads)]
    return " ".join(words + [spread] * (spread != "equal") + [drafts] * (drafts != "tree"))


def is_checked(shape, **others):
    return math.prod(shape) <= 1 << 20  # the reference gathers every key in float32


def make(device, shape, page_size, heads, spread, drafts):
    batch_size, prefix, num_nodes = shape
    seq_lens = lengths(batch_size, prefix, spread)
    values = paged_cache(device, batch_size, seq_lens + num_nodes, page_size, heads.kv, heads.size)
    seen = {"is_causal": True}
    if drafts == "tree":  # with enough candidates for 64 nodes
        seen = {"tree_mask": built_tree(batch_size, Tree(8, 5, num_nodes)).tree_mask.to(device)}
    query = torch.randn(batch_size, num_nodes, heads.query, heads.size, device=device)
    return values | {
        "query": query.to(values["k_cache"].dtype),
        **seen,
        "num_draft_keys": num_nodes,
        "seq_lens": seq_lens.to(device),
    }


def count_bytes(shape, page_size, heads, spread, drafts):
    batch_size, prefix, num_nodes = shape
    num_keys = int(lengths(batch_size, prefix, spread).sum()) + batch_size * num_nodes
    return 2 * 2 * heads.size * (num_keys * heads.kv + batch_size * num_nodes * heads.query)


def prepare_planned(values):
    """Ours, planned outside of the timed call, as FlashAttention 3 is."""
    return planned(tree_attention, values, values["num_draft_keys"])


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
