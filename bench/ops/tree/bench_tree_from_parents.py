"""tree_from_parents over tree sizes, batch sizes and mask layouts."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.peers.torch_compile import compiled
from bench.run import main


def make(device, batch_size, num_nodes, tree_mask_mode):
    """Random trees as retrieval makes them: most nodes go on where the one before ended."""
    node = torch.arange(1, num_nodes)
    branches = torch.rand(batch_size, num_nodes - 1) < 0.15
    elsewhere = (torch.rand(batch_size, num_nodes - 1) * node).long()
    values = {
        "verified_id": torch.randint(32000, (batch_size,)),
        "draft_tokens": torch.randint(32000, (batch_size, num_nodes - 1)),
        "parents": torch.where(branches, elsewhere, node - 1),
        "seq_lens": torch.full((batch_size,), 1024),
    }
    values = {name: value.to(device) for name, value in values.items()}
    return values | {"num_verify_tokens": num_nodes, "tree_mask_mode": tree_mask_mode}


def count_bytes(batch_size, num_nodes, tree_mask_mode):
    row_bytes = num_nodes if tree_mask_mode == "qlen_only" else 8 * -(-num_nodes // 64)
    return batch_size * num_nodes * (2 * 8 + 5 * 8 + row_bytes)


def prepare_torch(values):
    """Tensor operations over [B, N, N]: ancestors by matrix powers, links by comparison; of sound trees."""
    seq_lens, num_nodes = values["seq_lens"], values["num_verify_tokens"]
    batch_size, device = len(seq_lens), seq_lens.device
    node = torch.arange(num_nodes, device=device)
    retrieve_index = torch.arange(batch_size * num_nodes, device=device).view(batch_size, num_nodes)
    identity = torch.eye(num_nodes, device=device)
    num_rounds = (num_nodes - 1).bit_length()
    is_packed = values["tree_mask_mode"] == "packed"

    def run():
        parent = torch.nn.functional.pad(values["parents"], (1, 0), value=-1)
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
        if is_packed and num_nodes <= 64:
            outputs["tree_mask"] = (visible.long() << node).sum(-1, keepdim=True)
        elif not is_packed:
            outputs["tree_mask"] = visible.bool()
        return outputs

    return run


def _case(batch_size, num_nodes, mode):
    sizes = {"batch_size": batch_size, "num_nodes": num_nodes, "tree_mask_mode": mode}
    return Case(f"N={num_nodes} B={batch_size} {mode}", sizes)


BENCHMARK = Benchmark(
    path="tree.tree_from_parents",
    cases=[_case(b, n, mode) for mode in ("packed", "qlen_only") for n in (8, 32, 64, 256) for b in (1, 8, 32, 128)],
    small_cases=[_case(2, 8, mode) for mode in ("packed", "qlen_only")],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    peers={"torch_compile": compiled(prepare_torch)},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
