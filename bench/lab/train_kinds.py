"""Trains drafts of several kinds for one target, and compares them: `python -m bench.lab.train_kinds --output DIR`.

The target's hidden states over the training text are computed in one pass; an EAGLE-3 head, Medusa heads, a P-EAGLE
head and a DFlash block then learn from them, one after another. The folder gets a folder for each kind, in its
published layout, training.json, and README.md, the card with what every kind brings as a chain and as trees.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.loading import demo_pair, load_target
from eagle_kernels.engine.models.tokenizer import load_tokenizer
from eagle_kernels.runtime.placement import DTYPE_NAMES, choose_device, device_name, read_device
from eagle_kernels.runtime.values import first_line
from eagle_kernels.tools.cli.shared import read_folder

from .training.comparison import best_of, compare, table_of
from .training.corpus import END_OF_TEXT, held_out_prompts, read_corpus, token_stream, windows
from .training.head_recipe import default_aux_layers
from .training.kind_fitting import accuracy_of, fit_kind
from .training.kinds import KINDS, Plan, read_target_config
from .training.recipe import Stage
from .training.states import States, capture_states
from .training.trainer import EXIT_UNFINISHED, Run, TimeBudgetReached, write_json
from .training.unrolled import most_frequent

# steps and learning rate of each kind; a batch has 16 windows
STEPS = {"eagle3": (3000, 1e-3), "medusa": (5000, 1e-3), "parallel": (3000, 1e-3), "block": (4000, 1e-3)}
SECONDS = 165.0  # of training, for a kind
HELD_OUT_WINDOWS = 64
# a byte that no UTF-8 text has
BYTE_MASK = 0xFF


class Texts:
    """What drafts learn from and are measured on: streams of the target's tokens, and prompts by their domain."""

    def __init__(
        self, train: Tensor, held_out: Tensor, prompts: dict[str, list[list[int]]], sha256: str, mask_token: int
    ) -> None:
        self.train, self.held_out, self.prompts = train, held_out, prompts
        self.sha256, self.mask_token = sha256, mask_token


def byte_texts(stdlib: Path, target_folder: Path) -> Texts:
    """Returns the standard library as bytes, for the embedded target."""
    corpus, tokenizer = read_corpus(stdlib), load_tokenizer(target_folder)
    prompts = [tokenizer.encode(text) for text in held_out_prompts(corpus.held_out)]
    streams = token_stream(corpus.train), token_stream(corpus.held_out)
    return Texts(*streams, {"the standard library": prompts}, corpus.sha256, BYTE_MASK)


