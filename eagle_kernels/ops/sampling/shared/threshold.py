"""The edge of a filter on a long row: the largest key t such that all keys >= t together weigh what is wanted.

Keys are the bits of probabilities, int32: they have the same order. Weights are whole numbers, so their sums do not
depend on how a row is cut. If a number of keys is wanted, each weighs one; if a share of the probability is, each
weighs its mass (`fixed_point_mass`).

A row is not sorted. It is cut into chunks. One program keeps the largest key of each chunk, its total mass and one of
its keys as a sample of the row (`sample_offset`). From these alone a bracket [low, high) is guessed that holds the
edge, all but surely (`bracket_by_count`, `bracket_by_mass`). One read of the row weighs what lies above the bracket and
gathers what lies in it: a few percent of a flat row, and next to nothing of a peaked one. The edge among these keys is
found by halving (`largest_reaching`). The sums tell whether the guess was right. If it was wrong (rows can be built for
which it is), the row itself is halved (`largest_reaching_in_memory`), so the edge is always exact.
"""

from __future__ import annotations

from ....primitives.ordering import halfway
from ....runtime.language import tl, triton

# Masses are in units of 2^-40 of the power of two at or below the largest value; a sum of 2^22 of them fits 63 bits.
MASS_BITS = tl.constexpr(40)
MAX_VOCAB_SIZE = 1 << 21

# How many deviations of its estimate a bracket allows for. With four, none of thousands of random rows was missed.
_DEVIATIONS = tl.constexpr(4.0)
# Halvings of a bracket: they lead from some 2^30 keys to one part in a thousand of a value, which is enough unless the
# row is so flat that all of it lies within such a part.
_ROUNDS = tl.constexpr(16)


@triton.jit
def probability_keys(values):
    """Returns the int32 keys of probabilities, their bits in fp32; NaN, infinite and negative ones count as 0."""
    values = values.to(tl.float32)
    return tl.where((values > 0.0) & (values < float("inf")), values, 0.0).to(tl.int32, bitcast=True)


@triton.jit
def key_probability(keys):
    """Returns the fp32 probabilities that keys were made of."""
    return keys.to(tl.float32, bitcast=True)


@triton.jit
def _exponent(key):
    """Returns the biased exponent of the number >= 0 that has these bits; 1 for subnormal numbers and 0."""
    return tl.maximum(key >> 23, 1)


@triton.jit
def fixed_point_mass(keys, largest):
    """Returns int64 masses: the keys' probabilities in units of 2^-40 of the largest one's power of two, rounded down.
    No key is above the largest, so each mass is below 2^41."""
    # two factors, since the power of two can exceed the range of fp32; no product that gives a mass is rounded
    power = MASS_BITS + 127 - _exponent(largest)
    first = tl.minimum(power, 126)
    scaled = key_probability(keys) * _power_of_two(first) * _power_of_two(power - first)
    return scaled.to(tl.int64)


@triton.jit
def _power_of_two(power):
    """Returns 2^power as fp32, for powers in -126 .. 127."""
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def mass_value(mass, largest):
    """Returns the number fp32 that a sum of masses relative to the largest key stands for."""
    power = (_exponent(largest) - 127 - MASS_BITS + 1023).to(tl.int64) << 52
    return (mass.to(tl.float64) * power.to(tl.float64, bitcast=True)).to(tl.float32)


@triton.jit
def lowest_with_mass(largest):
    """Returns the smallest key above 0 that may have a mass above 0."""
    return tl.maximum((_exponent(largest) - MASS_BITS) << 23, 1)


@triton.jit
def wanted_mass(total, share):
    """Returns a share (fp32, below 1) of a mass, int64, rounded up from float64; at least 1, as the largest key has."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * share.to(tl.float64)), 1.0).to(tl.int64)


@triton.jit
def largest_reaching(keys, weights, wanted, low, high):
    """Returns the largest t in [low, high) such that keys >= t weigh `wanted` or more; low if there is none."""
    while halfway(low, high) > low:  # at most 31 halvings
        candidate = halfway(low, high)
        reaches = tl.sum(tl.where(keys >= candidate, weights, 0)) >= wanted
        low = tl.where(reaches, candidate, low)
        high = tl.where(reaches, high, candidate)
    return low


@triton.jit
def _weigh_in_memory(
    values_ptr, size, edge, largest, HAS_COUNT: tl.constexpr, HAS_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns number and mass int64 of the keys >= edge of `size` probabilities in memory, 0 for what is not wanted."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        keys = probability_keys(tl.load(values_ptr + index, mask=index < size, other=0.0))
        is_reached = (index < size) & (keys >= edge)
        if HAS_COUNT:
            count += is_reached.to(tl.int32)
        if HAS_MASS:
            mass += tl.where(is_reached, fixed_point_mass(keys, largest), 0)
    return tl.sum(count).to(tl.int64), tl.sum(mass)


@triton.jit
def largest_reaching_in_memory(
    values_ptr, size, wanted, low, high, largest, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns t as `largest_reaching` does, of probabilities in memory; number and mass of the keys >= t.
    Each halving reads all probabilities."""
    while halfway(low, high) > low:  # at most 31 halvings
        candidate = halfway(low, high)
        count, mass = _weigh_in_memory(values_ptr, size, candidate, largest, not BY_MASS, BY_MASS, BLOCK)
        reaches = (mass if BY_MASS else count) >= wanted
        low = tl.where(reaches, candidate, low)
        high = tl.where(reaches, high, candidate)
    count, mass = _weigh_in_memory(values_ptr, size, low, largest, not BY_MASS, True, BLOCK)
    return low, count, mass


