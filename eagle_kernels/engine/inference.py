"""`EAGLEInference`: speculative generation with any target and draft that keep the protocol."""

from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from .config import EAGLEConfig
from .kv_pool import KVPool, PromptAttend
from .models.causal_draft import CausalDraft
from .models.loading import load_draft, load_target, read_eos_token_ids
from .models.protocol import DraftModel, TargetModel
from .output import GenerationOutput, GenerationStats, TokenEvent
from .requests import Prompts, Seeds, read_max_new_tokens, read_prompts, read_seeds
from .step import BatchState, Sampling, Stepper
from .timing import PhaseTimer, synchronize


class EAGLEInference:
    """Generates text with a target model, faster: a draft proposes token trees, the target verifies them.

    The text is the target's own. Greedy: the tokens of plain decoding. Sampling: drawn with the noise of plain
    decoding, so with one seed the text is the same with and without speculation wherever the target's logits do not
    depend on how many rows are computed together (fp32 in practice; in bf16 a near-tie may part them).

    draft_model   an EAGLE head or any `DraftModel`; a plain language model (`TargetModel`) drafts without features
    target_model  any `TargetModel` (`engine/models/protocol.py`)
    config        tree, sampling, limits
    device        where both models already are; None: the target's
    """

    def __init__(
        self,
        draft_model: DraftModel | TargetModel,
        target_model: TargetModel,
        config: EAGLEConfig | None = None,
        device: str | torch.device | None = None,
    ):
        self.target = target_model
        self.draft = draft_model if hasattr(draft_model, "token_shift") else CausalDraft(draft_model)
        self.config = config or EAGLEConfig()
        self.device = target_model.device
        if device is not None and not _is_same_device(torch.device(device), self.device):
            raise ValueError(f"EAGLEInference: device must be where the models are, on {self.device}, got {device}")
        for name, is_same in (("device", _is_same_device), ("dtype", operator.eq)):
            of_draft, of_target = getattr(self.draft, name, None), getattr(target_model, name)
            if of_draft is not None and not is_same(of_draft, of_target):
                raise ValueError(f"EAGLEInference: the draft's {name} {of_draft} is not the target's {of_target}")
        if hasattr(self.draft, "bind"):
            self.draft.bind(target_model)
        if self.draft.vocab_size != target_model.vocab_size:
            raise ValueError(
                f"EAGLEInference: the draft's vocabulary of {self.draft.vocab_size} tokens is not the target's "
                f"{target_model.vocab_size}"
            )
        self._check_topk(self.config)
        if target_model.dtype == torch.float32 and self.device.type == "cuda" and _rounds_fp32_matmuls():
            warnings.warn(
                "EAGLEInference: torch rounds the inputs of fp32 matmuls (TF32 or less), so speculative and plain text "
                "may part; torch.set_float32_matmul_precision('highest') keeps them together",
                stacklevel=2,
            )
        self._plain_step_ms: dict[int, float] = {}

    @classmethod
    def from_pretrained(
        cls,
        draft: str | Path,
        target: str | Path,
        config: EAGLEConfig | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> EAGLEInference:
        """Loads both model folders (Hugging Face layout) onto `device`; end tokens come from the target's folder."""
        target_model = load_target(target, device, dtype)
        config = config or EAGLEConfig()
        if config.eos_token_ids is None:
            config = replace(config, eos_token_ids=read_eos_token_ids(target))
        return cls(load_draft(draft, target_model, device, dtype), target_model, config, device)

    def generate(
        self,
        input_ids: Prompts,
        max_new_tokens: int = 128,
        *,
        seeds: Seeds = None,
        speculative: bool = True,
        **overrides,
    ) -> GenerationOutput:
        """Generates up to `max_new_tokens` tokens per prompt; unpacks as `output_ids, stats`.

        input_ids    one prompt ([L] ids) or several (a list of lists, or a tensor or array [B, L]); lengths may differ
        seeds        one for all or one per prompt; None: fresh ones from torch's generator, returned in stats.seeds
        speculative  False: plain decoding on the same code path and pool
        overrides    any `EAGLEConfig` field for this call, e.g. temperature=0.8
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
        **overrides,
    ) -> TokenStream:
        """As `generate`, but an iterator of `TokenEvent` that yields tokens as they are committed.

        `.output()` of the exhausted iterator is what `generate` returns.
        """
        config = replace(self.config, **overrides) if overrides else self.config
        return TokenStream(self, input_ids, max_new_tokens, seeds, speculative, config)

    @torch.inference_mode()
    def next_token_logits(self, token_ids: list[int]) -> Tensor:
        """The target's logits [V] fp32 for the token after these, from one causal pass without drafts."""
        tokens = torch.tensor([token_ids], device=self.device)
        positions = torch.arange(len(token_ids), device=self.device)[None]
        pool = KVPool(self.target.kv_shape, [len(token_ids)], self.config.page_size, self.target.dtype, self.device)
        attend = PromptAttend(pool, 0, len(token_ids))
        return self.target.forward(tokens, positions, attend, last_only=True).logits[0, -1].float()

    def _check_topk(self, config: EAGLEConfig) -> None:
        if config.topk >= self.draft.draft_vocab_size:
            raise ValueError(
                f"EAGLEInference: topk must be smaller than the draft vocabulary of {self.draft.draft_vocab_size} "
                f"tokens, got {config.topk}"
            )


class TokenStream(Iterator[TokenEvent]):
    """The tokens of one generate call, in the order in which they are committed."""

    def __init__(self, engine: EAGLEInference, input_ids, max_new_tokens, seeds, speculative, config):
        self._engine, self._config = engine, config
        self._speculative, self._max_new_tokens = speculative, read_max_new_tokens(max_new_tokens)
        self._prompts, self._is_single = read_prompts(input_ids)
        self._check(speculative)
        self._seeds = read_seeds(seeds, len(self._prompts))
        self._eos = frozenset(config.eos_token_ids or ())
        self._tokens: list[list[int]] = [[] for _ in self._prompts]
        self._stats = GenerationStats(
            num_requests=len(self._prompts),
            num_steps=config.num_steps if speculative else 0,
            num_draft_tokens=config.num_verify_tokens if speculative else 1,
            seeds=self._seeds,
            prompt_tokens=sum(len(prompt) for prompt in self._prompts),
            accepted_per_depth=[0] * (config.num_steps if speculative else 0),
            finish_reasons=[None] * len(self._prompts),
        )
        self._events = self._run()

    def __next__(self) -> TokenEvent:
        return next(self._events)

    def output(self) -> GenerationOutput:
        """Tokens and statistics, whole once the iterator is exhausted."""
        return GenerationOutput(self._tokens[0] if self._is_single else self._tokens, self._stats)

    def _check(self, speculative: bool) -> None:
        engine, config = self._engine, self._config
        limit = engine.target.max_length
        if speculative:
            engine._check_topk(config)
            limit = min(limit, engine.draft.max_length)
        limit = min(limit, config.max_length or limit)
        for index, prompt in enumerate(self._prompts):
            if not prompt:
                raise ValueError(f"generate: prompt {index} is empty; it must hold at least one token")
            worst = max(prompt) if min(prompt) >= 0 else min(prompt)
            if not 0 <= worst < engine.target.vocab_size:
                raise ValueError(
                    f"generate: token ids must lie in 0..{engine.target.vocab_size - 1}, prompt {index} holds {worst}"
                )
            if len(prompt) + self._max_new_tokens > limit:
                raise ValueError(
                    f"generate: prompt {index} of {len(prompt)} tokens + max_new_tokens={self._max_new_tokens} exceed "
                    f"the {limit} tokens that the models and max_length allow"
                )

    def _run(self) -> Iterator[TokenEvent]:
        stepper, stats = self._stepper(), self._stats
        start_s = time.perf_counter()
        with torch.inference_mode():
            state = self._prefill(stepper)
            first_tokens = state.roots.tolist()
        synchronize(self._engine.device)  # the draft's own prefill may still be running
        stats.prefill_time_s = time.perf_counter() - start_s
        live = list(range(len(self._prompts)))
        for request, token in enumerate(first_tokens):
            yield from self._emit(request, [token], accepted=0)
        while live := [request for request in live if stats.finish_reasons[request] is None]:
            start_s = time.perf_counter()
            with torch.inference_mode():
                state.is_live = _as_flags(live, len(self._prompts), self._engine.device)
                result = stepper.step(state)
                tokens, accepted = result.tokens.tolist(), result.accepted.tolist()
            stats.decode_time_s += time.perf_counter() - start_s
            stats.batch_steps += 1
            for request in live:
                self._count(accepted[request])
                yield from self._emit(request, tokens[request][: accepted[request] + 1], accepted[request])
        stats.phase_time_ms = stepper.timer.total_ms()
        if not self._speculative and stats.batch_steps:
            self._engine._plain_step_ms[len(self._prompts)] = stats.step_ms
        stats.plain_step_ms = self._engine._plain_step_ms.get(len(self._prompts))

    def _stepper(self) -> Stepper:
        engine, config = self._engine, self._config
        draft = engine.draft if self._speculative else None
        # a request may overshoot its limit by one step, and a finished one stays where it stopped
        ends = [len(prompt) + self._max_new_tokens + self._stats.num_steps + 1 for prompt in self._prompts]
        target_pool = self._pool(engine.target, [end + self._stats.num_draft_tokens for end in ends])
        draft_pool = None
        if draft is not None:
            tree_rows = max((config.num_steps - 1) * config.topk, config.num_steps + 1)
            draft_pool = self._pool(draft, [end + 1 + tree_rows for end in ends])
        return Stepper(engine.target, draft, config, target_pool, draft_pool, PhaseTimer(engine.device))

    def _pool(self, model: TargetModel | DraftModel, capacities: list[int]) -> KVPool:
        engine = self._engine
        return KVPool(model.kv_shape, capacities, self._config.page_size, engine.target.dtype, engine.device)

    def _prefill(self, stepper: Stepper) -> BatchState:
        device, batch_size = self._engine.device, len(self._prompts)
        config, sampling = self._config, None
        if config.temperature > 0:

            def full(value, is_on, dtype=torch.float32):
                return torch.full((batch_size,), value, dtype=dtype, device=device) if is_on else None

            sampling = Sampling(
                temperature=full(config.temperature, True),
                top_k=full(config.top_k, config.top_k > 0, torch.int64),
                top_p=full(config.top_p, config.top_p < 1),
                min_p=full(config.min_p, config.min_p > 0),
            )
        prompts = [torch.tensor(prompt, device=device) for prompt in self._prompts]
        return stepper.prefill(prompts, torch.tensor(self._seeds, device=device), sampling)

    def _emit(self, request: int, tokens: list[int], accepted: int) -> Iterator[TokenEvent]:
        """Commits tokens until an end token or the limit."""
        text = self._tokens[request]
        for index, token in enumerate(tokens):
            text.append(token)
            self._stats.generated_tokens += 1
            if token in self._eos:
                self._stats.finish_reasons[request] = "eos"
            elif len(text) == self._max_new_tokens:
                self._stats.finish_reasons[request] = "length"
            yield TokenEvent(request, token, index < accepted)
            if self._stats.finish_reasons[request]:
                return

    def _count(self, accepted: int) -> None:
        stats = self._stats
        stats.steps += 1
        stats.drafted += stats.num_draft_tokens - 1
        stats.accepted += accepted
        for depth in range(accepted):
            stats.accepted_per_depth[depth] += 1


def _as_flags(live: list[int], batch_size: int, device: torch.device) -> Tensor:
    flags = torch.zeros(batch_size, dtype=torch.int64)
    flags[live] = 1
    return flags.to(device)


def _is_same_device(one: torch.device, other: torch.device) -> bool:
    """`cuda` is any `cuda:N`."""
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))


def _rounds_fp32_matmuls() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # its newer sibling, torch.backends.cuda.matmul.fp32_precision, was set to something lower
        return True
