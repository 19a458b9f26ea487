"""The page of loads: its numbers are computed from what was measured."""

import pytest

from bench.lab import load


def line(provider: str, size: int, step_ms: float, tokens: float, shape: str = "llama-3.1-8b") -> dict:
    about = {"section": "throughput", "shape": shape, "provider": provider, "case": f"B={size}"}
    return about | {"step_ms": step_ms, "accept_length": tokens}


@pytest.fixture
def steps():
    """A chain that pays for one request, and for 64 only if all is accepted; a tree that never does for 64."""
    times = {"plain": (5.0, 8.0), "naive_eagle": (6.0, 10.0), "chain 3": (7.0, 16.0), "tree 8/5/64": (9.0, 100.0)}
    tokens = {"plain": 1.0, "naive_eagle": 1.7, "chain 3": 2.6, "tree 8/5/64": 4.0}
    lines = [line(name, size, ms, tokens[name]) for name in times for size, ms in zip((1, 64), times[name])]
    return load.measured_steps([line("plain", 1, 99.0, 1.0), *lines, line("plain", 1, 1.0, 1.0, "small")])


def test_the_page_holds_what_is_computed(tmp_path, capsys):
    assert load.main(["--check"]) == 0
    page = tmp_path / "LOAD.md"
    page.write_text(load.PAGE.read_text().replace("| requests |", "| number |"))
    assert load.main(["--check", "--page", str(page)]) == 1
    assert "is not up to date: run python -m bench.lab.load" in capsys.readouterr().out


def test_tables_of_steps(steps):
    assert "| 1 | 5.00 | 6.00 | 7.00 | 9.00 |" in load.step_table(steps)
    even = load.even_table(steps).splitlines()
    assert even[-2:] == ["| 1 | 1.20 | 1.40 | 1.80 |", "| 64 | 1.25 | 2.00 | - |"]


def test_what_is_chosen(steps):
    """As accepted, half of it, a quarter, nothing."""
    assert [load.chosen(steps, 1, share) for share in (1.0, 0.5, 0.25, 0.0)] == [64, 64, 1, 1]
    assert [load.chosen(steps, 64, share) for share in (1.0, 0.5, 0.25, 0.0)] == [2, 2, 1, 1]


def test_other_tables():
    lines = [
        {"provider": "plain", "batch": 8, "rows": 8, "prompt_rows": rows, "step_ms": 5.0 + rows} for rows in (0, 64)
    ]
    assert "| plain | 8 | 8 | 5.00 | 69.00 |" in load.joint_table(lines)
    budget = {"temperature": 0.8, "mean": 8, "most": 32, "each": 2.0, "shared": 2.1}
    assert "| 0.8 | 8 | 2.000 | 32 | 2.100 | +5.0% |" in load.budget_table([budget])
    said = {"case": "8 clients", "provider": "plain", "shape": "llama-3.1-8b", "tokens_per_s": 5.0, "commit": "abc"}
    assert "| 8 clients | plain | 12.5 |" in load.load_table([said, said | {"tokens_per_s": 12.5}])


@pytest.mark.slow
def test_shared_budgets_are_measured(monkeypatch):
    monkeypatch.setattr(load, "SHARED", load.SHARED[:1])
    (measured,) = load.shared_budgets(num_prompts=4, new_tokens=24)
    assert measured["mean"] == 4 and measured["most"] == 16
    assert 1 < measured["each"] < 5 and 1 < measured["shared"] < 5


@pytest.mark.slow
def test_how_likely_drafts_are_accepted():
    lines = load.likely_drafts(num_prompts=2, new_tokens=40)
    assert [line["from"] for line in lines[:7]] == [*load.LIKELY_FROM[:-1]] and len(lines) == 14
    assert all(line["from"] <= line["said"] <= 1 and 0 <= line["accepted"] <= 1 for line in lines if line["drafts"])
    assert lines[0]["accepted"] < 0.05 and lines[6]["accepted"] > 0.8
    told = {"from": 0.9, "drafts": 12, "said": 0.95, "accepted": 0.75}
    table = load.likely_table([told | {"temperature": heat} for heat in (0.0, 0.8)])
    assert table.splitlines()[-1] == "| 0.9 | 12 | 0.950 | 0.750 | 12 | 0.950 | 0.750 |"


def test_what_accepted_tokens_are_worth(monkeypatch):
    monkeypatch.setattr(load, "WEIGHED", ((1, 3, 4, None), (8, 5, 64, 16)))
    measured = load.accepted_tokens(num_prompts=2, new_tokens=24)
    assert [line["tree"] for line in measured] == [*load.WEIGHED] and all(1 < line["tokens"] < 6 for line in measured)
    accepted = [{"tree": list(tree), "tokens": tokens} for tree, tokens in zip(load.WEIGHED, (2.5, 4.0))]
    times = [
        {"batch": size, "tree": tree, "graph_ms": ms}
        for size, all_ms in ((1, (5.0, 6.25, 8.0)), (64, (7.0, 10.0, 28.0)))
        for tree, ms in zip((None, *map(list, load.WEIGHED)), all_ms)
    ]
    table = load.worth_table(times, accepted).splitlines()
    assert table[0] == "| requests | 1/3/4 | 8/5/64, 16 rows |"
    assert table[-2:] == ["| 1 | 2.00 | 2.50 |", "| 64 | 1.75 | 1.00 |"]
