"""What the server is timed with, and the systems that are compared."""

import json
import random
from typing import NamedTuple

from eagle_kernels.engine.models.loading import demo_pair

from .random_models import head_config, target_config

FA3, VLLM_FA3 = "sglang+fa3", "vllm+fa3"
PLUGGED, MATCH, OWN = "sglang+eagle_kernels", "sglang+match", "eagle_kernels"
# with their attention backends
STOCK = {"sglang+flashinfer": "flashinfer", "sglang+triton": "triton", FA3: "fa3",
         VLLM_FA3: "FLASH_ATTN", "vllm+triton": "TRITON_ATTN"}  # fmt: skip
# vLLM's own chains, beside our trees: drafts, and tokens of a step as with the embedded pair's; the longest ones are
# timed with that pair alone
CHAINS = {
    f"{VLLM_FA3} chain{drafts}": (drafts, accept)
    for drafts, accept in ((3, 2.5), (5, 2.9), (7, 3.2), (11, None), (15, None))
}
EVERY_SYSTEM = (*STOCK, PLUGGED, MATCH, "vllm+eagle_kernels", *CHAINS, OWN)
SYSTEMS, VLLM_SYSTEMS = (
    tuple(system for system in EVERY_SYSTEM if system.startswith((engine, OWN))) for engine in ("sglang", "vllm")
)

GREEDY = ((0.0, 1.0),)  # temperature, top-p
TREE_SAMPLING = (*GREEDY, (0.8, 0.95))
PAIR = "pair"  # in place of a shape: the embedded models, what they accept, and their prompts


class Case(NamedTuple):
    """What one engine is measured with."""

    name: str
    batches: tuple[int, ...]
    tree: tuple[int, int, int] | None = None  # topk, steps, nodes
    accept: float | None = None  # mean tokens of a step that are simulated
    prompt_tokens: int = 512
    long: int = 560  # tokens of the longer of the two generations between which the slope is taken
    sampling: tuple[tuple[float, float], ...] = GREEDY
    shape: str = "llama-3.1-8b"
    # lengths of prompts and texts that are sent at once, in place of equal ones; batches are then those with a graph
    requests: tuple[tuple[int, int], ...] = ()

    @property
    def is_pair(self) -> bool:
        return self.shape == PAIR

    @property
    def prompts(self) -> list[list[int]]:
        """The tokens of the embedded pair's prompts; none of dummy weights, whose prompts are random."""
        file = demo_pair()[0].parent / "prompts.json"
        texts = json.loads(file.read_text(encoding="utf-8")) if self.is_pair else []
        return [list(text.encode()) for text in texts]

    @property
    def is_beside_chains(self) -> bool:
        """Tells whether this is a tree in vLLM, which has none of its own."""
        return self.name.startswith("vllm") and self.tree is not None and self.tree[0] > 1

    def drafts_of(self, system: str) -> tuple[tuple[int, int, int] | None, float | None]:
        """Returns a system's tree, and the tokens of a step that are simulated."""
        if system in CHAINS:
            drafts, accept = CHAINS[system]
            return (1, drafts, drafts + 1), None if self.is_pair else accept
        return self.tree, self.accept

    def sampling_of(self, system: str) -> tuple[tuple[float, float], ...]:
        """Returns what a system is measured with: sample and match differs from the plug-in where it samples."""
        if (system in CHAINS and not self.is_beside_chains) or (system in STOCK and self.is_beside_chains):
            return ()
        if system == OWN if self.is_pair else system in CHAINS and CHAINS[system][1] is None:
            return ()
        return tuple(each for each in self.sampling if each[0] > 0 or system != MATCH)


# what SGLang and vLLM read in a config.json beside sizes, as published: of all models, and by `model_type`
PUBLISHED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
PUBLISHED_OF = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
}


def models(shape: str) -> tuple[dict, dict]:
    """Returns the config.json of a target and of its EAGLE-3 head."""
    if shape == PAIR:
        target, head = (json.loads((each / "config.json").read_text(encoding="utf-8")) for each in demo_pair())
        return target, head
    target, head = target_config(shape), head_config(shape)
    published = PUBLISHED | PUBLISHED_OF[target["model_type"]]
    own = {"architectures": ["LlamaForCausalLMEagle3"], "target_hidden_size": target["hidden_size"]}
    return target | published, head | published | own


def ranks_of(tp: int, all_reduce: str) -> dict[str, int | str]:
    """Returns what a line tells of `tp` GPUs of its engine, which add up in one of `engine.ALL_REDUCES`."""
    return {"tp": tp, "all_reduce": all_reduce} if tp > 1 else {}


