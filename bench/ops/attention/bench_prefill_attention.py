"""prefill_attention of whole prompts, of contiguous keys and of paged ones; torch's fused attention beside it."""

import torch

from bench.harness import Unavailable, grid
from bench.harness.inputs import HEADS, ODD_BATCH, SMALL_HEADS, draw_batch, lengths, paged_cache
from bench.peers import fa3, flashinfer, vllm_triton

_SHAPES = [(1, 1024), (1, 4096), (8, 2048), (1, 16384)]

# shape: requests, tokens of the longest
DEFAULTS = {"page_size": None, "heads": HEADS[0], "spread": "equal"}
CASES = [
    *grid(page_size=[None, 16, 64], shape=_SHAPES),
    *grid(shape=(ODD_BATCH, 4096), page_size=[None, 16], heads=HEADS, spread="ragged"),
    {"shape": (64, 8192), "page_size": 16, "spread": "long tail"},
]
SMALL_CASES = [
    *grid(shape=(2, 40), page_size=[None, 16], heads=SMALL_HEADS),
    {"shape": (3, 40), "heads": SMALL_HEADS, "spread": "ragged"},
    {"shape": (3, 40), "page_size": 16, "heads": SMALL_HEADS, "spread": "long tail"},
]
HEADLINES = ["B=1 L=4096 heads 32/8/128", *(f"B={ODD_BATCH} L=4096 heads {heads} ragged" for heads in HEADS)]
PEERS = {
    "fa3": fa3.prefill_attention,
    "flashinfer": flashinfer.prefill_attention,
    "vllm_triton": vllm_triton.prefill_attention,
}


def draw(coin):
    sizes = draw_batch(coin)
    batch_size, longest = sizes["shape"]
    return sizes | {"shape": (min(batch_size, 12), longest), "page_size": coin.choice((None, 16, 64))}


def name(shape, page_size, heads, spread):
    pages = f" page {page_size}" if page_size else ""
    return f"B={shape[0]} L={shape[1]}{pages} heads {heads}" + ("" if spread == "equal" else f" {spread}")


def is_checked(shape, **others):
    return shape[1] <= 1024  # the reference holds a float32 matrix of all queries and keys


def make(device, shape, page_size, heads, spread):
    seq_lens = lengths(*shape, spread)
    bounds = torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0)).to(device, torch.int32)
    cache = paged_cache(device, shape[0], seq_lens, page_size or 16, heads.kv, heads.size)
    dtype, total = cache["k_cache"].dtype, int(seq_lens.sum())
    query = torch.randn(total, heads.query, heads.size, device=device).to(dtype)
    values = {"query": query, "qo_indptr": bounds, "max_query": shape[1]}
    if page_size:
        return values | cache | {"seq_lens": seq_lens.to(device)}
    keys = torch.randn(2, total, heads.kv, heads.size, device=device).to(dtype)
    return values | {"key": keys[0], "value": keys[1]}


def count_bytes(shape, page_size, heads, spread):
    return 2 * 2 * int(lengths(*shape, spread).sum()) * heads.size * (heads.query + heads.kv)


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
