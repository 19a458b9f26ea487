"""Tiles of attention over latents: of how many rows, and of how many keys.

A tile of latents in shared memory serves both products, as keys and as values, for all heads and nodes in its rows. The
sums of 64 rows of 512 columns take half of a multiprocessor's registers, so two groups of four warps have half the
columns each. More rows are further tiles, whose programs read the same latents at the same time, out of the L2 cache.
"""

from __future__ import annotations

import torch

from ....runtime import tuning

# Not timed yet: chosen by registers, shared memory and ptxas's words. See `split_attention`; deterministic calls use
# `ordered.TUNING` instead. The first entry is taken whose from_rows rows (token, head) a request has.
_FEW = {"from_rows": 0, "max_rows": 32, "min_rows": 16, "tile_bytes": 36864, "share_keys": 128, "programs": (1, 1),
        "num_warps": 8, "num_stages": 3}  # fmt: skip
# elements of 8 bits become 16 bits in registers, of which the sums of 64 rows leave too few
_EIGHT_BITS = {"max_rows": 32, "tile_bytes": 36864, "num_stages": 4}
_LARGE = _FEW | {"max_rows": 64, "min_rows": 64, "float8": _EIGHT_BITS | {"min_rows": 32}}
_SMALL = _FEW | {"tile_bytes": 18432, "num_warps": 4, "num_stages": 1}  # 64 KiB of shared memory, warps of 64 threads
TUNING = {
    "default": (_FEW,),
    "sm_90": (
        # products bind: the larger tile needs fewer readings of the queries out of shared memory, and has room for two
        _LARGE | {"from_rows": 65, "tile_bytes": 73728, "num_stages": 2},
        # latents are read by one tile of rows: more of them on their way
        _LARGE | {"from_rows": 33, "num_stages": 4},
        _FEW | {"from_rows": 17, "float8": _EIGHT_BITS},
        # eight warps have eight keys each, so that none multiplies what another does
        _FEW | {"max_rows": 16, "tile_bytes": 73728, "programs": (2, 2), "float8": _EIGHT_BITS | {"max_rows": 16},
                "widest": {"programs": (1, 1)}},
    ),
    "gfx942": (_SMALL,),
    "gfx950": (_SMALL | {"num_stages": 2},),
}  # fmt: skip


def choose_tiles(table: dict, query: torch.Tensor, num_query: int) -> dict:
    """Returns the entry of a tuning table for requests of num_query tokens, at most."""
    num_rows = num_query * query.shape[-2]
    return next(row for row in tuning.row(table, query.device) if num_rows >= row["from_rows"])
