"""The page of an experiment: what is in it is what was measured, and names stay names."""

from __future__ import annotations

import sys
import time
from html.parser import HTMLParser

import pytest

from bench import report
from bench.lab import gallery, records, tables
from bench.lab.report import render, write_page

from .made_cells import GPU, cell, experiment, kernels, many, write

HOSTILE = "<script>alert(1)</script>\"'$x^{$ & https://evil.example/"
VOID = {"meta", "img"}


class Page(HTMLParser):
    """What a browser would find; every element must be closed where it was opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.cells = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["td"]:
            self.cells[-1] += data


def page_of(tmp_path, cells):
    pytest.importorskip("matplotlib")
    file = write(tmp_path / "cells.jsonl", cells)
    assert report.main(["--experiment", str(file), "--output", str(tmp_path / "out")]) == 0
    return (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_the_newest_line_of_a_cell_counts_and_k_ascends():
    lines = [cell(K=4), cell(K=2, speedup=1.0), cell(K=None), cell(K=2, speedup=3.0), cell("other"), cell(K=2, gpu="b")]
    cells = records.newest_cells(lines)
    shown = [(each["config"]["model_pair_name"], records.label_of(each), each["gpu"]) for each in cells]
    chain = [("embedded", label, GPU) for label in ("plain", "chain K=2", "chain K=4")]
    assert shown == [*chain, ("embedded", "chain K=2", "b"), ("other", "chain K=2", GPU)]
    assert cells[1]["speedup"] == 3.0
    assert len(records.by_setting(cells)) == 3
    with pytest.raises(ValueError, match="cell 2 of the experiment has no speedup"):
        records.newest_cells([cell(), {name: value for name, value in cell().items() if name != "speedup"}])


def test_tables_tell_machines_apart():
    """Where there are several; what all cells share is told once."""
    cells = records.newest_cells([*experiment(), *(each | {"gpu": "Other GPU"} for each in experiment())])
    for table in (tables.cell_table(cells), tables.best_table(cells)):
        (column,) = [column for column in table.columns if column.title == "machine"]
        assert {column.text(row) for row in table.rows} == {GPU, "Other GPU"}
        assert "machine" not in table.note and "dtype: float32" in table.note
    head, *rows = tables.markdown_table(cells)
    assert {row[head.index("machine")] for row in rows} == {GPU, "Other GPU"}
    assert f"machine: {GPU}" in tables.cell_table(records.newest_cells(experiment())).note


def test_cells_of_other_runs_stand_by_themselves():
    """Those that were measured with another plain decoding: it is beside them, and they are compared by speed-up."""
    slow = {"tokens_per_second": 9.0, "plain_tokens_per_second": 3.0, "speedup": 3.0}
    cells = records.newest_cells([*experiment(domains=("code",), methods=("chain",)), cell(K=8, **slow)])
    _, first, second = tables.markdown_table(cells)
    assert first[4] == "100" and first[6:10] != 4 * ["-"] and first[9] == "-"
    assert second[4] == "3" and second[6:9] == 3 * ["-"] and second[9].startswith("9 (3.00×")
    (best,) = tables.best_table(cells).rows
    assert best["speedup"] == 3.0 and records.fastest_labels(cells) == ["plain", "chain K=8"]


def test_settings_have_names_of_their_own():
    others = [{"prompts": "built in, 3, 01234567"}, {"prompts": "built in, 24, 89abcdef"}]
    cells = [each | other for other in others for each in experiment()]
    for each in cells[: len(cells) // 4]:
        each["config"] = each["config"] | {"seed": 7}
    names = [str(setting) for setting in records.by_setting(records.newest_cells(cells))]
    assert len(names) == len(set(names)) == 3
    assert "seed 7" in names[0] and "24 built-in prompts (text hash 89abcdef)" in names[-1]


def test_a_cell_without_its_configuration_is_named():
    broken = cell()
    del broken["config"]["seed"]
    with pytest.raises(ValueError, match="cell 1 of the experiment has no config.seed"):
        records.newest_cells([broken])


@pytest.mark.slow
def test_the_page_has_every_cell_and_picture(tmp_path):
    cells = experiment(pairs=("one", "two"), batch_sizes=(1, 16, 2), temperatures=(0.0, 0.5))
    text = page_of(tmp_path, cells)
    tags = [tag for tag, _ in Page(text).elements]
    assert tags.count("tr") == 1 + len(cells) + 1 + 2 * 3 * 2 * 3  # cells, fastest, and their heads
    pictures = sorted(path.name for path in (tmp_path / "out" / "figures").iterdir())
    assert len(pictures) == 2 * (4 * gallery.MAX_SETTINGS + 4) and "speedup_map_one_b1_t0.svg" in pictures
    assert tags.count("img") == len(pictures) / 2 and "http" not in text
    assert f"Pictures show {gallery.MAX_SETTINGS} of 12 settings" in text


def test_names_are_text_wherever_they_stand(tmp_path):
    cells = [
        c | {"commit": HOSTILE, "gpu": HOSTILE} for c in experiment(pairs=(HOSTILE, "b"), domains=("<img src=x>",))
    ]
    page = Page(page_of(tmp_path, cells))
    assert page.cells.count(HOSTILE) >= 7 and "<img src=x>" in page.cells
    assert "script" not in [tag for tag, _ in page.elements]
    assert {name for _, attributes in page.elements for name in attributes} <= {
        "lang",
        "charset",
        "class",
        "alt",
        "src",
    }
    files = [path.name for path in (tmp_path / "out" / "figures").iterdir()]
    assert all(name.replace("_", "").replace(".", "").isalnum() for name in files) and len(files) == 16
    assert "\\|" in tables.markdown_table([cell("a|b")])[1][0]


def test_numbers_that_are_none(tmp_path):
    """What a log writes as null."""
    gone = dict.fromkeys(("tokens_per_second", "speedup", "mean_accept_length", "peak_memory_mib", "step_ms"))
    page = Page(page_of(tmp_path, [*experiment(), cell(K=2, **gone, inter_token_ms=[None] * 101)]))
    assert page.cells.count("-") > 6 and "nan" not in page.cells and "None" not in page.cells
    page_of(tmp_path / "all", [each | gone | {"accepted_per_depth": [], "phase_ms": {}} for each in experiment()])


@pytest.mark.slow
def test_500_cells(tmp_path, capsys):
    start_s = time.process_time()
    text = page_of(tmp_path, many())
    with capsys.disabled():
        print(f"\n{len(many())} cells: {time.process_time() - start_s:.1f} s, {len(text.encode()) / 1e6:.2f} MB")
    assert len(text.encode()) < 4e6 and text.count("<tr>") > 500


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
    out = tmp_path / "out" / "report.html"
    assert report.main(["--experiment", str(cells), "--output", str(out.parent)]) == 0
    reason = "bench.report needs the package matplotlib, which is not installed: pip install matplotlib"
    assert capsys.readouterr() == (f"wrote {out}. There are no pictures: {reason}\n", "")
    assert f"<p>There are no pictures: {reason}</p>" in out.read_text(encoding="utf-8")
    page = Page(out.read_text(encoding="utf-8"))
    assert "figure" not in [tag for tag, _ in page.elements] and page.cells.count("tree") > 9
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
    (tmp_path / "README.md").write_text("<!-- bench:begin -->\n<!-- bench:end -->\n")
    where = ["--results", str(tmp_path / "results"), "--readme", str(tmp_path / "README.md")]
    kept = tmp_path / "results" / "gpu" / "report.html"
    assert report.main(where) == 0 and f"wrote {kept}. There are no pictures" in capsys.readouterr().out
    assert f"## An experiment\n\nOn {GPU}" in (tmp_path / "results" / "gpu" / "README.md").read_text()
    kept.write_text("pictures")
    assert report.main(where) == 0 and kept.read_text() == "pictures"
    assert f"left {kept} as it is: {reason}\n" in capsys.readouterr().out


def test_a_page_with_nothing_to_draw_needs_no_matplotlib(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    cells = write(tmp_path / "cells.jsonl", [cell(K=None)])
    assert report.main(["--experiment", str(cells), "--output", str(tmp_path / "out")]) == 0
    said = "There are no pictures: nothing was measured that one could show."
    assert capsys.readouterr().out == f"wrote {tmp_path / 'out' / 'report.html'}. {said}\n"
    assert said in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_long_tables_are_closed():
    cells = records.newest_cells(many())
    text = render("title", [], [], [tables.cell_table(cells), tables.best_table(cells)])
    assert (
        text.count("<details>") == 1 and "<summary>510 rows</summary>" in text and Page(text).cells.count("tree") > 99
    )


def test_hashes_say_of_what():
    """A hash of prompts and a cell's own look like a commit."""
    assert records.prompts_text("built in, 24, a680ba01") == "24 built-in prompts (text hash a680ba01)"
    assert records.prompts_text("mine.json, 3, a680ba01") == "3 prompts of mine.json (text hash a680ba01)"
    assert (records.prompts_text("others"), records.prompts_text("")) == ("prompts others", "")
    cells = [each | {"prompts": "built in, 24, a680ba01", "cell_hash": "0123456789ab"} for each in experiment()]
    table = tables.cell_table(records.newest_cells(cells))
    assert table.columns[-1].title == "experiment cell" and table.columns[-1].text(cells[0]) == "0123456789ab"
    assert "commit: abc1234" in table.note and "It is not a commit." in table.columns[-1].meaning


def test_the_command(monkeypatch, tmp_path, capsys):
    """A table and a page beside the results; `--check` writes neither."""
    pytest.importorskip("matplotlib")
    folder = tmp_path / "results" / "gpu"
    write(folder / "experiment.jsonl", [*experiment(), cell(K=2, tokens_per_second=321.4, speedup=3.21)])
    (tmp_path / "README.md").write_text("<!-- bench:begin -->\n<!-- bench:end -->\n")
    where = ["--results", str(tmp_path / "results"), "--readme", str(tmp_path / "README.md")]
    assert report.main(["--check", *where]) == 1 and not (folder / "figures").exists()
    assert report.main(where) == 0 and (folder / "report.html").exists()
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
    page = Page(write_page(tmp_path, [], steps, kernels()).page.read_text(encoding="utf-8"))
    assert "200 (0.50×)" in page.cells
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"throughput_8b", "roofline"}
    assert gallery.is_drawable([], steps, []) and gallery.is_drawable([], [], kernels())
    assert not gallery.is_drawable([], [], [{"op": "build_tree", "graph_p50_us": 1.0}])
