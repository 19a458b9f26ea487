"""The declarations under pytest-benchmark: `python -m pytest bench --benchmark-only`; `-k build_tree` selects."""

from __future__ import annotations

import functools

import pytest
import torch

from .harness.check import check_provider, expected_outputs
from .harness.declaration import Unavailable, declared

pytest.importorskip("pytest_benchmark", reason="needs the package pytest-benchmark")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BENCHMARKS = {benchmark.op: benchmark for benchmark in declared()}
RUNS = [
    pytest.param(op, provider, index, id=f"{op}-{case.name}-{provider}")
    for op, benchmark in BENCHMARKS.items()
    for index, case in enumerate(benchmark.cases)
    for provider in benchmark.all_providers(with_peers=False)
]


@functools.cache
def check_small_cases(op: str, provider: str) -> None:
    """Checks once for all cases of a provider; a mismatch is raised for each of them."""
    declaration = BENCHMARKS[op]
    for case in declaration.small_cases:
        check(declaration, case, provider)


def check(declaration, case, provider: str) -> None:
    prepare = declaration.all_providers(with_peers=False)[provider]
    check_provider(declaration, case, prepare, expected_outputs(declaration, case, DEVICE), DEVICE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="timing needs a GPU")
@pytest.mark.parametrize(("op", "provider", "index"), RUNS)
def test_benchmark(op, provider, index, benchmark):
    declaration = BENCHMARKS[op]
    case = declaration.cases[index]
    try:
        check_small_cases(op, provider)
        if case.is_checked:
            check(declaration, case, provider)
        run = declaration.all_providers(with_peers=False)[provider](declaration.inputs(case, DEVICE))
    except Unavailable as reason:
        pytest.skip(str(reason))

    def call():
        run()
        torch.cuda.synchronize()

    benchmark.pedantic(call, rounds=50, warmup_rounds=3)
