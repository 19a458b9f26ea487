"""One row of the vocabulary as probabilities, a tile of tokens at a time, or a single token. A row holds probabilities,
or logits that have a temperature. One scan finds the statistics of a row of logits (`scan_logits`; in slices
`store_scan`, `load_row`); with them any tile of it can be read (`row_probs`)."""

from typing import Any, NamedTuple

from ..runtime.language import next_power_of_2, tl, triton
from .ordering import comparable

# Below this temperature a row is one-hot at its largest logit: logits over it would leave the range of fp32.
GREEDY_TEMPERATURE = 1e-5
GREEDY_BELOW = tl.constexpr(GREEDY_TEMPERATURE)

# A given probability may exceed 1 by what rounding in another precision leaves.
LARGEST_PROB = tl.constexpr(1.001)

LARGEST_FINITE = tl.constexpr(3.4028234663852886e38)
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)


class Row(NamedTuple):
    """One row of logits or probabilities; scale, maximum, total and best have a meaning for logits only."""

    row_ptr: Any
    size: Any  # tokens in it
    scale: Any  # 1 / temperature
    maximum: Any  # the largest scaled logit
    total: Any  # sum of exp(scaled logit - maximum)
    best: Any  # the one token of a greedy row, -1 for a row that is sampled


class RowPointers(NamedTuple):
    """Pointers to rows of logits or of probabilities, as an op got them."""

    logits: Any  # [rows, size]; None: probabilities are given
    probs: Any  # [rows, size]; None: logits are given
    temperature: Any  # [B]; None: probabilities need none
    scans: Any  # int32 [scans, 3, slices], see store_scan; None: no row is scanned in slices


class Rows(NamedTuple):
    """Rows and what is known of them. As it may hold None, no device function returns it."""

    pointers: Any  # RowPointers
    stride: Any  # of a row; this and the size are best `in_units`, so that loads can be wide
    size: Any
    first_scan: Any  # row r has the scan first_scan + r


@triton.jit
def in_units(value, UNIT: tl.constexpr):
    """Returns a multiple of UNIT as it is; now the compiler knows that it is one."""
    return value // UNIT * UNIT


@triton.jit
def open_row(row_ptr, size, temperature, maximum, total, best):
    """Returns the row at row_ptr, with the statistics that `scan_logits` (and `merge_scans`) found at temperature."""
    scale, is_sampled = read_temperature(temperature)
    return Row(row_ptr, size, scale, maximum, total, tl.where(is_sampled, -1, best))


@triton.jit
def read_temperature(temperature):
    """Returns 1 / temperature and whether the row is sampled; NaN and all below 1e-5 is greedy, and not scaled.
    1 / temperature is never 0, so that +inf stays above all other logits."""
    is_sampled = temperature >= GREEDY_BELOW
    inverse = tl.maximum(tl.math.div_rn(1.0, tl.where(is_sampled, temperature, 1.0)), SMALLEST_NORMAL)
    return tl.where(is_sampled, inverse, 1.0), is_sampled


@triton.jit
def scale_logits(logits, scale):
    """Returns logits as they are sampled from: -inf for NaN, the largest finite number for +inf, 0 for -0."""
    return tl.minimum(comparable(logits * scale), LARGEST_FINITE)


@triton.jit
def load_scaled(row_ptr, ids, mask, scale):
    """Returns scaled logits fp32 of tokens, -inf for masked lanes."""
    return scale_logits(tl.load(row_ptr + ids, mask=mask, other=float("-inf")).to(tl.float32), scale)


@triton.jit
def scan_logits(row_ptr, start, stop, temperature, BLOCK_VOCAB: tl.constexpr):
    """Returns maximum, total and best (lowest id int32 of the maximum) of tokens start .. stop - 1 of a row."""
    scale, _ = read_temperature(temperature)
    lane = tl.arange(0, BLOCK_VOCAB)
    maximum = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    best = tl.full([], 0, tl.int32) + start
    for first in range(start, stop, BLOCK_VOCAB):
        ids = first + lane
        scaled = load_scaled(row_ptr, ids, ids < stop, scale)
        tile_maximum = tl.max(scaled)
        tile_best = tl.min(tl.where(scaled == tile_maximum, ids, 2147483647))
        best = tl.where(tile_maximum > maximum, tile_best, best)
        larger = tl.maximum(maximum, tile_maximum)
        anchor = _anchor(larger)
        total = total * tl.exp(maximum - anchor) + tl.sum(tl.exp(scaled - anchor))
        maximum = larger
    return maximum, total, best


@triton.jit
def merge_scans(maxima, totals, bests, AXIS: tl.constexpr):
    """Returns the statistics of rows that were scanned in slices; lanes without a slice hold -inf, 0, 2147483647."""
    maximum = tl.max(maxima, axis=AXIS)
    anchor = _anchor(maximum)
    total = tl.sum(totals * tl.exp(maxima - tl.expand_dims(anchor, AXIS)), axis=AXIS)
    best = tl.min(tl.where(maxima == tl.expand_dims(maximum, AXIS), bests, 2147483647), axis=AXIS)
    return maximum, total, best


