"""Programs of one launch run in any order: reversed and shuffled grids must give the same bits.

The GPU chooses an order of its own, and so does a test that passes by luck. Triton's interpreter runs programs one by
one, so there the order can be chosen; a program that reads what another wrote shows.
"""

import contextlib
import importlib

import pytest
import torch

from .harness.ahead_of_time import PATHS
from .harness.cases import small_case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="program order is chosen in Triton's interpreter")


@contextlib.contextmanager
def program_order(seed: int):
    """Maps every grid coordinate through a permutation: seed 0 reverses, others shuffle."""
    from triton.runtime.interpreter import interpreter_builder

    visit = interpreter_builder.set_grid_idx

    def permuted(size: int, index: int) -> int:
        if seed == 0:
            return size - 1 - index
        return int(torch.randperm(size, generator=torch.Generator().manual_seed(seed))[index])

    def set_grid_idx(*indices):
        visit(*(permuted(size, index) for size, index in zip(interpreter_builder.grid_dim, indices)))

    interpreter_builder.set_grid_idx = set_grid_idx
    try:
        yield
    finally:
        interpreter_builder.set_grid_idx = visit


def run(path: str, values: dict) -> list[torch.Tensor]:
    """The op's outputs, and its arguments after the call: some ops work in place."""
    name = path.rpartition(".")[2]
    values = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
    result = getattr(importlib.import_module("eagle_kernels.ops." + path), name)(**values)
    outputs = [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)
    return outputs + [value for value in values.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("path", PATHS)
def test_the_order_of_programs_does_not_matter(path):
    values = small_case(path)
    expected = run(path, values)
    for seed in (0, 1):
        with program_order(seed):
            actual = run(path, values)
        for want, got in zip(expected, actual):
            assert torch.equal(want, got) or torch.allclose(want, got, rtol=0, atol=0, equal_nan=True)


def test_a_dependence_on_order_is_seen():
    """The harness itself: programs that overwrite one cell leave the last one's number."""
    from eagle_kernels.runtime.language import tl, triton

    @triton.jit
    def last_one_wins(cell_ptr):
        tl.store(cell_ptr, tl.program_id(0))

    cell = torch.full((1,), -1)
    last_one_wins[(5,)](cell)
    assert cell.item() == 4
    with program_order(0):
        last_one_wins[(5,)](cell)
    assert cell.item() == 0
