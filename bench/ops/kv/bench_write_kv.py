"""write_kv of one layer of an 8B model over tokens: with rotary embedding and without, into 16-bit and 8-bit caches."""

import torch

from bench.harness import grid
from bench.harness.inputs import HEADS, SMALL_HEADS, half_dtype, rotary_tables
from bench.peers import sglang_ops
from bench.peers.torch_compile import compiled

PAGE_SIZE = 16
NUM_POSITIONS = 8192

KINDS = ["rope", "rope fp8", "rope int8", "plain"]
EIGHT_BITS = {"rope fp8": torch.float8_e4m3fn, "rope int8": torch.int8}
CASES = grid(kind=KINDS, num_tokens=[1, 8, 64, 512, 4096], heads=HEADS[0])
SMALL_CASES = grid(num_tokens=3, kind=KINDS, heads=SMALL_HEADS)


def name(num_tokens, kind, heads):
    return f"T={num_tokens} {kind}"


def make(device, num_tokens, kind, heads):
    """Parts of a fused projection, to tokens' slots anywhere in a pool of eight times their number."""
    parts = (heads.query, heads.kv, heads.kv)
    projected = torch.randn(num_tokens, sum(parts), heads.size, device=device).to(half_dtype(device))
    query, key, value = projected.split(parts, dim=1)
    num_pages = max(8, 8 * num_tokens // PAGE_SIZE)
    slots = torch.randperm(num_pages * PAGE_SIZE, device=device)[:num_tokens]
    caches = torch.randn(2, num_pages, PAGE_SIZE, heads.kv, heads.size, device=device)
    caches = caches.to(EIGHT_BITS.get(kind, projected.dtype))
    values = {"key": key, "value": value, "k_cache": caches[0], "v_cache": caches[1], "slots": slots}
    if kind != "plain":
        values |= {"query": query, "positions": torch.randint(NUM_POSITIONS, (num_tokens,), device=device)}
        values |= rotary_tables(device, NUM_POSITIONS, heads.size)
    if kind in EIGHT_BITS:
        values |= {name: torch.full((1,), 0.02, device=device) for name in ("k_scale", "v_scale")}
    return values


def count_bytes(num_tokens, kind, heads):
    """Keys and values read and written and the slot; with rope queries likewise, the position and a row of tables."""
    num_bytes = 2 * heads.kv * heads.size * (2 + (1 if kind in EIGHT_BITS else 2)) + 8
    if kind != "plain":
        num_bytes += 2 * 2 * heads.query * heads.size + 2 * heads.size + 8
    return num_tokens * num_bytes


def prepare_torch(values):
    """Rotary embedding as Hugging Face's models do it, and rows assigned by index: for slots that are all alive."""
    key, value, query, slots = values["key"], values["value"], values.get("query"), values["slots"]
    caches, has_scales = (values["k_cache"], values["v_cache"]), "k_scale" in values
    if query is not None:
        cos, sin = (torch.cat((values[name], values[name]), dim=-1) for name in ("cos", "sin"))

    def rotate(heads, cos, sin):
        low, high = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat((-high, low), dim=-1) * sin

    def quantized(rows, scale):
        if caches[0].dtype == torch.int8:
            return (rows.float() / scale).clamp(-127, 127).round().char().view(torch.uint8)
        largest = torch.finfo(caches[0].dtype).max
        return (rows.float() / scale).clamp(-largest, largest).to(caches[0].dtype).view(torch.uint8)

    def run():
        turned_key, turned_query = key, key[:, :0]
        if query is not None:
            angles = cos[values["positions"]][:, None], sin[values["positions"]][:, None]
            turned_key, turned_query = rotate(key, *angles), rotate(query, *angles)
        for cache, rows, name in zip(caches, (turned_key, value), ("k_scale", "v_scale")):
            if has_scales:
                cache, rows = cache.view(torch.uint8), quantized(rows, values[name])
            cache[slots // PAGE_SIZE, slots % PAGE_SIZE] = rows
        return turned_query

    return run


PEERS = {
    "torch_compile": compiled(prepare_torch),
    "sglang": sglang_ops.write_kv,
    "sglang_apart": sglang_ops.write_kv_apart,
}
