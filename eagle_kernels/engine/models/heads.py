"""The draft heads of EAGLE-3, of EAGLE-1 and EAGLE-2, and next-token modules, with the published parameter names.

One row stands for (feature f_j of token t_j, token t_{j+1}) at draft position j and predicts t_{j+2}.

EAGLE-3 (Li et al., arXiv 2503.01840), with the options of 3.1:

    h      = fc(cat(low, middle, high target streams)_j)     or, on later draft levels, the head's own `out`
    z      = cat(input_layernorm(embed(t_{j+1})), hidden_norm(h))                        [2H], embedding first
    u      = h + o_proj(attention(z))                        the residual is h itself, not its norm
    out    = u + mlp(post_attention_layernorm(u))            fed back before the final norm
    logits = lm_head(norm(out))                              over the draft vocabulary

Attention is grouped-query, or latent as in DeepSeek's models. Then the down projections read z: that of queries
(q_a_proj, or q_proj alone) and that of keys and values (kv_a_proj_with_mqa). The mlp has no experts.

EAGLE-1 (arXiv 2401.15077) and EAGLE-2 (arXiv 2406.16858), which share one network:

    x      = fc(cat(embed(t_{j+1}), f_j))                   embedding first
    u      = x + attention(x)                               a Llama layer that has no input_layernorm
    out    = u + mlp(post_attention_layernorm(u))
    logits = lm_head(out)                                   no final norm; the target's own lm_head

There f_j is the input of the target's lm_head, the stream *after* its final norm; `out`, fed back, guesses f_{j+1}.

Next-token modules (MTP), which MiMo (arXiv 2505.07608) has in the target's own folder. In row j module k = 0, 1, ..
stands for token t_{j+1+k}, and predicts t_{j+2+k}:

    x      = input_proj(cat(hidden_layernorm(h), token_layernorm(embed(t_{j+1+k}))))       hidden state first
    out    = final_layernorm(layer(x))                       a decoder layer of the target's kind
    logits = lm_head(out)                                    lm_head and embed are the target's

For module 0, h is f_j as EAGLE-1 reads it; for module k > 0 it is the output of module k - 1 in row j. A single module
feeds itself: its output is the next token's h. DeepSeek's modules (arXiv 2412.19437) are the same with the embedding
first, and so are GLM's; their layers are of the kind of the target's last ones, with experts. ERNIE's has the embedding
first as well, a layer of the kind of the target's first one, and the target's final norm.

A head that swaps this order, reads features a row off or feeds back the wrong norm still produces correct text: only
its acceptance suffers. So the config keys below are explicit, and `bind` checks all that can be checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import StoredSize
from .decoder import DecoderLayer
from .draft_head import DraftHead, HeadConfig
from .layers.linear import Linear
from .layers.norm import RMSNorm
from .protocol import FINAL_NORM, Angles, Attend, DraftOutput, ModelError, StoringAttend
from .settings import read_size


@dataclass(kw_only=True)
class EagleConfig(HeadConfig):
    """Adds the options of the network."""

    kind = "EAGLE-3"
    layer_prefix = "midlayer."
    own_sizes = (*HeadConfig.own_sizes, StoredSize("num_aux_layers * target_hidden_size", 1, ("fc.weight",)))

    norm_before_residual: bool = False  # the residual is hidden_norm(h) instead of h
    norm_output: bool = False  # norm(out) is fed back instead of out (the meaning in SGLang and vLLM)
    norm_before_fc: bool = False  # an RMSNorm over the concatenated streams, before fc
    fc_norm: bool = False  # a separate RMSNorm for each stream, before they are concatenated
    use_aux_hidden_state: bool = True  # False: h is the target's stream after its final norm, and there is no fc

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.use_aux_hidden_state and (self.norm_before_fc or self.fc_norm):
            raise ModelError("config.json: norm_before_fc and fc_norm need use_aux_hidden_state=True")
        if not self.use_aux_hidden_state and self.target_hidden_size != self.hidden_size:
            rule = f"must be hidden_size = {self.hidden_size} without use_aux_hidden_state"
            raise ModelError(f"config.json: target_hidden_size {rule}, got {self.target_hidden_size}")


class HeadLayer(nn.Module):
    """Computes a Llama layer without input_layernorm. [B, T, H] and the attention's [B, T, input_size] -> [B, T, H]."""

    def __init__(self, config: HeadConfig, input_size: int) -> None:
        super().__init__()
        self.self_attn = config.attention.make(input_size=input_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = config.feed_forward.make()

    def forward(self, residual: Tensor, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        hidden = residual + self.self_attn(x, angles, attend, layer=0)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleLayer(HeadLayer):
    """Computes the layer of EAGLE-3, whose attention reads (embedding, hidden) pairs and adds to hidden."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, input_size=2 * config.hidden_size)
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def enter(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the residual and the input of attention."""
        normed = self.hidden_norm(hidden)
        pair = torch.cat((self.input_layernorm(embedding), normed), dim=-1)
        return normed if self.norm_before_residual else hidden, pair


class EagleHead(DraftHead):
    """Computes an EAGLE-3 head."""

    config: EagleConfig

    def __init__(self, config: EagleConfig, *, own_embedding: bool = False, own_output: bool = True) -> None:
        super().__init__(config, own_embedding=own_embedding, own_output=own_output)
        width, streams = config.target_hidden_size, config.num_aux_layers
        self.fc = Linear(streams * width, config.hidden_size, bias=False) if config.use_aux_hidden_state else None
        self.input_norm = RMSNorm(streams * width, config.rms_norm_eps) if config.norm_before_fc else None
        stream_norms = (RMSNorm(width, config.rms_norm_eps) for _ in range(streams))
        self.fc_norm = nn.ModuleList(stream_norms) if config.fc_norm else None
        self.midlayer = EagleLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def _fuse(self, features: Tensor) -> Tensor:
        """Joins the target's streams [B, T, F] to one h [B, T, H]."""
        if self.fc_norm is not None:
            streams = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(stream) for norm, stream in zip(self.fc_norm, streams)], dim=-1)
        if self.input_norm is not None:
            features = self.input_norm(features)
        return features if self.fc is None else self.fc(features)

    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, from_target: bool,
        projects: bool = True,
    ) -> DraftOutput:  # fmt: skip
        """See `protocol.DraftModel.forward`; F is len(aux_layers)·target_hidden_size, or hidden_size when fed back."""
        if from_target:
            hidden = self._fuse(hidden)
        out = self.midlayer(*self.midlayer.enter(self.embed(input_ids), hidden), self.rotary(positions), attend)
        normed = self.norm(out)
        return DraftOutput(self.project(normed) if projects else normed, normed if self.config.norm_output else out)

    def store(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: StoringAttend) -> None:
        """See `protocol.DraftModel`."""
        _, pair = self.midlayer.enter(self.embed(input_ids), self._fuse(hidden))
        self.midlayer.self_attn.store(pair, self.rotary(positions), attend, layer=0)