@triton.jit
def store_scan(rows, row, temperature, part, NUM_SLICES: tl.constexpr, BLOCK_VOCAB: tl.constexpr):
    """Scans slice `part` of the row with the number `row` int64, BLOCK_VOCAB tokens, into the row's scan."""
    row_ptr = rows.pointers.logits + row * rows.stride
    start = part * BLOCK_VOCAB
    stop = tl.minimum(start + BLOCK_VOCAB, rows.size)
    maximum, total, best = scan_logits(row_ptr, start, stop, temperature, BLOCK_VOCAB)
    scan_ptr = rows.pointers.scans + (rows.first_scan + row) * (3 * NUM_SLICES) + part
    tl.store(scan_ptr, maximum.to(tl.int32, bitcast=True))
    tl.store(scan_ptr + NUM_SLICES, total.to(tl.int32, bitcast=True))
    tl.store(scan_ptr + 2 * NUM_SLICES, best)


@triton.jit
def store_no_scan(rows, row, part, NUM_SLICES: tl.constexpr):
    """Writes what a slice without a token has: for rows that are not read, whose scans a kernel may yet load."""
    scan_ptr = rows.pointers.scans + (rows.first_scan + row) * (3 * NUM_SLICES) + part
    tl.store(scan_ptr, -8388608)  # the bits of -inf
    tl.store(scan_ptr + NUM_SLICES, 0)
    tl.store(scan_ptr + 2 * NUM_SLICES, 2147483647)


@triton.jit
def load_row(rows, request, row, NUM_SLICES: tl.constexpr, IS_VECTOR: tl.constexpr = False):
    """Returns the Row with the number `row` int64, at its request's temperature; IS_VECTOR: a vector of rows."""
    offset = row * rows.stride
    if rows.pointers.probs is not None:
        return Row(rows.pointers.probs + offset, rows.size, 1.0, 0.0, 1.0, -1)
    else:
        AXIS: tl.constexpr = 1 if IS_VECTOR else 0
        part = tl.arange(0, next_power_of_2(NUM_SLICES))
        is_part = part < NUM_SLICES
        place = (rows.first_scan + row) * (3 * NUM_SLICES)
        if IS_VECTOR:
            place = place[:, None]
            part = part[None, :]
            is_part = is_part[None, :]
        scan_ptr = rows.pointers.scans + place + part
        maxima = tl.load(scan_ptr, mask=is_part, other=-8388608)  # the bits of -inf
        totals = tl.load(scan_ptr + NUM_SLICES, mask=is_part, other=0)
        bests = tl.load(scan_ptr + 2 * NUM_SLICES, mask=is_part, other=2147483647)
        maximum, total, best = merge_scans(
            maxima.to(tl.float32, bitcast=True), totals.to(tl.float32, bitcast=True), bests, AXIS
        )
        temperature = tl.load(rows.pointers.temperature + request)
        return open_row(rows.pointers.logits + offset, rows.size, temperature, maximum, total, best)


@triton.jit
def scan_row(rows, request, row, is_read, BLOCK_VOCAB: tl.constexpr):
    """Returns the Row with the number `row` int64, scanned by this program alone, or an empty one if not is_read.
    The Rows need no scans."""
    offset = row * rows.stride
    size = tl.where(is_read, rows.size, 0)
    if rows.pointers.probs is not None:
        return Row(rows.pointers.probs + offset, size, 1.0, 0.0, 1.0, -1)
    else:
        row_ptr = rows.pointers.logits + offset
        temperature = tl.load(rows.pointers.temperature + request)
        maximum, total, best = scan_logits(row_ptr, 0, size, temperature, BLOCK_VOCAB)
        return open_row(row_ptr, size, temperature, maximum, total, best)


@triton.jit
def _anchor(maximum):
    """Returns the maximum, or 0 if no logit is above -inf, since -inf - -inf would be NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def row_probs(rows, row, ids, is_token):
    """Returns the probabilities fp32 of tokens in one of the Rows, 0 where is_token is false or the row is shorter.
    Given probabilities that are NaN, negative or above 1.001 count as 0. In a row of logits none of which is above -inf
    all are 0, except that a greedy row has token 0. `row` holds one Row, or one for each token."""
    is_token = is_token & (ids >= 0) & (ids < row.size)
    if rows.pointers.probs is not None:
        probs = tl.load(row.row_ptr + ids, mask=is_token, other=0.0).to(tl.float32)
        return tl.where((probs > 0.0) & (probs <= LARGEST_PROB), probs, 0.0)
    else:
        scaled = load_scaled(row.row_ptr, ids, is_token, row.scale)
        weight = tl.exp(scaled - _anchor(row.maximum))
        probs = weight * tl.math.div_rn(1.0, tl.where(row.total > 0.0, row.total, 1.0))
        is_best = is_token & (ids == row.best)
        return tl.where(row.best >= 0, is_best.to(tl.float32), probs)
