"""Llama, in the form the engine and the trainer share.

Parameter names are those of Hugging Face's `LlamaForCausalLM`, so its checkpoints load unchanged. Attention itself is
the caller's (`protocol.Attend`): the module holds no cache and no mask. RMSNorm and RoPE work in fp32 whatever the
dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..values import is_integer
from .protocol import Attend, KVShape, ModelError, TargetOutput

# Keys of a Hugging Face config.json that change the computation, with the one value that is implemented.
# An absent or null key means that value.
IMPLEMENTED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "sliding_window": None,
    "quantization_config": None,
}


@dataclass(kw_only=True)
class LlamaConfig:
    """The part of a Hugging Face Llama config.json that decides the computation; the names are its own."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None  # None: one per query head
    head_dim: int | None = None  # None: hidden_size // num_attention_heads
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        for field in fields(self):
            value = getattr(self, field.name)
            is_size = field.type in ("int", "int | None") and value is not None
            if is_size and not (is_integer(value) and value > 0):
                raise ModelError(f"config.json: {field.name} must be a positive integer, got {value!r}")
            if field.type == "float" and not (is_integer(value) or isinstance(value, float)):
                raise ModelError(f"config.json: {field.name} must be a number, got {value!r}")
            if field.type == "bool" and not isinstance(value, bool):
                raise ModelError(f"config.json: {field.name} must be true or false, got {value!r}")
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim={self.head_dim} is odd; RoPE rotates pairs")

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> LlamaConfig:
        """Read a parsed config.json; refuse by name what would change the result and is not implemented."""
        return cls(**cls._read(config))

    @classmethod
    def _read(cls, config: dict[str, Any]) -> dict[str, Any]:
        for name, implemented in IMPLEMENTED.items():
            value = config.get(name)
            if value is not None and value != implemented:
                raise ModelError(f"config.json: {name}={value!r} is not implemented (only {implemented!r})")
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in config.items() if name in known and value is not None}
        values.update(_rope_theta(config))
        for field in fields(cls):
            if field.default is MISSING and field.name not in values:
                raise ModelError(f"config.json: {field.name} is missing")
        return values


def read_section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The JSON object under a key of config.json; {} where the key is absent or null."""
    section = config.get(name)
    if section is not None and not isinstance(section, dict):
        raise ModelError(f"config.json: {name} must be an object, got {section!r}")
    return section or {}


def _rope_theta(config: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta` from either place: the top level, or `rope_parameters`, where transformers 5 writes it."""
    parameters: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        rope = read_section(config, name)
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise ModelError(f"config.json: {name} of type {rope_type!r} is not implemented (only 'default')")
        parameters.update(rope)
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    return {} if theta is None else {"rope_theta": theta}


class RMSNorm(nn.Module):
    """x / rms(x) in fp32, rounded to the dtype of x, then scaled. [..., H] -> [..., H]."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotary(nn.Module):
    """Rotary position embedding, the half-split form of Llama: coordinate c turns with coordinate c + D/2.

    forward: positions [B, T] int64 -> (cos, sin), each [B, T, 1, D] fp32, for `rotate`.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.register_buffer("inverse_frequencies", self._compute_inverse_frequencies(), persistent=False)

    def _compute_inverse_frequencies(self) -> Tensor:
        # Always on the CPU: the device's pow may differ in the last bit, which a position of 10^5 magnifies.
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device="cpu") / self.head_dim
        return 1.0 / self.theta**exponents

    def _apply(self, function, recurse: bool = True) -> Rotary:
        # The frequencies follow the module to its device, but `.to(bfloat16)` must not round them.
        super()._apply(function, recurse)
        self.inverse_frequencies = self._compute_inverse_frequencies().to(self.inverse_frequencies.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None, None].float() * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Apply (cos, sin) of `Rotary` to x [B, T, heads, D] in fp32; rounds once, to the dtype of x."""
    cos, sin = rotary
    wide = x.float()
    low, high = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention around the caller's `attend`. [B, T, input_size] -> [B, T, H].

    `input_size` is H in a Llama layer and 2H in an EAGLE-3 head, which attends from (embedding, feature) pairs.
    """

    def __init__(self, config: LlamaConfig, input_size: int) -> None:
        super().__init__()
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=False)
        self.k_proj = nn.Linear(input_size, kv_size, bias=False)
        self.v_proj = nn.Linear(input_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend, layer: int) -> Tensor:
        heads = (*x.shape[:-1], -1, self.head_dim)
        query = rotate(self.q_proj(x).view(heads), rotary)
        key = rotate(self.k_proj(x).view(heads), rotary)
        value = self.v_proj(x).view(heads)
        return self.o_proj(attend(layer, query, key, value).flatten(-2))


class MLP(nn.Module):
    """SwiGLU. [..., H] -> [..., H]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream. [B, T, H] -> [B, T, H]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, input_size=config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend, layer: int) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, attend, layer)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class LlamaBackbone(nn.Module):
    """Everything below the language-model head; exists so that parameters carry the published prefix `model.`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config.head_dim, config.rope_theta)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, capture: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        rotary = self.rotary(positions)
        hidden = self.embed_tokens(input_ids)
        captured = {0: hidden}
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotary, attend, index)
            if index + 1 in capture:
                captured[index + 1] = hidden
        features = torch.cat([captured[index] for index in capture], dim=-1) if capture else None
        return hidden, features


class Llama(nn.Module):
    """A Llama target (`protocol.TargetModel`); also what the demo trainer trains."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaBackbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Point the output at the embedding where the config says so; needed again after parameters are replaced."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embed_tokens

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def max_length(self) -> int:
        return self.config.max_position_embeddings

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.config.num_hidden_layers, self.config.num_key_value_heads, self.config.head_dim)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: Sequence[int] = (),
        last_only: bool = False,
    ) -> TargetOutput:
        """See `protocol.TargetModel.forward`. `capture` = num_hidden_layers is the stream *before* the final norm,
        where Hugging Face's `hidden_states[-1]` is the one after it."""
        hidden, features = self.model(input_ids, positions, attend, capture)
        if last_only:
            hidden = hidden[:, -1:]
        return TargetOutput(self.lm_head(self.model.norm(hidden)), features)
