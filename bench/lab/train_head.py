"""Trains an EAGLE-3 head for a target: `python -m bench.lab.train_head --target TARGET --data FILES --output HEAD`.

The output folder holds the head, in the format of SpecForge and SGLang, and beside it
    checkpoint/       the state from which the same command continues
    answers.jsonl     the target's answers, with `regenerate`
    training.json     the settings and the acceptance of the result; until the end, the validations so far
"""

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagle_kernels.engine.models.checkpoint import naming, read_config, read_json
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import FAMILIES, read_model_type
from eagle_kernels.engine.models.end_tokens import read_eos_token_ids
from eagle_kernels.engine.models.heads import EagleConfig, EagleHead
from eagle_kernels.engine.models.loading import load_draft, load_target
from eagle_kernels.engine.models.tokenizer import load_tokenizer
from eagle_kernels.runtime.interrupts import EXIT_INTERRUPTED
from eagle_kernels.runtime.placement import device_name
from eagle_kernels.runtime.values import first_line
from eagle_kernels.tools.cli.shared import add_machine_arguments, as_lines, read_folder, read_machine

from .training.acceptance import BATCH_SIZE, TREES, acceptance_rows
from .training.answers import answer_prompts
from .training.chat import chat_format_of
from .training.head_data import Example, count_tokens, learn_answer, prompts_of, read_examples, split_held_out, teaches
from .training.head_fitting import fit_head
from .training.head_recipe import HeadOptions, add_options, head_config, read_options, require, settle
from .training.trainer import EXIT_UNFINISHED, Run, TimeBudgetReached, initialise, save_folder, write_json
from .training.unrolled import draft_vocabulary_of, most_frequent, set_draft_vocabulary, start_from_output_of


