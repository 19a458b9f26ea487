"""verify_tree_sampled with and without filters; the target has all but decided on a deepest path or a part of it.

Elsewhere it has decided on other tokens, or, where a case says "flat off the path", its logits are standard normal.
The first are easy, the second hard for a search over probabilities, which the pipeline makes of all rows.
"""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case, Unavailable
from bench.harness.inputs import (
    LARGE_VOCABULARY,
    NARROW_LEAD,
    ODD_BATCH,
    TREES,
    VOCABULARY,
    accepted_tree,
    decisive_logits,
    ends_after,
    of_vocabulary,
)
from bench.harness.torch_sampling import sample
from bench.harness.torch_walk import prepare_walk
from bench.peers import sgl_kernel
from bench.run import main

# torch's own sort of more probabilities takes more memory than a GPU has
_MAX_SORTED = 1 << 29


def make(device, batch_size, topk, spec_steps, num_nodes, vocab_size, is_filtered, accepted, is_flat):
    values = accepted_tree("cpu", batch_size, topk, spec_steps, num_nodes, vocab_size)
    winners = ends_after(values, accepted, vocab_size).flatten()
    off_path = _off_path(values, winners.view(batch_size, num_nodes)).flatten().to(device)
    del values["target_predict"]
    values = {name: value.to(device) for name, value in values.items()}
    values["target_logits"] = decisive_logits(winners.to(device), vocab_size, NARROW_LEAD)
    if is_flat:
        place = winners[:, None].to(device)
        flat = torch.where(off_path[:, None], 0.0, NARROW_LEAD).to(torch.bfloat16)
        values["target_logits"].scatter_(1, place, flat)
    values["seeds"] = torch.randint(2**60, (batch_size,), device=device)
    values["temperature"] = torch.ones(batch_size, device=device)
    if is_filtered:
        values["top_k"] = torch.full((batch_size,), 50, dtype=torch.int32, device=device)
        values["top_p"] = torch.full((batch_size,), 0.9, device=device)
    return values | {"spec_steps": spec_steps}


def _off_path(values, winners):
    """Which nodes [B, N] the walk by the winners does not visit."""
    off_path = torch.ones_like(winners, dtype=torch.bool)
    first, sibling = values["retrieve_next_token"].tolist(), values["retrieve_next_sibling"].tolist()
    for request, tokens in enumerate(values["candidates"].tolist()):
        node = 0
        while node >= 0:
            off_path[request, node] = False
            winner, node = int(winners[request, node]), first[request][node]
            while node >= 0 and tokens[node] != winner:
                node = sibling[request][node]
    return off_path


def count_bytes(batch_size, topk, spec_steps, num_nodes, vocab_size, is_filtered, accepted, is_flat):
    """One read of the visited rows."""
    return batch_size * min(accepted + 1, num_nodes) * vocab_size * 2


def prepare_torch(values):
    """Samples all nodes, then walks."""
    if values["target_logits"].numel() > _MAX_SORTED:
        raise Unavailable(f"sorts no more than {_MAX_SORTED} probabilities")
    walk = prepare_walk(values)
    shape = values["candidates"].shape
    per_node = [
        None if values.get(name) is None else values[name].repeat_interleave(shape[1])
        for name in ("temperature", "top_k", "top_p")
    ]
    return lambda: walk(sample(values["target_logits"], *per_node).view(shape))


def _case(batch_size, tree, is_filtered, accepted=None, vocab_size=VOCABULARY, is_flat=False):
    topk, spec_steps, num_nodes = tree
    sizes = {"batch_size": batch_size, "topk": topk, "spec_steps": spec_steps, "num_nodes": num_nodes}
    filters = "top-k 50 top-p 0.9" if is_filtered else "no filters"
    depth = "full depth" if accepted is None else f"accepts {accepted}"
    sizes |= {"vocab_size": vocab_size, "is_filtered": is_filtered, "is_flat": is_flat}
    sizes |= {"accepted": spec_steps if accepted is None else accepted}
    # the reference draws noise for every row
    is_checked = batch_size * num_nodes <= 64
    is_headline = accepted is None and not is_flat and batch_size in ((8, 32) if is_filtered else (32,))
    name = f"K/S/N={topk}/{spec_steps}/{num_nodes} B={batch_size} {filters} {depth}"
    name += f"{' flat off the path' if is_flat else ''}{of_vocabulary(vocab_size)}"
    return Case(name, sizes, is_checked, is_headline)


_CASES = [
    _case(batch_size, tree, is_filtered, accepted)
    for is_filtered in (False, True)
    # three drafts are the whole depth of the smaller tree
    for tree, batch_sizes, depths in ((TREES[0], (1, 8, 32, 128), (0, None)), (TREES[1], (1, 8, 32), (0, 3, None)))
    for accepted in depths
    for batch_size in batch_sizes
]
_CASES += [
    _case(batch_size, tree, True, is_flat=True)
    for tree, batch_sizes in ((TREES[0], (1, 8, 32, 128)), (TREES[1], (1, 8, 32)))
    for batch_size in batch_sizes
]
_CASES += [_case(ODD_BATCH, TREES[0], is_filtered, vocab_size=LARGE_VOCABULARY) for is_filtered in (False, True)]
_BATCH_SIZES = [1 << exponent for exponent in range(9)]
_SWEEP = [
    *(_case(batch_size, tree, True) for tree in TREES[:2] for batch_size in _BATCH_SIZES),
    *(_case(8, (8, 5, num_nodes), True) for num_nodes in (1, 2, 4, 8, 16, 32, 64, 128, 256)),
]

BENCHMARK = Benchmark(
    path="sampling.verify_tree_sampled",
    cases=_CASES,
    small_cases=[
        _case(2, TREES[0], is_filtered, accepted, vocab_size=300)
        for is_filtered in (False, True)
        for accepted in (None, 0, 2)
    ],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    peers={"pipeline": sgl_kernel.verify_tree_sampled},
    # each once: two of the sweeps meet, and where they meet the cases
    sweep=list({case.name: case for case in _SWEEP if case not in _CASES}.values()),
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
