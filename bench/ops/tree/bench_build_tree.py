"""build_tree over tree sizes, batch sizes and mask layouts."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.harness.inputs import TREES, drafts
from bench.peers import sgl_kernel
from bench.run import main

PREFIX = 1024


def make(device, batch_size, topk, spec_steps, num_nodes, tree_mask_mode):
    values = drafts(device, batch_size, topk, spec_steps, num_nodes)
    seq_lens_sum = batch_size * PREFIX if tree_mask_mode == "full_mask" else None
    return values | {"tree_mask_mode": tree_mask_mode, "seq_lens_sum": seq_lens_sum}


def count_bytes(batch_size, topk, spec_steps, num_nodes, tree_mask_mode):
    words_read = 2 * num_nodes + topk * (spec_steps - 1) + 1
    row_bytes = {
        "packed": 8 * -(-num_nodes // 64),
        "qlen_only": num_nodes,
        "full_mask": PREFIX + num_nodes,
    }[tree_mask_mode]
    return batch_size * (8 * words_read + num_nodes * (5 * 8 + row_bytes))


def prepare_torch(values):
    """Tensor operations over [B, N, N]: parents by search, ancestors by matrix powers, links by comparison."""
    topk, num_nodes, mode = values["topk"], values["num_verify_tokens"], values["tree_mask_mode"]
    seq_lens = values["seq_lens"]
    batch_size, device = len(seq_lens), seq_lens.device
    node = torch.arange(num_nodes, device=device)
    retrieve_index = torch.arange(batch_size * num_nodes, device=device).view(batch_size, num_nodes)
    identity = torch.eye(num_nodes, device=device)
    num_rounds = (num_nodes - 1).bit_length()

    def run():
        kept = values["top_scores_index"]
        slot = kept // topk
        parent_candidate = values["parent_list"].gather(1, slot)
        parent = torch.where(slot == 0, 0, torch.searchsorted(kept, parent_candidate) + 1)
        parent = torch.nn.functional.pad(parent, (1, 0), value=-1)
        visible = (parent[:, :, None] == node).float() + identity
        for _ in range(num_rounds):
            visible = (visible @ visible).clamp(max=1.0)
        depth = visible.sum(-1).long() - 1
        is_child = parent[:, None, :] == node[:, None]
        is_sibling = (parent[:, None, :] == parent[:, :, None]) & (parent >= 0)[:, :, None]
        is_later_sibling = is_sibling & (node > node[:, None])
        outputs = {
            "positions": (seq_lens[:, None] + depth).flatten(),
            "retrieve_index": retrieve_index,
            "retrieve_next_token": torch.where(is_child.any(-1), is_child.int().argmax(-1), -1),
            "retrieve_next_sibling": torch.where(is_later_sibling.any(-1), is_later_sibling.int().argmax(-1), -1),
            "draft_tokens": torch.cat([values["verified_id"][:, None], values["draft_tokens"]], dim=1).flatten(),
        }
        if mode == "packed" and num_nodes <= 64:
            outputs["tree_mask"] = (visible.long() << node).sum(-1, keepdim=True)
        elif mode == "qlen_only":
            outputs["tree_mask"] = visible.bool()
        elif mode == "full_mask":
            # equal lengths, or a loop over requests
            outputs["tree_mask"] = torch.nn.functional.pad(visible.bool(), (PREFIX, 0), value=True).flatten()
        return outputs

    return run


def _case(batch_size, tree, mode):
    topk, spec_steps, num_nodes = tree
    sizes = {"batch_size": batch_size, "topk": topk, "spec_steps": spec_steps, "num_nodes": num_nodes}
    return Case(f"K/S/N={topk}/{spec_steps}/{num_nodes} B={batch_size} {mode}", sizes | {"tree_mask_mode": mode})


BENCHMARK = Benchmark(
    path="tree.build_tree",
    cases=[
        *(_case(b, tree, mode) for mode in ("packed", "qlen_only") for tree in TREES for b in (1, 8, 32, 128)),
        *(_case(b, (8, 5, 64), "full_mask") for b in (1, 8, 32, 128)),
    ],
    small_cases=[_case(2, (4, 3, 8), mode) for mode in ("packed", "qlen_only", "full_mask")],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    peers={"sgl_kernel": sgl_kernel.build_tree},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
