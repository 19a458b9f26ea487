"""The drafters by their names."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..config import EAGLEConfig
from ..models.protocol import DraftModel
from .hybrid import HybridDrafter
from .mixed import MixedDrafter
from .model_drafter import ModelDrafter
from .naive import NaiveDrafter
from .ngram import NgramDrafter
from .protocol import Drafter
from .sampled_drafter import SampledDrafter
from .suffix import SuffixDrafter


def make_drafter(config: EAGLEConfig, model: DraftModel | None, device: torch.device) -> Drafter:
    """Of a configuration with one tree; model: where its method needs one."""
    if len(config.methods) > 1:
        return MixedDrafter([_part(name, config, model, device) for name in config.methods])
    if config.method == "naive":
        return NaiveDrafter()
    if config.method == "ngram":
        return NgramDrafter(config)
    if config.method == "suffix":
        return SuffixDrafter(config)
    if config.method == "hybrid":
        return HybridDrafter(model, config)
    if config.verify_strategy == "rejection":
        return SampledDrafter(model, config, device)
    return ModelDrafter(model, config)


def _part(name: str, config: EAGLEConfig, model: DraftModel | None, device: torch.device) -> Drafter:
    """One of several methods."""
    if name == "naive":
        return NaiveDrafter(config)
    levels = config.num_model_steps if name == "hybrid" else None
    own = replace(config, method=name, num_model_steps=levels, num_draft_tokens=config.num_verify_tokens)
    return make_drafter(own, model, device)
