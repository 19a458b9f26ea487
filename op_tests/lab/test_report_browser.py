"""The page in a real browser: three widths, filters, search and sorting, no error, no request, and without scripts."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import pytest

from bench import report

from .made_cells import experiment, write

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
WIDTHS = (390, 1280, 1920)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("report")
    cells = experiment(pairs=("embedded", "a_pair_whose_name_is_long_" * 4), batch_sizes=(1, 8))
    file = write(folder / "cells.jsonl", cells)
    assert report.main(["--experiment", str(file), "--output", str(folder)]) == 0
    return folder / "report.html"


def visit(page: Path, *options: str, fragment: str = "", width: int = 1280) -> tuple[str, list[str]]:
    """What the browser prints, and what the page said on its console."""
    profile = page.parent / f"profile_{len(list(page.parent.iterdir()))}"
    command = [CHROMIUM, *QUIET, f"--user-data-dir={profile}", f"--window-size={width},1800"]
    command += ["--enable-logging=stderr", "--v=0", "--log-level=0", *options, page.as_uri() + fragment]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def framed(page: Path, width: int, script: str) -> tuple[list[str], list[str]]:
    """What a script measures in a frame of that width: a window is never as narrow as a phone. And the console."""
    script = f'parent.document.body.setAttribute("data-measured", (function () {{ {script} }})().join(" "));'
    inside = with_script(page, "measured.html", script).read_text(encoding="utf-8")
    outside = page.with_name("outside.html")
    frame = f'<iframe style="width: {width}px; height: 1800px; border: 0" srcdoc="{escape(inside)}"></iframe>'
    outside.write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{frame}", encoding="utf-8")
    dom, console = visit(outside, "--dump-dom", width=2000)
    return re.search(r'data-measured="([^"]*)"', dom)[1].split(), console


def with_script(page: Path, name: str, script: str) -> Path:
    """A copy of the page with one more script, which its policy would not run."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    copy = page.with_name(name)
    copy.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    return copy


def shown_rows(dom: str, table: str) -> list[list[str]]:
    body = re.search(rf'<table id="{table}">.*?<tbody>(.*?)</tbody>', dom, re.DOTALL)[1]
    rows = re.findall(r"<tr( hidden=\"\")?>(.*?)</tr>", body, re.DOTALL)
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for hidden, row in rows if not hidden]
    return [[text.replace("<wbr>", "") for text in row] for row in cells]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_picture_of_it_without_an_error(page, width):
    from matplotlib.image import imread

    file = page.with_name(f"page_{width}.png")
    _, console = visit(page, f"--screenshot={file}", width=width)
    assert console == []
    pixels = imread(file)
    assert pixels.shape[:2] == (1800, width)
    # ink, paper and many colours of pictures, down to the lower end
    assert pixels[:200].std() > 0.05 and pixels[-400:].std() > 0.05


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_scroll_and_the_page_does_not(page, width):
    """The first cell of a row stays where it is."""
    measure = """
        document.querySelectorAll("details").forEach(function (each) { each.open = true; });
        var boxes = Array.from(document.querySelectorAll(".box")), root = document.documentElement;
        var box = document.querySelector("#table-1 .box"), head = box.querySelector("tbody th");
        var before = head.getBoundingClientRect().left;
        box.scrollLeft = 1000;
        return [innerWidth, root.scrollWidth,
            Math.max(...boxes.map(function (box) { return box.getBoundingClientRect().right; })), box.scrollLeft,
            head.getBoundingClientRect().left - before];"""
    measured, console = framed(page, width, measure)
    inner, scroll, right, scrolled, moved = map(float, measured)
    assert console == [] and inner == width
    assert scroll <= inner and right <= inner and abs(moved) < 1
    assert (scrolled > 100) == (width == 390) and (scrolled == 0) == (width == 1920)


def test_a_phone_shows_numbers_without_scrolling(page):
    """Although pair, domain, method, K and batch differ: they are in the first cell."""
    measure = """
        var row = document.querySelector("#table-1 tbody tr");
        document.querySelector("#table-1 details").open = true;
        var shown = Array.from(row.cells).filter(function (cell) { return cell.getBoundingClientRect().width > 0; });
        return [shown[1].textContent, shown[1].getBoundingClientRect().right,
            shown[2].textContent, shown[2].getBoundingClientRect().right];"""
    (speed, first, speedup, second), console = framed(page, 390, measure)
    assert console == [] and float(speed) == 100.0 and speedup.endswith("×")
    assert float(first) < float(second) < 390


