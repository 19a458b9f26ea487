"""Any causal language model of `transformers` as a target: its own class and forward, with our attention and KV pool.

Attention reaches us through transformers' AttentionInterface, the hidden states through hooks. So the model builds
neither cache nor mask, and positions, embeddings, experts and what is done to the logits are its own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...primitives.paging import MAX_HEAD_DIM, MIN_HEAD_DIM
from .protocol import FINAL_NORM, Attend, KVShape, ModelError, TargetOutput

# The name (attn_implementation) of our attention in transformers. It has no entry in AttentionMaskInterface:
# transformers then makes no mask, and does not look for packed sequences in the positions, which would take those of a
# tree for some and wait for the device.
IMPLEMENTATION = "eagle_kernels_pool"

# A layer that config.layer_types calls otherwise computes something else than our attention.
_LAYER_TYPES = {"full_attention", "sliding_attention"}

# What config.json calls the number of experts: which of them a token takes is read on the host (or, by kernels of some
# GPUs and dtypes alone, is not).
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config")

# Rotary frequencies that depend on the last position of the batch, which is read on the host.
_CHANGING_ROPE_TYPES = {"dynamic", "longrope"}


class _Call(NamedTuple):
    """A forward in progress: what it attends with, and the streams that it is asked for, None until they come."""

    attend: Attend
    streams: dict[int, Tensor | None]


# Of the thread: a draft and a target, and models in several threads, do not get into each other's way.
_CALL: ContextVar[_Call | None] = ContextVar("call", default=None)


class TransformersTarget:
    """A causal language model of transformers as a `protocol.TargetModel`.

    model  stays as it is: `self.model`, which runs through `forward` here alone, is a copy in eval mode and with our
           attention, whose weights are those of the model, and change where they are changed in place

    Two tokens are run at once, to learn what its layers ask of the KV pool; what they would ask that the pool's
    attention has not is refused. `can_be_captured` is False for models with experts and for rotary frequencies that
    depend on the batch: their forward waits for the device.
    """

    def __init__(self, model: nn.Module) -> None:
        from transformers import AttentionInterface, PreTrainedModel

        AttentionInterface.register(IMPLEMENTATION, _attention)
        self._name = type(model).__name__
        self.model = model = _twin(model).eval()
        self.config = model.config.get_text_config(decoder=True)
        self._check_config()
        model.set_attn_implementation(IMPLEMENTATION)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                # there is none, and the search waits for the device
                module.warn_if_padding_and_no_attention_mask = _warn_of_nothing
        self._keeps_last = "logits_to_keep" in inspect.signature(model.forward).parameters
        num_layers = self.config.num_hidden_layers
        decoder, layers = _find_layers(model, num_layers)
        if any(isinstance(part, nn.Conv1d) for part in layers.modules()):
            raise ModelError(
                f"{self._name}: layers with convolutions over time keep a state, which the pool cannot hold"
            )
        _hook(decoder, layers)
        self.max_length = _max_length(self.config)
        self.can_be_captured = not (
            any(getattr(self.config, name, None) for name in _EXPERTS)
            or _rope_types(self.config) & _CHANGING_ROPE_TYPES
        )
        seen: dict[int, _Layer] = {}
        capture = (*range(num_layers + 1), FINAL_NORM)
        tokens = torch.arange(2, device=self.device)[None]
        with torch.inference_mode():
            try:
                logits, features = self.forward(tokens, tokens, partial(_note_layer, self._name, seen), capture=capture)
            except ModelError:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                raise ModelError(f"{self._name}: its forward does not run with our attention, {reason}") from error
        self.vocab_size = logits.shape[-1]
        self.hidden_size = self.config.hidden_size
        if features.shape != (1, 2, len(capture) * self.hidden_size):
            raise ModelError(f"{self._name}: hidden states of another width than hidden_size={self.hidden_size}")
        self.kv_shape = self._check_layers(seen)

    @property
    def device(self) -> torch.device:
        return self.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.get_input_embeddings().weight.dtype

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Linear:
        return self.model.get_output_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: Sequence[int] = (),
        last_only: bool = False,
    ) -> TargetOutput:
        """See `protocol.TargetModel.forward`."""
        options: dict[str, Any] = {"logits_to_keep": 1} if last_only and self._keeps_last else {}
        call = _Call(attend, dict.fromkeys(capture))
        token = _CALL.set(call)
        try:
            logits = self.model(
                input_ids=input_ids, position_ids=positions, use_cache=False, return_dict=True, **options
            ).logits
        finally:
            _CALL.reset(token)
        if last_only:
            logits = logits[:, -1:]
        features = torch.cat([call.streams[index] for index in capture], dim=-1) if capture else None
        return TargetOutput(logits.to(self.dtype), features)

    def _check_config(self) -> None:
        """Refuses what config.json says and no layer would tell."""
        config = self.config
        unfit = {
            "an encoder": config.is_encoder_decoder,
            "cross attention": getattr(config, "add_cross_attention", False),
            "alibi": getattr(config, "alibi", False) or getattr(config, "use_alibi", False),
            "attention to later tokens": not getattr(config, "is_causal", True)
            or getattr(config, "use_bidirectional_attention", False),
        }
        for layer_type in getattr(config, "layer_types", None) or ():
            unfit[f"a layer of type {layer_type}"] = layer_type not in _LAYER_TYPES
        for name, is_there in unfit.items():
            if is_there:
                raise ModelError(f"{self._name}: {name} is not supported")
        if "position_ids" not in inspect.signature(self.model.forward).parameters:
            raise ModelError(f"{self._name}: its forward takes no position_ids, which the rows of a tree need")
        if not config.num_hidden_layers > 0:
            raise ModelError(f"{self._name}: num_hidden_layers must be above 0, got {config.num_hidden_layers}")
        if not getattr(config, "max_position_embeddings", None):
            raise ModelError(f"{self._name}: config.json says no max_position_embeddings")

    def _check_layers(self, seen: dict[int, _Layer]) -> KVShape:
        """What all layers store; refuses layers that differ, do not attend, or do not say their window."""
        num_layers = self.config.num_hidden_layers
        silent = sorted(set(range(num_layers)) - seen.keys())
        if silent:
            raise ModelError(
                f"{self._name}: layer {silent[0]} of {num_layers} does not attend through transformers' "
                "AttentionInterface, so its keys and values cannot be kept in our pool"
            )
        shapes = {(layer.num_kv_heads, layer.head_dim) for layer in seen.values()}
        if len(shapes) > 1:
            raise ModelError(f"{self._name}: layers of different (key heads, size) {sorted(shapes)}")
        (shape,) = shapes
        if not MIN_HEAD_DIM <= shape[1] <= MAX_HEAD_DIM:
            raise ModelError(f"{self._name}: heads of size {shape[1]}; {MIN_HEAD_DIM}..{MAX_HEAD_DIM} are supported")
        window = getattr(self.config, "sliding_window", None)
        layer_types = getattr(self.config, "layer_types", None) or ["sliding_attention" if window else ""] * num_layers
        for layer, layer_type in enumerate(layer_types[:num_layers]):
            if layer_type == "sliding_attention" and seen[layer].window is None:
                raise ModelError(f"{self._name}: layer {layer} does not tell its attention the sliding window")
        return KVShape(num_layers, *shape)


class _Layer(NamedTuple):
    """What a layer asked of `attend`."""

    num_kv_heads: int
    head_dim: int
    window: int | None


def _note_layer(
    name: str,
    seen: dict[int, _Layer],
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None = None,
    **options: Any,
) -> Tensor:
    """A `protocol.Attend` that only notes what it is asked; the output means nothing."""
    if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        sizes = [tensor.shape[-1] for tensor in (query, key, value)]
        raise ModelError(f"{name}: query, key and value heads of different sizes {sizes} are not supported")
    if layer in seen:
        raise ModelError(f"{name}: layer {layer} attends more than once, which is not supported")
    seen[layer] = _Layer(key.shape[-2], key.shape[-1], window)
    return query


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers' AttentionInterface, by the `attend` of the call in progress.

    query [B, Hq, T, D]; key, value [B, Hkv, T, D], of the new tokens alone -> [B, T, Hq, D] and no weights
    """
    call = _CALL.get()
    if call is None:
        raise ModelError("the model attends through our KV pool: call forward of its TransformersTarget")
    if attention_mask is not None or others.get("position_bias") is not None:
        raise ModelError(f"{type(module).__name__}: a mask or a bias of its own is not supported")
    if not getattr(module, "is_causal", True):
        raise ModelError(f"{type(module).__name__}: attention to later tokens is not supported")
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    options = {"sm_scale": scaling, "soft_cap": softcap, "sinks": s_aux}
    return call.attend(module.layer_idx, query.contiguous(), key, value, window=sliding_window, **options), None


