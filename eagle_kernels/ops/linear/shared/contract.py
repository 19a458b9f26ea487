"""What the ops with quantised weights take: checks that they have in common."""

import torch

from ....runtime import check
from .tiles import most_parts

ACTIVATIONS = (torch.float16, torch.bfloat16)
_BLOCK_COLUMNS, _BLOCK_OUTPUTS = 128, 16
_GROUPS = (32, 64, 128)


def check_inputs(args: check.Arguments, bits: int) -> int:
    """Checks x and the words of weight. Returns K."""
    args.tensor("x", ("T", "K"), ACTIVATIONS, contiguous=1)
    num_columns = args.size("K")
    if num_columns < 1:
        args.fail("x", "have K of at least 1", num_columns)
    blocks, words = -(-num_columns // _BLOCK_COLUMNS), _BLOCK_COLUMNS * bits // 32
    args.tensor("weight", ("S", blocks, _BLOCK_OUTPUTS, words), (torch.int32,))
    return num_columns


def check_outputs(args: check.Arguments, name: str) -> None:
    """Checks that the words of weight are those of N outputs, which argument `name` has."""
    strips, num_outputs = args.size("S"), args.size("N")
    if strips != -(-num_outputs // _BLOCK_OUTPUTS):
        least, most = max(_BLOCK_OUTPUTS * (strips - 1) + 1, 0), _BLOCK_OUTPUTS * strips
        args.fail(name, f"have N in {min(least, most)}..{most} for {strips} strips of weight", num_outputs)


def check_groups(args: check.Arguments, zeros: torch.dtype) -> None:
    """Checks group_size, scales and zeros."""
    group_size, blocks = args.values["group_size"], -(-args.size("K") // _BLOCK_COLUMNS)
    if group_size is None:
        scales = args.tensor("scales", ("N",), check.FLOAT)
        args.tensor("zeros", ("N",), (zeros,), optional=True)
    else:
        if group_size not in _GROUPS:
            args.fail("group_size", "be None, 32, 64 or 128", group_size)
        groups = blocks * _BLOCK_COLUMNS // group_size
        scales = args.tensor("scales", (-(-groups // 2), "N", 2), ACTIVATIONS)
        args.tensor("zeros", (-(-groups // 2), "N", 2), (torch.int16,), optional=True)
    check_outputs(args, "scales")
    args.debug("scales", "be finite", scales.isfinite)


def check_columns(args: check.Arguments) -> None:
    """Checks the order of the columns."""
    columns = args.tensor("columns", ("K",), check.INTEGER, optional=True)
    if columns is not None:
        args.debug("columns", f"lie in 0..{args.size('K') - 1}", lambda: (columns >= 0) & (columns < args.size("K")))


def output_of(args: check.Arguments) -> check.Spec:
    """Checks the bias and num_parts. Returns the spec of the output."""
    x, num_parts = args.values["x"], args.values["num_parts"]
    args.tensor("bias", ("N",), (x.dtype,), optional=True)
    if num_parts is None:
        return args.spec((args.size("T"), args.size("N")), x.dtype, contiguous=1)
    num_parts = args.integer("num_parts", 1, most_parts(args.size("K")))
    return args.spec((num_parts, args.size("T"), args.size("N")), torch.float32, contiguous=1)
