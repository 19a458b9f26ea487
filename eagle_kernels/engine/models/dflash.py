"""DFlash drafts (Chen et al., arXiv 2602.06036): a few decoder layers that fill in a block of mask tokens at once.

The text enters as keys and values alone: in every layer a token has those of one feature, h_j = hidden_norm(fc(streams
of the target at token j)), at its own position. The queries are the block: the root and block_size - 1 mask tokens at
the positions after it, which see the whole text and each other, earlier and later ones. The row of mask k predicts the
token in its own place, draft k. Embedding and output are the target's.

The layout of z-lab's models, which SpecForge writes (specforge/modeling/draft/dflash.py): config.json with the keys of
a decoder (model_type qwen3), `block_size`, and in or beside `dflash_config` `mask_token_id` and `target_layer_ids`, the
layers whose output is read; model.safetensors with fc.weight, hidden_norm.weight, layers.*, norm.weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.values import is_integer, shown
from .checkpoint import Checkpoint, naming, read_config, read_folder
from .decoder import ConfiguredModel, DecoderLayer
from .decoder_config import DecoderConfig
from .layers.linear import Linear
from .layers.norm import RMSNorm
from .layers.rotary import Rotary
from .protocol import Attend, DraftOutput, ModelError, StoringAttend, TargetModel
from .quantisation import read_quantisation, without_quantisation
from .quantised_linears import quantise_linears
from .settings import read_size, read_value

# words of a tree mask hold as many rows
MAX_BLOCK = 64


@dataclass(kw_only=True)
class DFlashConfig(DecoderConfig):
    """Adds the block, its mask token, and the target's layers whose output is read."""

    layer_prefix = "layers.0."
    own_sizes = ()

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not (is_integer(self.mask_token_id) and 0 <= self.mask_token_id < self.vocab_size):
            rule = f"must lie in 0..{self.vocab_size - 1}, the target's tokens"
            raise ModelError(f"config.json: mask_token_id {rule}, got {shown(self.mask_token_id)}")
        if not (is_integer(self.block_size) and 2 <= self.block_size <= MAX_BLOCK):
            raise ModelError(f"config.json: block_size must lie in 2..{MAX_BLOCK}, got {shown(self.block_size)}")

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> DFlashConfig:
        """Reads a parsed config.json; `dflash_config` has precedence over what stands beside it."""
        config = config | read_value(config, "dflash_config", dict)
        ids = config.get("target_layer_ids")
        if not (isinstance(ids, list) and ids and all(is_integer(each) and each >= 0 for each in ids)):
            raise ModelError(f"config.json: target_layer_ids must be a list of the target's layers, got {shown(ids)}")
        read_size(config, "block_size")
        return cls(**cls._read(config | {"target_layer_ids": tuple(ids)}))


