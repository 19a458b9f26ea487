"""Drafters and the readers of their models by the names of the methods; no drafts, and several methods in one batch."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ... import ops
from ..batch.state import CATCH_UP_EVERY, Batch
from ..config.eagle_config import EAGLEConfig
from ..config.several_drafts import fit_trees
from ..models.protocol import DraftModel, TargetModel
from .block_drafter import BlockDrafter, FeatureReader
from .context_reader import ContextReader
from .draft_reader import DraftReader
from .model_drafter import ModelDrafter, SampledDrafter
from .ngram import HybridDrafter, NgramDrafter
from .parallel_reader import ParallelReader
from .protocol import Drafter, Proposal, Reader, root_only, tree_of
from .readers import ModelReader, ModuleReader
from .shared_drafter import SharedDrafter
from .suffix import SuffixDrafter, SuffixFeed

# the fields of a tree that depend on its drafts
_OF_DRAFTS = ("tree_mask", "positions", "retrieve_next_token", "retrieve_next_sibling", "draft_tokens")
# steps of other drafts that a draft may miss before it reads what they brought
SEVERAL_STEPS = 4
# torch.where takes no unsigned words of bit masks on a GPU
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32}


def make_readers(config: EAGLEConfig, target: TargetModel, drafts: Sequence[DraftModel]) -> tuple[DraftReader, ...]:
    """Makes a reader for each draft model, which the drafters share that draft with it; none if they need no model.
    Each has the configuration that `fit_trees` makes."""
    if not config.needs_model:
        return ()
    configs = fit_trees(config, drafts)
    num_steps = max((tree.num_steps for own in configs for tree in _trees_of(own)), default=0)
    # what others draft is missed as well, several tokens a step
    room = CATCH_UP_EVERY if len(drafts) == 1 else max(CATCH_UP_EVERY, SEVERAL_STEPS * (num_steps + 1))
    readers, begin = [], 0
    for number, (model, own) in enumerate(zip(drafts, configs)):
        reader, end = _make_reader(own, model, num_steps), begin + len(model.aux_layers) * target.hidden_size
        reader.num_kept += room - CATCH_UP_EVERY
        readers.append(DraftReader(reader, number, slice(begin, end), room, own))
        begin = end
    return tuple(readers)


def trees_of(
    config: EAGLEConfig, readers: Sequence[DraftReader], takes_rows: bool = True
) -> list[tuple[int | None, EAGLEConfig | None, Reader | None]]:
    """Returns the choices of a step, as `EAGLEConfig.trees_for` does, each with its reader: those of each draft model
    in turn."""
    owners = [(each.config, each.reader) for each in readers] or [(config, None)]
    return [(most, tree, reader) for own, reader in owners for most, tree in own.trees_for(takes_rows)]


def _trees_of(config: EAGLEConfig) -> list[EAGLEConfig]:
    return [tree for _, tree in config.trees if tree is not None] or [config]


def _make_reader(config: EAGLEConfig, model: DraftModel, num_steps: int) -> Reader:
    """Makes the reader of a model. num_steps: the most drafts that a step accepts, whoever makes them."""
    num_levels = max(tree.num_model_levels for tree in _trees_of(config))
    if hasattr(model, "fill_block"):
        return ContextReader(model, num_levels, num_steps)
    if getattr(model, "block_length", 0):
        return FeatureReader(model, num_levels)
    if getattr(model, "mask_token_id", None) is not None and num_levels > 1:
        return ParallelReader(model, num_levels, num_steps)
    if getattr(model, "num_modules", 1) > 1 and num_levels > 1:
        return ModuleReader(model, num_levels, num_steps)
    return ModelReader(model, num_levels, config.most_beams, num_steps)


def make_drafter(
    config: EAGLEConfig, reader: Reader | None, device: torch.device, feed: SuffixFeed | None = None
) -> Drafter:
    """Makes the drafter of a configuration with one tree, with a reader for methods with a model, and a feed for suffix
    decoding; without that it is asked for its sizes alone."""
    if config.share_nodes:
        own = {"share_nodes": False, "mean_draft_tokens": None, "tree_mask_mode": ops.TreeMaskMode.PACKED}
        own["num_draft_tokens"] = config.num_verify_tokens
        shared = (replace(config, method=name, **own) for name in config.methods)
        return SharedDrafter(config, reader, [make_drafter(part, reader, device, feed) for part in shared], device)
    if len(config.methods) > 1:
        parts = []
        for name in config.methods:
            levels = config.num_model_steps if name == "hybrid" else None
            own = replace(config, method=name, num_model_steps=levels, num_draft_tokens=config.num_verify_tokens)
            parts.append(NaiveDrafter(own) if name == "naive" else make_drafter(own, reader, device, feed))
        return MixedDrafter(config, reader, parts)
    if config.method == "naive":
        return NaiveDrafter()
    if config.method == "ngram":
        return NgramDrafter(config)
    if config.method == "suffix":
        return SuffixDrafter(config, feed)
    if config.method == "hybrid":
        return HybridDrafter(reader, config)
    if config.verify_strategy == "rejection":
        return SampledDrafter(reader, config, device)
    if isinstance(reader, (FeatureReader, ParallelReader, ContextReader)):
        return BlockDrafter(reader, config)
    return ModelDrafter(reader, config)


class NaiveDrafter(Drafter):
    """Makes no drafts: a step verifies the root alone, which is plain decoding. The name is FastDeploy's.
    `EAGLEConfig.naive_eagle()` is something else: one draft of an EAGLE head.
    config: where it is one of several methods: its trees are then as large as theirs, but empty below the root."""

    num_steps, num_nodes, num_slots, _config = 0, 1, 1, None

    def __init__(self, config: EAGLEConfig | None = None):
        if config is not None:
            super().__init__(config)

    def propose(self, batch: Batch) -> Proposal:
        if self._config is None:
            return Proposal(root_only(batch.roots, batch.lengths))
        none = batch.roots.new_full((len(batch), self.num_nodes - 1), -1)
        return Proposal(tree_of(batch, none, none, self._config))


class MixedDrafter(Drafter):
    """Lets all methods draft for all rows; each row takes the drafts of its request's method.
    parts: one drafter for each method, with trees of the same size; `BatchState.methods` has the number of each row's.
    A model reads the tokens of all rows, whichever method drafts for them."""

    def __init__(self, config: EAGLEConfig, reader: Reader | None, parts: Sequence[Drafter]):
        super().__init__(config)
        self.reader, self.parts = reader, parts
        self.num_slots = max(part.num_slots for part in parts)
        self.reads_history = any(part.reads_history for part in parts)

    def propose(self, batch: Batch) -> Proposal:
        method = batch.state.methods[batch.rows]
        proposals = [drafter.propose(batch) for drafter in self.parts]
        tree = proposals[0].tree
        for number, proposal in enumerate(proposals[1:], start=1):
            chosen = {
                name: _choose(method == number, getattr(proposal.tree, name), getattr(tree, name))
                for name in _OF_DRAFTS
            }
            tree = tree._replace(**chosen)

        def path_probs() -> Tensor:
            shape, options = tree.retrieve_index[:, 1:].shape, {"dtype": torch.float32, "device": method.device}
            probs = torch.full(shape, float("nan"), **options)
            for number, proposal in enumerate(proposals):
                if proposal.path_probs is not None:
                    probs = _choose(method == number, proposal.path_probs(), probs)
            return probs

        return Proposal(tree, path_probs=path_probs)


def _choose(is_other: Tensor, other: Tensor, tensor: Tensor) -> Tensor:
    """Takes each row of two tensors of B rows, [B, ..] or flat, from `other` where is_other [B], else from `tensor`."""
    dtype = _SIGNED.get(tensor.dtype, tensor.dtype)
    rows = (each.view(dtype).view(len(is_other), -1) for each in (other, tensor))
    return torch.where(is_other[:, None], *rows).view(tensor.dtype).view(tensor.shape)
