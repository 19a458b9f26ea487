"""What the model of `speedup.py` says of measured steps, beside them, as Markdown tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..apps.random_models import SHAPES
from ..harness import results
from .records import PLAIN, by_setting, method_of, newest_cells
from .speedup import StepModel, Tree

# of which steps are predicted, and by which they are
PREDICTED: dict[str, Tree] = {"naive_eagle": (1, 1, 2), "chain 3": (1, 3, 4), "tree 8/5/64": (8, 5, 64)}
LARGE = ("tree 8/5/64", 256)
CONTEXT_TOKENS = 600
GB_PER_S = 3280.0  # of a read, as `bench.harness.timing.ceiling_gb_per_s` measures it on that GPU


def measured_lines(name: str) -> list[dict]:
    """The committed lines of an app, of all GPUs."""
    files = sorted(results.DIRECTORY.glob(f"*/{name}.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def measured_cells() -> list[dict]:
    """The newest cells of the committed experiments."""
    return newest_cells(line for line in measured_lines("experiment") if line.get("event") == "cell")


def of_presets(lines: Sequence[dict]) -> str:
    """What the model says of each measured step of the 8B shape, as Markdown."""
    model, measured = fitted(lines)
    sizes = sorted(measured["plain"])
    table = ["| requests | " + " | ".join(f"{name}: measured | predicted | error" for name in PREDICTED) + " |"]
    table.append("|--:|" + "--:|" * 3 * len(PREDICTED))
    for size in sizes:
        cells = []
        for name, tree in PREDICTED.items():
            step_ms, tokens = measured[name][size]
            wanted = tokens * measured["plain"][size][0] / step_ms
            got = model.speedup(tree, size, tokens)
            is_input = (name, size) == LARGE or (name == "naive_eagle" and 2 * size <= sizes[-1])
            cells += [f"{wanted:.2f}×", f"{got:.2f}×", "input" if is_input else f"{got / wanted - 1:+.1%}"]
        table.append(f"| {size} | " + " | ".join(cells) + " |")
    tflops = 2e-9 * _parameters("llama-3.1-8b") / model.row_ms
    constants = [
        f"Constants: {model.plain_ms(1):.2f} ms for a step of one row, {model.draft_ms[0][1]:.2f} ms for one of the",
        f"head, {1e3 * model.request_ms:.0f} µs for a request's keys and values, {1e3 * model.row_ms:.1f} µs a row",
        f"where arithmetic limits it ({tflops:.0f} TFLOP/s).",
    ]
    return "\n".join([*table, "", *constants])


def of_cells(cells: Sequence[Mapping[str, Any]]) -> str:
    """Of each method's steps with K levels, from those with the fewest and the most: a level takes the same time each.
    Tokens a step and the domain's plain step, which is as long as its texts make it, are as measured."""
    lines = []
    for setting, group in by_setting(cells).items():
        plain = {cell["config"]["prompt_domain"]: cell["step_ms"] for cell in group if method_of(cell) == PLAIN}
        rows, inputs = [], []
        for method in dict.fromkeys(map(method_of, group)):
            own = [cell for cell in group if method_of(cell) == method and cell["config"]["prompt_domain"] in plain]
            steps_ms = _mean_steps_ms(own)
            if len(steps_ms) < 3:  # nothing lies between; plain decoding has one
                continue
            few, most = min(steps_ms), max(steps_ms)
            level_ms = (steps_ms[most] - steps_ms[few]) / (most - few)
            inputs.append(f"{method} {steps_ms[few]:.3f} ms with K = {few} and {1e3 * level_ms:.1f} µs for each more")
            for cell in own:
                levels, domain = cell["config"]["K"], cell["config"]["prompt_domain"]
                if levels in (few, most):
                    continue
                tokens, wanted = cell["mean_accept_length"], cell["speedup"]
                got = tokens * plain[domain] / (steps_ms[few] + (levels - few) * level_ms)
                row = f"| {domain} | {method} | {levels} | {tokens:.2f} | {wanted:.2f}× | {got:.2f}× | "
                rows.append(row + f"{got / wanted - 1:+.1%} |")
        if rows:
            lines += [f"{setting}:", "", "| domain | method | K | tokens a step | measured | predicted | error |"]
            lines += ["|---|---|--:|--:|--:|--:|--:|", *rows, ""]
            of_plain = ", ".join(f"{step_ms:.3f} ms ({domain})" for domain, step_ms in plain.items())
            lines += [f"Constants: plain {of_plain}; " + "; ".join(inputs) + ".", ""]
    return "\n".join(lines).rstrip() or "Not measured yet."


def fitted(lines: Sequence[dict]) -> tuple[StepModel, dict[str, dict[int, tuple[float, float]]]]:
    """The model, and measured (ms a step, tokens a step) by preset and batch size."""
    measured: dict[str, dict[int, tuple[float, float]]] = {}
    for line in lines:
        if line["section"] == "throughput" and line["shape"] == "llama-3.1-8b":
            size = int(line["case"].removeprefix("B="))
            measured.setdefault(line["provider"], {})[size] = line["step_ms"], line["accept_length"]
    sizes = SHAPES["llama-3.1-8b"]
    token_bytes = 2 * 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"]
    model = StepModel.fit(
        {size: step_ms for size, (step_ms, _) in measured["plain"].items()},
        {size: step_ms for size, (step_ms, _) in measured["naive_eagle"].items()},
        (PREDICTED[LARGE[0]], LARGE[1], measured[LARGE[0]][LARGE[1]][0]),
        request_ms=1e-6 * CONTEXT_TOKENS * token_bytes / GB_PER_S,
        draft_share=_head_parameters("llama-3.1-8b") / _parameters("llama-3.1-8b"),
    )
    return model, measured


def _layer_parameters(sizes: dict, input_size: int) -> int:
    query, key = (sizes[name] * sizes["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    attention = (query + 2 * key) * input_size + query * sizes["hidden_size"]
    return attention + 3 * sizes["hidden_size"] * sizes["intermediate_size"]


def _parameters(shape: str) -> int:
    """That a row is multiplied with: all but the embedding."""
    sizes = SHAPES[shape]
    layers = sizes["num_hidden_layers"] * _layer_parameters(sizes, sizes["hidden_size"])
    return layers + sizes["vocab_size"] * sizes["hidden_size"]


def _head_parameters(shape: str) -> int:
    """The same of an EAGLE-3 head."""
    sizes = SHAPES[shape]
    layer = _layer_parameters(sizes, 2 * sizes["hidden_size"])
    return layer + (3 * sizes["hidden_size"] + sizes["draft_vocab_size"]) * sizes["hidden_size"]


def _mean_steps_ms(cells: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Time of a step by K, mean of the domains."""
    steps_ms: dict[int, list[float]] = {}
    for cell in cells:
        steps_ms.setdefault(cell["config"]["K"], []).append(cell["step_ms"])
    return {levels: statistics.fmean(times) for levels, times in steps_ms.items()}
