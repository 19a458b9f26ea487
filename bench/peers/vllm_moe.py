"""vLLM's mixtures of experts: its Triton kernels and routers, out of vLLM 0.26.0's own library.

vLLM must be importable where the benchmark runs, with `_moe_C`: on the machine with the GPU, after
`bash .peers/vllm/install.sh .` of a rig built with MOE=1, with `PYTHONPATH=/tmp/vsite:.`.
"""

from __future__ import annotations

import importlib

import torch

from ..harness.declaration import Run, Unavailable

_FOLDER = "vllm.model_executor.layers.fused_moe."


def fused_experts(values: dict) -> Run:
    """Alignment, both products, the activation and the sum."""
    if values.get("weight_format", "16bit") != "16bit":
        raise Unavailable("is compared in 16 bit")
    run = _module(_FOLDER + "fused_moe").fused_experts_impl
    options = {"activation": "silu", "w1_bias": values.get("gate_up_bias"), "w2_bias": values.get("down_bias")}
    if values.get("activation") == "swigluoai":
        options["activation"] = "swigluoai"
    x, experts, weights, gate_up, down = (values[name] for name in ("x", "experts", "weights", "gate_up", "down"))
    return lambda: run(x, gate_up, down, weights, experts, **options)


def route(values: dict) -> Run:
    """The softmax of the best, or groups of sigmoids with a bias."""
    logits, top_k, num_shared = values["logits"], values["top_k"], values.get("num_shared", 0)
    if values.get("scoring") != "sigmoid":
        choose = _module(_FOLDER + "router.fused_topk_router").fused_topk

        def run():
            weights, experts, _ = choose(logits, logits, top_k, True)
            return {"experts": experts, "weights": weights}

        return run
    choose, shared = _module(_FOLDER + "router.grouped_topk_router").grouped_topk, values["logits"].shape[1]
    more = torch.arange(shared, shared + num_shared, device=logits.device, dtype=torch.int32).expand(len(logits), -1)
    ones = torch.ones_like(more, dtype=torch.float32)

    def run_groups():
        weights, experts = choose(
            logits, logits, top_k, True, values["num_groups"], values["top_groups"], "sigmoid", values["scale"],
            values.get("bias"),
        )  # fmt: skip
        # what this op writes by itself is no part of vLLM's
        return {"experts": torch.cat((experts.to(torch.int32), more), 1), "weights": torch.cat((weights, ones), 1)}

    return run_groups


def _module(name: str):
    if not torch.cuda.is_available():
        raise Unavailable("needs a GPU")
    try:
        return importlib.import_module(name)
    except Exception as error:  # an import runs much of vLLM
        reason = str(error).strip().partition("\n")[0]
        raise Unavailable(f"{name} cannot be imported: {type(error).__name__}: {reason}") from None
