"""mla_decode over batch sizes, lengths, equal and not, page sizes and heads; bf16 latents, and 8-bit ones."""

import torch

from bench.harness import Floor, Unavailable, grid
from bench.harness.inputs import ODD_BATCH, draw_batch, half_dtype, lengths, planned
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
from eagle_kernels.raw import mla_decode

_SHAPES = [(1, 1024), (1, 8192), (1, 32768), (8, 1024), (8, 8192), (8, 32768), (32, 1024), (32, 8192)]

# shape: requests, tokens of the longest
DEFAULTS = {"page_size": 64, "heads": RANK_HEADS, "kind": "", "spread": "equal"}
CASES = [
    *grid(heads=[RANK_HEADS, ALL_HEADS], shape=_SHAPES),
    *grid(page_size=[1, 16], shape=[(8, 8192), (32, 8192)]),
    *grid(kind=["float8", "deterministic"], shape=[(8, 8192), (32, 8192)]),
    {"shape": (ODD_BATCH, 20000), "spread": "ragged"},
    {"shape": (64, 32768), "spread": "long tail"},
]
SMALL_CASES = [
    {"shape": (2, 40), "heads": SMALL_HEADS},
    {"shape": (3, 300), "heads": SMALL_HEADS, "page_size": 1, "spread": "ragged"},
    {"shape": (2, 40), "heads": SMALL_HEADS, "kind": "float8"},
]
HEADLINES = [f"B={size} L=8192 page 64 heads {heads}" for size in (8, 32) for heads in (RANK_HEADS, ALL_HEADS)]
FLOOR = Floor("read", 0.0)
PEERS = {"fa3": fa3.mla_decode, "sglang_triton": sglang_triton.mla_decode, "vllm_triton": vllm_triton.mla_decode}


def draw(coin):
    return draw_batch(coin) | {"heads": coin.choice((RANK_HEADS, ALL_HEADS))}


def name(shape, page_size, heads, kind, spread):
    words = [f"B={shape[0]} L={shape[1]} page {page_size} heads {heads}", kind, spread * (spread != "equal")]
    return " ".join(filter(None, words))


def is_checked(shape, heads, **others):
    return shape[0] * shape[1] <= 1 << 17 and shape[1] * heads.query <= 1 << 20  # the reference has keys for all heads


def make(device, shape, page_size, heads, kind, spread):
    seq_lens = lengths(*shape, spread)
    values = make_latents(device, shape[0], seq_lens, page_size, heads, kind)
    query = make_queries(device, shape[:1], heads, half_dtype(device))
    values |= {"query": query, "seq_lens": seq_lens.to(device)}
    return values | ({"deterministic": True} if kind == "deterministic" else {})


def count_bytes(shape, page_size, heads, kind, spread):
    return count_latent_bytes(all_lengths(shape, spread), shape[0], heads, kind)


def count_flops(shape, page_size, heads, kind, spread):
    return count_latent_flops(all_lengths(shape, spread), heads)


def prepare_planned(values):
    """Ours, planned outside of the timed call, as FlashAttention 3 is."""
    if values.get("deterministic"):
        raise Unavailable("positions alone decide how keys are shared")
    return planned(mla_decode, values, 0)


def prepare_torch(values):
    """Scaled dot product attention on contiguous latents: no pages to follow. Unequal lengths are a mask."""
    seq_lens, query = values["seq_lens"], values["query"][:, :, None]
    longest = int(seq_lens.max())
    if len(seq_lens) * longest > 1 << 22:
        raise Unavailable("takes one length for all requests, and as much memory")
    key, value = (rows.to(query.dtype) for rows in contiguous_latents(values, longest))
    mask = None
    if int(seq_lens.min()) < longest:
        mask = (torch.arange(longest, device=query.device) < seq_lens[:, None])[:, None, None]
    attention, options = torch.nn.functional.scaled_dot_product_attention, {"scale": values["sm_scale"]}
    return lambda: {"output": attention(query, key, value, attn_mask=mask, enable_gqa=True, **options)[:, :, 0]}
