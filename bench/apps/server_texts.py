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
Engines differ by graphs, asynchronous scheduling, sizes of pages and of chunks, cached prefixes, and a pool so small
that vLLM preempts requests; some texts end where vLLM allows no more tokens, some are aborted, and some begin like one
that has just ended. An engine in which none of that happened, or that accepted no draft, is at fault. Beside these,

- seeded requests, each with other filters and penalties, must have the same text plain and with chains, in fp32, in
  which vLLM can run the pair: token by token, without ties;
- short samples without a seed, of stock's plain decoding and of plugged drafts, must follow one law (chi-square).

`--soak SECONDS` serves random ones of the requests in place of all this: more at once than an engine runs, at random
times, of random lengths, some aborted. Texts must be plain, and no block may be lost by vLLM's own count.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from .server_rows import PROMPT_LENGTHS, ROWS, TREES, VLLM_TREES, Row, pair_case, traffic, vllm_traffic

# How far the logit of a token may be below the largest: twice the largest error of the pair's logits in that type, over
# 1024 greedy tokens (0.032 and 0.26; the median errors are 0.002 and 0.018). Of these tokens 0.8 % and 6 % have a
# second one so near.
ROUNDING = {"float16": 0.065, "bfloat16": 0.52}
EXACT = -1.0  # in place of rounding: no text that differs is a tie
SAME, TIE = "same", "tie"  # else what differs
GREEDY_TOLERANCE, SAMPLED_TOLERANCE = 0.01, 0.03  # of mean accepted lengths
MOST_TIES = {"float16": 0.25, "bfloat16": 0.75}  # of all texts: more are no matter of rounding
REFERENCE = "together"  # the wave of a stock engine whose texts the others must be
WHOLE = (REFERENCE, "alone")  # waves of greedy texts in a fixed order, without aborted ones
# a sound sampler fails one run in ten thousand; cells with fewer samples of both engines are put together
FALSE_ALARM, SMALLEST_CELL = 1e-4, 20
ROW_LIMIT_S = 280.0
TEXT_SHARE = 0.5  # of the GPU's memory, for the engines of vLLM that run at once
# what SGLang's scheduler says, and ends with, when tokens or requests are lost
LEAK = re.compile(r"mem(?:ory)? leak detected|double free|use-after-free", re.IGNORECASE)


class Served:
    """What an engine made of the traffic: a list of texts by wave, and the first thing that went wrong."""

    def __init__(self, row: Row):
        self.row = row
        self.waves: dict[str, list[dict]] = {}
        self.counted: dict[str, float] = {}  # by vLLM, as `vllm_child.COUNTERS` names it
        self.start_s: float | None = None
        self.versions: dict[str, str] = {}
        self.has_ended = False
        self.failure: str | None = None

    def greedy(self, other: Served) -> Length | None:
        """Returns the accepted length of the whole greedy texts that are the same in another engine."""
        pairs = [pair for wave in WHOLE for pair in zip(self.waves.get(wave, ()), other.waves.get(wave, ()))]
        return mean_length([(len(a["tokens"]), a["steps"]) for a, b in pairs if a["tokens"] == b["tokens"]])

    def aborted(self) -> int:
        """Returns how many texts were cut."""
        return sum(text["is_cut"] for texts in self.waves.values() for text in texts)

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
    """Runs the rows that were asked for and those whose texts theirs must be; returns the exit status.

    What SGLang's stock engines and those with all parts accepted is kept, a line for each tree and sampling.
    """
    is_vllm, rows = options.engine == "vllm", ROWS[options.engine]
    references = {row.reference for row in rows if row.name in options.row}
    rows = [row for row in rows if row.name in references.union(options.row)]
    order_of = functools.cache(lambda _: traffic())
    if is_vllm:
        order_of = functools.partial(vllm_traffic, soak_s=options.soak)
    orders = {row.name: order_of(row) for row in rows}
    target()  # what is missing for it is told before engines are started
    with ThreadPoolExecutor(options.jobs) as pool:
        served = list(pool.map(lambda row: run(row, orders[row.name], options, installation), rows))
    by_name = {one.row.name: one for one in served}
    faults, lines = [], []
    for one in served:
        compared = compare_vllm if is_vllm else compare
        found, line = compared(one, by_name[one.row.reference], orders[one.row.name], options.dtype)
        faults += [f"{one.row.name}: {fault}" for fault in found]
        lines.append(line + ["yes" if found else ""])
        if one.failure is None and not is_vllm and (one.row.is_stock or one.row.asked in (None, "all")):
            for line in accepted(one):
                keep(line | ranks_of(1 if one.row.is_stock else options.tp, options.all_reduce))
    print("\n" + markdown([VLLM_HEADER if is_vllm else HEADER, *lines]), flush=True)
    print("".join(f"{fault}\n" for fault in faults), end="", flush=True)
    return int(bool(faults))


