"""linear_w8a16 on the projections of Llama-3.1-8B, in groups of 128 columns, over rows."""

import torch

from bench.harness import Floor, grid
from bench.harness.inputs import half_dtype
from bench.peers import vllm_linear
from eagle_kernels.reference.ops.linear.linear_w8a16 import dequantise

# outputs and columns
PROJECTIONS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512, 2048]
# further formats of the largest layer
FORMATS = {"zeros": {"has_zeros": True}, "groups of 32": {"group_size": 32}, "whole rows": {"group_size": None}}

DEFAULTS = {"group_size": 128, "has_zeros": False}
CASES = [
    *grid(layer=list(PROJECTIONS.items()), num_rows=ROWS),
    *(
        {"layer": (f"gate_up {name}", PROJECTIONS["gate_up"]), "num_rows": num_rows, **sizes}
        for name, sizes in FORMATS.items() for num_rows in (1, 16, 64)
    ),
]  # fmt: skip
SMALL_CASES = [
    *grid(num_rows=[1, 20], layer=("", (70, 300)), has_zeros=[False, True]),
    *grid(num_rows=3, layer=("", (70, 300)), group_size=[32, None]),
]
FLOOR = Floor("read", 0.0)
ROTATED_BYTES = 200_000_000
PEERS = {"marlin": vllm_linear.marlin_w8a16, "machete": vllm_linear.machete_w8a16}


def name(num_rows, layer, group_size, has_zeros):
    named, (num_outputs, num_columns) = layer
    return f"T={num_rows} N={num_outputs} K={num_columns} {named}".rstrip()


def make(device, num_rows, layer, group_size, has_zeros):
    dtype, (num_outputs, num_columns) = half_dtype(device), layer[1]
    strips, blocks = -(-num_outputs // 16), -(-num_columns // 128)
    words = torch.randint(-(2**31), 2**31, (strips, blocks, 16, 32), device=device, dtype=torch.int32)
    shape = (num_outputs,) if group_size is None else (-(-blocks * 128 // group_size // 2), num_outputs, 2)
    scales = (0.5 + torch.rand(shape, device=device)).to(dtype) / 64
    x = torch.randn(num_rows, num_columns, device=device).to(dtype) / num_columns**0.5
    values = {"x": x, "weight": words, "scales": scales, "group_size": group_size, "prefetch_weight": True}
    if has_zeros:
        values["zeros"] = torch.randint(-16, 16, shape, device=device, dtype=torch.int16)
    return values


def count_bytes(num_rows, layer, group_size, has_zeros):
    _, (num_outputs, num_columns) = layer
    groups = 1 if group_size is None else num_columns // group_size
    numbers = (4 if has_zeros else 2) * groups * num_outputs
    return num_outputs * num_columns + numbers + 2 * num_rows * (num_columns + num_outputs)


def prepare_torch(values):
    """cuBLAS in 16 bit, with weights that were unpacked before."""
    x = values["x"]
    weight = dequantise(x, *(values.get(name) for name in ("weight", "scales", "zeros", "group_size")))
    return lambda: torch.nn.functional.linear(x, weight)
