"""Greedy verification: follows the target's argmax through the tree.

Computes: EAGLE (arXiv 2401.15077) with the first-child / next-sibling walk of SGLang. Under accept_all and simulate
    planted tokens replace the target's (`accept_policy.py`); rows are read as always.
Invariants: A target id outside int32 counts as -1. Results of a request do not depend on the batch around it.
Grid:
    (B,), one program walks one tree. From logits every row is cut into slices, (rows, slices), one program each:
    all rows, then walk     every node's row is scanned at once
    level by level          a launch per level scans the rows of the nodes that the walks have reached; its programs
                            first finish the level before. A walk that has ended costs no bytes.
    A launch takes as long as reading some MiB of logits: shapes alone decide (`scans_all_rows`), and both give the same
    bits.
Launches: 1 from ids; from logits 2 for all rows, S + 2 level by level
Traffic: from ids: 5 words a node; from logits: V * element size for all B * N rows, or at most B * (S + 1) visited
    ones.
"""

from __future__ import annotations

import math

import torch

from ...primitives.accept_policy import check_policy, next_node, plant, plant_path
from ...primitives.dependent_launch import await_predecessor
from ...primitives.ordering import LOWEST_KEY
from ...primitives.random import Coins
from ...primitives.tree_walk import (
    Output,
    Path,
    Walk,
    all_depths,
    all_nodes,
    check_tree,
    find_child,
    follow,
    is_own,
    load_nodes,
    output_arguments,
    store_path,
    store_walk,
    token_ids,
    tree_arguments,
)
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import bundle, launch, launcher
from .shared.argmax import slice_key, winner

# One warp walks: what it looks up lies in its own registers.
TUNING = {"default": {"num_warps": 1}}
# bench/results/NVIDIA_H100_80GB_HBM3/tuning/verify_tree_greedy.txt
ROWS_TUNING = {"default": {"BLOCK_VOCAB": 8192, "num_warps": 4}}
LEVEL_TUNING = {"default": {"BLOCK_VOCAB": 2048, "num_warps": 1}}
# The bytes of logits that can be read in the time that one more level takes to launch and to find its nodes.
CHOICE_TUNING = {"default": {"level_bytes": 6 << 20}}


