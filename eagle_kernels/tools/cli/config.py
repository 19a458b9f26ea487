"""The options of the command line that make an `EAGLEConfig`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...engine.config.eagle_config import EAGLEConfig
from ...engine.config.speculative_config import take_model
from ...primitives.accept_policy import ACCEPT_POLICIES
from ...runtime.values import parse_json, shown


def add_config_arguments(command: argparse.ArgumentParser) -> None:
    """Adds options for drafting, sampling and limits, and the folders of the models."""
    defaults, add = EAGLEConfig(), command.add_argument
    add("--temperature", type=float, default=0.0, help="sampling temperature; 0: greedy (default: 0)")
    add("--top-k", type=int, default=0, help="sample from the k most likely tokens (default: 0, off)")
    add(
        "--top-p", type=float, default=1.0,
        help="sample from the fewest tokens with this total probability (default: 1, off)",
    )  # fmt: skip
    add("--min-p", type=float, default=0.0, help="drop tokens below this share of the best one (default: 0, off)")
    add("--ignore-eos", action="store_true", help="do not stop at end tokens, only at the number of new tokens")
    add("--topk", type=int, help=f"branching of the draft tree (default: {defaults.topk})")
    add("--num-steps", type=int, help=f"levels of the draft tree (default: {defaults.num_steps})")
    add("--num-draft-tokens", type=int, help="nodes verified per step, root included (default: 32)")
    add(
        "--accept-policy", choices=ACCEPT_POLICIES, default="normal",
        help="for timing only: accept all drafts, none, or a simulated number (default: normal)",
    )  # fmt: skip
    add("--simulated-accept-length", type=float, help="for simulate: mean tokens per step, bonus token included")
    add(
        "--simulated-accept-rates", metavar="RATE,RATE,...", type=_numbers,
        help="for simulate, instead: share of steps that accept at least 1,2,... drafts",
    )  # fmt: skip
    add(
        "--adaptive",
        action="store_true",
        help="time several trees and use the fastest (default: on a GPU, if no tree is given)",
    )
    add("--max-batch", type=int, default=defaults.max_batch, help="most requests per step (default: %(default)s)")
    add(
        "--page-size", type=int, default=defaults.page_size,
        help="tokens per page of the KV cache (default: %(default)s)",
    )  # fmt: skip
    add("--eager", action="store_true", help="run without CUDA graphs (default: with them on a GPU)")
    add("--target", type=read_folder, help="folder of the target model (default: the embedded pair)")
    add("--draft", type=read_folder, help="folder of the EAGLE head or draft model (default: the embedded pair)")
    add("--allow-larger-draft", action="store_true", help="let a draft model have more weights than the target")
    add(
        "--speculative-config", type=_fields, default=None,
        help="""a server's JSON, such as '{"method": "ngram", "num_speculative_tokens": 5}'; its "model" is --draft""",
    )  # fmt: skip


def read_config(arguments: argparse.Namespace) -> EAGLEConfig:
    """Makes the configuration; a draft named in --speculative-config becomes `arguments.draft`."""
    fields = arguments.speculative_config
    if fields is not None:
        fields, arguments.draft = take_model(fields, arguments.draft)
    tree = {name: getattr(arguments, name) for name in ("topk", "num_steps", "num_draft_tokens")}
    tree = {name: value for name, value in tree.items() if value is not None}
    if fields is not None and tree:
        option = "--" + min(tree).replace("_", "-")
        raise ValueError(f"{option} must be given as the field {min(tree)!r} when --speculative-config is used")
    same = ("temperature", "top_k", "top_p", "min_p", "accept_policy", "simulated_accept_length",
            "simulated_accept_rates", "max_batch", "page_size")  # fmt: skip
    others = {name: getattr(arguments, name) for name in same}
    others["eos_token_ids"] = () if arguments.ignore_eos else None
    others["adaptive"] = "auto" if arguments.adaptive else None
    others["cuda_graph"] = False if arguments.eager else None
    if fields is None:
        return EAGLEConfig(**tree, **others)
    if "accept_policy" in fields or fields.get("benchmark_mode"):
        if others.pop("accept_policy") != EAGLEConfig.accept_policy:
            raise ValueError("give acceptance either by --accept-policy or in --speculative-config, not by both")
    return EAGLEConfig.from_speculative_config(fields, **others)


def read_folder(text: str) -> Path:
    """Returns the path of a folder; refuses "", which would be the one where the command runs."""
    return read_path(text, "the path of a folder")


def read_path(text: str, kind: str = "a path") -> Path:
    """Returns a path that is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"must be {kind}, got {text!r}")
    return Path(text)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, got {shown(text)}") from None


def _fields(text: str) -> dict:
    try:
        fields = parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {shown(text)} ({error})") from None
    if not isinstance(fields, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {shown(text)}")
    return fields
