"""What each method of drafting brings: `python -m bench.run --app drafters [--shape small] [--only methods trees ...]`.

A target of the shape of Llama-3.1-8B with random weights replays code that is edited: the prompt is a file of 400
lines, the answer the same file with 2 % of its lines changed. The draft model of `draft_model` and `hybrid`, a small
decoder, is right in 8 of 10 tokens, and so are the three next-token modules of `mtp`. Prints a table and writes JSON
lines to `results/<gpu>/drafters.jsonl`.

    methods    method x workload: acceptance length, tokens a second, against plain decoding, at 8 drafts, 3 where a
               model alone makes them; beside code that is edited the embedded pair's own texts
    trees      chains and trees of ngram and suffix at 4 .. 64 nodes
    naive      the method `naive` against plain decoding, of the first tokens
    heads      drafting of 8 levels by heads of each kind, of random weights, beside the bytes that it reads
    gap        how long the device is idle before the work of a step, from a trace, with 10,000 responses in the suffix
               trees; plain decoding beside it
"""

import argparse
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.loading import demo_pair

from ..harness.markdown import markdown, newest
from ..harness.timing import ceiling_gb_per_s
from ..harness.trace import graph_gaps_us
from ..lab.log import read_lines
from .generation import Keep, start
from .random_models import SHAPES, random_drafts, random_modules, random_target
from .replay import Replay, ReplayModules, edited_file
from .suffix_cache import Texts

SECTIONS = ("methods", "trees", "naive", "heads", "gap")
NUM_LINES, EDITED = 400, 0.02
MAX_LENGTH = 16384  # of the file before and after
DRAFT_ACCURACY = 0.8
METHODS = {
    "naive": {"method": "naive"},
    "ngram": {"method": "ngram", "topk": 1, "num_steps": 8},
    "ngram tree": {"method": "ngram", "topk": 2, "num_steps": 6, "num_draft_tokens": 9},
    "suffix": {"method": "suffix", "topk": 1, "num_steps": 8},
    "suffix tree": {"method": "suffix", "topk": 2, "num_steps": 8, "num_draft_tokens": 9},
    "draft_model": {"method": "draft_model", "topk": 1, "num_steps": 3},
    "mtp": {"method": "mtp", "topk": 1, "num_steps": 3},
    "hybrid": {"method": "hybrid", "topk": 1, "num_steps": 8, "num_model_steps": 3},
}
NUM_MODULES = 3
NUM_LEVELS, LEVEL_TOKENS = 8, 128  # of the heads' drafts, and of their texts
NAIVE_TOKENS = 1500
PAIR_TOKENS = 200
NUM_RESPONSES = 10_000
PAIR_PROMPTS = ("import os\n\ndef walk(", "class Stack:\n    def __init__(self):\n", "def quicksort(items):\n")


class Bench:
    """The models and the texts; `keep` takes each line that was measured."""

    def __init__(self, shape: str, device: torch.device, num_lines: int, keep: Keep):
        self.device, self.shape, self.keep = device, shape, keep
        self.dtype = dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        sizes = SHAPES["llama-3.1-8b"]
        shared = {"vocab_size": sizes["vocab_size"], "max_position_embeddings": MAX_LENGTH}
        if shape == "small":
            shared["vocab_size"] = 4096
        target = random_target(shape, device, dtype, **shared)
        draft = random_target("small", device, dtype, **shared)
        self.before, self.after = edited_file(inspect.getsource(argparse), num_lines, EDITED, target.vocab_size)
        script = self.before + self.after
        modules = random_modules(shape, NUM_MODULES, target, dtype, **shared)
        self.target = Replay(target, script)
        self.draft = Replay(draft, script, DRAFT_ACCURACY)
        self.modules = ReplayModules(modules, script, DRAFT_ACCURACY)

    def replay(self, speculative: bool = True, max_tokens: int | None = None, **fields) -> tuple[float, float]:
        """Returns (tokens a step, tokens a second) of the edited file. Past responses are not remembered."""
        script = self.after[:max_tokens]
        config = EAGLEConfig(
            **fields, max_batch=1, eos_token_ids=(), max_length=len(self.before) + len(self.after) + 1,
            suffix_decoding_max_cached_requests=0,
        )  # fmt: skip
        draft = self.modules if config.method == "mtp" else self.draft
        engine = EAGLEInference(draft if config.needs_model else None, self.target, config)
        if self.device.type == "cuda":  # compiles and captures
            engine.generate(self.before, min(64, len(script)), seeds=0, speculative=speculative)
        text, stats = engine.generate(self.before, len(script), seeds=0, speculative=speculative)
        if text != script:
            raise AssertionError(f"{fields}: the text is not the script's")
        return stats.mean_accept_length, stats.tokens_per_second

    def record(self, section: str, case: str, provider: str, **numbers: float) -> None:
        line = {"op": "drafters", "section": section, "case": case, "provider": provider}
        self.keep(line | {name: round(value, 4) for name, value in numbers.items()})
        shown = ", ".join(f"{name} {value:.2f}" for name, value in numbers.items())
        print(f"{section:10} {case:28} {provider:14} {shown}", flush=True)


