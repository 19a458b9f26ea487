"""Makes the tables of the results: `python -m bench.report` writes them, `--check` tells whether they are up to date.

`results/<gpu>/README.md` holds the headline cases, what the apps of `bench/apps` have measured (each makes its own
tables), and every case; README.md, between its two marks, the rows of `README_ROWS` on one GPU; `SERVER_PAGE`, between
its own, the tables of the app `server`. A row comes from one run: the newest in which our provider was timed on it.
`results/<gpu>/report.md` shows cells of experiments, and pictures, which `figures/` holds as PNG and SVG: of them, of
throughput, of kernels; none of these is committed. Without matplotlib a page that is there stays, and a new one has no
pictures. `--experiment FILE --output DIR` makes nothing but the page and the pictures of one experiment.
"""

import argparse
import inspect
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from .apps import APPS, server_tables
from .harness import results
from .harness.declaration import Benchmark, Case, declared
from .harness.markdown import filled, markdown, write_stale
from .lab.log import read_events, read_lines
from .lab.records import newest_cells
from .lab.report import PAGE, is_drawable, write_page
from .pictures import MissingMatplotlib, matplotlib_for

ROOT = Path(__file__).parent.parent
OURS = "eagle_kernels"
# the one table of README.md, from the results in these folders: building, verification and attention, including two ops
# that are slower than the fastest other provider; then a whole server's step
README_GPU = "NVIDIA_H100_80GB_HBM3"
README_ROWS = (
    ("build_tree", "K/S/N=4/3/8 B=8 qlen_only"),
    ("verify_tree_greedy", "K/S/N=4/3/8 B=8 ids full depth"),
    ("verify_tree_coins", "K/S/N=4/3/8 B=8 full depth"),
    ("verify_tree_sampled", "K/S/N=8/5/64 B=8 top-k 50 top-p 0.9 full depth"),
)
README_SERVER = "NVIDIA_H200"
# the pages beside README.md that hold the tables of `--app server`, between the marks `<!-- server:begin -->`
SERVER_PAGE = Path("eagle_kernels", "integrations", "sglang", "README.md")
SERVER_PAGES = {"SGLang": SERVER_PAGE, "vLLM": Path("eagle_kernels", "integrations", "vllm", "README.md")}
# of a benchmark that marks no headline case: the first ones that a peer was timed on, or the first with most providers
_MAX_UNMARKED = 2

_LEGEND = """\
Written by `python -m bench.report` from the JSON lines beside it. Times in µs, medians: *graph* of a replayed CUDA
graph of many calls, *cold* with the L2 cache overwritten before, *eager* of many calls in a row from Python, *raw* and
*public* the host's time in one call of `eagle_kernels.raw.X` and `eagle_kernels.X` with all arguments and `out=` given.
*ratio*: how many times as long the fastest other provider takes as ours, on the same inputs in the same run, with all
that its caller must do. A row describes the kernel at its commit."""
_CASES_LEGEND = """\
Other providers: their graph time from the same run, in brackets as a multiple of ours. *of floor*: graph over floor."""

_DRAWN_LEGEND = """\
By `python -m bench.run --peers --draw SEED`: sizes drawn as servers have them, inputs that the L2 cache does not hold.
How many times as long as ours another provider takes."""

# the lines of one case in one run, by provider
Row = dict[str, dict]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit status: 1 from `--check` if a file differs from its results."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a table is not up to date")
    parser.add_argument("--results", default=str(results.DIRECTORY), help="folder of the JSON lines")
    parser.add_argument("--readme", default=str(ROOT / "README.md"), help="the file with the two marks")
    parser.add_argument("--experiment", type=Path, help="in place of all else: lines of `--app experiment`")
    parser.add_argument("--output", type=Path, help="folder of its page and pictures")
    options = parser.parse_args(arguments)
    if (options.experiment is None) != (options.output is None) or (options.experiment and options.check):
        parser.error("--experiment and --output go together, without --check")
    if options.experiment is not None:
        return _report_experiment(options.experiment, options.output)
    directory, benchmarks = Path(options.results), declared()
    status = write_stale(generate(directory, Path(options.readme), benchmarks), "bench.report", options.check)
    if not options.check:
        _write_pages(directory, benchmarks)
    return status


def _report_experiment(file: Path, output: Path) -> int:
    try:
        cells = newest_cells(read_events(file, "cell"))
        if not cells:
            raise ValueError(f"{file} holds no cell of an experiment")
        print(write_page(output, cells))
    except (KeyError, ValueError, OSError) as error:  # a field that a line lacks
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _write_pages(directory: Path, benchmarks: Sequence[Benchmark]) -> None:
    """Writes the page of each folder with something to draw."""
    for folder in _folders(directory):
        cells = newest_cells(read_events(folder / "experiment.jsonl", "cell"))
        steps = read_lines(file) if (file := folder / "generation.jsonl").exists() else []
        kernels = [
            row[OURS] | {"family": benchmark.path.partition(".")[0]}
            for benchmark in benchmarks
            for _, row in newest_rows(folder / f"{benchmark.op}.jsonl", benchmark.cases)
        ]
        if is_drawable(cells, steps, kernels):
            if (folder / PAGE).exists():
                try:
                    matplotlib_for("bench.report")
                except MissingMatplotlib as error:  # its pictures would be lost
                    print(f"left {folder / PAGE} as it is: {error}")
                    continue
            print(write_page(folder, cells, steps, kernels))


