"""A model by hand: forward passes over a prefix that grows and is cut back, in pages of the engine's own pool."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from eagle_kernels.engine.batch.kv_pool import KVPool, PrefillAttend
from eagle_kernels.engine.models.protocol import TargetModel
from eagle_kernels.engine.models.transformers_target import TransformersTarget

_PAGE_SIZE = 16


class Cache:
    """The keys and values of one sequence's first `length` tokens: `cache[layer]` is (key, value) [1, Hkv, length, D].

    Caches of one sequence share a pool until two of them go on differently: the second one gets a pool of its own, so
    that no cache changes.
    """

    def __init__(self, target: TargetModel, num_pages: int):
        self.target, self.num_pages, self.length, self._filled = target, num_pages, 0, [0]
        self.pool = KVPool(target.kv_shape, num_pages, _PAGE_SIZE, target.dtype, target.device)

    def __len__(self) -> int:
        return len(self.pool.k_cache)

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        caches = (self.pool.k_cache[layer], self.pool.v_cache[layer])
        key, value = (cache.flatten(0, 1)[: self.length].transpose(0, 1)[None] for cache in caches)
        return key, value

    def cut(self, length: int) -> Cache:
        """The same with its first `length` tokens."""
        made = copy.copy(self)
        made.length = length
        return made

    def longer(self, count: int) -> Cache:
        """One with room for `count` tokens more, which are counted already."""
        made = self.cut(self.length)
        if self.length < self._filled[0]:  # a longer one holds something there
            made = Cache(self.target, self.num_pages)
            pages = slice(-(-self.length // _PAGE_SIZE))
            made.pool.k_cache[:, pages] = self.pool.k_cache[:, pages]
            made.pool.v_cache[:, pages] = self.pool.v_cache[:, pages]
        made.length = made._filled[0] = self.length + count
        return made


class ModelWrapper:
    """Forward, cache length and cutting back of a model of transformers, whose weights attend through the pool here, or
    of any `TargetModel`. device: None leaves it where it is; max_length: most tokens of a sequence."""

    def __init__(self, model: Any, tokenizer: Any = None, device: Any = None, max_length: int = 2048):
        model = model if device is None or not hasattr(model, "to") else model.to(device)
        self.target: TargetModel = model if hasattr(model, "kv_shape") else TransformersTarget(model)
        self.model = model.model if isinstance(model, TransformersTarget) else model
        self.tokenizer, self.device, self.vocab_size = tokenizer, self.target.device, self.target.vocab_size
        self.max_length = min(max_length, self.target.max_length)
        self.param_count, self.memory_footprint_mb = _sizes(self.model)
        self.eos_token_ids = _eos_token_ids(self.model, tokenizer)
        self.eos_token_id = next(iter(self.eos_token_ids), None)

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, past_key_values: Cache | None = None, use_cache: bool = True
    ) -> tuple[Tensor, Cache | None]:
        """Logits [1, S, V] of input_ids [1, S] behind the cache, and the cache with them in it."""
        cache = past_key_values or Cache(self.target, -(-self.max_length // _PAGE_SIZE))
        start, count = cache.length, _count_tokens(input_ids, self.max_length - cache.length, self.vocab_size)
        cache, positions = cache.longer(count), torch.arange(start, start + count, device=self.device)[None]
        pages = torch.arange(cache.num_pages, dtype=torch.int32, device=self.device)[None]
        attend = PrefillAttend(cache.pool, pages, [(start, count)])
        logits = self.target.forward(input_ids.to(self.device), positions, attend).logits
        return logits, cache if use_cache else None

    def truncate_cache(self, past_key_values: Cache, keep_length: int) -> Cache:
        """Its first keep_length tokens; it stays as it is, whatever comes behind the cut."""
        if not 0 <= keep_length <= past_key_values.length:
            rule = f"lie in 0..{past_key_values.length}, the length of the cache"
            raise ValueError(f"ModelWrapper.truncate_cache: keep_length must {rule}, got {keep_length}")
        return past_key_values.cut(keep_length)

    get_cache_length = staticmethod(lambda cache: 0 if cache is None else cache.length)
    reset_cache = staticmethod(lambda: None)

    def __repr__(self) -> str:
        size = f"{self.param_count / 1e6:.1f}M parameters, {self.memory_footprint_mb:.0f} MB"
        return f"ModelWrapper({type(self.model).__name__}, {size}, vocabulary {self.vocab_size}, {self.device})"


def _count_tokens(input_ids: Tensor, room: int, vocab_size: int) -> int:
    shape = list(input_ids.shape)
    if len(shape) != 2 or shape[0] != 1 or not 1 <= shape[1] <= room:
        raise ValueError(
            f"ModelWrapper.forward: input_ids must be [1, S] with S in 1..{room}, what max_length and the cache leave, "
            f"got shape {shape}"
        )
    lowest, highest = int(input_ids.min()), int(input_ids.max())
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"ModelWrapper.forward: input_ids must lie in 0..{vocab_size - 1}, got {wrong}")
    return shape[1]


def _sizes(model: Any) -> tuple[int, float]:
    """Parameters, those of packed weights counted one by one, and MB of all that is held."""
    parameters = list(model.parameters()) if hasattr(model, "parameters") else []
    held = [*parameters, *(model.buffers() if parameters else ())]
    is_theirs = hasattr(model, "num_parameters")
    count = model.num_parameters() if is_theirs else sum(tensor.numel() for tensor in parameters)
    return count, sum(tensor.numel() * tensor.element_size() for tensor in held) / 1e6


def _eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Those that `generate` of transformers ends with; else the tokenizer's."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ids is None:
        ids = getattr(tokenizer, "eos_token_ids", None) or getattr(tokenizer, "eos_token_id", None)
    return () if ids is None else tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
