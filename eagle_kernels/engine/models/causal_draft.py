"""A small language model as the draft: classic speculative decoding, with trees if wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from .protocol import Attend, DraftOutput, KVShape, TargetModel


class CausalDraft:
    """Makes any `TargetModel` a `DraftModel`: reads no features, and every token has a row at its own position."""

    aux_layers: tuple[int, ...] = ()
    draft_to_target: Tensor | None = None
    token_shift = 0

    def __init__(self, model: TargetModel) -> None:
        self.model = model
        self.vocab_size: int = model.vocab_size
        self.draft_vocab_size: int = model.vocab_size
        self.max_length: int = model.max_length
        self.kv_shape: KVShape = model.kv_shape

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def can_be_captured(self) -> bool:
        return getattr(self.model, "can_be_captured", True)

    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, from_target: bool
    ) -> DraftOutput:
        """`hidden` is passed through unread: the whole state of a language model is in its KV cache."""
        return DraftOutput(self.model.forward(input_ids, positions, attend).logits, hidden)
