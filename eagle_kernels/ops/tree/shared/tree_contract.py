"""What the ops that build trees have in common on the host: checks, outputs, tuning rows and launch arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ....runtime import check
from ....runtime.language import next_power_of_2
from .tree_mask import TreeMaskMode, mask_spec

MAX_NODES = 256

# With a warp for every 16 nodes the N x N comparisons stay in registers, and more warps wait for each other; past 64
# nodes that many warps do not find the registers they need.
# bench/results/NVIDIA_H100_80GB_HBM3/tuning/build_tree.txt
TUNING = {"default": {"nodes_per_warp": 16, "nodes_per_warp_past_64": 32}}
BLOCK_BATCH = 128
# Prefixes are filled some rows and words at a time; more programs than FILL_PROGRAMS would wait for each other.
BLOCK_ROW = 4
BLOCK_FILL = 128
FILL_PROGRAMS = 1024


class Output(NamedTuple):
    """What `build_tree` and `tree_from_parents` return, in SGLang's order."""

    tree_mask: torch.Tensor
    positions: torch.Tensor
    retrieve_index: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor
    draft_tokens: torch.Tensor


def candidates_tree_contract(args: check.Arguments, num_nodes: int) -> Output:
    """Checks what all ops that build trees of candidates take, and describes the tree."""
    topk = args.integer("topk", 1)
    spec_steps = args.integer("spec_steps", 1)
    output = tree_contract(args, num_nodes)
    num_candidates = topk + (spec_steps - 1) * topk * topk
    if num_nodes - 1 > num_candidates:
        rule = f"be at most 1 + topk + (spec_steps - 1) * topk^2 = {1 + num_candidates}"
        args.fail("num_verify_tokens", rule, num_nodes)
    args.tensor("parent_list", ("B", topk * (spec_steps - 1) + 1), check.INTEGER)
    return output


def tree_contract(args: check.Arguments, num_nodes: int) -> Output:
    """Checks what all ops that build trees take, the batch and the mask's layout, and describes the tree."""
    values = args.values
    mode = args.choice("tree_mask_mode", list(TreeMaskMode))
    if values["prefix_is_set"] and (mode != TreeMaskMode.FULL_MASK or values.get("out") is None):
        args.fail("prefix_is_set", "come with 'full_mask' and an out buffer that holds the prefix", True)
    args.tensor("verified_id", ("B",), check.INTEGER)
    args.tensor("seq_lens", ("B",), check.INTEGER)
    args.debug("seq_lens", "not be negative", lambda: values["seq_lens"] >= 0)
    batch_size = args.size("B")
    mask = mask_spec(args, mode, batch_size, num_nodes, num_nodes, args.buffer(0))
    node = args.spec((batch_size, num_nodes), torch.int64)
    flat = args.spec((batch_size * num_nodes,), torch.int64)
    return Output(mask, flat, node, node, node, flat)


def tree_grid(batch_size: int, num_nodes: int, mode: str, prefix_is_set: bool) -> tuple[int, int]:
    """Returns a grid of one program for each tree, and for a FULL_MASK of those that fill prefixes.

    These are enough for a GPU, and at most one for each row.
    """
    if mode != TreeMaskMode.FULL_MASK or prefix_is_set:
        return batch_size, 1
    return batch_size, 1 + min(num_nodes, max(1, FILL_PROGRAMS // max(batch_size, 1)))


def tree_arguments(tree_mask: torch.Tensor, num_nodes: int, mode: str, tuned: dict) -> dict:
    """Returns the launch arguments of a kernel that stores trees: sizes, constants and the number of warps."""
    block_node = max(8, next_power_of_2(num_nodes))
    nodes_per_warp = tuned["nodes_per_warp" if block_node <= 64 else "nodes_per_warp_past_64"]
    return {
        "mask_size": tree_mask.numel(),
        "NUM_NODES": num_nodes,
        "NUM_WORDS": -(-num_nodes // 64),
        "MASK_MODE": str(mode),
        "IS_ALIGNED": mode == TreeMaskMode.FULL_MASK and tree_mask.data_ptr() % 16 == 0,
        "BLOCK_NODE": block_node,
        "BLOCK_BATCH": BLOCK_BATCH,
        "BLOCK_ROW": BLOCK_ROW,
        "BLOCK_FILL": BLOCK_FILL,
        "NUM_ROUNDS": (num_nodes - 1).bit_length(),
        "num_warps": max(block_node // nodes_per_warp, 1),
    }
