"""`python -m eagle_kernels inspect`: what a draft head is, and whether it fits its target."""

import argparse
import json

from ...engine.models.loading import demo_pair
from ..inspection import inspect_head
from .shared import add_machine_arguments, as_lines, first_prompts, read_folder, read_machine


def add_inspect_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `inspect`."""
    command.set_defaults(run=_inspect)
    add = command.add_argument
    add("draft", type=read_folder, nargs="?", help="folder of the head or draft model (default: the embedded pair)")
    add("--target", type=read_folder, help="folder of the target that it must fit")
    add(
        "--sweep", default="none",
        help="file of prompts (.json list, or one per line): also measure acceptance with layer ids off by one",
    )  # fmt: skip
    add("--num-prompts", type=int, default=8, help="most prompts to take from --sweep (default: 8)")
    add("--max-new-tokens", type=int, default=64, help="most new tokens per prompt (default: 64)")
    add_machine_arguments(command, "float32")


def _inspect(arguments: argparse.Namespace) -> int:
    """Returns 0, or 1 if the head is faulty or does not fit."""
    if arguments.draft is None and arguments.target is not None:
        raise ValueError("--target must come with the folder of a head: inspect HEAD --target TARGET")
    target, draft = (arguments.target, arguments.draft) if arguments.draft else demo_pair()
    prompts = None if arguments.sweep == "none" else first_prompts(arguments.sweep, arguments)
    is_placed = prompts is not None or arguments.device != "auto"  # nothing is computed without a sweep
    device, dtype = read_machine(arguments) if is_placed else (None, None)
    report = inspect_head(
        draft, target, prompts=prompts, max_new_tokens=arguments.max_new_tokens,
        device=device, dtype=dtype, check_weights=arguments.check_weights,
    )  # fmt: skip
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else as_lines(report.rows()))
    return 1 if report.misfits else 0
