"""What the kernels of linear_decode have in common: the layer and its sizes."""

from typing import Any, NamedTuple

from ....primitives.strides import row_unit
from ....runtime import tuning

# sizes of every kernel, for which none is compiled again
SIZES = ["num_rows", "num_outputs", "stride_x_row", "stride_weight_output", "stride_output_row"]


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
