"""pack_tree_mask over mask sizes, batch sizes and layouts."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.peers.torch_compile import compiled
from bench.run import main

PREFIX = 1024


def make(device, batch_size, num_rows, num_keys, tree_mask_mode):
    mask = torch.rand(batch_size, num_rows, num_keys, device=device) < 0.2
    if tree_mask_mode == "qlen_only":
        return {"tree_mask": mask}
    return {
        "tree_mask": torch.nn.functional.pad(mask, (PREFIX, 0), value=True).flatten(),
        "seq_lens": torch.full((batch_size,), PREFIX, device=device),
        "num_verify_tokens": num_keys,
        "tree_mask_mode": tree_mask_mode,
    }


def count_bytes(batch_size, num_rows, num_keys, tree_mask_mode):
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


def _case(batch_size, num_rows, num_keys, mode):
    sizes = {"batch_size": batch_size, "num_rows": num_rows, "num_keys": num_keys, "tree_mask_mode": mode}
    return Case(f"Nq/Nk={num_rows}/{num_keys} B={batch_size} {mode}", sizes)


BENCHMARK = Benchmark(
    path="tree.pack_tree_mask",
    cases=[
        *(_case(b, *size, "qlen_only") for size in ((8, 8), (8, 32), (64, 64), (256, 256)) for b in (1, 8, 32, 128)),
        *(_case(b, 64, 64, "full_mask") for b in (1, 8, 32, 128)),
    ],
    small_cases=[_case(2, 5, 70, "qlen_only"), _case(2, 8, 8, "full_mask")],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    peers={"torch_compile": compiled(prepare_torch)},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
