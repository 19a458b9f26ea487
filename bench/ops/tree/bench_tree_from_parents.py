"""tree_from_parents over tree sizes, batch sizes and mask layouts."""

import torch

from bench.harness import grid
from bench.harness.torch_forms import prepare_build
from bench.peers.torch_compile import compiled

CASES = grid(tree_mask_mode=["packed", "qlen_only"], num_nodes=[8, 32, 64, 256], batch_size=[1, 8, 32, 128])
SMALL_CASES = grid(batch_size=2, num_nodes=8, tree_mask_mode=["packed", "qlen_only"])

name = "N={num_nodes} B={batch_size} {tree_mask_mode}".format


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
    build = prepare_build(values)
    return lambda: build(values["parents"])[1]


PEERS = {"torch_compile": compiled(prepare_torch)}