def methods(bench: Bench) -> None:
    _record_methods(bench, "code editing", METHODS, bench.replay)
    target, draft = demo_pair()
    # of the pair's head a chain as `draft_model`'s; it has no next-token modules
    own = {
        "eagle" if name == "draft_model" else name: dict(fields) for name, fields in METHODS.items() if name != "mtp"
    }
    own["eagle"]["method"] = "eagle"

    def continue_prompts(speculative: bool = True, **fields: Any) -> tuple[float, float]:
        config = EAGLEConfig(**fields, suffix_decoding_max_cached_requests=0)
        head = draft if config.needs_model else None
        engine = EAGLEInference.from_pretrained(head, target, config, device=bench.device, dtype=torch.float32)
        prompts = [engine.tokenizer.encode(text) for text in PAIR_PROMPTS]
        for _ in range(1 if bench.device.type == "cpu" else 2):  # the first one compiles and captures
            stats = engine.generate(prompts, PAIR_TOKENS, seeds=0, speculative=speculative, progress=False).stats
        return stats.mean_accept_length, stats.tokens_per_second

    _record_methods(bench, "embedded pair, 3 prompts", own, continue_prompts)


def _record_methods(bench: Bench, case: str, methods: dict[str, dict], measure: Callable) -> None:
    plain_speed = measure(method="naive", speculative=False)[1]
    bench.record("methods", case, "plain", drafts=0, accept_length=1.0, tokens_per_s=plain_speed, of_plain=1.0)
    for name, fields in methods.items():
        drafts = 0 if name == "naive" else EAGLEConfig(**fields).num_verify_tokens - 1
        length, speed = measure(**fields)
        bench.record("methods", case, name, drafts=drafts, accept_length=length, tokens_per_s=speed,
                     of_plain=speed / plain_speed)  # fmt: skip


