"""`python -m eagle_kernels generate "def quicksort(items):"`, and the other commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from ...engine.requests.names import suggest
from ...runtime.values import first_line
from ...runtime.version import __version__
from .benchmark import add_benchmark_arguments
from .environment import add_environment_arguments
from .generate import add_generate_arguments
from .heads import add_inspect_arguments, add_train_arguments
from .tree import add_tree_arguments

EXIT_INTERRUPTED = 130  # the status that a shell gives a program that SIGINT ended


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Returns 0 on success, 1 with one line on stderr if the input is wrong or the machine cannot do it, and 130 if it was
    interrupted.
    """
    try:
        with _escaping(sys.stdout):
            arguments = _parser().parse_args(argv)
            return arguments.run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return 1
    except (ValueError, OSError, RuntimeError) as error:  # a ModelError is a ValueError, out of memory a RuntimeError
        print(f"error: {first_line(error)}", file=sys.stderr)
        return 1


@contextmanager
def _escaping(stream: TextIO) -> Iterator[None]:
    """Makes a stream write characters that its encoding lacks as escapes, as stderr does, instead of raising."""
    is_strict = getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure")
    if is_strict:
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        if is_strict:
            stream.reconfigure(errors="strict")


class _Parser(argparse.ArgumentParser):
    """Says of an unknown option which one may have been meant."""

    def parse_known_args(self, args=None, namespace=None):
        known, others = super().parse_known_args(args, namespace)
        for option in others:
            name, own = (
                option.partition("=")[0].removeprefix("--"),
                vars(known).keys() - {"run", "prompt"},
            )  # which are no options
            meant = suggest(name, own) if option.startswith("--") else None
            if meant is not None:
                self.error(f"unrecognized arguments: {option} (did you mean --{meant.replace('_', '-')}?)")
        return known, others


def _parser() -> argparse.ArgumentParser:
    description = "Speculative decoding with token trees."
    parser = _Parser(prog="python -m eagle_kernels", description=description)
    parser.add_argument("--version", action="version", version=f"eagle_kernels {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, about, add_arguments in (
        ("generate", "continue texts with speculative decoding", add_generate_arguments),
        ("show-tree", "draw the verified tree of each step, as text and as SVG", add_tree_arguments),
        ("benchmark", "measure speed and acceptance, with and without speculation", add_benchmark_arguments),
        ("inspect", "say what a draft head is, and whether it fits a target", add_inspect_arguments),
        ("train-head", "train an EAGLE-3 head for a target", add_train_arguments),
        ("env", "print versions, devices, backend and cache folder", add_environment_arguments),
    ):
        add_arguments(commands.add_parser(name, help=about))
    return parser
