"""What several commands share: the machine, the engine, files of prompts, and rows of output."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from ...engine.config import pairing
from ...engine.inference import EAGLEInference
from ...engine.models import loading
from ...engine.models.tokenizer import Tokenizer
from ...runtime.placement import DTYPE_NAMES, choose_device, read_device
from ..inspection import read_prompts_file
from .config import read_config


def add_machine_arguments(command: argparse.ArgumentParser, dtype: str | None = "float32") -> None:
    """Adds device, dtype, weight check and JSON; dtype: its default, None: bfloat16 on GPUs, else float32."""
    add = command.add_argument
    add("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: auto, a GPU if there is one)")
    default = dtype or "bfloat16 on GPUs, else float32"
    add("--dtype", choices=DTYPE_NAMES, default=dtype, help=f"dtype of the weights (default: {default})")
    add(
        "--check-weights",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read all weights once and refuse NaN and infinite ones (default: on)",
    )
    add("--json", action="store_true", help="print one JSON object and nothing else")


def read_machine(arguments: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """Chooses the device and the dtype of the weights."""
    is_free = arguments.device == "auto"
    device = choose_device(_warn) if is_free else read_device("--device", arguments.device, "auto")
    return device, DTYPE_NAMES[arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32")]


def load_engine(arguments: argparse.Namespace) -> EAGLEInference:
    """Loads the models that the arguments name, or the embedded pair."""
    config = read_config(arguments)
    if "mtp" in config.methods and arguments.draft is None:
        arguments.draft = arguments.target  # published targets have their modules in them
    if config.needs_model and arguments.target is not None and arguments.draft is None:
        ways = '--draft HEAD_OR_SMALLER_MODEL, or --speculative-config \'{"method": "ngram"}\', which needs no draft'
        raise ValueError(f"--target must come with a source of drafts: {ways}")
    if config.needs_model and arguments.target is None and arguments.draft is not None:
        raise ValueError(
            '--draft, or "model" of --speculative-config, must come with --target MODEL, whose text it drafts'
        )
    if not config.needs_model and arguments.draft is not None:
        raise ValueError(f"--draft must not be given for method={config.method!r}, which drafts without a model")
    others = sorted({"mtp", "draft_model"}.intersection(config.methods))
    if others and arguments.draft is None:
        raise ValueError(f"--draft must be given for method={others[0]!r}: the embedded pair has an EAGLE head")
    target, draft = (arguments.target, arguments.draft) if arguments.target else loading.demo_pair()
    draft = draft if config.needs_model else None
    device, dtype = read_machine(arguments)
    with _logging_the_head() if arguments.draft else nullcontext():
        return EAGLEInference.from_pretrained(
            draft, target, config, device=device, dtype=dtype,
            check_weights=arguments.check_weights, allow_larger_draft=arguments.allow_larger_draft,
        )  # fmt: skip


def first_prompts(path: str, arguments: argparse.Namespace) -> list[str]:
    """Reads the prompts of a file, at most --num-prompts of them."""
    if arguments.num_prompts < 1:
        raise ValueError(f"--num-prompts must be at least 1, got {arguments.num_prompts}")
    return read_prompts_file(path)[: arguments.num_prompts]


def encode_prompt(tokenizer: Tokenizer, index: int, text: str) -> list[int]:
    """Returns the tokens of the prompt at `index`, at least one."""
    try:
        tokens = tokenizer.encode(text)
    except ValueError as error:
        raise ValueError(f"prompt {index}: {error}") from None
    if not tokens:
        raise ValueError(f"prompt {index} is empty; it must hold at least one token")
    return tokens


def as_lines(rows: list[tuple[str, str]]) -> str:
    """Writes rows as lines of `name: value`."""
    return "\n".join(f"{name}: {value}" for name, value in rows)


@contextmanager
def _logging_the_head() -> Iterator[None]:
    """Logs to stderr what drafts, and how a head's layer ids were read, since wrong ones do not show in the text."""
    loggers, handler = [logging.getLogger(module.__package__) for module in (loading, pairing)], logging.StreamHandler()
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.removeHandler(handler)
            logger.setLevel(level)


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)
