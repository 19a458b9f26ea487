"""Next-token modules (MTP), which MiMo (arXiv 2505.07608) has in the target's own folder.

Row i of module k = 0, 1, .. stands for token t_{i+1+k}, and predicts t_{i+2+k}:

    x      = input_proj(cat(hidden_layernorm(h), token_layernorm(embed(t_{i+1+k}))))       hidden state first
    out    = final_layernorm(layer(x))                       a decoder layer of the target's kind
    logits = lm_head(out)                                    lm_head and embed are the target's

For module 0, h is the input of the target's lm_head at token t_i, which is the stream after the final norm; for module
k > 0 it is the output of module k - 1 in row i. A single module feeds itself: its output is the next token's h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .decoder import DecoderLayer
from .decoder_config import read_size
from .draft_head import DraftHead, HeadConfig, head_sizes
from .layers import Linear, RMSNorm
from .protocol import FINAL_NORM, Attend, DraftOutput, ModelError, StoringAttend


@dataclass(kw_only=True)
class NextTokenConfig(HeadConfig):
    """Holds the target's config.json as read for its modules, which are the layers: `num_nextn_predict_layers`."""

    kind = "MTP"
    stored_sizes = head_sizes("mtp_layers.0.")

    @classmethod
    def _read(cls, config: dict[str, Any]) -> dict[str, Any]:
        values = super(HeadConfig, cls)._read(config)
        for window in filter(None, values["windows"]):
            raise ModelError(f"config.json: sliding_window={window} is not implemented for next-token modules")
        num_modules = read_size(config, "num_nextn_predict_layers")
        return values | {"windows": (), "aux_layers": (FINAL_NORM,), "num_hidden_layers": num_modules}


class NextTokenModule(DecoderLayer):
    """Holds the parts of one module: two norms and a projection, a decoder layer, and a final norm."""

    def __init__(self, config: NextTokenConfig) -> None:
        super().__init__(config, window=None)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm, self.hidden_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.input_proj = Linear(2 * size, size, bias=False)
        self.final_layernorm = RMSNorm(size, eps)

    def join(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Returns x [B, T, H], the input of the decoder layer."""
        return self.input_proj(torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embedding)), dim=-1))


class NextTokenModules(DraftHead):
    """Computes the modules of a folder (a `protocol.DraftModules` if there are several)."""

    config: NextTokenConfig
    method = "mtp"

    def __init__(self, config: NextTokenConfig, *, own_embedding: bool = False, own_output: bool = False) -> None:
        super().__init__(config, own_embedding=own_embedding, own_output=own_output)
        self.mtp_layers = nn.ModuleList(NextTokenModule(config) for _ in range(config.num_hidden_layers))
        self.num_modules = len(self.mtp_layers)

    def advance(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, module: int) -> Tensor:
        """See `protocol.DraftModules`."""
        layer = self.mtp_layers[module]
        x = layer.join(self.embed(input_ids), hidden)
        _, stream, delta = layer(x, None, self.rotary(positions), attend, layer=module)
        return layer.final_layernorm.add(stream, delta)[1]

    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, from_target: bool
    ) -> DraftOutput:
        """See `protocol.DraftModel.forward`; the target's features and the module's guesses are read alike."""
        out = self.advance(input_ids, hidden, positions, attend, module=0)
        return DraftOutput(self.project(out), out)

    def store(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: StoringAttend) -> None:
        """See `protocol.DraftModel`."""
        layer = self.mtp_layers[0]
        normed = layer.input_layernorm(layer.join(self.embed(input_ids), hidden))
        layer.self_attn.store(normed, self.rotary(positions), attend, layer=0)