def _twin(model: nn.Module) -> nn.Module:
    """A copy with modules, configurations and hooks of its own, but no memory of its own for weights and buffers."""
    shared: dict[int, Tensor] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        # a class of its own, of quantised weights say, may know of more than its numbers
        is_plain = type(parameter) is nn.Parameter
        shared[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False) if is_plain else parameter
    return copy.deepcopy(model, shared)


def _hook(decoder: nn.Module, layers: nn.ModuleList) -> None:
    """Lets every stream that `capture` can name come by `_CALL`."""
    layers[0].register_forward_pre_hook(_keep_first, with_kwargs=True)
    for index, layer in enumerate(layers, start=1):
        layer.register_forward_hook(partial(_keep, index))
    decoder.register_forward_hook(partial(_keep, FINAL_NORM))


def _keep(index: int, module: nn.Module, args: tuple, output: Any) -> None:
    """A hook: what comes out of the module is stream `index`."""
    call = _CALL.get()
    if call is not None and index in call.streams:
        call.streams[index] = output if isinstance(output, Tensor) else output[0]


def _keep_first(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """A hook: what goes into the first layer is stream 0."""
    call = _CALL.get()
    if call is not None and 0 in call.streams:
        call.streams[0] = args[0] if args else kwargs["hidden_states"]


def _warn_of_nothing(*_: Any) -> None:
    """In place of a search for padding."""


def _find_layers(model: nn.Module, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """The decoder, which ends with the final norm, and the list whose i-th module holds the attention of layer i."""
    for decoder in model.modules():
        for layers in decoder.children():
            if isinstance(layers, nn.ModuleList) and len(layers) == num_layers:
                if all(index in _layers_within(layer) for index, layer in enumerate(layers)):
                    return decoder, layers
    raise ModelError(f"{type(model).__name__}: its layers, or their layer_idx, were not found")


def _layers_within(module: nn.Module) -> set[int]:
    return {part.layer_idx for part in module.modules() if isinstance(getattr(part, "layer_idx", None), int)}


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """One for all layers, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [part for part in rope.values() if isinstance(part, dict)] or [rope]


def _rope_types(config: Any) -> set[str]:
    return {str(rope.get("rope_type") or rope.get("type")) for rope in _rope_parameters(config)}


def _max_length(config: Any) -> int:
    """Up to where rotary frequencies are the same whatever else is in the batch: longrope changes them for all rows
    once one of them is longer than what the model was first trained on."""
    length = config.max_position_embeddings
    for rope in _rope_parameters(config):
        if rope.get("rope_type") == "longrope":
            length = min(length, rope.get("original_max_position_embeddings") or length)
    return length
