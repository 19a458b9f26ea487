"""Log-probabilities by the logits as the target gives them: of tokens, and of the most likely ones in their places."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..requests.sampling_params import MOST_TOP_LOGPROBS


class Scores(NamedTuple):
    """Holds the log-probabilities of tokens, and the most likely tokens, those first.

    logprobs      [..] fp32
    top_ids       [.., K] int64; of equally likely ones, the lowest ids come first
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
    # torch.topk takes any of equal values. Here no two are: the larger the bits of a number below 0, the less it is
    size = logits.shape[-1]
    order = -(logprobs.view(torch.int32) & 0x7FFFFFFF).to(torch.int64) * size - torch.arange(size, device=logits.device)
    ids = order.topk(min(MOST_TOP_LOGPROBS, size), dim=-1).indices
    return Scores(own, ids, logprobs.gather(-1, ids))
