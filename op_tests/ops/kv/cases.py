"""Sizes that the KV ops are tested on, and tables of random slots."""

from __future__ import annotations

import importlib
import inspect
import itertools

import torch

import eagle_kernels
from op_tests.harness import Guarded, assert_equal

TOPK, NUM_STEPS, PAGE_SIZES, BATCH_SIZES = (1, 2, 4, 8), (1, 3, 5, 8), (1, 16, 64, 256), (1, 3, 64)

# (topk, num_steps, page_size, batch_size)
CROSS = list(itertools.product(TOPK, NUM_STEPS, PAGE_SIZES, BATCH_SIZES))


def _pairwise() -> list[tuple[int, int, int, int]]:
    """Sixteen cases in which every two values of two sizes meet, by arithmetic in a field of four elements.

    Batches are of 9 at most: a program takes Triton's interpreter some 10 ms.
    """
    twice = (0, 2, 3, 1)
    batch_sizes = (1, 3, 9, 3)
    return [
        (TOPK[i], NUM_STEPS[j], PAGE_SIZES[i ^ j], batch_sizes[i ^ twice[j]])
        for i, j in itertools.product(range(4), range(4))
    ]


PAIRWISE = _pairwise()


def random_rows(batch_size: int, columns: int, *, dtype=torch.int64, device="cpu") -> dict:
    """req_pool_indices of `batch_size` requests in a table of two rows more; every slot of it is another one."""
    num_rows = batch_size + 2
    values = {
        "req_pool_indices": torch.randperm(num_rows)[:batch_size],
        "req_to_token": torch.randperm(num_rows * columns).view(num_rows, columns),
    }
    return {name: value.to(device=device, dtype=dtype) for name, value in values.items()}


def example_rows(*rows: int, columns: int = 32, device="cpu") -> dict:
    """The table of SGLang's worked examples: row r is 1000 * (r + 1) and counts up; requests have these rows."""
    first = torch.tensor([[1000], [2000]], device=device)
    table = first + torch.arange(columns, device=device)
    return {"req_pool_indices": torch.tensor(rows, device=device), "req_to_token": table}


def in_wider(table: torch.Tensor, extra: int = 9) -> torch.Tensor:
    """The same table as a slice of a wider one, whose other columns must not be read."""
    wide = torch.full((len(table), table.shape[1] + extra), -77, dtype=table.dtype, device=table.device)
    wide[:, :-extra] = table
    return wide[:, :-extra]


def check_buffers(
    path: str, values: dict, dtype: torch.dtype, fields: tuple[str, ...], keep_unused: bool | None
) -> None:
    """Launcher and public function into guarded buffers of which `fields` are of another dtype than by default.

    keep_unused: what the op is told; None for one that does not take it. Then what no list uses is as it was before.
    """
    name = path.rpartition(".")[2]
    module = importlib.import_module("eagle_kernels.ops." + path)
    reference = getattr(importlib.import_module("eagle_kernels.reference.ops." + path), name)
    defaults = {p.name: p.default for p in inspect.signature(getattr(module, name)).parameters.values()}
    specs = module.contract(defaults | values | {"out": None})
    guarded = [
        Guarded(spec.shape, dtype if field in fields else spec.dtype, spec.device)
        for field, spec in zip(specs._fields, specs)
    ]
    out = type(specs)(*(each.tensor for each in guarded))
    options = {} if keep_unused is None else {"keep_unused": keep_unused}
    expected = reference(**values, **options, **({"out": out} if keep_unused else {}))
    for function in (getattr(eagle_kernels.raw, name), getattr(eagle_kernels, name)):
        for tensor, each in zip(out, guarded):
            tensor.copy_(each.before)
        result = function(**values, **options, out=out)
        for field, each, got, want in zip(specs._fields, guarded, result, expected):
            each.check(name, field)
            assert got is getattr(out, field) or got.data_ptr() == getattr(out, field).data_ptr()
            assert_equal(name, f"{dtype} {options}", field, got, want.to(got.dtype))
