"""Result records: one JSON line per case and provider in `results/<gpu>/<op>.jsonl`, and a table of them."""

import hashlib
import json
import subprocess
import uuid
from pathlib import Path

import torch

from eagle_kernels.runtime import language

from .declaration import Benchmark, Case
from .markdown import markdown
from .timing import Times, ceiling_gb_per_s, ceiling_tflop_per_s

DIRECTORY = Path(__file__).parent.parent / "results"
# the file of cases that were drawn, of all ops
DRAWN = "drawn.jsonl"

# what tells two measurements apart, of ops and of apps
_SUBJECT = ("op", "seed", "section", "shape", "case", "provider", "preset", "system", "batch", "temperature", "top_p",
            "tp", "all_reduce", "quick")  # fmt: skip
_COLUMNS = {
    "case": "case",
    "provider": "provider",
    "graph_p20_us": "graph p20",
    "graph_p50_us": "p50",
    "graph_p80_us": "p80 us",
    "eager_p50_us": "eager us",
    "host_p50_us": "host us",
    "public_host_p50_us": "public us",
    "cold_p50_us": "cold us",
    "gb_per_s": "GB/s",
    "tflop_per_s": "TFLOP/s",
    "share_of_copy": "of copy",
    "floor_us": "floor us",
}


def new_run() -> str:
    """Marks the lines of one run: only they may be compared."""
    return uuid.uuid4().hex[:12]


def record(
    benchmark: Benchmark,
    case: Case,
    provider: str,
    times: Times,
    commit: str,
    run: str = "",
    public_host_us: float | None = None,
    seed: int | None = None,
) -> dict:
    """Everything that a table needs to quote a number, and to be able to make it again.

    public_host_us: what a call of the public function costs the host, known of our own provider alone.
    seed: that the case was drawn from.
    """
    num_bytes = benchmark.count_bytes(**case.sizes)
    gb_per_s = num_bytes / times.graph_p50_us / 1e3
    line = {
        "op": benchmark.op,
        "case": case.name,
        "provider": provider,
        **{name: round(value, 3) for name, value in times._asdict().items() if value is not None},
        "bytes": num_bytes,
        "gb_per_s": round(gb_per_s, 3),
        "share_of_copy": round(gb_per_s / ceiling_gb_per_s("copy"), 5),
        "gpu": torch.cuda.get_device_name(),
        "versions": versions(),
        "commit": commit,
        "run": run,
    }
    if seed is not None:
        line["seed"] = seed
    if public_host_us is not None:
        line["public_host_p50_us"] = round(public_host_us, 3)
    if benchmark.floor is not None:
        ceiling = ceiling_gb_per_s(benchmark.floor.bandwidth)
        line[f"{benchmark.floor.bandwidth}_gb_per_s"] = round(ceiling, 1)
        floor_us = num_bytes / ceiling / 1e3
        if benchmark.count_flops is not None:
            num_flops, ceiling = benchmark.count_flops(**case.sizes), ceiling_tflop_per_s()
            line |= {
                "tflop_per_s": round(num_flops / times.graph_p50_us / 1e6, 1),
                "product_tflop_per_s": round(ceiling),
            }
            floor_us = max(floor_us, num_flops / ceiling / 1e6)
        line["floor_us"] = round(floor_us + benchmark.floor.fixed_us, 3)
    return line


def append(directory: Path, line: dict) -> None:
    """Adds a line to its file. Among the committed results it takes the place of the older line on the same subject;
    another folder keeps the lines of all runs."""
    file = directory / line["gpu"].replace(" ", "_") / (DRAWN if "seed" in line else f"{line['op']}.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []
    if is_committed(directory):
        place = next((number for number, older in enumerate(lines) if gives_way(older, line)), len(lines))
        lines = [*lines[:place], line, *(older for older in lines[place:] if not gives_way(older, line))]
    else:
        lines.append(line)
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))


def is_committed(directory: Path) -> bool:
    """Tells whether this is the folder of the committed results, which hold the newest lines alone."""
    return directory.resolve() == DIRECTORY.resolve()


def gives_way(older: dict, line: dict) -> bool:
    """Tells whether a line is on the subject of a new one. A profile replaces all kernels of the one before."""
    is_other_profile = line.get("section") == "profile" and older["run"] != line["run"]
    return all(older.get(name) == line.get(name) for name in _SUBJECT if not (is_other_profile and name == "provider"))


def table(lines: list[dict]) -> str:
    """Returns the numbers of the lines, as Markdown."""
    return markdown([list(_COLUMNS.values()), *([_text(name, line.get(name)) for name in _COLUMNS] for line in lines)])


def _text(name: str, value) -> str:
    if value is None:
        return "-"
    if name == "share_of_copy":
        return f"{value:.1%}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def versions() -> dict:
    """Of what numbers depend on."""
    toolkit = {"hip": torch.version.hip} if torch.version.hip else {"cuda": torch.version.cuda}
    triton = language.triton.__version__ if language.MISSING is None else None
    return {"torch": torch.__version__, "triton": triton, **toolkit}


def code_hash() -> str:
    """Of our Python files and the embedded pair as they are, whatever the commit."""
    root, digest = DIRECTORY.parents[1], hashlib.sha256()
    files = [file for package in ("eagle_kernels", "reference", "bench") for file in (root / package).rglob("*.py")]
    files += [file for file in (root / "eagle_kernels" / "assets" / "demo_pair").rglob("*") if file.is_file()]
    for file in sorted(files):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def checkout_commit() -> str:
    """The checkout's commit, marked where files differ from it; empty outside of a checkout.

    Results do not count: a run that writes them measures the same code to its end.
    """
    commit = _git("rev-parse", "--short=12", "HEAD")
    results = f":(top,exclude){DIRECTORY.relative_to(DIRECTORY.parents[1])}"
    is_dirty = commit and _git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", results)
    return f"{commit}-dirty" if is_dirty else commit


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # no git here
        return ""
    return done.stdout.strip()