@dataclass(kw_only=True)
class Eagle1Config(HeadConfig):
    """Adds `fc_bias`, whether fc has a bias (published heads for Llama 3 have none)."""

    kind = "EAGLE-1"
    layer_prefix = "layers.0."
    own_sizes = (*HeadConfig.own_sizes, StoredSize("hidden_size + target_hidden_size", 1, ("fc.weight",)))

    fc_bias: bool = True


class Eagle1Head(DraftHead):
    """Computes an EAGLE-1 or EAGLE-2 head."""

    config: Eagle1Config

    def __init__(self, config: Eagle1Config, *, own_embedding: bool = False, own_output: bool = False) -> None:
        super().__init__(config, own_embedding=own_embedding, own_output=own_output)
        self.fc = Linear(config.hidden_size + config.target_hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([HeadLayer(config, config.hidden_size)])

    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, from_target: bool,
        projects: bool = True,
    ) -> DraftOutput:  # fmt: skip
        """See `protocol.DraftModel.forward`; the target's features and the head's guesses are read alike."""
        fused = self._fuse(input_ids, hidden)
        out = self.layers[0](fused, fused, self.rotary(positions), attend)
        return DraftOutput(self.project(out) if projects else out, out)

    def store(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: StoringAttend) -> None:
        """See `protocol.DraftModel`."""
        self.layers[0].self_attn.store(self._fuse(input_ids, hidden), self.rotary(positions), attend, layer=0)

    def _fuse(self, input_ids: Tensor, hidden: Tensor) -> Tensor:
        return self.fc(torch.cat((self.embed(input_ids), hidden), dim=-1))


