"""Log-probabilities by the logits as the target gives them: of tokens, and of the most likely ones in their places."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..requests.sampling_params import MOST_TOP_LOGPROBS


class Scores(NamedTuple):
    """Holds the log-probabilities of tokens, and the most likely tokens, those first.

    logprobs      [..] fp32
    top_ids       [.., K] int64; of equally likely tokens the lowest ids are taken, and come first
    top_logprobs  [.., K] fp32; both None where nobody asked
    """

    logprobs: Tensor
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


def score(logits: Tensor, tokens: Tensor, has_top: bool) -> Scores:
    """Scores tokens [..] by the target's logits [.., V] in their places; those of tokens below 0 mean nothing."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    if not has_top:
        return Scores(own)
    size = logits.shape[-1]
    most = min(MOST_TOP_LOGPROBS, size)
    edge = logprobs.topk(most, dim=-1).values[..., -1:]
    # torch takes any of the tokens that tie with the last one: whole numbers tell them apart
    rank = (logprobs > edge).to(torch.int32) + (logprobs >= edge).to(torch.int32)
    rank = rank * size - torch.arange(size, dtype=torch.int32, device=logits.device)
    ids = rank.topk(most, dim=-1).indices.sort(dim=-1).values
    values, order = logprobs.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return Scores(own, ids.gather(-1, order), values)