def train_head(
    target_folder: Path,
    data: Sequence[Path],
    output: Path,
    options: HeadOptions,
    *,
    device: torch.device,
    dtype: torch.dtype,
    check_weights: bool = True,
) -> dict[str, Any]:
    """Trains, writes and measures a head; returns the contents of `training.json`.

    dtype           the target's; on a GPU, and with bfloat16, the head is trained in mixed precision with fp32 weights
    check_weights   whether the target's weights are checked, see `load_target`
    Raises `TimeBudgetReached` when the time is up, after saving all that is needed to continue.
    """
    began = time.monotonic()
    rule = "be bfloat16 or float32"
    require(dtype != torch.float16, "dtype", rule, "float16, whose gradients would need scaling")
    if (output / "config.json").is_file() and not (output / "checkpoint").is_dir():
        raise ValueError(f"{output} holds another model; choose a new folder as --output")
    _check_family(target_folder)
    with naming(output):
        earlier = read_json(output / "training.json", is_optional=True)
    # made first, because it marks the folder as one of ours
    (output / "checkpoint").mkdir(parents=True, exist_ok=True)
    _tell(f"loads {target_folder} as {dtype} on {device}")
    target = load_target(target_folder, device, dtype, check_weights=check_weights)
    options, aux_layers = settle(options, target)
    tokenizer = load_tokenizer(target_folder)
    chat, chat_name = chat_format_of(target_folder)
    _tell(f"reads {', '.join(map(str, data))}")
    examples = read_examples(data, tokenizer, chat, options.window, needs_answers=not options.regenerate)
    _check_tokens(examples, target.vocab_size)
    train, held_out = split_held_out(examples, options.held_out)
    _tell(f"{len(train)} examples to learn from, {len(held_out)} held out; conversations as {chat_name}")
    data_digest = hashlib.sha256("".join(example.digest for example in examples).encode()).hexdigest()[:16]
    facts = {"target": _digest_of_weights(target), "data": data_digest, "dtype": str(dtype)}
    deadline = began + (math.inf if options.time_budget is None else options.time_budget)

    if options.regenerate:
        room = options.window - options.answer_tokens
        prompts = [prompt for example in train for prompt in prompts_of(example, tokenizer, chat, room)]
        train = _regenerate(target_folder, target, prompts, output, options, aux_layers, facts, deadline)
    if not train:
        raise ValueError("train-head: no answer to learn from is left after --regenerate")

    head, config = new_head(target_folder, target, train, options, aux_layers)
    steps = options.steps or math.ceil(options.epochs * len(train) / (options.batch_size * options.accumulate))
    facts |= {**options.deciding(), "steps": steps}
    prompts = [prompt for example in held_out for prompt in prompts_of(example, tokenizer, chat, options.window)[:1]]
    if not prompts:
        raise ValueError("train-head: no held-out example has a prompt; raise --held-out")
    if any(earlier.get(name) != value for name, value in facts.items()):
        earlier = {}  # belongs to another run
    # the record alone holds the validations of an earlier run of the same command
    by = {name: getattr(options, name) for name in ("validation_prompts", "validation_tokens")}
    is_alike = all(earlier.get(name) == value for name, value in by.items())
    validations = {int(step): rows for step, rows in earlier.get("validations", {}).items() if is_alike}

    def validate(step: int) -> None:
        _tell(f"step {step}: measures the head on {min(len(prompts), options.validation_prompts)} held-out prompts")
        save_folder(head, config, output)
        validations[step] = measure_head(output, target, prompts, options)
        told = ", ".join(f"{row['tree']} {row['mean_accept_length']:.2f}" for row in validations[step])
        _tell(f"step {step}: tokens a step on held-out prompts: {told}")

    def after_step(step: int) -> None:
        lost = [known for known in validations if known > step]  # measured on weights that were not saved
        for known in lost:
            del validations[known]
        is_due = options.validate_every is not None and step % options.validate_every == 0 and step < steps
        is_due = is_due and step not in validations
        if is_due:
            validate(step)
        if is_due or lost:
            write_json(output / "training.json", {**facts, **by, "validations": validations})

    run = Run(
        device,
        json.dumps(facts, sort_keys=True),
        output / "checkpoint",
        deadline=deadline,
        is_mixed=True if dtype == torch.bfloat16 else None,
        save_every=options.save_every,
        report_every=options.report_every,
        report_to=sys.stderr,
    )
    accuracy = fit_head(run, head, target, train, options, steps, after_step)
    validate(steps)
    record = {
        "output": str(output),
        **facts,
        "device": device_name(device),
        "torch_version": torch.__version__,
        "training_examples": len(train),
        "training_tokens": sum(len(example.tokens) for example in train),
        "held_out_examples": len(held_out),
        "vocabulary_coverage": _coverage(head, train),
        "final_loss": run.final_losses["head"],
        "training_seconds": run.training_seconds["head"],
        "accuracy_by_depth": accuracy.latest or earlier.get("accuracy_by_depth", []),
        "acceptance": validations[steps],
        **by,
        "validations": validations,
    }
    write_json(output / "training.json", record)
    return record


