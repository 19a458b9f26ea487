"""build_tree over tree sizes, batch sizes and mask layouts."""

from __future__ import annotations

import sys

import torch

from bench.harness import Benchmark, Case, Floor, Unavailable
from bench.harness.inputs import TREES, drafts
from bench.peers import sgl_kernel, sglang_triton
from bench.peers.torch_compile import compiled
from bench.run import main


def make(device, batch_size, topk, spec_steps, num_nodes, tree_mask_mode, prefix):
    values = drafts(device, batch_size, topk, spec_steps, num_nodes)
    # within a quarter of `prefix`, in pairs that sum up to twice of it: the mask's size is known from the batch's
    offset = torch.randint(-prefix // 4, prefix // 4 + 1, (batch_size // 2,))
    unpaired = torch.zeros(batch_size % 2, dtype=torch.int64)
    seq_lens = prefix + torch.cat([offset, -offset, unpaired])[torch.randperm(batch_size)]
    values["seq_lens"] = seq_lens.to(device)
    seq_lens_sum = batch_size * prefix if tree_mask_mode == "full_mask" else None
    return values | {"tree_mask_mode": tree_mask_mode, "seq_lens_sum": seq_lens_sum}


def count_bytes(batch_size, topk, spec_steps, num_nodes, tree_mask_mode, prefix):
    words_read = 2 * num_nodes + topk * (spec_steps - 1) + 1
    row_bytes = {
        "packed": 8 * -(-num_nodes // 64),
        "qlen_only": num_nodes,
        "qlen_only_bitpacking": 1 if num_nodes <= 8 else 2 if num_nodes <= 16 else 4,
        "full_mask": prefix + num_nodes,
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
    num_bits = next((bits for bits in (8, 16, 32) if num_nodes <= bits), 64)
    words = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}
    num_cells = num_nodes * ((values["seq_lens_sum"] or 0) + batch_size * num_nodes)

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
        elif mode == "qlen_only_bitpacking":
            outputs["tree_mask"] = (visible.long() << node).sum(-1).to(words[num_bits])
        elif mode == "qlen_only":
            outputs["tree_mask"] = visible.bool()
        elif mode == "full_mask":
            width = seq_lens + num_nodes
            row = ((width.cumsum(0) - width) * num_nodes)[:, None] + node * width[:, None] + seq_lens[:, None]
            tree_mask = torch.ones(num_cells, dtype=torch.bool, device=device)
            outputs["tree_mask"] = tree_mask.scatter_(0, (row[:, :, None] + node).flatten(), visible.bool().flatten())
        return outputs

    return run


def prepare_torch_compile(values):
    if len(values["seq_lens"]) != 8:
        raise Unavailable("torch_compile is timed at B=8 only, it takes seconds to compile a case")
    return compiled(prepare_torch)(values)


def _case(batch_size, tree, mode, prefix=1024):
    topk, spec_steps, num_nodes = tree
    sizes = {"batch_size": batch_size, "topk": topk, "spec_steps": spec_steps, "num_nodes": num_nodes}
    name = f"K/S/N={topk}/{spec_steps}/{num_nodes} B={batch_size} {mode}"
    if mode == "full_mask":
        name += f" L={prefix}"
    is_headline = batch_size == 8 and (
        mode == "qlen_only" or (num_nodes == 64 and mode == "packed") or (num_nodes == 64 and prefix > 1024)
    )
    return Case(name, sizes | {"tree_mask_mode": mode, "prefix": prefix}, is_headline=is_headline)


BATCH_SIZES = (1, 8, 32, 128)

BENCHMARK = Benchmark(
    path="tree.build_tree",
    cases=[
        *(_case(b, tree, mode) for mode in ("packed", "qlen_only") for tree in TREES for b in BATCH_SIZES),
        *(_case(b, tree, "qlen_only_bitpacking") for tree in ((4, 3, 8), (8, 5, 32)) for b in BATCH_SIZES),
        *(_case(b, tree, "full_mask") for tree in TREES for b in BATCH_SIZES),
        *(_case(b, (8, 5, 64), "full_mask", prefix=8192) for b in BATCH_SIZES),
    ],
    small_cases=[
        _case(3, (4, 3, 8), mode, prefix=20) for mode in ("packed", "qlen_only", "qlen_only_bitpacking", "full_mask")
    ],
    make=make,
    count_bytes=count_bytes,
    providers={"torch": prepare_torch},
    peers={
        "torch_compile": prepare_torch_compile,
        "sgl_kernel": sgl_kernel.build_tree,
        "sglang_triton": sglang_triton.build_tree,
    },
    # the goal for FULL_MASK, whose bytes are written: at most 1.3 of this
    floor=Floor("write", 4.0),
)

if __name__ == "__main__":
    sys.exit(main(benchmarks=[BENCHMARK]))
