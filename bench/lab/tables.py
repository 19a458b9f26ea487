"""Tables: what a page shows of cells, of throughput and of kernels, and a short one of cells in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .records import PLAIN, by_setting, distinct, fastest, is_number, label_of, method_of, prompts_text, setting_of


class Column(NamedTuple):
    """text: of a row; filter: under which name the page filters by it; meaning: what the number is; is_key: it tells
    which row this is, so that a phone, which has no room for it, shows it below the row's first cell."""

    title: str
    text: Callable[[Mapping[str, Any]], str]
    is_number: bool = True
    filter: str | None = None
    meaning: str = ""
    is_key: bool = False


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
    Column("pair", _config("model_pair_name"), False, "pair", "Which target model and which draft model.", True),
    Column("domain", _config("prompt_domain"), False, "domain", "The kind of text the prompts ask for.", True),
    Column(
        "method",
        method_of,
        False,
        "method",
        "Where the drafts come from: chain and tree, from the draft model; ngram and suffix, from earlier text; "
        "plain, no drafts at all.",
        True,
    ),
    Column(
        "K", lambda cell: str(cell["config"]["K"] or "-"), True, "K", "How many tokens ahead each step drafts.", True
    ),
    Column("batch", _config("batch_size"), True, "batch", "How many prompts are decoded at the same time.", True),
    Column(
        "temperature",
        lambda cell: f"{cell['config']['temperature']:g}",
        True,
        "temperature",
        "How random the sampling is; 0 always takes the most likely token (greedy decoding).",
        True,
    ),
    Column(
        "tokens/s", _field("tokens_per_second", 1), meaning="Tokens per second after the first; the median of all runs."
    ),
    Column("speed-up", _field("speedup", unit="×"), meaning="Tokens/s over those of plain decoding in the same run."),
    Column(
        "tokens a step",
        _field("mean_accept_length"),
        meaning="How many tokens one step adds: the accepted drafts and one from the target model itself.",
    ),
    Column(
        "accepted",
        _field("acceptance_rate", 1, "%", 100.0),
        meaning="Share of the drafted tokens that the target model accepted, out of the most it could have.",
    ),
    Column("first token, ms", _field("ttft_ms"), meaning="Median time until a request gets its first token."),
    Column(
        "p50, ms",
        _percentile(50),
        meaning="Median time between two tokens; tokens that arrive together share their time.",
    ),
    Column("p99, ms", _percentile(99), meaning="The same for the slowest 1% of the tokens (99th percentile)."),
    Column("step, ms", _field("step_ms", 3), meaning="Wall-clock time of one step of the whole batch."),
    Column("peak, MiB", _field("peak_memory_mib", 0), meaning="The most GPU memory that PyTorch held."),
    Column(
        "same text",
        _field("identical", 1, "%", 100.0),
        meaning="Share of the prompts that got exactly the text of plain decoding, token for token.",
    ),
    Column("tokens", _config("max_new_tokens"), meaning="The most tokens that are generated for a prompt."),
    Column("dtype", lambda cell: cell["dtype"], False, meaning="Number format of both models."),
    Column("seed", _config("seed"), meaning="Seed of the sampling noise for the first prompt."),
    Column("runs", lambda cell: str(len(cell.get("per_run") or ())), meaning="How often all prompts were decoded."),
    Column(
        "prompts",
        lambda cell: prompts_text(cell.get("prompts", "")) or "-",
        False,
        "prompts",
        "How many prompts, where they come from, and a hash that tells their texts apart.",
    ),
    Column("machine", lambda cell: cell["gpu"], False, "machine", "What the measurement ran on."),
    Column(
        "commit",
        lambda cell: cell["commit"] or "-",
        False,
        meaning="Git commit that was measured; -dirty means that files differed from it.",
    ),
    Column(
        "experiment cell",
        lambda cell: str(cell.get("cell_hash") or "-"),
        False,
        meaning="The cell_hash of this row in experiment.jsonl, to find all that was recorded. It is not a commit.",
    ),
)


# of a setting: shown where they differ, and told once where they do not
_MAYBE_SHARED = ("tokens", "dtype", "seed", "runs", "prompts", "machine")
# a page has less room than a README, and a legend
_MAYBE_SHARED_ON_A_PAGE = ("pair", "batch", "temperature", *_MAYBE_SHARED, "commit")


