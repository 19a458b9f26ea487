"""Lossy verification by typical acceptance: drafts are taken that the target finds likely enough.

Computes: Medusa's rule (arXiv 2401.10774, section 3.3.1) with p = softmax(target_logits / temperature) in fp32 and H of
    the parent's row; the root is accepted. Drafts are favoured, and unlikely tokens are lost. The bonus is drawn as
    `sample_from_logits` draws (same noise, no filters).
Invariants: A token of probability 0 is never accepted; a sampled row of nothing but -inf accepts nothing and its bonus
    is token 0. A node that several parents list belongs to the first one that accepts it. A request's results do not
    depend on the batch around it.
Grid: rows: (B * N, slices), rows without children are not read; walk: (B,); bonus: (B, slices), then (B,)
Launches: 4
Traffic: V * element size for each node with children and for the last of each path.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.ordering import LOWEST_KEY, NO_NOISE, check_vocabulary, largest_key, noisy_key, noisy_key_id
from ...primitives.random import STREAM_TARGET, Coins, add_grouped_gumbel, grouped_words, random_block
from ...primitives.rows import read_temperature, scale_logits
from ...primitives.tree_walk import (
    Output,
    Walk,
    all_nodes,
    check_tree,
    follow,
    is_own,
    load_nodes,
    mark_children,
    output_arguments,
    store_walk,
    tree_arguments,
)
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import bundle, launch, launcher
from .shared.argmax import slice_key, winner

# Not tuned yet: half a slice of verify_tree_greedy's, as exponentials need registers.
SCAN_TUNING = {"default": {"BLOCK_VOCAB": 4096, "num_warps": 4}}
WALK_TUNING = {"default": {"num_warps": 1}}

_STREAM = tl.constexpr(STREAM_TARGET)


class Scratch(NamedTuple):
    """Pointers to what a launch leaves for the next ones."""

    keys: Any  # int64 [B, slices, N], of greedy requests
    sums: Any  # fp32 [B, slices, 3, N], of sampled ones: maximum, sum w and sum w (x - maximum), w = exp(x - maximum)
    last: Any  # int32 [B], the last node of each path; -1 for a dead row
    bonus_keys: Any  # int64 [B, slices]


@triton.jit(do_not_specialize=["stride_logits_row"])
def _verify_tree_typical_rows_kernel(
    retrieve_next_token_ptr, target_logits_ptr, temperature_ptr, scratch, stride_logits_row,
    NUM_NODES: tl.constexpr, VOCAB_SIZE: tl.constexpr, NUM_SLICES: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Summarises one slice of the row of a node with children: by its key, or in a sampled request by its sums."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    request, node = row // NUM_NODES, row % NUM_NODES
    first_child = tl.load(retrieve_next_token_ptr + row)
    inverse_temperature, is_sampled = read_temperature(tl.load(temperature_ptr + request))
    row_ptr = target_logits_ptr + tl.multiple_of(row * stride_logits_row, ALIGNMENT)
    if (first_child > node) & (first_child < NUM_NODES):
        if is_sampled:
            token = part * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
            logits = tl.load(row_ptr + token, mask=token < VOCAB_SIZE, other=float("-inf"))
            values = scale_logits(logits.to(tl.float32), inverse_temperature)
            largest = tl.max(values)
            below = values - tl.where(largest == float("-inf"), 0.0, largest)
            weight = tl.exp(below)
            place = (request * NUM_SLICES + part) * (3 * NUM_NODES) + node
            tl.store(scratch.sums + place, largest)
            tl.store(scratch.sums + place + NUM_NODES, tl.sum(weight))
            # 0 * -inf is no number
            tl.store(scratch.sums + place + 2 * NUM_NODES, tl.sum(tl.where(weight > 0.0, weight * below, 0.0)))
        else:
            key = slice_key(row_ptr, part, VOCAB_SIZE, BLOCK_VOCAB)
            tl.store(scratch.keys + (request * NUM_SLICES + part) * NUM_NODES + node, key)


@triton.jit(do_not_specialize=["stride_logits_row"])
def _verify_tree_typical_walk_kernel(
    links, target_logits_ptr, temperature_ptr, epsilon_ptr, delta_ptr, scratch, out,
    stride_logits_row,
    SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr, VOCAB_SIZE: tl.constexpr, NUM_SLICES: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Finds one tree's path."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    node = all_nodes(NUM_NODES)
    BLOCK_NODE: tl.constexpr = node.shape[0]
    inverse_temperature, is_sampled = read_temperature(tl.load(temperature_ptr + request))
    tree = load_nodes(links, request, NUM_NODES)
    has_child = tree.links >= 65536
    predicted = tl.full([BLOCK_NODE], -1, tl.int32)
    parent = tl.full([BLOCK_NODE], -1, tl.int32)
    depth = tl.where((node == 0) & is_own(tree.retrieved, request, NUM_NODES), 0, -1)
    if is_sampled:
        largest, total, moment = _merge_slices(scratch.sums, request, has_child, NUM_SLICES, NUM_NODES)
        # min(epsilon, delta * exp(-H)) times the sum of weights: H = ln(total) - moment / total
        divisor = tl.where(total > 0.0, total, 1.0)
        by_epsilon = tl.load(epsilon_ptr + request) * total
        by_entropy = tl.load(delta_ptr + request) * tl.exp(moment / divisor)
        is_pending = (depth == 0) & has_child & (SPEC_STEPS > 0)
        current = tl.min(tl.where(is_pending, node, BLOCK_NODE))
        while current < BLOCK_NODE:  # parents before children, so in ascending order
            is_here = node == current
            depth_here = tl.sum(tl.where(is_here, depth, 0))
            is_child = mark_children(tree, current)
            is_token = is_child & (tree.tokens >= 0) & (tree.tokens < VOCAB_SIZE)
            row_ptr = target_logits_ptr + (request * NUM_NODES + current) * stride_logits_row
            logits = tl.load(row_ptr + tree.tokens, mask=is_token, other=float("-inf"))
            largest_here = tl.sum(tl.where(is_here, largest, 0.0))
            weight = tl.exp(scale_logits(logits.to(tl.float32), inverse_temperature) - largest_here)
            is_likely = weight > tl.sum(tl.where(is_here, by_epsilon, 0.0))
            is_likely = is_likely | (weight > tl.sum(tl.where(is_here, by_entropy, 0.0)))
            is_accepted = is_token & is_likely & (weight > 0.0) & (depth < 0)
            depth = tl.where(is_accepted, depth_here + 1, depth)
            parent = tl.where(is_accepted, current, parent)
            is_pending = (is_pending & (node != current)) | (is_accepted & has_child & (depth_here + 1 < SPEC_STEPS))
            current = tl.min(tl.where(is_pending, node, BLOCK_NODE))
        at = tl.min(tl.where(depth == tl.max(depth), node, BLOCK_NODE))
        is_on_path = node == at
        while at > 0:
            is_at = node == at
            above = tl.sum(tl.where(is_at, parent, 0))
            predicted = tl.where(node == above, tl.sum(tl.where(is_at, tree.tokens, 0)), predicted)
            is_on_path = is_on_path | (node == above)
            at = above
        depth = tl.where(is_on_path, depth, -1)
    else:
        keys = tl.full([BLOCK_NODE], LOWEST_KEY, tl.int64)
        for part in tl.static_range(NUM_SLICES):
            place = (request * NUM_SLICES + part) * NUM_NODES + node
            keys = tl.maximum(keys, tl.load(scratch.keys + place, mask=has_child, other=LOWEST_KEY))
        predicted = winner(keys)
        depth = follow(tree, predicted, request, SPEC_STEPS, NUM_NODES)

    last = tl.min(tl.where((depth == tl.max(depth)) & (depth >= 0), node, BLOCK_NODE))
    tl.store(scratch.last + request, tl.where(last < BLOCK_NODE, last, -1))
    store_walk(out, request, Walk(tree.retrieved, predicted, depth), SPEC_STEPS, NUM_NODES)


@triton.jit
def _merge_slices(sums_ptr, request, mask, NUM_SLICES: tl.constexpr, NUM_NODES: tl.constexpr):
    """Returns the maximum (0 where all is -inf), sum w and sum w (x - maximum) of the whole rows [node].
    All are 0 for nodes that are not in mask."""
    node = all_nodes(NUM_NODES)
    place = sums_ptr + request * (NUM_SLICES * 3 * NUM_NODES) + node
    largest = tl.full(node.shape, float("-inf"), tl.float32)
    for part in range(NUM_SLICES):
        largest = tl.maximum(largest, tl.load(place + part * (3 * NUM_NODES), mask=mask, other=float("-inf")))
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros(node.shape, tl.float32)
    moment = tl.zeros(node.shape, tl.float32)
    for part in range(NUM_SLICES):
        slice_place = place + part * (3 * NUM_NODES)
        shift = tl.load(slice_place, mask=mask, other=float("-inf")) - largest
        factor = tl.exp(shift)
        slice_total = tl.load(slice_place + NUM_NODES, mask=mask, other=0.0)
        slice_moment = tl.load(slice_place + 2 * NUM_NODES, mask=mask, other=0.0)
        total += factor * slice_total
        moment += tl.where(factor > 0.0, factor * (slice_moment + shift * slice_total), 0.0)
    return largest, total, moment


@triton.jit(do_not_specialize=["stride_logits_row"])
def _verify_tree_typical_draw_kernel(
    target_logits_ptr, coins, temperature_ptr, scratch, stride_logits_row,
    NUM_NODES: tl.constexpr, VOCAB_SIZE: tl.constexpr, NUM_SLICES: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Writes the key of the best noisy logit of one slice of the last node's row."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    last = tl.load(scratch.last + request)
    if last >= 0:
        row = request * NUM_NODES + last
        inverse_temperature, is_sampled = read_temperature(tl.load(temperature_ptr + request))
        token = part * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
        row_ptr = target_logits_ptr + tl.multiple_of(row * stride_logits_row, ALIGNMENT)
        logits = tl.load(row_ptr + token, mask=token < VOCAB_SIZE, other=float("-inf"))
        values = scale_logits(logits.to(tl.float32), inverse_temperature)
        fine = tl.full([BLOCK_VOCAB], NO_NOISE, tl.uint32)
        if is_sampled:
            position = tl.load(coins.positions + row).to(tl.int64) + 1
            key = random_block(tl.load(coins.seeds + request), position, _STREAM, 0)
            values, fine = add_grouped_gumbel(values, grouped_words(key, token))
        # a row of nothing but -inf gives token 0
        fine = tl.where(values == float("-inf"), NO_NOISE, fine)
        tl.store(scratch.bonus_keys + request * NUM_SLICES + part, tl.max(noisy_key(values, fine, token)))


@triton.jit
def _verify_tree_typical_bonus_kernel(
    scratch, predicts_ptr, NUM_NODES: tl.constexpr, NUM_SLICES: tl.constexpr, ENABLE_PDL: tl.constexpr
):
    """Writes the bonus of one path."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    slices = tl.arange(0, next_power_of_2(NUM_SLICES))
    last = tl.load(scratch.last + request)
    is_key = (slices < NUM_SLICES) & (last >= 0)
    keys = tl.load(scratch.bonus_keys + request * NUM_SLICES + slices, mask=is_key, other=LOWEST_KEY)
    tl.store(predicts_ptr + request * NUM_NODES + last, noisy_key_id(largest_key(keys)), mask=last >= 0)


