"""`python -m bench.compare`: ratios of two commits, their range, and what is noise."""

from __future__ import annotations

import json

import pytest

from bench.compare import compare, main, of_commit

OLD, NEW = "aaaaaaa", "bbbbbbb"


def line(commit: str, case: str, p50: float, spread: float = 0.0, **more) -> dict:
    percentiles = {"graph_p20_us": p50 - spread, "graph_p50_us": p50, "graph_p80_us": p50 + spread}
    versions = {"torch": "2.11", "triton": "3.6"}
    return {"op": "op", "case": case, "provider": "eagle_kernels", "gpu": "GPU", "commit": commit,
            "versions": versions, **percentiles, **more}  # fmt: skip


def verdicts(old: list[dict], new: list[dict]) -> dict[tuple[str, str], str]:
    return {(change.case, change.metric): change.verdict for change in compare(old, new)}


def test_a_change_is_told_from_noise_by_the_range_of_both():
    old = [line(OLD, "faster", 10, 1), line(OLD, "noise", 10, 1), line(OLD, "slower", 10, 1), line(OLD, "alone", 10)]
    new = [line(NEW, "faster", 8, 0.9), line(NEW, "noise", 8, 1.1), line(NEW, "slower", 12.1, 1), line(NEW, "alone", 5)]
    assert verdicts(old, new) == {
        ("faster", "graph"): "faster",
        ("noise", "graph"): "noise",
        ("slower", "graph"): "slower",
        ("alone", "graph"): "one run",
    }


def test_runs_of_one_commit_are_one_range():
    """What one run alone would call faster is noise where another run of the same commit was as slow."""
    old = [line(OLD, "case", 10, 0.1), line(OLD, "case", 12, 0.1)]
    assert verdicts(old[:1], [line(NEW, "case", 11, 0.1)]) == {("case", "graph"): "slower"}
    (change,) = compare(old, [line(NEW, "case", 11, 0.1)])
    assert change.verdict == "noise"
    assert (change.old.middle, change.old.low, change.old.high) == (11, 9.9, 12.1)
    assert change.ratio == 1 and change.range == pytest.approx((10.9 / 12.1, 11.1 / 9.9))


def test_times_without_percentiles_vary_between_runs():
    old = [line(OLD, "case", 1, host_p50_us=20), line(OLD, "case", 1, host_p50_us=22)]
    new = [line(NEW, "case", 1, host_p50_us=10), line(NEW, "case", 1, host_p50_us=12)]
    assert verdicts(old, new)["case", "raw"] == "faster"
    assert verdicts(old, new[:1])["case", "raw"] == "one run"


@pytest.mark.parametrize("other", [{"gpu": "another"}, {"op": "another"}, {"versions": {"torch": "2.12"}}])
def test_what_differs_in_more_than_the_commit_is_not_compared(other):
    assert compare([line(OLD, "case", 1)], [line(NEW, "case", 1, **other)]) == []


def test_commits_may_be_abbreviated_and_dirty_ones_are_others():
    lines = [line(commit, "case", 1) for commit in (OLD, f"{OLD}11111", f"{OLD}11111-dirty", NEW, "")]
    assert [found["commit"] for found in of_commit(lines, OLD[:5])] == [OLD, f"{OLD}11111"]
    assert [found["commit"] for found in of_commit(lines, f"{OLD}1111122222")] == [OLD, f"{OLD}11111"]
    assert [found["commit"] for found in of_commit(lines, f"{OLD}-dirty")] == [f"{OLD}11111-dirty"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "GPU").mkdir()
    file = tmp_path / "GPU" / "op.jsonl"
    lines = [line(OLD, "quiet", 10, 1), line(NEW, "quiet", 10, 1), line(OLD, "B=1", 10, 1), line(NEW, "B=1", 5, 1)]
    step = {"op": "app", "section": "tree", "case": "B=1", "provider": "eagle_kernels", "gpu": "GPU"}
    lines += [step | {"commit": OLD, "step_ms": 3.0}, step | {"commit": NEW, "step_ms": 2.0}]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return tmp_path


def test_the_command_prints_both(folder, capsys):
    assert main([OLD, NEW, "--results", str(folder), "--changed"]) == 0
    told = capsys.readouterr().out
    assert "GPU: 1 faster, 0 slower, 1 noise, 1 one run; median ratio 0.667" in told
    assert "| op | B=1 | graph, µs | 10 | 5 | 0.500 | 0.364 .. 0.667 | faster |" in told
    assert "| app | tree B=1 | step, ms | 3 | 2 | 0.667 | 0.667 .. 0.667 | one run |" in told
    assert "quiet" not in told


def test_the_command_says_what_is_missing(folder, capsys):
    assert main([OLD, "ccccccc", "--results", str(folder)]) == 2
    assert "no results of eagle_kernels at ccccccc; there are some at aaaaaaa, bbbbbbb" in capsys.readouterr().out
    assert main([OLD, NEW, "--results", str(folder), "--op", "app", "--metric", "graph"]) == 2
