"""route_experts as the routers of Qwen3-30B-A3B, gpt-oss and DeepSeek-V3 choose, over rows."""

import torch

from bench.harness import Unavailable, grid
from bench.peers import vllm_moe

V3 = {"scoring": "sigmoid", "num_groups": 8, "top_groups": 4, "group_scoring": "top2", "scale": 2.5, "num_shared": 1}
# experts, chosen ones, options
ROUTERS = {"Qwen3-30B-A3B": (128, 8, {}), "gpt-oss-20b": (32, 4, {}), "DeepSeek-V3": (256, 8, V3)}

CASES = grid(router=list(ROUTERS), num_rows=[1, 8, 64, 256, 4096])
SMALL_CASES = grid(router=list(ROUTERS), num_rows=3)
PEERS = {"vllm": vllm_moe.route}


def name(router, num_rows):
    num_experts, top_k, _ = ROUTERS[router]
    return f"T={num_rows} {top_k} of {num_experts} {router}"


def make(device, router, num_rows):
    num_experts, top_k, options = ROUTERS[router]
    # of numbers that no rounding makes equal
    logits = torch.rand(num_rows, num_experts, device=device).argsort(dim=1) * (8.0 / num_experts) - 4.0
    values = {"logits": logits, "top_k": top_k} | options
    return values | ({"bias": torch.zeros(num_experts, device=device)} if options else {})


def count_bytes(router, num_rows):
    num_experts, top_k, options = ROUTERS[router]
    return num_rows * (4 * num_experts + 8 * (top_k + options.get("num_shared", 0))) + 4 * num_experts * bool(options)


def prepare_torch(values):
    """torch.topk, of softmax alone, in whatever order it gives equal ones."""
    if "scoring" in values:
        raise Unavailable("chooses by softmax, without groups")
    logits, top_k = values["logits"], values["top_k"]

    def run():
        weights, experts = torch.topk(torch.softmax(logits, dim=1), top_k, dim=1)
        return {"experts": experts.to(torch.int32), "weights": weights / weights.sum(dim=1, keepdim=True)}

    return run
