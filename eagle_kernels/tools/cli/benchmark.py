"""`python -m eagle_kernels benchmark prompts.txt`: speed and acceptance, with and without speculation."""

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from operator import eq
from typing import Any

import torch

from ...engine.inference import EAGLEInference
from ...engine.requests.sampling_params import SamplingParams
from ...engine.serve.output import fields_and_properties
from ...runtime import language
from ...runtime.placement import device_name
from ..gsm8k import evaluate, prompts_of, read_examples
from ..request_benchmark import random_requests, run_requests
from .shared import add_config_arguments, add_machine_arguments, as_lines, encode_prompt, first_prompts, load_engine


def add_benchmark_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `benchmark`."""
    command.set_defaults(run=_benchmark)
    add = command.add_argument
    add("prompts", nargs="?", help="file of prompts: a .json list, or one per line")
    add("--requests", type=int, metavar="N", help="in place of prompts: N requests of random tokens, sent at once")
    add("--input-len", type=int, default=1024, help="tokens of the longest prompt (default: 1024)")
    add("--output-len", type=int, default=1024, help="tokens of the longest output (default: 1024)")
    add("--range-ratio", type=float, default=0.7, help="shortest length as a share of the longest (default: 0.7)")
    add("--gsm8k", metavar="FILE", help="in place of prompts: questions in a GSM8K file (.jsonl); prints accuracy")
    add("--num-shots", type=int, default=5, help="worked examples before a question (default: 5)")
    add("--num-questions", type=int, help="most questions to ask (default: all)")
    add("--num-prompts", type=int, default=80, help="most prompts to take from the file (default: 80)")
    add("--max-new-tokens", type=int, default=128, help="most new tokens per prompt (default: 128)")
    add("--batch-size", type=int, default=1, help="prompts decoded together (default: 1)")
    add("--seed", type=int, default=0, help="seed of the sampling noise (default: 0)")
    add_config_arguments(command)
    add_machine_arguments(command)


def _benchmark(arguments: argparse.Namespace) -> int:
    given = [name for name in ("prompts", "requests", "gsm8k") if getattr(arguments, name) is not None]
    if len(given) != 1:
        raise ValueError(f"benchmark: give one of a file of prompts, --requests and --gsm8k; got {given or 'none'}")
    return {"prompts": _time_prompts, "requests": _time_requests, "gsm8k": _ask}[given[0]](arguments)


def _time_prompts(arguments: argparse.Namespace) -> int:
    texts = first_prompts(arguments.prompts, arguments)
    engine = load_engine(arguments)
    tokenizer = engine.session.tokenizer_for("text needs")
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


def _time_requests(arguments: argparse.Namespace) -> int:
    engine = load_engine(arguments)
    sizes = arguments.input_len, arguments.output_len, arguments.range_ratio
    sampling = engine.config.sampling
    requests = random_requests(arguments.requests, *sizes, engine.target.vocab_size, arguments.seed, **sampling)
    runs = _both_ways(engine, lambda speculative: run_requests(engine, requests, speculative=speculative))
    return _show(arguments, engine, {name: asdict(run) for name, run in runs.items()})


def _ask(arguments: argparse.Namespace) -> int:
    examples = read_examples(arguments.gsm8k)
    prompts, asked = prompts_of(examples, arguments.num_shots, arguments.num_questions)
    engine = load_engine(arguments)
    asking = engine, prompts, asked, arguments.max_new_tokens
    runs = _both_ways(engine, lambda way: evaluate(*asking, seeds=arguments.seed, speculative=way))
    texts = [run.texts for run in runs.values()]
    figures = {name: fields_and_properties(run) for name, run in runs.items()}
    for of_run in figures.values():
        del of_run["texts"]
    same = {} if len(texts) == 1 or not engine.config.keeps_text else {"identical": sum(map(eq, *texts)) / len(asked)}
    return _show(arguments, engine, figures | same)


def _both_ways(engine: EAGLEInference, run: Callable[[bool], Any]) -> dict[str, Any]:
    """Returns what `run` returns with drafts and without, after a warm-up on a GPU."""
    runs = {}
    for name in ("speculative", "plain") if engine.config.may_speculate else ("plain",):
        speculative = name == "speculative"
        if engine.device.type == "cuda":
            engine.warmup(SamplingParams(**engine.config.sampling), speculative=speculative)
        runs[name] = run(speculative)
    return runs


def _show(arguments: argparse.Namespace, engine: EAGLEInference, figures: dict) -> int:
    """Prints the figures of each run, and what else there is."""
    if arguments.json:
        print(json.dumps(figures | _conditions(engine), indent=2))
        return 0
    rows = [("method", f"{_method(engine)}, verified by {engine.config.verify_strategy}")]
    for name, value in figures.items():
        of_run = value if isinstance(value, dict) else {"": value}
        rows += [(f"{name} {field}".rstrip().replace("_", " "), _number(each)) for field, each in of_run.items()]
    print(as_lines(rows))
    return 0


def _number(value: float | dict[str, float]) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:.1f}" for name, number in value.items()) or "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _method(engine: EAGLEInference) -> str | tuple[str, ...]:
    """Returns the method of drafting, which the configuration may leave to the head, or to several drafts."""
    drafts = engine.draft if isinstance(engine.draft, tuple) else (engine.draft,)
    return engine.config.method or ", ".join(draft.method for draft in drafts)


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
