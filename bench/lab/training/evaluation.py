"""Quality of the trained pair on held-out text, without the engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.heads import EagleHead

from .corpus import windows
from .recipe import Recipe
from .trainer import mixed_precision
from .unrolled import draft_vocabulary_of, observe, target_loss, unroll


def evaluation_batches(stream: Tensor, recipe: Recipe, batch_size: int, length: int) -> Iterator[Tensor]:
    """Yields evenly spaced windows of the held-out stream, in batches of [≤ batch_size, length] int64."""
    count = min(recipe.evaluation_windows, len(stream) // length)
    if count == 0:
        raise ValueError(f"the held-out files hold {len(stream)} tokens; one window has {length}")
    starts = torch.linspace(0, len(stream) - length, count, dtype=torch.float64, device="cpu").long()
    for some in starts.split(batch_size):
        yield windows(stream, some, length)


@torch.no_grad()
def held_out_loss(target: Decoder, stream: Tensor, recipe: Recipe) -> float:
    """Returns the loss in nats per byte on held-out windows; each starts without context, which costs a little."""
    losses, sizes = [], []
    for tokens in evaluation_batches(stream, recipe, recipe.target.batch_size, recipe.window + 1):
        with mixed_precision(stream.device):
            losses.append(float(target_loss(target, tokens)))
        sizes.append(len(tokens))
    return sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)


@torch.no_grad()
def accuracy_by_depth(head: EagleHead, target: Decoder, stream: Tensor, recipe: Recipe) -> list[float]:
    """Returns for each depth the share of held-out rows whose first choice is the target's, after the true tokens."""
    hits = torch.zeros(recipe.depths, dtype=torch.int64, device="cpu")
    rows = torch.zeros(recipe.depths, dtype=torch.int64, device="cpu")
    for tokens in evaluation_batches(stream, recipe, recipe.head.batch_size, recipe.window):
        with mixed_precision(stream.device):
            target_logits, features = observe(target, head, tokens)
            choices = target_logits.argmax(-1)
            for depth, logits in enumerate(unroll(head, tokens, features, recipe.depths)):
                agrees = draft_vocabulary_of(head)[logits.argmax(-1)] == choices[:, 1 + depth :]
                hits[depth] += int(agrees.sum())
                rows[depth] += agrees.numel()
    return (hits / rows).tolist()
