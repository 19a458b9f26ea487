"""What EAGLE-1 and EAGLE-3 heads share: configuration, vocabulary, and the fit to their target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .decoder_config import DecoderConfig, layer_sizes
from .head_formats import flatten
from .layers import Linear
from .protocol import FINAL_NORM, KVShape, ModelError, TargetModel
from .rotary import Rotary
from .stored_sizes import StoredSize

# Parts that a head has where its file holds them: setting, and the end of the names of its tensors.
IN_THE_FILE = {
    "qkv_bias": "q_proj.bias",
    "o_bias": "o_proj.bias",
    "mlp_bias": "gate_proj.bias",
    "has_qk_norms": "q_norm.weight",
}


@dataclass(kw_only=True)
class HeadConfig(DecoderConfig):
    """A head's config.json: the keys of its one decoder layer, and these. `rope_theta` is 10000 unless it says so,
    whatever the target's is.

    draft_vocab_size     rows of lm_head; None: the target's vocabulary
    target_hidden_size   width of one target stream; None: hidden_size
    aux_layers           which streams, as `TargetModel.forward` takes them in `capture`;
                         None: (2, n // 2, n - 3) of an n-layer target, the official choice, settled in `bind`
    """

    kind: ClassVar[str]
    layer_prefix: ClassVar[str]  # of the tensors of its first layer

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
    def stored_sizes(self) -> list[StoredSize]:
        """What the tensors tell too."""
        return [
            StoredSize("vocab_size", 0, ("embed_tokens.weight", "t2d")),
            StoredSize("draft_vocab_size", 0, ("lm_head.weight", "d2t")),
            *layer_sizes(self.layer_prefix),
        ]

    @property
    def num_aux_layers(self) -> int:
        return 3 if self.aux_layers is None else len(self.aux_layers)

    @classmethod
    def _read(cls, config: dict[str, Any]) -> dict[str, Any]:
        flat = flatten(config, cls.kind)
        values = super()._read(flat)
        if values["windows"] != (None,):
            raise ModelError(f"config.json: sliding_window={flat.get('sliding_window')!r} is not implemented for heads")
        # The families say what their targets have; heads differ from these, so the file goes before.
        return values | {name: flat[name] for name in IN_THE_FILE if name in flat}


class DraftHead(nn.Module):
    """Base of the heads (`protocol.DraftModel`); `bind` one to its target before use.

    What the checkpoint holds is used, what it lacks comes from the target:
    own_embedding   it holds `embed_tokens.weight` [V, H]
    own_output      it holds `lm_head.weight` [Vd, H]
    """

    token_shift = 1
    method = "eagle"

    def __init__(self, config: HeadConfig, *, own_embedding: bool, own_output: bool) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size, bias=False) if own_output else None
        self.rotary = Rotary(config)
        whole = config.draft_vocab_size == config.vocab_size
        self.register_buffer("d2t", None if whole else torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", None if whole else torch.zeros(config.vocab_size, dtype=torch.bool))
        # In tuples, because assigning the target's modules would make their weights part of this head's state dict.
        self._target_embedding: tuple[nn.Module, ...] = ()
        self._target_output: tuple[nn.Module, ...] = ()

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
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def embed(self, input_ids: Tensor) -> Tensor:
        """[B, T] int64 -> [B, T, H]."""
        if self.embed_tokens is not None:
            return self.embed_tokens(input_ids)
        if not self._target_embedding:
            raise ModelError("the head holds no embed_tokens.weight: call bind(target) first")
        return self._target_embedding[0](input_ids)

    def project(self, hidden: Tensor) -> Tensor:
        """[B, T, H] -> logits [B, T, Vd]."""
        if self.lm_head is not None:
            return self.lm_head(hidden)
        if not self._target_output:
            raise ModelError("the head holds no lm_head.weight: call bind(target) first")
        return self._target_output[0](hidden)

    def use_aux_layers(self, aux_layers: Sequence[int]) -> None:
        """Read other streams of the target than config.json says: as many, as hidden_states indices. Bind it again."""
        if self.config.aux_layers == (FINAL_NORM,):
            raise ModelError("the head reads the target's last feature: there are no aux layers to choose")
        if len(aux_layers) != self.config.num_aux_layers:
            raise ModelError(f"aux_layers must be {self.config.num_aux_layers} indices, got {list(aux_layers)}")
        self.config.aux_layers = tuple(aux_layers)

    def bind(self, target: TargetModel) -> DraftHead:
        """Check that the head fits the target, settle the default aux layers and share what it lacks; returns self."""
        for misfit in self.misfits(target):
            raise ModelError(misfit)
        self.config.aux_layers = self._aux_layers_for(target)
        if self.embed_tokens is None:
            self._target_embedding = (target.get_input_embeddings(),)
        if self.lm_head is None:
            self._target_output = (target.get_output_embeddings(),)
        if self.d2t is not None and self.t2d is None:  # ModelOpt leaves it out; d2t says it all
            self.t2d = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.d2t.device)
            self.t2d[self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)] = True
        return self

    def misfits(self, target: TargetModel) -> list[str]:
        """Every reason why the head and the target do not belong together, a line each."""
        config, found = self.config, []
        if config.vocab_size != target.vocab_size:
            found.append(f"the head's vocab_size {config.vocab_size} is not the target's {target.vocab_size}")
        if config.target_hidden_size != target.hidden_size:
            found.append(
                f"the head reads features of width {config.target_hidden_size}, the target's are {target.hidden_size}"
            )
        found += _misfits_of_aux_layers(self._aux_layers_for(target), target.kv_shape.num_layers)
        found += self.vocabulary_faults()
        for is_own, part, tensor, getter in (
            (self.embed_tokens is not None, "embedding", "embed_tokens.weight", "get_input_embeddings"),
            (self.lm_head is not None, "output", "lm_head.weight", "get_output_embeddings"),
        ):
            if is_own:
                continue
            if config.hidden_size != target.hidden_size:
                found.append(
                    f"hidden_size {config.hidden_size} differs from the target's {target.hidden_size}, so the head "
                    f"cannot share its {part} and must hold {tensor}"
                )
            elif not hasattr(target, getter):
                found.append(f"the head holds no {tensor} and the target has no {getter}()")
        return found

    def vocabulary_faults(self) -> list[str]:
        """What is wrong with the draft vocabulary, whatever the target; the first bad id of each fault."""
        if self.d2t is None:
            return []
        found = _faults_of_offsets(self.d2t, self.t2d, self.vocab_size)
        if self.lm_head is None:
            found.append(
                f"a head over {self.draft_vocab_size} of {self.vocab_size} tokens cannot share the target's output and "
                "must hold lm_head.weight"
            )
        return found

    def _aux_layers_for(self, target: TargetModel) -> tuple[int, ...]:
        num_layers = target.kv_shape.num_layers
        return self.config.aux_layers or _usual_aux_layers(num_layers)


def _usual_aux_layers(num_layers: int) -> tuple[int, ...]:
    return 2, num_layers // 2, num_layers - 3


def _misfits_of_aux_layers(aux_layers: tuple[int, ...], num_layers: int) -> list[str]:
    if aux_layers == (FINAL_NORM,):
        return []
    if not all(0 <= layer <= num_layers for layer in aux_layers):
        return [f"aux layers {aux_layers} (hidden_states indices) leave a target of {num_layers} layers"]
    if any(low >= high for low, high in pairwise(aux_layers)):
        fault = f"aux layers {aux_layers} (hidden_states indices) do not ascend"
        if aux_layers == _usual_aux_layers(num_layers):
            fault += "; targets of fewer than 7 layers need explicit eagle_config.eagle_aux_hidden_state_layer_ids"
        return [fault]
    return []


def _faults_of_offsets(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> list[str]:
    """d2t [Vd] int64 offsets and t2d [V] bool, if there is one, must describe the same ascending subset of the target
    vocabulary."""
    target_ids = d2t + torch.arange(len(d2t), device=d2t.device)
    found = []
    outside = (target_ids < 0) | (target_ids >= vocab_size)
    descending = target_ids.diff() <= 0
    if outside.any():
        draft_id = int(outside.nonzero()[0])
        found.append(
            f"d2t: draft id {draft_id} maps to target id {int(target_ids[draft_id])}, outside the {vocab_size} there "
            "are"
        )
    if descending.any():
        draft_id = int(descending.nonzero()[0]) + 1
        found.append(
            f"d2t: draft id {draft_id} maps to target id {int(target_ids[draft_id])}, not above its predecessor's "
            f"{int(target_ids[draft_id - 1])}; d2t holds offsets (target id - draft id)"
        )
    if found:
        ascends_as_ids = bool((d2t.diff() > 0).all()) and int(d2t[0]) >= 0 and int(d2t[-1]) < vocab_size
        if ascends_as_ids and (t2d is None or bool(t2d[d2t].all())):
            found[0] += "; these look like target ids themselves, where offsets (target id - draft id) are expected"
        return found
    if t2d is None:
        return []
    expected = torch.zeros_like(t2d)
    expected[target_ids] = True
    differing = expected != t2d
    if differing.any():
        target_id = int(differing.nonzero()[0])
        found.append(
            f"t2d: target id {target_id} is {bool(t2d[target_id])}, but d2t makes it {bool(expected[target_id])}"
        )
    return found
