"""What the model of `speedup.py` says of measured steps, beside them, as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..apps.random_models import SHAPES
from ..harness import results
from .config import BenchmarkConfig
from .log import read_lines
from .records import PLAIN, by_setting, distinct, is_number, method_of, newest_cells, was_beside
from .speedup import StepModel, Tree

# of which steps are predicted, and by which they are
PREDICTED: dict[str, Tree] = {"naive_eagle": (1, 1, 2), "chain 3": (1, 3, 4), "tree 8/5/64": (8, 5, 64)}
LARGE = ("tree 8/5/64", 256)
CONTEXT_TOKENS = 600
GB_PER_S = 3050.0  # of a large read on that GPU, `read_gb_per_s` of the kernels' lines


def measured_lines(name: str) -> list[dict]:
    """The committed lines of an app, of all GPUs."""
    files = sorted(results.DIRECTORY.glob(f"*/{name}.jsonl"))
    return [line for file in files for line in read_lines(file)]


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
    """Of one request's steps with K levels of a method, from those with the fewest and the most in the same domain,
    whose texts make all of its steps longer or shorter. A level takes the same time each, and so does a verified row:
    that of n-gram's steps, in which K more drafts are K more rows and nothing else. Tokens a step are as measured."""
    lines = []
    for setting, group in by_setting(cell for cell in cells if cell["config"]["batch_size"] == 1).items():
        rows, inputs = [], []
        for domain in distinct(group, "prompt_domain"):
            own: dict[str, list[Mapping[str, Any]]] = {}
            of_domain = [cell for cell in group if cell["config"]["prompt_domain"] == domain and _is_timed(cell)]
            plain = next((cell for cell in of_domain if method_of(cell) == PLAIN), None)
            for cell in of_domain:  # K ascending
                if plain is not None and was_beside(cell, plain):
                    own.setdefault(method_of(cell), []).append(cell)
            row_ms = _row_ms(own.get("ngram", ()))
            for method, steps in own.items():
                if len(steps) < 3:  # nothing lies between; plain decoding has one
                    continue
                plain_ms = plain["step_ms"]
                few, *between, most = steps
                level_ms = (most["step_ms"] - few["step_ms"] - _more_rows(few, most) * row_ms) / _more_levels(few, most)
                inputs.append(f"| {domain} | {method} | {plain_ms:.3f} ms | {few['step_ms']:.3f} ms | ")
                inputs[-1] += f"{1e3 * level_ms:.1f} µs | {1e3 * row_ms:.1f} µs |"
                for cell in between:
                    step_ms = few["step_ms"] + _more_levels(few, cell) * level_ms + _more_rows(few, cell) * row_ms
                    tokens, wanted = cell["mean_accept_length"], cell["speedup"]
                    got = tokens * plain_ms / step_ms
                    row = f"| {domain} | {method} | {cell['config']['K']} | {tokens:.2f} | {wanted:.2f}× | "
                    rows.append(row + f"{got:.2f}× | {got / wanted - 1:+.1%} |")
        if rows:
            lines += [f"{setting}:", "", "| domain | method | K | tokens a step | measured | predicted | error |"]
            lines += ["|---|---|--:|--:|--:|--:|--:|", *rows, ""]
            lines += ["Constants:", "", "| domain | method | plain step | step of the fewest levels | level | row |"]
            lines += ["|---|---|--:|--:|--:|--:|", *inputs, ""]
    return "\n".join(lines).rstrip() or "Not measured yet."


def _is_timed(cell: Mapping[str, Any]) -> bool:
    """Nothing is where every text ends with its first token."""
    return is_number(cell["speedup"]) and cell["step_ms"] > 0


def _row_ms(cells: Sequence[Mapping[str, Any]]) -> float:
    """What a row more takes, of cells with nothing else more; 0 if that cannot be told."""
    if len(cells) < 2:
        return 0.0
    few, *_, most = cells
    return (most["step_ms"] - few["step_ms"]) / _more_rows(few, most)


def _more_levels(few: Mapping[str, Any], more: Mapping[str, Any]) -> int:
    return more["config"]["K"] - few["config"]["K"]


def _more_rows(few: Mapping[str, Any], more: Mapping[str, Any]) -> int:
    return _num_rows(more) - _num_rows(few)


def _num_rows(cell: Mapping[str, Any]) -> int:
    """That a step verifies."""
    config = BenchmarkConfig.from_dict(cell["config"])
    return config.batch_size * config.engine_config().num_verify_tokens


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


def intensity(shape: str, requests: int, rows: int) -> float:
    """Operations a byte of a step: weights are read once, keys and values once for each request."""
    sizes = SHAPES[shape]
    width = sizes["num_hidden_layers"] * sizes["head_dim"]
    token_bytes = 2 * 2 * width * sizes["num_key_value_heads"]
    operations = 2 * _parameters(shape) + 4 * width * sizes["num_attention_heads"] * CONTEXT_TOKENS
    return requests * rows * operations / (2 * _parameters(shape) + requests * CONTEXT_TOKENS * token_bytes)


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
