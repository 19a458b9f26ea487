"""The laboratory's notebooks run from top to bottom, say what is true, and hold what they show."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from eagle_kernels import EAGLEInference
from op_tests.harness import notebook

pytest.importorskip("matplotlib").use("Agg")

FOLDER = Path(__file__).parents[2] / "bench" / "lab" / "notebooks"


def stored(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def run(name: str, *expressions: str, **settings: str) -> list[Any]:
    """Runs a notebook, with these settings instead of its own, and returns the expressions' values at its end.

    Each cell must hold outputs of the kinds that it has now, and the same texts where no machine is measured."""
    content = stored(name)
    cells = notebook.code_cells(content)
    for setting, value in settings.items():
        (cell,) = [cell for cell in cells if f"    {setting}=" in "".join(cell["source"])]
        cell["source"] = [f"    {setting}={value},\n" if f"    {setting}=" in line else line for line in cell["source"]]
    probe = {"cell_type": "code", "source": [f"[{', '.join(expressions)}]"]}
    *seen, values = notebook.run({"cells": [*cells, probe]})
    for number, (now, cell) in enumerate(zip(seen, cells, strict=True), 1):
        about = f"{name}.ipynb, code cell {number}: jupyter nbconvert --to notebook --execute --inplace renders it anew"
        assert set(map(kinds, now)) == set(map(kinds, cell["outputs"])), about  # a slow cell's text comes in parts
        assert name != "theory" or "".join(map(text, now)) == "".join(map(text, cell["outputs"])), about
    return ast.literal_eval(text(values[0]))


def kinds(output: dict[str, Any]) -> tuple[str, ...]:
    return output["output_type"], output.get("name", ""), *sorted(output.get("data", {}))


def text(output: dict[str, Any]) -> str:
    return "".join(output.get("text") or output["data"]["text/plain"])


def test_there_are_three_of_one_kind():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == ["experiment", "profiling", "theory"]
    for path in FOLDER.glob("*.ipynb"):
        content = stored(path.stem)
        assert content["nbformat"] == 4 and content["metadata"]["kernelspec"]["name"] == "python3"
        assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
        assert path.stat().st_size < 200_000 and str(FOLDER.parents[2]) not in path.read_text(encoding="utf-8")


def test_theory():
    names = ("textbook", "ridge", "tokens_per_step", "max(from_residual)", "min(from_target)", "max(gaps)", "best")
    intensity, ridge, tokens, right, wrong, gap, best, speedup = run("theory", *names, "ideal_speedup(0.8, 4, 0.05)")
    assert (intensity, round(ridge), round(tokens, 4)) == (1, 333, 3.7222) and max(right, gap) < 1e-12 < 1e-3 < wrong
    assert all((count > 0) == (alpha > cost) for (alpha, cost), count in best.items()) and 2 < speedup < 3


def test_profiling():
    names = ("same_logits", "plain.generated_ids", "by_hand", "drafted.generated_ids")
    same_logits, plain, by_hand, drafted, texts = run("profiling", *names, "[ids for ids, _ in runs.values()]")
    assert same_logits and len(plain) == 24 and by_hand == drafted == plain and texts == [plain] * 3


def test_experiment(monkeypatch):
    monkeypatch.setattr(EAGLEInference, "warmup", lambda *_, **__: None)  # on the CPU there is nothing to compile
    names = ("status", "same_text", "[(cell['config']['K'], cell['mean_accept_length']) for cell in own]")
    names += ("distinct(own + committed, 'prompt_domain')", "len(committed)", "table[0]")
    settings = {"max_new_tokens": "8", "prompts_per_domain": "1"}
    status, same_text, own, domains, count, titles = run("experiment", *names, **settings)
    assert status == 0 and same_text and titles[-4:-1] == ["K=1", "K=2", "K=4"]
    assert [k for k, _ in own] == [None, 1, 2, 4] * 2
    assert all(1 <= tokens <= 1 + (k or 0) for k, tokens in own) and max(own[1:4] + own[5:])[1] > 2
    assert domains == ["code", "conversation", "summarization"] and count >= 39
