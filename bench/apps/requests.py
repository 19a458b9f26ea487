"""Many requests of random lengths, sent at once: `python -m bench.run --app requests [--requests 500] [--only plain]`.

The load is that of `python -m eagle_kernels benchmark --requests`, the models are those of `--app generation`, with its
simulated acceptance. Prints a table and writes JSON lines to `results/<gpu>/requests.jsonl`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from eagle_kernels.tools.request_benchmark import random_requests, run_requests

from ..harness.markdown import markdown
from ..lab.log import read_lines
from .generation import PRESETS, Bench, start
from .random_models import SHAPES

RANGE_RATIO = 0.7
SHOWN = ("requests_per_second", "output_tokens_per_second", "mean_accept_length")


def tables(file: Path) -> list[str]:
    """Returns a section of the newest lines of each shape, load and preset."""
    lines = {(line["shape"], line["case"], line["preset"]): line for line in read_lines(file)}
    names = ["shape", "load", "at once", "preset", "requests/s", "tokens/s", "tokens a step"]
    rows = [[*names, "first token (p50, p99), ms", "at commit"]]
    for (shape, case, preset), line in lines.items():
        numbers = [f"{line[name]:.2f}" for name in SHOWN]
        first = f"{line['ttft_ms']['p50']:.0f}, {line['ttft_ms']['p99']:.0f}"
        rows.append([shape, case, str(line["batch"]), preset, *numbers, first, f"`{line['commit']}`"])
    about = (
        "Requests of random lengths, all sent at once (`--app requests`): prompts and texts have 0.7 to 1 of the "
        "lengths named. Acceptance is simulated."
    )
    return ["## Requests of random lengths", about, markdown(rows)]


def main(arguments: Sequence[str], directory: Path | None, commit: str) -> int:
    """Runs the presets that are asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.run --app requests")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--input-len", type=int, default=512, help="tokens of the longest prompt (default: 512)")
    parser.add_argument("--output-len", type=int, default=256, help="tokens of the longest text (default: 256)")
    parser.add_argument("--batch", type=int, default=64, help="requests that are served at once (default: 64)")
    parser.add_argument("--only", nargs="+", choices=list(PRESETS), default=["plain", "chain 3", "adaptive"])
    options, device, keep = start(parser, arguments, directory, commit)
    # beside the text, what a tree writes past the last token
    most = options.input_len + options.output_len + 256
    bench = Bench(options.shape, device, steps=1, prompt_tokens=1, max_length=most)
    vocab_size = SHAPES[options.shape]["vocab_size"]
    requests = random_requests(options.requests, options.input_len, options.output_len, RANGE_RATIO, vocab_size)
    for preset in options.only:
        engine = bench.preset_engine(preset, options.batch)
        measured = asdict(run_requests(engine, requests, speculative=engine.is_speculating))
        line = {"op": "requests", "case": f"{options.requests} of {options.input_len} + {options.output_len} tokens"}
        line |= {"preset": preset, "batch": options.batch} | measured
        print(f"{preset:14} " + "  ".join(f"{name} {measured[name]:.2f}" for name in SHOWN), flush=True)
        keep(line)
        del engine
    return 0
