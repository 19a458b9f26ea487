"""Products on the tensor cores: tiles of operands, and what a tile adds to sums."""

from ..runtime.language import is_interpreting, tl, triton

_IS_INTERPRETED = tl.constexpr(is_interpreting())


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
