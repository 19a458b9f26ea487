"""gqa_decode over batch sizes, lengths, equal and not, page sizes and head layouts; bf16 keys, fp8 and int8 ones."""

import functools

import torch

from bench.harness import Floor, Unavailable, grid
from bench.harness.inputs import (
    HEADS,
    ODD_BATCH,
    SMALL_HEADS,
    Heads,
    contiguous_cache,
    draw_batch,
    lengths,
    paged_cache,
    planned,
)
from bench.peers import fa3, flashinfer, sglang_triton, vllm_triton
from eagle_kernels.raw import gqa_decode

_SHAPES = [
    (batch_size, length * 1024)
    for batch_size, lengths in ((1, (1, 8, 32, 128)), (8, (1, 8, 32)), (32, (1, 4, 8)), (128, (1, 4)))
    for length in lengths
]

# shape: requests, tokens of the longest
DEFAULTS = {"page_size": 16, "heads": HEADS[0], "kind": "", "spread": "equal", "layout": ""}
CASES = [
    *grid(page_size=[1, 16], shape=_SHAPES),
    *grid(heads=HEADS[1:], shape=_SHAPES),
    *grid(kind=["float8", "int8"], shape=[(8, 8192), (32, 8192)]),
    *grid(kind="deterministic", shape=[(1, 8192), (8, 8192), (32, 8192)]),
    *grid(shape=[(3, 8192), (ODD_BATCH, 8192)]),
    *grid(layout=["packed", "HND"], shape=[(1, 8192), (ODD_BATCH, 8192)]),
    {"shape": (64, 2048), "page_size": 1, "spread": "ragged"},
    {"shape": (48, 2000), "spread": "ragged"},
    {"shape": (ODD_BATCH, 20000), "heads": Heads(28, 4, 128), "spread": "ragged"},
    {"shape": (16, 8192), "page_size": 64, "heads": Heads(64, 8, 128), "spread": "ragged"},
    {"shape": (6, 6000), "page_size": 1, "heads": Heads(16, 2, 256), "spread": "ragged"},
    {"shape": (ODD_BATCH, 20000), "heads": Heads(16, 2, 256), "spread": "ragged"},
    {"shape": (64, 32768), "spread": "long tail"},
    {"shape": (256, 131072), "heads": Heads(28, 4, 128), "spread": "long tail"},
    {"shape": (ODD_BATCH, 65536), "page_size": 1, "heads": Heads(16, 2, 256), "spread": "long tail"},
]
SMALL_CASES = [
    {"shape": (2, 40), "heads": SMALL_HEADS},
    {"shape": (2, 300), "heads": SMALL_HEADS, "page_size": 1},
    {"shape": (3, 300), "heads": SMALL_HEADS, "spread": "ragged"},
    *grid(layout=["packed", "HND"], shape=(2, 40), heads=SMALL_HEADS),
    {"shape": (3, 300), "heads": SMALL_HEADS, "page_size": 1, "spread": "long tail"},
]
SWEEP = [
    {"shape": (batch_size, 1 << exponent)}
    for batch_size in (1, 8, 32)
    for exponent in range(9, 18)
    if batch_size << exponent <= 1 << 20 and (batch_size, 1 << exponent) not in _SHAPES
]
HEADLINES = [
    f"B={batch_size} L=8192 page 16 heads 32/8/128{kind}"
    for batch_size in (8, 32)
    for kind in ("", " float8", " deterministic")
]
FLOOR = Floor("read", 0.0)


def _without_int8(prepare):
    """Returns a peer that does not take int8 keys, or takes other scales."""

    @functools.wraps(prepare)
    def prepared(values):
        if values["k_cache"].dtype == torch.int8:
            raise Unavailable("reads no int8 keys with a scale for each head")
        return prepare(values)

    return prepared


PEERS = {
    "fa3": _without_int8(fa3.gqa_decode),
    "flashinfer": _without_int8(flashinfer.gqa_decode),
    "sglang_triton": _without_int8(sglang_triton.gqa_decode),
    "vllm_triton": _without_int8(vllm_triton.gqa_decode),
}

draw = draw_batch


def name(shape, page_size, heads, kind, spread, layout):
    words = [f"B={shape[0]} L={shape[1]} page {page_size} heads {heads}", kind, spread * (spread != "equal"), layout]
    return " ".join(filter(None, words))


def is_checked(shape, **others):
    return shape[0] * shape[1] <= 1 << 17  # the reference gathers every key in float32


def make(device, shape, page_size, heads, kind, spread, layout):
    seq_lens = lengths(*shape, spread)
    values = paged_cache(device, shape[0], seq_lens, page_size, heads.kv, heads.size, layout=layout)
    values["query"] = torch.randn(shape[0], heads.query, heads.size, device=device).to(values["k_cache"].dtype)
    values["seq_lens"] = seq_lens.to(device)
    if kind == "float8":
        values |= {name: values[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
        values |= {name: torch.ones(1, device=device) for name in ("k_scale", "v_scale")}
    if kind == "int8":
        values |= {name: (values[name] * 30).round().clamp(-127, 127).char() for name in ("k_cache", "v_cache")}
        values |= {name: torch.full((heads.kv,), 1 / 30, device=device) for name in ("k_scale", "v_scale")}
    if kind == "deterministic":
        values["deterministic"] = True
    return values


def count_bytes(shape, page_size, heads, kind, spread, layout):
    num_keys = int(lengths(*shape, spread).sum())
    return (
        2 * heads.size * ((1 if kind in ("float8", "int8") else 2) * num_keys * heads.kv + 2 * shape[0] * heads.query)
    )


def prepare_planned(values):
    """Ours, planned outside of the timed call, as FlashAttention 3 is."""
    if values.get("deterministic"):
        raise Unavailable("positions alone decide how keys are shared")
    return planned(gqa_decode, values, 0)


def prepare_torch(values):
    """Scaled dot product attention on contiguous keys and values: no pages to follow. Unequal lengths are a mask."""
    seq_lens = values["seq_lens"]
    longest = int(seq_lens.max())
    if len(seq_lens) * longest > 1 << 22:
        raise Unavailable("takes one length for all requests, and as much memory")
    key, value = contiguous_cache(values, longest)
    query = values["query"][:, :, None]
    key, value = key.to(query.dtype), value.to(query.dtype)
    if key.shape[1] == len(values.get("k_scale", ())):
        key, value = (each * values[name].to(query.dtype)[:, None, None]
                      for each, name in ((key, "k_scale"), (value, "v_scale")))  # fmt: skip
    mask = None
    if int(seq_lens.min()) < longest:
        mask = (torch.arange(longest, device=query.device) < seq_lens[:, None])[:, None, None]
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: {"output": attention(query, key, value, attn_mask=mask, enable_gqa=True)[:, :, 0]}
