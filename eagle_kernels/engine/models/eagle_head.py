"""The EAGLE-3 draft head (Li et al., arXiv 2503.01840), with the published parameter names.

One row stands for (feature f_j of token t_j, token t_{j+1}) at draft position j and predicts t_{j+2}:

    h      = fc(cat(low, middle, high target streams)_j)     or, on later draft levels, the head's own `out`
    z      = cat(input_layernorm(embed(t_{j+1})), hidden_norm(h))                        [2H], embedding first
    u      = h + o_proj(attention(z))                        the residual is h itself, not its norm
    out    = u + mlp(post_attention_layernorm(u))            fed back before the final norm
    logits = lm_head(norm(out))                              over the draft vocabulary

A head with the order swapped, the feature a row off or the wrong norm on the feedback still produces correct text: only
its acceptance suffers. The config keys below are therefore explicit, and everything checkable is checked in `bind`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..values import is_integer
from .decoder_config import DecoderConfig, read_section
from .layers import MLP, Attention, RMSNorm
from .protocol import Attend, DraftOutput, KVShape, ModelError, TargetModel
from .rotary import Angles, Rotary

# Variants of the head that other trainers can write, with the one value that is implemented, as in decoder_config.py;
# the keys occur at the top level and inside `eagle_config`.
IMPLEMENTED = {
    "num_hidden_layers": 1,
    "norm_before_fc": False,
    "fc_norm": False,
    "use_aux_norm": False,
    "use_aux_hidden_state": True,
    "logit_scale": 1.0,
    "speculators_model_type": None,
}


@dataclass(kw_only=True)
class EagleConfig(DecoderConfig):
    """A head's config.json: the keys of its one decoder layer, and these.

    draft_vocab_size        rows of lm_head; None: the target's vocabulary
    target_hidden_size      width of one target stream; None: hidden_size
    aux_layers              which streams, as `hidden_states` indices (0 = embedding output, i = output of layer i - 1);
                            None: (2, n // 2, n - 3) of an n-layer target, the official choice, settled in `bind`
    norm_before_residual    the residual is hidden_norm(h) instead of h
    norm_output             feed back norm(out) instead of out (the meaning in SGLang and vLLM)
    """

    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    aux_layers: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.draft_vocab_size > self.vocab_size:
            raise ModelError(f"draft_vocab_size={self.draft_vocab_size} exceeds vocab_size={self.vocab_size}")

    @property
    def num_aux_layers(self) -> int:
        return 3 if self.aux_layers is None else len(self.aux_layers)

    @classmethod
    def _read(cls, config: dict[str, Any]) -> dict[str, Any]:
        eagle_config = read_section(config, "eagle_config")
        for section in (config, eagle_config):
            for name, implemented in IMPLEMENTED.items():
                value = section.get(name)
                if value is not None and value != implemented:
                    raise ModelError(f"config.json: {name}={value!r} is not implemented (only {implemented!r})")
        values = super()._read(config)
        values.pop("aux_layers", None)  # this file's name for what checkpoints say in eagle_config
        layer_ids = eagle_config.get("eagle_aux_hidden_state_layer_ids")
        if layer_ids is not None:
            if not (isinstance(layer_ids, list) and layer_ids and all(map(is_integer, layer_ids))):
                raise ModelError(
                    f"config.json: eagle_aux_hidden_state_layer_ids must be a list of integers, got {layer_ids!r}"
                )
            # SGLang and SpecForge name the layer whose output is taken; that output is the next hidden_states entry.
            values["aux_layers"] = tuple(layer_id + 1 for layer_id in layer_ids)
        return values


class EagleLayer(nn.Module):
    """The head's only layer: a Llama layer whose attention reads (embedding, hidden) and adds to hidden."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, input_size=2 * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, embedding: Tensor, hidden: Tensor, angles: Angles, attend: Attend) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        pair = torch.cat((self.input_layernorm(embedding), normed), dim=-1)
        hidden = residual + self.self_attn(pair, angles, attend, layer=0)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleHead(nn.Module):
    """An EAGLE-3 head (`protocol.DraftModel`); `bind` it to its target before use.

    `own_embedding` says that the checkpoint holds `embed_tokens.weight` [V, H]; otherwise the target's is shared.
    """

    token_shift = 1

    def __init__(self, config: EagleConfig, *, own_embedding: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        self.fc = nn.Linear(config.num_aux_layers * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = EagleLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config)
        whole = config.draft_vocab_size == config.vocab_size
        self.register_buffer("d2t", None if whole else torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", None if whole else torch.zeros(config.vocab_size, dtype=torch.bool))
        # In a tuple, because assigning the target's module would make its weight part of this head's state dict.
        self._shared_embedding: tuple[nn.Embedding, ...] = ()

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        return self.config.draft_vocab_size

    @property
    def max_length(self) -> int:
        return self.config.max_position_embeddings

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(1, self.config.num_key_value_heads, self.config.head_dim)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        if self.config.aux_layers is None:
            raise ModelError("aux_layers depend on the target: call bind(target) first")
        return self.config.aux_layers

    @property
    def draft_to_target(self) -> Tensor | None:
        return self.d2t

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def _embedding(self) -> nn.Embedding:
        if self.embed_tokens is not None:
            return self.embed_tokens
        if not self._shared_embedding:
            raise ModelError("the head holds no embed_tokens.weight: call bind(target) first")
        return self._shared_embedding[0]

    def bind(self, target: TargetModel) -> EagleHead:
        """Check that the head fits the target, settle the default aux layers and share the embedding; returns self."""
        config = self.config
        num_layers = target.kv_shape.num_layers
        if config.vocab_size != target.vocab_size:
            raise ModelError(f"the head's vocab_size {config.vocab_size} is not the target's {target.vocab_size}")
        if config.target_hidden_size != target.hidden_size:
            raise ModelError(
                f"the head reads features of width {config.target_hidden_size}, the target's are {target.hidden_size}"
            )
        if config.aux_layers is None:
            config.aux_layers = (2, num_layers // 2, num_layers - 3)
        if not all(0 <= layer <= num_layers for layer in config.aux_layers):
            raise ModelError(
                f"aux layers {config.aux_layers} (hidden_states indices) leave a target of {num_layers} layers"
            )
        if any(low >= high for low, high in pairwise(config.aux_layers)):
            raise ModelError(
                f"aux layers {config.aux_layers} (hidden_states indices) do not ascend; targets of fewer than 7 layers "
                "need explicit eagle_config.eagle_aux_hidden_state_layer_ids"
            )
        if self.d2t is not None:
            _check_draft_vocabulary(self.d2t, self.t2d)
        if self.embed_tokens is None:
            if config.hidden_size != target.hidden_size:
                raise ModelError(
                    f"hidden_size {config.hidden_size} differs from the target's {target.hidden_size}, so the head "
                    "cannot share its embedding and must hold embed_tokens.weight"
                )
            if not hasattr(target, "get_input_embeddings"):
                raise ModelError("the head holds no embed_tokens.weight and the target has no get_input_embeddings()")
            self._shared_embedding = (target.get_input_embeddings(),)
        return self

    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, from_target: bool
    ) -> DraftOutput:
        """See `protocol.DraftModel.forward`; F is len(aux_layers)·target_hidden_size or, fed back, hidden_size."""
        if from_target:
            hidden = self.fc(hidden)
        out = self.midlayer(self._embedding(input_ids), hidden, self.rotary(positions), attend)
        normed = self.norm(out)
        return DraftOutput(self.lm_head(normed), normed if self.config.norm_output else out)


def _check_draft_vocabulary(d2t: Tensor, t2d: Tensor) -> None:
    """d2t [Vd] int64 offsets and t2d [V] bool must describe the same ascending subset of the target vocabulary."""
    target_ids = d2t + torch.arange(len(d2t), device=d2t.device)
    outside = (target_ids < 0) | (target_ids >= len(t2d))
    if outside.any():
        draft_id = int(outside.nonzero()[0])
        raise ModelError(
            f"d2t: draft id {draft_id} maps to target id {int(target_ids[draft_id])}, outside the {len(t2d)} there are"
        )
    descending = target_ids.diff() <= 0
    if descending.any():
        draft_id = int(descending.nonzero()[0]) + 1
        raise ModelError(
            f"d2t: draft id {draft_id} maps to target id {int(target_ids[draft_id])}, not above its predecessor's "
            f"{int(target_ids[draft_id - 1])}; d2t holds offsets (target id - draft id)"
        )
    expected = torch.zeros_like(t2d)
    expected[target_ids] = True
    differing = expected != t2d
    if differing.any():
        target_id = int(differing.nonzero()[0])
        raise ModelError(
            f"t2d: target id {target_id} is {bool(t2d[target_id])}, but d2t makes it {bool(expected[target_id])}"
        )
