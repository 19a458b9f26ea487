"""The page and the pictures of an experiment: what is in them is what was measured, and names stay names."""

from __future__ import annotations

import math
import sys
import time
from html.parser import HTMLParser

import pytest

from bench import report
from bench.lab import gallery, records, tables
from bench.lab.page import render

from .made_cells import GPU, cell, experiment, many, write

HOSTILE = "<script>alert(1)</script>\"'$x^{$ & https://evil.example/"
VOID = {"meta", "link", "br", "img", "input"}


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
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_startendtag(self, tag, attributes):
        attributes = dict(attributes)
        self.elements.append((tag, attributes))
        if tag == "select":
            self.select = self.options.setdefault(attributes["name"], [])
        elif tag == "option":
            self.select.append(attributes["value"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["td"]:
            self.cells[-1] += data


@pytest.fixture
def figures():
    pytest.importorskip("matplotlib")
    from bench.lab import figures

    return figures


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


def test_the_map_has_the_speed_up_of_each_cell(figures):
    cells = records.newest_cells([*experiment(domains=("code", "conversation")), cell(K=8, method="tree", speedup=0.5)])
    axes = figures.speedup_map(cells, "title\nabout").axes[0]
    shown = {text.get_position(): text.get_text() for text in axes.texts}
    known = {(c["config"]["prompt_domain"], c["config"]["method"], c["config"]["K"]): c["speedup"] for c in cells}
    rows, columns = (
        [each.get_text() for each in labels] for labels in (axes.get_yticklabels(), axes.get_xticklabels())
    )
    assert rows == ["code · chain", "code · tree", "conversation · chain", "conversation · tree"]
    assert columns == ["1", "2", "4", "8"] and len(shown) == 13
    colours = axes.collections[0].get_array()
    for (x, y), text in shown.items():
        speedup = known[(*rows[int(y)].split(" · "), int(columns[int(x)]))]
        assert text == f"{speedup:.2f}×" and colours[int(y), int(x)] == pytest.approx(math.log2(speedup))
    assert axes.collections[0].get_clim() == (-colours.max(), colours.max())  # 1 has the middle colour


def test_acceptance_by_domain_and_depth(figures):
    cells = records.newest_cells(experiment())
    panels = figures.acceptance(cells, "title\nabout").axes
    assert [axes.get_title("left") for axes in panels] == ["chain K=4", "tree K=4"]
    for axes, method in zip(panels, ("chain", "tree")):
        for line in axes.lines:
            made = cell(method=method, K=4, domain=line.get_label())
            assert list(line.get_xdata()) == [1, 2, 3, 4] and list(line.get_ydata()) == made["accepted_per_depth"]
        assert [line.get_label() for line in axes.lines] == ["code", "conversation", "summarisation"]


def test_latency_of_plain_decoding_and_of_the_fastest_k(figures):
    slow = cell(K=4, tokens_per_second=1.0)
    cells = records.newest_cells([*experiment(domains=("code",), methods=("chain",)), slow])
    (axes,) = figures.latency(cells, "title\nabout").axes
    assert [line.get_label() for line in axes.lines] == ["plain", "chain K=2"]
    assert list(axes.lines[1].get_xdata()) == cell(K=2)["inter_token_ms"]
    assert axes.lines[1].get_ydata()[50] == 0.5
    assert axes.get_xlim()[1] == pytest.approx(1.05 * cell(K=None)["inter_token_ms"][99])


def test_phases_and_what_is_left_are_the_step(figures):
    twice = {name: 3 * time_ms for name, time_ms in cell(K=2)["phase_ms"].items()}
    cells = [cell(K=2), cell(K=2, domain="conversation", phase_ms=twice, step_ms=40.0), cell(K=4, phase_ms={})]
    (axes,) = figures.breakdown(records.newest_cells(cells), "title\nabout").axes
    widths = {bars.get_label(): [bar.get_width() for bar in bars] for bars in axes.containers}
    mean_ms = (cell(K=2)["step_ms"] + 40.0) / 2
    assert widths["draft"] == [4.0] and widths["verify"] == [14.0]
    assert sum(width for (width,) in widths.values()) == pytest.approx(mean_ms)


def test_the_crossover_is_where_both_laws_meet(figures):
    plain = {size: 100.0 * size for size in (1, 4, 64)}
    curve = {size: 400.0 * size**0.5 for size in (1, 4, 64)}
    assert records.crossover(curve, plain) == pytest.approx((16.0, 1600.0))
    assert records.crossover(plain, plain) is None and records.crossover({1: 101.0, 4: 401.0}, plain) is None
    assert records.crossover({2: 1.0}, plain) is None  # at no batch that both were measured at
    (axes,) = figures.throughput({"plain": plain, "tree": curve}, "title\nabout").axes
    rings = [line for line in axes.lines if line.get_gid() == "crossover-1"]
    assert [(*line.get_xdata(), *line.get_ydata()) for line in rings] == [pytest.approx((16.0, 1600.0))]
    assert {line.get_label() for line in axes.lines if not line.get_label().startswith("_")} == {
        "plain",
        "tree, crosses at 16",
    }


def test_throughput_by_preset_and_by_cell():
    about = {"section": "throughput", "shape": "8b"}
    lines = [
        about | {"provider": provider, "case": f"B={size}", "tokens_per_s": speed}
        for provider, size, speed in (
            ("plain", 2, 9.0), ("plain", 1, 5.0), ("plain", 1, 6.0), ("tree", 1, 8.0), ("tree", 2, 8.5),
            ("few", 1, 1.0),
        )
    ]  # fmt: skip
    assert records.preset_curves(lines) == {"8b": {"plain": {1: 6.0, 2: 9.0}, "tree": {1: 8.0, 2: 8.5}}}
    cells = records.newest_cells(experiment(batch_sizes=(1, 8), methods=("chain",)))
    ((setting, curves),) = records.cell_curves(cells).items()
    assert (setting.pair, setting.batch_size) == ("embedded", 0) and set(curves) == {"plain", "chain K=4"}
    of_domains = [c["tokens_per_second"] for c in cells if records.label_of(c) == "chain K=4"]
    assert curves["chain K=4"][1] == pytest.approx(sum(of_domains[:3]) / 3) and list(curves["plain"]) == [1, 8]
    assert records.cell_curves(records.newest_cells(experiment())) == {}


def kernels():
    sizes = ((1000, 2.0, "tree"), (10**6, 2.0, "tree"), (10**8, 50.0, "attention"))
    about = {"op": "build_tree", "gpu": GPU, "commit": "abc", "versions": {"torch": "2.0"}, "read_gb_per_s": 3000.0}
    return [
        about | {"bytes": size, "gb_per_s": size / us / 1e3, "share_of_copy": size / us / 1e3 / 2500.0,
                 "family": family, "graph_p50_us": us, "case": str(size), "floor_us": us / 2}
        for size, us, family in sizes
    ]  # fmt: skip


def test_the_roof_is_the_bandwidth_or_the_shortest_kernel(figures):
    lines = kernels()
    assert figures.ceilings(lines) == pytest.approx({"large read": 3000.0, "large copy": 2500.0})
    (axes,) = figures.roofline(lines, "title\nabout").axes
    of_label = {line.get_label(): line for line in axes.lines}
    assert list(of_label["tree"].get_xdata()) == [1000, 10**6] and list(of_label["tree"].get_ydata()) == [0.5, 500.0]
    roof = of_label["large copy, 2500 GB/s"]
    # 2 µs is the shortest: 1000 bytes reach 0.5 GB/s, and 5 MB are enough for all of the bandwidth
    assert list(roof.get_xdata()) == pytest.approx([1000, 5e6, 1e8])
    assert list(roof.get_ydata()) == pytest.approx([0.5, 2500.0, 2500.0])


def test_the_page_has_every_cell_and_its_filters(tmp_path):
    cells = experiment(pairs=("one", "two"), batch_sizes=(1, 16, 2), temperatures=(0.0, 0.5))
    text = page_of(tmp_path, cells)
    page = Page(text)
    assert page.options == {
        "pair": ["", "one", "two"],
        "domain": ["", "code", "conversation", "summarisation"],
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
    known = {"data-of-pair", "aria-label", "value"}
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


def test_500_cells(tmp_path, capsys):
    start_s = time.perf_counter()
    text = page_of(tmp_path, many())
    with capsys.disabled():
        print(f"\n{len(many())} cells: {time.perf_counter() - start_s:.1f} s, {len(text.encode()) / 1e6:.2f} MB")
    assert len(text.encode()) < 3e6 and text.count("<tr>") > 500


def test_the_same_files_each_time(tmp_path):
    contents = []
    for name in "ab":
        page_of(tmp_path / name, experiment(batch_sizes=(1, 8)))
        files = sorted((tmp_path / name / "out").rglob("*.*"))
        contents.append({file.relative_to(tmp_path / name): file.read_bytes() for file in files})
    assert contents[0] == contents[1] and len(contents[0]) == 1 + 2 * (2 * 4 + 1)
    assert not any(b"<dc:date>" in content for content in contents[0].values())


def test_tables_need_no_matplotlib(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    cells = write(tmp_path / "results" / "gpu" / "experiment.jsonl", experiment())
    assert report.main(["--experiment", str(cells), "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "error: bench.report needs the package matplotlib, which is not installed: pip install matplotlib\n"
    )
    (tmp_path / "README.md").write_text(f"{report.BEGIN}\n{report.END}\n")
    where = ["--results", str(tmp_path / "results"), "--readme", str(tmp_path / "README.md")]
    assert report.main(where) == 0
    assert "no page and no pictures: bench.report needs the package matplotlib" in capsys.readouterr().out
    assert f"An experiment on {GPU}" in (tmp_path / "README.md").read_text()
    table = tables.cell_table(records.newest_cells(experiment()))
    assert len(Page(render("title", "about", [table], [], [])).cells) == 21 * len(table.columns)


def test_the_command(monkeypatch, tmp_path, capsys):
    """A table for the README, a page beside the results; `--check` writes neither."""
    pytest.importorskip("matplotlib")
    folder = tmp_path / "results" / "gpu"
    write(folder / "experiment.jsonl", [*experiment(), cell(K=2, tokens_per_second=321.4, speedup=3.21)])
    (tmp_path / "README.md").write_text(f"{report.BEGIN}\n{report.END}\n")
    where = ["--results", str(tmp_path / "results"), "--readme", str(tmp_path / "README.md")]
    assert report.main(["--check", *where]) == 1 and not (folder / report.FIGURES).exists()
    assert report.main(where) == 0 and (folder / "report.html").exists()
    lines = (tmp_path / "README.md").read_text().splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("| pair"))
    assert lines[head] == "| pair | batch | T | domain | plain | method | K=1 | K=2 | K=4 | at commit |"
    assert len(lines) == head + 2 + 6 + 1 and "321 (3.21×, 2.05)" in lines[head + 2]
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
    page = Page(write_page(tmp_path, [], steps, kernels()).read_text(encoding="utf-8"))
    assert "200 (0.50×)" in page.cells and "2.00" in page.cells and set(page.options) <= {"op"}
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"throughput_8b", "roofline"}
    assert gallery.is_drawable([], steps, []) and gallery.is_drawable([], [], kernels())
    assert not gallery.is_drawable([], [], [{"op": "build_tree", "graph_p50_us": 1.0}])
