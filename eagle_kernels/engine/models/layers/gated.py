"""The feed-forward of Llama and most families: SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..settings import check_fields, check_implemented, field_values
from .linear import Linear
from .norm import library


@dataclass(kw_only=True)
class Gated:
    """Holds the settings, by Hugging Face's names, and the kind of its linears."""

    hidden_size: int
    intermediate_size: int
    mlp_bias: bool = False
    is_joined: bool = False  # whether the file has gate and up in one tensor
    linear: type[Linear] = Linear  # the kind

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def stored_sizes(self) -> dict[str, str]:
        if self.is_joined:
            return {"mlp.gate_up_proj.weight": "intermediate_size + intermediate_size"}
        return {"mlp.gate_proj.weight": "intermediate_size"}

    @classmethod
    def read(cls, config: dict[str, Any]) -> Gated:
        check_implemented(config, {"hidden_act": "silu"})
        return cls(**field_values(cls, config))

    def make(self, layer: int = 0) -> GatedFeedForward:
        return GatedFeedForward(self)


class GatedFeedForward(nn.Module):
    """Computes silu(gate) · up, and projects it. [B, T, H] -> [B, T, H]."""

    def __init__(self, settings: Gated) -> None:
        super().__init__()
        size, inner, bias = settings.hidden_size, settings.intermediate_size, settings.mlp_bias
        outputs = 2 * inner if settings.is_joined else {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = settings.linear(size, outputs, bias)
        self.down_proj = settings.linear(inner, size, bias)

    def forward(self, x: Tensor, in_parts: bool = False, deterministic: bool = False) -> Tensor:
        """in_parts: the result goes to `RMSNorm.add`, which takes parts."""
        both = self.gate_up_proj(x, deterministic)
        activated = library(both).silu_and_mul(both.flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.down_proj(activated, deterministic, in_parts)
