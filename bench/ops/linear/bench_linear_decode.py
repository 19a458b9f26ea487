"""linear_decode on the projections of Llama-3.1-8B, and in fp32 on small ones, over tokens."""

import torch

from bench.harness import Floor, Unavailable, grid
from bench.harness.inputs import half_dtype

# outputs and columns
PROJECTIONS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
IN_PARTS = {f"{layer} in parts": PROJECTIONS[layer] for layer in ("o", "down")}
# in fp32: two of the embedded pair, and one of an 8B model
SINGLE = {"small gate_up float32": (1280, 256), "small down float32": (256, 640), "o float32": (4096, 4096)}

DEFAULTS = {"is_single": False, "num_parts": None}
CASES = [
    *grid(layer=list(PROJECTIONS.items()), num_tokens=[1, 2, 4, 8, 16, 32, 64, 256]),
    *grid(layer=list(IN_PARTS.items()), num_tokens=[32, 64], num_parts=2),
    *grid(layer=list(SINGLE.items()), num_tokens=[1, 2, 4, 8, 16, 32, 64], is_single=True),
]
SMALL_CASES = [
    {"num_tokens": 1, "layer": ("", (70, 96))},
    *grid(num_tokens=[3, 20], layer=("", (70, 97))),
    {"num_tokens": 20, "layer": ("in parts", (70, 200)), "num_parts": 2},
    {"num_tokens": 5, "layer": ("float32", (70, 96)), "is_single": True},
]
FLOOR = Floor("read", 0.0)


def name(num_tokens, layer, **others):
    named, (num_outputs, num_columns) = layer
    return f"T={num_tokens} N={num_outputs} K={num_columns} {named}".rstrip()


def make(device, num_tokens, layer, is_single, num_parts):
    # drawn in the dtype: the vocabulary's weights in fp32 would take 2 GiB more
    dtype, shape = torch.float32 if is_single else half_dtype(device), layer[1]
    weight = torch.empty(shape, dtype=dtype, device=device).normal_()
    x = torch.randn(num_tokens, shape[1], device=device).to(dtype) / shape[1] ** 0.5
    return {"weight": weight, "x": x, "prefetch_weight": True, "num_parts": num_parts}


def count_bytes(num_tokens, layer, is_single, num_parts):
    _, (num_outputs, num_columns) = layer
    element_bytes = 4 if is_single else 2
    output_bytes = element_bytes if num_parts is None else 4 * num_parts
    return element_bytes * (num_outputs + num_tokens) * num_columns + output_bytes * num_tokens * num_outputs


def prepare_torch(values):
    """cuBLAS, which rounds the whole product; the engine calls it past 64 rows."""
    x, weight, num_parts = values["x"], values["weight"], values["num_parts"]
    if num_parts is not None:
        raise Unavailable("makes no parts")
    return lambda: torch.nn.functional.linear(x, weight)