def train_kinds(
    target: Decoder, target_folder: Path, texts: Texts, output: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Trains, writes and compares the kinds that are asked for; returns the contents of training.json."""
    device, tiny = target.device, options.tiny
    began = time.monotonic()
    deadline = math.inf if options.time_budget_s is None else began + options.time_budget_s
    window = options.window or min(48 if tiny else 512, target.max_length)
    if window > target.max_length:
        raise ValueError(f"--window must be at most the {target.max_length} positions of the target, got {window}")
    aux_layers, _ = default_aux_layers(target.kv_shape.num_layers)
    theirs = read_target_config(target_folder)
    starts = _starts(len(texts.train), options.windows or (12 if tiny else 6144), window, options.seed)
    states = capture_states(target, windows(texts.train, starts, window), aux_layers, 16, _tell)
    held_out = _starts(len(texts.held_out), 4 if tiny else HELD_OUT_WINDOWS, window, options.seed)
    held_out_states = capture_states(target, windows(texts.held_out, held_out, window), aux_layers, 16)
    states_s = time.monotonic() - began
    record: dict[str, Any] = {
        "target": str(target_folder), "device": device_name(device), "torch_version": torch.__version__,
        "seed": options.seed, "corpus_sha256": texts.sha256, "windows": len(states), "window": window,
        "states_seconds": round(states_s, 1), "aux_layers": list(aux_layers), "kinds": {}, "comparison": [],
    }  # fmt: skip
    dtype = DTYPE_NAMES[options.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    measured = target if dtype == target.dtype else load_target(target_folder, device, dtype)
    record["dtype"] = str(dtype).removeprefix("torch.")
    earlier = _read(output / "training.json")
    same = {name: record[name] for name in ("corpus_sha256", "windows", "window", "seed")}
    if all(earlier.get(name) == value for name, value in same.items()):
        record |= {name: earlier[name] for name in ("kinds", "comparison")}
    for kind in options.kind:
        plan = Plan(
            levels=3 if tiny else KINDS[kind].levels, aux_layers=aux_layers,
            draft_ids=_draft_ids(texts.train, theirs["vocab_size"]), mask_token=texts.mask_token, seed=options.seed,
        )  # fmt: skip
        _train_one(kind, plan, target, theirs, (states, held_out_states), output, options, record, deadline)
        each = max(1, options.prompts // len(texts.prompts))
        prompts = {domain: some[:each] for domain, some in texts.prompts.items() if some}
        rows = compare(output / kind, kind, measured, prompts, plan.levels, options.new_tokens)
        record["comparison"] = [row for row in record["comparison"] if row["kind"] != kind] + rows
        write_json(output / "training.json", record)
        (output / "README.md").write_text(card_of(record), encoding="utf-8")
        _tell(f"{kind}: {best_of(rows)}")
    return record


def _train_one(
    kind: str, plan: Plan, target: Decoder, theirs: dict[str, Any], states: tuple[States, States], output: Path,
    options: argparse.Namespace, record: dict[str, Any], deadline: float,
) -> None:  # fmt: skip
    """Trains one kind and writes its folder; adds to the record how that went."""
    steps, rate = (8, 1e-3) if options.tiny else STEPS[kind]
    stage = Stage(kind, options.steps or steps, options.batch_size or (4 if options.tiny else 16), rate, 0.0, 0.5)
    draft, config = KINDS[kind].make(target, theirs, plan)
    settings = {"kind": kind, "levels": plan.levels, **asdict(stage), "windows": len(states[0]), "seed": plan.seed}
    folder = None if options.checkpoint_dir is None else options.checkpoint_dir / kind
    run = Run(target.device, json.dumps(settings, sort_keys=True), folder, deadline=deadline, report_to=sys.stderr)
    seconds = None if options.tiny else options.seconds_each
    # after a break the number of steps is the checkpoint's: its schedule depends on it
    known = None if folder is None else _read(folder / "steps.json").get("steps")
    if known is not None:
        stage, seconds = stage.resized(known, None), None
    stage = fit_kind(run, kind, draft, target, states[0], plan, stage, seconds, folder)
    KINDS[kind].save(draft, config, output / kind)
    record["kinds"][kind] = {
        "levels": plan.levels, "steps": stage.steps, "batch_size": stage.batch_size,
        "parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "training_seconds": round(run.training_seconds[kind], 1), "final_loss": round(run.final_losses[kind], 4),
        "accuracy_by_depth": accuracy_of(kind, draft, target, states[1], plan, stage.batch_size),
    }  # fmt: skip


def card_of(record: dict[str, Any]) -> str:
    """Returns the card of a folder of drafts."""
    lines = [
        "# Drafts of several kinds for one target", "",
        "Generated from `training.json` by `python -m bench.lab.train_kinds`; do not edit.", "",
        f"Target: `{Path(record['target']).name}`. All kinds learnt from the same states: {record['windows']} windows "
        f"of {record['window']} tokens, computed in {record['states_seconds']} s on {record['device']}.", "",
        "| kind | parameters | steps | seconds | accuracy by depth |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for kind, told in record["kinds"].items():
        accuracy = ", ".join(f"{share:.3f}" for share in told["accuracy_by_depth"])
        seconds = f"{told['training_seconds']:.0f}"
        lines.append(f"| {kind} | {told['parameters']:,} | {told['steps']} | {seconds} | {accuracy} |")
    if record["comparison"]:
        best = best_of(record["comparison"])
        about = f"Greedy texts of held-out prompts, in the engine in {record['dtype']}:"
        told = f"{best['kind']}, {best['drafts']}, {best['of_plain']:.2f} times as fast as plain decoding."
        lines += ["", about, "", table_of(record["comparison"]), "", f"Most tokens a second for one request: {told}"]
    return "\n".join(lines) + "\n"


def _draft_ids(stream: Tensor, vocab_size: int) -> Tensor | None:
    """Returns the tokens that EAGLE heads draft: the more frequent half, in which the end of text always is."""
    frequency = torch.bincount(stream.cpu().int(), minlength=vocab_size)
    if vocab_size == END_OF_TEXT + 1:
        frequency[END_OF_TEXT] = len(stream)
    return most_frequent(frequency, vocab_size // 2)


def _starts(length: int, count: int, window: int, seed: int) -> Tensor:
    if length < window:
        raise ValueError(f"train_kinds: the text has {length} tokens, and a window has {window}")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(length - window + 1, (count,), generator=generator, device="cpu")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of training that do not depend on where the text comes from."""
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder for a folder of each kind, training.json and README.md")
    add("--kind", nargs="+", choices=list(KINDS), default=list(KINDS), help="(default: all)")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: auto, a GPU if there is one)")
    add("--steps", type=_count, help="steps of each kind, at most (default: 3000 to 5000; tiny: 8)")
    add("--batch-size", type=_count, help="windows in a step (default: 16; tiny: 4)")
    add("--windows", type=_count, help="windows whose states are computed (default: 6144; tiny: 12)")
    add("--window", type=_count, help="tokens of a window (default: 512; tiny: 48)")
    add("--seconds-each", type=float, default=SECONDS, help="training of each kind, about (default: %(default)s)")
    told = "dtype of both models while drafts are compared (default: bfloat16 on GPUs, else float32)"
    add("--dtype", choices=DTYPE_NAMES, help=told)
    add("--prompts", type=_count, default=40, help="held-out prompts that are decoded (default: %(default)s)")
    add("--new-tokens", type=_count, default=128, help="new tokens of each (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and order (default: 0)")
    add("--checkpoint-dir", type=Path, help="folder for checkpoints, from which a run continues")
    budget = f"seconds until it stops with a checkpoint and status {EXIT_UNFINISHED}; the same command continues"
    add("--time-budget-s", type=float, help=budget)
    add("--tiny", action="store_true", help="train useless drafts in seconds, as a test")


