"""A mixed load: `python -m bench.run --app load [--shape small] [--clients 8 32 1-64] [--requests 96] [--join 8192]`.

Clients send prompts of 30 to 8,192 tokens and want 32 to 512 new ones, mostly few of both; each sends its next request
once it has the text of the one before, so that requests join and leave all the time. `1-64` are 1, 4, 16 and 64 clients
in turn, and then fewer again, for a number of requests that grows as the root of that of the clients. The models are
those of `--app generation`, with its presets and simulated acceptance. Prints a table and writes JSON lines to
`results/<gpu>/load.jsonl`:

    tokens_per_s  new tokens of all requests, from the first one's start to the last one's end; of_plain: beside plain
    first_ms      until a request has its first token, the median
    gap_ms        between the steps that bring a request tokens, the median; late_ms: the 99th percentile; worst_ms

With `--join`, one more prompt of that length joins requests that run: gap_ms is theirs from then on, until it has
its first token, and of_alone what they had before.
"""

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eagle_kernels import EAGLEInference, SamplingParams

from ..harness.markdown import markdown
from ..lab.log import read_lines
from .generation import PRESETS, Bench, start
from .random_models import SHAPES

PROMPT_TOKENS, NEW_TOKENS = (30, 8192), (32, 512)
SHOWN = ("tokens_per_s", "of_plain", "first_ms", "gap_ms", "late_ms", "worst_ms", "of_alone")
# steps whose time is taken before another request joins
ALONE_STEPS = 40


class Wanted(NamedTuple):
    """What a client asks for."""

    prompt: list[int]
    new_tokens: int


