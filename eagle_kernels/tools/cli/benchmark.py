"""`python -m eagle_kernels benchmark prompts.txt`: speed and acceptance, with and without speculation."""

from __future__ import annotations

import argparse
import json
import platform

import torch

from ...engine.inference import EAGLEInference
from ...runtime import language
from ..training.trainer import device_name
from .config import add_config_arguments
from .shared import add_machine_arguments, as_lines, encode_prompt, first_prompts, load_engine


def add_benchmark_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `benchmark`."""
    command.set_defaults(run=_benchmark)
    command.add_argument("prompts", help="file of prompts: a .json list, or one prompt a line")
    command.add_argument(
        "--num-prompts", type=int, default=80, help="how many prompts of the file, at most (default: 80)"
    )
    command.add_argument(
        "--max-new-tokens", type=int, default=128, help="most new tokens for each prompt (default: 128)"
    )
    command.add_argument("--batch-size", type=int, default=1, help="prompts that are decoded together (default: 1)")
    command.add_argument("--seed", type=int, default=0, help="seed of the sampling noise (default: 0)")
    add_config_arguments(command)
    add_machine_arguments(command)


def _benchmark(arguments: argparse.Namespace) -> int:
    texts = first_prompts(arguments.prompts, arguments)
    engine, tokenizer = load_engine(arguments)
    prompts = [encode_prompt(tokenizer, index, text) for index, text in enumerate(texts)]
    result = engine.benchmark(
        prompts, arguments.max_new_tokens, batch_size=arguments.batch_size, seeds=arguments.seed,
        progress=False if arguments.json else None,
    )  # fmt: skip
    if arguments.json:
        print(json.dumps(result.to_dict() | _conditions(engine), indent=2))
        return 0
    print(as_lines([("method", f"{_method(engine)}, verified by {engine.config.verify_strategy}"), *result.rows()]))
    return 0


def _method(engine: EAGLEInference) -> str | tuple[str, ...]:
    """Returns the method of drafting, which the configuration may leave to the head."""
    return engine.config.method or engine.draft.method


def _conditions(engine: EAGLEInference) -> dict:
    """Returns the conditions of the measurement."""
    config = engine.config.on(engine.device)
    names = ("topk", "num_steps", "adaptive", "verify_strategy", "accept_policy", "temperature", "top_k", "top_p",
             "min_p", "page_size", "cuda_graph")  # fmt: skip
    triton = language.triton.__version__ if language.MISSING is None else None
    conditions = {name: getattr(config, name) for name in names} | {
        "method": _method(engine),
        "num_draft_tokens": config.num_verify_tokens,
        "dtype": str(engine.target.dtype).removeprefix("torch."),
        "device": device_name(engine.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton},
    }
    if config.methods == ("naive",):  # its tree is a root, whatever the configuration says
        conditions |= {"topk": 1, "num_steps": 0, "num_draft_tokens": 1}
    return conditions
