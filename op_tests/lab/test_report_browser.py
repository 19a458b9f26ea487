"""The page in a real browser: two widths, filters and sorting, no error, no request, and without scripts as well."""

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
WIDTHS = (390, 1280)

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
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for hidden, row in rows if not hidden]


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
    """In a frame of that width: a window is never as narrow as a phone."""
    measure = """
        var boxes = Array.from(document.querySelectorAll(".box")), root = document.documentElement;
        parent.document.body.setAttribute("data-measured", [innerWidth, root.scrollWidth,
            Math.max(...boxes.map(function (box) { return box.getBoundingClientRect().right; })),
            Math.max(...boxes.map(function (box) { return box.scrollWidth - box.clientWidth; }))].join(" "));"""
    inside = with_script(page, "measured.html", measure).read_text(encoding="utf-8")
    outside = page.with_name("outside.html")
    frame = f'<iframe style="width: {width}px; height: 1800px; border: 0" srcdoc="{escape(inside)}"></iframe>'
    outside.write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{frame}", encoding="utf-8")
    dom, console = visit(outside, "--dump-dom")
    inner, scroll, right, hidden = map(float, re.search(r'data-measured="([^"]*)"', dom)[1].split())
    assert console == [] and inner == width
    assert scroll <= inner and right <= inner and hidden > 100


def test_filters_in_the_address(page):
    dom, console = visit(page, "--dump-dom", fragment="#pair=embedded&K=4&batch=8")
    rows = shown_rows(dom, "table-1-table")
    assert console == [] and len(rows) == 3 * 2
    assert {(row[0], row[3], row[4]) for row in rows} == {("embedded", "4", "8")}
    assert re.search(r'id="table-1-table-count">6 of 84 rows<', dom)
    figures = re.findall(r"<figure([^>]*)>", dom)
    shown = [each for each in figures if "hidden" not in each]
    assert len(shown) == 5 and len(figures) == 14  # of the setting, and throughput over batches
    assert all('data-of-pair="embedded"' in each for each in shown)
    everything, _ = visit(page, "--dump-dom", fragment="#pair=nobody")
    assert len(shown_rows(everything, "table-1-table")) == 84


def test_a_click_sorts_and_a_choice_filters(page):
    act = """
        var head = document.querySelectorAll("#table-1-table th"), form = document.getElementById("filters");
        head[7].querySelector("button").click();
        if (location.hash === "#twice=") head[7].querySelector("button").click();
        form.elements.domain.value = "code";
        form.elements.domain.dispatchEvent(new Event("change", { bubbles: true }));
        document.body.setAttribute("data-address", location.hash);"""
    for fragment, is_ascending in (("", False), ("#twice=", True)):
        dom, console = visit(with_script(page, "acted.html", act), "--dump-dom", fragment=fragment)
        rows = shown_rows(dom, "table-1-table")
        speedups = [float(row[7].rstrip("×")) for row in rows]
        assert console == [] and speedups == sorted(speedups, reverse=not is_ascending) and len(set(speedups)) > 5
        assert {row[1] for row in rows} == {"code"} and 'data-address="#domain=code"' in dom
        assert f'aria-sort="{"ascending" if is_ascending else "descending"}"' in dom


def test_everything_is_there_without_scripts(page):
    copy = page.with_name("still.html")
    copy.write_text(re.sub(r"'sha256-[^']*'", "'none'", page.read_text(encoding="utf-8")), encoding="utf-8")
    dom, _ = visit(copy, "--dump-dom", fragment="#pair=embedded")
    assert '<form id="filters" hidden="">' in dom and "<th><button" not in dom
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
