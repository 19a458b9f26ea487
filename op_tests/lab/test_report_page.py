"""The page of an experiment: what is in it is what was measured, and names stay names."""

from __future__ import annotations

import re
import sys
import time
from html.parser import HTMLParser

import pytest

from bench import report
from bench.lab import gallery, records, tables
from bench.lab.page import render

from .made_cells import GPU, cell, experiment, kernels, many, write

HOSTILE = "<script>alert(1)</script>\"'$x^{$ & https://evil.example/"
VOID = {"meta", "link", "br", "img", "input", "wbr"}


class Page(HTMLParser):
    """What a browser would find; every element must be closed where it was opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.cells, self.options, self.select = [], [], [], {}, None
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        attributes = dict(attributes)
        if tag not in VOID:
            self.open.append("cell" if attributes.get("scope") == "row" else tag)
        if tag == "td" or attributes.get("scope") == "row":
            self.cells.append("")

    def handle_startendtag(self, tag, attributes):
        attributes = dict(attributes)
        self.elements.append((tag, attributes))
        if tag == "select":
            self.select = self.options.setdefault(attributes["name"], [])
        elif tag == "option":
            self.select.append(attributes["value"])

    def handle_endtag(self, tag):
        assert self.open.pop() in (tag, "cell")

    def handle_data(self, data):
        if self.open[-1:] in (["td"], ["cell"]):
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


@pytest.mark.slow
def test_tables_tell_machines_apart(tmp_path):
    """Where there are several; what all cells share is told once."""
    cells = records.newest_cells([*experiment(), *(each | {"gpu": "Other GPU"} for each in experiment())])
    for table in (tables.cell_table(cells), tables.best_table(cells)):
        (column,) = [column for column in table.columns if column.title == "machine"]
        assert column.filter == "machine" and {column.text(row) for row in table.rows} == {GPU, "Other GPU"}
        assert "machine" not in table.note and "dtype: float32" in table.note
    head, *rows = tables.markdown_table(cells)
    assert {row[head.index("machine")] for row in rows} == {GPU, "Other GPU"}
    assert f"machine: {GPU}" in tables.cell_table(records.newest_cells(experiment())).note
    page = Page(page_of(tmp_path, cells))
    assert page.options["machine"] == ["", GPU, "Other GPU"]
    figures = {attributes["data-of-machine"] for tag, attributes in page.elements if tag == "figure"}
    assert figures == {GPU, "Other GPU"}


def test_cells_of_other_runs_stand_by_themselves():
    """Those that were measured with another plain decoding: it is beside them, and they are compared by speed-up."""
    slow = {"tokens_per_second": 9.0, "plain_tokens_per_second": 3.0, "speedup": 3.0}
    cells = records.newest_cells([*experiment(domains=("code",), methods=("chain",)), cell(K=8, **slow)])
    _, first, second = tables.markdown_table(cells)
    assert first[4] == "100" and first[6:10] != 4 * ["-"] and first[9] == "-"
    assert second[4] == "3" and second[6:9] == 3 * ["-"] and second[9].startswith("9 (3.00×")
    (best,) = tables.best_table(cells).rows
    assert best["speedup"] == 3.0 and records.fastest_labels(cells) == ["plain", "chain K=8"]


def test_settings_have_names_of_their_own(tmp_path):
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
def test_the_page_has_every_cell_and_its_filters(tmp_path):
    cells = experiment(pairs=("one", "two"), batch_sizes=(1, 16, 2), temperatures=(0.0, 0.5))
    text = page_of(tmp_path, cells)
    page = Page(text)
    assert page.options == {
        "pair": ["", "one", "two"],
        "domain": ["", "code", "conversation", "summarization"],
        "batch": ["", "1", "2", "16"],
        "temperature": ["", "0", "0.5"],
        "method": ["", "plain", "chain", "tree"],
        "K": ["", "-", "1", "2", "4"],
    }
    rows = sum(tag == "tr" for tag, _ in page.elements)
    assert rows == 1 + len(cells) + 1 + 2 * 3 * 2 * 3 + 2  # cells, fastest, provenance, and their heads
    names = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(names) == len(set(names))
    ends = {attributes["href"] for tag, attributes in page.elements if tag in ("a", "use")}
    assert {end.removeprefix("#") for end in ends} <= set(names)
    assert "://" not in text and "@import" not in text
    assert not any(name == "src" for _, attributes in page.elements for name in attributes)
    pictures = sorted(path.name for path in (tmp_path / "out" / "figures").iterdir())
    assert len(pictures) == 2 * (4 * gallery.MAX_SETTINGS + 4) and "speedup_map_one_b1_t0.svg" in pictures
    assert f"Pictures show {gallery.MAX_SETTINGS} of 12 settings" in text


def test_names_are_text_wherever_they_stand(tmp_path):
    cells = [
        c | {"commit": HOSTILE, "gpu": HOSTILE} for c in experiment(pairs=(HOSTILE, "b"), domains=("<img src=x>",))
    ]
    text = page_of(tmp_path, cells)
    page = Page(text)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 1 and "img" not in tags
    assert page.cells.count(HOSTILE) >= 7 and "<img src=x>" in page.cells
    assert HOSTILE in page.options["pair"]
    known = {"data-of-pair", "data-of-machine", "data-more", "aria-label", "value"}
    for _, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)
        assert not [item for item in attributes.items() if "://" in (item[1] or "") and item[0] not in known]
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
    assert len(text.encode()) < 3e6 and text.count("<tr>") > 500


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
    (tmp_path / "README.md").write_text(f"{report.BEGIN}\n{report.END}\n")
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


@pytest.mark.slow
def test_long_tables_are_closed_and_can_be_searched():
    """Short ones are open. The first cell of a row is its head, and says on a phone what else tells rows apart."""
    cells = records.newest_cells(many())
    text = render("title", "about", [tables.cell_table(cells), tables.best_table(cells)], [], [])
    assert text.count("<details>") == 1 and "<summary>Table with" in text
    page = Page(text)
    search = [attributes for tag, attributes in page.elements if tag == "input"]
    assert [each["data-for"] for each in search] == ["table-0-table"]
    assert '<p class="search" hidden><label>' in text  # until a script heeds it
    heads = [attributes["data-more"].split(", ") for _, attributes in page.elements if attributes.get("scope") == "row"]
    assert len(cells) == 510 and len(heads) == 510 + 30
    assert heads[0] == ["code", "plain", "temperature\N{NO-BREAK SPACE}0"]
    assert heads[1] == ["code", "chain", "K\N{NO-BREAK SPACE}1", "temperature\N{NO-BREAK SPACE}0"]
    assert heads[-1] == ["summarization", "temperature\N{NO-BREAK SPACE}1"]
    below = [tag for tag, attributes in page.elements if "k" in attributes.get("class", "").split()]
    assert below.count("th") == 4 + 2 and below.count("td") == 4 * 510 + 2 * 30


@pytest.mark.slow
def test_hashes_say_of_what(tmp_path):
    """A hash of prompts and a cell's own look like a commit."""
    assert records.prompts_text("built in, 24, a680ba01") == "24 built-in prompts (text hash a680ba01)"
    assert records.prompts_text("mine.json, 3, a680ba01") == "3 prompts of mine.json (text hash a680ba01)"
    assert (records.prompts_text("others"), records.prompts_text("")) == ("prompts others", "")
    cells = [each | {"prompts": "built in, 24, a680ba01", "cell_hash": "0123456789ab"} for each in experiment()]
    table = tables.cell_table(records.newest_cells(cells))
    assert table.columns[-1].title == "experiment cell" and table.columns[-1].text(cells[0]) == "0123456789ab"
    assert "commit: abc1234" in table.note and "It is not a commit." in table.columns[-1].meaning
    text = page_of(tmp_path, cells)
    text = re.sub("<svg.*?</svg>", "", text, flags=re.DOTALL)  # where a line may end before it
    assert text.count("a680ba01") == text.count("(text hash a680ba01)") > 2
    others = [each | {"prompts": "built in, 6, 01234567"} for each in cells]
    page = Page(page_of(tmp_path / "two", [*cells, *others]))
    about = {attributes["data-of-prompts"] for tag, attributes in page.elements if tag == "figure"}
    assert about == set(page.options["prompts"][1:]) and len(about) == 2  # a filter compares them


