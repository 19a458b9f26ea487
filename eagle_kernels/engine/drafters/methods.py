"""Drafters, and the readers of their models, by the names of the methods."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..config.eagle_config import EAGLEConfig
from ..models.protocol import DraftModel
from .hybrid import HybridDrafter
from .mixed import MixedDrafter
from .model_drafter import ModelDrafter
from .model_reader import ModelReader
from .module_reader import ModuleReader
from .naive import NaiveDrafter
from .ngram import NgramDrafter
from .protocol import Drafter, Reader
from .sampled_drafter import SampledDrafter
from .suffix import SuffixDrafter


def make_reader(config: EAGLEConfig, model: DraftModel | None) -> Reader | None:
    """Makes the reader that all drafters of a configuration share, or None if they need no model."""
    if model is None or not config.needs_model:
        return None
    trees = [tree for _, tree in config.trees if tree is not None] or [config]
    num_levels, num_steps = (max(sizes) for sizes in zip(*((tree.num_model_levels, tree.num_steps) for tree in trees)))
    if getattr(model, "num_modules", 1) > 1 and num_levels > 1:
        return ModuleReader(model, num_levels, num_steps)
    return ModelReader(model, num_levels, max(tree.topk for tree in trees), num_steps)


def make_drafter(config: EAGLEConfig, reader: Reader | None, device: torch.device) -> Drafter:
    """Makes the drafter of a configuration with one tree; reader: for methods with a model."""
    if len(config.methods) > 1:
        return MixedDrafter([_part(name, config, reader, device) for name in config.methods])
    if config.method == "naive":
        return NaiveDrafter()
    if config.method == "ngram":
        return NgramDrafter(config)
    if config.method == "suffix":
        return SuffixDrafter(config)
    if config.method == "hybrid":
        return HybridDrafter(reader, config)
    if config.verify_strategy == "rejection":
        return SampledDrafter(reader, config, device)
    return ModelDrafter(reader, config)


def _part(name: str, config: EAGLEConfig, reader: Reader | None, device: torch.device) -> Drafter:
    """Makes the drafter of one of several methods."""
    if name == "naive":
        return NaiveDrafter(config)
    levels = config.num_model_steps if name == "hybrid" else None
    own = replace(config, method=name, num_model_steps=levels, num_draft_tokens=config.num_verify_tokens)
    return make_drafter(own, reader, device)
