"""`EAGLEInference`: speculative generation with any target and draft that implement the protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..runtime.values import read_flag, shown
from .benchmark import BenchmarkResult, benchmark
from .config import pairing
from .config.eagle_config import EAGLEConfig
from .config.several_drafts import drafts_by_name, folders_of_drafts, naming_draft, tell_of_smaller_trees
from .generation import Generation
from .models.protocol import DraftModel, TargetModel
from .models.tokenizer import Tokenizer
from .requests.inputs import DEFAULT_SEED, DEFAULT_TOKENS, Asked, Params, Prompts, Seeds, read_prompt
from .requests.names import takes_other_names
from .requests.request import Request, TokenEvent
from .requests.sampling_params import SamplingParams, read_params
from .serve.lock import EngineLock
from .serve.session import Session
from .serve.warmup import warm_up_call
from .step.plan import Candidate, warn_of_eager_steps
from .step.stepper import Verified


@takes_other_names
class EAGLEInference(Generation):
    """Generates the text of a target model faster: a draft proposes token trees, and the target verifies them.

    The text is the target's own, unless `verify_strategy` is a lossy one: at temperature 0 it equals plain decoding's.
    Sampling uses the same noise as plain decoding, so one seed gives one text, with and without drafts, as long as
    logits do not depend on how many rows are computed together (true of fp32 in practice; bf16 may flip near-ties).

    `generate` returns the whole text; `stream` yields it token by token; `submit`, `step` and `collect` serve requests
    that join and leave between steps. All share one batch and one pool of pages. On the CPU a step uses only
    as many PyTorch threads as the target can keep busy, and restores the number afterwards.

    Args:
        draft_model: An EAGLE head or any `DraftModel`; a plain language model drafts without the target's features.
            None: for methods without a model. Of several, in a list or by name in a dict, adaptive="auto" drafts with
            the fastest, each with its tree as far as it can draft it.
        target_model: Any `TargetModel`. A causal language model from transformers, here or as the draft, is wrapped
            (`TransformersTarget`) and left unchanged.
        config: The tree, sampling and limits; None: `EAGLEConfig()`. A dict has its fields; one with "method" or
            another field that only servers use is read by `EAGLEConfig.from_speculative_config`.
        device: Where both models already are; None: the target's device.
        tokenizer: The target's, for stop strings, `stream_text` and `encode_chat`: a `Tokenizer`; one from transformers
            or the package `tokenizers`, which is wrapped; or a folder with one.
        allow_larger_draft: Whether the draft may be a language model with more weights than the target; refused by
            default, since other projects take the target first.

    Attributes:
        target, draft, config, device: Those in use. `draft` may wrap the given model, be None, or a tuple of several.

    Raises:
        ValueError: An argument breaks its rule, or models and configuration do not fit.

    Example:
        >>> from eagle_kernels.engine.models.loading import demo_pair
        >>> target, draft = demo_pair()  # a small pair that reads and writes bytes
        >>> config = eagle_kernels.EAGLEConfig(topk=4, num_steps=4)
        >>> engine = eagle_kernels.EAGLEInference.from_pretrained(draft, target, config, device="cpu")
        >>> "".join(engine.stream_text("import os\\n\\ndef walk(", 16))
        'self, size, walk'
    """

    def __init__(
        self, draft_model: DraftModel | TargetModel | Sequence[Any] | Mapping[str, Any] | None,
        target_model: TargetModel,
        config: EAGLEConfig | Mapping[str, Any] | None = None, device: str | torch.device | None = None,
        tokenizer: Any = None, *, allow_larger_draft: bool = False,
    ):  # fmt: skip
        target, self._config = pairing.as_target(target_model, pairing.read_config(config))
        config, given, drafts = self.config, drafts_by_name(draft_model), []
        for name, model in given.items():
            with naming_draft(name, len(given) > 1):
                drafts.append(pairing.as_draft(model))
        self.session = Session(target, drafts, list(given), tokenizer)
        self.session.check(config)
        pairing.check_device(device, target)
        read_flag("EAGLEInference: allow_larger_draft", allow_larger_draft)
        for name, draft in zip(given, drafts):
            with naming_draft(name, len(given) > 1):
                pairing.bind_draft(draft, target, allow_larger_draft)
        self.session.check_trees(config)
        tell_of_smaller_trees(config, drafts, list(given))
        warn_of_eager_steps(target, drafts, config)
        pairing.warn_of_rounding(target)

    @classmethod
    def from_pretrained(
        cls, draft_model: str | Path | Sequence[str | Path] | None, target_model: str | Path,
        config: EAGLEConfig | Mapping[str, Any] | None = None, *, device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None, check_weights: bool = True, tokenizer: Any = None,
        allow_larger_draft: bool = False,
    ) -> EAGLEInference:  # fmt: skip
        """Loads an engine from two model folders in Hugging Face layout.

        Args:
            draft_model: The folder of an EAGLE or Medusa head, of next-token modules, or of a smaller language model
                with the target's tokenizer; its contents decide how it drafts. Several drafts, in a list of folders or
                a folder of theirs, are all loaded, and adaptive="auto" chooses among them. None: no model, or with
                method="mtp" the target's own folder, where published targets keep their modules.
            target_model: The target's folder, with the end tokens and, if there is one, the tokenizer.
            config: As for the class; "model" in the fields of a server's `--speculative-config`, such as
                {"method": "mtp", "model": folder}, is the draft if draft_model is None.
            device: As for the class, but None means the GPU if there is one, else the CPU.
            dtype: The type of the weights, such as "bfloat16"; "auto": that of the target's config.json; None: float32,
                but bfloat16 with keys and values in 8 bits, and on a GPU with quantised weights.
            check_weights: As for `load_target`.
            tokenizer: As for the class; None: that of the target's folder.
            allow_larger_draft: As for the class.

        Raises:
            ValueError: As for the class; its subclass `ModelError` if a folder does not hold such a model.
        """
        folder, config = pairing.read_pair(draft_model, config)
        several = folders_of_drafts(folder)
        placing = device, dtype, check_weights
        drafts, target, config = pairing.load_pair(folder, target_model, config, *placing, several)
        draft = dict(zip(several, drafts)) if several else next(iter(drafts), None)
        engine = cls(draft, target, config, tokenizer=tokenizer, allow_larger_draft=allow_larger_draft)
        if tokenizer is None:
            engine.session.load_tokenizer(target_model)
        return engine

    def submit(self, prompt: Prompts, params: SamplingParams | Mapping[str, Any] | None = None) -> Request:
        """Adds a request, which joins at the next `step`; one that can never run is returned finished, with `error`.

        Args:
            prompt: [L] token ids, or a text.
            params: How the request samples and ends; None: the configuration's sampling and 128 tokens.

        Raises:
            ValueError: An argument breaks its rule, or the configuration cannot serve these params.
            RuntimeError: As for `generate`.

        Example:
            >>> request = engine.submit(prompt, eagle_kernels.SamplingParams(max_new_tokens=4))
            >>> while engine.has_work:  # between steps a server may submit and abort requests
            ...     events = engine.step()
            >>> request
            Request(id=0, 20 prompt tokens, 4 new tokens, finish_reason='length')
        """
        prompt = read_prompt(prompt, "submit: prompt", self.session.tokenizer_for)
        params = None if params is None else read_params(params, "submit: params")
        return self.session.submit(prompt, params, self.config)

    def step(self) -> list[TokenEvent]:
        """Advances all requests; returns the tokens of submitted ones that became known since the last call."""
        return self.session.step("step")

    def collect(self) -> None:
        """Steps until all submitted requests have ended, and discards their events; each `Request` holds its tokens."""
        self.lock.refuse("collect")
        while self.has_work:
            self.session.step("collect")

    def abort(self, request: Request) -> None:
        """Ends a submitted request; its row and pages are freed at once, or after the step if one is running.

        Raises:
            ValueError: An argument breaks its rule.
        """
        if not isinstance(request, Request):
            raise ValueError(f"abort: request must be what submit returned, got {shown(request)}")
        self.session.abort(request)

    def benchmark(
        self, prompts: Prompts, max_new_tokens: Asked = DEFAULT_TOKENS, *, sampling_params: Params = None,
        batch_size: int = 1, seeds: Seeds = DEFAULT_SEED, progress: bool | None = None, **overrides: Any
    ) -> BenchmarkResult:  # fmt: skip
        """Decodes the prompts with and without speculation, and compares speed, acceptance and latencies.

        The batch must be empty. Suffix trees start empty, and forget these requests afterwards.

        Args:
            prompts, max_new_tokens, sampling_params, seeds: As for `generate`.
            batch_size: Prompts decoded together; max_batch is raised to it.
            progress: Whether to show a bar; None: only if stderr is a terminal.
            overrides: As for `generate`.

        Raises:
            ValueError: As for `generate`; also if a whole batch does not fit into the pools.
            RuntimeError: The batch is not empty.
        """
        asked = max_new_tokens, sampling_params
        return benchmark(self.session, self.config, prompts, *asked, batch_size, seeds, progress, overrides)

    def warmup(
        self, *params: SamplingParams, speculative: bool = True, most_requests: int | None = None, **overrides: Any
    ) -> None:
        """Compiles and captures what requests like `params` will need, so that none of their steps has to.

        Args:
            params: Kinds of requests, which may later arrive in any mixture. Without any: greedy, sampled, and sampled
                with filters, each with and without logprobs, as far as `verify_strategy` serves them; not those with
                penalties, min_new_tokens or top_logprobs. `warmup(SamplingParams())` makes a sixth of the graphs, those
                for greedy requests.
            speculative, overrides: As for `generate`. Overrides that name sampling prepare only for such calls.
            most_requests: Most requests at once; None: max_batch.

        Raises:
            ValueError: An argument breaks its rule.
            RuntimeError: The batch is not empty.
        """
        warm_up_call(self.session, self.config, params, speculative, most_requests, overrides)

    def workspace_bytes(self, config: EAGLEConfig | Mapping[str, Any] | None = None) -> dict[str, int]:
        """Returns the bytes that a configuration (None: the engine's) needs in addition to the weights.

        The keys are kv_cache, rows (state of the batch), step (the largest tensors of a step) and total.

        Raises:
            ValueError: An argument breaks its rule.
        """
        return self.session.workspace_bytes(self.config if config is None else pairing.read_config(config))

    def forget_prefixes(self) -> None:
        """Forgets the cached keys of earlier prompts; call it after changing a model's weights."""
        self.session.forget_prefixes()

    def next_token_logits(self, token_ids: Prompts) -> Tensor:
        """Returns the target's logits, [V] fp32, for the token after `token_ids` ([L], or a text), in one causal pass.

        Raises:
            ValueError: An argument breaks its rule.
        """
        prompt = read_prompt(token_ids, "next_token_logits: token_ids", self.session.tokenizer_for)
        return self.session.next_token_logits(prompt, self.config)

    config: EAGLEConfig = property(attrgetter("_config"))
    target: TargetModel = property(attrgetter("session.target"))
    device: torch.device = property(attrgetter("session.device"))

    @property
    def draft(self) -> DraftModel | tuple[DraftModel, ...] | None:
        """The draft model in use, or a tuple of several; None without one."""
        drafts = self.session.drafts
        return drafts if len(drafts) > 1 else next(iter(drafts), None)

    @property
    def candidates(self) -> list[Candidate]:
        """The kinds of steps that requests of late chose from, plain decoding first; none before the first request."""
        return self.session.candidates

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer; raises ValueError if there is none, and says why."""
        return self.session.tokenizer_for("the property tokenizer needs")

    @property
    def lock(self) -> EngineLock:
        """The lock that each step holds, used like a `threading.RLock`; raises RuntimeError in a forked process.

        While another thread holds it, no request advances. From inside a step, its own thread may call only `submit`
        and `abort`.
        """
        return self.session.lock

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or `step` has something to return."""
        return self.session.has_work

    @property
    def is_speculating(self) -> bool:
        """Whether steps may have drafts. May be set at any time; while it is False, requests decode plainly."""
        return self.session.is_speculating

    @is_speculating.setter
    def is_speculating(self, value: bool) -> None:
        self.session.is_speculating = read_flag("EAGLEInference: is_speculating", value)

    @property
    def on_tree(self) -> Callable[[Verified], None] | None:
        """The function that every step calls with its trees and the verdict on them (`Verified`), or None.

        Set it while no request runs. Steps that call it run without CUDA graphs; graphs captured before are kept.
        """
        return self.session.on_tree

    @on_tree.setter
    def on_tree(self, function: Callable[[Verified], None] | None) -> None:
        if not (function is None or callable(function)):
            raise ValueError(f"EAGLEInference: on_tree must be None or a callable, got {shown(function)}")
        self.session.watch(function)

    def __repr__(self) -> str:
        target = type(self.target).__name__
        draft = " or ".join(type(model).__name__ for model in self.session.drafts) or None
        names = ("method", "topk", "num_steps", "num_verify_tokens", "temperature")
        told = ", ".join(f"{name}={getattr(self.config, name)!r}" for name in names)
        return f"EAGLEInference(target={target}, draft={draft}, {told}, device={self.device})"
