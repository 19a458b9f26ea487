"""`python -m eagle_kernels generate "def quicksort(items):"`: a text, continued speculatively."""

from __future__ import annotations

import argparse
import json
import sys

from ...engine.config.eagle_config import EAGLEConfig
from ...engine.inference import EAGLEInference, TokenStream
from ...engine.models.tokenizer import Tokenizer
from ...engine.serve.output import GenerationOutput, GenerationStats
from .config import add_config_arguments
from .shared import add_machine_arguments, as_lines, load_engine

_GREEN, _PLAIN = "\033[32m", "\033[0m"


def add_generate_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `generate`."""
    command.set_defaults(run=_generate)
    command.add_argument("prompt")
    command.add_argument("--max-new-tokens", type=int, default=128)
    command.add_argument("--compare", action="store_true", help="also decode plainly: speed, and do texts agree")
    command.add_argument("--seed", type=int, help="of the sampling noise; default: a fresh one, printed")
    add_config_arguments(command)
    add_machine_arguments(command)


def _generate(arguments: argparse.Namespace) -> int:
    engine, tokenizer = load_engine(arguments)
    prompt = tokenizer.encode(arguments.prompt)
    if not prompt:
        raise ValueError("the prompt is empty; it must hold at least one token")

    # Made before the warm-up, whose limits are smaller: it checks what was asked for.
    stream = engine.stream(prompt, arguments.max_new_tokens, seeds=arguments.seed)
    warm_up(engine, prompt, arguments)
    text = print_text(stream, tokenizer, arguments)
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


def warm_up(engine: EAGLEInference, prompt: list[int], arguments: argparse.Namespace) -> None:
    """Compiles the kernels first, so that the printed speed is that of decoding."""
    if engine.device.type == "cuda":
        few = min(8, arguments.max_new_tokens)
        with engine.session.alone("the warm-up", engine.config):
            engine.generate(prompt, few, seeds=0)
            if arguments.compare:
                engine.generate(prompt, few, seeds=0, speculative=False)


def print_text(stream: TokenStream, tokenizer: Tokenizer, arguments: argparse.Namespace) -> str:
    """Prints the text as it is committed, except with --json, and returns it.

    On a terminal, tokens that were drafted are green.
    """
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
    """Reports the speed of plain decoding, and where its text parts from the speculative one, if it does.

    logit_gap is the distance of the two tokens in the target's logits there, from one plain pass over the text before
    them: they are nearly tied, unless something is wrong. With sampling, each token's noise is added to its logit.
    Texts that differ by design are not compared: identical is None.
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
    return as_lines(rows)
