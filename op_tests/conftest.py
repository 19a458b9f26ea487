"""Kernels run on the GPU where there is one, else through Triton's interpreter on CPU tensors."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of a kernel

from .harness import ahead_of_time, interpreter

# Threads of torch wait for each other: with another worker or a compiler on one's core the others spin all that while.
NUM_THREADS = max(1, os.cpu_count() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "2")))
torch.set_num_threads(NUM_THREADS)
os.environ.setdefault("OMP_NUM_THREADS", str(NUM_THREADS))  # of the programs that tests start

if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.speed_up()


def is_compilation(item) -> bool:
    return item.name.startswith("test_compiles_for_every_target[")


def pytest_collection_modifyitems(items):
    # Compiled beside all other tests, from the last on, where the long ones are; behind the others this process takes
    # what is left, from the first on.
    compilations = [item for item in items if is_compilation(item)]
    items[:] = [item for item in items if not is_compilation(item)] + compilations
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        elif "full" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="full cross of shapes, run on a GPU"))


def pytest_collection_finish(session):
    """Ahead-of-time compilation takes minutes in child processes: it starts first, beside all other tests."""
    is_spread = "PYTEST_XDIST_WORKER" in os.environ or session.config.getoption("numprocesses", None)
    if not is_spread and not session.config.option.collectonly:
        wanted = [item.callspec.params["path"] for item in session.items if is_compilation(item)]
        ahead_of_time.begin(wanted[::-1])


def pytest_unconfigure():
    ahead_of_time.end()


@pytest.fixture
def note(record_property):
    """`note(text)` prints a measured number at the end of the run, also when the test passes."""
    return lambda text: record_property("note", text)


def pytest_terminal_summary(terminalreporter):
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, text in getattr(report, "user_properties", ()):
                if name == "note" and report.when == "call":
                    terminalreporter.write_line(f"{report.nodeid}: {text}")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
