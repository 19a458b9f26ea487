"""The draft's choice of tokens in vLLM: from the head's own logits, where vLLM scatters them into a full vocabulary."""

from __future__ import annotations

import torch

from ...ops import sample_from_logits
from .parts import SWITCHES


def sample_draft(original, speculator, hidden_states, *given, **options):
    """Returns the most likely token int64 [B] of each row, in the target's vocabulary."""
    model = speculator.model
    offsets = getattr(model, "draft_id_to_target_id", None)
    is_drawn = speculator.draft_logits is not None  # with noise
    if is_drawn or speculator.use_local_argmax_reduction or offsets is None:
        return original(speculator, hidden_states, *given, **options)
    SWITCHES.note_use("draft")
    logits = model.logits_processor(model.lm_head, hidden_states)
    zeros = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    tokens = sample_from_logits(logits, zeros, zeros, zeros.to(torch.float32))
    return tokens + offsets[tokens]
