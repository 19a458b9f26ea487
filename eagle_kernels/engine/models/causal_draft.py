"""A small language model as the draft: classic speculative decoding, with trees if wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from .protocol import Attend, DraftOutput, KVShape, TargetModel


class CausalDraft:
    """Makes any `TargetModel` a `DraftModel`: reads no features, and every token has a row at its own position.

    vocab_size  the target's, where it is not the model's: tables of one tokenizer are padded to other sizes. Ids that
                the model has not got are never drafted, those that the target has not got are left out. None: the
                model's
    """

    aux_layers: tuple[int, ...] = ()
    token_shift = 0
    method = "draft_model"

    def __init__(self, model: TargetModel, vocab_size: int | None = None) -> None:
        self.model = model
        self.vocab_size: int = model.vocab_size if vocab_size is None else vocab_size
        self.draft_vocab_size: int = min(model.vocab_size, self.vocab_size)
        is_whole = self.draft_vocab_size == self.vocab_size
        # ids are the same in both
        self.draft_to_target: Tensor | None = (
            None if is_whole else torch.zeros(self.draft_vocab_size, dtype=torch.int64, device=model.device)
        )
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
        if self.draft_to_target is not None:  # text may hold padding that is the target's alone
            input_ids = input_ids.clamp(max=self.draft_vocab_size - 1)
        logits = self.model.forward(input_ids, positions, attend).logits
        return DraftOutput(logits[..., : self.draft_vocab_size].contiguous(), hidden)
