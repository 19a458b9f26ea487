"""What sharing of prefixes saves, and costs: `python -m bench.run --app prefixes [--shape small] [--requests 32]`.

The models are those of `--app generation`. Requests arrive together, each time with prompts that were never read
before, and are served with sharing and without, in turn:

    together  the prompts begin with the same 2,048 tokens and end with 64 of their own
    apart     they have the same number of tokens, none in common, and 64 new ones

Prints a table and writes JSON lines to `results/<gpu>/prefixes.jsonl`: first_ms and whole_ms are the medians over the
repeats of the median time to a request's first token, and of the time to the last token of all.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eagle_kernels import EAGLEInference
from eagle_kernels.engine.benchmark import time_requests

from ..harness.markdown import markdown
from ..lab.log import read_lines
from .generation import PRESETS, Bench, start
from .random_models import SHAPES

COMMON_TOKENS, OWN_TOKENS, SMALLER = 2048, 64, 16  # of the small shape, prompts are shorter by this
REPEATS = 10
SHOWN = ("first_ms", "whole_ms")


class Case(NamedTuple):
    """What is asked: how much of the prompts is common to all, and how many new tokens."""

    has_common: bool
    new_tokens: int


CASES = {"together": Case(True, 1), "apart": Case(False, 64)}


def prompts_of(case: Case, count: int, tokens: tuple[int, int], vocab_size: int, seed: int) -> list[list[int]]:
    """Returns prompts of random tokens, `tokens` = (common, own) each."""
    coin, (common, own) = random.Random(seed), tokens

    def some(count: int) -> list[int]:
        return [coin.randrange(vocab_size) for _ in range(count)]

    first = some(common)
    return [(first if case.has_common else some(common)) + some(own) for _ in range(count)]


def serve(engine: EAGLEInference, prompts: list[list[int]], new_tokens: int, shares: bool) -> tuple[float, float, int]:
    """Returns first_ms and whole_ms of one repeat, and the tokens that were shared."""
    start_s = time.perf_counter()
    stream = engine.stream(prompts, new_tokens, seeds=0, share_prefixes=shares)
    first_ms = statistics.median(1e3 * (each.first_s - start_s) for each in time_requests(stream))
    whole_ms = 1e3 * (time.perf_counter() - start_s)
    return first_ms, whole_ms, stream.output().stats.shared_tokens


def tables(file: Path) -> list[str]:
    """Returns a section of the newest lines of each shape, case and preset."""
    lines = {(line["shape"], line["case"], line["preset"]): line for line in read_lines(file)}
    rows = [["shape", "requests", "preset", "", "shared", "without", "ratio", "at commit"]]
    for (shape, case, preset), line in lines.items():
        for name in SHOWN:
            shared, without = line["shared"][name], line["without"][name]
            rows.append([shape, case, preset, name.replace("_ms", ", ms"), f"{shared:.1f}", f"{without:.1f}",
                         f"{without / shared:.2f}×", f"`{line['commit']}`"])  # fmt: skip
    about = (
        "Prompts that were never read before, sent at once (`--app prefixes`): the median time to a request's first "
        "token, and the time to the last token of all, with sharing of prefixes and without."
    )
    return ["## Prefixes that requests have in common", about, markdown(rows)]


def main(arguments: Sequence[str], directory: Path | None, commit: str) -> int:
    """Runs the cases that are asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.run --app prefixes")
    parser.add_argument("--requests", type=int, default=32, help="at once (default: 32)")
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--only", nargs="+", choices=list(PRESETS), default=["plain", "chain 3"], help="presets")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options, device, keep = start(parser, arguments, directory, commit)
    smaller = SMALLER if options.shape == "small" else 1
    tokens = COMMON_TOKENS // smaller, OWN_TOKENS // smaller
    # beside the prompt its text, and what a tree writes past the last token
    most = sum(tokens) + max(case.new_tokens for case in CASES.values()) + 64
    bench = Bench(options.shape, device, steps=1, prompt_tokens=1, max_length=most)
    vocab_size = SHAPES[options.shape]["vocab_size"]
    for preset in options.only:
        engine = bench.preset_engine(preset, options.requests)
        for name in options.case:
            case, seen = CASES[name], {True: [], False: []}
            for repeat in range(options.repeats + 1):
                for shares in (repeat % 2 == 0, repeat % 2 == 1):  # none is always the first
                    prompts = prompts_of(case, options.requests, tokens, vocab_size, seed=2 * repeat + shares)
                    seen[shares].append(serve(engine, prompts, case.new_tokens, shares))
            line = {"op": "prefixes", "case": f"{options.requests} {name}", "preset": preset}
            line |= {"repeats": options.repeats, "prompt_tokens": sum(tokens), "shared_tokens": seen[True][-1][2]}
            for shares, key in ((True, "shared"), (False, "without")):
                # the first one compiles what is left
                medians = map(statistics.median, list(zip(*seen[shares][1:]))[:2])
                line[key] = dict(zip(SHOWN, (round(value, 3) for value in medians)))
            print(f"{line['case']:14} {preset:12} shared {line['shared']}  without {line['without']}", flush=True)
            keep(line)
        del engine
    return 0
