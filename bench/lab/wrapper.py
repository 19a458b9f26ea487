"""A model by hand: forward passes over a prefix that grows and is cut back, in pages of the engine's own pool."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_kernels.engine.batch.kv_pool import KVPool, PrefillAttend
from eagle_kernels.engine.models.protocol import TargetModel
from eagle_kernels.engine.models.transformers_target import TransformersTarget

_PAGE_SIZE = 16


class Cache(NamedTuple):
    """The first `length` tokens of one sequence. Caches of one sequence share their pages: after a cut, what a forward
    writes behind it replaces what the longer ones hold there."""

    pool: KVPool
    table: Tensor
    length: int


class ModelWrapper:
    """Forward, cache length and cutting back of a model of transformers, whose weights attend through the pool here, or
    of any `TargetModel`. device: None leaves it where it is; max_length: most tokens of a sequence."""

    def __init__(self, model: Any, tokenizer: Any = None, device: Any = None, max_length: int = 2048):
        model = model if device is None or not hasattr(model, "to") else model.to(device)
        self.target: TargetModel = model if hasattr(model, "kv_shape") else TransformersTarget(model)
        self.model = model.model if isinstance(model, TransformersTarget) else model
        self.tokenizer, self.device, self.vocab_size = tokenizer, self.target.device, self.target.vocab_size
        self.max_length = min(max_length, self.target.max_length)
        self.param_count, self.memory_footprint_mib = _sizes(self.model)
        self.eos_token_ids = _eos_token_ids(self.model, tokenizer)
        self.eos_token_id = next(iter(self.eos_token_ids), None)

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, past_key_values: Cache | None = None, use_cache: bool = True
    ) -> tuple[Tensor, Cache | None]:
        """Logits [1, S, V] of input_ids [1, S] behind the cache, and the cache with them in it."""
        pool, table, start = past_key_values or _new_cache(self.target, self.max_length)
        count = _count_tokens(input_ids, self.max_length - start)
        positions = torch.arange(start, start + count, device=self.device)[None]
        attend = PrefillAttend(pool, table, [(start, count)])
        logits = self.target.forward(input_ids.to(self.device), positions, attend).logits
        return logits, Cache(pool, table, start + count) if use_cache else None

    def truncate_cache(self, past_key_values: Cache, keep_length: int) -> Cache:
        """Its first keep_length tokens; nothing is copied."""
        if not 0 <= keep_length <= past_key_values.length:
            rule = f"lie in 0..{past_key_values.length}, the length of the cache"
            raise ValueError(f"ModelWrapper.truncate_cache: keep_length must {rule}, got {keep_length}")
        return past_key_values._replace(length=keep_length)

    get_cache_length = staticmethod(lambda cache: 0 if cache is None else cache.length)
    reset_cache = staticmethod(lambda: None)
    memory_footprint_mb = property(lambda self: self.memory_footprint_mib * 2**20 / 1e6)

    def __repr__(self) -> str:
        size = f"{self.param_count / 1e6:.1f}M parameters, {self.memory_footprint_mib:.0f} MiB"
        return f"ModelWrapper({type(self.model).__name__}, {size}, vocabulary {self.vocab_size}, {self.device})"


def _new_cache(target: TargetModel, max_length: int) -> Cache:
    num_pages = -(-max_length // _PAGE_SIZE)
    pool = KVPool(target.kv_shape, num_pages, _PAGE_SIZE, target.dtype, target.device)
    return Cache(pool, torch.arange(num_pages, dtype=torch.int32, device=target.device)[None], 0)


def _count_tokens(input_ids: Tensor, room: int) -> int:
    shape = list(input_ids.shape)
    if len(shape) != 2 or shape[0] != 1 or not 1 <= shape[1] <= room:
        raise ValueError(
            f"ModelWrapper.forward: input_ids must be [1, S] with S in 1..{room}, what max_length and the cache leave, "
            f"got shape {shape}"
        )
    return shape[1]


def _sizes(model: Any) -> tuple[int, float]:
    """Parameters, those of packed weights counted one by one, and MiB of all that is held."""
    parameters = list(model.parameters()) if hasattr(model, "parameters") else []
    held = [*parameters, *(model.buffers() if parameters else ())]
    is_theirs = hasattr(model, "num_parameters")
    count = model.num_parameters() if is_theirs else sum(tensor.numel() for tensor in parameters)
    return count, sum(tensor.numel() * tensor.element_size() for tensor in held) / 2**20


def _eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Those that `generate` of transformers ends with; else the tokenizer's."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ids is None:
        ids = getattr(tokenizer, "eos_token_ids", None) or getattr(tokenizer, "eos_token_id", None)
    return () if ids is None else tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
