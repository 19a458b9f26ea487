"""fused_experts of Qwen3-30B-A3B, gpt-oss, Mixtral and a rank of DeepSeek-V3, over rows, with uniform routing."""

import torch

from bench.harness import Floor, grid
from bench.harness.inputs import half_dtype
from bench.peers import vllm_moe

# experts, chosen ones, hidden and inner columns
QWEN = ("30B-A3B", (128, 8, 2048, 768))
# one of 8 ranks: a part of each expert (TP), or whole experts, with those of other ranks as -1 (EP)
MODELS = {
    "gpt-oss-20b": (32, 4, 2880, 2880), "Mixtral-8x7B": (8, 2, 4096, 14336), "DeepSeek-V3 TP8": (257, 9, 7168, 256),
    "DeepSeek-V3 EP8": (32, 1, 7168, 2048),
}  # fmt: skip

# formats of weights, and the columns that share a scale
FORMATS = {"w4": 128, "w8": 128, "fp8": 128, "mxfp4": None}
DEFAULTS = {"is_oss": False, "form": "16bit"}
CASES = [
    *grid(model=[QWEN], num_rows=[1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512, 2048]),
    *(
        {"model": (model, sizes), "num_rows": num_rows, "is_oss": model.startswith("gpt-oss")}
        for model, sizes in MODELS.items() for num_rows in (1, 8, 64, 256, 2048)
    ),
    *grid(model=[QWEN], form=["w4", "w8", "fp8"], num_rows=[1, 8, 64, 256]),
    *(
        {"model": ("gpt-oss-20b", MODELS["gpt-oss-20b"]), "num_rows": num_rows, "is_oss": True, "form": "mxfp4"}
        for num_rows in (1, 8, 64, 256)
    ),
]  # fmt: skip
SMALL_CASES = [
    *grid(num_rows=[1, 20], model=("", (6, 2, 64, 48))),
    {"num_rows": 3, "model": ("gpt-oss", (4, 2, 70, 48)), "is_oss": True},
    *grid(num_rows=3, model=("", (4, 2, 128, 64)), form=list(FORMATS)),
]
FLOOR = Floor("read", 0.0)
# of the experts that are touched only some are in the cache by the next turn
ROTATED_BYTES = 3_000_000_000
PEERS = {"vllm": vllm_moe.fused_experts}


def name(num_rows, model, is_oss, form):
    named, (num_experts, num_chosen, hidden, inner) = model
    told = named if form == "16bit" else f"{named} {form}"
    return f"T={num_rows} {num_chosen} of {num_experts} H={hidden} I={inner} {told}".rstrip()


def routed(num_rows, num_experts, num_chosen):
    """Experts [T, K] that differ within a row, the same ones at every call."""
    generator = torch.Generator().manual_seed(num_rows)
    order = torch.rand(num_rows, num_experts, generator=generator).argsort(dim=1)
    return order[:, :num_chosen].to(torch.int32)


def make(device, num_rows, model, is_oss, form):
    dtype, (num_experts, num_chosen, hidden, inner) = half_dtype(device), model[1]
    weights = torch.rand(num_rows, num_chosen, device=device)
    values = {
        "x": torch.randn(num_rows, hidden, device=device).to(dtype),
        "experts": routed(num_rows, num_experts, num_chosen).to(device),
        "weights": weights / weights.sum(dim=1, keepdim=True),
    }  # fmt: skip
    for product, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        if form == "16bit":
            # drawn in the dtype: in fp32 they would take twice the memory for a moment
            values[product] = torch.empty(num_experts, rows, columns, dtype=dtype, device=device).normal_()
            values[product] /= columns**0.5
        else:
            values |= _quantised(product, form, (num_experts, rows, columns), device, dtype)
    if form != "16bit":
        values |= {"weight_format": form, "group_size": FORMATS[form]}
    if is_oss:
        values["gate_up_bias"] = torch.randn(num_experts, 2 * inner, device=device).to(dtype)
        values["down_bias"] = torch.randn(num_experts, hidden, device=device).to(dtype)
        values |= {"activation": "swigluoai", "interleaved": True}
    return values


def _quantised(product, form, shape, device, dtype):
    """Words of any codes, but none of fp8 that are no numbers, and scales of about the size of a weight."""
    (num_experts, rows, columns), bits = shape, 4 if form in ("w4", "mxfp4") else 8
    blocks, words = -(-columns // 128), 4 * bits
    weight = torch.randint(-(2**31), 2**31, (num_experts, rows // 16, blocks, 16, words), device=device)
    if form == "fp8":
        weight &= ~0x40404040  # below 2
    size = 32 if form == "mxfp4" else 128
    if form == "fp8":
        scales = (0.5 + torch.rand(blocks, num_experts, rows // 128, device=device)) / columns**0.5
    else:
        pairs = -(-(blocks * 128 // size) // 2)
        scales = (0.5 + torch.rand(pairs, num_experts, rows, 2, device=device)) * 2.0 ** (2 - bits) / columns**0.5
        scales = scales.log2().round().exp2().bfloat16() if form == "mxfp4" else scales.to(dtype)
    return {product: weight.to(torch.int32), f"{product}_scales": scales}


def count_bytes(num_rows, model, is_oss, form):
    """The experts that are touched, and the rows."""
    _, (num_experts, num_chosen, hidden, inner) = model
    touched = len(routed(num_rows, num_experts, num_chosen).unique())
    # bits of a weight and its scale
    bits = {"16bit": 16, "w4": 4 + 16 / 128, "w8": 8 + 16 / 128, "fp8": 8, "mxfp4": 4 + 16 / 32}[form]
    return int(touched * bits / 8 * 3 * hidden * inner) + 2 * num_rows * 2 * hidden


def is_checked(num_rows, model, is_oss, form):
    return num_rows <= 64