@triton.jit
def _verify_tree_greedy_kernel(
    links, target_predict_ptr, partial_keys_ptr, coins, out,
    SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr, ACCEPT_POLICY: tl.constexpr, KEEPS_UNVISITED: tl.constexpr,
    ANY_ORDER: tl.constexpr, NUM_SLICES: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Walks one tree by the target's ids, or by the keys [B, slices, N] of all rows."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    node = all_nodes(NUM_NODES)
    tree = load_nodes(links, request, NUM_NODES, ANY_ORDER)
    if target_predict_ptr is not None:
        place = request * NUM_NODES + node
        predicted = token_ids(tl.load(target_predict_ptr + place, mask=node < NUM_NODES, other=-1))
    else:
        keys = tl.full(node.shape, LOWEST_KEY, tl.int64)
        for part in tl.static_range(NUM_SLICES):
            place = (request * NUM_SLICES + part) * NUM_NODES + node
            keys = tl.maximum(keys, tl.load(partial_keys_ptr + place, mask=node < NUM_NODES, other=LOWEST_KEY))
        predicted = winner(keys)

    if ACCEPT_POLICY != "normal":
        predicted = plant_path(predicted, tree, request, coins, SPEC_STEPS, NUM_NODES, ACCEPT_POLICY)
    MOST_ACCEPTED: tl.constexpr = 0 if ACCEPT_POLICY == "reject_all" else SPEC_STEPS
    depth = follow(tree, predicted, request, MOST_ACCEPTED, NUM_NODES, ANY_ORDER)
    store_walk(out, request, Walk(tree.retrieved, predicted, depth), SPEC_STEPS, NUM_NODES, KEEPS_UNVISITED)


@triton.jit(do_not_specialize=["stride_logits_row"])
def _verify_tree_greedy_rows_kernel(
    target_logits_ptr, partial_keys_ptr, stride_logits_row,
    NUM_NODES: tl.constexpr, VOCAB_SIZE: tl.constexpr, NUM_SLICES: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Writes the key of one slice of any row, to [B, slices, N]."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    key = slice_key(
        target_logits_ptr + tl.multiple_of(row * stride_logits_row, ALIGNMENT), part, VOCAB_SIZE, BLOCK_VOCAB
    )
    tl.store(partial_keys_ptr + (row // NUM_NODES * NUM_SLICES + part) * NUM_NODES + row % NUM_NODES, key)


@triton.jit(do_not_specialize=["stride_logits_row", "level", "batch_size"])
def _verify_tree_greedy_level_kernel(
    links, target_logits_ptr, coins,
    path_ptr, partial_keys_ptr, planted_ptr,  # scratch
    stride_logits_row, level, batch_size,
    SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr, ACCEPT_POLICY: tl.constexpr, VOCAB_SIZE: tl.constexpr,
    NUM_SLICES: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK_VOCAB: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Steps one walk to its node of this level, path [level, B] (-1: ended), and scans a slice of that node's row.
    All programs of a request take the step, from what the launch before wrote to path and keys [level, B, slices].
    Under any policy but `normal` the token with which the step was taken goes to planted [level, B]."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slices = tl.arange(0, next_power_of_2(NUM_SLICES))
    tree = load_nodes(links, request, NUM_NODES)
    place = level * batch_size.to(tl.int64) + request
    above = place - batch_size
    parent = tl.load(path_ptr + above, mask=level > 0, other=-1)
    is_key = (slices < NUM_SLICES) & (level > 0)
    keys = tl.load(partial_keys_ptr + above * NUM_SLICES + slices, mask=is_key, other=LOWEST_KEY)
    if level == 0:
        own_root = (all_nodes(NUM_NODES) == 0) & is_own(tree.retrieved, request, NUM_NODES)
        current = tl.max(own_root.to(tl.int32)) - 1
    else:
        node = tl.maximum(parent, 0)
        token = winner(tl.max(keys))
        if ACCEPT_POLICY != "normal":
            token = plant(
                token, node, level - 1, tree, request, coins, SPEC_STEPS, NUM_NODES, ACCEPT_POLICY=ACCEPT_POLICY
            )
            if part == 0:
                tl.store(planted_ptr + above, token)
        child = next_node(find_child(tree, node, token), ACCEPT_POLICY)
        current = tl.where((parent >= 0) & (child > 0), child, -1)
    if part == 0:
        tl.store(path_ptr + place, current)
    key = tl.full([], LOWEST_KEY, tl.int64)  # where the walk has ended: the next level reads keys before it knows
    if current >= 0:
        offset = tl.multiple_of((request * NUM_NODES + current) * stride_logits_row, ALIGNMENT)
        key = slice_key(target_logits_ptr + offset, part, VOCAB_SIZE, BLOCK_VOCAB)
    tl.store(partial_keys_ptr + place * NUM_SLICES + part, key)


@triton.jit(do_not_specialize=["batch_size"])
def _verify_tree_greedy_path_kernel(
    links, path_ptr, partial_keys_ptr, planted_ptr, out, batch_size,
    SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr, KEEPS_UNVISITED: tl.constexpr, NUM_SLICES: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Writes the outputs of one walk from its path [S + 1, B], keys [S + 1, B, slices] and, if any, planted [S, B]."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    depth = all_depths(SPEC_STEPS)
    slices = tl.arange(0, next_power_of_2(NUM_SLICES))
    place = depth.to(tl.int64) * batch_size + request
    path = tl.load(path_ptr + place, mask=depth <= SPEC_STEPS, other=-1)
    is_key = (depth <= SPEC_STEPS)[:, None] & (slices < NUM_SLICES)[None, :]
    keys = tl.load(partial_keys_ptr + place[:, None] * NUM_SLICES + slices[None, :], mask=is_key, other=LOWEST_KEY)
    predicted = winner(tl.max(keys, axis=1))
    if planted_ptr is not None:
        is_planted = (path >= 0) & (depth < SPEC_STEPS)
        predicted = tl.where(is_planted, tl.load(planted_ptr + place, mask=is_planted, other=-1), predicted)
    store_path(out, links, request, Path(path, predicted), SPEC_STEPS, NUM_NODES, KEEPS_UNVISITED)


def contract(values: dict) -> Output:
    args = check.Arguments("verify_tree_greedy", values)
    output = check_tree(args)
    if args.exactly_one("target_predict", "target_logits") == "target_predict":
        dtype = getattr(values["target_predict"], "dtype", None)
        if dtype in check.FLOAT:
            args.fail("target_predict", "have dtype int32 or int64, and logits are target_logits", dtype)
        args.tensor("target_predict", ("B", "N"), check.INTEGER)
    else:
        args.tensor("target_logits", (args.size("B") * args.size("N"), "V"), check.FLOAT, contiguous=1)
        if args.size("V") == 0:
            args.fail("target_logits", "have at least one token a row", list(values["target_logits"].shape))
    check_policy(args)
    if values["accept_policy"] != "simulate":
        for name in ("seeds", "positions"):
            if values[name] is not None:
                args.fail(name, "come with accept_policy='simulate'", repr(values["accept_policy"]))
    if values["keep_unvisited"] and values.get("out") is None:
        args.fail("keep_unvisited", "come with out, whose predicts it keeps", True)
    if values["any_order"] and (values["target_predict"] is None or values["accept_policy"] != "normal"):
        args.fail("any_order", "come with target_predict and accept_policy='normal'", True)
    return output


def scans_all_rows(target_logits: torch.Tensor, num_visited: int, num_levels: int, level_bytes: int) -> bool:
    """Tells whether reading the rows off the paths takes less time than the launches that tell which they are."""
    num_rows, vocab_size = target_logits.shape
    return (num_rows - num_visited) * vocab_size * target_logits.element_size() <= num_levels * level_bytes


@launcher
def verify_tree_greedy(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor | None = None,
    target_logits: torch.Tensor | None = None,
    *,
    spec_steps: int,
    accept_policy: str = "normal",
    simulated_rates: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    keep_unvisited: bool = False,
    any_order: bool = False,
    out: Output | None = None,
) -> Output:
    """Verifies token trees greedily: follows the target's argmax, or given target ids, from the root down.

    If a child of the current node carries the target's token, that draft is accepted and becomes the current node;
    otherwise the token ends the walk as the bonus.
    Symbols: B requests, N nodes of a tree (1..1024), V tokens.

    Args:
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling: [B, N] int. Trees, as in `verify_tree`.
        target_predict: None or [B, N] int. The target's token at every node: this or target_logits.
        target_logits: None or [B * N, V] fp32, fp16 or bf16. Unit stride along V. Ties go to the lowest id; NaN is
            -inf.
        spec_steps: S, 0..1024: the most drafts to accept.
        accept_policy: "normal"; "reject_all" (no draft); or, for timing, with text that is not the target's,
            "accept_all" (always the first child) or "simulate" (the first child as often as simulated_rates say).
        simulated_rates: None or [S] fp32. For "simulate" only, in 0..1 and not increasing: the probability that at
            least 1, 2, .. S drafts are accepted.
        seeds: None or [B] int. For "simulate" only; with positions, they key its coins.
        positions: None or [B * N] int. Only the root's is read.
        keep_unvisited: leaves predicts off the path as they are; only with `out`.
        any_order: with target_predict and "normal" only, as in `verify_tree_coins`.
        out: three tensors to write into.

    Returns:
        A named tuple, as from `verify_tree`:
        predicts: [B * N] int32. The target's tokens, -1 off the path.
        accept_index: [B, S + 1] int32. -1 padded.
        accept_token_num: [B] int32.

    Raises:
        ValueError, TypeError: an argument breaks a rule above. EAGLE_KERNELS_DEBUG=1 also checks links and
            simulated_rates.

    Source:
        EAGLE, https://arxiv.org/abs/2401.15077; links and outputs as in SGLang's verify_tree_greedy. "accept_all" and
        "reject_all" are FastDeploy's, "simulate" is vLLM's synthetic acceptance.

    Example:
        >>> tree = [torch.tensor([x]) for x in ([3, 1, 2], [0, 1, 2], [1, -1, -1], [-1, 2, -1])]  # 3 above 1 and 2
        >>> step = eagle_kernels.verify_tree_greedy(*tree, torch.tensor([[2, 5, 7]]), spec_steps=2)
        >>> step.predicts.tolist(), step.accept_index.tolist()  # 2 is accepted; 7, not among its children, is the bonus
        ([2, -1, 7], [[0, 2, -1]])
    """
    values = locals()
    out = check.allocate("verify_tree_greedy", contract(values), out)
    device, (batch_size, num_nodes) = candidates.device, candidates.shape
    walk = tree_arguments(values) | {"coins": bundle(Coins, values), "ACCEPT_POLICY": accept_policy}
    writing = output_arguments(out) | {"KEEPS_UNVISITED": keep_unvisited} | tuning.row(TUNING, device)
    keys = {"partial_keys_ptr": None, "NUM_SLICES": 0}
    if target_logits is not None:
        level_bytes = tuning.row(CHOICE_TUNING, device)["level_bytes"]
        is_wide = scans_all_rows(target_logits, batch_size * (spec_steps + 1), spec_steps, level_bytes)
        scan = tuning.row(ROWS_TUNING if is_wide else LEVEL_TUNING, device)
        num_slices = triton.cdiv(target_logits.shape[1], scan["BLOCK_VOCAB"])
        shape = (batch_size, num_slices, num_nodes) if is_wide else (spec_steps + 1, batch_size, num_slices)
        keys = {"partial_keys_ptr": torch.empty(shape, dtype=torch.int64, device=device), "NUM_SLICES": num_slices}
        scan = scan | keys | {
            "target_logits_ptr": target_logits, "stride_logits_row": target_logits.stride(0),
            "NUM_NODES": num_nodes, "VOCAB_SIZE": target_logits.shape[1],
            # what is known of the offset of every row, so that loads can be wide
            "ALIGNMENT": math.gcd(target_logits.stride(0), 16),
        }  # fmt: skip
        if not is_wide:
            _walk_level_by_level(walk, scan, writing | keys)
            return out
        launch("verify_tree_greedy", _verify_tree_greedy_rows_kernel, (batch_size * num_nodes, num_slices), **scan)
    walk |= writing | keys | {"target_predict_ptr": target_predict, "ANY_ORDER": any_order}
    launch("verify_tree_greedy", _verify_tree_greedy_kernel, (batch_size,), **walk)
    return out


def _walk_level_by_level(walk: dict, scan: dict, writing: dict) -> None:
    """Makes S + 1 launches that step and scan, and one that writes the outputs."""
    device = scan["target_logits_ptr"].device
    batch_size, spec_steps = len(walk["links"].candidates), writing["SPEC_STEPS"]
    path, planted = torch.empty((spec_steps + 1, batch_size), dtype=torch.int32, device=device), None
    if walk["ACCEPT_POLICY"] != "normal":
        planted = torch.empty((spec_steps, batch_size), dtype=torch.int32, device=device)
    steps = {"path_ptr": path, "planted_ptr": planted, "batch_size": batch_size}
    step = walk | scan | steps | {"SPEC_STEPS": spec_steps}
    for level in range(spec_steps + 1):
        grid = (batch_size, scan["NUM_SLICES"])
        launch("verify_tree_greedy", _verify_tree_greedy_level_kernel, grid, level=level, **step)
    path = {name: walk[name] for name in ("links", "NUM_NODES")} | steps | writing
    launch("verify_tree_greedy", _verify_tree_greedy_path_kernel, (batch_size,), **path)
