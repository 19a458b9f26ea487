"""Any causal language model of `transformers` as a target: its own class and forward, with our attention and KV pool.
transformers' AttentionInterface leads attention to us, and hooks read the hidden states. So the model builds neither a
cache nor a mask; positions, embeddings, experts and the treatment of logits are its own."""

import copy
import inspect
from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ...primitives.paging import MAX_HEAD_DIM, MIN_HEAD_DIM
from .protocol import FINAL_NORM, Attend, KVShape, ModelError, TargetOutput

# The name (attn_implementation) of our attention in transformers. It has no entry in AttentionMaskInterface, so that
# transformers makes no mask, nor searches the positions for packed sequences: that search would wait for the device and
# take the positions of a tree for several sequences.
IMPLEMENTATION = "eagle_kernels_pool"

# Layers of any other type in config.layer_types do not compute our attention.
_LAYER_TYPES = {"full_attention", "sliding_attention"}

# Keys of config.json for the number of experts. Most implementations choose a token's experts on the host; the others
# exist for some GPUs and dtypes only.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config")

# Rotary frequencies that depend on the last position of the batch, which the host reads.
_CHANGING_ROPE_TYPES = {"dynamic", "longrope"}


class _Call(NamedTuple):
    """Holds a forward in progress: its attention, and the streams to capture, None until the hooks fill them in."""

    attend: Attend
    streams: dict[int, Tensor | None]


# Names of what a layer asks of its attention, in `protocol.Attend` and in transformers.
_OPTIONS = {"window": "sliding_window", "sm_scale": "scaling", "soft_cap": "softcap", "sinks": "s_aux"}

# A variable of the thread: a draft and a target, and models in several threads, keep apart.
_CALL: ContextVar[_Call | None] = ContextVar("call", default=None)


