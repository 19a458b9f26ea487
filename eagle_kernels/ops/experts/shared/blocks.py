"""Which rows go to which expert: a program finds its block of them in the routed table, on the device.

A pair is a row and one of its experts, in the order of the table [T, K]. The pairs of an expert, in ascending order,
are cut into blocks of BLOCK_PAIR; blocks are numbered expert by expert. So how many programs there are follows from
sizes alone, and those past the last block end at once. For up to MAX_LOOKUP pairs every program looks through the whole
table, which the caches hold; for more, a launch before sorts the pairs by their experts. The few pairs of a small step
are not counted: each may begin a block, which has the number of that pair.
"""

from typing import Any, NamedTuple

import torch

from ....primitives.dependent_launch import await_predecessor
from ....runtime.language import next_power_of_2, tl, triton
from ....runtime.launch import launch

# pairs among which a program looks for its own: 32 rows of 16 experts. Among 4,096 it would issue 2,000 to 2,900
# instructions a warp, more than for the weights of a down projection.
MAX_LOOKUP = 512
# up to so many pairs, and no more than there are experts, each may begin a block
_MOST_LED = 64
MOST_LED = tl.constexpr(_MOST_LED)
# pairs that a program sorts at once
_BLOCK_SORTED = 4096


class Table(NamedTuple):
    """Pointers to the routed table, and to its pairs sorted by their experts where a launch before has done so."""

    experts: Any
    sorted_pairs: Any  # None: every program looks for itself
    stops: Any  # where the sorted pairs of each expert end


class Block(NamedTuple):
    """A block of pairs of one expert."""

    expert: Any
    pair: Any  # [PAIR] numbers of pairs, 0 past the end
    is_pair: Any
    is_one: Any  # whether there is such a block


@triton.jit
def _place_of_block(counts, block, BLOCK_PAIR: tl.constexpr):
    """Returns the expert that a block belongs to, how many of that expert's pairs come before it, and whether there is
    one. counts: pairs of each expert."""
    blocks = (counts + BLOCK_PAIR - 1) // BLOCK_PAIR
    stops = tl.cumsum(blocks, axis=0)
    expert = tl.sum((stops <= block).to(tl.int32), axis=0)
    number = tl.arange(0, counts.shape[0])
    first = tl.sum(tl.where(number < expert, blocks, 0), axis=0)
    return expert, (block - first) * BLOCK_PAIR, block < tl.sum(blocks, axis=0)


@triton.jit
def find_block(
    table, block, num_pairs, NUM_EXPERTS: tl.constexpr, LOOKUP: tl.constexpr, BLOCK_PAIR: tl.constexpr
):  # fmt: skip
    """Returns the `Block` of this number.
    LOOKUP: a power of two of at least num_pairs; 0: they are sorted."""
    if LOOKUP > 0 and LOOKUP <= MOST_LED:
        return _find_led(table, block, num_pairs, NUM_EXPERTS, LOOKUP, BLOCK_PAIR)
    else:
        return _find_counted(table, block, num_pairs, NUM_EXPERTS, LOOKUP, BLOCK_PAIR)


@triton.jit
def _find_led(
    table, block, num_pairs, NUM_EXPERTS: tl.constexpr, LOOKUP: tl.constexpr, BLOCK_PAIR: tl.constexpr
):  # fmt: skip
    """Returns the block that begins with the pair of this number; there is none if the pair belongs to another one."""
    lane, candidate = tl.arange(0, BLOCK_PAIR), tl.arange(0, LOOKUP)
    experts = _load_experts(table.experts, candidate, num_pairs, NUM_EXPERTS)
    expert = tl.sum(tl.where(candidate == block, experts, 0), axis=0)
    is_own = experts == expert
    num_before = tl.sum((is_own & (candidate < block)).to(tl.int32), axis=0)
    is_one = (expert < NUM_EXPERTS) & (num_before % BLOCK_PAIR == 0)
    rank = tl.where(is_own & is_one, tl.cumsum(is_own.to(tl.int32), axis=0) - 1 - num_before, -1)
    found = rank[None, :] == lane[:, None]
    pair = tl.sum(tl.where(found, candidate[None, :], 0), axis=1)
    return Block(tl.where(is_one, expert, 0), pair, tl.sum(found.to(tl.int32), axis=1) > 0, is_one)


