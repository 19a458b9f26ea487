"""Hydra heads (Ankner et al., arXiv 2402.05109): Medusa's, but each also reads the drafts before its own.

The feature h_t is the target's stream after its final norm. Head k = 0, 1, .. predicts t_{t+2+k} from h_t and the
tokens in between, which are drafts but for the root t_{t+1}:

    x      = cat(h, embed(t_{t+1}), .., embed(t_{t+1+k}))                                      [(k + 2) H]
    x      = res_connection(x) + silu(linear(x));  x = x + silu(linear(x)) for further layers
    logits = lm_head(x)                                                                        with biases everywhere

With `hydra_head_arch` "prefix-mlp" (Hydra++) h is what a decoder layer of the target's kind and a norm make of the
features of all tokens; with "mlp" it is h_t itself.

The official layout (zankner/Hydra, hydra/model/hydra_model.py): config.json with `hydra_num_heads`, `hydra_num_layers`,
`hydra_head_arch`, `grounded_heads` and `hidden_state_offset` (h is that many layers earlier), and hydra_lm_head.pt, or
.safetensors, with hydra_mlp.k.j.linear.*, hydra_mlp.k.0.res_connection.*, hydra_lm_head.k.* and
prefix_embeding_layer.*, where "prefix-mlp" counts dropouts among the j. The embedding is the target's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.values import is_integer, shown
from .checkpoint import Checkpoint, brief, naming, read_config, read_folder
from .decoder import DecoderLayer
from .decoder_config import DecoderConfig
from .layers.linear import Linear
from .layers.norm import RMSNorm
from .layers.rotary import Rotary
from .protocol import FINAL_NORM, Attend, DraftOutput, KVShape, ModelError, StoringAttend, TargetModel
from .quantisation import refuse_quantised
from .settings import MOST_LAYERS, is_empty

FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
_ARCHITECTURES = ("mlp", "prefix-mlp")
_BLOCK = re.compile(r"^hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)$")
_OUTPUT = re.compile(r"^hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)$")
_PREFIX = "prefix_embeding_layer."  # as it is written


@dataclass(kw_only=True)
class HydraConfig:
    """Holds the sizes of the heads, as their tensors and config.json tell them."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_layers: int
    hidden_state_offset: int


class HydraBlock(nn.Module):
    """Computes a residual block; one that narrows its input has a linear for the residual as well."""

    def __init__(self, input_size: int, size: int) -> None:
        super().__init__()
        self.linear = Linear(input_size, size)
        self.res_connection = None if input_size == size else Linear(input_size, size)

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.res_connection is None else self.res_connection(x)
        return residual + nn.functional.silu(self.linear(x))


class HydraHeads(nn.Module):
    """Computes the heads of a folder (`protocol.DraftModel`); `bind` them to their target before use. What `hidden`
    holds grows with depth: h and the embeddings of a path.

    prefix: the target's config, which its layer over the features has, too; None: there is no such layer.
    """

    method = "hydra"
    token_shift = 1
    reads_several = True
    hidden_grows = True
    draft_to_target: Tensor | None = None

    def __init__(self, config: HydraConfig, prefix: DecoderConfig | None) -> None:
        super().__init__()
        size = config.hidden_size
        self.config, self.max_levels, self.max_length = config, config.num_heads, 2**31 - 1
        self.vocab_size = self.draft_vocab_size = config.vocab_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(HydraBlock(size * (1 if layer else head + 2), size) for layer in range(config.num_layers))
            for head in range(config.num_heads)
        )
        self.lm_heads = nn.ModuleList(Linear(size, config.vocab_size) for _ in range(config.num_heads))
        self.prefix = None if prefix is None else DecoderLayer(prefix)
        self.prefix_norm = None if prefix is None else RMSNorm(size, prefix.rms_norm_eps)
        self.rotary = None if prefix is None else Rotary(prefix.rope)
        self.kv_shape = KVShape(0, 1, 1) if prefix is None else prefix.attention.kv_shape(1)
        self.aux_layers: tuple[int, ...] = (FINAL_NORM,)
        self._embedding: list[nn.Module] = []  # in a list: it is no part of this module

    @property
    def device(self) -> torch.device:
        return self.lm_heads[0].weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_heads[0].weight.dtype

    def bind(self, target: TargetModel) -> HydraHeads:
        """Checks that the heads fit the target, takes its embedding, and returns the heads."""
        config, num_layers = self.config, target.kv_shape.num_layers
        for name, theirs in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
            if getattr(config, name) != theirs:
                raise ModelError(f"the heads' {name} {getattr(config, name)} is not the target's {theirs}")
        if config.hidden_state_offset > num_layers:
            rule = f"must be at most {num_layers}, the target's layers"
            raise ModelError(f"config.json: hidden_state_offset {rule}, got {config.hidden_state_offset}")
        if not hasattr(target, "get_input_embeddings"):
            raise ModelError("the heads need the target's embedding, and it has no get_input_embeddings()")
        if config.hidden_state_offset:
            self.aux_layers = (num_layers - config.hidden_state_offset,)
        self._embedding, self.max_length = [target.get_input_embeddings()], target.max_length
        return self

    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, from_target: bool
    ) -> DraftOutput:
        """See `protocol.DraftModel.forward`; the head is the one whose path is as long as `hidden` says."""
        if not self._embedding:
            raise ModelError("the heads are not bound: call bind(target) first")
        if from_target and self.prefix is not None:
            _, stream, delta = self.prefix(hidden, None, self.rotary(positions), attend, 0)
            hidden = self.prefix_norm.add(stream, delta)[1]
        path = x = torch.cat((hidden, self._embedding[0](input_ids)), dim=-1)
        head = path.shape[-1] // self.config.hidden_size - 2
        for block in self.blocks[head]:
            x = block(x)
        return DraftOutput(self.lm_heads[head](x), path)

    def store(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: StoringAttend) -> None:
        """See `protocol.DraftModel`."""
        if self.prefix is not None:
            normed = self.prefix.input_layernorm(hidden)
            self.prefix.self_attn.store(normed, self.rotary(positions), attend, layer=0)


