"""The draft head of EAGLE-1 (Li et al., arXiv 2401.15077) and EAGLE-2 (arXiv 2406.16858), which share one network.

One row stands for (feature f_j of token t_j, token t_{j+1}) at draft position j and predicts t_{j+2}:

    x      = fc(cat(embed(t_{j+1}), f_j))                   embedding first
    u      = x + attention(x)                               a Llama layer that has no input_layernorm
    out    = u + mlp(post_attention_layernorm(u))
    logits = lm_head(out)                                   no final norm; the target's own lm_head

f_j is the input of the target's lm_head, which is the stream *after* its final norm. `out` is a guess of f_{j+1}, and
is fed back unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .draft_head import DraftHead, HeadConfig
from .layers import MLP, Attention, Linear, RMSNorm
from .protocol import Angles, Attend, DraftOutput, StoringAttend
from .stored_sizes import StoredSize


@dataclass(kw_only=True)
class Eagle1Config(HeadConfig):
    """A `HeadConfig`; `fc_bias` says whether fc has a bias (published heads for Llama 3 have none)."""

    kind = "EAGLE-1"
    layer_prefix = "layers.0."

    fc_bias: bool = True

    @property
    def stored_sizes(self) -> list[StoredSize]:
        return [*super().stored_sizes, StoredSize("hidden_size + target_hidden_size", 1, ("fc.weight",))]


class Eagle1Layer(nn.Module):
    """A Llama layer without input_layernorm. [B, T, H] -> [B, T, H]."""

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__()
        self.self_attn = Attention(config, input_size=config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, angles: Angles, attend: Attend) -> Tensor:
        hidden = hidden + self.self_attn(hidden, angles, attend, layer=0)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle1Head(DraftHead):
    """An EAGLE-1 or EAGLE-2 head."""

    config: Eagle1Config

    def __init__(self, config: Eagle1Config, *, own_embedding: bool = False, own_output: bool = False) -> None:
        super().__init__(config, own_embedding=own_embedding, own_output=own_output)
        self.fc = Linear(config.hidden_size + config.target_hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([Eagle1Layer(config)])

    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, from_target: bool
    ) -> DraftOutput:
        """See `protocol.DraftModel.forward`; the target's features and the head's guesses are read alike."""
        hidden = self._fuse(input_ids, hidden)
        out = self.layers[0](hidden, self.rotary(positions), attend)
        return DraftOutput(self.project(out), out)

    def store(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: StoringAttend) -> None:
        """See `protocol.DraftModel`."""
        self.layers[0].self_attn.store(self._fuse(input_ids, hidden), self.rotary(positions), attend, layer=0)

    def _fuse(self, input_ids: Tensor, hidden: Tensor) -> Tensor:
        return self.fc(torch.cat((self.embed(input_ids), hidden), dim=-1))