def _count(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"must be an int of at least 1, got {text!r}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.lab.train_kinds", description="Train drafts of all kinds.")
    add_arguments(parser)
    stdlib = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--target", type=read_folder, help="folder of a target over bytes (default: the embedded one)")
    parser.add_argument(
        "--stdlib", type=Path, default=stdlib, help="folder of the text (default: this Python's library)"
    )
    options = parser.parse_args(argv)
    if options.time_budget_s is not None and options.checkpoint_dir is None:
        parser.error("--time-budget-s needs --checkpoint-dir")
    try:
        device = choose_device() if options.device == "auto" else read_device("--device", options.device, "auto")
        folder = options.target or demo_pair()[0]
        target = load_target(folder, device)
        if target.vocab_size != END_OF_TEXT + 1:
            raise ValueError(f"--target must have {END_OF_TEXT + 1} tokens, the bytes and the end of text, got "
                             f"{target.vocab_size}; bench.lab.train_small_pair has others")  # fmt: skip
        record = train_kinds(target, folder, byte_texts(options.stdlib, folder), options.output, options)
    except TimeBudgetReached as reached:
        print(f"time budget used up at {reached}; give the same command again to go on", file=sys.stderr)
        return EXIT_UNFINISHED
    except (ValueError, OSError) as error:
        print(f"error: {first_line(error)}", file=sys.stderr)
        return 1
    print(table_of(record["comparison"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