def rows_of(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns (name, value) lines to print."""
    accuracy = ", ".join(f"{share:.1%}" for share in record["accuracy_by_depth"])
    rows = [("head", record["output"]), ("final loss", f"{record['final_loss']:.4f}")]
    rows += [("accuracy by depth", accuracy)] if accuracy else []  # missing if the record of a run was lost
    return rows + [(row["tree"], f"{row['mean_accept_length']:.2f} tokens a step") for row in record["acceptance"]]


def _check_family(target_folder: Path) -> None:
    """Refuses targets of other families than ours, from which the head takes its sizes and rotary embedding."""
    with naming(target_folder):
        model_type = read_model_type(read_config(target_folder))
    rule = f"have a model_type of {', '.join(FAMILIES)}"
    require(model_type in FAMILIES, "target", rule, repr(model_type))


def _regenerate(
    target_folder: Path,
    target: Decoder,
    prompts: list[list[int]],
    output: Path,
    options: HeadOptions,
    aux_layers: tuple[int, ...],
    facts: dict[str, Any],
    deadline: float,
) -> list[Example]:
    """Returns examples of the target's answers, for the prompts that leave room for one."""
    most = options.window - options.answer_tokens
    fitting = [prompt for prompt in prompts if len(prompt) <= most]
    if len(fitting) < len(prompts):
        _tell(
            f"{len(prompts) - len(fitting)} prompts of more than {most} tokens are left out (--window, --answer-tokens)"
        )
    names = ("window", "answer_tokens", "answer_temperature", "held_out", "seed")
    answers = answer_prompts(
        target,
        EagleConfig.from_dict(head_config(target_folder, target, options, aux_layers, target.vocab_size)),
        fitting,
        output / "answers.jsonl",
        json.dumps({**facts, **{name: getattr(options, name) for name in names}}, sort_keys=True),
        options,
        end_token_ids=read_eos_token_ids(target_folder, target.vocab_size),
        deadline=deadline,
    )
    return list(filter(teaches, map(learn_answer, fitting, answers)))


def new_head(
    target_folder: Path, target: Decoder, train: list[Example], options: HeadOptions, aux_layers: tuple[int, ...]
) -> tuple[EagleHead, dict[str, Any]]:
    """Returns an untrained head over the most frequent learnt tokens, bound to the target, and its config.json."""
    config = head_config(target_folder, target, options, aux_layers, options.draft_vocab_size)
    head = EagleHead(EagleConfig.from_dict(config))
    initialise(head, num_layers=1, seed=options.seed)
    if head.d2t is not None:
        set_draft_vocabulary(head, most_frequent(count_tokens(train, target.vocab_size), head.draft_vocab_size))
    head.to(target.device).bind(target)
    start_from_output_of(target, head)
    return head, config


def measure_head(folder: Path, target: Decoder, prompts: list[list[int]], options: HeadOptions) -> list[dict[str, Any]]:
    """Measures the greedy acceptance of the head in `folder`, with a tree and a chain."""
    new_tokens = options.validation_tokens
    prompts = [prompt[: target.max_length - new_tokens] for prompt in prompts[: options.validation_prompts]]
    draft = load_draft(folder, target)
    longest = max(map(len, prompts)) + new_tokens
    trees = [replace(tree, max_length=longest, max_batch=BATCH_SIZE) for tree in TREES]
    return acceptance_rows(draft, target, prompts, trees, (0.0,), new_tokens, _tell)


def _coverage(head: EagleHead, train: list[Example]) -> float:
    """Returns the share of the learnt tokens that the head can draft."""
    frequency = count_tokens(train, head.vocab_size)
    return int(frequency[draft_vocabulary_of(head).cpu()].sum()) / max(1, int(frequency.sum()))


def _check_tokens(examples: list[Example], vocab_size: int) -> None:
    largest = max(int(example.tokens.max()) for example in examples)
    if largest >= vocab_size:
        raise ValueError(f"the target's tokenizer gives the id {largest}, but its model has only {vocab_size} tokens")


def _digest_of_weights(target: Decoder) -> str:
    """Hashes the beginning of every tensor, which tells checkpoints of the same shape apart."""
    digest = hashlib.sha256()
    for name, parameter in target.named_parameters():
        digest.update(name.encode() + parameter.flatten()[:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns 0, 1 with one line on stderr if the input is wrong, 130 if it was interrupted, or EXIT_UNFINISHED if the
    time budget ended the run, which the same command continues.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.lab.train_head", description="Train an EAGLE-3 head.")
    parser.add_argument("--target", type=read_folder, required=True, help="folder of the target model")
    parser.add_argument("--data", type=Path, required=True, nargs="+", help="files of training data, .txt or .jsonl")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the head; the same command continues an interrupted run"
    )
    add_options(parser)
    add_machine_arguments(parser, told="bfloat16 on GPUs, else float32")
    given = parser.parse_args(argv)
    try:
        (device, dtype), options = read_machine(given), read_options(given)
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        settings = {"device": device, "dtype": dtype, "check_weights": given.check_weights}
        record = train_head(given.target, given.data, given.output, options, **settings)
    except TimeBudgetReached as reached:
        print(f"time budget used up at {reached}; give the same command again to go on", file=sys.stderr)
        return EXIT_UNFINISHED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {first_line(error)}", file=sys.stderr)
        return 1
    print(json.dumps(record, indent=2) if given.json else as_lines(rows_of(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
