"""Whether what kernels promise the compiler holds: Triton's interpreter sees the numbers, a GPU would misread them."""

from __future__ import annotations

import functools


@functools.cache
def watch_hints() -> None:
    """From now on a false `tl.multiple_of` or `tl.max_contiguous` ends a launch in the interpreter."""
    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    set_attr = TensorHandle.set_attr

    def checked(handle, name, values):
        data = handle.data.astype(np.int64)
        data = data.reshape(data.shape or (1,))
        for axis, value in enumerate(values):
            lanes = np.moveaxis(data, axis, -1)
            if name == "tt.contiguity" and value > 1:
                assert (np.diff(lanes.reshape(-1, value)) == 1).all(), f"{lanes} is not {value} by {value} contiguous"
            if name == "tt.divisibility" and value > 1:  # the first number of what is contiguous
                is_first = np.diff(lanes, prepend=lanes[..., :1] - 2) != 1
                assert (lanes[is_first] % value == 0).all(), f"{lanes} is no multiple of {value}"
        set_attr(handle, name, values)

    TensorHandle.set_attr = checked
