"""mla_prefill of whole prompts and of chunks after a cached prefix; torch's fused attention beside it."""

import torch

from bench.harness import Floor, Unavailable, grid
from bench.harness.inputs import draw_batch, lengths
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
from bench.peers import fa3

# shape: requests, tokens of the longest, of which the last part are queries
DEFAULTS = {"page_size": 64, "heads": RANK_HEADS, "spread": "equal", "cached": 0}
CASES = [
    *grid(heads=[RANK_HEADS, ALL_HEADS], shape=[(1, 1024), (1, 4096), (8, 2048)]),
    *grid(heads=[RANK_HEADS, ALL_HEADS], shape=(4, 8192), cached=7680),
    {"shape": (12, 4096), "spread": "ragged"},
]
SMALL_CASES = [
    {"shape": (2, 40), "heads": SMALL_HEADS, "page_size": 16},
    {"shape": (3, 40), "heads": SMALL_HEADS, "spread": "ragged"},
    {"shape": (2, 40), "heads": SMALL_HEADS, "cached": 30},
]
HEADLINES = [f"B=1 L=4096 page 64 heads {heads}" for heads in (RANK_HEADS, ALL_HEADS)]
FLOOR = Floor("read", 0.0)
PEERS = {"fa3": fa3.mla_prefill}


def draw(coin):
    sizes = draw_batch(coin) | {"heads": RANK_HEADS}
    batch_size, longest = sizes["shape"]
    return sizes | {"shape": (min(batch_size, 12), longest)}


def name(shape, page_size, heads, spread, cached):
    words = [f"B={shape[0]} L={shape[1]} page {page_size} heads {heads}", spread * (spread != "equal")]
    return " ".join(filter(None, [*words, f"cached {cached}" * bool(cached)]))


def is_checked(shape, heads, **others):
    return shape[1] ** 2 * heads.query <= 1 << 25  # the reference holds a float32 matrix of all queries and keys


def make(device, shape, page_size, heads, spread, cached):
    seq_lens = lengths(*shape, spread)
    counts = (seq_lens - cached).clamp(min=0)
    bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(device, torch.int32)
    values = make_latents(device, shape[0], seq_lens, page_size, heads)
    query = make_queries(device, (int(counts.sum()),), heads, values["latent_cache"].dtype)
    others = {"qo_indptr": bounds, "max_query": int(counts.max()), "seq_lens": seq_lens.to(device)}
    return values | {"query": query} | others


def count_bytes(shape, page_size, heads, spread, cached):
    num_keys = all_lengths(shape, spread)
    return count_latent_bytes(num_keys, num_keys - shape[0] * cached, heads)


def count_flops(shape, page_size, heads, spread, cached):
    counts = lengths(*shape, spread).double()
    return count_latent_flops(int((counts * (counts + 1) / 2 - cached * (cached + 1) / 2).sum()), heads)


def prepare_torch(values):
    """Scaled dot product attention on contiguous latents, causal, on whole prompts of equal length."""
    batch_size, length = len(values["qo_indptr"]) - 1, values["max_query"]
    if len(values["query"]) < batch_size * length or int(values["seq_lens"].max()) > length:
        raise Unavailable("takes one length for all requests, and nothing before them")
    query = values["query"].unflatten(0, (batch_size, length)).transpose(1, 2)
    key, value = contiguous_latents(values, length)
    attention, options = torch.nn.functional.scaled_dot_product_attention, {"scale": values["sm_scale"]}

    def run():
        output = attention(query, key, value, is_causal=True, enable_gqa=True, **options)
        return {"output": output.transpose(1, 2).flatten(0, 1)}

    return run
