"""The engines and the traffic with which texts of SGLang and of vLLM are compared."""

import json
from typing import Any, NamedTuple

from eagle_kernels.engine.models.loading import demo_pair

from ..peers.engine import PLUGIN
from ..peers.vllm_engine import CUSTOM, FA3

TREES = {"8/5/32": (8, 5, 32), "4/3/8": (4, 3, 8), "chain": (1, 4, 5)}  # topk, steps, nodes


def pair_case(tree: str) -> str:
    """Names what is kept of the acceptance of a tree."""
    return f"pair {tree}"


class Row(NamedTuple):
    """One engine. asked: parts for the plug-in's variable; None: what the backend turns on; empty: a stock engine."""

    name: str
    tree: str
    has_graphs: bool = True
    has_overlap: bool = True
    page_size: int = 1
    backend: str = PLUGIN
    asked: str | None = None
    has_radix_cache: bool = True

    @property
    def is_stock(self) -> bool:
        return self.asked == ""


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

# of vLLM, whose graphs, overlap and pages are its own: the first one's texts are those that all must have
VLLM_ROWS = (
    *(Row(f"stock-{tree}", tree, backend=FA3, asked="") for tree in ("plain", "chain")),
    *(Row(f"plugged-{tree}", tree, backend=CUSTOM, asked="all") for tree in ("plain", "chain")),
)

# tokens of prompts: the smallest, those around pages of 16 and 64 tokens and around a chunk of 256, and long ones
PROMPT_LENGTHS = (
    1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65,
    80, 100, 127, 128, 129, 150, 191, 192, 193, 255, 256, 257, 300, 350, 399, 400,
)  # fmt: skip
TEXT_LENGTHS = (96, 200, 1, 128, 40, 160, 64)
ALONE = (0, 8, 21, 31)
NUM_FIRST = 8  # requests of the wave that do not wait for another
SAMPLED_TOKENS, SAMPLED_ROUNDS = 128, 8
IDLE_S = 3.0  # SGLang's scheduler looks for lost memory each time it finds nothing to do, and ends where it finds some
SAMPLING = {"temperature": 0.8, "top_p": 0.95}


def traffic() -> dict[str, Any]:
    """Returns what all engines serve, as `sglang_traffic.serve` reads it: the same every time."""
    file = demo_pair()[0].parent / "prompts.json"
    tokens = list("".join(json.loads(file.read_text(encoding="utf-8"))).encode())
    requests = []
    for index, length in enumerate(PROMPT_LENGTHS):
        begin = 0 if index % 4 == 3 else 331 * index % len(tokens)  # every fourth begins alike, for the radix cache
        prompt = (tokens + tokens)[begin : begin + length]
        requests.append({"prompt": prompt, "max_new_tokens": TEXT_LENGTHS[index % len(TEXT_LENGTHS)]})
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
