"""Compiles and captures ahead of the first request what requests will need: `EAGLEInference.warmup`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..requests.sampling_params import SAMPLING_FIELDS, Features, SamplingParams
from ..step.runner import buckets
from .scheduler import Scheduler
from .threads import few_threads

if TYPE_CHECKING:
    from ..inference import EAGLEInference

# prompts of few and of many tokens take different kernels
_PROMPT_LENGTHS = (1, 512)
# what requests commonly ask for; of values that are on nothing is compiled for one more than for another
COMMON_PARAMS = tuple(
    SamplingParams(**drawn, logprobs=logprobs)
    for drawn in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01})
    for logprobs in (False, True)
)


def warm_up(
    engine: EAGLEInference,
    scheduler: Scheduler,
    params: Sequence[SamplingParams],
    *,
    limit: int,
    most_rows: int,
    speculative: bool,
    config: dict[str, Any],
) -> None:
    """What requests like `params`, in any mixture and up to `most_rows` at once, need of `scheduler`.

    limit: longest request. config: fields of the configuration that this is for.
    """
    # of one request: what fits in the pool with it, and with as many more as prompts there are
    room = scheduler.most_tokens() // len(_PROMPT_LENGTHS) - 2
    prompts = [[0] * max(1, min(length, limit - 2, room)) for length in _PROMPT_LENGTHS]
    mixtures: set[Features] = set()
    for request in params:
        options = {name: getattr(request, name) for name in SAMPLING_FIELDS}
        # prompts and first tokens alone: steps come below, and a choice among them must learn nothing from zeros
        options |= {"max_new_tokens": 1, "stop_token_ids": (), "stop": ()}
        del options["seed"]
        engine.generate(prompts, **config | options, seeds=0, speculative=speculative)
        features = Features.of([request])
        mixtures |= {features} | {Features(*map(max, zip(features, mixture))) for mixture in mixtures}
    with torch.inference_mode(), few_threads(engine.target):
        for features in sorted(mixtures):
            for num_rows in buckets(min(most_rows, scheduler.state.num_rows)):
                for runner in scheduler.steps.runners:
                    runner.warm_up(num_rows, features)
