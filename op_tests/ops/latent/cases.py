"""Latents for the tests: what the cases of attention give, with one KV head whose keys are values too."""

import torch

from ..attention.cases import FLOAT8, fp8_of

# (latents, keys beside them)
SIZES = ((512, 64), (256, 32), (128, 64), (64, 16))


def as_latents(values: dict, latent_dim: int, sm_scale: float = 0.1) -> dict:
    """Arguments of attention with one KV head as those of attention over latents."""
    others = {name: value for name, value in values.items() if name not in ("k_cache", "v_cache")}
    return others | {"latent_cache": values["k_cache"][:, :, 0], "latent_dim": latent_dim, "sm_scale": sm_scale}


def with_float8(values: dict, dtype: torch.dtype | None = None, scale: float = 0.5) -> dict:
    """The same with an 8-bit cache, of the type that this device knows unless given."""
    cache = values["latent_cache"]
    scaled = {"latent_cache": cache.nan_to_num().to(dtype or fp8_of(cache.device))}
    return values | scaled | {"latent_scale": torch.tensor([scale], device=cache.device)}


def of_every_dtype_and_size(make):
    """Ahead-of-time cases: `make(latent_dim, rope_dim, dtype)`, for sizes of latents and types of caches."""
    for latent_dim, rope_dim in SIZES:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            yield f"{dtype} {latent_dim}+{rope_dim}", make(latent_dim, rope_dim, dtype)
        for dtype in FLOAT8:
            yield f"{dtype} {latent_dim}+{rope_dim}", with_float8(make(latent_dim, rope_dim, torch.bfloat16), dtype)