@dataclass(kw_only=True)
class NextTokenConfig(HeadConfig):
    """Holds the target's config.json as read for its modules, which are the layers: `num_nextn_predict_layers`."""

    kind = "MTP"
    layer_prefix = "mtp_layers.0."

    first_layer: int | None = None  # the number of the first module's layer; None: that of the target's first one
    embedding_first: bool = False  # which half of the projection's input it is

    @classmethod
    def _read(cls, config: dict[str, Any]) -> dict[str, Any]:
        values = super(HeadConfig, cls)._read(config, "next-token modules")
        first_layer = None if config.get("counts_from_first") is True else values["num_hidden_layers"]
        num_modules = read_size(config, "num_nextn_predict_layers")
        return values | {"aux_layers": (FINAL_NORM,), "first_layer": first_layer, "num_hidden_layers": num_modules}


class NextTokenModule(DecoderLayer):
    """Holds the parts of one module: two norms and a projection, a decoder layer, and a final norm."""

    def __init__(self, config: NextTokenConfig, module: int) -> None:
        super().__init__(config, module if config.first_layer is None else config.first_layer + module)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embedding_first = config.embedding_first
        self.token_layernorm, self.hidden_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.input_proj = Linear(2 * size, size, bias=False)
        self.final_layernorm = RMSNorm(size, eps)

    def join(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Returns x [B, T, H], the input of the decoder layer."""
        pair = self.hidden_layernorm(hidden), self.token_layernorm(embedding)
        return self.input_proj(torch.cat(pair[::-1] if self.embedding_first else pair, dim=-1))


class NextTokenModules(DraftHead):
    """Computes the modules of a folder (a `protocol.DraftModules` if there are several)."""

    config: NextTokenConfig
    method = "mtp"

    def __init__(self, config: NextTokenConfig, *, own_embedding: bool = False, own_output: bool = False) -> None:
        super().__init__(config, own_embedding=own_embedding, own_output=own_output)
        self.mtp_layers = nn.ModuleList(NextTokenModule(config, module) for module in range(config.num_hidden_layers))
        self.num_modules = len(self.mtp_layers)

    def advance(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, module: int) -> Tensor:
        """See `protocol.DraftModules`."""
        layer = self.mtp_layers[module]
        x = layer.join(self.embed(input_ids), hidden)
        _, stream, delta = layer(x, None, self.rotary(positions), attend, layer=module)
        return layer.final_layernorm.add(stream, delta)[1]

    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, from_target: bool,
        projects: bool = True,
    ) -> DraftOutput:  # fmt: skip
        """See `protocol.DraftModel.forward`; the target's features and the module's guesses are read alike."""
        out = self.advance(input_ids, hidden, positions, attend, module=0)
        return DraftOutput(self.project(out) if projects else out, out)

    def store(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: StoringAttend) -> None:
        """See `protocol.DraftModel`."""
        layer = self.mtp_layers[0]
        normed = layer.input_layernorm(layer.join(self.embed(input_ids), hidden))
        layer.self_attn.store(normed, self.rotary(positions), attend, layer=0)
