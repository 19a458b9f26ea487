"""build_tree_from_blocks next to a selection by torch, whose candidates it takes as well, and SGLang's uno_tree."""

import torch

import eagle_kernels
from bench.harness import Floor, Unavailable, grid
from bench.peers import sglang_triton

DEFAULTS = {"vocab_size": 151936, "depth": 20, "topk": 7, "num_nodes": 128}
CASES = [
    *grid(batch_size=[1, 8, 32]),
    {"batch_size": 8, "vocab_size": None},
    {"batch_size": 8, "depth": 8, "num_nodes": 64, "vocab_size": 32000},
    {"batch_size": 8, "depth": 16, "topk": 8, "num_nodes": 256},
    {"batch_size": 1, "depth": 5, "topk": 10, "num_nodes": 64},
]
SMALL_CASES = [
    {"batch_size": 2, "vocab_size": 300, "depth": 3, "topk": 3, "num_nodes": 8},
    {"batch_size": 2, "vocab_size": None, "depth": 3, "topk": 3, "num_nodes": 8},
]
FLOOR = Floor("read", 25.0)
PEERS = {"sglang_triton": sglang_triton.build_tree_from_blocks}


def name(batch_size, vocab_size, depth, topk, num_nodes):
    source = "candidates" if vocab_size is None else f"V={vocab_size}"
    return f"B={batch_size} D={depth} W={topk} N={num_nodes} {source}"


def make(device, batch_size, vocab_size, depth, topk, num_nodes):
    """Distributions as drafters have them, whose best token gets less likely with depth."""
    values = {
        "verified_id": torch.randint(1000, (batch_size,), device=device),
        "logits": None,
        "seq_lens": torch.randint(1, 1000, (batch_size,), device=device),
        "topk": topk,
        "num_verify_tokens": num_nodes,
    }
    scores = torch.rand(batch_size, depth, topk, device=device).sort(dim=-1, descending=True).values
    if vocab_size is None:
        tokens = torch.randint(1000, (batch_size, depth, topk), device=device)
        return values | {"candidate_tokens": tokens, "candidate_scores": (scores / topk).log()}
    logits = torch.randn(batch_size, depth, vocab_size, device=device)
    best = torch.randint(vocab_size, (batch_size, depth, topk), device=device)
    peaks = scores * torch.linspace(24, 12, depth, device=device)[:, None]
    return values | {"logits": logits.scatter_(-1, best, peaks).to(torch.bfloat16)}


def count_bytes(batch_size, vocab_size, depth, topk, num_nodes):
    read = topk * 12 if vocab_size is None else vocab_size * 2
    return batch_size * (depth * read + 8 * num_nodes * (6 + -(-num_nodes // 64)))


def prepare_pipeline(values):
    """Selection by torch, the tree by our kernel from candidates."""
    if values["logits"] is None:
        raise Unavailable("there is nothing to select from")
    shared = {key: value for key, value in values.items() if key != "logits"}

    def run():
        scores, tokens = torch.log_softmax(values["logits"], dim=-1, dtype=torch.float32).topk(values["topk"])
        tree = eagle_kernels.raw.build_tree_from_blocks(
            logits=None, candidate_tokens=tokens, candidate_scores=scores, **shared
        )
        # equal logits are ordered as torch likes, so nodes cannot be compared
        return {"retrieve_index": tree.retrieve_index}

    return run
