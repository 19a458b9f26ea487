"""Tables: what a page shows of cells, of throughput and of kernels, and a short one of cells in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .records import PLAIN, by_setting, distinct, fastest, is_number, label_of, method_of, setting_of


class Column(NamedTuple):
    """text: of a row; filter: under which name the page filters by it; meaning: what the number is."""

    title: str
    text: Callable[[Mapping[str, Any]], str]
    is_number: bool = True
    filter: str | None = None
    meaning: str = ""


class Table(NamedTuple):
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    note: str = ""


def number(value: Any, digits: int = 2, unit: str = "") -> str:
    return f"{value:.{digits}f}{unit}" if is_number(value) else "-"


def _config(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda cell: str(cell["config"][name])


def _field(name: str, digits: int = 2, unit: str = "", factor: float = 1.0) -> Callable[[Mapping[str, Any]], str]:
    def text(line: Mapping[str, Any]) -> str:
        value = line.get(name)
        return number(factor * value if is_number(value) else None, digits, unit)

    return text


def _percentile(q: int) -> Callable[[Mapping[str, Any]], str]:
    return lambda cell: number((cell.get("inter_token_ms") or [None] * 101)[q], 3)


CELL_COLUMNS = (
    Column("pair", _config("model_pair_name"), False, "pair", "Target and draft model."),
    Column("domain", _config("prompt_domain"), False, "domain", "What the prompts are about."),
    Column("method", method_of, False, "method", "Where drafts come from and their shape; plain: no drafts."),
    Column("K", lambda cell: str(cell["config"]["K"] or "-"), True, "K", "Drafts one behind another."),
    Column("batch", _config("batch_size"), True, "batch", "Prompts that are decoded together."),
    Column("temperature", lambda c: f"{c['config']['temperature']:g}", True, "temperature", "0: greedy."),
    Column("tokens/s", _field("tokens_per_second", 1), meaning="Behind the first token; median of the runs."),
    Column("speed-up", _field("speedup", unit="×"), meaning="Over plain decoding in the same process."),
    Column("tokens a step", _field("mean_accept_length"), meaning="Accepted drafts and the target's own token."),
    Column(
        "accepted",
        _field("acceptance_rate", 1, "%", 100.0),
        meaning="Accepted drafts over the most that the steps could accept.",
    ),
    Column("first token, ms", _field("ttft_ms"), meaning="Median time to the first token of a request."),
    Column("p50, ms", _percentile(50), meaning="Median time before a token; tokens of a round share its time."),
    Column("p99, ms", _percentile(99), meaning="99th percentile of the same."),
    Column("step, ms", _field("step_ms", 3), meaning="Wall time of a step of a batch."),
    Column("peak, MiB", _field("peak_memory_mib", 0), meaning="Most that torch held on the GPU."),
    Column(
        "same text",
        _field("identical", 1, "%", 100.0),
        meaning="Prompts whose text is that of plain decoding, token for token.",
    ),
    Column("tokens", _config("max_new_tokens"), meaning="At most, of each prompt."),
    Column("dtype", lambda cell: cell["dtype"], False, meaning="Of both models."),
    Column("seed", _config("seed"), meaning="Of the sampling noise of the first prompt."),
    Column("runs", lambda cell: str(len(cell.get("per_run") or ())), meaning="Of all prompts, of which medians are."),
    Column("prompts", lambda cell: cell.get("prompts", "-"), False, "prompts", "Source, number, hash of the texts."),
    Column("machine", lambda cell: cell["gpu"], False, "machine", "Which the cell was measured on."),
    Column("commit", lambda cell: cell["commit"] or "-", False, meaning="-dirty: files differed from it."),
)


# of a setting: shown where they differ, and told once where they do not
_MAYBE_SHARED = ("tokens", "dtype", "seed", "runs", "prompts", "machine")


def cell_table(cells: Sequence[dict]) -> Table:
    note = "One row is one configuration, all prompts of its domain, all runs."
    return _without_shared("Cells", CELL_COLUMNS, cells, note)


def _without_shared(title: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], note: str = "") -> Table:
    shared = {
        column.title: column.text(rows[0])
        for column in columns
        if column.title in _MAYBE_SHARED and len({column.text(row) for row in rows}) == 1
    }
    told = ", ".join(f"{name} {text}" for name, text in shared.items() if text != "-")
    note = " ".join(filter(None, (note, told and f"Of all: {told}.")))
    return Table(title, [column for column in columns if column.title not in shared], rows, note)


def best_table(cells: Sequence[dict]) -> Table:
    """The fastest cell of each pair, setting and domain."""
    rows = []
    for group in by_setting(cells).values():
        for domain in distinct(group, "prompt_domain"):
            best = fastest(cell for cell in group if cell["config"]["prompt_domain"] == domain)
            rows += [] if best is None else [best]
    wanted = ("pair", "domain", "batch", "temperature", "method", "K", "tokens/s", "speed-up", "tokens a step")
    columns = {column.title: column for column in CELL_COLUMNS}
    return _without_shared("Fastest of each domain", [columns[name] for name in (*wanted, *_MAYBE_SHARED)], rows)


def throughput_table(shape: str, curves: Mapping[str, Mapping[int, float]]) -> Table:
    def speed(name: str) -> Callable[[Mapping[str, Any]], str]:
        def text(row: Mapping[str, Any]) -> str:
            value, plain = curves[name].get(row["batch"]), curves[PLAIN].get(row["batch"])
            return "-" if value is None else number(value, 0) + (f" ({value / plain:.2f}×)" if plain else "")

        return text

    sizes = sorted({size for curve in curves.values() for size in curve})
    columns = [Column("requests", lambda row: str(row["batch"])), *(Column(name, speed(name)) for name in curves)]
    note = f"Shape of {shape}; tokens/s, and over plain decoding of the same batch."
    return Table(f"Throughput, {shape}", columns, [{"batch": size} for size in sizes], note)


def kernel_table(kernels: Sequence[Mapping[str, Any]]) -> Table:
    columns = (
        Column("op", lambda line: line["op"], False, "op"),
        Column("case", lambda line: line["case"], False),
        Column("µs", _field("graph_p50_us"), meaning="Median of one call in a replayed CUDA graph."),
        Column("GB/s", _field("gb_per_s", 1), meaning="Bytes that the call must move, over that time."),
        Column("of copy", _field("share_of_copy", 1, "%", 100.0), meaning="Of the bandwidth of a large copy."),
        Column(
            "of floor",
            lambda line: number(line["graph_p50_us"] / line["floor_us"] if line.get("floor_us") else None),
            meaning="Time over what its bytes and its launches must take, where the op has such a goal.",
        ),
        Column("commit", lambda line: line["commit"], False, meaning="Which the case was timed at."),
    )
    return Table("Kernels", columns, kernels, "The newest run of each case.")


def provenance_table(lines: Iterable[Mapping[str, Any]]) -> Table:
    """Each machine, versions and commit that numbers are from, with how many."""
    counts: dict[tuple, int] = {}
    for line in lines:
        versions = ", ".join(f"{name} {value}" for name, value in (line.get("versions") or {}).items())
        origin = (line.get("gpu", "-"), versions, line.get("commit") or "-")
        counts[origin] = counts.get(origin, 0) + 1
    columns = (
        Column("machine", lambda row: row["origin"][0], False),
        Column("versions", lambda row: row["origin"][1], False),
        Column("commit", lambda row: row["origin"][2], False),
        Column("numbers from it", lambda row: str(row["count"])),
    )
    return Table("Provenance", columns, [{"origin": origin, "count": count} for origin, count in counts.items()])


def markdown_table(cells: Sequence[dict]) -> list[list[str]]:
    """Rows of text: a setting, domain and method against K, each `tokens/s (speed-up, tokens a step)`. Cells that were
    not measured with the same plain decoding have rows of their own."""
    counts = sorted({cell["config"]["K"] for cell in cells} - {None})
    columns = [column for column in CELL_COLUMNS if column.title in _MAYBE_SHARED and column.title != "runs"]
    differing = [column for column in columns if len({column.text(cell) for cell in cells}) > 1]
    titles = ["pair", "batch", "T", *(column.title for column in differing), "domain", "plain", "method"]
    table = [[*titles, *(f"K={count}" for count in counts), "at commit"]]
    rows: dict[tuple, dict[str, dict]] = {}
    for cell in cells:
        plain = cell["plain_tokens_per_second"]
        row = rows.setdefault((setting_of(cell), cell["config"]["prompt_domain"], method_of(cell), plain), {})
        row[label_of(cell)] = cell
    for (setting, domain, method, plain), of_label in rows.items():
        if method != PLAIN:
            about = [_escaped(setting.pair), str(setting.batch_size), f"{setting.temperature:g}"]
            about += [_escaped(column.text(next(iter(of_label.values())))) for column in differing]
            about += [_escaped(domain), number(plain, 0), method]
            texts = [_markdown_cell(of_label.get(f"{method} K={count}")) for count in counts]
            commits = ", ".join(dict.fromkeys(f"`{cell['commit']}`" for cell in of_label.values()))
            table.append([*about, *texts, commits])
    return table


def _markdown_cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "-"
    speed, length = number(cell["tokens_per_second"], 0), number(cell["mean_accept_length"])
    return f"{speed} ({number(cell['speedup'], unit='×')}, {length})"


def _escaped(name: str) -> str:
    return name.replace("|", "\\|").replace("\n", " ")
