"""unpack_tree_mask over mask sizes, batch sizes, layouts and prefix lengths."""

import torch

from bench.harness import grid
from bench.peers.torch_compile import compiled

CASES = [
    *grid(num_nodes=[8, 64, 256], batch_size=[1, 8, 32, 128], tree_mask_mode="qlen_only", prefix=0),
    *grid(num_nodes=64, batch_size=[1, 8, 32, 128], tree_mask_mode="full_mask", prefix=1024),
    *grid(num_nodes=64, batch_size=[1, 32], tree_mask_mode="full_mask", prefix=16384),
]
SMALL_CASES = [
    {"batch_size": 2, "num_nodes": 9, "tree_mask_mode": "qlen_only", "prefix": 0},
    {"batch_size": 2, "num_nodes": 8, "tree_mask_mode": "full_mask", "prefix": 30},
]


def name(batch_size, num_nodes, tree_mask_mode, prefix):
    return f"N={num_nodes} B={batch_size} {tree_mask_mode}" + (f" prefix={prefix}" if prefix else "")


def make(device, batch_size, num_nodes, tree_mask_mode, prefix):
    words = torch.randint(-(2**63), 2**63 - 1, (batch_size, num_nodes, -(-num_nodes // 64)), device=device)
    values = {"tree_mask": words, "tree_mask_mode": tree_mask_mode}
    if tree_mask_mode == "full_mask":
        seq_lens = torch.full((batch_size,), prefix, device=device)
        values |= {"seq_lens": seq_lens, "seq_lens_sum": batch_size * prefix}
    return values


def count_bytes(batch_size, num_nodes, tree_mask_mode, prefix):
    return batch_size * num_nodes * (8 * -(-num_nodes // 64) + prefix + num_nodes)


def prepare_torch(values):
    """A shift per cell; the prefix of FULL_MASK by padding, which takes equal lengths, or a loop over requests."""
    words = values["tree_mask"]
    batch_size, num_nodes, _ = words.shape
    key = torch.arange(num_nodes, device=words.device)
    prefix = values.get("seq_lens_sum", 0) // batch_size

    def run():
        cells = (words[..., key // 64] >> (key % 64)) & 1 == 1
        if values["tree_mask_mode"] == "full_mask":
            cells = torch.nn.functional.pad(cells, (prefix, 0), value=True).flatten()
        return cells

    return run


PEERS = {"torch_compile": compiled(prepare_torch)}