def run(row: Row, order: dict, options: argparse.Namespace, installation: Installation) -> Served:
    """Serves the traffic with one engine; its log and its texts are kept in the folder of logs."""
    served = Served(row)
    log = options.logs / f"texts_{row.name.replace('/', '_')}.txt"
    ranks = {"tp": 1 if row.is_stock else options.tp, "all_reduce": options.all_reduce}
    shared = (row.backend, row.asked, row.page_size, row.has_graphs, row.has_overlap, row.has_radix_cache,
              row.dtype or options.dtype, order)  # fmt: skip
    if options.engine == "vllm":
        wanted = vllm_engine.TextOrder(
            *shared, tree=(TREES | VLLM_TREES).get(row.tree), has_trees=row.tree in VLLM_TREES,
            share=round(TEXT_SHARE / options.jobs, 3), compiled=log.stem, chunk_tokens=row.chunk_tokens,
            has_small_pool=row.has_small_pool, **ranks,
        )  # fmt: skip
    else:
        wanted = TextOrder(*shared, tree=TREES[row.tree], **ranks)
    limit_s, with_flashinfer = (
        options.limit or ROW_LIMIT_S + (options.soak or 0),
        installation.flashinfer_version() is not None,
    )
    try:
        with contextlib.closing(engine.run(wanted, installation, log, limit_s, with_flashinfer)) as records:
            for record in records:
                if record["kind"] == "started":
                    served.start_s, served.versions = record["start_s"], record["versions"]
                elif record["kind"] == "texts":
                    served.waves[record["wave"]] = record["texts"]
                elif record["kind"] == "counted":
                    served.counted = record
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
VLLM_HEADER = [
    "engine", "attention", "graphs", "overlap", "page", "chunk", "prefixes", "compared with", "same texts", "ties",
    "aborted", "preempted", "cached tokens", "tokens a step", "samples", "fault",
]  # fmt: skip


def compare(one: Served, stock: Served, order: dict, dtype: str) -> tuple[list[str], list[str]]:
    """Returns what differs from the stock engine, and a row of the table.

    A stock engine is held against its own texts of the first wave. That tells how far these depend on the batch, and
    is no fault.
    """
    faults, num, counts = differences(one, stock, order, ROUNDING[dtype], MOST_TIES[dtype])
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
    aborted = one.aborted()
    if one.failure is None and not aborted:
        faults.append("no request was aborted before its end")
    row = one.row
    parts = "stock" if row.is_stock else row.asked or "default"
    words = ["on" if value else "off" for value in (row.has_graphs, row.has_overlap)]
    line = [row.name, row.tree, *words, str(row.page_size), parts, f"{counts[SAME]} of {num}", str(counts[TIE]),
            str(aborted), *lengths]  # fmt: skip
    return faults, line


def compare_vllm(one: Served, stock: Served, order: dict, dtype: str) -> tuple[list[str], list[str]]:
    """Returns what differs from the engine whose texts these must be, and what did not happen; and a row."""
    row, counted, aborted = one.row, one.counted, one.aborted()
    tolerance = (EXACT, 0.0) if row.dtype else (ROUNDING[dtype], MOST_TIES[dtype])
    faults, num, counts = differences(one, stock, order, *tolerance)
    is_soaked = "soak_s" in order
    happened = (
        (not counted.get("lost"), f"{counted.get('lost', 0):.2%} of the pool is not free when no request is left"),
        (num or one is stock, "no text was compared"),
        (aborted or not (is_soaked or "joining" in order), "no request was aborted before its end"),
        (counted.get("accepted") or row.tree == "plain", "no draft was accepted"),
        (counted.get("preempted") or not row.has_small_pool, "no request was preempted"),
        (counted.get("cached") or not row.has_radix_cache, "no prefix was found in the cache"),
    )
    faults += [fault for has_happened, fault in happened if one.failure is None and not has_happened]
    samples, p = one.waves.get("samples", []), None
    if one is not stock and samples and "samples" in stock.waves:
        p = p_alike(*(([(text["index"], *text["tokens"]) for text in each.waves["samples"]]) for each in (one, stock)))
        if p <= FALSE_ALARM:
            faults.append(f"{len(samples)} samples do not follow {stock.row.name}'s law: p = {p:.1e}")
    length = one.greedy(one)
    switches = (row.has_graphs, row.has_overlap, row.has_radix_cache)
    graphs, overlap, prefixes = ("on" if value else "off" for value in switches)
    return faults, [
        row.name, row.backend, graphs, overlap, str(row.page_size), str(row.chunk_tokens), prefixes, row.reference,
        f"{counts[SAME]} of {num}", str(counts[TIE]), str(aborted),
        *(f"{counted.get(name, 0):.0f}" for name in ("preempted", "cached")),
        f"{length.mean:.3f}" if length else "-", f"{len(samples)}, p = {p:.2g}" if p is not None else "-",
    ]  # fmt: skip


