"""What several commands share: the options of a configuration, the machine, the engine, prompts, and rows of output."""

import argparse
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from ...engine.config import pairing
from ...engine.config.eagle_config import EAGLEConfig
from ...engine.config.speculative_config import take_model
from ...engine.inference import EAGLEInference
from ...engine.models import loading
from ...engine.models.quantising import METHODS, read_quantize
from ...engine.models.tokenizer import Tokenizer
from ...primitives.accept_policy import ACCEPT_POLICIES
from ...runtime.placement import DTYPE_NAMES, choose_device, read_device
from ...runtime.values import parse_json, shown
from ..inspection import read_prompts_file

_QUANTIZE = f"{', '.join(METHODS)}, or for parts alone such as dense=wint8,lm_head=wint8 (default: not quantised)"


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
        "--adaptive", action="store_true",
        help="time several trees, of every draft, and use the fastest (default: on a GPU, if no tree is given)",
    )  # fmt: skip
    add("--max-batch", type=int, default=defaults.max_batch, help="most requests per step (default: %(default)s)")
    add(
        "--page-size", type=int, default=defaults.page_size,
        help="tokens per page of the KV cache (default: %(default)s)",
    )  # fmt: skip
    add(
        "--kv-cache-dtype", choices=("auto", "fp8", "fp8_e4m3", "int8"), default="auto",
        help="type of the target's keys and values (default: auto, that of the weights)",
    )  # fmt: skip
    add("--quantize", metavar="NAME", type=_parts, help=f"quantise the target at loading: {_QUANTIZE}")
    add("--draft-quantize", metavar="NAME", type=_parts, help="quantise the draft, likewise (default: not quantised)")
    add("--eager", action="store_true", help="run without CUDA graphs (default: with them on a GPU)")
    add("--target", type=read_folder, help="folder of the target model (default: the embedded pair)")
    add(
        "--draft",
        type=read_folder,
        help="folder of the EAGLE head or draft model, or of several (default: the embedded pair)",
    )
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
            "simulated_accept_rates", "max_batch", "page_size", "kv_cache_dtype")  # fmt: skip
    others = {name: getattr(arguments, name) for name in same}
    others |= {name: getattr(arguments, name) for name in ("quantize", "draft_quantize") if getattr(arguments, name)}
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


def _parts(text: str) -> str | dict[str, str]:
    """Returns what `EAGLEConfig.quantize` takes: a name, or names of parts with = and commas."""
    parts = dict(pair.partition("=")[::2] for pair in text.split(",")) if "=" in text else text
    try:
        read_quantize("it", parts)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).replace("it must be None,", "must be", 1)) from None
    return parts


def _fields(text: str) -> dict:
    try:
        fields = parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {shown(text)} ({error})") from None
    if not isinstance(fields, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {shown(text)}")
    return fields


_OF_ENGINE = "float32; bfloat16 with keys and values in 8 bits, and on a GPU with quantised weights"


def add_machine_arguments(
    command: argparse.ArgumentParser, dtype: str | None = None, told: str = _OF_ENGINE
) -> None:  # fmt: skip
    """Adds device, dtype, weight check and JSON; dtype: its default, None: what is told."""
    add = command.add_argument
    add("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: auto, a GPU if there is one)")
    add("--dtype", choices=DTYPE_NAMES, default=dtype, help=f"dtype of the weights (default: {dtype or told})")
    add(
        "--check-weights", action=argparse.BooleanOptionalAction, default=True,
        help="read all weights once and refuse NaN and infinite ones (default: on)",
    )  # fmt: skip
    add("--json", action="store_true", help="print one JSON object and nothing else")


def read_machine(arguments: argparse.Namespace) -> tuple[torch.device, torch.dtype | None]:
    """Returns the device, and the dtype of the weights if it is named."""
    is_free = arguments.device == "auto"
    device = choose_device(_warn) if is_free else read_device("--device", arguments.device, "auto")
    return device, None if arguments.dtype is None else DTYPE_NAMES[arguments.dtype]


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