class DFlashDraft(ConfiguredModel):
    """Computes a DFlash draft (`protocol.ContextDraft`); `bind` it to its target before use."""

    method = "dflash"
    token_shift = 1
    draft_to_target: Tensor | None = None
    config: DFlashConfig

    def __init__(self, config: DFlashConfig, feature_size: int) -> None:
        super().__init__(config)
        self.draft_vocab_size, self.block_size = config.vocab_size, config.block_size
        self.max_levels = config.block_size - 1
        self.aux_layers = tuple(layer + 1 for layer in config.target_layer_ids)
        self.fc = Linear(feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config.rope)
        self._shared: list[nn.Module] = []  # the target's embedding and output, in a list: no parts of this module

    def bind(self, target: TargetModel) -> DFlashDraft:
        """Checks that the draft fits the target, takes its embedding and output, and returns the draft."""
        config, num_layers = self.config, target.kv_shape.num_layers
        for name, theirs in (("vocab_size", target.vocab_size), ("hidden_size", target.hidden_size)):
            if getattr(config, name) != theirs:
                raise ModelError(f"the draft's {name} {getattr(config, name)} is not the target's {theirs}")
        wanted = len(self.aux_layers) * target.hidden_size
        if self.fc.in_features != wanted:
            rule = f"must have {wanted} columns for {len(self.aux_layers)} target_layer_ids"
            raise ModelError(f"tensor fc.weight {rule}, got {self.fc.in_features}")
        for layer in config.target_layer_ids:
            if layer >= num_layers:
                rule = f"must lie below {num_layers}, the target's layers"
                raise ModelError(f"config.json: target_layer_ids {rule}, got {layer}")
        getters = ("get_input_embeddings", "get_output_embeddings")
        for getter in getters:
            if not hasattr(target, getter):
                raise ModelError(f"the draft needs the target's {getter}(), and it has none")
        self._shared = [getattr(target, getter)() for getter in getters]
        return self

    def store_features(self, features: Tensor, positions: Tensor, attend: StoringAttend) -> None:
        """See `protocol.ContextDraft`."""
        hidden, angles = self.hidden_norm(self.fc(features)), self.rotary(positions)
        for index, layer in enumerate(self.layers):
            layer.self_attn.store(hidden, angles, attend, index)

    def fill_block(self, roots: Tensor, count: int, positions: Tensor, attend: Attend) -> Tensor:
        """See `protocol.ContextDraft`."""
        embed, output = self._shared or (None, None)
        if embed is None:
            raise ModelError("the draft is not bound: call bind(target) first")
        masks = roots.new_full((len(roots), self.block_size - 1), self.config.mask_token_id)
        stream, delta, angles = embed(torch.cat((roots[:, None], masks), dim=1)), None, self.rotary(positions)
        for index, layer in enumerate(self.layers):
            _, stream, delta = layer(stream, delta, angles, attend, index)
        normed = self.norm.add(stream, delta)[1]
        logits = output(normed[:, 1 : 1 + count].contiguous())
        # a mask is no draft, however likely
        logits[..., self.config.mask_token_id] = -torch.inf
        return logits

    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, from_target: bool
    ) -> DraftOutput:
        """Raises ModelError: a draft of blocks has no rows to run one by one."""
        raise ModelError("a DFlash draft fills whole blocks: fill_block")


def are_dflash(config: dict[str, Any]) -> bool:
    """Returns whether a parsed config.json is that of a DFlash draft."""
    names = config.get("architectures")
    named = isinstance(names, list) and any(str(name).startswith("DFlash") for name in names)
    return named or isinstance(config.get("dflash_config"), dict)


def load_dflash(
    folder: str | Path, target: TargetModel, device: str | torch.device | None = None, dtype: torch.dtype | None = None,
    *, check_weights: bool = True,
) -> DFlashDraft:  # fmt: skip
    """Loads the DFlash draft of a folder, frozen, in eval mode and bound to its target; as `load_draft`."""
    folder = read_folder("load_dflash: folder", folder)
    if not hasattr(target, "kv_shape"):
        raise ValueError(f"load_dflash: target must be a TargetModel, as load_target returns, got {shown(target)}")
    device, dtype = target.device if device is None else torch.device(device), target.dtype if dtype is None else dtype
    with naming(folder):
        content = read_config(folder)
        if not are_dflash(content):
            raise ModelError("holds no DFlash draft: config.json has no dflash_config")
        config, checkpoint = DFlashConfig.from_dict(without_quantisation(content)), Checkpoint(folder)
        checkpoint.rename(lambda name: name.removeprefix("model."))
        checkpoint.check_layers(content, "num_hidden_layers", "layers.")
        checkpoint.check_sizes(config)
        quantisation = read_quantisation(folder, content)
        shape = [len(config.target_layer_ids) * config.hidden_size]
        if "fc.weight" in checkpoint.tensors:  # not packed: `bind` says what is wrong with another width
            shape = checkpoint.tensors["fc.weight"].shape
        with torch.device("meta"):
            draft = DFlashDraft(config, shape[-1] if shape else 0)
        quantise_linears(draft, checkpoint.tensors, checkpoint.get, quantisation)
        checkpoint.fill(draft, device, dtype, check_weights)
        return draft.bind(target)