def trees(bench: Bench) -> None:
    for nodes in (4, 8, 16, 32, 64):
        for method in ("ngram", "suffix"):
            # a suffix tree's nodes go to the likeliest drafts, however many follow one
            for topk in (1, 2, 4) if method == "ngram" else (1, 2):
                # and however deep; a first path of n-grams takes all that it may, so it leaves some to the others
                depth = -(-(nodes - 1) // topk) if method == "ngram" else nodes - 1
                fields = {"method": method, "topk": topk, "num_steps": depth}
                length, speed = bench.replay(**fields, num_draft_tokens=nodes)
                provider = f"{method} " + ("chain" if topk == 1 else f"topk={topk}")
                bench.record("trees", f"{nodes} nodes", provider, accept_length=length, tokens_per_s=speed)


def naive(bench: Bench) -> None:
    ways = (True, False, True, False)
    speeds = [bench.replay(method="naive", speculative=is_on, max_tokens=NAIVE_TOKENS)[1] for is_on in ways]
    plain, own = max(speeds[1::2]), max(speeds[::2])
    bench.record("naive", "code editing", "naive", tokens_per_s=own, of_plain=own / plain)


def heads(bench: Bench) -> None:
    """Times the phase of drafting, reading of what was accepted included, at one request."""
    shared = {"vocab_size": bench.target.vocab_size, "max_position_embeddings": MAX_LENGTH}
    for name, draft, num_bytes in random_drafts(bench.shape, NUM_LEVELS, bench.target, bench.dtype, **shared):
        config = EAGLEConfig(topk=8, num_steps=NUM_LEVELS, num_draft_tokens=64, max_batch=1, eos_token_ids=(),
                             method=getattr(draft, "method", "eagle"))  # fmt: skip
        engine = EAGLEInference(draft, bench.target, config)
        for _ in range(1 if bench.device.type == "cpu" else 2):  # the first one compiles and captures
            stats = engine.generate(bench.before[:512], LEVEL_TOKENS, seeds=0).stats
        draft_ms = stats.phase_time_ms["draft"] / stats.batch_steps
        numbers = {"draft_ms": draft_ms, "mib": num_bytes / 2**20}
        if bench.device.type == "cuda":
            numbers["of_bytes"] = draft_ms / (num_bytes / ceiling_gb_per_s("read") / 1e6)
        bench.record("heads", f"{NUM_LEVELS} levels, B=1", name, **numbers)
        del engine, draft


def gap(bench: Bench) -> None:
    """Times the device's waits: the host makes the drafts of one step while the device is busy with another."""
    if bench.device.type != "cuda":
        return
    config = EAGLEConfig(**METHODS["suffix"], max_batch=32, eos_token_ids=(), max_length=4096)
    engine, texts = EAGLEInference(None, bench.target, config), Texts(0)
    engine.generate([0], 2)  # which makes the cache
    (cache,) = engine.session.suffix_caches.values()
    for _ in range(NUM_RESPONSES):
        cache.start("past", [])
        cache.extend("past", texts.response())
        cache.stop("past")
    for num_rows in (1, 8, 32):
        for provider, speculative in (("plain", False), ("suffix", True)):
            prompts = [[token % bench.target.vocab_size for token in texts.edited()] for _ in range(num_rows)]
            stream = engine.stream(prompts, 400, seeds=0, speculative=speculative)
            next(stream)
            gaps = sorted(graph_gaps_us(engine.session.scheduler.step, 20))
            stream.close()
            bench.record("gap", f"B={num_rows}", provider, median_us=gaps[len(gaps) // 2], worst_us=gaps[-1])


def tables(file: Path) -> list[str]:
    """Returns a section: methods by workload, chains against trees, and what the device waits for."""
    parts = [*_methods(file), *_trees_and_gaps(file)]
    return ["## Methods of drafting", *parts] if parts else []


def _methods(file: Path) -> list[str]:
    """Returns the table of methods by workload, and of naive drafting in turns with plain decoding."""
    lines, rows = read_lines(file), []
    for (section, case, provider), line in newest(lines).items():
        if section in ("methods", "naive"):
            case += ", in turns with plain decoding" if section == "naive" else ""
            length, speed = line.get("accept_length", 1.0), line["tokens_per_s"]
            numbers = [f"{length:.2f}", f"{speed:.0f}", f"{line['of_plain']:.2f}×"]
            drafts = 0 if provider in ("plain", "naive") else line.get("drafts", "-")
            rows.append([case, provider, str(drafts), *numbers, f"`{line['commit']}`"])
    if not rows:
        return []
    workloads = list(dict.fromkeys(row[0] for row in rows))
    rows.sort(key=lambda row: (workloads.index(row[0]), row[1] != "plain"))
    table = [["workload", "method", "drafts", "tokens a step", "tokens/s", "of plain", "at commit"], *rows]
    about = f"Shape of {lines[-1]['shape']} (`--app drafters`):"
    return [f"{about}\n\n{markdown(table)}"]


def _trees_and_gaps(file: Path) -> list[str]:
    """Returns tables of chains against trees, of the heads' drafting, and of what the device waits for."""
    trees: dict[str, dict[str, str]] = {}
    commits: dict[str, list[str]] = {}
    drafting = [["drafts of one request", "head", "ms a step", "MiB read", "of reading them", "at commit"]]
    gaps = [["requests", "method", "device idle before a step, µs", "worst, µs", "at commit"]]
    for (section, case, provider), line in newest(read_lines(file)).items():
        if section == "trees":
            trees.setdefault(case, {})[provider] = f"{line['accept_length']:.2f}, {line['tokens_per_s']:.0f}"
            commits.setdefault(provider, []).append(f"`{line['commit']}`")
        elif section == "heads":
            numbers = [f"{line['draft_ms']:.3f}", f"{line['mib']:.0f}", f"{line['of_bytes']:.2f}×"]
            drafting.append([case, provider, *numbers, f"`{line['commit']}`"])
        elif section == "gap":
            times = [f"{line[name]:.0f}" for name in ("median_us", "worst_us")]
            gaps.append([case, provider, *times, f"`{line['commit']}`"])
    providers = sorted({name for row in trees.values() for name in row})
    lengths = [["tokens a step, tokens/s", *providers]]
    lengths += [[case, *(row.get(name, "-") for name in providers)] for case, row in trees.items()]
    if commits:
        lengths.append(["at commit", *(", ".join(dict.fromkeys(commits[name])) for name in providers)])
    return [markdown(table) for table in (lengths, drafting, gaps) if len(table) > 1]


def main(arguments: Sequence[str], directory: Path | None, commit: str) -> int:
    """Runs the sections that are asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.run --app drafters")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--num-lines", type=int, default=NUM_LINES, help="of the file that is edited (default: 400)")
    options, device, keep = start(parser, arguments, directory, commit)
    bench = Bench(options.shape, device, options.num_lines, keep)
    for section in options.only:
        globals()[section](bench)
    return 0
