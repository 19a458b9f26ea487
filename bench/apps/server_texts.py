"""The plug-in's texts inside SGLang: `--app server --check-only`, which times nothing.

Engines with the embedded pair of models serve one traffic: 32 requests at once, some alone, some that join while others
run and are aborted, and sampled ones. Compared with a stock engine with the same tree are the greedy texts, the mean
accepted lengths, and whether SGLang itself finds lost memory when it is idle. With `--tp` the plugged engines run on
several GPUs, and the stock ones on one, whose texts theirs must be.

SGLang cannot run this pair in fp32: its RMS norm on CUDA (`sgl_kernel.rmsnorm`) has no such instance. A product of
matrices in 16 bits depends on the size of the batch, so even a stock engine may give another token where two are
nearly as likely. A text that differs is therefore held against the target model in fp32, computed here by PyTorch: the
first token that differs, stock's in its place, and all that follow must be the most likely ones within rounding. fp16
is the default, since it rounds eight times finer than bf16: hardly any text needs this.

With `--engine vllm` greedy texts, of chains too, are compared with those of stock's plain decoding in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import NamedTuple

import torch

from eagle_kernels.engine.models.loading import demo_pair, load_target
from eagle_kernels.reference.causal_attend import causal_attend, positions_of

from ..harness.markdown import markdown
from ..peers import engine, vllm_engine
from ..peers.engine import EngineFailure, Installation
from ..peers.sglang_texts import TextOrder
from .server_cases import GREEDY, PLUGGED, TREE_SAMPLING, ranks_of
from .server_rows import PLUGGED_ROWS, PROMPT_LENGTHS, STOCK_ROWS, TREES, VLLM_ROWS, Row, pair_case, traffic

# How far the logit of a token may be below the largest: twice the largest error of the pair's logits in that type, over
# 1024 greedy tokens (0.032 and 0.26; the median errors are 0.002 and 0.018). Of these tokens 0.8 % and 6 % have a
# second one so near.
ROUNDING = {"float16": 0.065, "bfloat16": 0.52}
SAME, TIE = "same", "tie"  # else what differs
GREEDY_TOLERANCE, SAMPLED_TOLERANCE = 0.01, 0.03  # of mean accepted lengths
MOST_TIES = {"float16": 0.25, "bfloat16": 0.75}  # of all texts: more are no matter of rounding
REFERENCE = "together"  # the wave of a stock engine whose texts the others must be
WHOLE = (REFERENCE, "alone")  # waves of greedy texts in a fixed order, without aborted ones
ROW_LIMIT_S = 280.0
TEXT_SHARE = 0.5  # of the GPU's memory, for the engines of vLLM that run at once
# what SGLang's scheduler says, and ends with, when tokens or requests are lost
LEAK = re.compile(r"mem(?:ory)? leak detected|double free|use-after-free", re.IGNORECASE)


class Served:
    """What an engine made of the traffic: a list of texts by wave, and the first thing that went wrong."""

    def __init__(self, row: Row):
        self.row = row
        self.waves: dict[str, list[dict]] = {}
        self.start_s: float | None = None
        self.versions: dict[str, str] = {}
        self.has_ended = False
        self.failure: str | None = None

    def greedy(self, other: Served) -> Length | None:
        """Returns the accepted length of the whole greedy texts that are the same in another engine."""
        pairs = [pair for wave in WHOLE for pair in zip(self.waves.get(wave, ()), other.waves.get(wave, ()))]
        return mean_length([(len(a["tokens"]), a["steps"]) for a, b in pairs if a["tokens"] == b["tokens"]])

    def sampled(self) -> Length | None:
        """Returns the accepted length of the sampled texts."""
        return mean_length([(text["tokens"], text["steps"]) for text in self.waves.get("sampled", ())])


class Length(NamedTuple):
    """A mean number of tokens in a verification step, and its standard error."""

    mean: float
    error: float


def mean_length(texts: Sequence[tuple[int, float]]) -> Length | None:
    """Returns the mean over texts of tokens a step; None where no text has a step.

    The first token of a text comes from no step. The error is that of a ratio of sums over independent texts.
    """
    texts = [(tokens - 1, steps) for tokens, steps in texts if steps]
    if not texts:
        return None
    num_steps = sum(steps for _, steps in texts)
    mean = sum(tokens for tokens, _ in texts) / num_steps
    return Length(mean, sum((tokens - mean * steps) ** 2 for tokens, steps in texts) ** 0.5 / num_steps)


def check(options: argparse.Namespace, installation: Installation, keep: Callable[[dict], None]) -> int:
    """Runs the rows that were asked for and the stock engines of their trees; returns the exit status.

    What stock engines and those with all parts accepted is kept, a line for each tree and sampling.
    """
    plugged = [row for row in PLUGGED_ROWS if row.name in options.row]
    rows = [row for row in STOCK_ROWS if row.tree in {other.tree for other in plugged}] + plugged
    order = traffic()
    target()  # what is missing for it is told before engines are started
    with ThreadPoolExecutor(options.jobs) as pool:
        served = list(pool.map(lambda row: run(row, order, options, installation), rows))
    stock = {one.row.tree: one for one in served if one.row.is_stock}
    faults, lines = [], []
    for one in served:
        found, line = compare(one, stock[one.row.tree], order, options.dtype)
        faults += [f"{one.row.name}: {fault}" for fault in found]
        lines.append(line)
        if one.failure is None and (one.row.is_stock or one.row.asked in (None, "all")):
            for line in accepted(one):
                keep(line | ranks_of(1 if one.row.is_stock else options.tp, options.all_reduce))
    print("\n" + markdown([HEADER, *lines]), flush=True)
    print("".join(f"{fault}\n" for fault in faults), end="", flush=True)
    return int(bool(faults))


def check_chains(options: argparse.Namespace, installation: Installation) -> int:
    """Compares greedy texts of vLLM's engines with those of its plain decoding; returns the exit status."""
    order = {name: found for name, found in traffic().items() if name in ("requests", "alone")}
    with ThreadPoolExecutor(options.jobs) as pool:
        served = list(pool.map(lambda row: run(row, order, options, installation), VLLM_ROWS))
    faults, lines = [], []
    for one in served:
        verdicts, length = judge(one, served[0], order, ROUNDING[options.dtype]), one.greedy(one)
        counts = Counter(text for _, text in verdicts)
        found = [f"{where}: {text}" for where, text in verdicts if text not in (SAME, TIE) and one is not served[0]]
        if not verdicts or counts[TIE] > MOST_TIES[options.dtype] * len(verdicts):
            found.append(f"{counts[TIE]} of {len(verdicts)} texts differ within rounding")
        faults += [f"{one.row.name}: {fault}" for fault in filter(None, [one.failure, *found])]
        numbers = [str(counts[TIE]), f"{length.mean:.3f}" if length else "-"]
        lines.append([one.row.name, one.row.backend, f"{counts[SAME]} of {len(verdicts)}", *numbers])
    print("\n" + markdown([["engine", "attention", "same texts", "ties", "tokens a step"], *lines]), flush=True)
    print("".join(f"{fault}\n" for fault in faults), end="", flush=True)
    return int(bool(faults))


