"""What the model of `speedup.py` says of measured steps, beside them, as Markdown tables."""

from collections.abc import Sequence

from ..apps.random_models import SHAPES
from ..harness import results
from .log import read_lines
from .records import newest_cells
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
