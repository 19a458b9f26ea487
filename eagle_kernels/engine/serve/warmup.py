"""Compiles and captures what requests will need before the first one comes: `EAGLEInference.warmup`."""

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...runtime.values import is_integer, read_flag, scalar, shown
from ..config.eagle_config import CONFIG_FIELDS, EAGLEConfig
from ..models.protocol import ModelError
from ..requests.sampling_params import SAMPLING_FIELDS, Features, SamplingParams, read_params
from ..step.runner import buckets
from .scheduler import Scheduler
from .session import Session, read_fields
from .stream import open_stream

# short and long prompts use different kernels
_PROMPT_LENGTHS = (1, 512)
# what requests commonly ask for; compilation depends on whether a parameter is in use, not on its value
COMMON_PARAMS = tuple(
    SamplingParams(**drawn, logprobs=logprobs)
    for drawn in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01})
    for logprobs in (False, True)
)


def warm_up_call(
    session: Session, config: EAGLEConfig, params: Sequence[SamplingParams], speculative: bool,
    most_requests: int | None, overrides: dict[str, Any],
) -> None:  # fmt: skip
    """Checks the arguments of `EAGLEInference.warmup`, and prepares the session."""
    speculative = read_flag("warmup: speculative", speculative)
    params = [read_params(each, "warmup: params") for each in params]
    overrides = read_fields("warmup", config, overrides)
    config, sampling = session.read_overrides("warmup", config, overrides)
    own = sorted(overrides.keys() - {*CONFIG_FIELDS})
    if params and own:
        raise ValueError(f"warmup: {own[0]} must be set in the given params, got {shown(overrides[own[0]])}")
    most_requests = scalar(most_requests)
    if most_requests is not None and not (is_integer(most_requests) and most_requests >= 1):
        raise ValueError(f"warmup: most_requests must be None or an int of at least 1, got {shown(most_requests)}")
    if not params and overrides.keys().isdisjoint(SAMPLING_FIELDS):
        params = [each for each in COMMON_PARAMS if config.why_not_served(each) is None]
    params = params or (SamplingParams(**sampling),)
    most_rows = config.max_batch if most_requests is None else most_requests
    with session.alone("warmup", config):
        warm_up(session, config, params, most_rows, speculative)


def warm_up(
    session: Session, config: EAGLEConfig, params: Sequence[SamplingParams], most_rows: int, speculative: bool
) -> None:
    """Prepares a session for requests like `params`, in any mixture, up to `most_rows` at once."""
    config = replace(config, share_prefixes=False)  # all prompts are read, although they are alike
    with session.changing("warmup"):
        scheduler = session.scheduler_for(config, speculative)
    # the tokens of one request, if the pool is to hold a request for each of the prompts
    room = scheduler.most_tokens() // len(_PROMPT_LENGTHS) - 2
    limit = min(room, session.max_length(config, speculative) - 2)
    prompts = [[0] * max(1, min(length, limit)) for length in _PROMPT_LENGTHS]
    mixtures: dict[Features, list[SamplingParams]] = {}  # with requests that bring them about

    def draw_first(together: list[list[int]], params: list[SamplingParams]) -> None:
        """Reads prompts that arrive together, and draws their first tokens, at once where the target can."""
        deque(open_stream(session, together, params, config, speculative, caller="warmup"), maxlen=0)

    for wanted in params:
        # Prompts and first tokens only. Steps are run below, one runner after another, since an automatic choice must
        # learn nothing from such prompts.
        least, start = min(wanted.min_new_tokens, 1), None if wanted.logprob_start_len is None else 0
        first = replace(wanted, seed=0, max_new_tokens=1, min_new_tokens=least, logprob_start_len=start)
        first = replace(first, stop_token_ids=(), stop=())
        # each by itself, and all at once, which may be other kernels
        for together in (*([prompt] for prompt in prompts), prompts):
            draw_first(together, [first] * len(together))
        for group in [[first], *([*others, first] for others in mixtures.values())]:
            mixtures.setdefault(Features.of(group), group)
    for group in mixtures.values():
        if len(group) > 1:
            draw_first([[0]] * len(group), group)
    with session.changing("warmup"):
        warm_steps(scheduler, mixtures, buckets(min(most_rows, scheduler.state.num_rows)))


@torch.inference_mode()
def warm_steps(scheduler: Scheduler, mixtures: Iterable[Features], sizes: Sequence[int]) -> None:
    """Compiles and captures the steps of a scheduler for these sets of features and numbers of rows."""
    plan = scheduler.plan
    for number, runner in enumerate(plan.runners):  # plain steps first, which must fit; drafts catch up by their runner
        places = [each.number for each in plan.readers] if number == 0 else ()
        for features, num_rows in itertools.product(sorted(mixtures), sizes):
            for beside in (None, *scheduler.reading.rows_in_use()):
                prompt_tokens = 0 if beside is None else beside.num_tokens
                choice = plan.choice_beside(prompt_tokens)
                if not choice.fits(number, num_rows):
                    continue
                try:
                    least_ms = runner.warm_up(num_rows, features, beside, places)
                except (ModelError, torch.OutOfMemoryError) as error:
                    if isinstance(error, torch.OutOfMemoryError) and plan.give_up(prompt_tokens, number, num_rows):
                        continue
                    if beside is None:
                        raise
                    scheduler.reading.give_up_steps()  # that read prompts: they are not possible here
                    break
                if least_ms is not None:
                    choice.expect(number, num_rows, least_ms)
