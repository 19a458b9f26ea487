"""What several programs find in one row of the vocabulary, handed from one launch to the next: two sums and a draw.

verify_tree_rejection and verify_tree_traversal read rows in rounds. A round is one launch (rows, slices): each program
leaves the sums and the best key of its slice (`store_found`). In the next launch every program of the row merges what
all slices left (`merge_found`), and so knows by itself how the walk goes on. The merge has a fixed order, so all of
them find the same bits, and no program reads what another one of the same launch writes: rounds take turns with two
buffers (`turn`).
"""

from __future__ import annotations

import torch

from ....primitives.ordering import LOWEST_KEY
from ....runtime.language import next_power_of_2, tl, triton


def allocate_found(num_rows: int, num_slices: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scratch of both buffers: sums fp32 [2, rows, 2, slices] and keys int64 [2, rows, slices]."""
    sums = torch.empty((2, num_rows, 2, num_slices), dtype=torch.float32, device=device)
    return sums, torch.empty((2, num_rows, num_slices), dtype=torch.int64, device=device)


@triton.jit
def turn(round, num_rows):
    """Returns the first row of the buffer that `round` writes; the round before wrote the other one."""
    return (round & 1) * num_rows.to(tl.int64)


@triton.jit
def store_found(scratch, row, part, target, draft, key, NUM_SLICES: tl.constexpr):
    """Writes the two sums of a slice, and its largest key."""
    sums_ptr = scratch.sums + row * (2 * NUM_SLICES) + part
    tl.store(sums_ptr, target)
    tl.store(sums_ptr + NUM_SLICES, draft)
    tl.store(scratch.keys + row * NUM_SLICES + part, key)


@triton.jit
def store_nothing(scratch, row, part, NUM_SLICES: tl.constexpr):
    """Writes what a slice that is not read has: the next launch loads it before it knows that it has no use for it."""
    store_found(scratch, row, part, 0.0, 0.0, LOWEST_KEY, NUM_SLICES)


@triton.jit
def merge_found(scratch, row, NUM_SLICES: tl.constexpr):
    """Returns both sums and the largest key of a whole row."""
    part = tl.arange(0, next_power_of_2(NUM_SLICES))
    is_part = part < NUM_SLICES
    sums_ptr = scratch.sums + row * (2 * NUM_SLICES) + part
    target = tl.load(sums_ptr, mask=is_part, other=0.0)
    draft = tl.load(sums_ptr + NUM_SLICES, mask=is_part, other=0.0)
    keys = tl.load(scratch.keys + row * NUM_SLICES + part, mask=is_part, other=LOWEST_KEY)
    return tl.sum(target), tl.sum(draft), tl.max(keys)
