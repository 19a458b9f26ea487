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

DEFAULTS = {"is_oss": False}
CASES = [
    *grid(model=[QWEN], num_rows=[1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512, 2048]),
    *(
        {"model": (model, sizes), "num_rows": num_rows, "is_oss": model.startswith("gpt-oss")}
        for model, sizes in MODELS.items() for num_rows in (1, 8, 64, 256, 2048)
    ),
]  # fmt: skip
SMALL_CASES = [
    *grid(num_rows=[1, 20], model=("", (6, 2, 64, 48))),
    {"num_rows": 3, "model": ("gpt-oss", (4, 2, 70, 48)), "is_oss": True},
]
FLOOR = Floor("read", 0.0)
# of the experts that are touched only some are in the cache by the next turn
ROTATED_BYTES = 3_000_000_000
PEERS = {"vllm": vllm_moe.fused_experts}


def name(num_rows, model, is_oss):
    named, (num_experts, num_chosen, hidden, inner) = model
    return f"T={num_rows} {num_chosen} of {num_experts} H={hidden} I={inner} {named}".rstrip()


def routed(num_rows, num_experts, num_chosen):
    """Experts [T, K] that differ within a row, the same ones at every call."""
    generator = torch.Generator().manual_seed(num_rows)
    order = torch.rand(num_rows, num_experts, generator=generator).argsort(dim=1)
    return order[:, :num_chosen].to(torch.int32)


def make(device, num_rows, model, is_oss):
    dtype, (num_experts, num_chosen, hidden, inner) = half_dtype(device), model[1]
    # drawn in the dtype: in fp32 they would take twice the memory for a moment
    gate_up = torch.empty(num_experts, 2 * inner, hidden, dtype=dtype, device=device).normal_() / hidden**0.5
    down = torch.empty(num_experts, hidden, inner, dtype=dtype, device=device).normal_() / inner**0.5
    weights = torch.rand(num_rows, num_chosen, device=device)
    values = {
        "x": torch.randn(num_rows, hidden, device=device).to(dtype),
        "experts": routed(num_rows, num_experts, num_chosen).to(device),
        "weights": weights / weights.sum(dim=1, keepdim=True), "gate_up": gate_up, "down": down,
    }  # fmt: skip
    if is_oss:
        values["gate_up_bias"] = torch.randn(num_experts, 2 * inner, device=device).to(dtype)
        values["down_bias"] = torch.randn(num_experts, hidden, device=device).to(dtype)
        values |= {"activation": "swigluoai", "interleaved": True}
    return values


def count_bytes(num_rows, model, is_oss):
    """The experts that are touched, and the rows."""
    _, (num_experts, num_chosen, hidden, inner) = model
    touched = len(routed(num_rows, num_experts, num_chosen).unique())
    return touched * 2 * 3 * hidden * inner + 2 * num_rows * 2 * hidden


def is_checked(num_rows, model, is_oss):
    return num_rows <= 64