def contract(values: dict) -> Output:
    args = check.Arguments("verify_tree_typical", values)
    output = check_tree(args)
    num_rows = args.size("B") * args.size("N")
    args.tensor("target_logits", (num_rows, "V"), check.FLOAT, contiguous=1)
    check_vocabulary(args, "target_logits")
    args.tensor("positions", (num_rows,), check.INTEGER)
    args.tensor("seeds", ("B",), check.INTEGER)
    for name in ("temperature", "epsilon", "delta"):
        args.tensor(name, ("B",), (torch.float32,))
        args.debug_numbers(name, 0)
    return output


@launcher
def verify_tree_typical(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_logits: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    epsilon: torch.Tensor,
    delta: torch.Tensor,
    *,
    spec_steps: int,
    out: Output | None = None,
) -> Output:
    """LOSSY: Accepts drafts that the target finds likely enough, by Medusa's rule of typical acceptance.

    The text does not follow the target's distribution; that of `verify_tree_sampled` does. A draft is accepted if its
    parent is and p(token | parent) > min(epsilon, delta * exp(-H)), H being the entropy of p. The deepest accepted node
    ends the path (of several, the one with the lowest index); the bonus is drawn from its p.
    Symbols: B requests, N nodes of a tree (1..1024), V tokens (1..2^20).

    Args:
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling: [B, N] int. Trees, as in `verify_tree`.
        target_logits: [B * N, V] fp32, fp16 or bf16. Unit stride along V. NaN counts as -inf.
        positions: [B * N] int. Position of each node; the bonus has the last node's position + 1.
        seeds: [B] int. Seed of each request.
        temperature: [B] fp32. 0 (anything below 1e-5): follows the argmax, which is lossless.
        epsilon, delta: [B] fp32. The rule's constants, at least 0. Medusa's values: 0.09 and 0.3.
        spec_steps: S, 0..1024: the most drafts to accept.
        out: three tensors to write into.

    Returns:
        A named tuple, as from `verify_tree`:
        predicts: [B * N] int32. At each path node the draft that follows, or the bonus; -1 off the path.
        accept_index: [B, S + 1] int32. -1 padded.
        accept_token_num: [B] int32.

    Raises:
        ValueError, TypeError: an argument breaks a rule above. EAGLE_KERNELS_DEBUG=1 also checks links,
            temperature, epsilon and delta.

    Source:
        Medusa, https://arxiv.org/abs/2401.10774, section 3.3.1. Links as in SGLang.

    Example:
        >>> tree = [torch.tensor([x]) for x in ([3, 1, 2], [0, 1, 2], [1, -1, -1], [-1, 2, -1])]  # 3 above 1 and 2
        >>> p = torch.tensor([[0.0, 0.25, 0.75], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
        >>> eagle_kernels.verify_tree_typical(  # 0.25 > 0.09 is enough, though 2 is likelier
        ...     *tree, p.log(), torch.tensor([5, 6, 6]), torch.tensor([1]), torch.ones(1), torch.tensor([0.09]),
        ...     torch.tensor([0.3]), spec_steps=1).predicts.tolist()
        [1, 0, -1]
    """
    values = locals()
    out = check.allocate("verify_tree_typical", contract(values), out)
    device, (batch_size, num_nodes) = candidates.device, candidates.shape
    scan, walk = tuning.row(SCAN_TUNING, device), tuning.row(WALK_TUNING, device)
    num_slices = triton.cdiv(target_logits.shape[1], scan["BLOCK_VOCAB"])
    scratch = Scratch(
        torch.empty((batch_size, num_slices, num_nodes), dtype=torch.int64, device=device),
        torch.empty((batch_size, num_slices, 3, num_nodes), dtype=torch.float32, device=device),
        torch.empty((batch_size,), dtype=torch.int32, device=device),
        torch.empty((batch_size, num_slices), dtype=torch.int64, device=device),
    )
    sizes = {"scratch": scratch, "NUM_NODES": num_nodes, "NUM_SLICES": num_slices}
    rows = sizes | {
        "target_logits_ptr": target_logits, "temperature_ptr": temperature,
        "stride_logits_row": target_logits.stride(0), "VOCAB_SIZE": target_logits.shape[1],
    }  # fmt: skip
    scan = rows | scan | {"ALIGNMENT": math.gcd(target_logits.stride(0), 16)}
    grid = (batch_size * num_nodes, num_slices)
    first_child = {"retrieve_next_token_ptr": retrieve_next_token}
    launch("verify_tree_typical", _verify_tree_typical_rows_kernel, grid, **scan, **first_child)
    step = rows | walk | tree_arguments(values) | output_arguments(out) | {"epsilon_ptr": epsilon, "delta_ptr": delta}
    launch("verify_tree_typical", _verify_tree_typical_walk_kernel, (batch_size,), **step)
    draw = scan | {"coins": bundle(Coins, values)}
    launch("verify_tree_typical", _verify_tree_typical_draw_kernel, (batch_size, num_slices), **draw)
    bonus = sizes | walk | {"predicts_ptr": out.predicts}
    launch("verify_tree_typical", _verify_tree_typical_bonus_kernel, (batch_size,), **bonus)
    return out
