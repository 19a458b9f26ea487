"""mla_tree_attention of a verify step, the drafts after the prefix: trees and chains, over lengths and heads."""

import math

import torch

from bench.harness import Floor, grid
from bench.harness.inputs import ODD_BATCH, Tree, built_tree, draw_batch, half_dtype, lengths, planned, visible_drafts
from bench.harness.latents import (
    ALL_HEADS,
    RANK_HEADS,
    SMALL_HEADS,
    all_lengths,
    contiguous_latents,
    count_latent_bytes,
    count_latent_flops,
    make_latents,
    make_queries,
)
from bench.peers import fa3, sglang_triton, vllm_triton
from eagle_kernels.raw import mla_tree_attention

_TREES = [
    (batch_size, prefix * 1024, num_nodes)
    for batch_size, prefix, num_nodes in ((1, 1, 64), (1, 8, 16), (1, 32, 64), (8, 1, 16), (8, 8, 16), (8, 8, 64),
                                          (32, 1, 64), (32, 4, 16))
]  # fmt: skip
_CHAINS = [(batch_size, 8192, num_nodes) for batch_size in (1, 8, 32) for num_nodes in (4, 8)]

# shape: requests, tokens of the longest prefix, nodes
DEFAULTS = {"page_size": 64, "heads": RANK_HEADS, "kind": "", "spread": "equal", "drafts": "tree"}
CASES = [
    *grid(heads=[RANK_HEADS, ALL_HEADS], shape=_TREES),
    *grid(heads=[RANK_HEADS, ALL_HEADS], shape=_CHAINS, drafts="chain"),
    *grid(page_size=[1, 16], shape=[(8, 8192, 16), (8, 8192, 64)]),
    *grid(kind=["float8", "deterministic"], shape=(8, 8192, 16)),
    {"shape": (ODD_BATCH, 20000, 32), "spread": "ragged"},
    {"shape": (64, 32768, 8), "spread": "long tail"},
]
SMALL_CASES = [
    {"shape": (2, 20, 12), "heads": SMALL_HEADS},
    {"shape": (3, 300, 12), "heads": SMALL_HEADS, "page_size": 1, "spread": "ragged"},
    {"shape": (2, 40, 4), "heads": SMALL_HEADS, "drafts": "chain"},
]
HEADLINES = [f"B=8 L=8192 N={nodes} page 64 heads {heads}" for nodes in (16, 64) for heads in (RANK_HEADS, ALL_HEADS)]
FLOOR = Floor("read", 0.0)
PEERS = {
    "fa3": fa3.mla_tree_attention,
    "sglang_triton": sglang_triton.mla_tree_attention,
    "vllm_triton": vllm_triton.mla_tree_attention,
}


def draw(coin):
    sizes = draw_batch(coin) | {"heads": coin.choice((RANK_HEADS, ALL_HEADS))}
    drafts, num_nodes = coin.choice((("chain", 4), ("chain", 8), ("tree", 16), ("tree", 48), ("tree", 64)))
    return sizes | {"shape": (*sizes["shape"], num_nodes), "drafts": drafts}


def name(shape, page_size, heads, kind, spread, drafts):
    words = ["B={} L={} N={} page {} heads {}".format(*shape, page_size, heads), kind]
    return " ".join(filter(None, [*words, spread * (spread != "equal"), drafts * (drafts != "tree")]))


def is_checked(shape, heads, **others):
    return math.prod(shape) * heads.query <= 1 << 24  # the reference has keys for all heads, and all logits


def make(device, shape, page_size, heads, kind, spread, drafts):
    batch_size, prefix, num_nodes = shape
    seq_lens = lengths(batch_size, prefix, spread)
    values = make_latents(device, batch_size, seq_lens + num_nodes, page_size, heads, kind)
    seen = {"is_causal": True}
    if drafts == "tree":  # with enough candidates for 64 nodes
        seen = {"tree_mask": built_tree(batch_size, Tree(8, 5, num_nodes)).tree_mask.to(device)}
    query = make_queries(device, (batch_size, num_nodes), heads, half_dtype(device))
    values |= {"query": query, "seq_lens": seq_lens.to(device)}
    return values | seen | ({"deterministic": True} if kind == "deterministic" else {})


def count_bytes(shape, page_size, heads, kind, spread, drafts):
    num_rows = shape[0] * shape[2]
    return count_latent_bytes(all_lengths(shape, spread) + num_rows, num_rows, heads, kind)


def count_flops(shape, page_size, heads, kind, spread, drafts):
    """Of the prefix alone: how many drafts a node sees depends on the tree."""
    return count_latent_flops(all_lengths(shape, spread) * shape[2], heads)


def prepare_planned(values):
    """Ours, planned outside of the timed call, as FlashAttention 3 is."""
    return planned(mla_tree_attention, values, values["query"].shape[1])


def prepare_torch(values):
    """Scaled dot product attention on contiguous latents, with a bool mask over the prefix and the tree."""
    num_nodes, seq_lens = values["query"].shape[1], values["seq_lens"]
    longest = int(seq_lens.max()) + num_nodes
    query = values["query"].transpose(1, 2)
    key, value = (rows.to(query.dtype) for rows in contiguous_latents(values, longest))
    draft = torch.arange(longest, device=seq_lens.device) - seq_lens[:, None]  # [B, slot]
    is_draft = ((draft >= 0) & (draft < num_nodes))[:, None]
    visible = visible_drafts(values).gather(2, draft.clamp(0, num_nodes - 1)[:, None].expand(-1, num_nodes, -1).long())
    mask = torch.where(is_draft, visible, draft[:, None] < 0)[:, None]
    attention, options = torch.nn.functional.scaled_dot_product_attention, {"scale": values["sm_scale"]}
    return lambda: {"output": attention(query, key, value, attn_mask=mask, enable_gqa=True, **options).transpose(1, 2)}
