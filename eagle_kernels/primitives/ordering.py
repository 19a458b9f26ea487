"""One total order for values with ids: larger values first, equal values by ascending id.

A pair becomes one int64 key that compares as the pair does, so a maximum of keys breaks ties by the lowest id:

    bit  63 ........ 32 31 ........ 0
         ordered bits  | ~id

Where values carry noise, equal ones are ordered by further bits of the noise, which an fp32 value does not hold, and
only then by ascending id (`noisy_key`):

    bit  63 ........ 32 31 .... 20 19 .... 0
         ordered bits  | fine     | ~id
"""

from ..runtime import check
from ..runtime.language import tl, triton

# Below the keys of all pairs: it marks lanes without a pair.
LOWEST_KEY = tl.constexpr(-(2**63))

# A noisy key has room for this many ids.
MAX_NOISY_IDS = 2**20
# The fine bits where there is no noise: above those of all noise; ties then go to the lower id.
NO_NOISE = tl.constexpr(0xFFF00000)


@triton.jit
def widened(values):
    """Returns floating values as fp32, for maxima; -0.0 in fp16 becomes 0.0.
    LLVM would take maxima of fp16 two by two, and ptxas 12.8 and 12.9 get a pair wrong if it knows that one of the two
    is -inf, as past the end of a row of 257 in a block of 8,192. A sum stays fp32."""
    wide = values.to(tl.float32)
    if values.dtype.is_fp16():
        wide += 0.0
    return wide


@triton.jit
def comparable(values):
    """Returns fp32 values without the two that do not order: NaN counts as -inf, -0.0 as 0.0."""
    values = tl.where(values == values, values, float("-inf"))
    return tl.where(values == 0.0, 0.0, values)


@triton.jit
def ordered_bits(values):
    """Returns int32 that compare as the fp32 `comparable` values do."""
    bits = values.to(tl.int32, bitcast=True)
    # the bits of negative floats grow with their magnitude: flip all but the sign
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def bits_value(bits):
    """Returns the fp32 values that ordered bits were made of."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def unsigned_rank(values):
    """Returns uint32 that order as fp32 `comparable` values do; an edge can be found bit by bit from the top."""
    return ordered_bits(values).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def rank_value(ranks):
    """Returns the fp32 values that unsigned ranks were made of."""
    return bits_value((ranks ^ 0x80000000).to(tl.int32, bitcast=True))


@triton.jit
def ordered_key(values, ids):
    """Returns the keys of fp32 `comparable` values with ids in 0 .. 2^32 - 1."""
    return (ordered_bits(values).to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def short_key(values, ids, TYPE: tl.constexpr):
    """Returns int32 keys of fp32 values that were of the 16-bit float TYPE, with ids in 0 .. 65535."""
    bits = comparable(values).to(TYPE).to(tl.int16, bitcast=True)
    order = bits ^ ((bits >> 15) & 0x7FFF)
    return (order.to(tl.int32) << 16) | (0xFFFF - ids)


@triton.jit
def short_key_id(keys):
    """Returns the ids that short keys were made of."""
    return 0xFFFF - (keys & 0xFFFF)


@triton.jit
def short_key_value(keys, TYPE: tl.constexpr):
    """Returns the fp32 values that short keys were made of."""
    order = keys >> 16
    bits = order ^ ((order >> 15) & 0x7FFF)
    return bits.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)


@triton.jit
def key_id(keys):
    """Returns the ids int64 that keys were made of."""
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)


@triton.jit
def noisy_key(values, fine, ids):
    """Returns the keys of fp32 `comparable` values, shifted fine bits, and ids in 0 .. MAX_NOISY_IDS - 1."""
    low = (0xFFFFF - ids).to(tl.uint32) | fine
    return (ordered_bits(values).to(tl.int64) << 32) | low.to(tl.int64)


@triton.jit
def noisy_key_id(keys):
    """Returns the ids int32 that noisy keys were made of."""
    return 0xFFFFF - (keys & 0xFFFFF).to(tl.int32)


@triton.jit
def largest_key(keys):
    """Returns the largest of int64 keys [n], half by half: a warp reduces int32 in one instruction, int64 in thirty."""
    high = (keys >> 32).to(tl.int32)
    largest = tl.max(high)
    low = tl.max(tl.where(high == largest, keys.to(tl.uint32), 0))
    return (largest.to(tl.int64) << 32) | low.to(tl.int64)


@triton.jit
def halfway(low, high):
    """Returns the integer halfway between two of one type, rounded down, also where that type cannot hold their sum."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def is_among_best(values, is_present, count):
    """Returns whether each of a vector's fp32 values is among the `count` largest, equal ones by ascending place.
    NaN counts as -inf. The edge, the largest value that at least `count` values reach, is found from its highest bit
    down."""
    # unsigned: 0 is below every value
    order = tl.where(is_present, unsigned_rank(comparable(values)), 0)
    edge = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        raised = edge | bit
        num_reaching = tl.sum((order >= raised).to(tl.int32))
        edge = tl.where(num_reaching >= count, raised, edge)
        bit = bit >> 1
    # the first values at the edge fill the places left
    is_above = order > edge
    is_at_edge = order == edge
    places_left = count - tl.sum(is_above.to(tl.int32))
    return is_above | (is_at_edge & (tl.cumsum(is_at_edge.to(tl.int32), 0) <= places_left))


def check_vocabulary(args: check.Arguments, name: str, axis: str = "V") -> None:
    """Checks that a row of logits offers a token, and that the keys which tokens are drawn by have room for all ids."""
    if args.size(axis) == 0:
        args.fail(name, "have at least one token a row", list(args.values[name].shape))
    if args.size(axis) > MAX_NOISY_IDS:
        args.fail(name, f"have at most {MAX_NOISY_IDS} tokens a row", list(args.values[name].shape))
