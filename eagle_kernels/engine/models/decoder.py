"""The decoder of Llama, Mistral, Qwen2, Qwen3 and MiMo, and the parts of its layers, which draft heads use as well.

One class, whose config says what differs. State dicts use Hugging Face's parameter names, so its checkpoints load
unchanged, although projections of the same input are one matrix product (`FusedLinear`). The caller supplies the
attention (`protocol.Attend`): the module has no cache and no mask, reads no tensor on the host, and fits into a CUDA
graph. Norm, rotary embedding and activation are ops of this library. Rotary frequencies equal those of transformers
(modeling_rope_utils.py) bit for bit: its formulas in its order, in fp32.
"""

import math
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor, nn

from ... import ops
from ...ops.nn.linear_decode import is_for, max_rows, parts_for
from ...runtime.values import is_fp32
from .checkpoint import check_memory
from .decoder_config import DecoderConfig, RopeConfig
from .protocol import FINAL_NORM, Angles, Attend, KVShape, ModelError, StoringAttend, TargetOutput, is_deterministic

_DIFFERENTIABLE = SimpleNamespace(
    rms_norm=ops.rms_norm.reference, rope=ops.rope.reference, silu_and_mul=ops.silu_and_mul.reference
)


class Rotary(nn.Module):
    """Holds the half-split form, which rotates coordinates c and c + D / 2. positions [B, T] int64 -> `Angles`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        num_positions = config.max_position_embeddings
        # two thirds of these bytes are free again once the table is made
        need = f"config.json: max_position_embeddings={num_positions} needs {{}} for the angles of its positions"
        check_memory(10 * num_positions * config.head_dim, torch.device("cpu"), need)
        frequencies, factor = _inverse_frequencies(config.rope, config.head_dim)
        if not ((frequencies * (num_positions - 1)).isfinite().all() and is_fp32(factor)):
            fault = f"turns position {num_positions - 1} by an angle too large for fp32"
            raise ModelError(f"config.json: the rotary embedding with rope_type={config.rope.rope_type!r} {fault}")
        # Always on the CPU: cos may differ in its last bit on other devices.
        positions = torch.arange(num_positions, dtype=torch.float32, device="cpu")
        angles = positions[:, None] * frequencies
        table = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)
        self.register_buffer("table", table, persistent=False)

    def _apply(self, function, recurse: bool = True):
        # The table follows the module to its device, but `.to(bfloat16)` must not round it nor `to_empty` lose it.
        self.table = self.table.to(function(self.table.new_empty(0)).device)
        return self

    def forward(self, positions: Tensor) -> Angles:
        return Angles(positions, *self.table.chunk(2, dim=-1))


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Returns the frequencies [D / 2] fp32 on the CPU, and the factor of cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / rope.rope_theta**exponents
    if rope.rope_type == "linear":
        return frequencies / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, rope.rope_theta**exponents, head_dim)
    return frequencies, 1.0


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Stretches long waves by `factor`, keeps short ones and interpolates between them, as in Llama 3.1."""
    length, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    is_long = wavelengths > length / low
    stretched = torch.where(is_long, frequencies / rope.factor, frequencies)
    share = (length / wavelengths - low) / (high - low)
    between = (1 - share) * stretched / rope.factor + share * stretched
    return torch.where(is_long | (wavelengths < length / high), stretched, between)