def cell_table(cells: Sequence[dict]) -> Table:
    note = "Each row is one configuration: all prompts of its domain, all runs."
    return _without_shared("Every experiment cell", CELL_COLUMNS, cells, note)


def _without_shared(
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Any]],
    note: str = "",
    names: Sequence[str] = _MAYBE_SHARED_ON_A_PAGE,
) -> Table:
    shared = {
        column.title: column.text(rows[0])
        for column in columns
        if column.title in names and len({column.text(row) for row in rows}) == 1
    }
    told = "; ".join(f"{name}: {text}" for name, text in shared.items() if text != "-")
    note = " ".join(filter(None, (note, told and f"The same in every row: {told}.")))
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
    # what won is what is asked for: it needs a column of its own on a phone as well
    columns |= {name: columns[name]._replace(is_key=False) for name in ("method", "K")}
    return _without_shared(
        "Fastest method for each domain", [columns[name] for name in (*wanted, *_MAYBE_SHARED)], rows
    )


def throughput_table(shape: str, curves: Mapping[str, Mapping[int, float]]) -> Table:
    def speed(name: str) -> Callable[[Mapping[str, Any]], str]:
        def text(row: Mapping[str, Any]) -> str:
            value, plain = curves[name].get(row["batch"]), curves[PLAIN].get(row["batch"])
            return "-" if value is None else number(value, 0) + (f" ({value / plain:.2f}×)" if plain else "")

        return text

    sizes = sorted({size for curve in curves.values() for size in curve})
    columns = [
        Column("requests", lambda row: str(row["batch"]), meaning="How many requests are decoded at the same time."),
        *(Column(name, speed(name)) for name in curves),
    ]
    note = (
        f"Tokens/s of a model with the shape of {shape}, random weights and simulated acceptance. In brackets: the "
        "speed-up over plain decoding of the same batch."
    )
    return Table(f"Throughput, {shape}", columns, [{"batch": size} for size in sizes], note)


def kernel_table(kernels: Sequence[Mapping[str, Any]]) -> Table:
    columns = (
        Column("op", lambda line: line["op"], False, "op", "The operator that was timed.", True),
        Column("case", lambda line: line["case"], False, meaning="Sizes of its arguments.", is_key=True),
        Column("µs", _field("graph_p50_us"), meaning="Median time of one call in a replayed CUDA graph."),
        Column("GB/s", _field("gb_per_s", 1), meaning="Bytes that the call has to move, divided by that time."),
        Column(
            "of copy",
            _field("share_of_copy", 1, "%", 100.0),
            meaning="GB/s as a share of torch's copy of a large tensor; over 100% where the data stay in the L2 cache, "
            "and where a kernel is faster than that copy.",
        ),
        Column(
            "of floor",
            lambda line: number(line["graph_p50_us"] / line["floor_us"] if line.get("floor_us") else None),
            meaning="Time divided by the least its bytes and launches can take, for ops that have such a goal.",
        ),
        Column("commit", lambda line: line["commit"], False, meaning="Git commit that the case was timed at."),
    )
    return Table("Kernel timings", columns, kernels, "The newest run of each case.")


def provenance_table(lines: Iterable[Mapping[str, Any]]) -> Table:
    """Each machine, versions and commit that numbers are from, with how many."""
    counts: dict[tuple, int] = {}
    for line in lines:
        versions = ", ".join(f"{name} {value}" for name, value in (line.get("versions") or {}).items())
        origin = (line.get("gpu", "-"), versions, line.get("commit") or "-")
        counts[origin] = counts.get(origin, 0) + 1
    columns = (
        Column("commit", lambda row: row["origin"][2], False, is_key=True),
        Column("numbers from it", lambda row: str(row["count"]), meaning="How many of the numbers above."),
        Column("machine", lambda row: row["origin"][0], False),
        Column("versions", lambda row: row["origin"][1] or "-", False),
    )
    rows = [{"origin": origin, "count": count} for origin, count in counts.items()]
    note = "Every number on this page was measured at one of these Git commits."
    return _without_shared("Where the numbers come from", columns, rows, note, ("machine", "versions"))


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
