"""Kernels run on the GPU where there is one, else through Triton's interpreter on CPU tensors."""

import os
import sys
from collections import Counter

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of a kernel

# Threads of torch wait for each other: with another worker or a compiler on one's core the others spin all that while.
NUM_THREADS = max(1, os.cpu_count() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "2")))
torch.set_num_threads(NUM_THREADS)
os.environ.setdefault("OMP_NUM_THREADS", str(NUM_THREADS))  # of the programs that tests start

if os.environ.get("TRITON_INTERPRET") == "1":
    from eagle_kernels.runtime.interpreter import speed_up
    from op_tests.harness.hints import watch_hints
    from op_tests.harness.poison import poison_memory

    speed_up()
    watch_hints()
    poison_memory()


LONG = tuple(f"op_tests/test_{name}.py" for name in ("ahead_of_time", "types", "examples"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: each worker imports torch, which takes some 500 MiB; beyond these the tests gain little."""
    return min(8, os.cpu_count())


def pytest_collection_modifyitems(config, items):
    _mark(config, items)
    # first what takes long, each worker some of it, so that none is left with it when the others are done
    long = [item for item in items if item.nodeid.startswith(LONG)]
    others = [item for item in items if not item.nodeid.startswith(LONG)]
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    parts = [slice(worker * len(others) // workers, (worker + 1) * len(others) // workers) for worker in range(workers)]
    items[:] = [item for worker, part in enumerate(parts) for item in (*long[worker::workers], *others[part])]


def _mark(config, items):
    """Marks the first case of each test of an op as `smoke`; skips what this machine cannot run, or not soon."""
    seen, crossed = set(), set()
    for item in items:
        if (
            item.get_closest_marker("full") is None
            and item.nodeid.startswith("op_tests/ops/")
            and item.function not in seen
        ):
            seen.add(item.function)
            item.add_marker(pytest.mark.smoke)
        if torch.cuda.is_available():
            continue
        # markers alone: keywords hold the names of folders, among them that of the checkout
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        elif item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="full cross of shapes, run on a GPU"))
        elif config.getoption("--slow"):
            continue
        elif item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="takes long without a GPU, run with --slow"))
        elif item.get_closest_marker("cross"):
            if item.function in crossed:
                item.add_marker(pytest.mark.skip(reason="another case of a cross, run on a GPU or with --slow"))
            crossed.add(item.function)


# In pytest's cache: tests, and whole files, that were skipped for want of a package.
MISSED = "eagle_kernels/missed"


def pytest_addoption(parser):
    parser.addoption("--missed", action="store_true", help="run what was skipped before for want of a package")
    parser.addoption("--slow", action="store_true", help="run without a GPU what takes long there, too")


def pytest_configure(config):
    cache = getattr(config, "cache", None)  # None for -p no:cacheprovider
    missed = [] if cache is None else cache.get(MISSED, [])
    if config.getoption("--missed"):
        if not missed:
            raise pytest.UsageError("--missed: no test was skipped for want of a package")
        config.args[:] = missed
    if cache is not None and not hasattr(config, "workerinput"):  # this process hears of all tests
        config.pluginmanager.register(Missed(cache, missed))


class Missed:
    """Keeps what is skipped for want of a package until it has run."""

    def __init__(self, cache, missed):
        self.cache, self.known = cache, set(missed)

    def pytest_runtest_logreport(self, report):
        if report.skipped and "could not import" in str(report.longrepr):
            self.known.add(report.nodeid)
        elif report.when == "call":
            self.known -= {report.nodeid, report.nodeid.partition("::")[0]}

    pytest_collectreport = pytest_runtest_logreport

    def pytest_sessionfinish(self):
        self.cache.set(MISSED, sorted(self.known))


@pytest.fixture
def note(record_property):
    """`note(text)` prints a measured number at the end of the run, also when the test passes."""
    return lambda text: record_property("note", text)


def _reason(report) -> str:
    """Why a test was skipped; of a missing package, that alone."""
    return report.longrepr[2].removeprefix("Skipped: ").partition(": No module named")[0]


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", ())
    if skipped and "s" not in terminalreporter.reportchars:  # -rs lists them itself
        reasons = Counter(_reason(report) for report in skipped)
        terminalreporter.write_line(f"{len(skipped)} skipped:")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:6} {reason}")
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


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """torch.compile counts what it compiles by the wrapper's code, which all public functions share."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