class TransformersTarget:
    """Makes a causal language model of transformers a `protocol.TargetModel`.

    model  is left unchanged: `self.model` is a copy in eval mode with our attention, which only `forward` here may run.
           The copy shares the weights, and sees changes that are made to them in place

    Two tokens are run at once to learn what the layers ask of the KV pool; what the pool's attention cannot do is
    refused. `can_be_captured` is False for models with experts and for rotary frequencies that depend on the
    batch: their forward waits for the device.
    """

    def __init__(self, model: nn.Module) -> None:
        from transformers import AttentionInterface, PreTrainedModel

        AttentionInterface.register(IMPLEMENTATION, _attention)
        self.model = model = _twin(model).eval()
        self.config = config = model.config.get_text_config(decoder=True)
        self._check_config()
        self.get_input_embeddings, self.get_output_embeddings = model.get_input_embeddings, model.get_output_embeddings
        weight = model.get_input_embeddings().weight
        self.device, self.dtype = weight.device, weight.dtype
        model.set_attn_implementation(IMPLEMENTATION)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                # no row is padding, and the search for padding waits for the device
                module.warn_if_padding_and_no_attention_mask = lambda *_: None
        self._keeps_last = "logits_to_keep" in inspect.signature(model.forward).parameters
        decoder, layers = _find_layers(model, config.num_hidden_layers)
        if any(isinstance(part, nn.Conv1d) for part in layers.modules()):
            self._refuse("layers with convolutions over time keep a state, which the pool cannot hold")
        # the streams that `capture` can name
        layers[0].register_forward_pre_hook(_keep_first, with_kwargs=True)
        for index, layer in enumerate(layers, start=1):
            layer.register_forward_hook(partial(_keep, index))
        decoder.register_forward_hook(partial(_keep, FINAL_NORM))
        self.max_length, has_fixed_frequencies = _read_rope(config)
        has_experts = any(getattr(config, name, None) for name in _EXPERTS)
        self.can_be_captured = has_fixed_frequencies and not has_experts
        self._learn_sizes()

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, *, capture: Sequence[int] = (),
        last_only: bool = False,
    ) -> TargetOutput:  # fmt: skip
        """See `protocol.TargetModel.forward`."""
        options: dict[str, Any] = {"use_cache": False, "return_dict": True}
        if last_only and self._keeps_last:
            options["logits_to_keep"] = 1
        call = _Call(attend, dict.fromkeys(capture))
        token = _CALL.set(call)
        try:
            output = self.model(input_ids=input_ids, position_ids=positions, **options)
        finally:
            _CALL.reset(token)
        logits = output.logits[:, -1:] if last_only else output.logits
        features = torch.cat([call.streams[index] for index in capture], dim=-1) if capture else None
        return TargetOutput(logits.to(self.dtype), features)

    def _refuse(self, reason: str) -> NoReturn:
        raise ModelError(f"{type(self.model).__name__}: {reason}")

    def _check_config(self) -> None:
        """Refuses what config.json declares but a run of the layers does not show."""
        config = self.config
        is_causal = getattr(config, "is_causal", True) and not getattr(config, "use_bidirectional_attention", False)
        unfit = {
            "an encoder": config.is_encoder_decoder,
            "cross attention": getattr(config, "add_cross_attention", False),
            "alibi": getattr(config, "alibi", False) or getattr(config, "use_alibi", False),
            "attention to later tokens": not is_causal,
        }
        layer_types = getattr(config, "layer_types", None) or ()
        unfit |= {f"a layer of type {each}": each not in _LAYER_TYPES for each in layer_types}
        for name in (name for name, is_there in unfit.items() if is_there):
            self._refuse(f"{name} is not supported")
        if "position_ids" not in inspect.signature(self.model.forward).parameters:
            self._refuse("its forward takes no position_ids, which the rows of a tree need")
        if not config.num_hidden_layers > 0:
            self._refuse(f"num_hidden_layers must be above 0, got {config.num_hidden_layers}")
        if not getattr(config, "max_position_embeddings", None):
            self._refuse("config.json has no max_position_embeddings")

    def _learn_sizes(self) -> None:
        """Runs two tokens; sets the sizes that they show, and refuses what the pool cannot do."""
        shapes: dict[int, tuple[int, int]] = {}
        windows: dict[int, int | None] = {}

        def note(layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None, **options: Any) -> Tensor:
            """Notes the arguments of a layer, as a `protocol.Attend` whose output is meaningless."""
            sizes = [tensor.shape[-1] for tensor in (query, key, value)]
            if len(set(sizes)) > 1:
                self._refuse(f"query, key and value heads of different sizes {sizes} are not supported")
            if layer in shapes:
                self._refuse(f"layer {layer} attends more than once, which is not supported")
            shapes[layer], windows[layer] = tuple(key.shape[-2:]), window
            return query

        capture = (*range(self.config.num_hidden_layers + 1), FINAL_NORM)
        tokens = torch.arange(2, device=self.device)[None]
        try:
            with torch.inference_mode():
                logits, features = self.forward(tokens, tokens, note, capture=capture)
        except ModelError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            name = type(self.model).__name__
            raise ModelError(f"{name}: its forward does not run with the engine's attention, {reason}") from error
        self.vocab_size, self.hidden_size = logits.shape[-1], self.config.hidden_size
        if features.shape != (1, 2, len(capture) * self.hidden_size):
            self._refuse(f"its hidden states do not have the width hidden_size={self.hidden_size}")
        self.kv_shape = self._check_layers(shapes, windows)

    def _check_layers(self, shapes: dict[int, tuple[int, int]], windows: dict[int, int | None]) -> KVShape:
        """Returns what all layers store, from each one's (key-value heads, head size) and window; refuses layers that
        differ, do not attend, or hide their window."""
        num_layers = self.config.num_hidden_layers
        for layer in sorted({*range(num_layers)} - shapes.keys()):
            way = "through transformers' AttentionInterface, so the engine cannot keep its keys and values"
            self._refuse(f"layer {layer} of {num_layers} does not attend {way}")
        shape, *others = sorted(set(shapes.values()))
        if others:
            self._refuse(f"its layers must share one (key heads, head size), got {[shape, *others]}")
        if not MIN_HEAD_DIM <= shape[1] <= MAX_HEAD_DIM:
            self._refuse(f"its head size must lie in {MIN_HEAD_DIM}..{MAX_HEAD_DIM}, got {shape[1]}")
        window = getattr(self.config, "sliding_window", None)
        layer_types = getattr(self.config, "layer_types", None) or ["sliding_attention" if window else ""] * num_layers
        for layer, layer_type in enumerate(layer_types[:num_layers]):
            if layer_type == "sliding_attention" and windows[layer] is None:
                self._refuse(f"layer {layer} does not pass its sliding window to the attention")
        return KVShape(num_layers, *shape)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Passes a layer's attention [B, Hq, T, D], with keys and values [B, Hkv, T, D] of the new tokens only, on to the
    `attend` of the call in progress. Returns [B, T, Hq, D] and no weights."""
    call = _CALL.get()
    if call is None:
        raise ModelError("the model now uses the engine's KV pool: call forward of its TransformersTarget instead")
    if attention_mask is not None or options.get("position_bias") is not None:
        raise ModelError(f"{type(module).__name__}: a mask or a bias of its own is not supported")
    if not getattr(module, "is_causal", True):
        raise ModelError(f"{type(module).__name__}: attention to later tokens is not supported")
    # in latent attention, keys and values may be views of one tensor, with other elements between their heads
    query, key, value = (tensor.transpose(1, 2).contiguous() for tensor in (query, key, value))
    ours = {name: options.get(theirs) for name, theirs in _OPTIONS.items()}
    return call.attend(module.layer_idx, query, key, value, **ours), None


def _twin(model: nn.Module) -> nn.Module:
    """Copies the modules, configurations and hooks of a model, but not the memory of its weights and buffers."""
    shared: dict[int, Tensor] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        # Other classes, such as those of quantised weights, may hold more than their numbers: they are shared whole.
        is_plain = type(parameter) is nn.Parameter
        shared[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False) if is_plain else parameter
    return copy.deepcopy(model, shared)


def _keep(index: int, module: nn.Module, args: tuple, output: Any) -> None:
    """Keeps the output of the module as stream `index`; a forward hook."""
    call = _CALL.get()
    if call is not None and index in call.streams:
        call.streams[index] = output if isinstance(output, Tensor) else output[0]


def _keep_first(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Keeps the input of the first layer as stream 0; a forward pre-hook."""
    _keep(0, module, args, args or (kwargs["hidden_states"],))


def _find_layers(model: nn.Module, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """Returns the decoder, which ends with the final norm, and the list whose i-th module holds attention i."""
    for decoder in model.modules():
        for layers in decoder.children():
            if isinstance(layers, nn.ModuleList) and len(layers) == num_layers:
                indices = [{getattr(part, "layer_idx", None) for part in layer.modules()} for layer in layers]
                if all(index in found for index, found in enumerate(indices)):
                    return decoder, layers
    raise ModelError(f"{type(model).__name__}: its layers, or their layer_idx, were not found")


def _read_rope(config: Any) -> tuple[int, bool]:
    """Returns the length up to which rotary frequencies do not depend on the batch, and whether they never do: longrope
    changes those of the whole batch once one text exceeds the length of the first training."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    length, is_fixed = config.max_position_embeddings, True
    # one set of parameters for all layers, or one for each type of layer
    for part in [part for part in rope.values() if isinstance(part, dict)] or [rope]:
        is_fixed &= str(part.get("rope_type") or part.get("type")) not in _CHANGING_ROPE_TYPES
        if part.get("rope_type") == "longrope":
            length = min(length, part.get("original_max_position_embeddings") or length)
    return length, is_fixed
