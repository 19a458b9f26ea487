"""`python -m eagle_kernels generate "def quicksort(items):"`: texts, continued speculatively."""

import argparse
import json
import sys
from collections import Counter
from typing import Any

from ...engine.config.eagle_config import EAGLEConfig
from ...engine.inference import EAGLEInference
from ...engine.models.tokenizer import Tokenizer
from ...engine.serve.output import GenerationStats
from ...engine.serve.stream import TokenStream
from ...runtime.values import is_terminal
from ..inspection import read_prompts_file
from .shared import add_config_arguments, add_machine_arguments, as_lines, encode_prompt, load_engine

_GREEN, _PLAIN = "\033[32m", "\033[0m"


def add_generate_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `generate`."""
    command.set_defaults(run=_generate)
    add = command.add_argument
    add("prompt", nargs="*", help="texts to continue, decoded together; -: read standard input")
    add(
        "--prompts", metavar="FILE",
        help="more prompts: a .json list, or one per line; -: one per line from standard input",
    )  # fmt: skip
    add("--chat", action="store_true", help="put texts as messages into the target's chat template, print answers")
    add("--system", metavar="TEXT", help="with --chat: a system message before each text")
    add("--max-new-tokens", type=int, default=128, help="most new tokens per text (default: 128)")
    add("--compare", action="store_true", help="also decode without drafts, and compare speed and text")
    add("--seed", type=int, help="seed of the sampling noise (default: random, and printed)")
    add_config_arguments(command)
    add_machine_arguments(command)


def _generate(arguments: argparse.Namespace) -> int:
    texts = _read_prompts(arguments)
    engine = load_engine(arguments)
    tokenizer = engine.session.tokenizer_for("text needs")
    prompts = [
        _encode_message(engine, text, arguments.system) if arguments.chat else encode_prompt(tokenizer, index, text)
        for index, text in enumerate(texts)
    ]
    # Made before the warm-up, whose limits are smaller: it checks what was asked for.
    stream = engine.stream(prompts, arguments.max_new_tokens, seeds=arguments.seed)
    warm_up(engine, prompts, arguments)
    written = print_texts(stream, tokenizer, texts, arguments)
    output_ids, stats = stream.output()
    results = [
        {"prompt": prompt, "text": text, "token_ids": token_ids}
        for prompt, text, token_ids in zip(texts, written, output_ids)
    ]
    report = stats.to_dict()
    of_drafts = {"candidates": [each._asdict() for each in engine.candidates]} if _has_several(engine) else {}
    if arguments.compare:
        plain = engine.generate(prompts, arguments.max_new_tokens, seeds=stats.seeds, speculative=False, progress=False)
        stats.plain_step_ms = plain.stats.step_ms
        report = stats.to_dict() | {"plain_tokens_per_second": plain.stats.tokens_per_second}
        for prompt, result, plain_ids in zip(prompts, results, plain.output_ids):
            result |= _comparison(engine, prompt, result["token_ids"], plain_ids, tokenizer)
    if arguments.json:
        of_requests = results[0] if len(results) == 1 else {"requests": results}
        print(json.dumps(of_requests | report | of_drafts, indent=2))
    else:
        print("\n" + _table(report | of_drafts, results, stats, engine.config))
    return 0


def _has_several(engine: EAGLEInference) -> bool:
    """Returns whether the engine chooses among several drafts."""
    return isinstance(engine.draft, tuple)


def _read_prompts(arguments: argparse.Namespace) -> list[str]:
    """Returns the prompts of the command line, and then those of the file."""
    if (arguments.prompt + [arguments.prompts]).count("-") > 1:
        raise ValueError("- (standard input) must be given at most once, got it more than once")
    texts = [sys.stdin.read() if text == "-" else text for text in arguments.prompt]
    if arguments.prompts is not None:
        texts += read_prompts_file(arguments.prompts)
    if arguments.system is not None and not arguments.chat:
        raise ValueError("--system must be given with --chat: other texts are continued as they are")
    if not texts:
        raise ValueError("there is no prompt; give a text, - for standard input, or --prompts FILE")
    return texts


def _encode_message(engine: EAGLEInference, text: str, system: str | None) -> list[int]:
    """Returns the tokens after which the target answers a message."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return engine.encode_chat([*messages, {"role": "user", "content": text}])


def warm_up(engine: EAGLEInference, prompts: list[list[int]], arguments: argparse.Namespace) -> None:
    """Compiles the kernels first, so that the printed speed is that of decoding."""
    if engine.device.type == "cuda":
        few = min(8, arguments.max_new_tokens)
        with engine.session.alone("the warm-up", engine.config):
            engine.generate(prompts, few, seeds=0, progress=False)
            if arguments.compare:
                engine.generate(prompts, few, seeds=0, speculative=False, progress=False)