def _yarn(rope: RopeConfig, wavelengths: Tensor, head_dim: int) -> tuple[Tensor, float]:
    """Stretches by `factor` the pairs that turn less than beta_slow times in the original length, and keeps those that
    turn more than beta_fast times, with a ramp between them, as in YaRN (arXiv 2309.00071); returns its attention
    temperature as the factor of cos and sin."""

    def pair_that_turns(times: float) -> float:
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    frequencies = 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    if rope.attention_factor is not None:
        return frequencies, rope.attention_factor
    over, under = (rope.mscale, rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else (1.0, 0.0)
    growth = max(math.log(rope.factor), 0.0)
    return frequencies, (0.1 * over * growth + 1.0) / (0.1 * under * growth + 1.0)


def library(*tensors: Tensor) -> ModuleType | SimpleNamespace:
    """Returns the operators to apply to these tensors: `ops`, or in training their plain PyTorch forms, which have
    derivatives and run in mixed precision."""
    is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return _DIFFERENTIABLE if is_trained or torch.is_autocast_enabled(tensors[0].device.type) else ops


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, deterministic: bool = False) -> Tensor:
    """Multiplies x [B, T, K] by weightᵀ and adds the bias; on a GPU, `ops.linear_decode` does it for a few tokens.
    deterministic: a row's bits do not depend on the other rows, nor on their number. For GPUs alone."""
    is_decoding = deterministic or x.is_cuda and is_for(x.shape[:2].numel(), weight)
    if is_decoding and library(x, weight, *(() if bias is None else (bias,))) is ops:
        return _decode(x, weight, bias, deterministic)
    if deterministic:
        raise RuntimeError("EAGLEInference: deterministic must be False in training and under torch.autocast")
    return nn.functional.linear(x, weight, bias)


def _decode(x: Tensor, weight: Tensor, bias: Tensor | None, deterministic: bool, parts: int | None = None) -> Tensor:
    """Applies `ops.linear_decode` to x [B, T, K], to the most rows at once that it takes."""
    # prefetch_weight: no kernel of a step writes weights
    options = {"num_parts": parts, "prefetch_weight": True, "deterministic": deterministic}
    rows = x.flatten(0, 1).split(max_rows(x.dtype))
    results = [ops.linear_decode(some, weight, bias, **options) for some in rows]
    return (results[0] if len(results) == 1 else torch.cat(results, dim=-2)).unflatten(-2, x.shape[:2])


class Linear(nn.Linear):
    """Multiplies through `linear`."""

    def forward(self, x: Tensor, deterministic: bool = False) -> Tensor:
        return linear(x, self.weight, self.bias, deterministic)

    def in_parts(self, x: Tensor, deterministic: bool = False) -> Tensor:
        """Returns what `forward` returns or, where that is faster, parts [P, B, T, N] fp32 for `RMSNorm.add`."""
        parts = parts_for(x.shape[:2].numel(), self.weight, deterministic) if x.is_cuda else None
        if parts is None or library(x, *self.parameters()) is not ops:
            return self(x, deterministic)
        return _decode(x, self.weight, self.bias, deterministic, parts)


class RMSNorm(nn.Module):
    """Norms x [B, T, H] or [B, T, heads, H]: x / rms(x) in fp32, rounded to the dtype of x, then scaled."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        norm = library(x, self.weight).rms_norm
        return norm(x.flatten(0, 1), self.weight, eps=self.eps).output.unflatten(0, x.shape[:2])

    def add(self, stream: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns stream + delta [B, T, H] and its norm, from one kernel; delta None stands for zeros. delta may be
        what `Linear.in_parts` returns."""
        if delta is None:
            return stream, self(stream)
        norm, shape = library(stream, delta, self.weight).rms_norm, stream.shape
        options = {"eps": self.eps, "sums_parts": delta.dim() > stream.dim()}
        normed, stream = norm(delta.flatten(-3, -2), self.weight, stream.flatten(0, 1), **options)
        return stream.view(shape), normed.view(shape)


class FusedLinear(Linear):
    """Computes several projections of the same input as one product; `parts` maps their names to their output sizes.
    Its state dict holds views of the parts, under the names that separate modules would have. The parent module must
    register `join_parts`, which joins them again on loading."""

    def __init__(self, input_size: int, parts: dict[str, int], bias: bool) -> None:
        super().__init__(input_size, sum(parts.values()), bias=bias)
        self.parts = parts

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        around, dot, _ = prefix.removesuffix(".").rpartition(".")
        for kind, parameter in self.named_parameters():
            rows = parameter if keep_vars else parameter.detach()
            for part, tensor in zip(self.parts, rows.split(list(self.parts.values())), strict=True):
                destination[f"{around}{dot}{part}.{kind}"] = tensor


