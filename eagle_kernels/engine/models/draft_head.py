"""The parts that all draft heads share: configuration, vocabulary, and the fit to their target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .checkpoint import StoredSize
from .decoder import ConfiguredModel
from .decoder_config import OPTIONS_IN_FILE, DecoderConfig
from .head_formats import flatten
from .layers.linear import Linear
from .layers.rotary import Rotary
from .protocol import FINAL_NORM, ModelError, TargetModel

# The modules that a head without its own takes from the target: what they are, and the target's method for each.
_SHARED_PARTS = {"embed_tokens": ("embedding", "get_input_embeddings"), "lm_head": ("output", "get_output_embeddings")}


@dataclass(kw_only=True)
class HeadConfig(DecoderConfig):
    """Holds a head's config.json: the keys of its decoder layers, of which EAGLE heads have one, and those below.

    `rope_theta` is 10000 where config.json has none, whatever the target's is.
    draft_vocab_size     rows of lm_head; None: the target's vocabulary
    target_hidden_size   width of one target stream; None: hidden_size
    aux_layers           the target's streams, as `capture` of `TargetModel.forward`;
                         None: `usual_aux_layers`, which `bind` settles
    """

    kind: ClassVar[str]
    own_sizes = (
        StoredSize("vocab_size", 0, ("embed_tokens.weight", "t2d")),
        StoredSize("draft_vocab_size", 0, ("lm_head.weight", "d2t")),
    )

    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    aux_layers: tuple[int, ...] | None = None

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
        # A family describes its targets, from which heads differ: the head's own file has precedence.
        flat = {"sliding_window": None} | flatten(config, cls.kind)
        return super()._read(flat, "heads", **{name: flat[name] for name in OPTIONS_IN_FILE if name in flat})


class DraftHead(ConfiguredModel):
    """Holds what all heads share (`protocol.DraftModel`); `bind` a head to its target before use.

    The head uses what its checkpoint holds and takes the rest from the target:
    own_embedding   the checkpoint holds `embed_tokens.weight` [V, H]
    own_output      the checkpoint holds `lm_head.weight` [Vd, H]
    """

    config: HeadConfig
    token_shift = 1
    reads_several = True
    method = "eagle"

    def __init__(self, config: HeadConfig, *, own_embedding: bool, own_output: bool) -> None:
        super().__init__(config)
        self.draft_vocab_size: int = config.draft_vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size, bias=False) if own_output else None
        self.rotary = Rotary(config.rope)
        whole = config.draft_vocab_size == config.vocab_size
        self.register_buffer("d2t", None if whole else torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", None if whole else torch.zeros(config.vocab_size, dtype=torch.bool))
        # In a dict, because modules assigned as attributes would become part of this head's state dict.
        self._shared: dict[str, nn.Module] = {}

    @property
    def aux_layers(self) -> tuple[int, ...]:
        if self.config.aux_layers is None:
            raise ModelError("aux_layers depend on the target: call bind(target) first")
        return self.config.aux_layers

    @property
    def draft_to_target(self) -> Tensor | None:
        return self.d2t

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeds ids [B, T] int64 as [B, T, H]."""
        return self._part("embed_tokens")(input_ids)

    def project(self, hidden: Tensor) -> Tensor:
        """Computes the logits [B, T, Vd] of hidden [B, T, H]."""
        return self._part("lm_head")(hidden)

    @property
    def output_weight(self) -> Tensor | None:
        """See `protocol.DraftModel`."""
        layer = self._part("lm_head")
        is_plain = type(layer) in (Linear, nn.Linear) and layer.bias is None
        return layer.weight if is_plain else None

    def _part(self, part: str) -> nn.Module:
        module = getattr(self, part) or self._shared.get(part)
        if module is None:
            raise ModelError(f"the head holds no {part}.weight: call bind(target) first")
        return module

    def use_aux_layers(self, aux_layers: Sequence[int]) -> None:
        """Replaces each stream that config.json names by another one (hidden_states indices); then bind again."""
        if self.config.aux_layers == (FINAL_NORM,):
            raise ModelError("the head reads the target's last feature: there are no aux layers to choose")
        if len(aux_layers) != self.config.num_aux_layers:
            raise ModelError(f"aux_layers must be {self.config.num_aux_layers} indices, got {list(aux_layers)}")
        self.config = replace(self.config, aux_layers=tuple(aux_layers))

    def bind(self, target: TargetModel) -> DraftHead:
        """Checks that the head fits the target, takes missing aux layers and parts from it, and returns the head."""
        for misfit in self.misfits(target):
            raise ModelError(misfit)
        self.config = replace(self.config, aux_layers=self._aux_layers_for(target))
        for part, (_, getter) in _SHARED_PARTS.items():
            if getattr(self, part) is None:
                self._shared[part] = getattr(target, getter)()
        if self.d2t is not None and self.t2d is None:  # ModelOpt omits t2d, which follows from d2t
            self.t2d = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.d2t.device)
            self.t2d[self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)] = True
        return self

    def misfits(self, target: TargetModel) -> list[str]:
        """Returns every reason why the head and the target do not belong together, a line each."""
        config, found = self.config, []
        if config.vocab_size != target.vocab_size:
            found.append(f"the head's vocab_size {config.vocab_size} is not the target's {target.vocab_size}")
        if config.target_hidden_size != target.hidden_size:
            widths = f"{config.target_hidden_size}, the target's are {target.hidden_size}"
            found.append(f"the head reads features of width {widths}")
        found += _faults_of_aux_layers(self._aux_layers_for(target), target.kv_shape.num_layers)
        found += self.vocabulary_faults()
        for part, (noun, getter) in _SHARED_PARTS.items():
            if getattr(self, part) is not None:
                continue
            if config.hidden_size != target.hidden_size:
                sizes = f"hidden_size {config.hidden_size} differs from the target's {target.hidden_size}"
                found.append(f"{sizes}, so the head cannot share its {noun} and must hold {part}.weight")
            elif not hasattr(target, getter):
                found.append(f"the head holds no {part}.weight and the target has no {getter}()")
        return found

    def vocabulary_faults(self) -> list[str]:
        """Returns what is wrong with the draft vocabulary for any target: the first bad id of each fault. The offsets
        d2t and, if there is one, t2d must describe the same ascending subset of the target's vocabulary."""
        d2t, t2d, vocab_size = self.d2t, self.t2d, self.vocab_size
        if d2t is None:
            return []
        target_ids, found = d2t + torch.arange(len(d2t), device=d2t.device), []
        for draft_id in ((target_ids < 0) | (target_ids >= vocab_size)).nonzero().flatten()[:1]:
            fault = f"outside the {vocab_size} there are"
            found.append(f"d2t: draft id {draft_id} maps to target id {target_ids[draft_id]}, {fault}")
        for draft_id in (target_ids.diff() <= 0).nonzero().flatten()[:1] + 1:
            fault = f"not above its predecessor's {target_ids[draft_id - 1]}; d2t holds offsets (target id - draft id)"
            found.append(f"d2t: draft id {draft_id} maps to target id {target_ids[draft_id]}, {fault}")
        if found:
            ascends_as_ids = bool((d2t.diff() > 0).all()) and int(d2t[0]) >= 0 and int(d2t[-1]) < vocab_size
            if ascends_as_ids and (t2d is None or bool(t2d[d2t].all())):
                found[0] += "; these look like target ids themselves, where offsets (target id - draft id) are expected"
        elif t2d is not None:
            expected = torch.zeros_like(t2d).index_fill_(0, target_ids, True)
            for target_id in (expected != t2d).nonzero().flatten()[:1]:
                found.append(f"t2d: target id {target_id} is {t2d[target_id]}, but d2t makes it {expected[target_id]}")
        if self.lm_head is None:
            of = f"over {self.draft_vocab_size} of {vocab_size} tokens"
            found.append(f"a head {of} cannot share the target's output and must hold lm_head.weight")
        return found

    def _aux_layers_for(self, target: TargetModel) -> tuple[int, ...]:
        return self.config.aux_layers or usual_aux_layers(target.kv_shape.num_layers)


def usual_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns the official choice of streams of a target with `num_layers` layers, as hidden_states indices."""
    return 2, num_layers // 2, num_layers - 3


def _faults_of_aux_layers(aux_layers: tuple[int, ...], num_layers: int) -> list[str]:
    if aux_layers == (FINAL_NORM,):
        return []
    if not all(0 <= layer <= num_layers for layer in aux_layers):
        fault = f"aux layers {aux_layers} (hidden_states indices) must lie in 0..{num_layers} for this target"
    elif all(low < high for low, high in pairwise(aux_layers)):
        return []
    else:
        fault = f"aux layers {aux_layers} (hidden_states indices) do not ascend"
    if aux_layers == usual_aux_layers(num_layers):  # the head's file names none
        fault += "; targets of fewer than 7 layers need explicit eagle_config.eagle_aux_hidden_state_layer_ids"
    return [fault]
