"""The state that all requests of an engine share: the models, one batch with its pools, its steps, and a lock."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...runtime.values import shown
from ..batch.kv_pool import KVPool, PrefillAttend
from ..batch.kv_types import kv_limits_of, make_target_pool, read_cache_dtype
from ..batch.state import BatchState
from ..config.eagle_config import CONFIG_FIELDS, EAGLEConfig
from ..config.pairing import check_deterministic, check_method, check_quantize, check_trees
from ..config.several_drafts import check_choice, fit_trees
from ..drafters.methods import make_drafter, make_readers, trees_of
from ..drafters.suffix import SuffixCache
from ..models.protocol import DraftModel, TargetModel
from ..models.running import run_target
from ..models.tokenizer import Tokenizer, as_tokenizer, load_tokenizer
from ..requests.inputs import Seeds, Unset, read_call_params, read_max_new_tokens, read_seeds
from ..requests.names import read_names
from ..requests.request import Request, StopStrings, TokenEvent
from ..requests.sampling_params import MOST_ENDS, SAMPLING_FIELDS, SamplingParams
from ..step.plan import Candidate, StepPlan, plan_steps
from ..step.stepper import Verified
from .lock import EngineLock, Unique
from .memory import check_fits, count_pages, workspace_bytes
from .plain_steps import PlainSteps
from .scheduler import Scheduler
from .threads import running

_POOL_FIELDS = ("kv_cache_dtype", "page_size", "max_batch", "kv_cache_bytes", "prefill_chunk")
# the fields that steps depend on: all but those of single requests, those that determine the pools, and those between
_OTHER_FIELDS = (*SAMPLING_FIELDS, *_POOL_FIELDS, "eos_token_ids", "max_length", "max_step_ms", "share_prefixes")
_STEP_FIELDS = tuple(name for name in CONFIG_FIELDS if name not in _OTHER_FIELDS)
# the fields that a call may override; seeds differ from prompt to prompt
_CALL_FIELDS = frozenset((*CONFIG_FIELDS, *SAMPLING_FIELDS)) - {"seed"}


class Session(Unique):
    """Holds a target and drafts with one batch of requests. The engine, streams, warm-up and benchmarks use it, each
    with the configuration of the call at hand. Code that steps, submits or changes anything holds `lock`, and all but
    `submit` and `abort` with the mark of a step.

    draft_names      of the drafts, as errors and `EAGLEInference.candidates` tell them
    scheduler        of the batch; None before the first request. An empty batch gets another if its pools do not suit
    plans            the steps made so far for the pools of this scheduler
    suffix_caches    by size; all configurations with the same sizes share a cache, since it remembers responses
    outbox           events of submitted requests that nobody has collected yet
    is_speculating   whether steps may have drafts
    plain_steps      times of plain steps, to compare with
    kv_limits        what keys and values in 8 bits are divided by, by their type
    tokenizer_fault  why there is no tokenizer, if there is none
    """

    def __init__(self, target: TargetModel, drafts: Sequence[DraftModel], names: Sequence[str], tokenizer: Any):
        self.target, self.drafts, self.device = target, tuple(drafts), target.device
        self.draft_names = tuple(names)
        is_given = tokenizer is not None
        self.tokenizer = as_tokenizer(tokenizer, target.vocab_size, "EAGLEInference") if is_given else None
        self.tokenizer_fault = "it was not given"
        self.lock = EngineLock()
        self._num_submitted = 0
        self.scheduler: Scheduler | None = None
        self.plans: dict[tuple, StepPlan] = {}
        self.suffix_caches: dict[tuple[int, int], SuffixCache] = {}
        self.outbox: list[TokenEvent] = []
        self.is_speculating = True
        self._pools_for: tuple = ()
        self.on_tree: Callable[[Verified], None] | None = None
        self.plain_steps = PlainSteps()
        self.kv_limits: dict[torch.dtype, Tensor | None] = {}

    def check(self, config: EAGLEConfig) -> None:
        """Raises ValueError if the models cannot serve the configuration's method or emit its end tokens."""
        for draft in self.drafts or [None]:
            check_method(config, draft)
            check_quantize(config, self.target, draft)
        check_deterministic(config, self.target)
        check_choice(config.on(self.device), self.draft_names)
        read_cache_dtype(config.kv_cache_dtype, self.target)
        self._check_tokens("EAGLEConfig: eos_token_ids", config.eos_token_ids or ())

    def load_tokenizer(self, folder: str | Path) -> None:
        """Takes the tokenizer of the target's folder, if there is one."""
        try:
            self.tokenizer = load_tokenizer(folder, self.target.vocab_size)
        except ValueError as error:  # only text needs one, and says so
            self.tokenizer_fault = str(error)

    def tokenizer_for(self, user: str) -> Tokenizer:
        """Returns the tokenizer; raises ValueError, with what needs it and why there is none, if there is none."""
        if self.tokenizer is None:
            raise ValueError(f"EAGLEInference: {user} the tokenizer of the target: {self.tokenizer_fault}")
        return self.tokenizer

    def read_overrides(self, caller: str, config: EAGLEConfig, overrides: dict[str, Any]) -> tuple[EAGLEConfig, dict]:
        """Returns the configuration of a call, and what its requests ask for: its sampling and the overrides.
        overrides: What `read_fields` returns."""
        of_config = {name: value for name, value in overrides.items() if name in CONFIG_FIELDS}
        config = replace(config, **of_config) if of_config else config
        policy = overrides.get("accept_policy", config.accept_policy)
        if policy != config.accept_policy:
            rule = "be 'simulate' with simulated_accept_length, _lengths or _rates, even if the engine has these"
            raise ValueError(f"{caller}: accept_policy must {rule}, got {shown(policy)}")
        self.check(config)
        return config, config.sampling | {name: overrides[name] for name in overrides.keys() - of_config.keys()}

    def read_call(
        self, caller: str, config: EAGLEConfig, count: int, max_new_tokens: Any, sampling_params: Any, seeds: Seeds,
        overrides: dict[str, Any], n: int = 1,
    ) -> tuple[EAGLEConfig, list[SamplingParams]]:  # fmt: skip
        """Returns the configuration of a call of `count` prompts, and the parameters of their requests, n for each.
        Without params, in the place of max_new_tokens or as sampling_params, requests differ in their seeds alone."""
        overrides = read_fields(caller, config, overrides)
        config, sampling = self.read_overrides(caller, config, overrides)
        asked = overrides.keys() & {*SAMPLING_FIELDS}
        params = read_call_params(caller, max_new_tokens, sampling_params, count, asked)
        if params is None:
            sampling["max_new_tokens"] = read_max_new_tokens(max_new_tokens, caller)
            return config, [SamplingParams(**sampling, seed=s) for s in read_seeds(seeds, count, caller, n)]
        if seeds is not None and not isinstance(seeds, Unset) and any(each.seed is not None for each in params):
            raise ValueError(f"{caller}: seeds must be None when params have a seed, got {shown(seeds)}")
        of_prompts = [None] * count if seeds is None else read_seeds(seeds, count, caller)
        return config, [
            replace(each, seed=seed)
            for each, first in zip(params, of_prompts)
            for seed in read_seeds(first if each.seed is None else each.seed, 1, caller, n)
        ]

    def make_request(
        self, number: int, prompt: list[int], params: SamplingParams, config: EAGLEConfig,
        outbox: list[TokenEvent] | None = None,
    ) -> Request:  # fmt: skip
        """Returns a request with this configuration; raises ValueError if its parameters cannot be served."""
        stop = StopStrings(params.stop, self.tokenizer_for("stop strings need"), prompt) if params.stop else None
        self._check_tokens("SamplingParams: stop_token_ids", params.stop_token_ids)
        ends = frozenset(() if params.ignore_eos else config.eos_token_ids or ()) | frozenset(params.stop_token_ids)
        start, reason = params.logprob_start_len, config.why_not_served(params)
        if start is not None and start >= len(prompt) > 0:
            reason = f"logprob_start_len must be below the {len(prompt)} tokens of its prompt, got {start}"
        if reason is None and params.min_new_tokens and len(ends) > MOST_ENDS:
            reason = f"min_new_tokens serves at most {MOST_ENDS} end tokens, got {len(ends)}"
        if reason:
            raise ValueError(f"EAGLEInference: {reason}")
        seed = read_seeds(params.seed, 1)[0]
        return Request(number, prompt, params, seed, ends, stop_strings=stop, outbox=outbox)

    def submit(self, prompt: list[int], params: SamplingParams | None, config: EAGLEConfig) -> Request:
        """Queues a request, and returns it; one that can never run is returned finished, with `error`.
        Inside a step, it joins those that the step is for."""
        with self.lock:
            may_change = not self.lock.is_in_step
            with self.changing("submit") if may_change else contextlib.nullcontext():
                scheduler = self.scheduler_for(config, speculative=True, may_change=may_change)
            params = params or SamplingParams(**config.sampling)
            request = self.make_request(self._num_submitted, prompt, params, config, self.outbox)
            self._num_submitted += 1
            reason = self.why_unfit(prompt, params.max_new_tokens, config, speculative=True)
            reason = reason or scheduler.why_never(request)
            if reason:
                request.end("error", reason)
            else:
                scheduler.submit(request)
            return request

    def abort(self, *requests: Request) -> None:
        """Ends requests, wherever they are; inside a step, they keep their rows and pages until its end."""
        with self.lock:
            for request in requests:
                request.end("abort")
            if self.scheduler is not None:
                self.lock.later(partial(self.scheduler.drop, requests))

    def step(self, caller: str) -> list[TokenEvent]:
        """Advances all requests; returns the events that nobody has collected yet."""
        with self.lock.step(caller):
            if self.scheduler is not None and self.scheduler.has_work:
                self.scheduler.step(self.is_speculating)
            events = list(self.outbox)
            self.outbox.clear()
            return events

    def time_plain_step(self, count: int) -> float | None:
        """Returns what a plain step of `count` requests takes; it is timed now if it can be, and the engine is free.
        None: nothing is known of such a step, a step runs, or requests have not ended."""
        lock, steps = self.lock, self.plain_steps
        if count in steps.untimed and not lock.is_foreign and lock.acquire(blocking=False):
            try:
                if not (lock.is_in_step or self.has_work):
                    with self.changing("speedup"):
                        steps.measure(count)
            finally:
                lock.release()
        return steps.known_ms.get(count)

    @contextlib.contextmanager
    def changing(self, caller: str) -> Iterator[None]:
        """Marks a block that changes the batch as a step of `caller`, and runs it as steps run."""
        with self.lock.step(caller), running(self.target):
            yield

    def why_unfit(self, prompt: list[int], max_new_tokens: int, config: EAGLEConfig, speculative: bool) -> str | None:
        """Returns why nothing can be generated from a prompt; None if there is no reason."""
        if not prompt:
            return "the prompt is empty; it must hold at least one token"
        worst = max(prompt) if min(prompt) >= 0 else min(prompt)
        if not 0 <= worst < self.target.vocab_size:
            return f"token ids must lie in 0..{self.target.vocab_size - 1}, the prompt holds {shown(worst)}"
        limit, plain = (self.max_length(config, is_speculative) for is_speculative in (speculative, False))
        if len(prompt) + max_new_tokens <= limit:
            return None
        reason = f"the prompt of {len(prompt)} tokens + max_new_tokens={max_new_tokens} exceed the {limit} tokens that "
        if limit == plain:
            return reason + "the target and max_length allow"
        return reason + f"the draft allows; without drafts (speculative=False or max_spec_batch=0) {plain} are allowed"

    def next_token_logits(self, prompt: list[int], config: EAGLEConfig) -> Tensor:
        """Returns the target's logits, [V] fp32, for the token after a prompt."""
        reason = self.why_unfit(prompt, 0, config, speculative=False)
        if reason:
            raise ValueError(f"next_token_logits: {reason}")
        with self.changing("next_token_logits"):
            tokens = torch.tensor([prompt], dtype=torch.int64, device=self.device)
            positions = torch.arange(len(prompt), device=self.device)[None]
            num_pages = -(-len(prompt) // config.page_size)
            pool = self._target_pool(config, num_pages)
            table = torch.arange(num_pages, dtype=torch.int32, device=self.device)[None]
            attend = PrefillAttend(pool, table, [(0, len(prompt))])
            return run_target(self.target, tokens, positions, attend, last_only=True).logits[0, -1].float()

    def max_length(self, config: EAGLEConfig, speculative: bool) -> int:
        """Returns the most tokens that a request may have, prompt included."""
        limit = self.target.max_length
        if speculative and config.may_speculate and config.needs_model:
            limit = min(limit, *(draft.max_length for draft in self.drafts))
        return min(limit, config.max_length or limit)

    def scheduler_for(self, config: EAGLEConfig, speculative: bool, may_change: bool = True) -> Scheduler:
        """Returns the scheduler of the batch, which uses this configuration from now on.
        may_change: False raises RuntimeError where it uses another one now."""
        if self.on_tree is None or len(self.drafts) > 1:  # on_tree sees configured trees, not those that a choice takes
            config = config.on(self.device)
        if speculative:
            self.check_trees(config)
        drafts, has_pools = self.pooled_drafts(config), self._has_pools_for(config)
        key = speculative, self.on_tree is not None, *(getattr(config, name) for name in _STEP_FIELDS)
        plan = self.plans.get(key) if has_pools else None
        if plan is None or (self.scheduler.plan, self.scheduler.max_step_ms) != (plan, config.max_step_ms):
            if not may_change:
                raise RuntimeError("submit: a step with another configuration is running; submit between steps")
            if self.scheduler is not None and self.scheduler.has_work:
                raise RuntimeError("EAGLEInference: collect or abort the requests with another configuration first")
            if not has_pools:
                self._make_pools(config, drafts)
            if plan is None:
                cache = self.suffix_cache(config) if "suffix" in config.methods else None
                state, lag = self.scheduler.state, self.scheduler.lag
                plan = plan_steps(self.target, drafts, config, state, speculative, lag, cache, self.on_tree)
                self.plans[key] = plan
            self.scheduler.use(plan, config.max_step_ms)
        self.scheduler.reading.shares_prefixes = config.share_prefixes
        return self.scheduler

    def forget_prefixes(self) -> None:
        """See `EAGLEInference.forget_prefixes`."""
        with self.lock.step("forget_prefixes"):
            if self.scheduler is not None:
                self.scheduler.pages.forget()

    def suffix_cache(self, config: EAGLEConfig) -> SuffixCache:
        """Returns the cache with the configuration's sizes; makes it if there is none yet."""
        sizes = config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_cached_requests
        if sizes not in self.suffix_caches:
            self.suffix_caches[sizes] = SuffixCache(*sizes)
        return self.suffix_caches[sizes]

    @contextlib.contextmanager
    def alone(self, caller: str, config: EAGLEConfig) -> Iterator[None]:
        """Reserves the batch for a `caller` that measures or warms up; other threads wait.
        In the block suffix trees know no earlier requests; afterwards they know none from the block."""
        self.lock.refuse(caller)
        with self.lock:
            with self.changing(caller):
                if self.scheduler is not None:
                    self.scheduler.drain()
            if self.has_work:
                raise RuntimeError(f"{caller}: the batch must be empty; collect or abort the requests in it")
            remembers = "suffix" in config.methods
            with self.suffix_cache(config).forgetting() if remembers else contextlib.nullcontext():
                yield

    @property
    def has_work(self) -> bool:
        """Returns whether a request runs or waits, or an event has not been collected."""
        return bool(self.outbox) or (self.scheduler is not None and self.scheduler.has_work)

    def watch(self, on_tree: Callable[[Verified], None] | None) -> None:
        """Lets every step call a function with its trees and the verdict on them; see `EAGLEInference.on_tree`."""
        with self.lock:
            # steps made for the previous function are of no use any more
            self.plans = {key: plan for key, plan in self.plans.items() if plan.plain.on_tree is None}
            self.on_tree = on_tree

    def workspace_bytes(self, config: EAGLEConfig) -> dict[str, int]:
        """Returns the bytes that a configuration needs besides the weights; see `memory.workspace_bytes`."""
        for draft in self.drafts or [None]:
            check_method(config, draft)
        config = config.on(self.device)
        with self.lock:
            max_pages, num_pages = self._max_pages(config), None
            if self._has_pools_for(config):  # their size depends on the memory that was free when they were made
                state, num_pages = self.scheduler.state, self.scheduler.pages.num_pages
                max_pages = state.block_table.shape[1]
        return workspace_bytes(self.target, self.pooled_drafts(config), config, max_pages, num_pages)

    def _make_pools(self, config: EAGLEConfig, drafts: Sequence[DraftModel]) -> None:
        self.scheduler, self.plans = None, {}  # frees the old pools before new ones are allocated
        self.plain_steps.untimed.clear()
        max_pages = self._max_pages(config)
        num_pages = count_pages(self.target, drafts, config, max_pages)
        check_fits(self.target, drafts, config, max_pages, num_pages)
        pool = self._target_pool(config, num_pages)
        state = BatchState(self.target, drafts, config, max_pages, num_pages, pool)
        self.scheduler, self._pools_for = Scheduler(state), _pools_of(config)

    def _target_pool(self, config: EAGLEConfig, num_pages: int) -> KVPool:
        dtype = read_cache_dtype(config.kv_cache_dtype, self.target)
        if dtype not in self.kv_limits:
            self.kv_limits[dtype] = kv_limits_of(self.target, dtype, config.page_size)
        return make_target_pool(self.target, num_pages, config.page_size, dtype, self.kv_limits[dtype])

    def _has_pools_for(self, config: EAGLEConfig) -> bool:
        if self.scheduler is None or self._pools_for != _pools_of(config):
            return False
        return self.scheduler.state.block_table.shape[1] >= self._max_pages(config)

    @property
    def candidates(self) -> list[Candidate]:
        """Returns the kinds of steps of the scheduler's plan."""
        plan = None if self.scheduler is None else self.scheduler.plan
        return [] if plan is None else plan.candidates(self.draft_names)

    def check_trees(self, config: EAGLEConfig) -> None:
        """Raises ValueError where a draft model cannot draft the trees that are asked for."""
        for draft, own in zip(self.drafts, fit_trees(config, self.drafts)):
            check_trees(own, draft)

    def pooled_drafts(self, config: EAGLEConfig) -> tuple[DraftModel, ...]:
        """Returns the draft models that need KV pools."""
        return self.drafts if config.needs_model else ()

    def _max_pages(self, config: EAGLEConfig) -> int:
        """Returns the pages of a request of full length, the same with and without speculation."""
        readers = make_readers(config, self.target, self.pooled_drafts(config))
        wholes = [(None, each.config, each.reader) for each in readers] or [(None, config, None)]
        trees = [each for each in (*wholes, *trees_of(config, readers)) if each[1] is not None]
        past_end = max(make_drafter(tree, reader, self.device).overshoot for _, tree, reader in trees)
        # rounded up, so that another tree rarely needs other pools
        needed = self.max_length(config, speculative=False) + -(-past_end // 256) * 256
        return -(-needed // config.page_size)

    def _check_tokens(self, name: str, token_ids: Iterable[int]) -> None:
        """Raises ValueError for a token that the target cannot emit."""
        for token in token_ids:
            if not 0 <= token < self.target.vocab_size:
                raise ValueError(f"{name} must lie in 0..{self.target.vocab_size - 1}, got {shown(token)}")


def read_fields(caller: str, config: EAGLEConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    """Returns overrides of a configuration by the names of its fields and of `SamplingParams`; refuses others."""
    where = " in EAGLEConfig or SamplingParams"
    return read_names(caller, overrides, _CALL_FIELDS, where=where, temperature=config.temperature)


def _pools_of(config: EAGLEConfig) -> tuple:
    """Returns the values that determine the pools and rows."""
    return config.needs_model, *(getattr(config, name) for name in _POOL_FIELDS)
