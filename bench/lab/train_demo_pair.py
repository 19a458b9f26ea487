"""Trains the demo pair: `python -m bench.lab.train_demo_pair --output DIR`.

A byte-level Llama learns Python source, is rounded to bf16, and an EAGLE-3 head learns to guess what the rounded model
will say next. A few minutes on a data-centre GPU give a pair that is small enough to ship, and whose acceptance is so
high that a silent fault of the engine shows as a drop.

With `--checkpoint-dir`, the same command continues an interrupted run and ends with the same weights (bit for bit if
the device's arithmetic is deterministic). `--measure-acceptance` then decodes held-out prompts with the pair and adds
the result to its model card.
"""

import argparse
import json
import platform
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.engine.models.heads import EagleConfig, EagleHead
from eagle_kernels.runtime.placement import choose_device, device_name

from .training.acceptance import NEW_TOKENS, measure_acceptance
from .training.corpus import END_OF_TEXT, VOCAB_SIZE, held_out_prompts, read_corpus, token_stream
from .training.evaluation import accuracy_by_depth, held_out_loss, write_model_card
from .training.recipe import Recipe, make_recipe, random_windows
from .training.trainer import EXIT_UNFINISHED, Run, TimeBudgetReached, initialise, save_folder, write_json
from .training.unrolled import head_loss, most_frequent, set_draft_vocabulary, start_from_output_of, target_loss

# Limits of the pair, which is part of the repository and of every wheel.
MAX_PARAMETERS = 5_900_000
MAX_FILE_MIB = 11.5


def train_target(run: Run, recipe: Recipe, stream: Tensor) -> Decoder:
    """Returns the trained target, frozen, with fp32 weights rounded to the bf16 values that will be saved."""
    config = DecoderConfig.from_dict(recipe.target_config)
    target = Decoder(config)
    initialise(target, config.num_hidden_layers, recipe.seed)
    target.to(run.device)
    window = recipe.window + 1
    pieces, stage = random_windows(stream, recipe.target, window, recipe.seed), recipe.target
    run.fit(stage, target, pieces, lambda tokens: target_loss(target, tokens), stage.batch_size * window)
    return target.bfloat16().float().requires_grad_(False)


def train_head(run: Run, recipe: Recipe, target: Decoder, stream: Tensor) -> EagleHead:
    """Returns the head trained against `target`, rounded in the same way."""
    head = EagleHead(EagleConfig.from_dict(recipe.head_config))
    initialise(head, num_layers=1, seed=recipe.seed + 1)
    set_draft_vocabulary(head, choose_draft_vocabulary(stream, head.draft_vocab_size))
    head.to(run.device).bind(target)
    start_from_output_of(target, head)
    pieces, stage = random_windows(stream, recipe.head, recipe.window, recipe.seed + 1), recipe.head
    loss_of = lambda tokens: head_loss(head, target, tokens, recipe.depths)  # noqa: E731
    run.fit(stage, head, pieces, loss_of, stage.batch_size * recipe.window)
    return head.bfloat16().float().requires_grad_(False)


def choose_draft_vocabulary(stream: Tensor, size: int) -> Tensor:
    """Returns the `size` most frequent tokens, ascending [size] int64; the end of text is always one of them."""
    frequency = torch.bincount(stream.cpu().int(), minlength=VOCAB_SIZE)
    frequency[END_OF_TEXT] = len(stream)
    return most_frequent(frequency, size)


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def check_size(target: nn.Module, head: nn.Module, folder: Path) -> None:
    """Refuses a pair that is too large for the repository."""
    parameters = count_parameters(target) + count_parameters(head)
    file_mib = sum((folder / part / "model.safetensors").stat().st_size for part in ("target", "draft")) / 2**20
    if parameters > MAX_PARAMETERS or file_mib > MAX_FILE_MIB:
        raise ValueError(
            f"the pair has {parameters} parameters in {file_mib:.2f} MiB; {MAX_PARAMETERS} in {MAX_FILE_MIB} may ship"
        )


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    about = "Train the byte-level demo pair."
    parser = argparse.ArgumentParser(prog="python -m bench.lab.train_demo_pair", description=about)
    add, stdlib = parser.add_argument, Path(sysconfig.get_path("stdlib"))
    add("--output", type=Path, required=True, help="folder for target/, draft/, training.json and README.md")
    add("--stdlib", type=Path, default=stdlib, help="folder of the text to train on (default: this Python's library)")
    version = platform.python_version()
    add("--stdlib-version", default=version, help="version of Python in --stdlib (default: this Python's)")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: auto, a GPU if there is one)")
    add("--steps-target", type=int, help="training steps of the target (default: 6500; tiny: 10)")
    add("--steps-head", type=int, help="training steps of the head (default: 3000; tiny: 10)")
    add("--batch-target", type=int, help="windows in a step of the target (default: 32; tiny: 4)")
    add("--batch-head", type=int, help="windows in a step of the head (default: 16; tiny: 4)")
    add("--seed", type=int, default=0, help="seed of weights and order (default: 0)")
    add("--checkpoint-dir", type=Path, help="folder for frequent checkpoints, from which a run continues")
    budget = f"seconds until it stops with a checkpoint and status {EXIT_UNFINISHED}; the same command continues"
    add("--time-budget-s", type=float, help=budget)
    add("--tiny", action="store_true", help="train a useless pair in seconds, as a test")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--card-only", action="store_true", help="only rewrite README.md from training.json")
    acceptance = "only measure the acceptance of a trained pair"
    instead.add_argument("--measure-acceptance", action="store_true", help=acceptance)
    per_prompt = "new tokens for each prompt of --measure-acceptance (default: %(default)s)"
    add("--new-tokens", type=int, default=NEW_TOKENS, help=per_prompt)
    arguments = parser.parse_args(argv)
    if arguments.time_budget_s is not None and arguments.checkpoint_dir is None:
        parser.error("--time-budget-s needs --checkpoint-dir")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    arguments = parse_arguments(argv)
    device = choose_device() if arguments.device == "auto" else torch.device(arguments.device)
    if arguments.card_only:
        write_model_card(arguments.output)
        return 0
    if arguments.measure_acceptance:
        return add_acceptance(arguments.output, device, arguments.new_tokens)
    return train_pair(arguments, device)


