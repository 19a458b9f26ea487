"""Inputs and counts that the benchmarks of attention over latents share."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .inputs import lengths, paged_cache


class LatentHeads(NamedTuple):
    """Query heads of one process, and the sizes of a latent and of the key beside it."""

    query: int
    latent: int = 512
    rope: int = 64

    def __str__(self) -> str:
        return f"{self.query}/{self.latent}+{self.rope}"


# DeepSeek-V3 and Kimi-K2 have 128 and 64 heads: all of them, and those of one of eight processes
RANK_HEADS, ALL_HEADS = LatentHeads(16), LatentHeads(128)
SMALL_HEADS = LatentHeads(4, 64, 16)
# before heads are absorbed they have 128 elements beside those that turn
SCALE = (128 + 64) ** -0.5


def make_latents(device, batch_size: int, capacity, page_size: int, heads: LatentHeads, kind: str = "") -> dict:
    """latent_cache and block_table, pages in random order; kind: "float8" for 8-bit latents."""
    values = paged_cache(device, batch_size, capacity, page_size, 1, heads.latent + heads.rope)
    cache = values["k_cache"][:, :, 0]
    scale = {}
    if kind == "float8":
        cache, scale = cache.to(torch.float8_e4m3fn), {"latent_scale": torch.ones(1, device=device)}
    names = {"latent_cache": cache, "block_table": values["block_table"], "latent_dim": heads.latent, "sm_scale": SCALE}
    return names | scale


def make_queries(device, shape: tuple[int, ...], heads: LatentHeads, dtype: torch.dtype) -> torch.Tensor:
    """Queries whose logits spread about as those of a model do."""
    return torch.randn(*shape, heads.query, heads.latent + heads.rope, device=device).to(dtype) * 0.5


def count_latent_bytes(num_keys: int, num_rows: int, heads: LatentHeads, kind: str = "") -> int:
    """Rows of the cache once, queries and outputs."""
    width = heads.latent + heads.rope
    return (1 if kind == "float8" else 2) * num_keys * width + 2 * num_rows * heads.query * (width + heads.latent)


def count_latent_flops(num_pairs: int, heads: LatentHeads) -> int:
    """Both products, for pairs of a row and a key that it may see."""
    return 2 * num_pairs * heads.query * (2 * heads.latent + heads.rope)


def all_lengths(shape: tuple[int, ...], spread: str) -> int:
    """Tokens of all requests."""
    return int(lengths(*shape[:2], spread).sum())


def contiguous_latents(values: dict, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first rows of each request as keys [B, 1, length, D], and the latents in them as values."""
    rows = values["latent_cache"][values["block_table"].long()].flatten(1, 2)[:, None, :length].contiguous()
    return rows, rows[..., : values["latent_dim"]]