def are_hydra(config: dict[str, Any]) -> bool:
    """Returns whether a parsed config.json is that of Hydra heads."""
    names = config.get("architectures")
    told = [*(names if isinstance(names, list) else ()), config.get("model_type")]
    told += [name for name, value in config.items() if not is_empty(value)]
    return any(isinstance(name, str) and name.lower().startswith("hydra") for name in told)


def load_hydra(
    folder: str | Path, target: TargetModel, device: str | torch.device | None = None, dtype: torch.dtype | None = None,
    *, check_weights: bool = True,
) -> HydraHeads:  # fmt: skip
    """Loads the Hydra heads of a folder, frozen, in eval mode and bound to their target; as `load_draft`."""
    folder = read_folder("load_hydra: folder", folder)
    if not hasattr(target, "kv_shape"):
        raise ValueError(f"load_hydra: target must be a TargetModel, as load_target returns, got {shown(target)}")
    device, dtype = target.device if device is None else torch.device(device), target.dtype if dtype is None else dtype
    with naming(folder):
        config = read_config(folder)
        if not are_hydra(config):
            raise ModelError("holds no Hydra heads: config.json has no hydra_num_heads")
        architecture = config.get("hydra_head_arch", "mlp")
        if architecture not in _ARCHITECTURES:
            known = " and ".join(map(repr, _ARCHITECTURES))
            raise ModelError(f"config.json: hydra_head_arch={shown(architecture)} is not implemented (only {known})")
        if config.get("grounded_heads") is not True:
            rule = "must be true: heads that read no drafts are not implemented"
            raise ModelError(f"config.json: grounded_heads {rule}, got {shown(config.get('grounded_heads'))}")
        has_prefix = architecture == "prefix-mlp"
        prefix = getattr(target, "config", None) if has_prefix else None
        if has_prefix and not isinstance(prefix, DecoderConfig):
            rule = "needs a target of one of the families that load_target makes itself"
            raise ModelError(f"hydra_head_arch='prefix-mlp' {rule}, got {type(target).__name__}")
        checkpoint = Checkpoint(folder, FILES)
        refuse_quantised(checkpoint, "Hydra heads")
        checkpoint.rename(lambda name: _our_name(name, has_prefix))
        with torch.device("meta"):
            heads = HydraHeads(_read_sizes(config, checkpoint), prefix)
        checkpoint.fill(heads, device, dtype, check_weights)
        return heads.bind(target)


def _our_name(name: str, has_prefix: bool) -> str | None:
    """Returns our name of a tensor; None for the embedding that the layer over the features never reads."""
    found, output = _BLOCK.match(name), _OUTPUT.match(name)
    if found:
        head, place, part, kind = found.groups()
        layer = (int(place) - 1) // 2 if has_prefix else int(place)  # after a dropout each
        return f"blocks.{head}.{layer}.{part}.{kind}"
    if output:
        return "lm_heads.{}.{}".format(*output.groups())
    if name == _PREFIX + "embed_tokens.weight":
        return None
    name = name.replace(_PREFIX + "layers.0.", "prefix.", 1)
    return name.replace(_PREFIX + "norm.", "prefix_norm.", 1)


def _read_sizes(config: dict[str, Any], checkpoint: Checkpoint) -> HydraConfig:
    """Returns the sizes that the tensors tell; refuses a config.json that says other ones."""
    found = [re.match(r"blocks\.(\d+)\.(\d+)\.linear\.weight$", name) for name in checkpoint.tensors]
    pairs = {(int(each[1]), int(each[2])) for each in found if each}
    num_heads, num_layers = (1 + max((pair[axis] for pair in pairs), default=-1) for axis in (0, 1))
    is_whole = len(pairs) == num_heads * num_layers and "lm_heads.0.weight" in checkpoint.tensors
    if not pairs or not is_whole or max(num_heads, num_layers) > MOST_LAYERS:
        given = brief(", ".join(sorted(checkpoint.tensors)[:4]))
        raise ModelError(
            f"must hold tensors hydra_mlp.k.j.linear.weight and hydra_lm_head.k.weight of heads, got {given}"
        )
    shape = checkpoint.tensors["lm_heads.0.weight"].shape
    if len(shape) != 2 or 0 in shape:
        raise ModelError(f"tensor hydra_lm_head.0.weight must have 2 axes of at least 1, got shape {shown(shape)}")
    sizes = {"hydra_num_heads": num_heads, "hydra_num_layers": num_layers}
    for name, value in sizes.items():
        if not is_empty(config.get(name)) and config[name] != value:
            raise ModelError(f"config.json: {name} must be {value} to match the tensors, got {shown(config[name])}")
    offset = config.get("hidden_state_offset", 0)
    if not (is_integer(offset) and offset >= 0):
        raise ModelError(f"config.json: hidden_state_offset must be an integer of at least 0, got {shown(offset)}")
    return HydraConfig(
        vocab_size=shape[0], hidden_size=shape[1], num_heads=num_heads, num_layers=num_layers,
        hidden_state_offset=offset,
    )  # fmt: skip
