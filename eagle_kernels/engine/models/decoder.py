"""The decoder of all families, whose config says what its layers are made of.

State dicts use Hugging Face's parameter names, so its checkpoints load unchanged. The caller supplies the attention
(`protocol.Attend`): the module has no cache and no mask, reads no tensor on the host, and fits into a CUDA graph.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .decoder_config import DecoderConfig
from .layers.experts import Experts
from .layers.linear import Linear, join_projections
from .layers.mixture import MixtureOfExperts, join_experts
from .layers.norm import RMSNorm
from .layers.rotary import Rotary
from .protocol import FINAL_NORM, Angles, Attend, TargetOutput, is_deterministic


class DecoderLayer(nn.Module):
    """Computes attention and feed-forward, each after a norm; in some families another norm follows each. The next norm
    adds the residual stream [B, T, H] from stream and delta."""

    def __init__(self, config: DecoderConfig, layer: int = 0) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = config.attention.make(layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = config.feed_forward.make(layer)
        self.post_self_attn_layernorm = self.post_mlp_layernorm = None
        if config.has_post_norms:
            self.post_self_attn_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.post_mlp_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, stream: Tensor, delta: Tensor | None, angles: Angles, attend: Attend, layer: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the sum that entered the layer, and the stream and delta that leave it."""
        entering, normed = self.input_layernorm.add(stream, delta)
        after_attention, after_mlp = self.post_self_attn_layernorm, self.post_mlp_layernorm
        delta = self.self_attn(normed, angles, attend, layer, in_parts=after_attention is None)
        delta = delta if after_attention is None else after_attention(delta)
        stream, normed = self.post_attention_layernorm.add(entering, delta)
        delta = self.mlp(normed, in_parts=after_mlp is None, deterministic=is_deterministic(attend))
        return entering, stream, delta if after_mlp is None else after_mlp(delta)


class DecoderBackbone(nn.Module):
    """Computes everything below the language-model head; a separate module for the published prefix `model.`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config.rope)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, capture: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the normed output [B, T, H] and the captured streams, concatenated."""
        angles = self.rotary(positions)
        stream, delta = self.embed_tokens(input_ids), None
        captured = {}
        for index, layer in enumerate(self.layers):
            entering, stream, delta = layer(stream, delta, angles, attend, index)
            if index in capture:
                captured[index] = entering
        captured[len(self.layers)], captured[FINAL_NORM] = self.norm.add(stream, delta)
        features = torch.cat([captured[index] for index in capture], dim=-1) if capture else None
        return captured[FINAL_NORM], features


class ConfiguredModel(nn.Module):
    """Holds what decoders and draft heads share: the members of `protocol` that config and weights determine."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config, self.vocab_size, self.max_length = config, config.vocab_size, config.max_position_embeddings
        self.kv_shape = config.attention.kv_shape(config.num_hidden_layers)
        self.quantize: dict[str, str] | None = None  # how the weights were quantised at loading
        self.kv_limits: Tensor | None = None  # see `protocol.TargetModel`
        self.register_load_state_dict_pre_hook(join_projections)
        self.register_load_state_dict_pre_hook(join_experts)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


class Decoder(ConfiguredModel):
    """Computes a target of any of the families (`protocol.TargetModel`)."""

    can_be_deterministic = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.hidden_size = config.hidden_size
        self._lacks_notes = isinstance(config.feed_forward, Experts)
        self.model = DecoderBackbone(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes the output share the embedding's weight if the config says so; repeat it after replacing parameters."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def read_bytes(self, num_rows: float) -> float:
        """Returns the bytes of weights that a step of this many rows reads: of experts those that rows go to."""
        mixtures = self._mixtures()
        quantised = [buffer for buffer in self.buffers() if not buffer.is_floating_point()]
        held = sum(tensor.nbytes for tensor in (*self.parameters(), *quantised))
        return held - sum(mixture.unread_bytes(num_rows) for mixture in mixtures)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Lets layers of experts keep where the rows of a prompt go, the first time: `read_bytes` then goes by them."""
        mixtures = self._mixtures() if self._lacks_notes else []
        self._lacks_notes = False
        for mixture in mixtures:
            mixture.is_noting = True
        try:
            yield
        finally:
            for mixture in mixtures:
                mixture.is_noting = False

    def pack(self) -> None:
        """Puts weights where they are read fastest, once they are filled."""
        for mixture in self._mixtures():
            mixture.pack()

    def _mixtures(self) -> list[MixtureOfExperts]:
        return [module for module in self.modules() if isinstance(module, MixtureOfExperts)]

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    @property
    def device(self) -> torch.device:
        return (
            self.model.embed_tokens.weight.device
        )  # read in every step, and finding the first parameter takes microseconds

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, *, capture: Sequence[int] = (),
        last_only: bool = False, last_rows: Tensor | None = None,
    ) -> TargetOutput:  # fmt: skip
        """See `protocol.TargetModel.forward`. `capture` = num_hidden_layers is the stream *before* the final norm."""
        normed, features = self.model(input_ids, positions, attend, capture)
        if last_rows is not None:
            normed = normed[:, last_rows]
        elif last_only:
            normed = normed[:, -1:]
        return TargetOutput(self.lm_head(normed, is_deterministic(attend)), features)
