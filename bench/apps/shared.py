"""What the apps share: the shape of their models, where they run, and what becomes of their lines."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..harness import results
from .random_models import SHAPES

Keep = Callable[[dict], None]


def keeper(directory: Path | None, commit: str, **about) -> Keep:
    """Returns what adds a line to the results of this machine's GPU; without a GPU or a folder it does nothing."""
    if directory is None or not torch.cuda.is_available():
        return lambda line: None
    about |= {"gpu": torch.cuda.get_device_name(), "commit": commit, "run": results.new_run()}
    return lambda line: results.append(directory, line | about)


def start(
    parser: argparse.ArgumentParser, arguments: Sequence[str], directory: Path | None, commit: str
) -> tuple[argparse.Namespace, torch.device, Keep]:
    """Returns an app's options, `--shape` among them, its device and `keeper`; exits where the shape needs a GPU."""
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and options.shape != "small":
        parser.exit(2, "a model of this size needs a GPU; --shape small runs anywhere\n")
    return options, device, keeper(directory, commit, shape=options.shape)