def run(row: Row, order: dict, options: argparse.Namespace, installation: Installation) -> Served:
    """Serves the traffic with one engine; its log and its texts are kept in the folder of logs."""
    served = Served(row)
    log = options.logs / f"texts_{row.name.replace('/', '_')}.txt"
    if options.engine == "vllm":
        share = round(TEXT_SHARE / options.jobs, 3)
        wanted = vllm_engine.TextOrder(row.backend, options.dtype, order, tree=TREES.get(row.tree), share=share)
    else:
        wanted = TextOrder(
            row.backend, row.asked, row.page_size, row.has_graphs, row.has_overlap, row.has_radix_cache, options.dtype,
            order, tree=TREES[row.tree], tp=1 if row.is_stock else options.tp, all_reduce=options.all_reduce,
        )  # fmt: skip
    limit_s, with_flashinfer = options.limit or ROW_LIMIT_S, installation.flashinfer_version() is not None
    try:
        with contextlib.closing(engine.run(wanted, installation, log, limit_s, with_flashinfer)) as records:
            for record in records:
                if record["kind"] == "started":
                    served.start_s, served.versions = record["start_s"], record["versions"]
                elif record["kind"] == "texts":
                    served.waves[record["wave"]] = record["texts"]
                elif record["kind"] == "done":
                    served.has_ended = True
                else:
                    served.failure = served.failure or f"wave {record['wave']}: {record['error']}"
    except EngineFailure as failure:
        served.failure = served.failure or str(failure)
    if log.exists() and (leak := LEAK.search(log.read_text(encoding="utf-8", errors="replace"))):
        served.failure = f"SGLang says: {leak[0]} (the whole log: {log})\n{served.failure or ''}".strip()
    if served.failure is None and not served.has_ended:
        served.failure = f"ended before all was served (the log: {log})"
    log.with_suffix(".json").write_text(json.dumps(served.waves), encoding="utf-8")
    start = "did not start" if served.start_s is None else f"started in {served.start_s:.0f} s"
    print(f"{row.name}: {start}, {'failed' if served.failure else 'served all'}", flush=True)
    return served


