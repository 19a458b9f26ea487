"""The declarations under pytest-benchmark: `python -m pytest bench --benchmark-only`; `-k build_tree` selects."""

from __future__ import annotations

import pytest
import torch

from .harness.check import check_provider, expected_outputs
from .harness.declaration import declared

pytest.importorskip("pytest_benchmark", reason="needs the package pytest-benchmark")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RUNS = [
    pytest.param(benchmark, case, provider, id=f"{benchmark.op}-{case.name}-{provider}")
    for benchmark in declared()
    for case in benchmark.cases
    for provider in benchmark.all_providers(with_peers=False)
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="timing needs a GPU")
@pytest.mark.parametrize(("declaration", "case", "provider"), RUNS)
def test_benchmark(declaration, case, provider, benchmark):
    prepare = declaration.all_providers(with_peers=False)[provider]
    for checked in (*declaration.small_cases, *([case] if case.is_checked else [])):
        check_provider(declaration, checked, prepare, expected_outputs(declaration, checked, DEVICE), DEVICE)
    run = prepare(declaration.inputs(case, DEVICE))

    def call():
        run()
        torch.cuda.synchronize()

    benchmark.pedantic(call, rounds=50, warmup_rounds=3)