@pytest.mark.parametrize(("width", "columns"), [(390, 1), (1280, 3), (1920, 4)])
def test_pictures_fill_their_row(page, width, columns):
    measure = """
        var boxes = Array.from(document.querySelector(".gallery").children).map(function (figure) {
            return figure.getBoundingClientRect(); });
        var lefts = new Set(boxes.map(function (box) { return Math.round(box.left); }));
        return [lefts.size, Math.min(...lefts), Math.max(...boxes.map(function (box) { return box.right; }))];"""
    measured, console = framed(page, width, measure)
    count, left, right = map(float, measured)
    assert console == [] and count == columns and right - left > 0.9 * width


def test_filters_in_the_address(page):
    dom, console = visit(page, "--dump-dom", fragment="#pair=embedded&K=4&batch=8")
    rows = shown_rows(dom, "table-1-table")
    assert console == [] and len(rows) == 3 * 2
    assert {(row[0], row[3], row[4]) for row in rows} == {("embedded", "4", "8")}
    assert re.search(r'id="table-1-table-count"[^>]*>6 of 84 rows<', dom)
    figures = re.findall(r"<figure([^>]*)>", dom)
    shown = [each for each in figures if "hidden" not in each]
    assert len(shown) == 5 and len(figures) == 14  # of the setting, and throughput over batches
    assert all('data-of-pair="embedded"' in each for each in shown)
    everything, _ = visit(page, "--dump-dom", fragment="#pair=nobody")
    assert len(shown_rows(everything, "table-1-table")) == 84


def test_a_click_sorts_and_a_choice_filters(page):
    act = """
        var head = document.querySelectorAll("#table-1-table th"), form = document.getElementById("filters");
        head[6].querySelector("button").click();
        if (location.hash === "#twice=") head[6].querySelector("button").click();
        form.elements.domain.value = "code";
        form.elements.domain.dispatchEvent(new Event("change", { bubbles: true }));
        document.body.setAttribute("data-address", location.hash);"""
    for fragment, is_ascending in (("", False), ("#twice=", True)):
        dom, console = visit(with_script(page, "acted.html", act), "--dump-dom", fragment=fragment)
        rows = shown_rows(dom, "table-1-table")
        speedups = [float(row[6].rstrip("×")) for row in rows]
        assert console == [] and speedups == sorted(speedups, reverse=not is_ascending) and len(set(speedups)) > 5
        assert {row[1] for row in rows} == {"code"} and 'data-address="#domain=code"' in dom
        assert f'aria-sort="{"ascending" if is_ascending else "descending"}"' in dom


def test_what_is_typed_filters_rows(page):
    """Each word, in any cell, beside what is chosen; a link opens the table that it leads to."""
    act = """
        var input = document.querySelector("input[data-for=table-1-table]");
        input.value = " TREE  summar ";
        input.dispatchEvent(new Event("input"));"""
    dom, console = visit(with_script(page, "typed.html", act), "--dump-dom", fragment="#table-1")
    rows = shown_rows(dom, "table-1-table")
    assert console == [] and len(rows) == 2 * 2 * 3
    assert {(row[1], row[2]) for row in rows} == {("summarization", "tree")}
    assert ">12 of 84 rows<" in dom and '<details open="">' in dom
    dom, _ = visit(page, "--dump-dom")
    assert "<details open" not in dom and '<details open="">' in visit(page, "--dump-dom", fragment="#K=4")[0]


def test_everything_is_there_without_scripts(page):
    copy = page.with_name("still.html")
    copy.write_text(re.sub(r"'sha256-[^']*'", "'none'", page.read_text(encoding="utf-8")), encoding="utf-8")
    dom, _ = visit(copy, "--dump-dom", fragment="#pair=embedded")
    assert (
        re.search('<form id="filters"[^>]* hidden="">', dom)
        and "<button" not in re.search("<main.*</main>", dom, re.DOTALL)[0]
    )
    assert '<p class="search" hidden="">' in dom
    assert len(shown_rows(dom, "table-1-table")) == 84 and dom.count("<figure") == 14


def test_no_other_script_runs_and_nothing_is_fetched(page):
    """Also that errors would have been seen above."""
    text = page.read_text(encoding="utf-8")
    copy = page.with_name("planted.html")
    planted = '<img src="https://example.invalid/x.png"><script>document.body.id = "owned"</script>'
    copy.write_text(text.replace("</body>", planted + "</body>"), encoding="utf-8")
    dom, console = visit(copy, "--dump-dom")
    assert 'id="owned"' not in dom and len(console) == 2
    assert all("Content Security Policy" in line for line in console)
