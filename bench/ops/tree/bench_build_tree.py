"""build_tree over tree sizes, batch sizes and mask layouts."""

import torch

from bench.harness import Floor, Unavailable, grid
from bench.harness.inputs import TREES, Tree, drafts
from bench.harness.torch_forms import prepare_build
from bench.peers import sgl_kernel, sglang_triton
from bench.peers.torch_compile import compiled

BATCH_SIZES = [1, 8, 32, 128]
DEFAULTS = {"prefix": 1024}
CASES = [
    *grid(tree_mask_mode=["packed", "qlen_only"], tree=TREES, batch_size=BATCH_SIZES),
    *grid(tree_mask_mode="qlen_only_bitpacking", tree=[TREES[0], Tree(8, 5, 32)], batch_size=BATCH_SIZES),
    *grid(tree_mask_mode="full_mask", tree=TREES, batch_size=BATCH_SIZES),
    *grid(tree_mask_mode="full_mask", tree=TREES[1], batch_size=BATCH_SIZES, prefix=8192),
]
SMALL_CASES = grid(
    batch_size=3, tree=TREES[0], tree_mask_mode=["packed", "qlen_only", "qlen_only_bitpacking", "full_mask"], prefix=20
)
HEADLINES = [*(f"{tree} B=8 qlen_only" for tree in TREES), f"{TREES[1]} B=8 packed", f"{TREES[1]} B=8 full_mask L=8192"]
# the goal for FULL_MASK, whose bytes are written: at most 1.3 of this
FLOOR = Floor("write", 4.0)


def name(batch_size, tree, tree_mask_mode, prefix):
    return f"{tree} B={batch_size} {tree_mask_mode}" + (f" L={prefix}" if tree_mask_mode == "full_mask" else "")


def make(device, batch_size, tree, tree_mask_mode, prefix):
    values = drafts(device, batch_size, tree)
    # within a quarter of `prefix`, in pairs that sum up to twice of it: the mask's size is known from the batch's
    offset = torch.randint(-prefix // 4, prefix // 4 + 1, (batch_size // 2,))
    unpaired = torch.zeros(batch_size % 2, dtype=torch.int64)
    seq_lens = prefix + torch.cat([offset, -offset, unpaired])[torch.randperm(batch_size)]
    values["seq_lens"] = seq_lens.to(device)
    seq_lens_sum = batch_size * prefix if tree_mask_mode == "full_mask" else None
    return values | {"tree_mask_mode": tree_mask_mode, "seq_lens_sum": seq_lens_sum}


def count_bytes(batch_size, tree, tree_mask_mode, prefix):
    topk, spec_steps, num_nodes = tree
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
    build, seq_lens = prepare_build(values), values["seq_lens"]
    batch_size, device = len(seq_lens), seq_lens.device
    node = torch.arange(num_nodes, device=device)
    num_bits = next((bits for bits in (8, 16, 32) if num_nodes <= bits), 64)
    words = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}
    num_cells = num_nodes * ((values["seq_lens_sum"] or 0) + batch_size * num_nodes)

    def run():
        kept = values["top_scores_index"]
        slot = kept // topk
        parent_candidate = values["parent_list"].gather(1, slot)
        parent = torch.where(slot == 0, 0, torch.searchsorted(kept, parent_candidate) + 1)
        visible, outputs = build(parent)
        if mode == "qlen_only_bitpacking":
            outputs["tree_mask"] = (visible.long() << node).sum(-1).to(words[num_bits])
        elif mode == "full_mask":
            width = seq_lens + num_nodes
            row = ((width.cumsum(0) - width) * num_nodes)[:, None] + node * width[:, None] + seq_lens[:, None]
            tree_mask = torch.ones(num_cells, dtype=torch.bool, device=device)
            outputs["tree_mask"] = tree_mask.scatter_(0, (row[:, :, None] + node).flatten(), visible.bool().flatten())
        return outputs

    return run


def _compile_at_8(values):
    if len(values["seq_lens"]) != 8:
        raise Unavailable("torch_compile is timed at B=8 only, it takes seconds to compile a case")
    return compiled(prepare_torch)(values)


PEERS = {"torch_compile": _compile_at_8, "sgl_kernel": sgl_kernel.build_tree, "sglang_triton": sglang_triton.build_tree}