@pytest.mark.slow
def test_it_is_a_page_for_every_reader(tmp_path):
    """A phone, a keyboard, a screen reader, a printer; nothing is fetched from anywhere."""
    text = page_of(tmp_path, experiment())
    page = Page(text)
    metas = {attributes.get("name"): attributes.get("content") for tag, attributes in page.elements if tag == "meta"}
    assert metas["viewport"] == "width=device-width, initial-scale=1" and '<html lang="en">' in text
    words = [attributes["aria-label"] for tag, attributes in page.elements if attributes.get("role") == "img"]
    assert len(words) == 4 and all(len(each) > 80 for each in words)
    (map_words,) = [each for each in words if each.startswith("Speed-up over plain decoding: embedded, batch 1")]
    speeds = [each["speedup"] for each in experiment() if each["config"]["K"]]
    assert (
        f"Largest speed-up: {max(speeds):.2f}× for " in map_words and f"Smallest: {min(speeds):.2f}× for" in map_words
    )
    boxes = [attributes for _, attributes in page.elements if attributes.get("class") == "box"]
    assert all(box["tabindex"] == "0" and box["role"] == "region" and box["aria-label"] for box in boxes)
    assert '<a class="skip" href="#content">' in text and 'id="content"' in text
    for rule in ("prefers-color-scheme: dark", "@media print", ":focus-visible", "@media (max-width: 40rem)"):
        assert rule in text
    assert "http" not in text.replace("http-equiv", "")
    assert "url(" not in text.replace("url(#", "") and "default-src 'none'" in text
    # one setting: no heading for each picture, which would have a row to itself
    assert "<h3>" not in text and 'style="--most: 4"' in text
    several = page_of(tmp_path / "several", experiment(batch_sizes=(1, 8)))
    assert several.count("<h3>") == 3 and "<h3>More</h3>" in several


def test_the_command(monkeypatch, tmp_path, capsys):
    """A table and a page beside the results; `--check` writes neither."""
    pytest.importorskip("matplotlib")
    folder = tmp_path / "results" / "gpu"
    write(folder / "experiment.jsonl", [*experiment(), cell(K=2, tokens_per_second=321.4, speedup=3.21)])
    (tmp_path / "README.md").write_text(f"{report.BEGIN}\n{report.END}\n")
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
    from bench.lab.report import write_page

    steps = [
        {"section": "throughput", "shape": "8b", "gpu": GPU, "commit": "abc-dirty", "provider": provider,
         "case": f"B={size}", "tokens_per_s": 100.0 * size**power}
        for provider, power in (("plain", 1.0), ("tree", 0.5)) for size in (1, 4)
    ]  # fmt: skip
    page = Page(write_page(tmp_path, [], steps, kernels()).page.read_text(encoding="utf-8"))
    assert "200 (0.50×)" in page.cells and "2.00" in page.cells and set(page.options) <= {"op"}
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"throughput_8b", "roofline"}
    assert gallery.is_drawable([], steps, []) and gallery.is_drawable([], [], kernels())
    assert not gallery.is_drawable([], [], [{"op": "build_tree", "graph_p50_us": 1.0}])
