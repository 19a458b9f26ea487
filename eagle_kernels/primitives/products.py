"""Products on the tensor cores: tiles of operands, and what a tile adds to sums."""

from ..runtime.language import is_interpreting, tl, triton

_IS_INTERPRETED = tl.constexpr(is_interpreting())
# `stream_weight` multiplies the first so many columns last
FIRST_COLUMNS = 128
_FIRST_COLUMNS = tl.constexpr(FIRST_COLUMNS)


@triton.jit
def load_tile(row_ptrs, is_row, columns, NUM_COLUMNS: tl.constexpr, IS_EVEN: tl.constexpr, EVICTION: tl.constexpr):
    """Loads a tile [ROW, COLUMN], 0 past the ends."""
    is_read = is_row[:, None]
    if not IS_EVEN:
        is_read &= (columns < NUM_COLUMNS)[None, :]
    return tl.load(row_ptrs[:, None] + columns[None, :], mask=is_read, other=0.0, eviction_policy=EVICTION)


@triton.jit
def multiply(left, right, total):
    """Returns total [..., LEFT, RIGHT] plus left [..., LEFT, COLUMN] times right [..., RIGHT, COLUMN].
    The dot of Triton's interpreter takes bfloat16 and 8 bits for integers, so there they are widened."""
    if _IS_INTERPRETED and (left.dtype == tl.bfloat16 or left.dtype == tl.float8e4nv):
        left, right = left.to(tl.float32), right.to(tl.float32)
    if len(right.shape) == 3:
        right = tl.permute(right, (0, 2, 1))
    else:
        right = tl.trans(right)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def stream_weight(
    weight_row_ptrs, is_output, x_row_ptrs, is_row, columns, num_tiles, first_weight,
    NUM_COLUMNS: tl.constexpr, BLOCK_COLUMN: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Returns sums fp32 [OUTPUT, ROW] of num_tiles tiles of weight [OUTPUT, COLUMN] times x [ROW, COLUMN], whose first
    tile has `columns`. It is multiplied last: first_weight, which was loaded before x was there; or None.
    Weights leave the caches first, as nothing reads them again later."""
    IS_EVEN: tl.constexpr = NUM_COLUMNS % BLOCK_COLUMN == 0
    TILES_LAST: tl.constexpr = _FIRST_COLUMNS // BLOCK_COLUMN
    NUM_LOADED: tl.constexpr = 0 if first_weight is None else 1
    tl.static_assert(TILES_LAST == 1 or NUM_LOADED == 0, "one tile is kept for last")
    if first_weight is not None:
        first_x = load_tile(x_row_ptrs, is_row, columns, NUM_COLUMNS, IS_EVEN, "evict_last")
    total = tl.zeros([weight_row_ptrs.shape[0], x_row_ptrs.shape[0]], tl.float32)
    for index in tl.range(0, num_tiles - NUM_LOADED, num_stages=NUM_STAGES):
        tile = columns + (index + TILES_LAST) % num_tiles * BLOCK_COLUMN
        weight = load_tile(weight_row_ptrs, is_output, tile, NUM_COLUMNS, IS_EVEN, "evict_first")
        x = load_tile(x_row_ptrs, is_row, tile, NUM_COLUMNS, IS_EVEN, "evict_last")
        total = multiply(weight, x, total)
    if first_weight is not None:
        total = multiply(first_weight, first_x, total)
    return total
