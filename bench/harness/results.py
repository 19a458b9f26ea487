"""Result records: one JSON line per case and provider in `results/<gpu>/<op>.jsonl`, and a table of them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch

from .declaration import Benchmark, Case
from .timing import Times, copy_gb_per_s

DIRECTORY = Path(__file__).parent.parent / "results"

_COLUMNS = {
    "case": "case",
    "provider": "provider",
    "graph_p20_us": "graph p20",
    "graph_p50_us": "p50",
    "graph_p80_us": "p80 us",
    "eager_p50_us": "eager us",
    "cold_p50_us": "cold us",
    "gb_per_s": "GB/s",
    "share_of_copy": "of copy",
}


def record(benchmark: Benchmark, case: Case, provider: str, times: Times, commit: str) -> dict:
    """Everything that a table needs to quote a number, and to be able to make it again."""
    num_bytes = benchmark.count_bytes(**case.sizes)
    gb_per_s = num_bytes / times.graph_p50_us / 1e3
    return {
        "op": benchmark.op,
        "case": case.name,
        "provider": provider,
        **{name: round(value, 3) for name, value in times._asdict().items()},
        "bytes": num_bytes,
        "gb_per_s": round(gb_per_s, 3),
        "share_of_copy": round(gb_per_s / copy_gb_per_s(), 5),
        "gpu": torch.cuda.get_device_name(),
        "versions": _versions(),
        "commit": commit,
    }


def append(directory: Path, line: dict) -> None:
    file = directory / line["gpu"].replace(" ", "_") / f"{line['op']}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def table(lines: list[dict]) -> str:
    rows = [list(_COLUMNS.values())]
    for line in lines:
        rows.append([_text(name, line[name]) for name in _COLUMNS])
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths))
        )
        for row in rows
    )


def _text(name: str, value) -> str:
    if name == "share_of_copy":
        return f"{value:.1%}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _versions() -> dict:
    import triton

    toolkit = {"hip": torch.version.hip} if torch.version.hip else {"cuda": torch.version.cuda}
    return {"torch": torch.__version__, "triton": triton.__version__, **toolkit}


def checkout_commit() -> str:
    """The checkout's commit, marked where files differ from it; empty outside of a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # no git here
        return ""
    return done.stdout.strip()
