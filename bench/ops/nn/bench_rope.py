"""rope of the heads of an 8B model, parts of a fused projection, over tokens."""

import torch

import eagle_kernels
from bench.harness import grid
from bench.harness.inputs import HEADS, SMALL_HEADS, half_dtype, rotary_tables
from bench.peers import sglang_ops
from bench.peers.torch_compile import compiled

NUM_POSITIONS = 8192

CASES = [
    *grid(num_tokens=[1, 8, 64, 512, 4096], is_interleaved=False, heads=HEADS[0]),
    *grid(num_tokens=[1, 64, 4096], is_interleaved=True, heads=HEADS[0]),
]
SMALL_CASES = grid(num_tokens=3, is_interleaved=[False, True], heads=SMALL_HEADS)


def name(num_tokens, is_interleaved, heads):
    return f"T={num_tokens}" + (" interleaved" if is_interleaved else "")


def make(device, num_tokens, is_interleaved, heads):
    parts = (heads.query, heads.kv, heads.kv)
    query, key, _ = (
        torch.randn(num_tokens, sum(parts), heads.size, device=device).to(half_dtype(device)).split(parts, 1)
    )
    return rotary_tables(device, NUM_POSITIONS, heads.size) | {
        "query": query,
        "key": key,
        "positions": torch.randint(NUM_POSITIONS, (num_tokens,), device=device),
        "is_interleaved": is_interleaved,
    }


def count_bytes(num_tokens, is_interleaved, heads):
    return num_tokens * (2 * 2 * (heads.query + heads.kv) * heads.size + 2 * heads.size + 8)


def prepare_torch(values):
    """As Hugging Face's models do it, on tables that hold each column twice."""
    positions, is_interleaved = values["positions"], values["is_interleaved"]
    wide = [torch.cat((table, table), dim=-1) for table in (values["cos"], values["sin"])]
    if is_interleaved:
        wide = [table.repeat_interleave(2, dim=-1) for table in (values["cos"], values["sin"])]

    def rotate_half(heads):
        if is_interleaved:
            return torch.stack((-heads[..., 1::2], heads[..., 0::2]), dim=-1).flatten(-2)
        low, high = heads.chunk(2, dim=-1)
        return torch.cat((-high, low), dim=-1)

    def run():
        cos, sin = (table[positions][:, None] for table in wide)
        return {name: values[name] * cos + rotate_half(values[name]) * sin for name in ("query", "key")}

    return run


def prepare_in_place(values):
    """Into the query and the key themselves, as SGLang's does: what is written was just read, and lies in the cache."""
    own = {name: values[name].clone() for name in ("query", "key")}
    return lambda: eagle_kernels.raw.rope(**values | own, out=tuple(own.values()))


PEERS = {"torch_compile": compiled(prepare_torch), "sglang": sglang_ops.rope}
