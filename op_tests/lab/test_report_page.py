"""The page of an experiment: what is in it is what was measured."""

import sys

import pytest

from bench import report
from bench.lab import records, tables
from bench.lab import report as page
from bench.lab.report import write_page

from .made_cells import GPU, cell, experiment, kernels, many, write

MARKS = "<!-- bench:begin -->\n<!-- bench:end -->\n"


def page_of(tmp_path, cells):
    pytest.importorskip("matplotlib")
    file = write(tmp_path / "cells.jsonl", cells)
    assert report.main(["--experiment", str(file), "--output", str(tmp_path / "out")]) == 0
    return (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


def test_the_newest_line_of_a_cell_counts_and_k_ascends():
    lines = [cell(K=4), cell(K=2, speedup=1.0), cell(K=None), cell(K=2, speedup=3.0), cell("other"), cell(K=2, gpu="b")]
    cells = records.newest_cells(lines)
    shown = [(each["config"]["model_pair_name"], records.label_of(each), each["gpu"]) for each in cells]
    chain = [("embedded", label, GPU) for label in ("plain", "chain K=2", "chain K=4")]
    assert shown == [*chain, ("embedded", "chain K=2", "b"), ("other", "chain K=2", GPU)]
    assert cells[1]["speedup"] == 3.0
    assert len(records.by_setting(cells)) == 3


def test_tables_name_machines():
    """Where there are several; what all cells share is said once."""
    cells = records.newest_cells([*experiment(), *(each | {"gpu": "Other GPU"} for each in experiment())])
    shared, (head, *rows) = tables.cell_table(cells)
    assert len(rows) == len(cells) == 42 and {row[head.index("machine")] for row in rows} == {GPU, "Other GPU"}
    assert "machine" not in shared and "dtype: float32" in shared and "dtype" not in head
    head, *rows = tables.method_table(cells)
    assert {row[head.index("machine")] for row in rows} == {GPU, "Other GPU"}
    assert f"machine: {GPU}" in tables.cell_table(records.newest_cells(experiment()))[0]


def test_cells_of_other_runs_stand_by_themselves():
    """Those that were measured with another plain decoding: it is beside them, and they are compared by speed-up."""
    slow = {"tokens_per_second": 9.0, "plain_tokens_per_second": 3.0, "speedup": 3.0}
    cells = records.newest_cells([*experiment(domains=("code",), methods=("chain",)), cell(K=8, **slow)])
    _, first, second = tables.method_table(cells)
    assert first[4] == "100" and first[6:10] != 4 * ["-"] and first[9] == "-"
    assert second[4] == "3" and second[6:9] == 3 * ["-"] and second[9].startswith("9 (3.00×")
    assert records.fastest(cells)["speedup"] == 3.0 and records.fastest_labels(cells) == ["plain", "chain K=8"]


def test_settings_have_names_of_their_own():
    others = [{"prompts": "built in, 3, 01234567"}, {"prompts": "built in, 24, 89abcdef"}]
    cells = [each | other for other in others for each in experiment()]
    for each in cells[: len(cells) // 4]:
        each["config"] = each["config"] | {"seed": 7}
    names = [str(setting) for setting in records.by_setting(records.newest_cells(cells))]
    assert len(names) == len(set(names)) == 3
    assert "seed 7" in names[0] and "24 built-in prompts (text hash 89abcdef)" in names[-1]


@pytest.mark.slow
def test_the_page_has_every_cell_and_picture(tmp_path):
    cells = experiment(pairs=("one", "two"), batch_sizes=(1, 16, 2), temperatures=(0.0, 0.5))
    text = page_of(tmp_path, cells)
    assert text.count("\n| ") == 2 * 2 + len(cells) + 2 * 3 * 2 * 3  # heads and rules, cells, fastest of each domain
    pictures = sorted(path.name for path in (tmp_path / "out" / "figures").iterdir())
    assert len(pictures) == 2 * (4 * page.MAX_SETTINGS + 4) and "speedup_map_one_b1_t0.svg" in pictures
    assert all(f"](figures/{name})" in text for name in pictures if name.endswith(".svg"))
    assert f"Pictures show {page.MAX_SETTINGS} of 12 settings" in text


def test_names_are_text_wherever_they_stand(tmp_path):
    hostile = "<script>alert(1)</script>\"'$x^{$ & | ../"
    page_of(tmp_path, experiment(pairs=(hostile, "b"), domains=("<img src=x>",)))
    files = [path.name for path in (tmp_path / "out" / "figures").iterdir()]
    assert all(name.replace("_", "").replace(".", "").isalnum() for name in files) and len(files) == 16
    _, table = tables.cell_table([cell(hostile), cell("b")])
    assert table[1][0].startswith("&lt;script>") and "\\|" in table[1][0]


def test_numbers_that_are_none(tmp_path):
    """What a log writes as null."""
    gone = dict.fromkeys(("tokens_per_second", "speedup", "mean_accept_length", "peak_memory_mib", "step_ms"))
    text = page_of(tmp_path, [*experiment(), cell(K=2, **gone, inter_token_ms=[None] * 101)])
    assert text.count(" - ") > 6 and "nan" not in text and "None" not in text
    page_of(tmp_path / "all", [each | gone | {"accepted_per_depth": [], "phase_ms": {}} for each in experiment()])


@pytest.mark.slow
def test_the_same_files_each_time(tmp_path):
    contents = []
    for name in "ab":
        page_of(tmp_path / name, experiment(batch_sizes=(1, 8)))
        files = sorted((tmp_path / name / "out").rglob("*.*"))
        contents.append({file.relative_to(tmp_path / name): file.read_bytes() for file in files})
    assert contents[0] == contents[1] and len(contents[0]) == 1 + 2 * (2 * 4 + 1)
    assert not any(b"<dc:date>" in content for content in contents[0].values())


def test_a_page_without_matplotlib(monkeypatch, tmp_path, capsys):
    """It has the tables, and says, as the terminal does, what is missing. A page with pictures is not written over."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    cells = write(tmp_path / "results" / "gpu" / "experiment.jsonl", experiment())
    out = tmp_path / "out" / "report.md"
    assert report.main(["--experiment", str(cells), "--output", str(out.parent)]) == 0
    reason = "There are no pictures: bench.report needs the package matplotlib, which is not installed: "
    reason += "pip install matplotlib"
    assert capsys.readouterr() == (f"wrote {out}. {reason}\n", "")
    text = out.read_text(encoding="utf-8")
    assert reason in text and "figures" not in text and text.count("tree") > 9
    assert [path.name for path in out.parent.iterdir()] == ["report.md"]
    (tmp_path / "README.md").write_text(MARKS)
    where = ["--results", str(tmp_path / "results"), "--readme", str(tmp_path / "README.md")]
    kept = tmp_path / "results" / "gpu" / "report.md"
    assert report.main(where) == 0 and f"wrote {kept}. There are no pictures" in capsys.readouterr().out
    assert f"## An experiment\n\nOn {GPU}" in (tmp_path / "results" / "gpu" / "README.md").read_text()
    kept.write_text("pictures")
    assert report.main(where) == 0 and kept.read_text() == "pictures"
    assert f"left {kept} as it is: bench.report needs the package matplotlib" in capsys.readouterr().out


def test_a_page_with_nothing_to_draw_needs_no_matplotlib(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    cells = write(tmp_path / "cells.jsonl", [cell(K=None)])
    assert report.main(["--experiment", str(cells), "--output", str(tmp_path / "out")]) == 0
    said = "There are no pictures: nothing was measured that one could show."
    assert capsys.readouterr().out == f"wrote {tmp_path / 'out' / 'report.md'}. {said}\n"
    assert said in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


def test_hashes_say_of_what():
    """A hash of prompts and a cell's own look like a commit."""
    assert records.prompts_text("built in, 24, a680ba01") == "24 built-in prompts (text hash a680ba01)"
    assert records.prompts_text("mine.json, 3, a680ba01") == "3 prompts of mine.json (text hash a680ba01)"
    assert (records.prompts_text("others"), records.prompts_text("")) == ("prompts others", "")
    cells = [each | {"prompts": "built in, 24, a680ba01", "cell_hash": "0123456789ab"} for each in experiment()]
    shared, (head, row, *_) = tables.cell_table(records.newest_cells(cells))
    assert head[-1] == "experiment cell" and row[-1] == "0123456789ab" and "which is no commit" in tables.LEGEND
    assert "commit: abc1234" in shared and "prompts: 24 built-in prompts (text hash a680ba01)" in shared


def test_the_command(monkeypatch, tmp_path, capsys):
    """A table and a page beside the results; `--check` writes neither."""
    pytest.importorskip("matplotlib")
    folder = tmp_path / "results" / "gpu"
    write(folder / "experiment.jsonl", [*experiment(), cell(K=2, tokens_per_second=321.4, speedup=3.21)])
    (tmp_path / "README.md").write_text(MARKS)
    where = ["--results", str(tmp_path / "results"), "--readme", str(tmp_path / "README.md")]
    assert report.main(["--check", *where]) == 1 and not (folder / "figures").exists()
    assert report.main(where) == 0 and (folder / "report.md").exists()
    lines = (folder / "README.md").read_text().splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("| pair"))
    assert lines[head] == "| pair | batch | T | domain | plain | method | K=1 | K=2 | K=4 | at commit |"
    assert len(lines) == head + 2 + 6 and "321 (3.21×, 2.05)" in lines[head + 2]
    assert lines[head + 2].startswith("| embedded | 1 | 0 | code | 100 | chain |")
    capsys.readouterr()
    assert report.main(["--check", *where]) == 0
    assert report.main(["--experiment", str(tmp_path / "none"), "--output", str(tmp_path)]) == 2
    assert "holds no cell of an experiment" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        report.main(["--experiment", "x"])


def test_throughput_and_kernels_without_an_experiment(tmp_path):
    pytest.importorskip("matplotlib")
    steps = [
        {"section": "throughput", "shape": "8b", "gpu": GPU, "commit": "abc-dirty", "provider": provider,
         "case": f"B={size}", "tokens_per_s": 100.0 * size**power}
        for provider, power in (("plain", 1.0), ("tree", 0.5)) for size in (1, 4)
    ]  # fmt: skip
    assert write_page(tmp_path, [], steps, kernels()) == f"wrote {tmp_path / 'report.md'} and {tmp_path / 'figures'}"
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "## Throughput against batch" in text and "4 of these numbers were measured with uncommitted" in text
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"throughput_8b", "roofline"}
    assert page.is_drawable([], steps, []) and page.is_drawable([], [], kernels())
    assert not page.is_drawable([], [], [{"op": "build_tree", "graph_p50_us": 1.0}])


def test_500_cells(tmp_path):
    assert len(many()) == 510 and page_of(tmp_path, many()).count("| qwen3_eagle3 |") == 102 + 6
