"""`EAGLEInference`: speculative generation with any target and draft that keep the protocol."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..runtime.placement import read_placement
from ..runtime.values import is_integer
from .batch.kv_pool import KVPool, PrefillAttend
from .config.eagle_config import CONFIG_FIELDS, EAGLEConfig
from .models.causal_draft import CausalDraft
from .models.loading import load_draft, load_target, read_eos_token_ids
from .models.pairing import as_draft, bind_draft, check_target, check_trees, is_same_device, rounds_fp32_matmuls
from .models.protocol import DraftModel, TargetModel
from .models.tokenizer import Tokenizer, check_same_vocabulary, load_tokenizer
from .requests.inputs import Prompts, Seeds, read_flag, read_max_new_tokens, read_prompts, read_seeds
from .requests.request import Request, TokenEvent
from .requests.sampling_params import SAMPLING_FIELDS, SamplingParams
from .serve.benchmark import BenchmarkResult, benchmark
from .serve.output import GenerationOutput
from .serve.session import Session
from .serve.stream import TextStream, TokenStream, open_stream
from .serve.threads import few_threads
from .serve.warmup import COMMON_PARAMS, warm_up
from .step.plan import warn_of_eager_steps
from .step.stepper import Verified


class EAGLEInference:
    """Generates text with a target model, faster: a draft proposes token trees, the target verifies them.

    The text is the target's own. Greedy: the tokens of plain decoding. Sampling: drawn with the noise of plain
    decoding, so with one seed the text is the same with and without speculation wherever the target's logits do not
    depend on how many rows are computed together (fp32 in practice; in bf16 a near-tie may part them).

    Three ways to use it: `generate`; `stream`, for `for` and `async for`; and `submit`, `step`, `collect`, for a server
    that lets requests join and leave between steps. All share one batch and one pool of pages (`session`). While
    `is_speculating` is set to False, requests go on by plain decoding. On the CPU a step takes no more of PyTorch's
    threads than the target gives work to (`engine/serve/threads.py`), and gives the others back afterwards.

    draft_model   an EAGLE head or any `DraftModel`; a plain language model (`TargetModel`) drafts without features;
                  None for methods that draft without one
    target_model  any `TargetModel` (`engine/models/protocol.py`)
    config        tree, sampling, limits
    device        where both models already are; None: the target's
    tokenizer     for stop strings and `stream_text`
    """

    def __init__(
        self,
        draft_model: DraftModel | TargetModel | None,
        target_model: TargetModel,
        config: EAGLEConfig | None = None,
        device: str | torch.device | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        check_target(target_model)
        self.config = config = _read_config(config)
        draft = None if draft_model is None else as_draft(draft_model)
        self.session = Session(target_model, draft, tokenizer)
        self.session.check(config)
        is_device = isinstance(device, (str, torch.device)) and is_same_device(torch.device(device), self.device)
        if device is not None and not is_device:
            raise ValueError(f"EAGLEInference: device must be where the models are, on {self.device}, got {device}")
        if draft is not None:
            bind_draft(draft, target_model)
        check_trees(config, draft)
        warn_of_eager_steps(target_model, draft, config)
        if target_model.dtype == torch.float32 and self.device.type == "cuda" and rounds_fp32_matmuls():
            warnings.warn(
                "EAGLEInference: torch rounds the inputs of fp32 matmuls (TF32 or less), so speculative and plain text "
                "may part; torch.set_float32_matmul_precision('highest') keeps them together",
                stacklevel=2,
            )
        self._num_submitted = 0

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
        config = _read_config(config)
        device, dtype = read_placement("EAGLEInference.from_pretrained", device, dtype)
        target_model = load_target(target, device, dtype, check_weights=check_weights)
        if config.eos_token_ids is None:
            config = replace(config, eos_token_ids=read_eos_token_ids(target))
        draft_model = None
        if draft is not None and "draft_model" in config.methods:
            vocab_size = target_model.vocab_size if check_same_vocabulary(draft, target) else None
            draft_model = CausalDraft(load_target(draft, device, dtype, check_weights=check_weights), vocab_size)
        elif draft is not None:
            draft_model = load_draft(draft, target_model, check_weights=check_weights)
        engine = cls(draft_model, target_model, config, device)
        try:
            engine.session.tokenizer = load_tokenizer(target)
        except ValueError as error:  # only text needs one, and says so
            engine.session.tokenizer_fault = str(error)
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
        """Returns an iterator of `TokenEvent`, for `for` and `async for`, that yields tokens as they are committed.

        Arguments are those of `generate`. `.output()` of the exhausted iterator is what `generate` returns.
        """
        read_flag("generate: speculative", speculative)
        prompts, is_single = read_prompts(input_ids)
        if not prompts:
            raise ValueError("generate: input_ids must hold at least one prompt, got []")
        config, params = self._read_call(len(prompts), max_new_tokens, seeds, overrides)
        return open_stream(self.session, prompts, params, config, speculative, is_single)

    def stream_text(self, text: str, max_new_tokens: int = 128, **options: Any) -> TextStream:
        """Returns the text that follows `text`, in pieces, for `for` and `async for`; options are those of `stream`."""
        if self.tokenizer is None:
            fault = self.session.tokenizer_fault
            raise ValueError(f"EAGLEInference: stream_text needs the tokenizer of the target: {fault}")
        prompt = self.tokenizer.encode(text)
        if not prompt:
            raise ValueError(f"stream_text: text must hold at least one token, got {text!r}")
        return TextStream(self.stream(prompt, max_new_tokens, **options), self.tokenizer)

    def submit(self, prompt: list[int] | Tensor, params: SamplingParams | None = None) -> Request:
        """Adds a request, which joins at the next `step`; one that can never run is returned finished, with `error`."""
        prompts, is_single = read_prompts(prompt)
        if prompts and not is_single:
            raise ValueError("EAGLEInference: submit takes one prompt, [L] token ids")
        (prompt,) = prompts or [[]]
        if not (params is None or isinstance(params, SamplingParams)):
            raise ValueError(f"EAGLEInference: params must be None or SamplingParams, got {params!r}")
        session, config = self.session, self.config
        with session.lock:
            scheduler = session.scheduler_for(config, speculative=True)
            params = params or SamplingParams(**config.sampling)
            request = session.make_request(self._num_submitted, prompt, params, config)
            self._num_submitted += 1
            reason = session.why_unfit(prompt, params.max_new_tokens, config, speculative=True)
            reason = reason or scheduler.why_never(request)
            if reason:
                request.finish_reason, request.error = "error", reason
            else:
                request.outbox = session.outbox
                scheduler.submit(request)
        return request

    def step(self) -> list[TokenEvent]:
        """Advances all requests; returns the tokens of submitted ones that have become known since the last call."""
        session = self.session
        with session.lock:
            if session.scheduler is not None and session.scheduler.has_work:
                session.scheduler.step(session.is_speculating)
            events = list(session.outbox)
            session.outbox.clear()
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
            if self.session.scheduler is not None:
                self.session.scheduler.abort(request)

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

        Needs an empty batch. Suffix trees know no earlier request, and forget those of the benchmark afterwards.
        """
        prompts, _ = read_prompts(prompts)
        if not prompts:
            raise ValueError("benchmark: prompts must hold at least one prompt, got []")
        if not (is_integer(batch_size) and batch_size >= 1):
            raise ValueError(f"benchmark: batch_size must be an int of at least 1, got {batch_size!r}")
        if progress is not None:
            read_flag("benchmark: progress", progress)
        if "speculative" in overrides:
            given = overrides["speculative"]
            raise ValueError(f"benchmark: speculative must be left out, both are measured, got {given!r}")
        batch_size = min(batch_size, len(prompts))
        overrides.setdefault("max_batch", max(self.config.max_batch, batch_size))
        config, params = self._read_call(len(prompts), max_new_tokens, seeds, overrides)
        return benchmark(self.session, config, prompts, params, batch_size, progress)

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
        config, sampling = self._read_overrides("warmup", overrides)
        own = sorted(overrides.keys() - {*CONFIG_FIELDS})
        if params and own:
            value = f"{own[0]}={overrides[own[0]]!r}"
            raise ValueError(f"warmup: {own[0]} belongs into the SamplingParams that are given, got {value}")
        if most_requests is not None and not (is_integer(most_requests) and most_requests >= 1):
            raise ValueError(f"warmup: most_requests must be None or an int of at least 1, got {most_requests!r}")
        if not params and overrides.keys().isdisjoint(SAMPLING_FIELDS):
            params = [each for each in COMMON_PARAMS if config.why_not_served(each) is None]
        params = params or (SamplingParams(**sampling),)
        with self.session.alone("warmup", config):
            warm_up(self.session, config, params, most_requests or config.max_batch, speculative)

    def workspace_bytes(self, config: EAGLEConfig | None = None) -> dict[str, int]:
        """Returns the bytes that a configuration (None: the engine's) needs beside the weights, by what they are for
        (see `memory.workspace_bytes`)."""
        return self.session.workspace_bytes(self.config if config is None else _read_config(config))

    @torch.inference_mode()
    def next_token_logits(self, token_ids: list[int]) -> Tensor:
        """Returns the target's logits [V] fp32 for the token after these, from one causal pass without drafts."""
        prompts, is_single = read_prompts(token_ids, "next_token_logits: token_ids")
        reason = "it takes one prompt, [L] token ids" if prompts and not is_single else None
        prompt = prompts[0] if prompts else []
        reason = reason or self.session.why_unfit(prompt, 0, self.config, speculative=False)
        if reason:
            raise ValueError(f"next_token_logits: {reason}")
        tokens = torch.tensor([prompt], device=self.device)
        positions = torch.arange(len(prompt), device=self.device)[None]
        num_pages = -(-len(prompt) // self.config.page_size)
        pool = KVPool(self.target.kv_shape, num_pages, self.config.page_size, self.target.dtype, self.device)
        table = torch.arange(num_pages, dtype=torch.int32, device=self.device)[None]
        with few_threads(self.target):
            attend = PrefillAttend(pool, table, 0, len(prompt))
            return self.target.forward(tokens, positions, attend, last_only=True).logits[0, -1].float()

    target: TargetModel = property(attrgetter("session.target"))
    draft: DraftModel | None = property(attrgetter("session.draft"))
    device: torch.device = property(attrgetter("session.device"))
    tokenizer: Tokenizer | None = property(attrgetter("session.tokenizer"))

    @property
    def lock(self) -> threading.RLock:
        """Held during each step; whoever holds it keeps all requests from advancing."""
        return self.session.lock

    @property
    def has_work(self) -> bool:
        """Whether a submitted request has not ended, or `step` has something to return."""
        return self.session.has_work

    @property
    def is_speculating(self) -> bool:
        """Whether steps may have drafts; may be set at any time."""
        return self.session.is_speculating

    @is_speculating.setter
    def is_speculating(self, value: bool) -> None:
        self.session.is_speculating = read_flag("EAGLEInference: is_speculating", value)

    @property
    def on_tree(self) -> Callable[[Verified], None] | None:
        """A function that every step calls with its trees and the verdict on them, see `Stepper`; None: no function.

        It is set while no request runs. Steps then run one launch after another; those without it stay as they were.
        """
        return self.session.on_tree

    @on_tree.setter
    def on_tree(self, function: Callable[[Verified], None] | None) -> None:
        if not (function is None or callable(function)):
            raise ValueError(f"EAGLEInference: on_tree must be None or a callable, got {function!r}")
        self.session.on_tree = function

    def _read_call(
        self, num_prompts: int, max_new_tokens: int, seeds: Seeds, overrides: dict[str, Any]
    ) -> tuple[EAGLEConfig, list[SamplingParams]]:
        """Returns the configuration of a call and the parameters of its requests, which differ in their seeds alone."""
        config, sampling = self._read_overrides("generate", overrides)
        sampling["max_new_tokens"] = read_max_new_tokens(max_new_tokens)
        return config, [SamplingParams(**sampling, seed=seed) for seed in read_seeds(seeds, num_prompts)]

    def _read_overrides(self, caller: str, overrides: dict[str, Any]) -> tuple[EAGLEConfig, dict[str, Any]]:
        """Returns the configuration of a call, and what its requests ask for: its sampling and the overrides."""
        if caller == "generate" and "seed" in overrides:
            raise ValueError("generate: takes seeds=, one for all or one per prompt, not seed=")
        unknown = sorted(overrides.keys() - ({*CONFIG_FIELDS, *SAMPLING_FIELDS} - {"seed"}))
        if unknown:
            raise ValueError(f"{caller}: there is no field {unknown[0]} in EAGLEConfig or SamplingParams")
        of_config = {name: value for name, value in overrides.items() if name in CONFIG_FIELDS}
        config = replace(self.config, **of_config) if of_config else self.config
        policy = overrides.get("accept_policy", config.accept_policy)
        if policy != config.accept_policy:
            raise ValueError(
                f"{caller}: accept_policy must be 'simulate' where simulated_accept_length or simulated_accept_rates "
                f"is given, here or to the engine, got {policy!r}"
            )
        self.session.check(config)
        return config, config.sampling | {name: overrides[name] for name in overrides.keys() - of_config.keys()}


def _read_config(config: Any) -> EAGLEConfig:
    if not (config is None or isinstance(config, EAGLEConfig)):
        raise ValueError(f"EAGLEInference: config must be None or an EAGLEConfig, got {config!r}")
    return config or EAGLEConfig()
