"""The parts of the training loop for heads: batches of examples, their loss, and the accuracy to report."""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.heads import EagleHead

from .head_data import Batch, Example, collate
from .head_recipe import HeadOptions
from .recipe import Stage
from .trainer import Pieces, Run
from .unrolled import draft_vocabulary_of, lesson_loss, study, teachable, unroll


class Piece(NamedTuple):
    """A batch of a step, and the number of rows of the whole step that are learnt at each depth, [depths] fp32."""

    batch: Batch
    counts: Tensor


class Accuracy:
    """The share of learnt rows, by depth, whose first choice is the target's, since the last report."""

    def __init__(self, depths: int, device: torch.device) -> None:
        self._hits, self._rows = torch.zeros(2, depths, dtype=torch.float32, device=device)
        self.latest: list[float] = []

    def watch(self, logits: Iterator[Tensor], head: EagleHead, choices: Tensor, is_learnt: Tensor) -> Iterator[Tensor]:
        """Counts the hits of each depth, and yields its logits unchanged."""
        for depth, depth_logits in enumerate(logits):
            rows = is_learnt[:, 1 + depth :]
            agrees = draft_vocabulary_of(head)[depth_logits.detach().argmax(-1)] == choices[:, 1 + depth :]
            self._hits[depth] += (agrees & rows).sum()
            self._rows[depth] += rows.sum()
            yield depth_logits

    def tell(self) -> str:
        """Returns the accuracies as text and starts to count anew."""
        self.latest = [round(share, 4) for share in (self._hits / self._rows.clamp(min=1)).tolist()]
        self._hits.zero_()
        self._rows.zero_()
        return "accuracy " + " ".join(f"{share:.3f}" for share in self.latest)


def fit_head(
    run: Run,
    head: EagleHead,
    target: Decoder,
    train: list[Example],
    options: HeadOptions,
    steps: int,
    after_step: Callable[[int], None] | None = None,
) -> Accuracy:
    """Trains the head; returns its accuracy, as last reported."""
    accuracy = Accuracy(options.depths, run.device)
    size = options.batch_size * options.accumulate
    mean_length = sum(len(example.tokens) for example in train) / len(train)
    stage = Stage("head", steps, size, options.learning_rate, options.weight_decay, options.clip_norm)
    pieces_of = shuffled_pieces(train, options)
    loss_of = partial(piece_loss, head, target, accuracy)
    run.fit(stage, head, pieces_of, loss_of, size * mean_length, tell=accuracy.tell, after_step=after_step)
    return accuracy


def piece_loss(head: EagleHead, target: Decoder, accuracy: Accuracy, piece: Piece) -> Tensor:
    """Computes the part of the step's loss that comes from this piece."""
    tokens, is_learnt, counts = (tensor.to(target.device) for tensor in (*piece.batch, piece.counts))
    lesson = study(target, head, tokens)
    logits = unroll(head, tokens, lesson.features, depths=len(counts))
    watched = accuracy.watch(logits, head, lesson.choices, is_learnt)
    return lesson_loss(lesson, teachable(head, lesson) & is_learnt, watched, counts)


def shuffled_pieces(train: list[Example], options: HeadOptions) -> Pieces:
    """Returns the pieces of a step as a function: batch_size * accumulate examples, shuffled anew in every epoch."""
    size = options.batch_size * options.accumulate

    @lru_cache(maxsize=2)
    def order_of(epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + epoch)
        return torch.randperm(len(train), generator=generator, device="cpu").tolist()

    def pieces_of(step: int) -> list[Piece]:
        places = [divmod(place, len(train)) for place in range(step * size, (step + 1) * size)]
        chosen = [train[order_of(epoch)[index]] for epoch, index in places]
        starts = range(0, size, options.batch_size)
        batches = [collate(chosen[start : start + options.batch_size], options.depths + 2) for start in starts]
        counts = [
            sum(int(batch.is_learnt[:, 1 + depth :].sum()) for batch in batches) for depth in range(options.depths)
        ]
        return [Piece(batch, torch.tensor(counts, dtype=torch.float32, device="cpu").clamp(min=1)) for batch in batches]

    return pieces_of
