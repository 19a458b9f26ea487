"""Fixtures of the tests of attention."""

import pytest

from eagle_kernels.runtime.language import is_interpreting


@pytest.fixture
def sums_in_order(monkeypatch):
    """Lets the interpreter add the products of every element to the sum before, one after another, as a GPU does.

    Its own matrix products are those of numpy's BLAS, some of whose kernels (for AMD's processors, say) take another
    order for the last rows of a tile than for those before; and they are added to the sum before as a whole, so that a
    sum of two products has the bits of one that the other is added to, which on a GPU differ.
    """
    if is_interpreting():
        from triton.runtime.interpreter import InterpreterBuilder

        monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot_in_order)


def _dot_in_order(builder, left, right, total, input_precision, max_num_imprecise_acc):
    sums = total.data.copy()
    for column in range(left.data.shape[-1]):
        sums += left.data[..., column, None].astype(sums.dtype) * right.data[..., column, None, :]
    return type(total)(sums, total.dtype.scalar)
