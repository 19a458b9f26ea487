"""unpack_tree_mask over mask sizes, batch sizes, layouts and prefix lengths."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case
from bench.peers.torch_compile import compiled
from bench.run import main


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


def _case(batch_size, num_nodes, mode, prefix=0):
    sizes = {"batch_size": batch_size, "num_nodes": num_nodes, "tree_mask_mode": mode, "prefix": prefix}
    return Case(f"N={num_nodes} B={batch_size} {mode}" + (f" prefix={prefix}" if prefix else ""), sizes)


BENCHMARK = Benchmark(
    path="tree.unpack_tree_mask",
    cases=[
        *(_case(b, num_nodes, "qlen_only") for num_nodes in (8, 64, 256) for b in (1, 8, 32, 128)),
        *(_case(b, 64, "full_mask", 1024) for b in (1, 8, 32, 128)),
        *(_case(b, 64, "full_mask", 16384) for b in (1, 32)),
    ],
    small_cases=[_case(2, 9, "qlen_only"), _case(2, 8, "full_mask", 30)],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    peers={"torch_compile": compiled(prepare_torch)},
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
