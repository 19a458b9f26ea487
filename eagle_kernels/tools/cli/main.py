"""`python -m eagle_kernels generate "def quicksort(items):"`, and the other commands."""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

import torch

from ...engine.config.eagle_config import EAGLEConfig
from ...engine.config.values import first_line
from ...engine.inference import EAGLEInference, TokenStream
from ...engine.models import draft_loading
from ...engine.models.loading import demo_pair
from ...engine.models.tokenizer import Tokenizer, load_tokenizer
from ...engine.serve.output import GenerationOutput, GenerationStats
from ...runtime import language
from ...runtime.library import backend
from ...runtime.placement import choose_device, read_device, why_no_gpu
from ...runtime.target import architecture
from ..inspection import inspect_head, read_prompts_file
from ..training.head_recipe import add_options, read_options
from ..training.train_head import rows_of, train_head
from ..training.trainer import EXIT_UNFINISHED, TimeBudgetReached, device_name
from .config import add_config_arguments, read_config
from .tree import add_tree_arguments, show_tree

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXIT_INTERRUPTED = 130  # as a shell tells of a program that SIGINT ended
_GREEN, _PLAIN = "\033[32m", "\033[0m"


def main(argv: list[str] | None = None) -> int:
    """Runs one command; 0 on success, 1 with one line on stderr where the input or the machine is not up to it, 130
    where it was interrupted."""
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
    """Characters that the stream's encoding has not got are written as escapes, as on stderr, and end no command."""
    is_strict = getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure")
    if is_strict:
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        if is_strict:
            stream.reconfigure(errors="strict")


def _parser() -> argparse.ArgumentParser:
    description = "Speculative decoding with token trees."
    parser = argparse.ArgumentParser(prog="python -m eagle_kernels", description=description)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="continue a text, speculatively")
    generate.set_defaults(run=_generate)
    generate.add_argument("prompt")
    generate.add_argument("--max-new-tokens", type=int, default=128)
    generate.add_argument("--compare", action="store_true", help="also decode plainly: speed, and do texts agree")
    generate.add_argument("--seed", type=int, help="of the sampling noise; default: a fresh one, printed")
    add_config_arguments(generate)
    _add_machine_arguments(generate)

    show = commands.add_parser("show-tree", help="draw the verified tree of each step, as text and as SVG")
    show.set_defaults(run=lambda arguments: show_tree(*_load_engine(arguments), arguments))
    add_tree_arguments(show)
    add_config_arguments(show)
    _add_machine_arguments(show)

    benchmark = commands.add_parser("benchmark", help="speed and acceptance of prompts, with and without speculation")
    benchmark.set_defaults(run=_benchmark)
    benchmark.add_argument("prompts", help="file of prompts: a .json list, or one a line")
    benchmark.add_argument("--num-prompts", type=int, default=80, help="most prompts of the file (default: 80)")
    benchmark.add_argument("--max-new-tokens", type=int, default=128)
    benchmark.add_argument("--batch-size", type=int, default=1, help="prompts that are decoded together")
    benchmark.add_argument("--seed", type=int, default=0, help="of the sampling noise")
    add_config_arguments(benchmark)
    _add_machine_arguments(benchmark)

    inspect = commands.add_parser("inspect", help="what a draft head is, and whether it fits a target")
    inspect.set_defaults(run=_inspect)
    inspect.add_argument("draft", type=Path, nargs="?", help="EAGLE head folder (default: the embedded pair)")
    inspect.add_argument("--target", type=Path, help="model folder to hold it against")
    inspect.add_argument("--sweep", default="none", help="prompts (.json list, or one a line): measure layer ids +-1")
    inspect.add_argument("--num-prompts", type=int, default=8, help="most prompts of --sweep (default: 8)")
    inspect.add_argument("--max-new-tokens", type=int, default=64, help="per prompt of --sweep (default: 64)")
    _add_machine_arguments(inspect)

    train = commands.add_parser("train-head", help="train an EAGLE-3 head for a target")
    train.set_defaults(run=_train_head)
    train.add_argument("--target", type=Path, required=True, help="model folder")
    train.add_argument("--data", type=Path, required=True, nargs="+", help=".txt or .jsonl files")
    train.add_argument("--output", type=Path, required=True, help="folder of the head; the same command goes on there")
    add_options(train)
    _add_machine_arguments(train, dtype=None)

    environment = commands.add_parser("env", help="versions, devices, backend, cache folder")
    environment.set_defaults(run=_environment)
    return parser


