"""The parts of a decoder layer: RMS norm, attention around the caller's `attend`, SwiGLU.

Projections of one input are one matrix product (`FusedLinear`); state dicts have the published names all the same, so
checkpoints load unchanged and are written as they came. Norm, rotary embedding and activation are the library's ops.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from ... import ops
from ...ops.nn.linear_decode import is_for
from ...reference.ops.nn.rms_norm import rms_norm
from ...reference.ops.nn.rope import rope
from ...reference.ops.nn.silu_and_mul import silu_and_mul
from .decoder_config import DecoderConfig
from .protocol import Angles, Attend, StoringAttend

_DIFFERENTIABLE = SimpleNamespace(rms_norm=rms_norm, rope=rope, silu_and_mul=silu_and_mul)


def library(*tensors: Tensor) -> SimpleNamespace:
    """Where to take the operators on these tensors from: `ops`, or, for training, the references, or PyTorch where that
    has the same, which can be differentiated and run in mixed precision."""
    is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return _DIFFERENTIABLE if is_trained or torch.is_autocast_enabled(tensors[0].device.type) else ops


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of the few tokens of a decoding step on a GPU by `ops.linear_decode`, else as PyTorch does it. [B, T, K]."""
    is_decoding = x.is_cuda and is_for(x.shape[:2].numel(), weight)
    if not is_decoding or library(x, weight, *(() if bias is None else (bias,))) is not ops:
        return nn.functional.linear(x, weight, bias)
    # a step writes no weights
    return ops.linear_decode(x.flatten(0, 1), weight, bias, prefetch_weight=True).unflatten(0, x.shape[:2])


class Linear(nn.Linear):
    """See `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / rms(x) in fp32, rounded to the dtype of x, then scaled. [B, T, H] or [B, T, heads, H], as x."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        norm = library(x, self.weight).rms_norm
        return norm(x.flatten(0, 1), self.weight, eps=self.eps).output.unflatten(0, x.shape[:2])

    def add(self, stream: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """(stream + delta, its norm) of [B, T, H], in one kernel; without a delta (stream, its norm)."""
        if delta is None:
            return stream, self(stream)
        norm = library(stream, delta, self.weight).rms_norm
        normed, stream = norm(delta.flatten(0, 1), self.weight, stream.flatten(0, 1), eps=self.eps)
        return stream.view_as(delta), normed.view_as(delta)


class FusedLinear(Linear):
    """Several projections of one input as one: `parts` names them, with their output sizes, in order.

    Its state dict holds the parts, as views, where they would be as modules beside it. The module around it has to
    register `join_parts` for the way back.
    """

    def __init__(self, input_size: int, parts: dict[str, int], bias: bool) -> None:
        super().__init__(input_size, sum(parts.values()), bias=bias)
        self.parts = parts

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the parts, views."""
        return self(x).split(list(self.parts.values()), dim=-1)

    def split_rest(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the parts but the first one."""
        size, *others = self.parts.values()
        bias = None if self.bias is None else self.bias[size:]
        return linear(x, self.weight[size:], bias).split(others, dim=-1)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        around, dot, _ = prefix.removesuffix(".").rpartition(".")
        for kind, parameter in self.named_parameters():
            rows = parameter if keep_vars else parameter.detach()
            for part, tensor in zip(self.parts, rows.split(list(self.parts.values())), strict=True):
                destination[f"{around}{dot}{part}.{kind}"] = tensor


def join_parts(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
    """A hook before `load_state_dict`: the parts of the module's fused projections become one tensor each."""
    for name, child in module.named_children():
        for kind in ("weight", "bias") if isinstance(child, FusedLinear) else ():
            parts = [f"{prefix}{part}.{kind}" for part in child.parts]
            if all(part in state_dict for part in parts):
                state_dict[f"{prefix}{name}.{kind}"] = torch.cat([state_dict.pop(part) for part in parts])


class Attention(nn.Module):
    """Grouped-query attention around the caller's `attend`. [B, T, input_size] -> [B, T, H].

    `input_size` is H in a decoder layer and 2H in an EAGLE-3 head, which attends from (embedding, feature) pairs.
    """

    def __init__(self, config: DecoderConfig, input_size: int, window: int | None = None) -> None:
        super().__init__()
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.head_dim = config.head_dim
        self.window = window
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(input_size, parts, bias=config.qkv_bias)
        self.o_proj = Linear(query_size, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.has_qk_norms else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.has_qk_norms else None
        self.register_load_state_dict_pre_hook(join_parts)

    def forward(self, x: Tensor, angles: Angles, attend: Attend, layer: int) -> Tensor:
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj.split(x))
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        return self.o_proj(attend(layer, query, key, value, window=self.window, angles=angles).flatten(-2))

    def store(self, x: Tensor, angles: Angles, attend: StoringAttend, layer: int) -> None:
        """Writes keys and values as `forward` does, and attends to nothing."""
        key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj.split_rest(x))
        if self.k_norm is not None:
            key = self.k_norm(key)
        attend.store(layer, key, value, angles=angles)


def rotate(query: Tensor, key: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
    """Query and key [B, T, heads, D] turned to their positions, in fp32; rounds once."""
    turned = library(query, key).rope(query.flatten(0, 1), key.flatten(0, 1), *angles)
    return turned.query.view(query.shape), turned.key.view(key.shape)


class MLP(nn.Module):
    """SwiGLU. [B, T, H] -> [B, T, H]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = FusedLinear(config.hidden_size, parts, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.register_load_state_dict_pre_hook(join_parts)

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        activated = library(both).silu_and_mul(both.flatten(0, 1))
        return self.down_proj(activated.unflatten(0, x.shape[:2]))