def accepted(one: Served) -> Iterator[dict]:
    """Yields what an engine's greedy and its sampled texts accepted: steps by the number of their drafts."""
    waves = (
        ([text for wave in WHOLE for text in one.waves[wave]], GREEDY[0]),
        (one.waves["sampled"], TREE_SAMPLING[1]),
    )
    for texts, (temperature, top_p) in waves:
        steps = [sum(column) for column in zip_longest(*(text["accepted"] for text in texts), fillvalue=0)]
        if not sum(steps):
            print(
                f"{one.row.name}: SGLang does not tell how many drafts its steps accepted, so none are kept", flush=True
            )
            continue
        yield {
            "shape": "embedded pair", "versions": one.versions,
            "case": pair_case(one.row.tree), "system": "sglang+triton" if one.row.is_stock else PLUGGED,
            "batch": len(PROMPT_LENGTHS), "temperature": temperature, "top_p": top_p, "tree": TREES[one.row.tree],
            "accept_length": round(1 + sum(number * count for number, count in enumerate(steps)) / sum(steps), 4),
            "accepted": steps,
        }  # fmt: skip


HEADER = [
    "engine", "tree", "graphs", "overlap", "page", "parts", "same texts", "ties", "aborted", "tokens a step",
    "sampled", "fault",
]  # fmt: skip


def compare(one: Served, stock: Served, order: dict, dtype: str) -> tuple[list[str], list[str]]:
    """Returns what differs from the stock engine, and a row of the table.

    A stock engine is held against its own texts of the first wave. That tells how far these depend on the batch, and
    is no fault.
    """
    is_stock = one is stock
    faults = [] if one.failure is None else [one.failure]
    if not is_stock and REFERENCE not in stock.waves:
        faults.append(f"{stock.row.name} has no texts to compare with")
    verdicts = judge(one, stock, order, ROUNDING[dtype])
    counts = {kind: sum(text == kind for _, text in verdicts) for kind in (SAME, TIE)}
    differing = [f"{where}: {text}" for where, text in verdicts if text not in (SAME, TIE)]
    if verdicts and counts[TIE] > MOST_TIES[dtype] * len(verdicts):
        differing.append(f"{counts[TIE]} of {len(verdicts)} texts differ within rounding, which are too many")
    if is_stock:
        print("".join(f"{one.row.name} differs from itself: {text}\n" for text in differing), end="", flush=True)
    else:
        faults += differing
    greedy, sampled = (one.greedy(stock), stock.greedy(one)), (one.sampled(), stock.sampled())
    for kind, pair, tolerance in (("greedy", greedy, GREEDY_TOLERANCE), ("sampled", sampled, SAMPLED_TOLERANCE)):
        if None in pair:
            if one.failure is None and stock.failure is None:
                faults.append(f"{kind}: no accepted lengths")
        elif abs(pair[0].mean / pair[1].mean - 1) > tolerance:
            error = f", standard error of the difference {math.hypot(pair[0].error, pair[1].error):.3f}"
            faults.append(
                f"{kind}: accepted length {pair[0].mean:.3f}, stock's is {pair[1].mean:.3f}"
                + (error if kind == "sampled" else "")
            )
    lengths = [f"{pair[0].mean:.3f}, stock {pair[1].mean:.3f}" if all(pair) else "-" for pair in (greedy, sampled)]
    if all(sampled):
        lengths[1] += f" (± {math.hypot(sampled[0].error, sampled[1].error):.3f})"
    aborted = sum(text["is_cut"] for texts in one.waves.values() for text in texts)
    if one.failure is None and not aborted:
        faults.append("no request was aborted before its end")
    row = one.row
    parts = "stock" if row.is_stock else row.asked or "default"
    words = ["on" if value else "off" for value in (row.has_graphs, row.has_overlap)]
    line = [row.name, row.tree, *words, str(row.page_size), parts, f"{counts[SAME]} of {len(verdicts)}",
            str(counts[TIE]), str(aborted), *lengths, "yes" if faults else ""]  # fmt: skip
    return faults, line


