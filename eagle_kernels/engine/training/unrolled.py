"""The training-time test of the EAGLE-3 paper (arXiv 2503.01840, section 3.2), and the losses of both models.

The head is unrolled over its own outputs, as in drafting. At depth i, row j sits at position j + i, reads the true
token t_{j+1+i} and its own output of depth i - 1 (the target's features at depth 0), and predicts what the target
predicts there, i.e. t_{j+2+i}. It attends to the depth-0 rows up to j, and to itself at depths 1..i.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.causal_attend import causal_attend
from ..models.decoder import Decoder
from ..models.eagle_head import EagleHead
from ..models.protocol import ModelError
from .corpus import END_OF_TEXT

DEPTH_DISCOUNT = 0.8  # weight of depth i is DEPTH_DISCOUNT**i


class UnrolledAttend:
    """`protocol.Attend` of the training-time test; the i-th call is depth i.

    Row j sees the depth-0 keys of rows ≤ j and its own key of each later depth. The later depths add one score per row
    and depth, so scores are [B, Hq, T, T + i] and no mask over T·(i + 1) keys is ever built.
    """

    def __init__(self) -> None:
        self._first: tuple[Tensor, Tensor] | None = None  # depth-0 key and value, [B, Hq, T, D]
        self._later: list[tuple[Tensor, Tensor]] = []  # those of depths 1..i

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        if window is not None:
            raise ModelError(f"heads with a sliding window cannot be trained yet, got window={window}")
        group = query.shape[2] // key.shape[2]
        expanded = tuple(x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (key, value))
        if self._first is None:
            self._first = expanded
            return causal_attend(layer, query, key, value)
        self._later.append(expanded)

        query = query.transpose(1, 2) * query.shape[-1] ** -0.5
        first_key, first_value = self._first
        rows = query.shape[2]
        future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
        first_scores = (query @ first_key.transpose(2, 3)).masked_fill(future, float("-inf"))
        own_scores = torch.stack([(query * own_key).sum(-1) for own_key, _ in self._later], dim=-1)
        probs = torch.cat((first_scores, own_scores), dim=-1).float().softmax(-1).to(first_value.dtype)
        attended = probs[..., :rows] @ first_value
        for depth, (_, own_value) in enumerate(self._later):
            attended = attended + probs[..., rows + depth, None] * own_value
        return attended.transpose(1, 2)


def positions_of(tokens: Tensor) -> Tensor:
    """0, 1, 2, ... for every row of tokens [B, T]."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)


def target_loss(target: Decoder, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, nats; tokens [B, T + 1]."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    logits = target(inputs, positions_of(inputs), causal_attend).logits
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def unroll(head: EagleHead, tokens: Tensor, features: Tensor, depths: int) -> Iterator[Tensor]:
    """The head's logits at each depth i: [B, T - 1 - i, Vd], whose row j stands against the target's row j + 1 + i.

    tokens [B, T], features [B, T, F] of the same rows. The last i rows of depth i would need tokens beyond the window:
    they run on padding, no other row sees them, and they are cut off.
    """
    attend = UnrolledAttend()
    hidden = features[:, :-1]
    positions = positions_of(tokens[:, 1:])
    for depth in range(depths):
        inputs = F.pad(tokens[:, 1 + depth :], (0, depth), value=END_OF_TEXT)
        logits, hidden = head(inputs, hidden, positions + depth, attend, from_target=depth == 0)
        yield logits[:, : logits.shape[1] - depth].float()


def draft_vocabulary_of(head: EagleHead) -> Tensor:
    """Target ids of the draft ids, [Vd] int64."""
    return head.d2t + torch.arange(head.draft_vocab_size, device=head.d2t.device)


@torch.no_grad()
def observe(target: Decoder, head: EagleHead, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The target's logits [B, T, V] in fp32 and the features [B, T, F] that the head reads."""
    logits, features = target(tokens, positions_of(tokens), causal_attend, capture=head.aux_layers)
    return logits.float(), features


def head_loss(head: EagleHead, target: Decoder, tokens: Tensor, depths: int) -> Tensor:
    """Discounted soft cross-entropy to the target's distribution over the draft vocabulary; tokens [B, T].

    Rows whose most likely token lies outside the draft vocabulary count as 0, as in the published training code: the
    renormalised rest of such a distribution is no teacher.
    """
    target_logits, features = observe(target, head, tokens)
    target_probs = target_logits[..., draft_vocabulary_of(head)].softmax(-1)
    teaches = head.t2d[target_logits.argmax(-1)]
    loss = torch.zeros((), device=tokens.device)
    for depth, logits in enumerate(unroll(head, tokens, features, depths)):
        rows = slice(1 + depth, None)
        cross_entropy = -(target_probs[:, rows] * logits.log_softmax(-1)).sum(-1)
        loss = loss + DEPTH_DISCOUNT**depth * (cross_entropy * teaches[:, rows]).mean()
    return loss
