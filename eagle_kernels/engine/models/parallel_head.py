"""EAGLE-3 heads that draft several tokens in one pass: P-EAGLE (arXiv 2602.01469).

The network is EAGLE-3's (`heads.py`), mostly with more layers: those after the first are plain decoder layers, which
read the hidden state alone. For a token that is not known yet a row reads the mask token's embedding and, in place of
the target's streams, the learned `mask_hidden`; both go through the same norms and fc as any other row's.

As vLLM reads it (model_executor/models/llama_eagle3.py, >= 0.16): config.json has `ptd_token_id` or `pard_token`
(speculators: `mask_token_id`), and the file `mask_hidden`, of [1, F] or [1, 1, F] elements. The first layer's tensors
are called midlayer.* or layers.0.*, the others' layers.1.* and so on, where a hidden_norm has no meaning.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.values import shown
from .decoder import DecoderLayer
from .head_formats import read_mask_token
from .heads import EagleConfig, EagleHead
from .protocol import Attend, DraftOutput, ModelError, TargetModel

_MASK_NAMES = ("ptd_token_id", "pard_token", "mask_token_id")


@dataclass(kw_only=True)
class ParallelEagleConfig(EagleConfig):
    """Adds the token that is read in place of those which are not known yet."""

    kind = "P-EAGLE"

    mask_token_id: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_token_id >= self.vocab_size:
            rule = f"must lie in 0..{self.vocab_size - 1}, the target's tokens"
            raise ModelError(f"config.json: the mask token {rule}, got {self.mask_token_id}")

    @classmethod
    def _read(cls, config: dict[str, Any]) -> dict[str, Any]:
        token = read_mask_token(config, *_MASK_NAMES)
        if token is None:
            raise ModelError(f"config.json: {', '.join(_MASK_NAMES)} are missing; one must name the head's mask token")
        return super()._read(config | {"mask_token_id": token})


class ParallelEagleHead(EagleHead):
    """Computes a P-EAGLE head (`protocol.MaskedDraft`).

    mask_shape: that of mask_hidden in the file.
    """

    config: ParallelEagleConfig

    def __init__(
        self, config: ParallelEagleConfig, *, own_embedding: bool = False, own_output: bool = True,
        mask_shape: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, own_embedding=own_embedding, own_output=own_output)
        width = config.hidden_size if self.fc is None else config.num_aux_layers * config.target_hidden_size
        if mask_shape is not None and math.prod(mask_shape) != width:
            raise ModelError(f"tensor mask_hidden must have {width} elements, got shape {shown(list(mask_shape))}")
        self.mask_hidden = nn.Parameter(torch.zeros([1, width] if mask_shape is None else [*mask_shape]))
        others = {str(layer): DecoderLayer(config, layer) for layer in range(1, config.num_hidden_layers)}
        self.layers = nn.ModuleDict(others)
        self.mask_token_id: int | None = config.mask_token_id
        self.masked_id: int | None = None  # until `bind`

    @property
    def mask_features(self) -> Tensor:
        return self.mask_hidden.flatten()

    def bind(self, target: TargetModel) -> ParallelEagleHead:
        """See `DraftHead.bind`; finds the mask token among those of the draft vocabulary."""
        super().bind(target)
        if self.d2t is None:
            self.masked_id = self.config.mask_token_id
        else:
            ids = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
            found = [] if ids.is_meta else (ids == self.config.mask_token_id).nonzero().flatten().tolist()
            self.masked_id = found[0] if found else None
        return self

    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, from_target: bool,
        projects: bool = True,
    ) -> DraftOutput:  # fmt: skip
        """See `protocol.DraftModel.forward`."""
        if from_target:
            hidden = self._fuse(hidden)
        angles, delta = self.rotary(positions), None
        stream = self.midlayer(*self.midlayer.enter(self.embed(input_ids), hidden), angles, attend)
        for layer, module in self.layers.items():
            _, stream, delta = module(stream, delta, angles, attend, int(layer))
        out, normed = self.norm.add(stream, delta)
        return DraftOutput(self.project(normed) if projects else normed, normed if self.config.norm_output else out)

    @property
    def store(self) -> Callable[..., None]:  # an attribute of heads with one layer alone, see `protocol.DraftModel`
        """Writes keys and values as `EagleHead.store` does."""
        if self.layers:
            raise AttributeError("keys of later layers depend on attention")
        return functools.partial(EagleHead.store, self)
