"""verify_tree_typical; the target's distribution is all but decided on a deepest path, which is then accepted."""

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
    decisive_logits,
    of_vocabulary,
    parents,
)
from bench.run import main


def make(device, batch_size, topk, spec_steps, num_nodes, vocab_size):
    values = accepted_tree(device, batch_size, topk, spec_steps, num_nodes, vocab_size)
    values["target_logits"] = decisive_logits(values.pop("target_predict").flatten(), vocab_size)
    values["seeds"] = torch.randint(2**60, (batch_size,), device=device)
    for name, value in (("temperature", 1.0), ("epsilon", 0.09), ("delta", 0.3)):
        values[name] = torch.full((batch_size,), value, device=device)
    return values | {"spec_steps": spec_steps}


def count_bytes(batch_size, topk, spec_steps, num_nodes, vocab_size):
    """The rows of the path: those of other nodes with children depend on the tree."""
    return batch_size * (spec_steps + 1) * vocab_size * 2


def prepare_torch(values):
    """All rows' probabilities and entropies; parents and the ancestor mask, which a torch user has, are made once."""
    candidates, spec_steps = values["candidates"], values["spec_steps"]
    device, (batch_size, num_nodes) = candidates.device, candidates.shape
    parent = parents(values["retrieve_next_token"], values["retrieve_next_sibling"]).to(device)
    node, request = torch.arange(num_nodes, device=device), torch.arange(batch_size, device=device)
    visible = torch.eye(num_nodes, dtype=torch.bool, device=device).expand(batch_size, -1, -1).clone()
    for child in range(1, num_nodes):
        visible[:, child] |= visible[request, parent[:, child]]
    depth = visible.sum(-1) - 1
    above = parent.clamp(min=0)

    def run():
        scaled = values["target_logits"].float() / values["temperature"].repeat_interleave(num_nodes)[:, None]
        probs = torch.softmax(scaled, dim=-1).view(batch_size, num_nodes, -1)
        entropy = torch.special.entr(probs).sum(-1)
        limit = torch.minimum(values["epsilon"][:, None], values["delta"][:, None] * torch.exp(-entropy))
        is_likely = probs[request[:, None], above, candidates] > limit.gather(1, above)
        is_likely[:, 0] = True
        is_accepted = (is_likely[:, None, :] | ~visible).all(-1)
        last = torch.where(is_accepted, depth, -1).argmax(1)
        bonus = torch.multinomial(probs[request, last], 1)[:, 0]
        on_path = visible[request, last]
        after = torch.full_like(candidates, -1).scatter(1, torch.where(on_path, above, 0), candidates)
        after[request, last] = bonus
        path = torch.where(on_path, node, num_nodes).sort(dim=1).values[:, : spec_steps + 1]
        return {
            "accept_index": torch.where(path < num_nodes, path + request[:, None] * num_nodes, -1).int(),
            "accept_token_num": depth[request, last].int(),
        }

    return run


def _case(batch_size, tree, vocab_size=VOCABULARY):
    topk, spec_steps, num_nodes = tree
    sizes = {"batch_size": batch_size, "topk": topk, "spec_steps": spec_steps, "num_nodes": num_nodes}
    # the reference works in float64 on every row
    is_checked = batch_size * num_nodes <= 64
    name = f"K/S/N={topk}/{spec_steps}/{num_nodes} B={batch_size}{of_vocabulary(vocab_size)}"
    return Case(name, sizes | {"vocab_size": vocab_size}, is_checked)


BENCHMARK = Benchmark(
    path="verify.verify_tree_typical",
    cases=[
        *(_case(batch_size, tree) for tree in TREES[:2] for batch_size in (1, 8, 32)),
        _case(ODD_BATCH, TREES[0], LARGE_VOCABULARY),
    ],
    small_cases=[_case(2, (4, 3, 8), vocab_size=300)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
