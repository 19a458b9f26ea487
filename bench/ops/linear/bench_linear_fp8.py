"""linear_fp8 on the projections of Llama-3.1-8B, with both kinds of scales, x in 16 bit and in 8, over rows."""

import torch

from bench.harness import Floor, Unavailable, grid
from bench.harness.inputs import half_dtype
from bench.peers import vllm_linear

# outputs and columns
PROJECTIONS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512, 2048]

DEFAULTS = {"is_blocked": True, "activations": "16bit"}
CASES = [
    *grid(layer=list(PROJECTIONS.items()), num_rows=ROWS),
    *grid(layer=list(PROJECTIONS.items()), num_rows=[1, 8, 16, 32, 64, 256, 2048], activations="block"),
    *grid(layer=list(PROJECTIONS.items()), num_rows=[1, 16, 64], is_blocked=False, activations=["16bit", "token"]),
]
SMALL_CASES = grid(
    num_rows=[1, 20], layer=("", (80, 300)), is_blocked=[False, True], activations=["16bit", "token", "block"]
)
FLOOR = Floor("read", 0.0)
ROTATED_BYTES = 200_000_000
PEERS = {"marlin": vllm_linear.marlin_fp8, "cutlass": vllm_linear.cutlass_fp8}
# in every byte: no NaN, and less than 2
_SMALL = -0x40404041


def name(num_rows, layer, is_blocked, activations):
    named, (num_outputs, num_columns) = layer
    rest = "" if activations == "16bit" else f" x by {activations}"
    return f"T={num_rows} N={num_outputs} K={num_columns} {named}{'' if is_blocked else ' outputs'}{rest}"


def make(device, num_rows, layer, is_blocked, activations):
    dtype, (num_outputs, num_columns) = half_dtype(device), layer[1]
    strips, blocks = -(-num_outputs // 16), -(-num_columns // 128)
    words = torch.randint(-(2**31), 2**31, (strips, blocks, 16, 32), device=device, dtype=torch.int32) & _SMALL
    shape = (blocks, -(-num_outputs // 128)) if is_blocked else (num_outputs,)
    x = torch.randn(num_rows, num_columns, device=device).to(dtype) / num_columns**0.5
    return {"x": x, "weight": words, "scales": 0.5 + torch.rand(shape, device=device), "activations": activations,
            "prefetch_weight": True}  # fmt: skip


def count_bytes(num_rows, layer, is_blocked, activations):
    _, (num_outputs, num_columns) = layer
    scales = 4 * (num_columns // 128 * num_outputs // 128 if is_blocked else num_outputs)
    return num_outputs * num_columns + scales + 2 * num_rows * (num_columns + num_outputs)


def prepare_torch(values):
    """cuBLAS in 16 bit, with weights that were decoded before; x is not rounded."""
    if values["activations"] != "16bit":
        raise Unavailable("multiplies x in 16 bit")
    x, weight = values["x"], vllm_linear.dequantised_fp8(values)
    return lambda: torch.nn.functional.linear(x, weight)
