"""`python -m eagle_kernels show-tree "def quicksort("`: the trees of the first steps, drawn."""

import argparse
import contextlib
import json
import shutil
import sys
from pathlib import Path

from ...engine.inference import EAGLEInference
from ...engine.requests.inputs import read_seeds
from ...runtime.values import is_terminal
from ..trees.svg import trees_svg
from ..trees.text import can_draw, tree_text
from ..trees.view import VerifiedTree, verified_trees
from .shared import add_config_arguments, add_machine_arguments, load_engine, read_path

_WIDTH = 100  # columns, if the terminal does not tell its width


def add_tree_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `show-tree`."""
    command.set_defaults(run=_show_tree)
    add = command.add_argument
    add("prompt", help="text to continue")
    add("--steps", type=int, default=1, help="most steps to draw (default: %(default)s)")
    add("--max-new-tokens", type=int, default=128, help="most new tokens (default: %(default)s)")
    add("--seed", type=int, help="seed of the sampling noise (default: random, and printed)")
    add("--svg", type=read_path, help="also draw to this .svg file, or to one file per step in this folder")
    add_config_arguments(command)
    add_machine_arguments(command)


def _show_tree(arguments: argparse.Namespace) -> int:
    """Draws the steps as they come."""
    engine = load_engine(arguments)
    _check(engine, arguments)
    prompt = engine.session.tokenizer_for("text needs").encode(arguments.prompt)
    if not prompt:
        raise ValueError("the prompt is empty; it must hold at least one token")
    (seed,) = read_seeds(arguments.seed, 1)
    use_color, trees = is_terminal(sys.stdout), []
    width, is_ascii = shutil.get_terminal_size((_WIDTH, 24)).columns, not can_draw(sys.stdout.encoding)
    found = verified_trees(engine, prompt, arguments.max_new_tokens, seeds=seed)
    with contextlib.closing(found):
        for tree in found:
            trees.append(tree)
            if not arguments.json:
                print(("\n" if len(trees) > 1 else "") + tree_text(tree, width, use_color, is_ascii), flush=True)
            if len(trees) == arguments.steps:
                break
    if arguments.json:
        steps = [tree.to_dict() for tree in trees]
        print(json.dumps({"prompt": arguments.prompt, "seed": seed, "steps": steps}, indent=2))
    elif not trees:
        print("no step: the first token, which the prompt's pass brings, was the last one")
    elif engine.config.temperature > 0:
        print(f"\nseed: {seed}")
    if arguments.svg is not None:
        try:
            _save(arguments.svg, trees)
        except OSError as error:
            raise ValueError(f"--svg {arguments.svg} cannot be written: {error.strerror}") from None
    return 0


def _check(engine: EAGLEInference, arguments: argparse.Namespace) -> None:
    """Refuses what cannot be drawn, before anything is generated."""
    if arguments.steps < 1:
        raise ValueError(f"--steps must be at least 1, got {arguments.steps}")
    policy, svg = engine.config.accept_policy, arguments.svg
    if policy != "normal":
        raise ValueError(f"--accept-policy must be normal for trees that the target has verified, got {policy}")
    # another suffix names a picture of another kind, not a folder to be made
    if svg is not None and svg.suffix != ".svg" and not svg.is_dir() and (svg.suffix or svg.exists()):
        raise ValueError(f"--svg must be a file that ends with .svg or a folder, got {svg}")
    if svg is not None and svg.suffix == ".svg" and not svg.parent.is_dir():
        raise ValueError(f"--svg must be in a folder that exists, got {svg}")


def _save(path: Path, trees: list[VerifiedTree]) -> None:
    if path.suffix == ".svg" and not path.is_dir():
        path.write_text(trees_svg(trees), encoding="utf-8")
        return
    path.mkdir(parents=True, exist_ok=True)
    for tree in trees:
        (path / f"step_{tree.step:03}.svg").write_text(trees_svg([tree]), encoding="utf-8")