@triton.jit
def sample_offset(chunk, CHUNK: tl.constexpr):
    """Returns where a chunk's sample lies in it: anywhere, so that rows in some order are sampled fairly."""
    return (chunk * 11 + 5) % CHUNK


@triton.jit
def bracket_by_count(largest, sample, wanted, low, high, CHUNK: tl.constexpr):
    """Returns keys (low, high), within the given two, between which the `wanted`-th largest key lies, all but surely.
    largest, sample: keys of each chunk, below the given low where there is no chunk; at most 2^15 of them."""
    low_end, high_end = high, high
    high_start = low
    rounds = 0
    while _goes_on(rounds, low, low_end, high_end):
        rounds += 1
        candidate = halfway(low, low_end)
        at_least, _ = _count_bounds(largest, sample, candidate, CHUNK)
        low, low_end = _halve(low, low_end, candidate, at_least >= wanted)
        candidate = halfway(high_start, high_end)
        _, at_most = _count_bounds(largest, sample, candidate, CHUNK)
        high_start, high_end = _halve(high_start, high_end, candidate, at_most >= wanted)
    return low, tl.maximum(low, high_end)


@triton.jit
def _count_bounds(largest, sample, edge, CHUNK: tl.constexpr):
    """Returns bounds fp32 of the number of keys >= edge: what the sample says, within what the largest keys prove."""
    # both numbers in one sum
    numbers = tl.sum((largest >= edge).to(tl.int32) + ((sample >= edge).to(tl.int32) << 16))
    num_chunks = (numbers & 0xFFFF).to(tl.float32)
    num_samples = (numbers >> 16).to(tl.float32)
    # the deviation of a Poisson law, and some more for what a small sample does not show
    deviation = _DEVIATIONS * (tl.sqrt(num_samples) + 1.0)
    at_least = tl.maximum(CHUNK * (num_samples - deviation), num_chunks)
    at_most = tl.minimum(num_samples + deviation, num_chunks) * CHUNK
    return at_least, at_most


@triton.jit
def bracket_by_mass(largest, sample, total, wanted, low, high, CHUNK: tl.constexpr):
    """Returns keys (low, high), within the given two, between which lies, all but surely, the edge of `wanted` mass.
    largest, sample: keys of each chunk, below the given low where there is no chunk. total: the sum of each chunk."""
    low_end, high_end = high, high
    high_start = low
    rounds = 0
    while _goes_on(rounds, low, low_end, high_end):
        rounds += 1
        candidate = halfway(low, low_end)
        at_least, _ = _mass_bounds(largest, sample, total, candidate, CHUNK)
        low, low_end = _halve(low, low_end, candidate, at_least >= wanted)
        candidate = halfway(high_start, high_end)
        _, at_most = _mass_bounds(largest, sample, total, candidate, CHUNK)
        high_start, high_end = _halve(high_start, high_end, candidate, at_most >= wanted)
    return low, tl.maximum(low, high_end)


@triton.jit
def _mass_bounds(largest, sample, total, edge, CHUNK: tl.constexpr):
    """Returns bounds fp32 of the sum of keys >= edge: what the sample says, within what the largest keys prove.
    Only chunks whose largest key reaches the edge hold such keys. The sample tells which part of their sum lies *below*
    the edge: no key there weighs more than the edge, so a key that the sample missed matters little."""
    is_reached = largest >= edge
    below = tl.where(is_reached & (sample < edge), key_probability(sample) * CHUNK, 0.0)
    proven, at_most, estimate, squares = _four_sums(
        tl.where(is_reached, key_probability(largest), 0.0), tl.where(is_reached, total, 0.0),
        tl.where(is_reached, total - below, 0.0), below * below,
    )  # fmt: skip
    deviation = _DEVIATIONS * (tl.sqrt(squares) + CHUNK * key_probability(edge))
    # sums of fp32 are wrong by up to a millionth
    slack = 4e-6 * at_most
    at_least = tl.maximum(estimate - deviation, proven) - slack
    return at_least, tl.minimum(estimate + deviation, at_most) + slack


@triton.jit
def _four_sums(first, second, third, fourth):
    """Returns the sums of four vectors, in one reduction, since most of its cost is to wait for the other warps."""
    sums = tl.sum(tl.join(tl.join(first, second), tl.join(third, fourth)), axis=0)
    even, odd = tl.split(sums)
    first, second = tl.split(even)
    third, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _goes_on(rounds, low, low_end, high_end):
    """Tells whether a bracket [low, high_end) is to be halved: after the rounds only what was halved too little."""
    is_coarse = (low_end - low > 1) & (high_end - low <= 4 * (low_end - low))
    return (rounds < _ROUNDS) | is_coarse


@triton.jit
def _halve(low, high, candidate, reaches):
    """Returns the half of [low, high) that holds the edge."""
    return tl.where(reaches, candidate, low), tl.where(reaches, high, candidate)
