"""`python -m eagle_kernels generate "def quicksort(items):"`, and the other commands."""

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TextIO

from ...runtime.interrupts import EXIT_INTERRUPTED, give_back
from ...runtime.values import first_line
from ...runtime.version import __version__

# each command: what it does, and what adds its arguments, which imports torch and is called when the command is given
_COMMANDS = {
    "generate": ("continue texts with speculative decoding", "generate:add_generate_arguments"),
    "show-tree": ("draw the verified tree of each step, as text and as SVG", "tree:add_tree_arguments"),
    "benchmark": ("measure speed and acceptance, with and without speculation", "benchmark:add_benchmark_arguments"),
    "inspect": ("describe a draft head, and say whether it fits a target", "heads:add_inspect_arguments"),
    "train-head": ("say where to train heads", "main:say_where_heads_are_trained"),
    "env": ("print versions, devices, backend and cache folder", "environment:add_environment_arguments"),
}
# how an error about a call of the engine begins
_CALL = re.compile("(stream|generate|benchmark): ")


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns 0 on success, 1 with one line on stderr if the input is wrong or the machine cannot do
    it, and 130 if it was interrupted."""
    with _standard_streams() as lost:
        try:
            if "stdout" in lost:
                raise ValueError("standard output is closed")
            with _writing(), _escaping(sys.stdout):
                arguments = _parser().parse_args(argv)
                give_back()
                with _naming_options(vars(arguments)):
                    return arguments.run(arguments)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        except BrokenPipeError:
            return 1
        except (ValueError, OSError, RuntimeError) as error:  # ModelErrors, and out of memory, are among them
            print(f"error: {_told(error)}", file=sys.stderr)
            return 1


def say_where_heads_are_trained(command: argparse.ArgumentParser) -> None:
    """Ends `train-head`, which the package no longer holds, with one line."""
    command.exit(
        2,
        "train-head has left the package: in a checkout, python -m bench.lab.train_head trains a head; at scale, use "
        "SpecForge (github.com/sgl-project/SpecForge) or speculators (github.com/vllm-project/speculators)\n",
    )


def _told(error: Exception) -> str:
    """Returns an error in one line, with the file that the system names."""
    if isinstance(error, OSError) and error.strerror:
        return f"{'a file' if error.filename is None else error.filename}: {error.strerror}"
    return first_line(error)


@contextmanager
def _standard_streams() -> Iterator[list[str]]:
    """Replaces standard streams that the program was started without (`<&-`, `2>&-`) by empty ones; yields their names.
    Without this, every write would need a check, and the next file would get descriptor 0, 1 or 2."""
    lost = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in lost:
        setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    try:
        yield lost
    finally:
        for name in lost:
            getattr(sys, name).close()
            setattr(sys, name, None)


@contextmanager
def _naming_options(names: Iterable[str]) -> Iterator[None]:
    """Names options in place of the engine call's arguments, since the user of a command did not make that call."""
    try:
        yield
    except ValueError as error:
        told = str(error)
        if not _CALL.match(told):
            raise
        options = "|".join(name for name in names if "_" in name)  # others are words of the text as well
        told = re.sub(rf"\b({options})\b=?", lambda name: f"--{name[1].replace('_', '-')} ", told)
        told = " ".join(told.removeprefix("stream: ").split())
        raise ValueError(told.replace("input_ids must", "the prompts must")) from None


@contextmanager
def _writing() -> Iterator[None]:
    """Writes out what the block has printed, even where it ends the program, as --help does."""
    stream = sys.stdout
    sys.stdout = _Output(stream)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        finally:
            sys.stdout = stream


class _Output:
    """Names standard output where it cannot be written to; the system names only files that cannot be opened."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._stream, name)
        if name not in ("write", "flush", "reconfigure"):
            return attribute

        def call(*args: Any, **given: Any) -> Any:
            try:
                return attribute(*args, **given)
            except BrokenPipeError:
                raise
            except OSError as error:
                raise ValueError(f"standard output: {error.strerror}") from None

        return call


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
    """Suggests what an unknown option may have meant; adds a command's arguments only when the command is given."""

    home: str | None = None

    def parse_known_args(self, args=None, namespace=None):
        if self.home is not None:
            (module, _, function), self.home = self.home.partition(":"), None
            getattr(import_module(f".{module}", __package__), function)(self)
        known, others = super().parse_known_args(args, namespace)
        if others:
            from ...engine.requests.names import suggest
        for option in others:
            name = option.partition("=")[0].removeprefix("--")
            own = vars(known).keys() - {"run", "prompt"}  # which are no options
            meant = suggest(name, own) if option.startswith("--") else None
            if meant is not None:
                self.error(f"unrecognized arguments: {option} (did you mean --{meant.replace('_', '-')}?)")
        return known, others

    def _print_message(self, message: str, file: TextIO | None = None) -> None:
        """Does not hide that the help could not be written."""
        (file or sys.stderr).write(message)


def _parser() -> argparse.ArgumentParser:
    description = "Speculative decoding with token trees."
    parser = _Parser(prog="python -m eagle_kernels", description=description)
    parser.add_argument("--version", action="version", version=f"eagle_kernels {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (about, home) in _COMMANDS.items():
        commands.add_parser(name, help=about).home = home
    return parser
