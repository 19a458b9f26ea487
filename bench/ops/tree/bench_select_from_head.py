"""select_from_head on heads of 32,000 and 128,256 rows, against the product and the selection one after another."""

import torch

import eagle_kernels
from bench.harness import Floor
from bench.harness.inputs import half_dtype
from bench.ops.tree.bench_select_top_k_tokens import prepare_torch as prepare_selection

DEFAULTS = {"topk": 8, "level": 2, "num_columns": 4096, "vocab_size": 32000}
CASES = [
    {"batch_size": 1},
    {"batch_size": 1, "level": 0},
    {"batch_size": 1, "topk": 4},
    {"batch_size": 4},
    {"batch_size": 8},
    {"batch_size": 1, "vocab_size": 128256},
    {"batch_size": 4, "vocab_size": 128256},
]
SMALL_CASES = [
    {"batch_size": 2, "vocab_size": 300, "num_columns": 70},
    {"batch_size": 2, "vocab_size": 300, "num_columns": 64, "level": 0},
    {"batch_size": 1, "vocab_size": 300, "num_columns": 64, "topk": 16, "level": 4},
]
FLOOR = Floor("read", 0.0)
HEADLINES = ["rows=8 V=32000 H=4096"]


def name(batch_size, vocab_size, num_columns, topk, level):
    rows = batch_size * (topk if level else 1)
    return f"rows={rows} V={vocab_size} H={num_columns}" + (f" K={topk}" if topk != 8 else "")


def make(device, batch_size, vocab_size, num_columns, topk, level):
    rows, dtype = batch_size * (topk if level else 1), half_dtype(device)
    # whole numbers, whose sums are exact, so that all providers have the same logits
    hidden = torch.randint(-2, 3, (rows, num_columns), device=device).to(dtype)
    weight = torch.empty(vocab_size, num_columns, dtype=dtype, device=device).random_(-2, 3)
    values = {"hidden": hidden, "weight": weight, "topk": topk, "level": level, "prefetch_weight": True}
    if level:
        values["scores"] = torch.rand(batch_size, topk, device=device).log().sort(descending=True).values
        num_words = -(-level * topk // 64)
        values["ancestors"] = torch.randint(2 ** min(level * topk, 62), (batch_size, topk, num_words), device=device)
    return values


def count_bytes(batch_size, vocab_size, num_columns, topk, level):
    return 2 * num_columns * (vocab_size + batch_size * (topk if level else 1))


def prepare_pipeline(values):
    """linear_decode and select_top_k_tokens, which the engine calls instead."""
    hidden, weight = values["hidden"], values["weight"]
    rest = {name: values[name] for name in ("scores", "ancestors", "topk", "level") if name in values}

    def run():
        logits = eagle_kernels.raw.linear_decode(hidden, weight, prefetch_weight=True)
        return eagle_kernels.raw.select_top_k_tokens(logits, **rest)

    return run


def prepare_torch(values):
    """cuBLAS, and torch's log_softmax and topk."""
    hidden, weight = values["hidden"], values["weight"]
    logits = torch.nn.functional.linear(hidden, weight)
    select = prepare_selection(values | {"logits": logits})

    def run():
        torch.mm(hidden, weight.T, out=logits)
        return select()

    return run