def print_texts(
    stream: TokenStream, tokenizer: Tokenizer, prompts: list[str], arguments: argparse.Namespace
) -> list[str]:
    """Prints the texts, except with --json, and returns what follows each prompt.
    Answers (--chat) are texts of their own, printed without the prompts. One text is printed as its tokens come,
    several when all have ended. On a terminal, tokens that were drafted are green."""
    use_color, streams = is_terminal(sys.stdout), not arguments.json and len(prompts) == 1
    contexts = [() if arguments.chat else request.prompt for request in stream.requests]
    detokenizers = [tokenizer.detokenizer(context) for context in contexts]
    pieces: list[list[str]] = [[] for _ in prompts]
    shown: list[list[str]] = [["" if arguments.chat else prompt] for prompt in prompts]
    for index, event in enumerate(stream):
        piece = detokenizers[event.request].push([event.token_id])
        pieces[event.request].append(piece)
        shown[event.request].append(f"{_GREEN}{piece}{_PLAIN}" if piece and use_color and event.is_draft else piece)
        if streams:  # not before the first token: a machine that cannot run the model shows no text
            print("".join(shown[0][0 if index == 0 else -1 :]), end="", flush=True)
    ends = [detokenizer.finish() for detokenizer in detokenizers]
    if streams:
        print(ends[0], flush=True)
    elif not arguments.json:
        print("\n\n".join("".join(parts) + end for parts, end in zip(shown, ends)))
    return ["".join(parts) + end for parts, end in zip(pieces, ends)]


def _comparison(
    engine: EAGLEInference, prompt: list[int], token_ids: list[int], plain_ids: list[int], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Reports where plain decoding's text parts from the speculative one, if it does.
    logit_gap is the distance of the two tokens in the target's logits there, from one plain pass over the text before
    them: they are nearly tied, unless something is wrong. With sampling, each token's noise is added to its logit.
    Texts that differ by design are not compared: identical is None."""
    report = {"identical": True, "parts_at": None, "logit_gap": None, "plain_text_from_there": None}
    if not engine.config.keeps_text:
        return report | {"identical": None}
    # Neither text is the beginning of the other: both end after the same number of tokens or the same end token.
    for index, (token, plain_token) in enumerate(zip(token_ids, plain_ids)):
        if token != plain_token:
            logits = engine.next_token_logits(prompt + token_ids[:index])
            report |= {"identical": False, "parts_at": index}
            report["logit_gap"] = abs(logits[plain_token] - logits[token]).item()
            detokenizer = tokenizer.detokenizer(prompt + token_ids[:index])
            report["plain_text_from_there"] = detokenizer.push(plain_ids[index:]) + detokenizer.finish()
            break
    return report


def _table(report: dict[str, Any], results: list[dict[str, Any]], stats: GenerationStats, config: EAGLEConfig) -> str:
    per_depth = ", ".join(f"{count / max(1, stats.steps):.0%}" for count in stats.accepted_per_depth)
    reasons = Counter(stats.finish_reasons)
    ends = stats.finish_reasons[0] if len(results) == 1 else ", ".join(f"{reasons[name]} {name}" for name in reasons)
    rows = [
        ("tokens", f"{stats.generated_tokens} ({ends})"),
        ("steps", f"{stats.steps} of {stats.num_draft_tokens} nodes, {stats.num_steps} levels"),
        ("mean acceptance length", f"{stats.mean_accept_length:.2f} (bonus included)"),
        ("accepted at depth 1, 2, ...", per_depth),
        ("tokens/s", f"{stats.tokens_per_second:.1f}"),
    ]
    if "candidates" in report:
        steps: Counter[str] = Counter()
        for each in report["candidates"]:
            steps[each["draft"] or "plain decoding"] += each["steps"]
        rows.append(("steps of the batch by draft", ", ".join(f"{name} {count}" for name, count in steps.items())))
    if config.temperature > 0:  # else nothing is drawn
        rows.append(("seed", ", ".join(map(str, stats.seeds))))
    if "plain_tokens_per_second" in report:
        rows.append(("plain tokens/s", f"{report['plain_tokens_per_second']:.1f}"))
        if stats.speedup is not None:
            rows.append(("speedup of warm steps", f"{stats.speedup:.2f}x"))
        rows.append(("identical", _agreement(results, config)))
    return as_lines(rows)


def _agreement(results: list[dict[str, Any]], config: EAGLEConfig) -> str:
    """Says whether the texts are those of plain decoding, and how the first other one differs."""
    if results[0]["identical"] is None:
        why = config.verify_strategy if config.accept_policy == "normal" else config.accept_policy
        return f"not compared: with {why} texts differ by design"
    others = [index for index, result in enumerate(results) if not result["identical"]]
    if not others:
        return "yes"
    first = results[others[0]]
    which = "" if len(results) == 1 else f"{len(others)} of {len(results)} texts; prompt {others[0]} "
    gap = f"logit gap {first['logit_gap']:.4f}" + ("" if config.temperature == 0 else " before the noise")
    there = first["plain_text_from_there"][:40]
    return f"no, {which}from token {first['parts_at']} ({gap}); plain goes on with {there!r}"
