"""What the kernels of linear_decode have in common: the layer, its sizes, products on the tensor cores."""

from typing import Any, NamedTuple

from ....primitives.strides import row_unit
from ....runtime import tuning
from ....runtime.language import is_interpreting, tl, triton

# sizes of every kernel, for which none is compiled again
SIZES = ["num_rows", "num_outputs", "stride_x_row", "stride_weight_output", "stride_output_row"]
_IS_INTERPRETED = tl.constexpr(is_interpreting())


class Layer(NamedTuple):
    """Pointers to what a layer reads and writes; see `linear_decode`."""

    x: Any
    weight: Any
    bias: Any  # None: not given
    output: Any


def layer_arguments(layer: Layer) -> dict:
    """Returns the launch arguments that every kernel takes."""
    unit = row_unit(layer.x, layer.weight)
    return {
        "layer": layer, "num_rows": layer.x.shape[0], "num_outputs": layer.weight.shape[0],
        "stride_x_row": layer.x.stride(0) // unit, "stride_weight_output": layer.weight.stride(0) // unit,
        "stride_output_row": layer.output.stride(-2), "UNIT": unit, "NUM_COLUMNS": layer.x.shape[1],
    }  # fmt: skip


def choose_tuning(table: dict, layer: Layer) -> dict:
    """Returns the first entry of the device's row that fits the sizes; the last one fits all."""
    rows, outputs = layer.x.shape[0], layer.weight.shape[0]
    entries = tuning.row(table, layer.x.device)
    return next(entry for entry in entries if rows <= entry["max_rows"] and outputs >= entry["least_outputs"])


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