def train_pair(arguments: argparse.Namespace, device: torch.device) -> int:
    """Trains both models and writes the folder; returns the exit status."""
    began = time.monotonic()
    output: Path = arguments.output
    recipe = make_recipe(tiny=arguments.tiny, seed=arguments.seed)
    recipe = replace(
        recipe,
        target=recipe.target.resized(arguments.steps_target, arguments.batch_target),
        head=recipe.head.resized(arguments.steps_head, arguments.batch_head),
    )
    corpus = read_corpus(arguments.stdlib)
    train_stream = token_stream(corpus.train).to(device)
    held_out_stream = token_stream(corpus.held_out).to(device)
    run = Run(device, recipe.fingerprint(corpus), arguments.checkpoint_dir)
    if arguments.time_budget_s is not None:
        run.deadline = began + arguments.time_budget_s

    try:
        target = train_target(run, recipe, train_stream)
        head = train_head(run, recipe, target, train_stream)
    except TimeBudgetReached as reached:
        print(f"time budget used up at {reached}; give the same command again to go on", file=sys.stderr)
        return EXIT_UNFINISHED

    save_folder(target, recipe.target_config, output / "target")
    save_folder(head, recipe.head_config, output / "draft")
    check_size(target, head, output)
    write_json(
        output / "target" / "tokenizer_config.json",
        {"tokenizer_class": "ByteTokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    )
    prompts = held_out_prompts(corpus.held_out)
    write_json(output / "prompts.json", prompts)
    record = {
        "stdlib_version": arguments.stdlib_version,
        "torch_version": torch.__version__,
        "device": device_name(device),
        "seed": recipe.seed,
        "corpus": {
            "train_files": len(corpus.train),
            "held_out_files": len(corpus.held_out),
            "train_tokens": len(train_stream),
            "held_out_tokens": len(held_out_stream),
            "sha256": corpus.sha256,
        },
        "parameters": {"target": count_parameters(target), "draft": count_parameters(head)},
        "steps": {"target": recipe.target.steps, "head": recipe.head.steps},
        "batch_size": {"target": recipe.target.batch_size, "head": recipe.head.batch_size},
        "window": recipe.window,
        "depths": recipe.depths,
        "training_seconds": run.training_seconds,
        "final_loss": run.final_losses,
        "held_out_loss": held_out_loss(target, held_out_stream, recipe),
        "head_accuracy_by_depth": accuracy_by_depth(head, target, held_out_stream, recipe),
        "prompts": len(prompts),
    }
    write_json(output / "training.json", record)
    write_model_card(output)
    print(
        f"{output}: held-out loss {record['held_out_loss']:.4f} nats/byte, "
        f"head accuracy by depth {', '.join(f'{share:.3f}' for share in record['head_accuracy_by_depth'])}"
    )
    return 0


def add_acceptance(output: Path, device: torch.device, new_tokens: int) -> int:
    """Measures the pair in `output` and adds the rows to its record and model card; returns the exit status."""
    path = output / "training.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    record["acceptance"] = measure_acceptance(output, device, new_tokens)
    write_json(path, record)
    write_model_card(output)
    for row in record["acceptance"]:
        print(f"{row['tree']}, temperature {row['temperature']:g}: {row['mean_accept_length']:.2f} tokens a step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