def join_parts(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
    """Joins the parts of each fused projection of the module; a hook that runs before `load_state_dict`."""
    for name, child in module.named_children():
        for kind in ("weight", "bias") if isinstance(child, FusedLinear) else ():
            parts = [f"{prefix}{part}.{kind}" for part in child.parts]
            if all(part in state_dict for part in parts):
                state_dict[f"{prefix}{name}.{kind}"] = torch.cat([state_dict.pop(part) for part in parts])


class Attention(nn.Module):
    """Computes grouped-query attention around the caller's `attend`. [B, T, input_size] -> [B, T, H]. `input_size` is H
    in a decoder layer, and 2H in an EAGLE-3 head, whose input is (embedding, feature) pairs."""

    def __init__(self, config: DecoderConfig, input_size: int, window: int | None = None) -> None:
        super().__init__()
        self.head_dim, self.window = config.head_dim, window
        self.num_heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        parts = {f"{name}_proj": count * config.head_dim for name, count in zip("qkv", self.num_heads)}
        self.qkv_proj = FusedLinear(input_size, parts, bias=config.qkv_bias)
        self.o_proj = Linear(parts["q_proj"], config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.has_qk_norms else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.has_qk_norms else None
        self.register_load_state_dict_pre_hook(join_parts)

    def forward(self, x: Tensor, angles: Angles, attend: Attend, layer: int, in_parts: bool = False) -> Tensor:
        """in_parts: the result goes to `RMSNorm.add`, which takes what `Linear.in_parts` returns."""
        deterministic = is_deterministic(attend)
        heads = self.qkv_proj(x, deterministic).unflatten(-1, (-1, self.head_dim))
        query, key, value = heads.split(self.num_heads, dim=-2)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        output = attend(layer, query, key, value, window=self.window, angles=angles).flatten(-2)
        return (self.o_proj.in_parts if in_parts else self.o_proj)(output, deterministic)

    def store(self, x: Tensor, angles: Angles, attend: StoringAttend, layer: int) -> None:
        """Writes keys and values as `forward` does, and attends to nothing."""
        fused, first = self.qkv_proj, self.num_heads[0] * self.head_dim
        both = linear(x, fused.weight[first:], None if fused.bias is None else fused.bias[first:])
        key, value = both.unflatten(-1, (-1, self.head_dim)).chunk(2, dim=-2)
        if self.k_norm is not None:
            key = self.k_norm(key)
        attend.store(layer, key, value, angles=angles)


class MLP(nn.Module):
    """Computes SwiGLU. [B, T, H] -> [B, T, H]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = FusedLinear(config.hidden_size, parts, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.register_load_state_dict_pre_hook(join_parts)

    def forward(self, x: Tensor, in_parts: bool = False, deterministic: bool = False) -> Tensor:
        """in_parts: as in `Attention.forward`. deterministic: as in `linear`."""
        both = self.gate_up_proj(x, deterministic)
        activated = library(both).silu_and_mul(both.flatten(0, 1)).unflatten(0, x.shape[:2])
        return (self.down_proj.in_parts if in_parts else self.down_proj)(activated, deterministic)


class DecoderLayer(nn.Module):
    """Computes pre-norm attention and MLP. The next norm adds the residual stream [B, T, H] from stream and delta."""

    def __init__(self, config: DecoderConfig, window: int | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, input_size=config.hidden_size, window=window)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, stream: Tensor, delta: Tensor | None, angles: Angles, attend: Attend, layer: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the sum that entered the layer, and the stream and delta that leave it."""
        entering, normed = self.input_layernorm.add(stream, delta)
        delta = self.self_attn(normed, angles, attend, layer, in_parts=True)
        stream, normed = self.post_attention_layernorm.add(entering, delta)
        return entering, stream, self.mlp(normed, in_parts=True, deterministic=is_deterministic(attend))


class DecoderBackbone(nn.Module):
    """Computes everything below the language-model head; a separate module for the published prefix `model.`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, window) for window in config.windows)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)

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
        self.kv_shape = KVShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)

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
        self.model = DecoderBackbone(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes the output share the embedding's weight if the config says so; repeat it after replacing parameters."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device  # read in every step, and finding the first parameter takes microseconds

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
