"""Types of 8 bits for a target's keys and values (`EAGLEConfig.kv_cache_dtype`), and the scales that they take.

A number in the pool is key / scale, with scale = limit / (the most that the type holds), for each layer and head.
Limits are the target's `kv_limits`, from its checkpoint. Without them fp8 has the scale 1, and int8, which has one step
for all magnitudes, takes the limits of a pass over random tokens. A row of latents has one scale, that of keys, and is
never int8, since its latent and the key beside it differ in magnitude.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime import target as architectures
from ..models.protocol import ModelError, TargetModel
from ..models.running import run_target
from .kv_pool import KVPool, PrefillAttend

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0, torch.int8: 127.0}
_NUM_MEASURED = 256  # tokens
_MARGIN = 1.2  # over what these have


def read_cache_dtype(name: str, target: TargetModel) -> torch.dtype:
    """Returns the type of the pool; raises ValueError where the device or the target's own type does not allow it."""
    if name == "auto":
        return target.dtype
    has_latents = getattr(target.kv_shape, "latent_dim", None) is not None
    if has_latents and name == "int8":
        rule = "kv_cache_dtype must be 'auto' or 'fp8' for a cache of latents (MLA)"
        raise ValueError(f"EAGLEInference: {rule}, got {name!r}")
    if target.dtype == torch.float32:
        rule = f"kv_cache_dtype must be 'auto' for a target in {target.dtype} (dtype='bfloat16' allows others)"
        raise ValueError(f"EAGLEInference: {rule}, got {name!r}")
    if name == "int8":
        return torch.int8
    known = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    kinds = [dtype for dtype in known if architectures.has_fp8(target.device, dtype)]
    if not kinds:
        allowed = "'auto'" if has_latents else "'auto' or 'int8'"
        rule = f"kv_cache_dtype must be {allowed} on {architectures.architecture(target.device)}, without fp8"
        raise ValueError(f"EAGLEInference: {rule}, got {name!r}")
    return kinds[0]


def make_target_pool(
    target: TargetModel, num_pages: int, page_size: int, dtype: torch.dtype, limits: Tensor | None
) -> KVPool:
    """Returns a pool of this type; limits: those of `kv_limits_of`."""
    scales = _scales(target, dtype, limits)
    return KVPool(target.kv_shape, num_pages, page_size, dtype, target.device, scales)


def _scales(target: TargetModel, dtype: torch.dtype, limits: Tensor | None) -> Tensor | None:
    """Returns the scales [2, L, Hkv] fp32 of a pool of this type, or [2, L, 1]; None: it has none, or all are 1."""
    if limits is None or dtype not in _LARGEST:
        return None
    scales = (limits.double() / _LARGEST[dtype]).to(target.device, torch.float32)
    # one scale for all heads where it is one: attention reads narrow heads together then
    return scales[..., :1].contiguous() if bool((scales == scales[..., :1]).all()) else scales


def kv_limits_of(target: TargetModel, dtype: torch.dtype, page_size: int) -> Tensor | None:
    """Returns the largest magnitudes [2, L, Hkv] of keys and values that a pool of this type is made for, or None."""
    if dtype not in _LARGEST:
        return None
    given, shape = getattr(target, "kv_limits", None), (2, *target.kv_shape[:2])
    if given is not None:
        if not (isinstance(given, Tensor) and given.shape == shape and bool(((given > 0) & given.isfinite()).all())):
            got = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise ModelError(f"kv_limits of {type(target).__name__} must be {shape} numbers above 0, got {got}")
        return given
    return _measure(target, page_size) if dtype == torch.int8 else None


@torch.inference_mode()
def _measure(target: TargetModel, page_size: int) -> Tensor:
    """Returns a fifth more than the largest keys and values of random tokens."""
    count = min(_NUM_MEASURED, target.max_length)
    tokens = torch.randint(target.vocab_size, (1, count), generator=torch.Generator().manual_seed(0), device="cpu")
    positions, num_pages = torch.arange(count, device=target.device)[None], -(-count // page_size)
    pool = KVPool(target.kv_shape, num_pages, page_size, target.dtype, target.device)
    table = torch.arange(num_pages, dtype=torch.int32, device=target.device)[None]
    attend = PrefillAttend(pool, table, [(0, count)])
    run_target(target, tokens.to(target.device), positions, attend, last_only=True)
    largest = torch.stack([cache.abs().amax((1, 2, 4)) for cache in (pool.k_cache, pool.v_cache)]).double()
    if not bool(largest.isfinite().all()):
        raise ModelError("EAGLEInference: keys and values of the target must be finite for kv_cache_dtype='int8'")
    return torch.where(largest > 0, largest * _MARGIN, 1.0)
