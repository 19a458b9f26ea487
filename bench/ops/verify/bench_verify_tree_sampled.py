"""verify_tree_sampled with and without filters; the target's distribution is all but decided on a deepest path."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.harness.inputs import VOCABULARY, accepted_tree, decisive_logits
from bench.harness.torch_sampling import sample
from bench.harness.torch_walk import prepare_walk
from bench.run import main


def make(device, batch_size, topk, spec_steps, num_nodes, vocab_size, is_filtered):
    values = accepted_tree(device, batch_size, topk, spec_steps, num_nodes, vocab_size)
    values["target_logits"] = decisive_logits(values.pop("target_predict").flatten(), vocab_size)
    values["seeds"] = torch.randint(2**60, (batch_size,), device=device)
    values["temperature"] = torch.ones(batch_size, device=device)
    if is_filtered:
        values["top_k"] = torch.full((batch_size,), 50, dtype=torch.int32, device=device)
        values["top_p"] = torch.full((batch_size,), 0.9, device=device)
    return values | {"spec_steps": spec_steps}


def count_bytes(batch_size, topk, spec_steps, num_nodes, vocab_size, is_filtered):
    """One read of the visited rows."""
    return batch_size * (spec_steps + 1) * vocab_size * 2


def prepare_torch(values):
    """Samples all nodes, then walks."""
    walk = prepare_walk(values)
    shape = values["candidates"].shape
    per_node = [
        None if values.get(name) is None else values[name].repeat_interleave(shape[1])
        for name in ("temperature", "top_k", "top_p")
    ]
    return lambda: walk(sample(values["target_logits"], *per_node).view(shape))


def _case(batch_size, tree, is_filtered, vocab_size=VOCABULARY):
    topk, spec_steps, num_nodes = tree
    sizes = {"batch_size": batch_size, "topk": topk, "spec_steps": spec_steps, "num_nodes": num_nodes}
    filters = "top-k 50 top-p 0.9" if is_filtered else "no filters"
    # the reference draws noise for every row
    is_checked = batch_size * num_nodes <= 64
    name = f"K/S/N={topk}/{spec_steps}/{num_nodes} B={batch_size} {filters}"
    return Case(name, sizes | {"vocab_size": vocab_size, "is_filtered": is_filtered}, is_checked)


BENCHMARK = Benchmark(
    path="verify.verify_tree_sampled",
    cases=[
        _case(batch_size, tree, is_filtered)
        for is_filtered in (False, True)
        for tree, batch_sizes in (((4, 3, 8), (1, 8, 32, 128)), ((8, 5, 64), (1, 8, 32)))
        for batch_size in batch_sizes
    ],
    small_cases=[_case(2, (4, 3, 8), is_filtered, vocab_size=300) for is_filtered in (False, True)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
