"""Compiles and captures ahead of the first request what requests will need: `EAGLEInference.warmup`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .sampling import SAMPLING_FIELDS, Features, SamplingParams
from .scheduler import Scheduler
from .step_runner import buckets

if TYPE_CHECKING:
    from .inference import EAGLEInference

# prompts of few and of many tokens take different kernels
_PROMPT_LENGTHS = (1, 512)


def warm_up(
    engine: EAGLEInference, scheduler: Scheduler, params: Sequence[SamplingParams], limit: int, speculative: bool
) -> None:
    """What requests like `params`, in any mixture and number, need of `scheduler`; limit: longest request."""
    if scheduler.has_work:
        raise RuntimeError("EAGLEInference: warmup needs an empty batch; collect or abort the requests in it")
    prompts = [[0] * min(length, limit - 2) for length in _PROMPT_LENGTHS]
    mixtures: set[Features] = set()
    for request in params:
        options = {name: getattr(request, name) for name in SAMPLING_FIELDS}
        options |= {"max_new_tokens": 2, "stop_token_ids": (), "stop": ()}
        del options["seed"]
        engine.generate(prompts, **options, seeds=0, speculative=speculative)
        features = Features.of([request])
        mixtures |= {features} | {Features(*map(max, zip(features, mixture))) for mixture in mixtures}
    with torch.inference_mode():
        for features in sorted(mixtures):
            for num_rows in buckets(scheduler.state.num_rows):
                for runner in scheduler.steps.runners:
                    runner.warm_up(num_rows, features)
