"""Norms, activation, rotary embedding and KV writes of an installed SGLang, 0.5.17 or near it: compiled on first use.

SGLang turns and norms in place. The functions here do so on copies, made before anything is timed: a second run gets
what the first one left, and its time does not depend on that. KV is written into the caches that were given.
"""

import importlib

import torch

from ..harness.declaration import Run, Unavailable


def _function(name: str):
    """Imports a function of SGLang or of its kernel package."""
    if not torch.cuda.is_available():
        raise Unavailable("needs a GPU")
    module, _, function = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"{name} cannot be imported: {error}") from error


def rms_norm(values: dict) -> Run:
    """The CUDA op, which rounds once; with a residual not even the sum is rounded before."""
    x, weight = values["x"].clone(), values["weight"]
    if "residual" not in values:
        norm = _function("sgl_kernel.rmsnorm")
        return lambda: {"output": norm(x, weight, 1e-6)}
    add_norm, residual = _function("sgl_kernel.fused_add_rmsnorm"), values["residual"].clone()

    def run():
        add_norm(x, residual, weight, 1e-6)
        return {"output": x, "residual": residual}

    return run


def silu_and_mul(values: dict) -> Run:
    """Compiled for SGLang's layer; takes gate and up in one tensor."""
    if "up" in values:
        raise Unavailable("takes gate and up in one tensor")
    gate = values["gate"]
    out = gate.new_empty(gate.shape[0], gate.shape[1] // 2)
    op = _function("sglang.kernels.ops.activation.activation.silu_and_mul")

    def run():
        op(gate, out)
        return out

    return run


def _angles(values: dict) -> torch.Tensor:
    return torch.cat((values["cos"], values["sin"]), dim=-1).float()


def rope(values: dict) -> Run:
    """Turns queries and keys."""
    op = _function("sglang.kernels.ops.attention.rope.apply_rope_inplace")
    query, key, angles = values["query"].clone(), values["key"].clone(), _angles(values)

    def run():
        op(query, key, angles, values["positions"], is_neox=not values["is_interleaved"])
        return {"query": query, "key": key}

    return run


def write_kv(values: dict, is_apart: bool = False) -> Run:
    """Turns and writes in one launch, as SGLang does it for some of its models; without rope it only writes."""
    caches = [values[name].flatten(0, 1).flatten(1) for name in ("k_cache", "v_cache")]
    key, value, slots = values["key"].clone(), values["value"].contiguous(), values["slots"]
    if caches[0].dtype != key.dtype:
        raise Unavailable("writes 16-bit caches")
    store = _function("sglang.kernels.ops.kvcache.kvcache.store_cache")

    def write():
        store(key.flatten(1), value.flatten(1), *caches, slots, reserved_skip_index=-1)

    if "query" not in values:
        return write
    query, angles, positions = values["query"].clone(), _angles(values), values["positions"]
    turn = _function("sglang.kernels.ops.attention.rope.apply_rope_inplace")
    turn_and_write = _function("sglang.kernels.ops.attention.rope.apply_rope_inplace_with_kvcache")

    def run():
        if is_apart:
            turn(query, key, angles, positions, is_neox=True)
            write()
        else:
            turn_and_write(query, key, value, *caches, angles, positions, slots, is_neox=True)
        return query

    return run


def write_kv_apart(values: dict) -> Run:
    """The same in two launches, as SGLang does it for Llama and most others."""
    if "query" not in values:
        raise Unavailable("only with rope")
    return write_kv(values, is_apart=True)
