"""What is skipped: for want of a package it is known until it has run, and a run sums up the reasons."""

from types import SimpleNamespace

import pytest

from . import conftest

pytest_plugins = "pytester"

SKIPPED = ("file.py", 3, "Skipped: could not import 'transformers': No module named 'transformers'")


class Cache(dict):
    """Pytest's cache, as far as it is used."""

    def set(self, key, value):
        self[key] = value


def report(nodeid, when="call", longrepr=None):
    return SimpleNamespace(nodeid=nodeid, when=when, longrepr=longrepr, skipped=longrepr is not None)


def item(*markers, **more):
    """A test with these markers; added: those that a hook adds."""
    added = []
    return SimpleNamespace(
        name="test_it", nodeid="op_tests/test_it.py::test_it", add_marker=added.append, added=added,
        get_closest_marker=lambda marker: marker if marker in markers else None, **more,
    )  # fmt: skip


def config(cache, *, is_missed=False, slow=False, **more):
    plugins, options = [], {"--missed": is_missed, "--slow": slow}
    manager = SimpleNamespace(register=plugins.append)
    return SimpleNamespace(
        cache=cache, getoption=options.get, args=["op_tests"], pluginmanager=manager, plugins=plugins, **more
    )  # fmt: skip


def run(cache, *reports, is_missed=False):
    """Returns what pytest would run, after these reports of what it ran."""
    given = config(cache, is_missed=is_missed)
    conftest.pytest_configure(given)
    (plugin,) = given.plugins
    for one in reports:
        (plugin.pytest_collectreport if one.when == "collect" else plugin.pytest_runtest_logreport)(one)
    plugin.pytest_sessionfinish()
    return given.args


def test_what_was_skipped_for_a_package_runs_once():
    cache = Cache()
    tests = [report("a.py::one"), report("a.py::two", "call", SKIPPED), report("b.py::three", "setup", SKIPPED)]
    tests += [report("c.py", "collect", SKIPPED), report("d.py::four", "setup", ("d.py", 1, "Skipped: needs a GPU"))]
    assert run(cache, *tests) == ["op_tests"]
    missed = ["a.py::two", "b.py::three", "c.py"]
    assert run(cache, is_missed=True) == missed, "and a run that ran none of them forgets none"
    ran = [report("a.py::two"), report("c.py::five", "setup"), report("c.py::five"), report("b.py::three", "setup")]
    assert run(cache, *ran, is_missed=True) == missed
    assert run(cache, is_missed=True) == ["b.py::three"]
    run(cache, report("b.py::three"))
    with pytest.raises(pytest.UsageError, match="^--missed: no test was skipped for want of a package$"):
        run(cache, is_missed=True)


def test_a_worker_runs_the_same_and_a_run_without_a_cache_keeps_nothing():
    cache = Cache({conftest.MISSED: ["a.py::one"]})
    worker = config(cache, is_missed=True, workerinput={})
    conftest.pytest_configure(worker)
    assert worker.args == ["a.py::one"] and not worker.plugins
    without = config(None, is_missed=False)
    conftest.pytest_configure(without)
    assert without.args == ["op_tests"] and not without.plugins


@pytest.mark.parametrize("name", ["full", "gpu"])
def test_a_checkout_may_have_any_name(name, monkeypatch):
    """A folder's name is among the keywords of the tests in it; only their markers leave them out."""
    monkeypatch.setattr(conftest.torch.cuda, "is_available", lambda: False)
    items = [item(keywords={name: True}), item(name, keywords={name: True})]
    conftest.pytest_collection_modifyitems(config(None), items)
    assert [[marker.name for marker in each.added] for each in items] == [[], ["skip"]]


def test_of_slow_cases_the_first_runs_without_a_gpu(monkeypatch):
    """It is the first that no other mark leaves out; all run with --slow."""
    monkeypatch.setattr(conftest.torch.cuda, "is_available", lambda: False)

    def skipped(slow):
        one, other = object(), object()
        items = [item("cross", "full", function=one), *(item("cross", function=one) for _ in range(3))]
        items += [item("cross", function=other), item("slow", function=None)]
        conftest.pytest_collection_modifyitems(config(None, slow=slow), items)
        return [bool(each.added) for each in items]

    assert skipped(False) == [True, False, True, True, False, True]
    assert skipped(True) == [True, False, False, False, False, False]


def test_each_worker_begins_with_some_of_what_takes_long(monkeypatch):
    """Tests are handed out in one consecutive part per worker."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    long, files = conftest.LONG[0], [*"abcd", conftest.LONG[0], "e", conftest.LONG[0], conftest.LONG[0]]
    items = [SimpleNamespace(nodeid=file, get_closest_marker=lambda marker: None) for file in files]
    conftest.pytest_collection_modifyitems(config(None), items)
    assert [item.nodeid for item in items] == [long, long, "a", "b", long, "c", "d", "e"]


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])  # each worker imports torch
def test_a_run_sums_up_what_it_skipped(pytester, workers):
    """The most frequent reason first, and nothing of what else was reported is lost."""
    tests = """
import pytest

@pytest.mark.skip(reason="needs a moon")
@pytest.mark.parametrize("case", range(12))
def test_moon(case): pass

def test_package(): pytest.importorskip("no_such_package")
@pytest.mark.xfail(reason="known")
def test_known(): assert 0
def test_red(): assert 1 == 2
def test_green(note): note("measured")
"""
    pytester.makepyfile(test_one=tests, test_two="import pytest; pytest.skip('whole', allow_module_level=True)")
    pytester.makefile(".ini", pytest="[pytest]\naddopts = -rfExX")
    run = pytester.runpytest_inprocess("-q", "-p", "op_tests.conftest", "-p", "xdist", "-n", workers)
    run.assert_outcomes(passed=1, failed=1, xfailed=1, skipped=14)
    run.stdout.fnmatch_lines(["14 skipped:", "    12 needs a moon", "     1 *", "     1 *", "*test_green: measured"])
    run.stdout.fnmatch_lines_random(
        ["     1 could not import 'no_such_package'", "     1 whole", "XFAIL *", "FAILED *test_red*"]
    )
    run.stdout.no_fnmatch_line("SKIPPED*")


def test_a_run_that_lists_what_it_skipped_does_not_sum_it_up(pytester):
    pytester.makepyfile("import pytest\n@pytest.mark.skip(reason='needs a moon')\ndef test_it(): pass")
    run = pytester.runpytest_inprocess("-q", "-rs", "-p", "op_tests.conftest")
    run.stdout.fnmatch_lines(["SKIPPED*needs a moon"])
    run.stdout.no_fnmatch_line("*skipped:")
