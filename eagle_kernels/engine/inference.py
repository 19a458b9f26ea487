"""`EAGLEInference`: speculative generation with any target and draft that keep the protocol."""

from __future__ import annotations

import contextlib
import operator
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..runtime.placement import read_placement
from .batch.kv_pool import KVPool, PrefillAttend
from .batch.memory import check_fits, count_pages, workspace_bytes
from .batch.state import BatchState
from .config.eagle_config import EAGLEConfig
from .config.method_options import METHOD_FIELDS, MODEL_KINDS
from .config.values import is_integer
from .drafters.methods import make_drafter, make_reader
from .drafters.protocol import overshoot
from .drafters.suffix_cache import SuffixCache
from .models.causal_draft import CausalDraft
from .models.loading import load_draft, load_target, read_eos_token_ids
from .models.protocol import DraftModel, TargetModel
from .models.tokenizer import Tokenizer, check_same_vocabulary, load_tokenizer
from .requests.inputs import Prompts, Seeds, read_flag, read_max_new_tokens, read_prompts, read_seeds
from .requests.request import Request, StopStrings, TokenEvent
from .requests.sampling_params import SAMPLING_FIELDS, SamplingParams
from .serve.benchmark import BenchmarkResult, benchmark
from .serve.output import GenerationOutput
from .serve.scheduler import Scheduler
from .serve.stream import TextStream, TokenStream
from .serve.threads import saving_threads
from .serve.warmup import COMMON_PARAMS, warm_up
from .step.plan import Steps, make_steps, tell_who_waits
from .step.stepper import Verified

_CONFIG_FIELDS = tuple(field.name for field in fields(EAGLEConfig))
# of a configuration, what makes one step differ from another one, and what pools and rows are made by
_STEP_FIELDS = (
    "topk", "num_steps", "num_draft_tokens", "tree_mask_mode", "accept_policy", "simulated_accept_length",
    "simulated_accept_rates", "cuda_graph", "phase_times", "max_spec_batch", "adaptive", *METHOD_FIELDS,
)  # fmt: skip
_POOL_FIELDS = ("page_size", "max_batch", "kv_cache_bytes", "prefill_chunk")
# of models that are of another library, or none at all, some are missing
_DRAFT_MEMBERS = ("forward", "max_length", "kv_shape")
_TARGET_MEMBERS = (*_DRAFT_MEMBERS, "vocab_size", "hidden_size", "device", "dtype")


