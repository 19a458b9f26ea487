"""`EAGLEConfig` and `EAGLEInference` as AITER names and counts them, around our engine (see `aiter.py`)."""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..engine import EAGLEConfig as EngineConfig
from ..engine import EAGLEInference as Engine
from ..engine import GenerationStats
from .sgl_kernel import TreeMaskMode, layout

logger = logging.getLogger(__name__)


@dataclass
class EAGLEConfig:
    """Holds the fields of AITER's configuration, with AITER's defaults; None turns a filter off.

    num_draft_tokens  nodes verified per step, root included, kept as given (AITER's code replaces it by the size of
                      the full topk-ary tree)
    device, dtype     where the models must be, and in which dtype; None: any. Models are checked, never moved
    """

    topk: int = 4
    num_steps: int = 3
    num_draft_tokens: int = 8
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    tree_mask_mode: TreeMaskMode = TreeMaskMode.FULL_MASK
    device: str | torch.device | None = None
    dtype: torch.dtype | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        self.for_engine()  # the engine's configuration checks every value

    def for_engine(self) -> EngineConfig:
        """Returns the same choices as our engine's configuration."""
        return EngineConfig(
            topk=self.topk, num_steps=self.num_steps, num_draft_tokens=self.num_draft_tokens,
            temperature=self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p, top_k=0 if self.top_k is None else self.top_k,
            tree_mask_mode=layout(self.tree_mask_mode), eos_token_ids=(),
        )  # fmt: skip


class EAGLEInference:
    """Generates through AITER's interface. Takes the models that `eagle_kernels.EAGLEInference` takes, causal language
    models from transformers included.

    Unlike AITER's class it takes batches and ragged prompts (as lists), stops at exactly max_new_tokens and verifies
    sampled text by sampling.
    """

    def __init__(self, draft_model, target_model, config: EAGLEConfig | None = None, device=None):
        self.config = EAGLEConfig() if config is None else config
        if not isinstance(self.config, EAGLEConfig):
            raise ValueError(f"EAGLEInference: config must be None or AITER's EAGLEConfig, got {config!r}")
        device = self.config.device if device is None else device
        self.engine = Engine(draft_model, target_model, self.config.for_engine(), device)
        dtype = self.engine.target.dtype
        if self.config.dtype not in (None, dtype):
            raise ValueError(f"EAGLEInference: dtype must be that of the models, {dtype}, got {self.config.dtype}")

    def generate(
        self, input_ids, max_new_tokens: int = 100,
        temperature: float | None = None, top_p: float | None = None, top_k: int | None = None,
        return_stats: bool = True,
    ) -> tuple[torch.Tensor | list[list[int]], dict[str, float] | None]:  # fmt: skip
        """Continues prompts [B, L]; returns [B, L + max_new_tokens] on their device, and the statistics.
        temperature, top_p, top_k override the configuration for this call. Ragged prompts give a list of lists. The
        statistics' acceptance rates are accepted drafts over num_draft_tokens a step; `speedup_ratio` is accepted
        drafts per target pass, `speedup` the measured one of `GenerationStats` over plain decoding (NaN where no step
        was needed)."""
        given = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        overrides = {name: value for name, value in given.items() if value is not None}
        texts, stats = self.engine.generate(input_ids, max_new_tokens, **overrides)
        statistics = _statistics(stats)
        if self.config.verbose:
            logger.info(
                "generated %(total_tokens_generated)d tokens, acceptance rate %(acceptance_rate).2f", statistics
            )
        return _appended(input_ids, texts), statistics if return_stats else None

    def benchmark(self, test_data: Iterable, max_new_tokens: int = 100) -> dict[str, float]:
        """Returns statistics over all prompts of `test_data`, each an `input_ids`, decoded with and without drafts.
        Rates and ratios are means over the prompts."""
        runs = []
        for input_ids in test_data:
            self.engine.generate(input_ids, max_new_tokens, speculative=False)
            runs.append(self.generate(input_ids, max_new_tokens)[1])
        if not runs:
            raise ValueError("benchmark: test_data must hold at least one prompt")
        sums = {name: sum(run[name] for run in runs) for name in runs[0]}
        return {name: value if name.startswith("total_") else value / len(runs) for name, value in sums.items()}


def _statistics(stats: GenerationStats) -> dict[str, float]:
    """Returns our statistics under AITER's names, with its counts."""
    proposed = stats.steps * stats.num_draft_tokens
    rate = stats.accepted / proposed if proposed else 0.0
    return {
        "total_tokens_generated": stats.generated_tokens,
        "total_draft_tokens": stats.drafted,
        "total_accepted_tokens": stats.accepted,
        "total_target_forward": stats.batch_steps,
        "total_draft_forward": stats.batch_steps * stats.num_steps,
        "mean_acceptance_rate": rate,
        "acceptance_rate": rate,
        "speedup_ratio": stats.accepted / stats.batch_steps if stats.batch_steps else 0.0,
        "speedup": math.nan if stats.speedup is None else stats.speedup,
    }


def _appended(input_ids, texts: list) -> torch.Tensor | list[list[int]]:
    """Returns the prompts with their new tokens, in the form of the prompts."""
    if isinstance(input_ids, torch.Tensor):
        return torch.cat([input_ids, torch.tensor(texts, dtype=input_ids.dtype, device=input_ids.device)], dim=-1)
    is_single = texts and not isinstance(texts[0], list)
    prompts, texts = ([input_ids], [texts]) if is_single else (input_ids, texts)
    whole = [[*map(int, prompt), *text] for prompt, text in zip(prompts, texts)]
    return whole[0] if is_single else whole