def mixed_load(count: int, vocab_size: int, longest: int, seed: int = 0) -> list[Wanted]:
    """Returns requests whose sizes are spread evenly over their orders of magnitude; together at most `longest`."""
    coin = random.Random(seed)

    def size(least: int, most: int) -> int:
        return round(math.exp(coin.uniform(math.log(least), math.log(most))))

    load = []
    for _ in range(count):
        new_tokens = size(*(min(bound, longest // 4) for bound in NEW_TOKENS))
        num_tokens = size(*(min(bound, longest - new_tokens) for bound in PROMPT_TOKENS))
        load.append(Wanted([coin.randrange(vocab_size) for _ in range(num_tokens)], new_tokens))
    return load


class Phase(NamedTuple):
    """A number of clients, and at how many requests of all it ends."""

    stop: int
    num_clients: int


def phases(clients: str, num_requests: int) -> list[Phase]:
    """Returns what `--clients` names: "8", or "1-64" for numbers that rise fourfold and fall again."""
    least, _, most = clients.partition("-")
    numbers = [int(least)]
    while most and numbers[-1] < int(most):
        numbers.append(min(4 * numbers[-1], int(most)))
    numbers += numbers[-2::-1]
    shares = list(itertools.accumulate(map(math.sqrt, numbers)))
    return [Phase(round(num_requests * share / shares[-1]), number) for share, number in zip(shares, numbers)]


def serve(engine: EAGLEInference, load: Sequence[Wanted], phases: Sequence[Phase]) -> dict[str, float]:
    """Serves a load and returns its numbers, but for of_plain."""
    requests, last_s = {}, {}
    first_s, gaps_s = [], []

    def send() -> None:
        running = sum(not request.is_finished for request in requests.values())
        for wanted in load[len(requests) :]:
            if running >= next(phase.num_clients for phase in phases if len(requests) < phase.stop):
                return
            request = engine.submit(wanted.prompt, SamplingParams(max_new_tokens=wanted.new_tokens))
            requests[request.id], last_s[request.id] = request, time.perf_counter()
            running += 1

    start_s = time.perf_counter()
    send()
    has_begun = set()
    while engine.has_work:
        events = engine.step()
        now_s = time.perf_counter()
        for number in {event.request for event in events}:
            (gaps_s if number in has_begun else first_s).append(now_s - last_s[number])
            has_begun.add(number)
            last_s[number] = now_s
        send()
    for request in requests.values():
        if request.error is not None:
            raise RuntimeError(f"load: {request.error}")
    tokens = sum(len(request.output_ids) for request in requests.values())
    return {
        "tokens_per_s": tokens / (time.perf_counter() - start_s),
        "first_ms": 1e3 * statistics.median(first_s),
        **_gap_times(gaps_s),
    }


def _gap_times(gaps_s: Sequence[float]) -> dict[str, float]:
    """Returns the median, the 99th percentile and the largest, in ms."""
    ordered = sorted(gaps_s)
    times_s = (statistics.median(ordered), ordered[math.ceil(0.99 * len(ordered)) - 1], ordered[-1])
    return {name: 1e3 * time_s for name, time_s in zip(("gap_ms", "late_ms", "worst_ms"), times_s)}


def join(engine: EAGLEInference, num_clients: int, num_tokens: int, longest: int) -> dict[str, float]:
    """Lets a prompt of num_tokens join num_clients others, of `longest` tokens; returns what their steps take then."""
    params = SamplingParams(max_new_tokens=longest - PROMPT_TOKENS[0])
    others = [engine.submit([7] * PROMPT_TOKENS[0], params) for _ in range(num_clients)]
    while not all(request.output_ids or request.is_finished for request in others):
        engine.step()

    def step_s() -> float:
        start_s = time.perf_counter()
        engine.step()
        return time.perf_counter() - start_s

    alone_s = statistics.median(step_s() for _ in range(ALONE_STEPS))
    start_s = time.perf_counter()
    request = engine.submit([7] * num_tokens, SamplingParams(max_new_tokens=1))
    gaps_s = []
    while not request.is_finished:
        gaps_s.append(step_s())
    first_s = time.perf_counter() - start_s
    if request.error or any(other.is_finished for other in others):
        raise RuntimeError(f"load: {request.error or 'the others ended before it joined'}")
    for other in others:
        engine.abort(other)
    engine.collect()
    times = {"first_ms": 1e3 * first_s, **_gap_times(gaps_s)}
    return times | {"of_alone": times["gap_ms"] / (1e3 * alone_s)}


def tables(file: Path) -> list[str]:
    """Returns a section for each shape of a model."""
    shapes: dict[str, list[dict]] = {}
    for line in read_lines(file):
        shapes.setdefault(line["shape"], []).append(line)
    about = "Requests that join and leave, random weights, simulated acceptance (`--app load`):"
    return [f"## A mixed load, shape of {shape}\n\n{about}\n\n{load_table(lines)}" for shape, lines in shapes.items()]


def load_table(lines: Sequence[dict]) -> str:
    """Returns the newest line of each number of clients and preset, as Markdown."""
    rows = [["load", "preset", *SHOWN, "at commit"]]
    for (case, preset), line in {(line["case"], line["provider"]): line for line in lines}.items():
        numbers = (f"{line[name]:.4g}" if name in line else "-" for name in SHOWN)
        rows.append([case, preset, *numbers, f"`{line['commit']}`"])
    return markdown(rows)


def main(arguments: Sequence[str], directory: Path | None, commit: str) -> int:
    """Runs the presets that are asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.run --app load")
    parser.add_argument("--clients", nargs="+", default=["8", "32", "1-64"], help="at once (default: 8 32 1-64)")
    parser.add_argument("--requests", type=int, default=96, help="of all clients together (default: 96)")
    parser.add_argument("--max-step-ms", type=float, help="of EAGLEConfig (default: none)")
    parser.add_argument("--only", nargs="+", choices=list(PRESETS), default=list(PRESETS), help="presets")
    parser.add_argument("--join", type=int, metavar="TOKENS", help="instead: a prompt of this length joins clients")
    options, device, keep = start(parser, arguments, directory, commit)
    # beside the longest prompt its text, and what a tree writes past the last token
    most = SHAPES[options.shape]["max_position_embeddings"] + NEW_TOKENS[1] + 64
    bench = Bench(options.shape, device, steps=1, prompt_tokens=1, max_length=most)
    load = mixed_load(options.requests, SHAPES[options.shape]["vocab_size"], most - 64)
    limit = f", at most {options.max_step_ms:g} ms" if options.max_step_ms else ""
    for clients in options.clients:
        parts = phases(clients, len(load))
        most_clients = max(part.num_clients for part in parts)
        plain_speed = None
        for preset in options.only:
            engine = bench.preset_engine(preset, most_clients + bool(options.join), max_step_ms=options.max_step_ms)
            if options.join:
                case = f"{options.join} tokens join {clients} clients{limit}"
                numbers = join(engine, most_clients, options.join, most - 64)
            else:
                case = f"{clients} clients, {len(load)} requests{limit}"
                serve(engine, load[:most_clients], [Phase(most_clients, most_clients)])
                numbers = serve(engine, load, parts)
                plain_speed = numbers["tokens_per_s"] if preset == "plain" else plain_speed
                if plain_speed is not None:
                    numbers["of_plain"] = numbers["tokens_per_s"] / plain_speed
            line = {"op": "load", "case": case, "provider": preset}
            line |= {name: round(numbers[name], 4) for name in SHOWN if name in numbers}
            shown = "  ".join(f"{name} {line[name]:.4g}" for name in SHOWN if name in line)
            print(f"{line['case']:28} {preset:12} {shown}", flush=True)
            keep(line)
            del engine
    return 0
