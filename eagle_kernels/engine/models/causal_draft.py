"""A small language model as the draft: classic speculative decoding, also with trees."""

import torch
from torch import Tensor

from .protocol import Attend, DraftOutput, ModelError, TargetModel, takes_rows
from .running import run_target


class CausalDraft:
    """Makes any `TargetModel` a `DraftModel`: it reads no features, and token t_i sits at position i.
    mask_token_id: a token that the model was trained to read in place of tokens that it drafts at once (PARD, arXiv
    2504.18583; config.json's pard_token); None: it drafts one by one.
    vocab_size: the target's, if it differs from the model's: the tables of one tokenizer are padded to various sizes.
    Ids that only one of them has are never drafted. None: the model's."""

    aux_layers: tuple[int, ...] = ()
    token_shift = 0
    method = "draft_model"
    mask_features: Tensor | None = None

    def __init__(self, model: TargetModel, vocab_size: int | None = None, mask_token_id: int | None = None) -> None:
        if mask_token_id is not None and not 0 <= mask_token_id < model.vocab_size:
            rule = f"must lie in 0..{model.vocab_size - 1}, the draft's own tokens"
            raise ModelError(f"the mask token of a draft {rule}, got {mask_token_id}")
        self.model = model
        self.vocab_size = model.vocab_size if vocab_size is None else vocab_size
        self.draft_vocab_size = min(model.vocab_size, self.vocab_size)
        self.draft_to_target: Tensor | None = None
        if self.draft_vocab_size < self.vocab_size:  # offsets of 0: an id is the same in both
            self.draft_to_target = torch.zeros(self.draft_vocab_size, dtype=torch.int64, device=model.device)
        self.mask_token_id = mask_token_id
        self.masked_id = None if mask_token_id is None or mask_token_id >= self.draft_vocab_size else mask_token_id
        self.max_length, self.kv_shape = model.max_length, model.kv_shape
        self.can_be_captured = getattr(model, "can_be_captured", True)
        self.reads_several = takes_rows(model)
        self.quantize = getattr(model, "quantize", None)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, from_target: bool
    ) -> DraftOutput:
        """See `protocol.DraftModel.forward`; returns `hidden` unread, as the model's whole state is in its KV cache."""
        if self.draft_to_target is not None:  # the text may hold ids that only the target has
            input_ids = input_ids.clamp(max=self.draft_vocab_size - 1)
        logits = run_target(self.model, input_ids, positions, attend).logits
        return DraftOutput(logits[..., : self.draft_vocab_size].contiguous(), hidden)
