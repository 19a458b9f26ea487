"""Whether what kernels promise the compiler holds: Triton's interpreter sees the numbers, a GPU would misread them."""

import functools


@functools.cache
def watch_hints() -> None:
    """From now on a launch with a false `tl.multiple_of` or `tl.max_contiguous` is an AssertionError when it ends."""
    import numpy as np
    from triton.runtime.interpreter import GridExecutor, TensorHandle

    set_attr, call = TensorHandle.set_attr, GridExecutor.__call__
    wrong: list[str] = []

    def looking(handle, name, values):
        data = np.atleast_1d(handle.data.astype(np.int64))
        for axis, value in enumerate(values):
            lanes = np.moveaxis(data, axis, -1)
            if name == "tt.contiguity" and value > 1 and (np.diff(lanes.reshape(-1, value)) != 1).any():
                wrong.append(f"{lanes} are not contiguous by {value}")
            if name == "tt.divisibility" and value > 1:  # the first number of those that are contiguous
                is_first = np.diff(lanes, prepend=lanes[..., :1] - 2) != 1
                if (lanes[is_first] % value).any():
                    wrong.append(f"{lanes} is no multiple of {value}")
        set_attr(handle, name, values)

    def checked(self, *args, **arguments):
        wrong.clear()
        call(self, *args, **arguments)
        assert not wrong, wrong[0]

    TensorHandle.set_attr, GridExecutor.__call__ = looking, checked
