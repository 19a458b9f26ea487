"""The engines and the traffic with which texts of SGLang and of vLLM are compared."""

import itertools
import json
from typing import Any, NamedTuple

from eagle_kernels.engine.models.loading import demo_pair

from ..peers.engine import PLUGIN
from ..peers.vllm_engine import CUSTOM, FA3, TEXT_LENGTH, TRITON

TREES = {"8/5/32": (8, 5, 32), "4/3/8": (4, 3, 8), "chain": (1, 4, 5)}  # topk, steps, nodes
VLLM_TREES = {"8/5/64": (8, 5, 64), "4/4/16": (4, 4, 16), "4/3/8": (4, 3, 8), "1/4": (1, 4, 5)}  # the last a chain


def pair_case(tree: str) -> str:
    """Names what is kept of the acceptance of a tree."""
    return f"pair {tree}"


class Row(NamedTuple):
    """One engine. asked: parts for the plug-in's variable; None: what the backend turns on; empty: a stock engine.

    The fields after `has_radix_cache` (of SGLang; a cache of prefixes in vLLM) are vLLM's. dtype: None: the one that is
    chosen. against: the engine whose texts this one's must be; None: the stock engine of its tree.
    """

    name: str
    tree: str
    has_graphs: bool = True
    has_overlap: bool = True
    page_size: int = 1
    backend: str = PLUGIN
    asked: str | None = None
    has_radix_cache: bool = True
    chunk_tokens: int = 256  # of a step at most
    has_small_pool: bool = False  # vLLM must preempt requests
    has_samples: bool = False  # it also serves short samples, whose distribution is compared
    dtype: str | None = None
    against: str | None = None

    @property
    def is_stock(self) -> bool:
        return self.asked == ""

    @property
    def reference(self) -> str:
        return self.against or f"stock-{self.tree}"


# One stock engine for each tree. Of graphs, overlap, pages of more than one token and trees (not chains), each pair of
# values occurs in a row of PLUGGED: five rows are the fewest for four such factors, and leave one row for each set of
# parts and one more. Not every set of parts meets every value. So the rows are placed where code differs: what is
# served most comes first; our attention has trees with pages of 1 and 64, and chains with pages of 1 and 16, with
# graphs and without (batches of more than 16 run without a graph everywhere); the parts without attention have trees on
# pages, which SGLang's own attention lays out for them.
STOCK_ROWS = tuple(Row(f"stock-{name}", name, backend="triton", asked="") for name in TREES)
PLUGGED_ROWS = (
    Row("default", "8/5/32"),
    Row("all", "4/3/8", has_overlap=False, page_size=64, asked="all"),
    Row("no-attention", "8/5/32", has_graphs=False, page_size=16, backend="triton", asked="verify,draft,kv"),
    Row("attention", "chain", has_graphs=False, has_overlap=False, asked="attention", has_radix_cache=False),
    Row("chain", "chain", page_size=16, has_radix_cache=False),
)


def _vllm(name: str, tree: str, backend: str = CUSTOM, asked: str = "all", **more) -> Row:
    """Returns an engine of vLLM, with pages of 16 tokens and without a cache of prefixes unless told otherwise."""
    more = {"page_size": 16, "has_radix_cache": False, "against": "stock-plain"} | more
    return Row(name, tree, backend=backend, asked=asked, **more)


# Greedy texts of all must be those of stock's plain decoding. Of graphs, overlap, pages of more than 16 tokens, large
# chunks, cached prefixes and a small pool, each pair of values occurs in a plugged chain: six rows are the fewest for
# six such factors. All kernels see all sizes of pages; the chain with graphs, overlap and prefixes is what vLLM's
# defaults are. Those in fp32 serve seeded requests: plain and with chains by vLLM's Triton attention, since
# FlashAttention 3, which reads prompts with ours, has no fp32, and with trees by ours alone.
_SEEDED = {"backend": TRITON, "asked": "verify,draft", "dtype": "float32", "against": "seeded-plain"}
_EAGER, _SYNCHRONOUS, _SMALL = {"has_graphs": False}, {"has_overlap": False}, {"has_small_pool": True}
_PREFIXES, _LARGE_CHUNKS = {"has_radix_cache": True}, {"chunk_tokens": 8192}
VLLM_ROWS = (
    _vllm("stock-plain", "plain", FA3, "", has_samples=True),
    _vllm("stock-chain", "chain", FA3, ""),
    _vllm("plugged-plain", "plain"),
    _vllm("plugged-chain", "chain", has_samples=True, **_PREFIXES, **_LARGE_CHUNKS),
    _vllm("eager", "chain", **_EAGER, **_SYNCHRONOUS, **_SMALL, **_LARGE_CHUNKS),
    _vllm("eager-prefixes", "chain", **_EAGER, **_SYNCHRONOUS, **_PREFIXES),
    _vllm("eager-64", "chain", **_EAGER, **_SMALL, **_PREFIXES, **_LARGE_CHUNKS, page_size=64),
    _vllm("synchronous-256", "chain", **_SYNCHRONOUS, page_size=256),
    _vllm("preempted-32", "chain", **_SMALL, page_size=32),
    _vllm("seeded-plain", "plain", **_SEEDED),
    _vllm("seeded-chain", "chain", **_SEEDED),
    _vllm("tree-8/5/64", "8/5/64", has_samples=True, **_PREFIXES, **_LARGE_CHUNKS),
    _vllm("tree-4/4/16", "4/4/16", **_SMALL, **_PREFIXES),
    _vllm("tree-4/3/8", "4/3/8", **_EAGER, **_SYNCHRONOUS, **_PREFIXES, page_size=64),
    _vllm("tree-1/4", "1/4", page_size=32),
    *(_vllm(f"seeded-{tree}", tree, **_SEEDED | {"backend": CUSTOM, "asked": "all"}) for tree in VLLM_TREES),
)
ROWS = {"sglang": (*STOCK_ROWS, *PLUGGED_ROWS), "vllm": VLLM_ROWS}

