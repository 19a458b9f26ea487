"""The training-time test of the EAGLE-3 paper (arXiv 2503.01840, section 3.2), and the losses of both models.

The head is unrolled over its own outputs, as in drafting. At depth i, row j sits at position j + i, reads the true
token t_{j+1+i} and its own output of depth i - 1 (the target's features at depth 0), and predicts what the target
predicts there, i.e. t_{j+2+i}. It attends to the depth-0 rows up to j, and to itself at depths 1..i.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.heads import EagleHead
from eagle_kernels.engine.models.protocol import FINAL_NORM, Angles, ModelError
from eagle_kernels.reference.causal_attend import causal_attend, positions_of, rotate

DEPTH_DISCOUNT = 0.8  # weight of depth i is DEPTH_DISCOUNT**i
LOGIT_ROWS = 1024  # rows whose logits over the whole vocabulary exist at once


class Lesson(NamedTuple):
    """The target's output for tokens [B, T]."""

    features: Tensor  # [B, T, F], the streams that the head reads
    choices: Tensor  # [B, T] int64, the most likely next token
    probs: Tensor  # [B, T, Vd] fp32, the distribution over the draft vocabulary, renormalised


class UnrolledAttend:
    """`protocol.Attend` of the training-time test; the i-th call is depth i.

    Row j sees the depth-0 keys of rows ≤ j and its own key of each later depth. The later depths add one score per row
    and depth, so scores are [B, Hq, T, T + i] and no mask over T·(i + 1) keys is ever built.
    """

    def __init__(self) -> None:
        self._first: tuple[Tensor, Tensor] | None = None  # depth-0 key and value, [B, Hq, T, D]
        self._later: list[tuple[Tensor, Tensor]] = []  # those of depths 1..i

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None = None,
        *,
        angles: Angles | None = None,
    ) -> Tensor:
        if window is not None:
            raise ModelError(f"heads with a sliding window cannot be trained, got window={window}")
        if angles is not None:
            query, key = rotate(query, key, angles)
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


def target_loss(target: Decoder, tokens: Tensor) -> Tensor:
    """Computes the mean cross-entropy of the next token, in nats; tokens [B, T + 1]."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    logits = target(inputs, positions_of(inputs), causal_attend).logits
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def unroll(head: EagleHead, tokens: Tensor, features: Tensor, depths: int) -> Iterator[Tensor]:
    """Yields the head's logits at each depth i: [B, T - 1 - i, Vd], whose row j matches the target's row j + 1 + i.

    tokens [B, T], features [B, T, F] of the same rows. The last i rows of depth i would need tokens beyond the window:
    they run on padding (any token will do), no other row sees them, and they are cut off.
    """
    attend = UnrolledAttend()
    hidden = features[:, :-1]
    positions = positions_of(tokens[:, 1:])
    for depth in range(depths):
        inputs = F.pad(tokens[:, 1 + depth :], (0, depth))
        logits, hidden = head(inputs, hidden, positions + depth, attend, from_target=depth == 0)
        yield logits[:, : logits.shape[1] - depth].float()


def draft_vocabulary_of(head: EagleHead) -> Tensor:
    """Returns the target ids of the draft ids, [Vd] int64."""
    draft_ids = torch.arange(head.draft_vocab_size, device=head.device)
    return draft_ids if head.d2t is None else head.d2t + draft_ids


def most_frequent(frequency: Tensor, size: int) -> Tensor:
    """Returns the `size` most frequent tokens of frequency [V], ascending [size] int64; ties go to the lower id."""
    return frequency.sort(descending=True, stable=True).indices[:size].sort().values


def set_draft_vocabulary(head: EagleHead, target_ids: Tensor) -> None:
    """Writes ascending target ids [Vd] int64 into d2t, as offsets, and t2d."""
    head.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
    head.t2d.zero_()
    head.t2d[target_ids] = True


@torch.no_grad()
def start_from_output_of(target: Decoder, head: EagleHead) -> None:
    """Copies the rows of the target's output that the head can draft into the head's output."""
    head.lm_head.weight.copy_(target.lm_head.weight[draft_vocabulary_of(head)])


@torch.no_grad()
def observe(target: Decoder, head: EagleHead, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the target's logits [B, T, V] in fp32 and the features [B, T, F] that the head reads."""
    logits, features = target(tokens, positions_of(tokens), causal_attend, capture=head.aux_layers)
    return logits.float(), features


@torch.no_grad()
def study(target: Decoder, head: EagleHead, tokens: Tensor) -> Lesson:
    """Returns what `observe` tells, for large vocabularies: logits [B, T, V] never exist at once, and the target
    computes in its own dtype, as in the engine."""
    with torch.autocast(tokens.device.type, enabled=False):
        capture = (*head.aux_layers, FINAL_NORM)
        streams = target(tokens, positions_of(tokens), causal_attend, capture=capture, last_only=True).features
        features, normed = streams.split((streams.shape[-1] - target.hidden_size, target.hidden_size), dim=-1)
        target_ids = draft_vocabulary_of(head)
        choices, probs = [], []
        for rows in normed.flatten(0, 1).split(LOGIT_ROWS):
            logits = target.lm_head(rows)
            choices.append(logits.argmax(-1))
            probs.append(logits[:, target_ids].float().softmax(-1))
    shape = tokens.shape
    return Lesson(features, torch.cat(choices).view(shape), torch.cat(probs).unflatten(0, shape))


def head_loss(head: EagleHead, target: Decoder, tokens: Tensor, depths: int) -> Tensor:
    """Computes `lesson_loss` of whole windows: tokens [B, T], of which every row counts."""
    target_logits, features = observe(target, head, tokens)
    target_probs = target_logits[..., draft_vocabulary_of(head)].softmax(-1)
    lesson = Lesson(features, target_logits.argmax(-1), target_probs)
    return lesson_loss(lesson, teachable(head, lesson), unroll(head, tokens, features, depths))


def teachable(head: EagleHead, lesson: Lesson) -> Tensor:
    """Returns the rows that teach, [B, T] bool: if the most likely token is outside the draft vocabulary, the
    renormalised rest of the distribution teaches nothing."""
    return torch.ones_like(lesson.choices, dtype=torch.bool) if head.t2d is None else head.t2d[lesson.choices]


def lesson_loss(lesson: Lesson, teaches: Tensor, logits: Iterable[Tensor], counts: Tensor | None = None) -> Tensor:
    """Computes the discounted soft cross-entropy to the target's distribution over the draft vocabulary.

    logits    the logits of each depth, as `unroll` yields them
    teaches   [B, T] bool: other rows add 0, but count, as in the published training code
    counts    [depths], the divisors of the sums over the rows of each depth; None: the numbers of all rows
    """
    loss = torch.zeros((), dtype=torch.float32, device=teaches.device)
    for depth, depth_logits in enumerate(logits):
        rows = slice(1 + depth, None)
        cross_entropy = -(lesson.probs[:, rows] * depth_logits.log_softmax(-1)).sum(-1)
        taught = cross_entropy * teaches[:, rows]
        loss = loss + DEPTH_DISCOUNT**depth * (taught.mean() if counts is None else taught.sum() / counts[depth])
    return loss
