"""The kinds of steps that a configuration chooses from, each with its graphs, and who chooses."""

from __future__ import annotations

import logging
from typing import NamedTuple

from .batch_state import BatchState
from .config import EAGLEConfig
from .models.causal_draft import CausalDraft
from .models.protocol import DraftModel, TargetModel
from .speculation import ByBatchSize, Choice, Fastest
from .step import Stepper
from .step_runner import StepRunner

_logger = logging.getLogger(__name__)


class Steps(NamedTuple):
    """runners: number 0 decodes plainly. With a draft it keeps what the draft misses, so that others can follow."""

    runners: tuple[StepRunner, ...]
    choice: Choice


def make_steps(target: TargetModel, draft: DraftModel | None, config: EAGLEConfig, state: BatchState) -> Steps:
    """Of a configuration; without a draft plain decoding alone."""
    plain = Stepper(target, draft, config, is_plain=True)
    steppers, table = [plain], []
    for most_rows, tree in config.trees if draft is not None else ():
        table.append((most_rows, 0 if tree is None else len(steppers)))
        if tree is not None:
            steppers.append(Stepper(target, draft, tree))
    is_automatic = draft is not None and config.adaptive == "auto"
    choice = Fastest(len(steppers), config.max_spec_batch) if is_automatic else ByBatchSize(tuple(table))
    return Steps(tuple(_runner(stepper, state) for stepper in steppers), choice)


def tell_who_waits(target: TargetModel, draft: DraftModel, config: EAGLEConfig) -> None:
    """One warning for each model that keeps steps from being CUDA graphs, which nobody has asked to do without."""
    if target.device.type != "cuda" or config.cuda_graph is not None:
        return
    for role, model in (("target", target), ("draft", draft)):
        if not getattr(model, "can_be_captured", True):
            model = model.model if isinstance(model, CausalDraft) else model
            name = type(getattr(model, "model", model)).__name__  # of what `TransformersTarget` wraps
            _logger.warning(
                "EAGLEInference: steps run eagerly, not as CUDA graphs: the forward of the %s, %s, waits for the "
                "device; cuda_graph=False silences this",
                role,
                name,
            )


def _runner(stepper: Stepper, state: BatchState) -> StepRunner:
    is_gpu, wanted = stepper.target.device.type == "cuda", stepper.config.cuda_graph
    if wanted and not stepper.can_be_captured:
        raise ValueError(
            "EAGLEInference: cuda_graph must not be True here: the forward of one of the models waits for the device, "
            "so its steps run eagerly"
        )
    return StepRunner(stepper, state, is_gpu and (stepper.can_be_captured if wanted is None else wanted))