# tokens of prompts: the smallest, those around pages of 16 and 64 tokens and around a chunk of 256, and long ones
PROMPT_LENGTHS = (
    1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65,
    80, 100, 127, 128, 129, 150, 191, 192, 193, 255, 256, 257, 300, 350, 399, 400,
)  # fmt: skip
TEXT_LENGTHS = (96, 200, 1, 128, 40, 160, 64)
# texts of vLLM that end where it allows no more tokens: their last chains are cut
CUT_LENGTHS = (1, 4, 7, 40, 124)
ALONE = (0, 8, 21, 31)
SOAKED = 40  # more than an engine runs at once
NUM_FIRST = 8  # requests of the wave that do not wait for another
SAMPLED_TOKENS, SAMPLED_ROUNDS = 128, 8
IDLE_S = 3.0  # SGLang's scheduler looks for lost memory each time it finds nothing to do, and ends where it finds some
SAMPLING = {"temperature": 0.8, "top_p": 0.95}


# One request for each set of the first six; `allowed_token_ids` and stop tokens go with some of them.
NUM_SEEDED, SEEDED_TOKENS = 64, 64
FILTERS = (
    {"top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    {"logit_bias": {"32": -1.5, "101": 1.5, "10": 1.0}},
    {"_bad_words_token_ids": [[32, 32], [116, 104], [95]]},
)
TEMPERATURES = (0.5, 0.8, 1.0, 1.4, 1.9)
STOP = {"stop_token_ids": [10, 41], "min_tokens": 16}
# prompts, samples of each, tokens of a sample
NUM_SAMPLED, NUM_SAMPLES, SAMPLE_TOKENS = 10, 1000, 4


def traffic(cut: tuple[int, ...] = ()) -> dict[str, Any]:
    """Returns what all engines serve, as `sglang_traffic.serve` reads it: the same every time. cut: CUT_LENGTHS."""
    file = demo_pair()[0].parent / "prompts.json"
    tokens = list("".join(json.loads(file.read_text(encoding="utf-8"))).encode())
    requests = []
    lengths = [*zip(PROMPT_LENGTHS, itertools.cycle(TEXT_LENGTHS)), *((TEXT_LENGTH - rest, rest) for rest in cut)]
    for index, (length, text_length) in enumerate(lengths):
        begin = 0 if index % 4 == 3 else 331 * index % len(tokens)  # every fourth begins alike, for the radix cache
        prompt = (tokens + tokens)[begin : begin + length]
        requests.append({"prompt": prompt, "max_new_tokens": text_length})
    joining = []
    for place in range(len(requests)):
        index = 13 * place % len(requests)  # long and short ones side by side
        length = requests[index]["max_new_tokens"]
        abort_at = None
        if place % 4 == 1:
            abort_at = 0 if place % 16 == 9 else max(1, length // 3)
        waits_for = place - NUM_FIRST if place >= NUM_FIRST else None
        is_sampled = place % 5 == 4 and abort_at is None
        joining.append({"index": index, "waits_for": waits_for, "is_sampled": is_sampled, "abort_at": abort_at})
    return {
        "requests": requests,
        "alone": list(ALONE),
        "joining": joining,
        "sampled": [index for _ in range(SAMPLED_ROUNDS) for index in range(len(requests))],
        "sampled_tokens": SAMPLED_TOKENS,
        "sampling": SAMPLING,
        "idle_s": IDLE_S,
    }


def vllm_traffic(row: Row, soak_s: float | None = None) -> dict[str, Any]:
    """Returns what an engine of vLLM serves, as `vllm_child.Engine.serve` reads it: indices into `requests` by wave.

    soak_s: in place of all that, but for what others are compared with, random ones of these requests.
    """
    made = traffic(CUT_LENGTHS)
    requests = made["requests"]
    if row.dtype is not None:
        prompts = [request["prompt"][:64] for request in requests]
        requests = [
            {"prompt": prompts[index % len(prompts)], "max_new_tokens": SEEDED_TOKENS, "sampling": seeded(index)}
            for index in range(NUM_SEEDED)
        ]
        return {"requests": requests, "together": list(range(NUM_SEEDED))}
    found = {"together": list(range(len(requests))), "alone": made["alone"], "joining": made["joining"]}
    if soak_s and row.name != row.reference:
        return {"requests": requests, "soak_s": soak_s, "at_once": SOAKED}
    if row.has_samples and not soak_s:
        drawn = {"max_new_tokens": SAMPLE_TOKENS, "sampling": {"temperature": 0.9, "top_p": 0.9}}
        begun = [request["prompt"][:16] for index, request in enumerate(requests[8:], 8) if index % 4 != 3]
        sampled = [{"prompt": prompt} | drawn for prompt in begun[:NUM_SAMPLED]]
        found["samples"] = [len(requests) + index for index in range(NUM_SAMPLED) for _ in range(NUM_SAMPLES)]
        requests = requests + sampled
    return {"requests": requests, "sampling": SAMPLING} | found


def seeded(index: int) -> dict[str, Any]:
    """Returns a seed, a temperature and filters, as `vllm.SamplingParams` takes them, but for the keys of biases."""
    found = {"seed": 1000 + index, "temperature": TEMPERATURES[index % len(TEMPERATURES)]}
    for place, each in enumerate(FILTERS):
        found |= each if index >> place & 1 else {}
    found |= {"allowed_token_ids": list(range(10, 123))} if index % 3 == 1 else {}
    return found | (STOP if index % 7 > 3 else {})
