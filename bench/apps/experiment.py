"""An experiment: `python -m bench.run --app experiment --pairs embedded --domains code --k 1 2 4 --methods chain tree`.

Each cell, a pair, domain, method and K, becomes a JSON line of `results/<gpu>/experiment.jsonl`, or of `--output`.
Cells that are held against each other, those of one pair, domain, batch size and temperature with their plain decoding,
are measured in turns, so that what disturbs the machine for some seconds disturbs all of them, and written together. A
cell that is there already, measured on the same machine at the same commit with the same code, is skipped, so that a
run which was cut off goes on with the group where it was. Every batch is full: where prompts are too few for it, the
first ones come again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from eagle_kernels import EAGLEInference

from ..harness import results
from ..harness.markdown import markdown
from ..lab.config import METHODS, BenchmarkConfig
from ..lab.experiment import Experiment
from ..lab.loader import load_pair
from ..lab.log import EventLog, read_events
from ..lab.measure import Measurement, Meter
from ..lab.prompts import Prompt, PromptDataset
from ..lab.records import newest_cells
from ..lab.sources import DOMAINS
from ..lab.tables import method_table

# of all cells of a group; each makes pools and graphs anew where methods with a model meet those without
MOST_TURNS = 5


def main(arguments: Sequence[str], directory: Path | None, commit: str) -> int:
    """Runs the cells that are left; returns the exit status."""
    options = _parse(arguments)
    try:
        experiment = _experiment(options)
        runner = Runner(experiment, options.device, commit)
        output = options.output
        if output is None and directory is not None and runner.device.type == "cuda":
            output = directory / runner.machine["gpu"].replace(" ", "_") / "experiment.jsonl"
        with EventLog(sys.stdout if output is None else output) as log:
            runner.run(log, {line.get("cell_hash") for line in ([] if output is None else read_events(output, "cell"))})
        if options.output is None and output is not None and results.is_committed(directory):
            cells = newest_cells(read_events(output, "cell"))
            output.write_text("".join(json.dumps(cell) + "\n" for cell in cells), encoding="utf-8")
    except (ValueError, KeyError, OSError, RuntimeError) as error:  # models that cannot be had, say
        print(f"error: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        return 1
    return 0


def tables(file: Path) -> list[str]:
    """Returns a section with one table: pair, domain and method against K."""
    cells = newest_cells(read_events(file, "cell"))
    table = method_table(cells)
    if len(table) == 1:
        return []
    machines = ", ".join(dict.fromkeys(cell["gpu"] for cell in cells))
    about = f"On {machines} (`--app experiment`): tokens/s (speed-up over plain decoding, tokens a step)"
    return [f"## An experiment\n\n{about}:\n\n{markdown(table)}"]


class Runner:
    """One experiment on one machine.

    machine  what the numbers depend on beside the cell: GPU, versions, commit (`-dirty` where files differ from it)
    """

    def __init__(self, experiment: Experiment, device: str | None, commit: str):
        self.experiment = experiment
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"--device must be one that torch can use, got {device}")
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.machine() + " CPU"
        self.machine = {"gpu": gpu, "versions": results.versions(), "commit": commit}
        self._code = results.code_hash()
        self._num_turns = min(MOST_TURNS, experiment.num_runs)
        self._engine: tuple[str, EAGLEInference] | None = None

    def run(self, log: EventLog, done: set[str]) -> None:
        """Writes a line for each cell that is not done."""
        cells = list(self.experiment.cells())
        left = [cell for cell in cells if self._hash(cell) not in done]
        _say(f"{len(cells)} cells, {len(cells) - len(left)} of them done")
        groups: dict[BenchmarkConfig, list[BenchmarkConfig]] = {}
        for cell in left:
            # plain decoding comes first, and is measured in any case
            basis = replace(cell, K=None)
            group = groups.setdefault(basis, [basis])
            if cell not in group:
                group.append(cell)
        progress = _Progress(self._num_turns * sum(map(len, groups.values())))
        for basis, group in groups.items():
            measured = self._measure(group, progress)
            for cell in group:
                if cell not in left:
                    continue
                dtype = str(self._engine_of(cell.model_pair_name).target.dtype).removeprefix("torch.")
                line = {"cell_hash": self._hash(cell), "config": cell.to_dict(), "dtype": dtype}
                line |= self.machine | {"prompts": self.experiment.describe_prompts(self._prompts.get_all())}
                log.write("cell", **line, **_numbers(measured[cell], measured[basis]))
                _say(f"{cell!r}: {measured[cell].tokens_per_second:.0f} tokens/s")

    def _measure(self, cells: Sequence[BenchmarkConfig], progress: _Progress) -> dict[BenchmarkConfig, Measurement]:
        """Measures all of them in turns."""
        meters = {cell: self._meter(cell) for cell in cells}
        for turn in range(self._num_turns):
            for cell, meter in meters.items():
                meter.warm_up()
                for _ in range(turn, self.experiment.num_runs, self._num_turns):
                    meter.run()
                progress.advance(f"{cell!r}, turn {turn + 1} of {self._num_turns}")
        return {cell: meter.result() for cell, meter in meters.items()}

    def _meter(self, cell: BenchmarkConfig) -> Meter:
        engine = self._engine_of(cell.model_pair_name)
        prompts = [engine.tokenizer.encode(prompt.raw_text) for prompt in self._prompts_of(cell)]
        num_requests = -(-len(prompts) // cell.batch_size) * cell.batch_size
        prompts = list(itertools.islice(itertools.cycle(prompts), num_requests))
        options = cell.stream_options() | {"max_batch": cell.batch_size}
        return Meter(engine, prompts, cell.max_new_tokens, cell.batch_size, **options)

    def _engine_of(self, pair: str) -> EAGLEInference:
        if self._engine is None or self._engine[0] != pair:
            self._engine = None  # the old models go before there are new ones
            self._engine = pair, load_pair(pair, self.device, self.experiment.dtype)
        return self._engine[1]

    @functools.cached_property
    def _prompts(self) -> PromptDataset:
        source, count = self.experiment.prompts, self.experiment.prompts_per_domain
        own = PromptDataset.load(source) if source else PromptDataset.build("bytes", count, download=False)
        return own.first(count)

    def _prompts_of(self, cell: BenchmarkConfig) -> list[Prompt]:
        return self._prompts.get_by_domain(cell.prompt_domain)

    def _hash(self, cell: BenchmarkConfig) -> str:
        return self.experiment.cell_hash(cell, self._prompts_of(cell), **self.machine, code=self._code)


class _Progress:
    """A progress line: what is done, and how long the rest will take at this speed."""

    def __init__(self, count: int):
        self._count, self._num_done, self._start_s = count, 0, time.perf_counter()

    def advance(self, what: str) -> None:
        self._num_done += 1
        rest_s = (time.perf_counter() - self._start_s) / self._num_done * (self._count - self._num_done)
        _say(f"[{self._num_done}/{self._count}] {what}, {rest_s:.0f} s left")


def _numbers(measured: Measurement, plain: Measurement) -> dict[str, Any]:
    """A cell's, and what plain decoding makes of them; identical: share of the prompts with plain decoding's text."""
    pairs = list(zip(measured.texts, plain.texts, strict=True))
    # where every text ends with its first token nothing is timed, and a log writes null
    speedup = measured.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else math.nan
    return measured.to_dict() | {
        "speedup": speedup,
        "plain_tokens_per_second": plain.tokens_per_second,
        "identical": statistics.fmean(own == other for own, other in pairs),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.run --app experiment")
    parser.add_argument("--config", type=Path, help="JSON or YAML of `lab.experiment.Experiment`; options go before it")
    parser.add_argument("--pairs", nargs="+", help="python -m bench.lab.registry lists them (default: embedded)")
    parser.add_argument("--domains", nargs="+", choices=DOMAINS)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS))
    parser.add_argument("--k", nargs="+", type=int, help="drafts in a row (default: 1 2 4 8)")
    parser.add_argument("--temperatures", nargs="+", type=float)
    parser.add_argument("--batch-sizes", nargs="+", type=int)
    for name in ("max-new-tokens", "prompts-per-domain", "num-runs", "seed"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", help="of both models (default: what the pair says)")
    parser.add_argument("--prompts", help="file of python -m bench.lab.prompts (default: those built in)")
    parser.add_argument("--device", help="default: the GPU where there is one")
    parser.add_argument("--output", type=Path, help="JSON lines, appended to (default: among the results of this GPU)")
    return parser.parse_args(arguments)


def _experiment(options: argparse.Namespace) -> Experiment:
    described = {} if options.config is None else Experiment.from_file(options.config).to_dict()
    given = {item.name: getattr(options, item.name) for item in fields(Experiment)}
    return Experiment.from_dict(described | {name: value for name, value in given.items() if value is not None})
