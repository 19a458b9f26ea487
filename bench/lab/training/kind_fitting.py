"""How a draft of any kind learns from states, and how often its first choice is then the target's."""

from __future__ import annotations

import copy
import io
import time
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from eagle_kernels.engine.models.decoder import Decoder

from .kinds import KINDS, Plan, draft_ids_of, last_anchor, layers_of, loss_of
from .recipe import Stage
from .states import States, lesson_of
from .trainer import LossFunction, Pieces, Run, mixed_precision, write_json
from .unrolled import teachable

ANCHORS = 64  # blocks of a window that learn in a step
_TIMED = (6, 12)  # steps before and while a step is timed, to choose how many fit into a time


class Piece(NamedTuple):
    """Names the windows of a step, and the rows after which blocks begin."""

    places: Tensor  # [B] int64
    anchors: Tensor  # [A] int64


def pieces_of(states: States, stage: Stage, levels: int, seed: int) -> Pieces:
    """Returns the batch of each step: windows in an order that is drawn anew for each pass, and anchors."""
    window = states.tokens.shape[1]
    most = last_anchor(window, levels)
    if most < 1:
        raise ValueError(f"windows must have more than {levels + 3} tokens for {levels} levels, got {window}")

    @lru_cache(maxsize=2)
    def order_of(epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        return torch.randperm(len(states), generator=generator, device="cpu").tolist()

    def piece(step: int) -> list[Piece]:
        first = step * stage.batch_size
        numbers = (divmod(number, len(states)) for number in range(first, first + stage.batch_size))
        places = [order_of(epoch)[place] for epoch, place in numbers]
        generator = torch.Generator().manual_seed(seed * 7_368_787 + step)
        anchors = torch.randperm(most, generator=generator, device="cpu")[:ANCHORS].sort().values
        return [Piece(torch.tensor(places, device="cpu"), anchors)]

    return piece


def piece_loss(kind: str, draft: nn.Module, target: Decoder, states: States, plan: Plan, piece: Piece) -> Tensor:
    """Computes the loss of a batch."""
    view = states.view(piece.places, layers_of(kind, plan))
    lesson = lesson_of(target, view, draft_ids_of(draft))
    teaches = teachable(draft, lesson) if hasattr(draft, "t2d") else torch.ones_like(lesson.choices, dtype=torch.bool)
    return loss_of(KINDS[kind].guesses(draft, view, plan.levels, piece.anchors), lesson, teaches)


def fit_kind(
    run: Run, kind: str, draft: nn.Module, target: Decoder, states: States, plan: Plan, stage: Stage,
    seconds: float | None = None, folder: Path | None = None,
) -> Stage:  # fmt: skip
    """Trains a draft; returns its stage.

    seconds: fewer steps are taken where those of the stage would last longer. folder: of checkpoints, where the number
    of steps is written before the first of them.
    """
    batches = pieces_of(states, stage, plan.levels, plan.seed)

    def loss(piece: Piece) -> Tensor:
        return piece_loss(kind, draft, target, states, plan, piece)

    stage = steps_within(run, draft, batches, loss, stage, seconds)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "steps.json", {"steps": stage.steps})
    tokens = stage.batch_size * states.tokens.shape[1]
    run.fit(stage, draft, batches, loss, tokens)
    draft.requires_grad_(False)
    return stage


def steps_within(
    run: Run, module: nn.Module, batches: Pieces, loss: LossFunction, stage: Stage, seconds: float | None
) -> Stage:
    """Returns the stage, with fewer steps where its own would last longer; None: with its own."""
    if seconds is None:
        return stage
    return stage.resized(max(1, min(stage.steps, int(seconds / _step_s(run, module, batches, loss, stage)))), None)


def _step_s(run: Run, draft: nn.Module, batches: Pieces, loss: LossFunction, stage: Stage) -> float:
    """Returns the seconds of a step. It trains the draft, which gets its weights back."""
    kept = copy.deepcopy(draft.state_dict())
    timed = Run(run.device, "", None, is_mixed=run.is_mixed, report_every=1 << 30, report_to=io.StringIO())
    seconds = []
    for steps in _TIMED:
        began = time.monotonic()
        timed.fit(stage.resized(steps, None), draft, batches, loss, 1.0)  # ends by reading the loss
        seconds.append((time.monotonic() - began) / steps)
    draft.load_state_dict(kept)
    return seconds[-1]


@torch.no_grad()
def accuracy_of(
    kind: str, draft: nn.Module, target: Decoder, states: States, plan: Plan, batch_size: int
) -> list[float]:
    """Returns for each depth the share of rows whose first choice is the target's, after the true tokens."""
    hits, rows_seen = torch.zeros(2, plan.levels, dtype=torch.int64, device="cpu")
    ids, most = draft_ids_of(draft), last_anchor(states.tokens.shape[1], plan.levels)
    anchors = torch.arange(0, most, max(1, most // ANCHORS), device="cpu")
    for places in torch.arange(len(states), device="cpu").split(batch_size):
        view = states.view(places, layers_of(kind, plan))
        with mixed_precision(states.streams.device):
            choices = lesson_of(target, view, ids).choices
            for depth, (logits, rows) in enumerate(KINDS[kind].guesses(draft, view, plan.levels, anchors)):
                best = logits.argmax(-1)
                agrees = (best if ids is None else ids[best]) == choices[:, rows]
                hits[depth] += int(agrees.sum())
                rows_seen[depth] += agrees.numel()
    return (hits / rows_seen).tolist()
