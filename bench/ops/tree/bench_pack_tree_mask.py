"""pack_tree_mask over mask sizes, batch sizes and layouts."""

import torch

from bench.harness import grid
from bench.peers.torch_compile import compiled

PREFIX = 1024

CASES = [
    *grid(shape=[(8, 8), (8, 32), (64, 64), (256, 256)], batch_size=[1, 8, 32, 128], tree_mask_mode="qlen_only"),
    *grid(shape=(64, 64), batch_size=[1, 8, 32, 128], tree_mask_mode="full_mask"),
]
SMALL_CASES = [
    {"batch_size": 2, "shape": (5, 70), "tree_mask_mode": "qlen_only"},
    {"batch_size": 2, "shape": (8, 8), "tree_mask_mode": "full_mask"},
]

name = "Nq/Nk={shape[0]}/{shape[1]} B={batch_size} {tree_mask_mode}".format


def make(device, batch_size, shape, tree_mask_mode):
    mask = torch.rand(batch_size, *shape, device=device) < 0.2
    if tree_mask_mode == "qlen_only":
        return {"tree_mask": mask}
    return {
        "tree_mask": torch.nn.functional.pad(mask, (PREFIX, 0), value=True).flatten(),
        "seq_lens": torch.full((batch_size,), PREFIX, device=device),
        "num_verify_tokens": shape[1],
        "tree_mask_mode": tree_mask_mode,
    }


def count_bytes(batch_size, shape, tree_mask_mode):
    num_rows, num_keys = shape
    return batch_size * num_rows * (num_keys + 8 * -(-num_keys // 64))


def prepare_torch(values):
    """A shift and a sum per word; FULL_MASK cells are gathered by their index first."""
    tree_mask, num_nodes = values["tree_mask"], values.get("num_verify_tokens")
    bit = torch.arange(64, device=tree_mask.device)

    def run():
        cells = tree_mask
        if num_nodes is not None:
            seq_lens, node = values["seq_lens"], torch.arange(num_nodes, device=tree_mask.device)
            width = (seq_lens + num_nodes)[:, None, None]
            start = num_nodes * (width.cumsum(0) - width)
            cells = tree_mask[start + node[:, None] * width + seq_lens[:, None, None] + node]
        words = [(part.long() << bit[: part.shape[-1]]).sum(-1) for part in cells.split(64, dim=-1)]
        return torch.stack(words, dim=-1)

    return run


PEERS = {"torch_compile": compiled(prepare_torch)}
