"""Tables of an experiment's cells, as rows of text: every number of each, and a short one of methods against K."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .records import PLAIN, is_number, label_of, method_of, prompts_text, setting_of

Cell = Mapping[str, Any]


def number(value: Any, digits: int = 2, unit: str = "") -> str:
    return f"{value:.{digits}f}{unit}" if is_number(value) else "-"


def _config(name: str) -> Callable[[Cell], str]:
    return lambda cell: str(cell["config"][name])


def _field(name: str, digits: int = 2, unit: str = "") -> Callable[[Cell], str]:
    return lambda cell: number(cell.get(name), digits, unit)


def _share(name: str) -> Callable[[Cell], str]:
    return lambda cell: f"{cell[name]:.1%}" if is_number(cell.get(name)) else "-"


def _percentile(q: int) -> Callable[[Cell], str]:
    return lambda cell: number((cell.get("inter_token_ms") or [None] * 101)[q], 3)


COLUMNS: dict[str, Callable[[Cell], str]] = {
    "pair": _config("model_pair_name"),
    "domain": _config("prompt_domain"),
    "method": method_of,
    "K": lambda cell: str(cell["config"]["K"] or "-"),
    "batch": _config("batch_size"),
    "temperature": lambda cell: f"{cell['config']['temperature']:g}",
    "tokens/s": _field("tokens_per_second", 1),
    "speed-up": _field("speedup", unit="×"),
    "tokens a step": _field("mean_accept_length"),
    "accepted": _share("acceptance_rate"),
    "first token, ms": _field("ttft_ms"),
    "p50, ms": _percentile(50),
    "p99, ms": _percentile(99),
    "step, ms": _field("step_ms", 3),
    "peak, MiB": _field("peak_memory_mib", 0),
    "same text": _share("identical"),
    "tokens": _config("max_new_tokens"),
    "dtype": lambda cell: cell["dtype"],
    "seed": _config("seed"),
    "runs": lambda cell: str(len(cell.get("per_run") or ())),
    "prompts": lambda cell: prompts_text(cell.get("prompts", "")) or "-",
    "machine": lambda cell: cell["gpu"],
    "commit": lambda cell: cell["commit"] or "-",
    "experiment cell": lambda cell: str(cell.get("cell_hash") or "-"),
}
LEGEND = """\
*tokens/s*: after a request's first token, the median of the runs. *speed-up*: over plain decoding in the same run.
*tokens a step*: the accepted drafts and one of the target itself. *accepted*: of the most drafts that could be.
*p50*, *p99*: the time before a token, of which those that come together share theirs. *step*: of the whole batch.
*same text*: prompts that got exactly the text of plain decoding. *experiment cell*: the `cell_hash` in
`experiment.jsonl`, which is no commit."""
# of a setting: shown where they differ, and told once where they do not
_OF_A_SETTING = ("tokens", "dtype", "seed", "runs", "prompts", "machine")
_MAYBE_SHARED = ("pair", "batch", "temperature", *_OF_A_SETTING, "commit")


def cell_table(cells: Sequence[Cell], names: Sequence[str] = tuple(COLUMNS)) -> tuple[str, list[list[str]]]:
    """Returns what all cells share, in a sentence, and a table of the rest: a row for each cell."""
    rows = [[COLUMNS[name](cell) for name in names] for cell in cells]
    shared = {name for name, texts in zip(names, zip(*rows)) if name in _MAYBE_SHARED and len(set(texts)) == 1}
    told = "; ".join(f"{name}: {text}" for name, text in zip(names, rows[0]) if name in shared and text != "-")
    left = [place for place, name in enumerate(names) if name not in shared]
    table = [[_escaped(row[place]) for place in left] for row in (names, *rows)]
    return f"The same in every row: {told}." if told else "", table


def method_table(cells: Sequence[Cell]) -> list[list[str]]:
    """Rows of text: a setting, domain and method against K, each `tokens/s (speed-up, tokens a step)`. Cells that were
    not measured with the same plain decoding have rows of their own."""
    counts = sorted({cell["config"]["K"] for cell in cells} - {None})
    names = [name for name in _OF_A_SETTING if name != "runs"]
    differing = [name for name in names if len({COLUMNS[name](cell) for cell in cells}) > 1]
    titles = ["pair", "batch", "T", *differing, "domain", "plain", "method"]
    table = [[*titles, *(f"K={count}" for count in counts), "at commit"]]
    rows: dict[tuple, dict[str, Cell]] = {}
    for cell in cells:
        plain = cell["plain_tokens_per_second"]
        row = rows.setdefault((setting_of(cell), cell["config"]["prompt_domain"], method_of(cell), plain), {})
        row[label_of(cell)] = cell
    for (setting, domain, method, plain), of_label in rows.items():
        if method != PLAIN:
            about = [_escaped(setting.pair), str(setting.batch_size), f"{setting.temperature:g}"]
            about += [_escaped(COLUMNS[name](next(iter(of_label.values())))) for name in differing]
            about += [_escaped(domain), number(plain, 0), method]
            texts = [_short(of_label.get(f"{method} K={count}")) for count in counts]
            commits = ", ".join(dict.fromkeys(f"`{cell['commit']}`" for cell in of_label.values()))
            table.append([*about, *texts, commits])
    return table


def _short(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    speed, length = number(cell["tokens_per_second"], 0), number(cell["mean_accept_length"])
    return f"{speed} ({number(cell['speedup'], unit='×')}, {length})"


def _escaped(name: str) -> str:
    return name.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
