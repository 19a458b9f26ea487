"""silu_and_mul between the matrix products of an 8B model's MLP, packed and apart, over tokens."""

import torch

from bench.harness import grid
from bench.harness.inputs import half_dtype
from bench.peers import sglang_ops
from bench.peers.torch_compile import compiled

CASES = [
    *grid(is_packed=True, num_tokens=[1, 8, 64, 512, 4096], num_columns=14336),
    *grid(is_packed=False, num_tokens=[1, 64], num_columns=14336),
]
SMALL_CASES = [
    {"num_tokens": 3, "num_columns": 70, "is_packed": True},
    {"num_tokens": 3, "num_columns": 64, "is_packed": False},
]


def name(num_tokens, num_columns, is_packed):
    return f"T={num_tokens} I={num_columns}" + ("" if is_packed else " apart")


def make(device, num_tokens, num_columns, is_packed):
    gate = torch.randn(num_tokens, 2 * num_columns, device=device).to(half_dtype(device))
    if is_packed:
        return {"gate": gate}
    return {"gate": gate[:, :num_columns].contiguous(), "up": gate[:, num_columns:].contiguous()}


def count_bytes(num_tokens, num_columns, is_packed):
    return 3 * 2 * num_tokens * num_columns


def prepare_torch(values):
    gate, up = values["gate"], values.get("up")
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return lambda: torch.nn.functional.silu(gate) * up


PEERS = {"torch_compile": compiled(prepare_torch), "sglang": sglang_ops.silu_and_mul}
