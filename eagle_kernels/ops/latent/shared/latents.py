"""Latents as attention reads them, and checks of the arguments.

A slot of the cache holds one row for all heads: a latent, and after it a key that rotary embedding has turned. Absorbed
queries are such rows as well, so the logit of a head is the product of two rows, and its value is the latent itself:
attention with one KV head, whose values are the first elements of its keys (`batch.Shape.VALUE_DIM`).
"""

from __future__ import annotations

import torch

from ....primitives.fp8 import FP8, check_target
from ....primitives.paging import check_row_strides
from ....runtime import check
from ...attention.shared.attention import Output
from ...attention.shared.paged_cache import check_page_table

MIN_LATENT_DIM, MAX_LATENT_DIM = 4, 512
MAX_ROPE_DIM = 128


def check_latents(args: check.Arguments, query: torch.Tensor, batch: str | int) -> Output:
    """Checks what all ops of attention over latents take beside their rows; returns what they give.

    query: checked, with D bound. batch: the axis or number of requests.
    """
    check_row_strides(args, "query", query, query.dim() - 2)
    latent_dim, width = args.integer("latent_dim", MIN_LATENT_DIM, MAX_LATENT_DIM), args.size("D")
    if not latent_dim <= width <= latent_dim + MAX_ROPE_DIM:
        most = latent_dim + MAX_ROPE_DIM
        args.fail("query", f"have D in {latent_dim}..{most}, of which latent_dim = {latent_dim} are the latent", width)
    check_pool(args, (query.dtype,) if query.dtype == torch.float32 else (query.dtype, *FP8))
    check_target(args.op, "latent_cache", args.values["latent_cache"])
    check_scale(args)
    check_page_table(args, batch, "latent_cache")
    if args.number("sm_scale") <= 0:
        args.fail("sm_scale", "be above 0", args.values["sm_scale"])
    if args.values["window"] is not None:
        args.integer("window", 1, 2**31 - 1)
    output = args.spec((*query.shape[:-1], latent_dim), query.dtype)
    return Output(output, args.spec(tuple(query.shape[:-1]), torch.float32))


def check_pool(args: check.Arguments, dtypes) -> torch.Tensor:
    """Checks latent_cache [num_pages, page_size, D]."""
    cache = args.tensor("latent_cache", ("num_pages", "page_size", "D"), dtypes, contiguous=1)
    check_row_strides(args, "latent_cache", cache, 2)
    extent = cache.shape[-1]
    for stride, size in sorted(zip(cache.stride()[:-1], cache.shape[:-1])):
        if size > 1 and stride < extent:
            args.fail("latent_cache", "have slots that do not overlap", f"strides {list(cache.stride())}")
        extent += max(size - 1, 0) * stride
    return cache


def check_scale(args: check.Arguments) -> None:
    """Checks latent_scale, one factor of all that an 8-bit cache holds."""
    scale, cache = args.tensor("latent_scale", (1,), (torch.float32,), optional=True), args.values["latent_cache"]
    if scale is not None and cache.dtype not in FP8:
        args.fail("latent_scale", "come with a cache of 8-bit floats", cache.dtype)


def as_attention(values: dict) -> dict:
    """Returns the arguments of attention over keys that are values too, for checked arguments of this family."""
    return values | {
        "k_cache": values["latent_cache"].unsqueeze(2), "v_cache": None, "sinks": None, "soft_cap": None,
        "k_scale": values["latent_scale"], "v_scale": values["latent_scale"],
    }  # fmt: skip
