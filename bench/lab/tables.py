"""Tables: what a page shows of cells, of throughput and of kernels, and a short one of cells in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .records import PLAIN, by_setting, distinct, fastest, is_number, label_of, method_of, prompts_text, setting_of


class Column(NamedTuple):
    """text: of a row; meaning: what the number is."""

    title: str
    text: Callable[[Mapping[str, Any]], str]
    is_number: bool = True
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
    Column("pair", _config("model_pair_name"), False, "Which target model and which draft model."),
    Column("domain", _config("prompt_domain"), False, "The kind of text the prompts ask for."),
    Column(
        "method",
        method_of,
        False,
        "Where the drafts come from: chain and tree, from the draft model; ngram and suffix, from earlier text; "
        "plain, no drafts at all.",
    ),
    Column("K", lambda cell: str(cell["config"]["K"] or "-"), True, "How many tokens ahead each step drafts."),
    Column("batch", _config("batch_size"), True, "How many prompts are decoded at the same time."),
    Column(
        "temperature",
        lambda cell: f"{cell['config']['temperature']:g}",
        True,
        "How random the sampling is; 0 always takes the most likely token (greedy decoding).",
    ),
    Column("tokens/s", _field("tokens_per_second", 1), True, "Tokens per second after the first; median of all runs."),
    Column("speed-up", _field("speedup", unit="×"), True, "Tokens/s over those of plain decoding in the same run."),
    Column(
        "tokens a step",
        _field("mean_accept_length"),
        True,
        "How many tokens one step adds: the accepted drafts and one from the target model itself.",
    ),
    Column(
        "accepted",
        _field("acceptance_rate", 1, "%", 100.0),
        True,
        "Share of the drafted tokens that the target model accepted, out of the most it could have.",
    ),
    Column("first token, ms", _field("ttft_ms"), True, "Median time until a request gets its first token."),
    Column("p50, ms", _percentile(50), True, "Median time between two tokens; tokens that come together share it."),
    Column("p99, ms", _percentile(99), True, "The same for the slowest 1% of the tokens (99th percentile)."),
    Column("step, ms", _field("step_ms", 3), True, "Wall-clock time of one step of the whole batch."),
    Column("peak, MiB", _field("peak_memory_mib", 0), True, "The most GPU memory that PyTorch held."),
    Column(
        "same text",
        _field("identical", 1, "%", 100.0),
        True,
        "Share of the prompts that got exactly the text of plain decoding, token for token.",
    ),
    Column("tokens", _config("max_new_tokens"), True, "The most tokens that are generated for a prompt."),
    Column("dtype", lambda cell: cell["dtype"], False, "Number format of both models."),
    Column("seed", _config("seed"), True, "Seed of the sampling noise for the first prompt."),
    Column("runs", lambda cell: str(len(cell.get("per_run") or ())), True, "How often all prompts were decoded."),
    Column(
        "prompts",
        lambda cell: prompts_text(cell.get("prompts", "")) or "-",
        False,
        "How many prompts, where they come from, and a hash that tells their texts apart.",
    ),
    Column("machine", lambda cell: cell["gpu"], False, "What the measurement ran on."),
    Column("commit", lambda cell: cell["commit"] or "-", False, "Git commit; -dirty: files differed from it."),
    Column(
        "experiment cell",
        lambda cell: str(cell.get("cell_hash") or "-"),
        False,
        "The cell_hash of this row in experiment.jsonl, to find all that was recorded. It is not a commit.",
    ),
)


# of a setting: shown where they differ, and told once where they do not
_MAYBE_SHARED = ("tokens", "dtype", "seed", "runs", "prompts", "machine")
# a page has less room than a README, and a legend
_MAYBE_SHARED_ON_A_PAGE = ("pair", "batch", "temperature", *_MAYBE_SHARED, "commit")


def cell_table(cells: Sequence[dict]) -> Table:
    note = "Each row is one configuration: all prompts of its domain, all runs."
    return _without_shared("Every experiment cell", CELL_COLUMNS, cells, note)


def _without_shared(title: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], note: str = "") -> Table:
    shared = {
        column.title: column.text(rows[0])
        for column in columns
        if column.title in _MAYBE_SHARED_ON_A_PAGE and len({column.text(row) for row in rows}) == 1
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
    columns = [columns[name] for name in (*wanted, *_MAYBE_SHARED)]
    return _without_shared("Fastest method for each domain", columns, rows)


def throughput_table(shape: str, curves: Mapping[str, Mapping[int, float]]) -> Table:
    def speed(name: str) -> Callable[[Mapping[str, Any]], str]:
        def text(row: Mapping[str, Any]) -> str:
            value, plain = curves[name].get(row["batch"]), curves[PLAIN].get(row["batch"])
            return "-" if value is None else number(value, 0) + (f" ({value / plain:.2f}×)" if plain else "")

        return text

    sizes = sorted({size for curve in curves.values() for size in curve})
    columns = [
        Column("requests", lambda row: str(row["batch"]), True, "How many requests are decoded at the same time."),
        *(Column(name, speed(name)) for name in curves),
    ]
    note = (
        f"Tokens/s of a model with the shape of {shape}, random weights and simulated acceptance. In brackets: the "
        "speed-up over plain decoding of the same batch."
    )
    return Table(f"Throughput, {shape}", columns, [{"batch": size} for size in sizes], note)


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
