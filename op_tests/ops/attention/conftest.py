"""Fixtures of the tests of attention."""

import numpy as np
import pytest

from eagle_kernels.runtime.language import is_interpreting


@pytest.fixture
def sums_in_order(monkeypatch):
    """Lets the interpreter sum the products of every element in one order, as a GPU does.

    Its matrix products are those of numpy's BLAS, some of whose kernels (for AMD's processors, say) take another order
    for the last rows of a tile than for those before.
    """
    if is_interpreting():
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("ik,kj->ij", a.astype(dtype), b.astype(dtype)))