def _folders(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_dir())


def generate(directory: Path, readme: Path, benchmarks: Sequence[Benchmark]) -> dict[Path, str]:
    """Returns the whole text of every file that holds tables."""
    files, front = {}, ""
    for folder in _folders(directory):
        sections = [(b, newest_rows(folder / f"{b.op}.jsonl", b.cases)) for b in benchmarks]
        sections = [(benchmark, rows) for benchmark, rows in sections if rows]
        parts = []
        if sections:
            if folder.name == README_GPU:
                front = _front_table(sections, directory / README_SERVER / "server.jsonl")
            parts += [_LEGEND, "## Headlines", _headline_table(sections)]
        for name, app in APPS.items():
            if hasattr(app, "tables") and (file := folder / f"{name}.jsonl").exists():
                parts += app.tables(file)
        parts += _drawn_table(folder / results.DRAWN)
        if sections:
            parts += ["## Every case", _CASES_LEGEND, *_case_tables(sections)]
        if parts:
            title = f"# {_machine(sections) if sections else folder.name}"
            files[folder / "README.md"] = "\n\n".join([title, *parts]) + "\n"
    pages = [(readme.parent / page, "server", _server_tables(directory, name)) for name, page in SERVER_PAGES.items()]
    for page, mark, content in ((readme, "bench", front), *pages):
        if page.exists():  # a README alone, in tests
            files[page] = filled(page, {mark: content or "No results yet."})
    return files


def _server_tables(directory: Path, engine: str) -> str:
    """Returns an engine's tables of the app `server` on every GPU that it was run on, without their heading."""
    parts = []
    for file in sorted(directory.glob("*/server.jsonl")):
        if tables := server_tables.section(file, engine):
            parts += [f"**{file.parent.name.replace('_', ' ')}**", *tables[1:]]
    return "\n\n".join(parts)


def newest_rows(file: Path, cases: Iterable[Case]) -> list[tuple[Case, Row]]:
    """Returns each case that was timed with its newest row, in the order declared; newer lines come later in the file.

    Lines of one run share `run`; from before there was one, they share `commit`. The last line of a provider counts.
    Cases that are no longer declared are history.
    """
    runs: dict[str, dict[tuple, Row]] = {}
    for line in read_lines(file) if file.exists() else ():
        of_case = runs.setdefault(line["case"], {})
        run = ("run", line["run"]) if line.get("run") else ("commit", line["commit"])
        # taken out and put back: the run that was written to last comes last
        of_case[run] = {**of_case.pop(run, {}), line["provider"]: line}
    rows = [(case, [row for row in runs.get(case.name, {}).values() if OURS in row]) for case in cases]
    return [(case, candidates[-1]) for case, candidates in rows if candidates]


def _case_tables(sections: list[tuple[Benchmark, list[tuple[Case, Row]]]]) -> list[str]:
    parts = []
    for benchmark, rows in sections:
        providers = benchmark.all_providers(with_peers=True)
        others = [name for name in providers if name != OURS and any(name in row for _, row in rows)]
        has_floor = benchmark.floor is not None and any("floor_us" in row[OURS] for _, row in rows)
        header = ["case", "commit", "graph", "cold", "eager", "raw", "public", "of copy"]
        table = [header + ["floor", "of floor"] * has_floor + others]
        for case, row in rows:
            ours = row[OURS]
            names = ("graph_p50_us", "cold_p50_us", "eager_p50_us", "host_p50_us", "public_host_p50_us")
            cells = [case.name, ours["commit"], *(_time(ours.get(name)) for name in names)]
            cells.append(f"{ours['share_of_copy']:.1%}" if "share_of_copy" in ours else "-")
            if has_floor:
                floor = ours.get("floor_us")
                cells += [_time(floor), f"{ours['graph_p50_us'] / floor:.2f}" if floor else "-"]
            cells += [f"{_time(_graph(row, name))} ({_ratio(row, name)})" if name in row else "-" for name in others]
            table.append(cells)
        heading = f"### {benchmark.op}"
        if has_floor:
            bandwidth, fixed_us = benchmark.floor
            products = ", or the products at the speed of a large one if that is longer" * bool(benchmark.count_flops)
            heading += f"\n\nFloor: the bytes at the bandwidth of a large {bandwidth}{products}, and {fixed_us:g} µs."
        told = {name: inspect.getdoc(providers[name]) or "" for name in others}
        first = {name: " ".join(text.split("\n\n")[0].split()) for name, text in told.items()}
        what = " ".join(f"*{name}*: {text}" for name, text in first.items() if text)
        parts += [heading, *filter(None, [what]), markdown(table)]
    return parts


