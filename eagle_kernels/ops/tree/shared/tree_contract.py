"""What the ops that rank candidates or build trees have in common on the host: checks, outputs, tuning, the launch."""

from typing import NamedTuple

import torch

from ....runtime import check, tuning
from ....runtime.language import next_power_of_2
from ....runtime.launch import launch
from .tree_mask import TreeMaskMode, mask_spec

MAX_NODES = 256
MAX_CANDIDATES = 4096

# With a warp for every 16 nodes the N x N comparisons stay in registers, and more warps wait for each other; past 64
# nodes that many warps do not find the registers they need.
# bench/results/NVIDIA_H100_80GB_HBM3/tuning/build_tree.txt
TUNING = {"default": {"nodes_per_warp": 16, "nodes_per_warp_past_64": 32}}
# Few candidates are counted by one warp, which waits for no other; more than four warps wait longer than they count.
# bench/results/NVIDIA_H100_80GB_HBM3/tuning/build_tree.txt
RANKING_TUNING = {"default": {"candidates_per_warp": 128, "max_warps": 4}}
# More programs that fill prefixes would wait for each other.
FILL_PROGRAMS = 1024


class Output(NamedTuple):
    """What `build_tree` and `tree_from_parents` return, in SGLang's order."""

    tree_mask: torch.Tensor
    positions: torch.Tensor
    retrieve_index: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor
    draft_tokens: torch.Tensor


def count_candidates(values: dict) -> int:
    """Returns the candidates of all levels: topk of level 0, topk of each beam of another."""
    return values["topk"] + (values["spec_steps"] - 1) * values["topk"] ** 2


def candidates_tree_contract(args: check.Arguments) -> Output:
    """Checks what all ops that build trees of candidates take, and describes the tree."""
    topk = args.integer("topk", 1)
    spec_steps = args.integer("spec_steps", 1)
    output = tree_contract(args)
    num_nodes, most_nodes = args.values["num_verify_tokens"], 1 + count_candidates(args.values)
    if num_nodes > most_nodes:
        args.fail("num_verify_tokens", f"be at most 1 + topk + (spec_steps - 1) * topk^2 = {most_nodes}", num_nodes)
    args.tensor("parent_list", ("B", topk * (spec_steps - 1) + 1), check.INTEGER)
    return output


def tree_contract(args: check.Arguments) -> Output:
    """Checks what all ops that build trees take, the batch and the mask's layout, and describes the tree."""
    values, num_nodes = args.values, args.integer("num_verify_tokens", 1, MAX_NODES)
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


def candidates_contract(args: check.Arguments) -> int:
    """Checks the candidates of an op that ranks them, and returns their number."""
    args.tensor("candidate_scores", ("B", "C"), (torch.float32,), contiguous=1)
    args.tensor("candidate_tokens", ("B", "C"), check.INTEGER, contiguous=1)
    num_candidates = args.size("C")
    if num_candidates > MAX_CANDIDATES:
        args.fail("candidate_scores", f"have at most {MAX_CANDIDATES} candidates", num_candidates)
    return num_candidates


def ranking_warps(block_candidate: int, device: torch.device) -> int:
    """Returns the warps of a program that ranks this many candidates."""
    tuned = tuning.row(RANKING_TUNING, device)
    return min(max(block_candidate // tuned["candidates_per_warp"], 1), tuned["max_warps"])


def tree_warps(num_nodes: int, device: torch.device, least: int = 1) -> int:
    """Returns the warps of a program that builds a tree, at least `least` of them."""
    tuned, block_node = tuning.row(TUNING, device), next_power_of_2(num_nodes)
    nodes_per_warp = tuned["nodes_per_warp" if block_node <= 64 else "nodes_per_warp_past_64"]
    return max(block_node // nodes_per_warp, least)


def launch_trees(op: str, kernel, values: dict, out: Output, num_warps: int = 1, **arguments) -> None:
    """Launches a kernel that stores the trees `out`: a program for each, and for a FULL_MASK those that fill prefixes.
    These are enough for a GPU, and at most one for each row. values: the op's arguments. num_warps: the fewest."""
    (batch_size, num_nodes), mode = out.retrieve_index.shape, values["tree_mask_mode"]
    is_full = mode == TreeMaskMode.FULL_MASK
    num_fillers = 0
    if is_full and not values["prefix_is_set"]:
        num_fillers = min(num_nodes, max(1, FILL_PROGRAMS // max(batch_size, 1)))
    launch(
        op, kernel, (batch_size, 1 + num_fillers),
        verified_id_ptr=values["verified_id"], seq_lens_ptr=values["seq_lens"], out=out,
        mask_size=out.tree_mask.numel(),
        NUM_NODES=num_nodes, MASK_MODE=str(mode), IS_ALIGNED=is_full and out.tree_mask.data_ptr() % 16 == 0,
        num_warps=tree_warps(num_nodes, out.positions.device, num_warps), **arguments,
    )  # fmt: skip
