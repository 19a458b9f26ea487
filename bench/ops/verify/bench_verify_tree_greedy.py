"""verify_tree_greedy from token ids, at three accepted lengths, and from logits, with the argmax in every provider."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.harness.inputs import LARGE_VOCABULARY, ODD_BATCH, TREES, VOCABULARY, accepted_tree, decisive_logits
from bench.harness.torch_walk import prepare_walk
from bench.peers import sgl_kernel, sglang_triton
from bench.run import main


def make(device, batch_size, topk, spec_steps, num_nodes, vocab_size, accepted, from_logits):
    """The target follows a deepest path for `accepted` drafts."""
    values = accepted_tree("cpu", batch_size, topk, spec_steps, num_nodes, vocab_size)
    depth = values.pop("positions").view(batch_size, num_nodes) - 1024
    # nobody carries the token after the draft at depth `accepted`
    values["target_predict"] = torch.where(depth == accepted, vocab_size, values["target_predict"])
    values = {name: value.to(device) for name, value in values.items()}
    if from_logits:
        values["target_logits"] = decisive_logits(values.pop("target_predict").flatten() % vocab_size, vocab_size)
    return values | {"spec_steps": spec_steps}


def count_bytes(batch_size, topk, spec_steps, num_nodes, vocab_size, accepted, from_logits):
    """The words of the visited nodes and the outputs; from logits, the rows of the visited nodes."""
    visited = accepted + 1
    words = 8 * (4 * visited + 1) + 4 * (num_nodes + spec_steps + 2)
    return batch_size * (words + (2 * vocab_size * visited if from_logits else 0))


def prepare_torch(values):
    walk = prepare_walk(values)
    shape = values["candidates"].shape

    def run():
        if "target_logits" in values:
            return walk(values["target_logits"].argmax(-1).view(shape))
        return walk(values["target_predict"])

    return run


def _case(batch_size, tree, from_logits, vocab_size=VOCABULARY, accepted=None):
    topk, spec_steps, num_nodes = tree
    sizes = {"batch_size": batch_size, "topk": topk, "spec_steps": spec_steps, "num_nodes": num_nodes}
    depth = "full depth" if accepted is None else f"accepts {accepted}"
    name = f"K/S/N={topk}/{spec_steps}/{num_nodes} B={batch_size} {f'V={vocab_size}' if from_logits else 'ids'} {depth}"
    sizes |= {"vocab_size": vocab_size, "accepted": spec_steps if accepted is None else accepted}
    # the reference sorts every row
    is_checked = not from_logits or batch_size * num_nodes <= 64
    return Case(name, sizes | {"from_logits": from_logits}, is_checked)


BENCHMARK = Benchmark(
    path="verify.verify_tree_greedy",
    cases=[
        *(_case(batch_size, tree, False) for tree in TREES for batch_size in (1, 8, 32, 128)),
        *(_case(batch_size, TREES[1], False, accepted=accepted) for accepted in (0, 3) for batch_size in (1, 8, 32)),
        *(_case(batch_size, tree, True) for tree in TREES[:2] for batch_size in (1, 8, 32)),
        _case(ODD_BATCH, TREES[0], True, vocab_size=LARGE_VOCABULARY),
    ],
    small_cases=[_case(2, (4, 3, 8), from_logits, vocab_size=300) for from_logits in (False, True)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    peers={
        "sgl_kernel": sgl_kernel.verify_tree_greedy,
        "sgl_kernel_bare": sgl_kernel.verify_tree_greedy_bare,
        "sglang_triton": sglang_triton.verify_tree_greedy,
    },
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