def _drawn_ratios(file: Path) -> dict[tuple[str, str, int, str], list[float]]:
    """Returns what other providers take of our time over cases that were drawn, by op, kind of drafts, seed, other."""
    rows: dict[tuple, Row] = {}
    for line in read_lines(file) if file.exists() else ():
        rows.setdefault((line["op"], line["seed"], line["case"]), {})[line["provider"]] = line
    groups: dict[tuple, list[float]] = {}
    for (op, seed, case), row in rows.items():
        kind = "chains" if case.endswith(" chain") else "trees" if op == "tree_attention" else ""
        for other in row.keys() - {OURS} if OURS in row else ():
            groups.setdefault((op, kind, seed, other), []).append(_graph(row, other) / _graph(row, OURS))
    return groups


def _drawn_table(file: Path) -> list[str]:
    if not (groups := _drawn_ratios(file)):
        return []
    table = [["op", "seed", "other", "cases", "geometric mean", "worst", "below 1", "below 0.95"]]
    for (op, kind, seed, other), ratios in sorted(groups.items()):
        mean, below = statistics.geometric_mean(ratios), [sum(each < edge for each in ratios) for edge in (1, 0.95)]
        cells = [f"`{op}` {kind}".strip(), str(seed), other, str(len(ratios)), f"{mean:.2f}×", f"{min(ratios):.2f}×"]
        table.append(cells + [*map(str, below)])
    return ["## Cases that nobody chose", _DRAWN_LEGEND, markdown(table)]


def _drawn_rows(file: Path) -> list[list[str]]:
    """Returns README's rows of attention beside FlashAttention 3: geometric means over the cases of all seeds."""
    groups: dict[tuple[str, str], list[float]] = {}
    for (op, kind, _, other), ratios in _drawn_ratios(file).items():
        if other == "fa3":
            groups.setdefault((op, kind), []).extend(ratios)
    return [
        [f"`{op}`", f"{len(ratios)} drawn cases{f', {kind}' if kind else ''}, H200", "-", "fa3", "-",
         f"{statistics.geometric_mean(ratios):.2f}×"]
        for (op, kind), ratios in sorted(groups.items())
    ]  # fmt: skip


def _front_table(sections: list[tuple[Benchmark, list[tuple[Case, Row]]]], server: Path) -> str:
    """Returns the table of README_ROWS, as far as they were timed, and of a server's step."""
    found = {(benchmark.op, case.name): row for benchmark, rows in sections for case, row in rows}
    table = [["op", "case", "ours, µs", "fastest other", "its µs", "ratio"]]
    for op, case in README_ROWS:
        if (op, case) in found:
            row = found[op, case]
            table.append([f"`{op}`", case, _time(_graph(row, OURS)), *_fastest_other(row)])
    table += _drawn_rows(server.parent / results.DRAWN)
    if server.exists() and (row := server_tables.front_row(server)):
        table.append(row)
    return f"{_machine(sections)}:\n\n{markdown(table)}"


def _headline_table(sections: list[tuple[Benchmark, list[tuple[Case, Row]]]]) -> str:
    table = [["op", "case", "graph", "raw", "public", "fastest other", "its graph", "ratio", "at commit"]]
    for benchmark, rows in sections:
        for case, row in _headlines(benchmark, rows):
            ours = [_time(row[OURS].get(name)) for name in ("graph_p50_us", "host_p50_us", "public_host_p50_us")]
            table.append([f"`{benchmark.op}`", case.name, *ours, *_fastest_other(row), f"`{row[OURS]['commit']}`"])
    return markdown(table)


def _fastest_other(row: Row) -> list[str]:
    """Returns the cells name, graph time and ratio."""
    # a bare kernel does a part of the work
    others = [name for name in row if name != OURS and not name.endswith("_bare")]
    best = min(others, key=lambda name: _graph(row, name), default=None)
    return [best, _time(_graph(row, best)), _ratio(row, best)] if best else ["-"] * 3


def _headlines(benchmark: Benchmark, rows: list[tuple[Case, Row]]) -> list[tuple[Case, Row]]:
    if any(case.is_headline for case in benchmark.cases):
        return [(case, row) for case, row in rows if case.is_headline]
    beside_peers = [(case, row) for case, row in rows if set(row) & set(benchmark.peers)][:_MAX_UNMARKED]
    return beside_peers or [max(rows, key=lambda item: len(item[1]))]


def _machine(sections: list[tuple[Benchmark, list[tuple[Case, Row]]]]) -> str:
    """Returns the GPU, and the versions of everything that was timed on it."""
    lines = [row[OURS] for _, rows in sections for _, row in rows]
    versions = {f"{name} {line['versions'][name]}": None for name in ("torch", "triton") for line in lines}
    return ", ".join([lines[0]["gpu"], *versions])


def _graph(row: Row, provider: str) -> float:
    return row[provider]["graph_p50_us"]


def _ratio(row: Row, provider: str) -> str:
    """Returns how many times longer than ours the provider took."""
    ratio = _graph(row, provider) / _graph(row, OURS)
    return f"{ratio:.0f}×" if ratio >= 10 else f"{ratio:.1f}×" if ratio >= 1 else f"{ratio:.2f}×"


def _time(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
