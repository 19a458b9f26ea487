"""penalize_logits with all three penalties, an output still too short for its end tokens, and a few bad tokens."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.harness.inputs import (
    LARGE_VOCABULARY,
    ODD_BATCH,
    TREES,
    VOCABULARY,
    accepted_tree,
    of_vocabulary,
    parents,
)
from bench.run import main

LINKS = ("candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling")


def make(device, batch_size, topk, spec_steps, num_nodes, vocab_size):
    tree = accepted_tree("cpu", batch_size, topk, spec_steps, num_nodes, vocab_size)
    values = {name: tree[name].to(device) for name in LINKS}
    rows, words = batch_size * num_nodes, -(-vocab_size // 32)
    output = torch.randint(vocab_size, (batch_size, 512), device=device)
    counts = torch.zeros(batch_size, vocab_size, dtype=torch.int32, device=device)
    counts.scatter_add_(1, output, torch.ones_like(output, dtype=torch.int32))
    return values | {
        "target_logits": torch.empty(rows, vocab_size, dtype=torch.bfloat16, device=device).normal_(),
        "repetition_penalty": torch.full((batch_size,), 1.1, device=device),
        "frequency_penalty": torch.full((batch_size,), 0.25, device=device),
        "presence_penalty": torch.full((batch_size,), 0.5, device=device),
        "prompt_mask": torch.randint(2**31 - 1, (batch_size, words), dtype=torch.int32, device=device),
        "output_counts": counts,
        "min_tokens": torch.full((batch_size,), 1024, device=device),
        "num_output_tokens": torch.full((batch_size,), 512, device=device),
        "end_token_ids": torch.randint(vocab_size, (2,), device=device),
        "bad_token_ids": torch.randint(vocab_size, (batch_size, 16), device=device),
    }


def count_bytes(batch_size, topk, spec_steps, num_nodes, vocab_size):
    """Logits read as bf16 and written as fp32, counts and prompt mask of each request read once."""
    return batch_size * vocab_size * (num_nodes * (2 + 4) + 4) + batch_size * vocab_size // 8


def prepare_torch(values):
    """Ancestors and the prompt's tokens, which a torch user has as truth values, are made once."""
    candidates, logits = values["candidates"], values["target_logits"]
    device, (batch_size, num_nodes) = candidates.device, candidates.shape
    vocab_size = logits.shape[1]
    parent = parents(values["retrieve_next_token"], values["retrieve_next_sibling"]).to(device)
    on_path = torch.eye(num_nodes, dtype=torch.int32, device=device).expand(batch_size, -1, -1).clone()
    on_path[:, 0, 0] = 0  # the root is in output_counts
    for node in range(1, num_nodes):
        on_path[:, node] |= on_path[torch.arange(batch_size, device=device), parent[:, node]]
    token = torch.arange(vocab_size, device=device)
    in_prompt = ((values["prompt_mask"][:, token // 32] >> (token % 32)) & 1).bool()
    tokens = candidates[:, None, :].expand(batch_size, num_nodes, num_nodes)
    shape = (batch_size, num_nodes, vocab_size)
    repetition, frequency, presence = (
        values[name][:, None, None] for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )
    ends = values["end_token_ids"].expand(batch_size, num_nodes, -1)
    bad = values["bad_token_ids"][:, None].expand(-1, num_nodes, -1)

    def run():
        counts = values["output_counts"][:, None].expand(shape).contiguous().scatter_add_(2, tokens, on_path)
        changed = logits.view(shape).float()
        repeated = torch.where(changed > 0, changed / repetition, changed * repetition)
        changed = torch.where((counts > 0) | in_prompt[:, None], repeated, changed)
        changed = changed - frequency * counts - presence * (counts > 0)
        length = values["num_output_tokens"][:, None] + on_path.sum(-1)
        held = torch.where((length < values["min_tokens"][:, None])[:, :, None], float("-inf"), 0.0)
        changed.scatter_add_(2, ends, held.expand(ends.shape).contiguous())
        return changed.scatter_(2, bad, float("-inf")).view(logits.shape)

    return run


def _case(batch_size, tree, vocab_size=VOCABULARY):
    topk, spec_steps, num_nodes = tree
    sizes = {"topk": topk, "spec_steps": spec_steps, "num_nodes": num_nodes, "vocab_size": vocab_size}
    return Case(
        f"K/S/N={topk}/{spec_steps}/{num_nodes} B={batch_size}{of_vocabulary(vocab_size)}",
        {"batch_size": batch_size} | sizes,
        is_checked=batch_size * num_nodes <= 512,
        is_headline=(batch_size, num_nodes) == (8, 8),
    )


BENCHMARK = Benchmark(
    path="sampling.penalize_logits",
    cases=[
        *(_case(batch_size, TREES[0]) for batch_size in (1, 8, 32, 128)),
        *(_case(batch_size, TREES[1]) for batch_size in (1, 8, 32)),
        _case(ODD_BATCH, TREES[0], LARGE_VOCABULARY),
    ],
    small_cases=[_case(2, (4, 3, 8), vocab_size=300)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