@triton.jit
def _find_counted(
    table, block, num_pairs, NUM_EXPERTS: tl.constexpr, LOOKUP: tl.constexpr, BLOCK_PAIR: tl.constexpr
):  # fmt: skip
    """Returns the block of this number, counted expert by expert."""
    lane = tl.arange(0, BLOCK_PAIR)
    # one more than there are experts, for pairs of none; histograms have a bin for each thread of a warp
    EXPERTS: tl.constexpr = next_power_of_2(NUM_EXPERTS + 1, 64)
    number = tl.arange(0, EXPERTS)
    if LOOKUP == 0:
        is_expert = number < NUM_EXPERTS
        stops = tl.load(table.stops + number, mask=is_expert, other=0)
        starts = tl.load(table.stops + number - 1, mask=is_expert & (number > 0), other=0)
        expert, skipped, is_one = _place_of_block(stops - starts, block, BLOCK_PAIR)
        expert = tl.where(is_one, expert, 0)
        first = tl.sum(tl.where(number == expert, starts, 0), axis=0) + skipped
        stop = tl.sum(tl.where(number == expert, stops, 0), axis=0)
        is_pair = is_one & (first + lane < stop)
        pair = tl.load(table.sorted_pairs + first + lane, mask=is_pair, other=0)
    else:
        candidate = tl.arange(0, LOOKUP)
        experts = _load_experts(table.experts, candidate, num_pairs, NUM_EXPERTS)
        counts = tl.where(number < NUM_EXPERTS, tl.histogram(experts, EXPERTS), 0)
        expert, skipped, is_one = _place_of_block(counts, block, BLOCK_PAIR)
        expert = tl.where(is_one, expert, 0)
        # a pair is as many candidates late as have no more own ones up to themselves than come before it
        num_own = tl.cumsum((experts == expert).to(tl.int32), axis=0) - skipped
        num_own = tl.minimum(tl.maximum(num_own, 0), BLOCK_PAIR)
        PARTS: tl.constexpr = next_power_of_2(64 // BLOCK_PAIR, 2)
        late = tl.reshape(tl.histogram(num_own, PARTS * BLOCK_PAIR), [PARTS, BLOCK_PAIR])
        pair = tl.cumsum(tl.sum(tl.where(tl.arange(0, PARTS)[:, None] == 0, late, 0), axis=0), axis=0)
        is_pair = is_one & (lane < tl.sum(tl.where(number == expert, counts, 0), axis=0) - skipped)
        pair = tl.where(is_pair, pair, 0)
    return Block(expert, pair, is_pair, is_one)


@triton.jit
def _load_experts(experts_ptr, pair, num_pairs, NUM_EXPERTS: tl.constexpr):
    """Loads the experts of pairs, NUM_EXPERTS for pairs of none."""
    experts = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1)
    is_expert = (experts >= 0) & (experts < NUM_EXPERTS)
    return tl.where(is_expert, experts, NUM_EXPERTS).to(tl.int32)


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_pairs_kernel(table, num_pairs, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ENABLE_PDL: tl.constexpr):
    """Writes the pairs of one expert, in ascending order, after those of all lower ones."""
    await_predecessor(ENABLE_PDL)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    num_lower, num_own = 0, 0
    for begin in tl.range(0, num_pairs, BLOCK):
        experts = _load_experts(table.experts, begin + lane, num_pairs, NUM_EXPERTS)
        num_lower += tl.sum((experts < expert).to(tl.int32), axis=0)
        num_own += tl.sum((experts == expert).to(tl.int32), axis=0)
    tl.store(table.stops + expert, num_lower + num_own)
    if num_own > 0:
        place = num_lower
        for begin in tl.range(0, num_pairs, BLOCK):
            is_own = _load_experts(table.experts, begin + lane, num_pairs, NUM_EXPERTS) == expert
            rank = tl.cumsum(is_own.to(tl.int32), axis=0)
            tl.store(table.sorted_pairs + place + rank - 1, begin + lane, mask=is_own)
            place += tl.sum(is_own.to(tl.int32), axis=0)


def make_table(op: str, experts: torch.Tensor, num_experts: int) -> tuple[Table, int]:
    """Returns the table of a routed [T, K], and LOOKUP as `find_block` takes it; launches where pairs are sorted."""
    num_pairs = experts.numel()
    if num_pairs <= MAX_LOOKUP:
        # few sizes, as a kernel is compiled for each, and none to be counted with fewer pairs than threads
        return Table(experts, None, None), _MOST_LED if num_pairs <= min(_MOST_LED, num_experts) else MAX_LOOKUP
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    stops = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    table = Table(experts, pairs, stops)
    launch(
        op, _sort_pairs_kernel, (num_experts,),
        table=table, num_pairs=num_pairs, NUM_EXPERTS=num_experts, BLOCK=_BLOCK_SORTED, num_warps=8,
    )  # fmt: skip
    return table, 0


def num_blocks(num_pairs: int, num_experts: int, block_pair: int) -> int:
    """Returns the most blocks that so many pairs may fill."""
    touched = min(num_pairs, num_experts)
    return touched + (num_pairs - touched) // block_pair