def judge(one: Served, stock: Served, order: dict, rounding: float) -> list[tuple[str, str]]:
    """Returns where each greedy text is, and what it is in comparison with stock's."""
    reference = {text["index"]: text["tokens"] for text in stock.waves.get(REFERENCE, ())}
    verdicts: list[tuple[str, str]] = []
    for wave, texts in one.waves.items():
        for text in texts:
            if not text["is_greedy"] or text["index"] not in reference or (one is stock and wave == REFERENCE):
                continue
            wanted = order["requests"][text["index"]]
            found = verdict(wanted["prompt"], text["tokens"], reference[text["index"]], text["is_cut"], rounding)
            where = f"request {text['index']} ({len(wanted['prompt'])} + {wanted['max_new_tokens']} tokens, {wave}"
            verdicts.append((f"{where}{', aborted' if text['is_cut'] else ''})", found))
    return verdicts


@functools.cache
def target():
    """Loads the pair's target in fp32, once."""
    return load_target(demo_pair()[0])


def gaps(prompt: Sequence[int], text: Sequence[int]) -> list[float]:
    """Returns how far the logit of each token of a text is below the largest, in fp32."""
    tokens = torch.tensor([[*prompt, *text]])
    with torch.no_grad():
        logits = target()(tokens[:, :-1], positions_of(tokens[:, :-1]), causal_attend).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(-1, tokens[0, len(prompt) :, None])[:, 0]
    return (logits.amax(-1) - chosen).tolist()


def verdict(prompt: Sequence[int], text: Sequence[int], stock: Sequence[int], is_cut: bool, rounding: float) -> str:
    """Returns SAME, TIE, or what differs. is_cut: the text was aborted, so that it may be the beginning of stock's."""
    if len(text) > len(stock) or (len(text) < len(stock) and not is_cut):
        return f"{len(text)} tokens, stock has {len(stock)}"
    first = next((place for place, pair in enumerate(zip(text, stock)) if pair[0] != pair[1]), None)
    if first is None:
        return SAME
    vocab_size = target().get_output_embeddings().weight.shape[0]
    if not all(0 <= token < vocab_size for token in text):
        return f"token {next(token for token in text if not 0 <= token < vocab_size)} is none of the vocabulary"
    ours = gaps(prompt, text)[first:]
    of_stock = gaps(prompt, stock[: first + 1])[-1]
    if max(*ours, of_stock) <= rounding:
        return TIE
    worst = max(range(len(ours)), key=ours.__getitem__)
    return (
        f"token {first} is {text[first]}, stock's is {stock[first]}; their logits are {ours[0]:.3f} and {of_stock:.3f} "
        f"below the largest, and that of token {first + worst} is {ours[worst]:.3f} below"
    )
