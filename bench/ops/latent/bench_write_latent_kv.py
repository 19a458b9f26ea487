"""write_latent_kv of one layer of DeepSeek-V3 over tokens: with rotary embedding and without, into 16 bits and 8."""

import torch

from bench.harness import grid
from bench.harness.inputs import half_dtype, rotary_tables
from bench.harness.latents import RANK_HEADS, SMALL_HEADS
from bench.peers.torch_compile import compiled

PAGE_SIZE = 64
NUM_POSITIONS = 8192

KINDS = ["rope", "rope fp8", "plain"]
CASES = grid(kind=KINDS, num_tokens=[1, 8, 64, 512, 4096], heads=RANK_HEADS)
SMALL_CASES = grid(num_tokens=3, kind=KINDS, heads=SMALL_HEADS)


def name(num_tokens, kind, heads):
    return f"T={num_tokens} {kind}"


def make(device, num_tokens, kind, heads):
    """Normed latents and a part of a projection, to tokens' slots anywhere in a pool of eight times their number."""
    dtype, width = half_dtype(device), heads.latent + heads.rope
    latent = torch.randn(num_tokens, heads.latent, device=device).to(dtype)
    rope_key = torch.randn(num_tokens, width, device=device).to(dtype)[:, heads.latent :]
    num_pages = max(8, 8 * num_tokens // PAGE_SIZE)
    slots = torch.randperm(num_pages * PAGE_SIZE, device=device)[:num_tokens]
    cache = torch.randn(num_pages, PAGE_SIZE, width, device=device)
    values = {"latent": latent, "rope_key": rope_key, "slots": slots}
    values["latent_cache"] = cache.to(torch.float8_e4m3fn if kind == "rope fp8" else dtype)
    if kind != "plain":
        query = torch.randn(num_tokens, heads.query, heads.rope, device=device).to(dtype)
        values |= {"query": query, "positions": torch.randint(NUM_POSITIONS, (num_tokens,), device=device)}
        values |= rotary_tables(device, NUM_POSITIONS, heads.rope)
    if kind == "rope fp8":
        values["latent_scale"] = torch.full((1,), 0.02, device=device)
    return values


def count_bytes(num_tokens, kind, heads):
    """Latents and keys read and written and the slot; with rope queries likewise, the position and a row of tables."""
    num_bytes = (heads.latent + heads.rope) * (2 + (1 if kind == "rope fp8" else 2)) + 8
    if kind != "plain":
        num_bytes += 2 * 2 * heads.query * heads.rope + 2 * heads.rope + 8
    return num_tokens * num_bytes


def prepare_torch(values):
    """Rotary embedding as Hugging Face's models do it, and rows assigned by index: for slots that are all alive."""
    key, query, slots, cache = values["rope_key"][:, None], values.get("query"), values["slots"], values["latent_cache"]
    if query is not None:
        cos, sin = (torch.cat((values[name], values[name]), dim=-1) for name in ("cos", "sin"))

    def rotate(heads, cos, sin):
        low, high = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat((-high, low), dim=-1) * sin

    def run():
        turned_key, turned_query, target = key, key[:, :0], cache
        if query is not None:
            angles = cos[values["positions"]][:, None], sin[values["positions"]][:, None]
            turned_key, turned_query = rotate(key, *angles), rotate(query, *angles)
        rows = torch.cat((values["latent"], turned_key[:, 0]), dim=1)
        if "latent_scale" in values:
            largest = torch.finfo(cache.dtype).max
            rows = (rows.float() / values["latent_scale"]).clamp(-largest, largest).to(cache.dtype).view(torch.uint8)
            target = cache.view(torch.uint8)
        target[slots // PAGE_SIZE, slots % PAGE_SIZE] = rows
        return turned_query

    return run


PEERS = {"torch_compile": compiled(prepare_torch)}