def _add_machine_arguments(command: argparse.ArgumentParser, dtype: str | None = "float32") -> None:
    """dtype: the default of --dtype; None: bfloat16 on GPUs, else float32."""
    command.add_argument("--device", default="auto", help="cuda, cpu, cuda:1, ... (auto: cuda where there is one)")
    default = dtype or "bfloat16 on GPUs, else float32"
    command.add_argument("--dtype", choices=_DTYPES, default=dtype, help=f"of the weights (default: {default})")
    command.add_argument(
        "--check-weights",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="refuse NaN and infinite weights, by one pass over them (default: on)",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _load_engine(arguments: argparse.Namespace) -> tuple[EAGLEInference, Tokenizer]:
    config = read_config(arguments)
    if config.needs_model and (arguments.target is None) != (arguments.draft is None):
        raise ValueError("--target and --draft belong together: a head fits the one target it was trained for")
    if not config.needs_model and arguments.draft is not None:
        raise ValueError(f"--draft must not be given for method={config.method!r}, which drafts without a model")
    others = sorted({"mtp", "draft_model"}.intersection(config.methods))
    if others and arguments.draft is None:
        raise ValueError(f"--draft must be given for method={others[0]!r}: the embedded pair's is an EAGLE head")
    target, draft = (arguments.target, arguments.draft) if arguments.target else demo_pair()
    draft = draft if config.needs_model else None
    device, dtype = _placement(arguments)
    with _telling_of_the_head() if arguments.draft else nullcontext():
        engine = EAGLEInference.from_pretrained(
            draft, target, config, device=device, dtype=dtype, check_weights=arguments.check_weights
        )
    return engine, load_tokenizer(target)


@contextmanager
def _telling_of_the_head() -> Iterator[None]:
    """Says on stderr which format a head has and how its layer ids were read: the text would not tell wrong ones."""
    logger, handler = logging.getLogger(draft_loading.__name__), logging.StreamHandler()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _generate(arguments: argparse.Namespace) -> int:
    engine, tokenizer = _load_engine(arguments)
    prompt = tokenizer.encode(arguments.prompt)
    if not prompt:
        raise ValueError("the prompt is empty; it must hold at least one token")

    # Made before the warm-up, whose limits are smaller: it checks what was asked for.
    stream = engine.stream(prompt, arguments.max_new_tokens, seeds=arguments.seed)
    _warm_up(engine, prompt, arguments)
    text = _print_text(stream, tokenizer, arguments)
    token_ids, stats = stream.output()
    plain = None
    if arguments.compare:
        plain = engine.generate(prompt, arguments.max_new_tokens, seeds=stats.seeds, speculative=False)
        stats.plain_step_ms = plain.stats.step_ms
    report = stats.to_dict()
    if plain is not None:
        report |= _comparison(engine, prompt, token_ids, plain, tokenizer)
    if arguments.json:
        print(json.dumps({"prompt": arguments.prompt, "text": text, "token_ids": token_ids, **report}, indent=2))
    else:
        print("\n" + _table(report, stats, engine.config))
    return 0


def _warm_up(engine: EAGLEInference, prompt: list[int], arguments: argparse.Namespace) -> None:
    """Compiles the kernels first, so that the printed speed is that of decoding."""
    if engine.device.type == "cuda":
        few = min(8, arguments.max_new_tokens)
        with engine.session.alone("the warm-up", engine.config):
            engine.generate(prompt, few, seeds=0)
            if arguments.compare:
                engine.generate(prompt, few, seeds=0, speculative=False)


def _print_text(stream: TokenStream, tokenizer: Tokenizer, arguments: argparse.Namespace) -> str:
    """Prints the text as it is committed, but for --json, and returns it; on a terminal, tokens that a draft had
    guessed are green."""
    use_color, pieces = sys.stdout.isatty(), []
    detokenizer = tokenizer.detokenizer(stream.requests[0].prompt)
    for index, event in enumerate(stream):
        if index == 0 and not arguments.json:  # not earlier: a machine that cannot run the model shows no text
            print(arguments.prompt, end="", flush=True)
        pieces.append(detokenizer.push([event.token_id]))
        if pieces[-1] and not arguments.json:
            text = f"{_GREEN}{pieces[-1]}{_PLAIN}" if use_color and event.is_draft else pieces[-1]
            print(text, end="", flush=True)
    pieces.append(detokenizer.finish())
    if not arguments.json:
        print(pieces[-1], flush=True)
    return "".join(pieces)


def _comparison(
    engine: EAGLEInference, prompt: list[int], token_ids: list[int], plain: GenerationOutput, tokenizer: Tokenizer
) -> dict:
    """Speed of plain decoding, and where its text parts from the speculative one, if it does.

    logit_gap is how far the two tokens lie apart in the target's logits there, from one plain pass over the text before
    them: a near-tie, unless something is wrong. With sampling each token's noise comes on top of its logit.
    Where texts differ by design, they are not compared: identical is None.
    """
    report = {"plain_tokens_per_second": plain.stats.tokens_per_second, "identical": True}
    report |= {"parts_at": None, "logit_gap": None, "plain_text_from_there": None}
    if not engine.config.keeps_text:
        return report | {"identical": None}
    # Neither text is the beginning of the other: both end after the same number of tokens or the same end token.
    for index, (token, plain_token) in enumerate(zip(token_ids, plain.output_ids)):
        if token != plain_token:
            logits = engine.next_token_logits(prompt + token_ids[:index])
            report |= {"identical": False, "parts_at": index}
            report["logit_gap"] = abs(logits[plain_token] - logits[token]).item()
            detokenizer = tokenizer.detokenizer(prompt + token_ids[:index])
            report["plain_text_from_there"] = detokenizer.push(plain.output_ids[index:]) + detokenizer.finish()
            break
    return report


def _table(report: dict, stats: GenerationStats, config: EAGLEConfig) -> str:
    per_depth = ", ".join(f"{count / max(1, stats.steps):.0%}" for count in stats.accepted_per_depth)
    rows = [
        ("tokens", f"{stats.generated_tokens} ({stats.finish_reasons[0]})"),
        ("steps", f"{stats.steps} of {stats.num_draft_tokens} nodes, {stats.num_steps} levels"),
        ("mean acceptance length", f"{stats.mean_accept_length:.2f} (bonus included)"),
        ("accepted at depth 1, 2, ...", per_depth),
        ("tokens/s", f"{stats.tokens_per_second:.1f}"),
        ("seed", f"{stats.seeds[0]}"),
    ]
    if "identical" in report:
        rows.append(("plain tokens/s", f"{report['plain_tokens_per_second']:.1f}"))
        if stats.speedup is not None:
            rows.append(("speedup", f"{stats.speedup:.2f}x"))
        if report["identical"] is None:
            why = config.verify_strategy if config.accept_policy == "normal" else config.accept_policy
            rows.append(("identical", f"not compared: with {why} texts differ by design"))
        elif report["identical"]:
            rows.append(("identical", "yes"))
        else:
            gap = f"logit gap {report['logit_gap']:.4f}" + ("" if config.temperature == 0 else " before the noise")
            there = report["plain_text_from_there"][:40]
            rows.append(("identical", f"no, from token {report['parts_at']} ({gap}); plain goes on with {there!r}"))
    return _lines(rows)


def _benchmark(arguments: argparse.Namespace) -> int:
    texts = _first_prompts(arguments.prompts, arguments)
    engine, tokenizer = _load_engine(arguments)
    prompts = [_encode(tokenizer, index, text) for index, text in enumerate(texts)]
    result = engine.benchmark(
        prompts, arguments.max_new_tokens, batch_size=arguments.batch_size, seeds=arguments.seed,
        progress=False if arguments.json else None,
    )  # fmt: skip
    if arguments.json:
        print(json.dumps(result.to_dict() | _conditions(engine), indent=2))
        return 0
    print(_lines([("method", f"{_method(engine)}, verified by {engine.config.verify_strategy}"), *result.rows()]))
    return 0


def _encode(tokenizer: Tokenizer, index: int, text: str) -> list[int]:
    try:
        return tokenizer.encode(text)
    except ValueError as error:
        raise ValueError(f"prompt {index}: {error}") from None


def _method(engine: EAGLEInference) -> str | tuple[str, ...]:
    """Where drafts came from, also where the configuration leaves that to the head."""
    return engine.config.method or engine.draft.method


def _conditions(engine: EAGLEInference) -> dict:
    """What a speed was measured with."""
    config = engine.config
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
    if config.methods == ("naive",):  # whatever tree the configuration has
        conditions |= {"topk": 1, "num_steps": 0, "num_draft_tokens": 1}
    return conditions


def _first_prompts(path: str, arguments: argparse.Namespace) -> list[str]:
    """The prompts of a file, as many as are wanted at most."""
    if arguments.num_prompts < 1:
        raise ValueError(f"--num-prompts must be at least 1, got {arguments.num_prompts}")
    return read_prompts_file(path)[: arguments.num_prompts]


def _lines(rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in rows)


def _placement(arguments: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    is_free = arguments.device == "auto"
    device = choose_device(_warn) if is_free else read_device("--device", arguments.device, "auto")
    return device, _DTYPES[arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32")]


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def _inspect(arguments: argparse.Namespace) -> int:
    """0, or 1 where the head is faulty or does not fit."""
    if arguments.draft is None and arguments.target is not None:
        raise ValueError("--target needs the folder of the head before it")
    target, draft = (arguments.target, arguments.draft) if arguments.draft else demo_pair()
    prompts = None if arguments.sweep == "none" else _first_prompts(arguments.sweep, arguments)
    is_placed = prompts is not None or arguments.device != "auto"  # nothing is computed without a sweep
    device, dtype = _placement(arguments) if is_placed else (None, None)
    report = inspect_head(
        draft,
        target,
        prompts=prompts,
        max_new_tokens=arguments.max_new_tokens,
        device=device,
        dtype=dtype,
        check_weights=arguments.check_weights,
    )
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else _lines(report.rows()))
    return 1 if report.misfits else 0


def _train_head(arguments: argparse.Namespace) -> int:
    """0, or EXIT_UNFINISHED where the time budget ended the run, which the same command continues."""
    device, dtype = _placement(arguments)
    try:
        record = train_head(
            arguments.target, arguments.data, arguments.output, read_options(arguments), device=device, dtype=dtype,
            check_weights=arguments.check_weights,
        )  # fmt: skip
    except TimeBudgetReached as reached:
        print(f"time budget used up at {reached}; give the same command again to go on", file=sys.stderr)
        return EXIT_UNFINISHED
    print(json.dumps(record, indent=2) if arguments.json else _lines(rows_of(record)))
    return 0


def _environment(arguments: argparse.Namespace) -> int:
    rows = [("eagle_kernels", str(Path(__file__).parents[2])), ("python", platform.python_version())]
    rows.append(("torch", torch.__version__))
    if language.MISSING is None:
        rows.append(("triton", language.triton.__version__))
        rows.append(("triton cache", _triton_cache()))
    else:
        rows.append(("triton", f"kernels need {language.MISSING}; CPU tensors run the references"))
    rows.append(("backend on cpu", backend(torch.device("cpu"))))
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        facts = (torch.cuda.get_device_name(index), architecture(device), backend(device))
        rows.append((f"cuda:{index}", ", ".join(facts)))
    if not torch.cuda.device_count():
        reason = why_no_gpu()
        rows.append(("gpu", "none that torch can use" + (f": {reason}" if reason else "")))
    print(_lines(rows))
    return 0


def _triton_cache() -> str:
    return language.triton.knobs.cache.dir