def p_alike(one: Iterable[tuple[int, ...]], other: Iterable[tuple[int, ...]]) -> float:
    """Returns how likely it is that two samples of one law differ as much: a prompt's index and some tokens each.

    The smallest p of chi-square tests of the first one, two, ... tokens, times their number. Each test has a table of
    the two samples for each prompt, which both have drawn alike often; rare beginnings of a prompt share a cell.
    """
    one, other = list(one), list(other)
    sizes = range(2, max(map(len, one + other)) + 1)
    found = []
    for size in sizes:
        counts = [Counter(each[:size] for each in sample) for sample in (one, other)]
        cells: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by prompt
        for begin in sorted(counts[0] | counts[1]):  # else those of one sample come first, and share cells
            cells[begin[0]].append((counts[0][begin], counts[1][begin]))
        statistic = degrees = 0
        for pairs in cells.values():
            pooled, merged = [], (0, 0)
            for pair in sorted(pairs, key=sum):
                merged = merged[0] + pair[0], merged[1] + pair[1]
                if sum(merged) >= SMALLEST_CELL:
                    pooled.append(merged)
                    merged = (0, 0)
            if sum(merged):
                last = pooled.pop() if pooled else (0, 0)
                pooled.append((last[0] + merged[0], last[1] + merged[1]))
            statistic += sum((a - b) ** 2 / (a + b) for a, b in pooled)
            degrees += len(pooled) - 1
        half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
        found.append(float(torch.special.gammaincc(*half)) if degrees else 1.0)
    return min(1.0, min(found) * len(found))


def differences(
    one: Served, stock: Served, order: dict, rounding: float, most_ties: float
) -> tuple[list[str], int, Counter]:
    """Returns the faults of an engine's texts, how many were compared, and how many are SAME and TIE.

    The engine whose texts the others must be is held against its own, which is no fault, and printed.
    """
    faults = [] if one.failure is None else [one.failure]
    if one is not stock and REFERENCE not in stock.waves:
        faults.append(f"{stock.row.name} has no texts to compare with")
    verdicts = judge(one, stock, order, rounding)
    counts = Counter(text for _, text in verdicts)
    differing = [f"{where}: {text}" for where, text in verdicts if text not in (SAME, TIE)]
    if verdicts and counts[TIE] > most_ties * len(verdicts):
        differing.append(f"{counts[TIE]} of {len(verdicts)} texts differ within rounding, which are too many")
    if one is stock:
        print("".join(f"{one.row.name} differs from itself: {text}\n" for text in differing), end="", flush=True)
        differing = []
    return faults + differing, len(verdicts), counts


def judge(one: Served, stock: Served, order: dict, rounding: float) -> list[tuple[str, str]]:
    """Returns where each text that is greedy or seeded is, and what it is in comparison with stock's."""
    reference = {text["index"]: text["tokens"] for text in stock.waves.get(REFERENCE, ())}
    verdicts: list[tuple[str, str]] = []
    for wave, texts in one.waves.items():
        for text in texts:
            if not text["is_fixed"] or text["index"] not in reference or (one is stock and wave == REFERENCE):
                continue
            wanted = order["requests"][text["index"]]
            stock_text = reference[text["index"]][: text.get("max_new_tokens")]
            found = verdict(wanted["prompt"], text["tokens"], stock_text, text["is_cut"], rounding)
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