class EAGLEInference:
    """Generates text with a target model, faster: a draft proposes token trees, the target verifies them.

    The text is the target's own. Greedy: the tokens of plain decoding. Sampling: drawn with the noise of plain
    decoding, so with one seed the text is the same with and without speculation wherever the target's logits do not
    depend on how many rows are computed together (fp32 in practice; in bf16 a near-tie may part them).

    Three ways to use it: `generate`; `stream`, for `for` and `async for`; and `submit`, `step`, `collect`, for a server
    that lets requests join and leave between steps. All share one batch and one pool of pages. While `is_speculating`
    is set to False, requests go on by plain decoding. On the CPU a step takes no more of PyTorch's threads than the
    target gives work to (`engine/serve/threads.py`), and gives the others back behind it.

    draft_model   an EAGLE head or any `DraftModel`; a plain language model (`TargetModel`) drafts without features;
                  None for methods that draft without one
    target_model  any `TargetModel` (`engine/models/protocol.py`)
    config        tree, sampling, limits
    device        where both models already are; None: the target's
    tokenizer     for stop strings and `stream_text`
    """

    # why there is none, where there is none
    _tokenizer_fault = "it was not given"

    def __init__(
        self,
        draft_model: DraftModel | TargetModel | None,
        target_model: TargetModel,
        config: EAGLEConfig | None = None,
        device: str | torch.device | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        _check_model("target_model", target_model, _TARGET_MEMBERS)
        _check_config(config)
        self.target = target_model
        self.config = config or EAGLEConfig()
        self.draft = None if draft_model is None else _as_draft(draft_model)
        self._check_method(self.config)
        self.tokenizer = tokenizer
        self.device = target_model.device
        self.lock = threading.RLock()
        is_device = isinstance(device, (str, torch.device)) and _is_same_device(torch.device(device), self.device)
        if device is not None and not is_device:
            raise ValueError(f"EAGLEInference: device must be where the models are, on {self.device}, got {device}")
        if self.draft is not None:
            self._check_pair()
        self._check_tree(self.config)
        self._check_tokens("EAGLEConfig: eos_token_ids", self.config.eos_token_ids or ())
        tell_who_waits(target_model, self.draft, self.config)
        if target_model.dtype == torch.float32 and self.device.type == "cuda" and _rounds_fp32_matmuls():
            warnings.warn(
                "EAGLEInference: torch rounds the inputs of fp32 matmuls (TF32 or less), so speculative and plain text "
                "may part; torch.set_float32_matmul_precision('highest') keeps them together",
                stacklevel=2,
            )
        self._scheduler: Scheduler | None = None
        self._scheduler_key: tuple = ()
        self._steps: dict[tuple, Steps] = {}
        self._plain_step_ms: dict[int, float] = {}
        self._suffix_caches: dict[tuple[int, int], SuffixCache] = {}
        self._num_submitted = 0
        self.is_speculating = True
        self._on_tree: Callable[[Verified], None] | None = None
        # events of submitted requests that `step` has not returned yet
        self._outbox: list[TokenEvent] = []

    @classmethod
    def from_pretrained(
        cls,
        draft: str | Path | None,
        target: str | Path,
        config: EAGLEConfig | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        check_weights: bool = True,
    ) -> EAGLEInference:
        """Loads both model folders (Hugging Face layout); end tokens and the tokenizer, if there is one, come from the
        target's folder.

        draft          an EAGLE head; the target's own folder, where it holds next-token modules; with
                       method="draft_model" a language model of the same tokenizer; None for methods that draft without
                       a model
        device         None: the GPU where there is one, else the CPU
        dtype          of the weights, None: float32
        check_weights  refuse NaN and infinite weights by name, by one pass over them on the device
        """
        _check_config(config)
        device, dtype = read_placement("EAGLEInference.from_pretrained", device, dtype)
        target_model = load_target(target, device, dtype, check_weights=check_weights)
        config = config or EAGLEConfig()
        if config.eos_token_ids is None:
            config = replace(config, eos_token_ids=read_eos_token_ids(target))
        tokenizer, fault = None, cls._tokenizer_fault
        try:
            tokenizer = load_tokenizer(target)
        except ValueError as error:  # needed for text alone, which says so
            fault = str(error)
        draft_model = None
        if draft is not None and "draft_model" in config.methods:
            is_same = check_same_vocabulary(draft, target)
            draft_model = load_target(draft, device, dtype, check_weights=check_weights)
            draft_model = CausalDraft(draft_model, target_model.vocab_size if is_same else None)
        elif draft is not None:
            draft_model = load_draft(draft, target_model, check_weights=check_weights)
        engine = cls(draft_model, target_model, config, device, tokenizer)
        engine._tokenizer_fault = fault
        return engine

    def generate(
        self,
        input_ids: Prompts,
        max_new_tokens: int = 128,
        *,
        seeds: Seeds = None,
        speculative: bool = True,
        **overrides: Any,
    ) -> GenerationOutput:
        """Generates up to `max_new_tokens` tokens per prompt; unpacks as `output_ids, stats`.

        input_ids    one prompt ([L] ids) or several (a list of lists, or a tensor or array [B, L]); lengths may differ
        seeds        one for all or one per prompt; None: fresh ones from torch's generator, returned in stats.seeds
        speculative  False: plain decoding on the same code path and pool
        overrides    any field of `EAGLEConfig` or `SamplingParams` for this call, e.g. temperature=0.8
        Returns new tokens only: a list per prompt, one list for one prompt. A request ends after its first end token,
        or with exactly max_new_tokens.
        """
        stream = self.stream(input_ids, max_new_tokens, seeds=seeds, speculative=speculative, **overrides)
        for _ in stream:
            pass
        return stream.output()

    def stream(
        self,
        input_ids: Prompts,
        max_new_tokens: int = 128,
        *,
        seeds: Seeds = None,
        speculative: bool = True,
        **overrides: Any,
    ) -> TokenStream:
        """As `generate`, but an iterator of `TokenEvent`, for `for` and `async for`, that yields tokens as they are
        committed. `.output()` of the exhausted iterator is what `generate` returns."""
        read_flag("generate: speculative", speculative)
        config, wanted = self._split(overrides)
        prompts, is_single = read_prompts(input_ids)
        if not prompts:
            raise ValueError("generate: input_ids must hold at least one prompt, got []")
        wanted["max_new_tokens"] = read_max_new_tokens(max_new_tokens)
        for index, prompt in enumerate(prompts):
            reason = self._unfit(prompt, wanted["max_new_tokens"], config, speculative)
            if reason:
                raise ValueError(f"generate: {reason}".replace("the prompt", f"prompt {index}"))
        requests = [
            self._request(index, prompt, _params(config, wanted | {"seed": seed}), config)
            for index, (prompt, seed) in enumerate(zip(prompts, read_seeds(seeds, len(prompts))))
        ]

        def find_scheduler() -> Scheduler:
            scheduler = self._scheduler_for(config, speculative)
            for request in requests:
                reason = scheduler.why_never(request)
                if reason:
                    raise ValueError(f"generate: prompt {request.id}: {reason}")
            return scheduler

        with self.lock:
            return TokenStream(self, find_scheduler, requests, is_single)

    def stream_text(self, text: str, max_new_tokens: int = 128, **options: Any) -> TextStream:
        """The text that follows `text`, in pieces, for `for` and `async for`; options are those of `stream`."""
        if self.tokenizer is None:
            raise ValueError(f"EAGLEInference: stream_text needs the tokenizer of the target: {self._tokenizer_fault}")
        prompt = self.tokenizer.encode(text)
        if not prompt:
            raise ValueError(f"stream_text: text must hold at least one token, got {text!r}")
        return TextStream(self.stream(prompt, max_new_tokens, **options), self.tokenizer)

    def submit(self, prompt: list[int] | Tensor, params: SamplingParams | None = None) -> Request:
        """A request joins at the next `step`. One that cannot ever run is returned as finished, with its `error`."""
        prompts, is_single = read_prompts(prompt)
        if prompts and not is_single:
            raise ValueError("EAGLEInference: submit takes one prompt, [L] token ids")
        (prompt,) = prompts or [[]]
        if not (params is None or isinstance(params, SamplingParams)):
            raise ValueError(f"EAGLEInference: params must be None or SamplingParams, got {params!r}")
        with self.lock:
            scheduler = self._scheduler_for(self.config, speculative=True)
            params = params or _params(self.config, {})
            request = self._request(self._num_submitted, prompt, params, self.config)
            self._num_submitted += 1
            reason = self._unfit(prompt, params.max_new_tokens, self.config, speculative=True)
            reason = reason or scheduler.why_never(request)
            if reason:
                request.finish_reason, request.error = "error", reason
            else:
                request.outbox = self._outbox
                scheduler.submit(request)
        return request

    def step(self) -> list[TokenEvent]:
        """Advances all requests; returns the tokens of submitted ones that have become known since the last call."""
        with self.lock:
            if self._scheduler is not None and self._scheduler.has_work:
                self._scheduler.step(self.is_speculating)
            events = list(self._outbox)
            self._outbox.clear()
            return events

    def collect(self) -> None:
        """Steps until all submitted requests have ended; `Request` tells what each brought."""
        while self.has_work:
            self.step()

    def abort(self, request: Request) -> None:
        """Ends a request wherever it is; its row and pages are free at once."""
        if not isinstance(request, Request):
            raise ValueError(f"EAGLEInference: request must be what submit returned, got {request!r}")
        with self.lock:
            if self._scheduler is not None:
                self._scheduler.abort(request)

    def benchmark(
        self,
        prompts: Prompts,
        max_new_tokens: int = 128,
        *,
        batch_size: int = 1,
        seeds: Seeds = 0,
        progress: bool | None = None,
        **overrides: Any,
    ) -> BenchmarkResult:
        """Decodes the prompts, batch_size at a time, with and without speculation: speed, acceptance, latencies.

        batch_size  may be more than max_batch, which is raised to it
        progress    show a bar; None: where stderr is a terminal
        overrides   as of `generate`: `for topk in [2, 4, 8]: stats = engine.benchmark(prompts, topk=topk)`

        Needs an empty batch. Suffix trees know of no request before, and forget those of the benchmark behind it.
        """
        prompts, _ = read_prompts(prompts)
        if not prompts:
            raise ValueError("benchmark: prompts must hold at least one prompt, got []")
        if not (is_integer(batch_size) and batch_size >= 1):
            raise ValueError(f"benchmark: batch_size must be an int of at least 1, got {batch_size!r}")
        if progress is not None:
            read_flag("benchmark: progress", progress)
        batch_size, max_new_tokens = min(batch_size, len(prompts)), read_max_new_tokens(max_new_tokens)
        if "speculative" in overrides:
            raise ValueError(
                f"benchmark: speculative must be left out, both are measured, got {overrides['speculative']!r}"
            )
        overrides.setdefault("max_batch", max(self.config.max_batch, batch_size))
        return benchmark(
            self, prompts, max_new_tokens, batch_size, read_seeds(seeds, len(prompts)), progress, overrides
        )

    def warmup(
        self, *params: SamplingParams, speculative: bool = True, most_requests: int | None = None, **overrides: Any
    ) -> None:
        """Compiles and captures what requests like `params`, in any mixture and number, will need.

        Without params: greedy ones, sampled ones and sampled ones with filters, each with and without logprobs, as far
        as `verify_strategy` serves them. Afterwards no step compiles anything. Penalties need params that have them;
        `warmup(SamplingParams())` is for greedy requests alone, with a sixth of the graphs.
        most_requests   at once; None: max_batch of the configuration
        overrides       of calls of `generate` that have them; with sampling among them only what such calls need
        """
        read_flag("warmup: speculative", speculative)
        for other in (each for each in params if not isinstance(each, SamplingParams)):
            raise ValueError(f"warmup: params must be SamplingParams, got {other!r}")
        config, wanted = self._split(overrides, "warmup")
        if params and wanted:
            name, value = min(wanted.items())
            raise ValueError(f"warmup: {name} belongs into the SamplingParams that are given, got {name}={value!r}")
        if most_requests is not None and not (is_integer(most_requests) and most_requests >= 1):
            raise ValueError(f"warmup: most_requests must be None or an int of at least 1, got {most_requests!r}")
        if not params:
            says_how = not overrides.keys().isdisjoint(SAMPLING_FIELDS)
            common = [each for each in COMMON_PARAMS if config.why_not_served(each) is None]
            params = (_params(config, wanted),) if says_how else common
        with self._alone("warmup", config):
            scheduler = self._scheduler_for(config, speculative)
            warm_up(
                self, scheduler, params, limit=self._limit(config, speculative),
                most_rows=most_requests or config.max_batch, speculative=speculative,
                config={name: value for name, value in overrides.items() if name in _CONFIG_FIELDS},
            )  # fmt: skip

    def workspace_bytes(self, config: EAGLEConfig | None = None) -> dict[str, int]:
        """Bytes that a configuration (None: the engine's) needs beside the weights; see `memory.workspace_bytes`."""
        _check_config(config)
        config = config or self.config
        self._check_method(config)
        with self.lock:
            max_pages, num_pages = self._max_pages(config), None
            if self._has_pools_for(config):  # which may have been made when more or less memory was free
                state, num_pages = self._scheduler.state, self._scheduler.pages.num_pages
                max_pages = state.block_table.shape[1]
        return workspace_bytes(self.target, self._draft_of(config), config, max_pages, num_pages)

    @property
    def is_speculating(self) -> bool:
        """Whether steps may have drafts; may be set at any time."""
        return self._is_speculating

    @is_speculating.setter
    def is_speculating(self, value: bool) -> None:
        self._is_speculating = read_flag("EAGLEInference: is_speculating", value)

    @property
    def on_tree(self) -> Callable[[Verified], None] | None:
        """Called in every step with its trees and the verdict on them, see `Stepper`; set while no request runs. Steps
        run one launch after another then, and those of an engine without it are what they were."""
        return self._on_tree

    @on_tree.setter
    def on_tree(self, value: Callable[[Verified], None] | None) -> None:
        if not (value is None or callable(value)):
            raise ValueError(f"EAGLEInference: on_tree must be None or a callable, got {value!r}")
        with self.lock:
            # steps of the observer before it are nobody's any more
            self._steps = {key: steps for key, steps in self._steps.items() if steps.plain.on_tree is None}
            self._on_tree = value

    @property
    def has_work(self) -> bool:
        return bool(self._outbox) or (self._scheduler is not None and self._scheduler.has_work)

    @saving_threads
    @torch.inference_mode()
    def next_token_logits(self, token_ids: list[int]) -> Tensor:
        """The target's logits [V] fp32 for the token after these, from one causal pass without drafts."""
        prompts, is_single = read_prompts(token_ids, "next_token_logits: token_ids")
        reason = "it takes one prompt, [L] token ids" if prompts and not is_single else None
        reason = reason or self._unfit(prompts[0] if prompts else [], 0, self.config, speculative=False)
        if reason:
            raise ValueError(f"next_token_logits: {reason}")
        (token_ids,) = prompts
        tokens = torch.tensor([token_ids], device=self.device)
        positions = torch.arange(len(token_ids), device=self.device)[None]
        num_pages = -(-len(token_ids) // self.config.page_size)
        pool = KVPool(self.target.kv_shape, num_pages, self.config.page_size, self.target.dtype, self.device)
        table = torch.arange(num_pages, dtype=torch.int32, device=self.device)[None]
        attend = PrefillAttend(pool, table, 0, len(token_ids))
        return self.target.forward(tokens, positions, attend, last_only=True).logits[0, -1].float()

    def plain_step_ms(self, num_requests: int) -> float | None:
        """Measured time of a plain step of so many requests; None if none was measured."""
        return self._plain_step_ms.get(num_requests)

    def note_plain_step(self, num_requests: int, step_ms: float) -> None:
        """What a plain step of so many requests takes that has nothing left to compile."""
        self._plain_step_ms[num_requests] = step_ms

    def _split(self, overrides: dict[str, Any], caller: str = "generate") -> tuple[EAGLEConfig, dict[str, Any]]:
        """The configuration of a call, and what of its requests is not in there."""
        if caller == "generate" and "seed" in overrides:
            raise ValueError("generate: takes seeds=, one for all or one per prompt, not seed=")
        unknown = sorted(overrides.keys() - {*_CONFIG_FIELDS, *SAMPLING_FIELDS} | overrides.keys() & {"seed"})
        if unknown:
            raise ValueError(f"{caller}: there is no field {unknown[0]} in EAGLEConfig or SamplingParams")
        of_config = {name: value for name, value in overrides.items() if name in _CONFIG_FIELDS}
        others = {name: value for name, value in overrides.items() if name not in _CONFIG_FIELDS}
        config = replace(self.config, **of_config) if of_config else self.config
        self._check_method(config)
        self._check_tokens("EAGLEConfig: eos_token_ids", of_config.get("eos_token_ids") or ())
        wanted = of_config.get("accept_policy", config.accept_policy)
        if wanted != config.accept_policy:
            raise ValueError(
                f"{caller}: accept_policy must be 'simulate' where simulated_accept_length or simulated_accept_rates "
                f"is given, here or to the engine, got {wanted!r}"
            )
        return config, others

    def _request(self, index: int, prompt: list[int], params: SamplingParams, config: EAGLEConfig) -> Request:
        stop = None
        if params.stop:
            if self.tokenizer is None:
                raise ValueError(
                    f"EAGLEInference: stop strings need the tokenizer of the target: {self._tokenizer_fault}"
                )
            stop = StopStrings(params.stop, self.tokenizer, prompt)
        self._check_tokens("SamplingParams: stop_token_ids", params.stop_token_ids)
        reason = config.why_not_served(params)
        if reason:
            raise ValueError(f"EAGLEInference: {reason}")
        seed = read_seeds(params.seed, 1)[0]
        ends = frozenset(config.eos_token_ids or ()) | frozenset(params.stop_token_ids)
        return Request(index, prompt, params, seed, ends, _stop=stop)

    def _unfit(self, prompt: list[int], max_new_tokens: int, config: EAGLEConfig, speculative: bool) -> str | None:
        """Why a prompt cannot be generated from; None: it can."""
        if not prompt:
            return "the prompt is empty; it must hold at least one token"
        worst = max(prompt) if min(prompt) >= 0 else min(prompt)
        if not 0 <= worst < self.target.vocab_size:
            return f"token ids must lie in 0..{self.target.vocab_size - 1}, the prompt holds {worst}"
        limit, plain = (self._limit(config, is_speculative) for is_speculative in (speculative, False))
        if len(prompt) + max_new_tokens <= limit:
            return None
        reason = f"the prompt of {len(prompt)} tokens + max_new_tokens={max_new_tokens} exceed the {limit} tokens that "
        if limit == plain:
            return reason + "the target and max_length allow"
        return reason + f"the draft allows; {plain} without it, by speculative=False or max_spec_batch=0"

    def _limit(self, config: EAGLEConfig, speculative: bool) -> int:
        limit = self.target.max_length
        if speculative and config.may_speculate and config.needs_model:
            limit = min(limit, self.draft.max_length)
        return min(limit, config.max_length or limit)

    def _scheduler_for(self, config: EAGLEConfig, speculative: bool) -> Scheduler:
        """The engine's batch, set to this configuration; made anew, while it is empty, where its pools do not fit."""
        if speculative:
            self._check_tree(config)
        max_pages, draft = self._max_pages(config), self._draft_of(config)
        key, scheduler = _pool_key(config), self._scheduler
        if not self._has_pools_for(config):
            if scheduler is not None and scheduler.has_work:
                raise RuntimeError(
                    "EAGLEInference: requests that run hold the pools of another configuration; collect or abort them "
                    "before this one is used"
                )
            # the old pools go before there are new ones
            self._scheduler, self._scheduler_key, self._steps = None, key, {}
            scheduler = None
            num_pages = count_pages(self.target, draft, config, max_pages)
            check_fits(self.target, draft, config, max_pages, num_pages)
            state = BatchState(
                self.target,
                draft,
                num_rows=config.max_batch,
                num_pages=num_pages,
                max_pages=max_pages,
                page_size=config.page_size,
            )
            scheduler = self._scheduler = Scheduler(state, config.prefill_chunk)
        step_key = (speculative, self._on_tree is not None, *(getattr(config, name) for name in _STEP_FIELDS))
        if step_key not in self._steps:
            cache = self._suffix_cache_for(config) if "suffix" in config.methods else None
            self._steps[step_key] = make_steps(
                self.target, draft, config, scheduler.state, speculative, scheduler.lag, cache, self._on_tree
            )
        scheduler.use(self._steps[step_key])
        return scheduler

    @contextlib.contextmanager
    def _alone(self, name: str, config: EAGLEConfig) -> Iterator[None]:
        """For calls that measure or warm up: no other requests, those of other threads wait, and suffix trees that know
        of none before, nor of those within behind it."""
        with self.lock:
            if self._scheduler is not None:
                self._scheduler.drain()
            if self.has_work:
                raise RuntimeError(f"EAGLEInference: {name} needs an empty batch; collect or abort the requests in it")
            has_memory = "suffix" in config.methods
            with self._suffix_cache_for(config).forgetting() if has_memory else contextlib.nullcontext():
                yield

    def _suffix_cache_for(self, config: EAGLEConfig) -> SuffixCache:
        """One for all configurations with its sizes, since it remembers past responses."""
        sizes = config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_cached_requests
        if sizes not in self._suffix_caches:
            self._suffix_caches[sizes] = SuffixCache(*sizes)
        return self._suffix_caches[sizes]

    def _has_pools_for(self, config: EAGLEConfig) -> bool:
        if self._scheduler is None or self._scheduler_key != _pool_key(config):
            return False
        return self._scheduler.state.block_table.shape[1] >= self._max_pages(config)

    def _draft_of(self, config: EAGLEConfig) -> DraftModel | None:
        """Who has a pool."""
        return self.draft if config.needs_model else None

    def _max_pages(self, config: EAGLEConfig) -> int:
        """Of one request of full length; plain decoding shares the pools of its speculative twin."""
        trees = [config, *(tree for _, tree in config.trees if tree is not None)]
        reader = make_reader(config, self._draft_of(config))
        behind = max(overshoot(make_drafter(tree, reader, self.device)) for tree in trees)
        # with some to spare, so that another tree does not ask for other pools
        needed = self._limit(config, speculative=False) + -(-behind // 256) * 256
        return -(-needed // config.page_size)

    def _check_tokens(self, name: str, token_ids: Iterable[int]) -> None:
        """None that the target never emits."""
        for token in token_ids:
            if not 0 <= token < self.target.vocab_size:
                raise ValueError(f"{name} must lie in 0..{self.target.vocab_size - 1}, got {token}")

    def _check_pair(self) -> None:
        """The draft must be the target's."""
        for name, is_same in (("device", _is_same_device), ("dtype", operator.eq)):
            of_draft, of_target = getattr(self.draft, name, None), getattr(self.target, name)
            if of_draft is not None and not is_same(of_draft, of_target):
                raise ValueError(f"EAGLEInference: the draft's {name} {of_draft} is not the target's {of_target}")
        if hasattr(self.draft, "bind"):
            self.draft.bind(self.target)
        if self.draft.vocab_size != self.target.vocab_size:
            raise ValueError(
                f"EAGLEInference: the draft's vocabulary of {self.draft.vocab_size} tokens is not the target's "
                f"{self.target.vocab_size}; where a model has the same tokenizer and another padding, "
                f"engine.models.causal_draft.CausalDraft(model, vocab_size={self.target.vocab_size}) drafts"
            )

    def _check_method(self, config: EAGLEConfig) -> None:
        if config.needs_model and self.draft is None:
            raise ValueError(
                f"EAGLEInference: draft_model must not be None for method={config.method!r}, whose drafts are a model's"
            )
        own = getattr(self.draft, "method", None)
        for method in config.methods:
            if own in MODEL_KINDS and method in MODEL_KINDS and method != own:
                raise ValueError(
                    f"EAGLEInference: method must be {own!r} or None for a draft of {type(self.draft).__name__}, got "
                    f"{method!r}"
                )

    def _check_tree(self, config: EAGLEConfig) -> None:
        if config.needs_model and config.topk >= self.draft.draft_vocab_size:
            raise ValueError(
                f"EAGLEInference: topk must be smaller than the draft vocabulary of {self.draft.draft_vocab_size} "
                f"tokens, got {config.topk}"
            )
        num_modules = getattr(self.draft, "num_modules", 1) if config.needs_model else 1
        trees = [config, *(tree for _, tree in config.trees if tree is not None)] if num_modules > 1 else []
        for tree in trees:
            if tree.topk > 1:
                raise ValueError(
                    f"EAGLEInference: topk must be 1 for a draft of {num_modules} next-token modules, whose drafts are "
                    f"a chain, got {tree.topk}"
                )
            if tree.num_model_levels > num_modules:
                name = "num_steps" if tree.num_model_levels == tree.num_steps else "num_model_steps"
                raise ValueError(
                    f"EAGLEInference: {name} must be at most the {num_modules} next-token modules of the draft, one a "
                    f"level, got {tree.num_model_levels}"
                )


def _params(config: EAGLEConfig, values: dict[str, Any]) -> SamplingParams:
    """The configuration's sampling, and what a call says of its own."""
    shared = {name: getattr(config, name) for name in SAMPLING_FIELDS if name in _CONFIG_FIELDS}
    return SamplingParams(**shared | values)


def _check_model(name: str, model: Any, members: tuple[str, ...]) -> None:
    missing = [member for member in members if not hasattr(model, member)]
    if missing:
        kind = "a TargetModel" if members is _TARGET_MEMBERS else "a DraftModel or a TargetModel"
        value = repr(model) if isinstance(model, (str, Path)) else type(model).__name__
        raise ValueError(
            f"EAGLEInference: {name} must be {kind}, which has {missing[0]}, got {value}; TransformersTarget(model) "
            "makes one of a model of transformers, EAGLEInference.from_pretrained loads folders"
        )


def _as_draft(model: DraftModel | TargetModel) -> DraftModel:
    _check_model("draft_model", model, _DRAFT_MEMBERS)
    return model if hasattr(model, "token_shift") else CausalDraft(model)


def _check_config(config: Any) -> None:
    if not (config is None or isinstance(config, EAGLEConfig)):
        raise ValueError(f"EAGLEInference: config must be None or an EAGLEConfig, got {config!r}")


def _pool_key(config: EAGLEConfig) -> tuple:
    return config.needs_model, *(getattr(config, name) for name in _POOL_FIELDS)


def _is_same_device(one: torch.device, other: torch.device) -> bool:
    """`cuda` is any `cuda:N`."""
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))


def _rounds_fp32_matmuls() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # its newer sibling, torch.backends.cuda.matmul.fp32_precision, was set to something lower
        return True