# The load of SGLang's pull request of naive EAGLE (sgl-project/sglang #7017): 500 requests, prompts and texts of 0.7 to
# 1.0 of 1,024 tokens. SGLang runs 48 at once by default where it speculates; so do all here.
_LENGTHS = random.Random(0)
REQUESTS = tuple((_LENGTHS.randint(716, 1024), _LENGTHS.randint(716, 1024)) for _ in range(500))
LONGEST_PROMPT = max(prompt for prompt, _ in REQUESTS)
RUNNING = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48)
# trees of that pull request, the last one naive; the first drafts two levels of which three nodes are kept
REQUEST_TREES = (("plain", None, None), ("4/2/4", (4, 2, 4), 2.2), ("2/1/2", (2, 1, 2), 1.7), ("1/1/2", (1, 1, 2), 1.7))

# the models and batch sizes of tri-sds (github.com/Mog9/tri-sds), each plain and with a tree
QWEN3 = {"4B": "qwen3-4b", "8B": "qwen3-8b", "14B": "qwen3-14b", "32B": "qwen3-32b"}
QWEN3_BATCHES = (1, 2, 4, 8)
# what is timed on several GPUs (`--tp`), and on one beside it
RANK_SHAPES = {"8B": "llama-3.1-8b", "32B": "qwen3-32b"}
CASES = (
    Case("plain", (1, 8, 32)),
    Case("8/5/64", (1,), (8, 5, 64), 4.0, sampling=TREE_SAMPLING),
    Case("4/3/8", (32,), (4, 3, 8), 2.5, sampling=TREE_SAMPLING),
    Case("4/4/16", (8,), (4, 4, 16), 2.5, prompt_tokens=8192, sampling=TREE_SAMPLING),
    *(
        Case(f"first token {name}", (batch,), prompt_tokens=tokens, long=1)
        for name, batch, tokens in (("8k", 1, 8192), ("8 x 2k", 8, 2048))
    ),
    *(
        Case(f"requests {name}", RUNNING, tree, accept, prompt_tokens=LONGEST_PROMPT, requests=REQUESTS)
        for name, tree, accept in REQUEST_TREES
    ),
    *(
        Case(f"Qwen3-{size} {name}", QWEN3_BATCHES, tree, accept, long=176, shape=shape)
        for size, shape in QWEN3.items()
        for name, tree, accept in (("plain", None, None), ("4/3/8", (4, 3, 8), 2.5))
    ),
    *(
        Case(f"{size} {name}", (1, 8, 32), tree, accept, long=304, sampling=sampling, shape=shape)
        for size, shape in RANK_SHAPES.items()
        for name, tree, accept, sampling in (("plain", None, None, GREEDY), ("4/3/8", (4, 3, 8), 2.5, TREE_SAMPLING))
    ),
)
RANK_CASES = [case.name for case in CASES if case.name.partition(" ")[0] in RANK_SHAPES]

# Tokens of a step grow from chain to chain as the embedded pair's, and 4/3/8 brings as much more than a chain of 3 as
# there (3.80 and 3.56 in greedy texts). A text of one token is timed from the prompt on.
VLLM_CHAINS = (("plain", None, None), ("chain3", (1, 3, 4), 2.5), ("chain7", (1, 7, 8), 3.2))
VLLM_CASES = (
    *(
        Case(f"vllm {name}{length}", batches, tree, accept, prompts, sampling=TREE_SAMPLING)
        for name, tree, accept in VLLM_CHAINS
        for length, batches, prompts in (("", (1, 8, 32), 512), (" 8k", (8,), 8192))
    ),
    Case("vllm chain7 4k", (32,), (1, 7, 8), 3.2, 3584),
    *(
        Case(f"vllm {'/'.join(map(str, tree))}", (batch,), tree, accept, sampling=TREE_SAMPLING)
        for tree, batch, accept in (((8, 5, 64), 1, 4.0), ((4, 4, 16), 8, 3.0), ((4, 3, 8), 32, 2.67))
    ),
    *(
        Case(f"vllm pair {name}", (1, 8), tree, None, 64, long=448, sampling=TREE_SAMPLING, shape=PAIR)
        for name, tree in (("4/8/32", (4, 8, 32)), ("4/11/48", (4, 11, 48)))
    ),
    Case("vllm first token 8k", (1,), prompt_tokens=8192, long=1),
)
EVERY_CASE = (*CASES, *VLLM_CASES)
ENGINES = {"sglang": ("SGLang", SYSTEMS, CASES), "vllm": ("vLLM", VLLM_SYSTEMS, VLLM_CASES)}
