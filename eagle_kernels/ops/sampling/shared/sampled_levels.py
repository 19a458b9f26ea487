"""`verify_tree_sampled` level by level: only rows of the nodes that the walks have reached are scanned and drawn. With
filters, penalties or log-probabilities each level takes two launches, one that scans and one that draws and steps on.
Without them the winner of a row is known from its slices' keys, so a level takes one launch: all programs of a request
first find the winner of the level above and take the step themselves; one more launch writes the outputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....primitives.accept_policy import next_node, plant
from ....primitives.dependent_launch import await_predecessor
from ....primitives.ordering import LOWEST_KEY
from ....primitives.random import STREAM_TARGET, Coins, Noise
from ....primitives.rows import read_temperature
from ....primitives.tree_walk import (
    Path,
    all_depths,
    all_nodes,
    is_own,
    load_children,
    load_nodes,
    match_child,
    output_arguments,
    store_path,
    tree_arguments,
)
from ....runtime import tuning
from ....runtime.language import tl, triton
from ....runtime.launch import bundle, launch
from . import logits, sampling
from .filters import FilterPointers, load_filters
from .logits import Drafts, Processors, Row
from .sampling import DRAW_TUNING, Found, Share, draw_token, row_winner, scan_slice, store_slice_key

_STREAM = tl.constexpr(STREAM_TARGET)

# One warp walks, or reads a path, and writes: what it looks up lies in its own registers.
WALK_TUNING = {"default": {"num_warps": 1}}


class Output(NamedTuple):
    """The outputs of `verify_tree_sampled`; those that were not asked for are empty. In a kernel, pointers to them."""

    predicts: torch.Tensor
    accept_index: torch.Tensor
    accept_token_num: torch.Tensor
    logprobs: torch.Tensor
    raw_logprobs: torch.Tensor
    new_seq_lens: torch.Tensor
    bonus_tokens: torch.Tensor
    accept_lengths: torch.Tensor
    tokens: torch.Tensor
    hidden_rows: torch.Tensor
    last_row: torch.Tensor


class Commit(NamedTuple):
    """Pointers to what the outputs of `verify_commit` are made from; seq_lens None: they are not wanted."""

    seq_lens: Any
    is_live: Any


class Levels(NamedTuple):
    """Pointers to what a launch leaves for the next about the node that each walk has reached at each level."""

    path: Any  # int32 [S + 1, B], the node; -1: the walk has ended
    children: Any  # int32 [S + 1, B, N], the tokens of its children, see load_children
    drawn: Any  # int32 [S + 1, B], the token drawn there
    found: Any  # int64 [S + 2, B], see Found; None: the draw kernel runs


@triton.jit(do_not_specialize=["stride_logits_row", "level", "batch_size"])
def _verify_tree_sampled_scan_kernel(
    links, target_logits_ptr, coins, temperature_ptr, filters, processors,
    levels, scratch,
    stride_logits_row, level, batch_size,
    SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr, VOCAB_SIZE: tl.constexpr, HAS_FILTERS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr, IS_JOINT: tl.constexpr, ACCEPT_POLICY: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Scans a slice of the row of one walk's node of this level.
    Where the draw kernel does not run, all programs of a request first take the step to the node. Meanwhile one more
    program lists the node's children, so that the next step waits for memory once."""
    await_predecessor(ENABLE_PDL)
    HAS_DRAW: tl.constexpr = levels.found is None
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    is_lister = part == tl.num_programs(1) - 1
    nodes = all_nodes(NUM_NODES)
    # read before the walk tells whether they are needed: it waits for memory once less
    temperature = tl.load(temperature_ptr + request)
    seed = tl.load(coins.seeds + request)
    place = level * batch_size.to(tl.int64) + request
    if level == 0:
        root = tl.load(links.retrieve_index + request * NUM_NODES).to(tl.int64)
        current = tl.where(is_own(root, request, NUM_NODES), 0, -1)
    elif HAS_DRAW:
        current = tl.load(levels.path + place)
    else:
        above = place - batch_size
        children = tl.load(levels.children + above * NUM_NODES + nodes, mask=nodes < NUM_NODES, other=-1)
        token = row_winner(scratch.keys, above, VOCAB_SIZE, BLOCK_CHUNK)
        if ACCEPT_POLICY != "normal":
            tree = load_nodes(links, request, NUM_NODES)
            parent = tl.load(levels.path + above)
            token = plant(
                token, parent, level - 1, tree, request, coins, SPEC_STEPS, NUM_NODES, ACCEPT_POLICY=ACCEPT_POLICY
            )
        current = next_node(match_child(children, token), ACCEPT_POLICY)
    if is_lister:
        children = load_children(links, request, current, NUM_NODES)
        tl.store(levels.children + place * NUM_NODES + nodes, children, mask=nodes < NUM_NODES)
    elif part == 0:
        tl.store(levels.path + place, current)
        if not HAS_DRAW:  # the next level's slot; that of level 0 is never used
            tl.store(levels.found + place + batch_size, LOWEST_KEY)
    if (current < 0) & (not is_lister) & (not HAS_DRAW):
        # the next step reads the keys before it knows that the walk has ended
        store_slice_key(scratch.keys, place, part, LOWEST_KEY, VOCAB_SIZE, BLOCK_CHUNK)
    if (current >= 0) & (not is_lister):
        node = request * NUM_NODES + current
        inverse_temperature, is_sampled = read_temperature(temperature)
        row_ptr = target_logits_ptr + tl.multiple_of(node * stride_logits_row, ALIGNMENT)
        drafts = Drafts(levels.drawn + request, level, batch_size)
        scan_slice(
            Row(row_ptr, processors, request, node, inverse_temperature, drafts, VOCAB_SIZE, HAS_PENALTIES), is_sampled,
            load_filters(filters, request, is_sampled, VOCAB_SIZE, IS_JOINT),
            Noise(seed, tl.load(coins.positions + node).to(tl.int64) + 1, _STREAM),
            Share(scratch, place, request), Found(None if HAS_DRAW else levels.found + place, level > 0), part,
            HAS_FILTERS, BLOCK_CHUNK=BLOCK_CHUNK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["stride_logits_row", "level", "batch_size"])
def _verify_tree_sampled_draw_kernel(
    links, target_logits_ptr, coins, temperature_ptr, filters, processors, commit,
    levels, scratch, out,
    stride_logits_row, level, batch_size,
    SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr, VOCAB_SIZE: tl.constexpr, HAS_FILTERS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr, IS_JOINT: tl.constexpr, ACCEPT_POLICY: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Draws the token of one walk's node of this level from the scanned row, and steps on.
    At the last level there is no step, and it writes the outputs."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    # read before the walk tells whether they are needed: it waits for memory once less
    inverse_temperature, is_sampled = read_temperature(tl.load(temperature_ptr + request))
    filters = load_filters(filters, request, is_sampled, VOCAB_SIZE, IS_JOINT)
    seed = tl.load(coins.seeds + request)
    place = level * batch_size.to(tl.int64) + request
    current = tl.load(levels.path + place)
    nodes = all_nodes(NUM_NODES)
    children = tl.load(levels.children + place * NUM_NODES + nodes, mask=nodes < NUM_NODES, other=-1)
    token = tl.full([], -1, tl.int32)
    logprob = tl.full([], float("-inf"), tl.float32)
    raw_logprob = tl.full([], float("-inf"), tl.float32)
    if current >= 0:
        node = request * NUM_NODES + current
        row_ptr = target_logits_ptr + tl.multiple_of(node * stride_logits_row, ALIGNMENT)
        drafts = Drafts(levels.drawn + request, level, batch_size)
        token, logprob, raw_logprob = draw_token(
            Row(row_ptr, processors, request, node, inverse_temperature, drafts, VOCAB_SIZE, HAS_PENALTIES), filters,
            Noise(seed, tl.load(coins.positions + node).to(tl.int64) + 1, _STREAM),
            Share(scratch, place, request), HAS_FILTERS, BLOCK_CHUNK,
        )  # fmt: skip
        if ACCEPT_POLICY != "normal":
            tree = load_nodes(links, request, NUM_NODES)
            token = plant(
                token, current, level, tree, request, coins, SPEC_STEPS, NUM_NODES, ACCEPT_POLICY=ACCEPT_POLICY
            )
        tl.store(levels.drawn + place, token)
    if scratch.raw is not None:
        column = request * (SPEC_STEPS + 1) + level
        tl.store(out.logprobs + column, logprob)
        tl.store(out.raw_logprobs + column, raw_logprob)
    if level < SPEC_STEPS:
        tl.store(levels.path + place + batch_size, next_node(match_child(children, token), ACCEPT_POLICY))
    else:
        depth = all_depths(SPEC_STEPS)
        is_above = depth < level
        places = depth.to(tl.int64) * batch_size + request
        path = tl.where(depth == level, current, tl.load(levels.path + places, mask=is_above, other=-1))
        drawn = tl.where(depth == level, token, tl.load(levels.drawn + places, mask=is_above & (path >= 0), other=-1))
        store_outputs(out, links, commit, request, Path(path, drawn), SPEC_STEPS, NUM_NODES)


@triton.jit(do_not_specialize=["batch_size"])
def _verify_tree_sampled_path_kernel(
    links, coins, commit, levels, scratch, out, batch_size,
    SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr, VOCAB_SIZE: tl.constexpr, ACCEPT_POLICY: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Writes the outputs of one walk from its path and the winners of its rows."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    depth = all_depths(SPEC_STEPS)
    if ACCEPT_POLICY != "normal":
        tree = load_nodes(links, request, NUM_NODES)
    place = depth.to(tl.int64) * batch_size + request
    path = tl.load(levels.path + place, mask=depth <= SPEC_STEPS, other=-1)
    drawn = row_winner(scratch.keys, place, VOCAB_SIZE, BLOCK_CHUNK, path >= 0)
    if ACCEPT_POLICY != "normal":
        for level in range(SPEC_STEPS):
            is_here = depth == level
            token, node = tl.sum(tl.where(is_here, drawn, 0)), tl.sum(tl.where(is_here, path, 0))
            token = plant(token, node, level, tree, request, coins, SPEC_STEPS, NUM_NODES, ACCEPT_POLICY=ACCEPT_POLICY)
            drawn = tl.where(is_here & (path >= 0), token, drawn)
    store_outputs(out, links, commit, request, Path(path, drawn), SPEC_STEPS, NUM_NODES)


@triton.jit
def store_outputs(out, links, commit, request, path, SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr):
    """Writes the outputs of a walk, all but log-probabilities, from its Path."""
    depth = tl.arange(0, path.nodes.shape[0])
    in_row = depth <= SPEC_STEPS
    is_visited = path.nodes >= 0
    store_path(out, links, request, path, SPEC_STEPS, NUM_NODES)
    if commit.seq_lens is not None:
        if commit.is_live is not None:
            is_visited = is_visited & (tl.load(commit.is_live + request) != 0)
        num_emitted = tl.sum(is_visited.to(tl.int32))
        seq_len = tl.load(commit.seq_lens + request)
        last = tl.maximum(num_emitted - 1, 0)
        root_row = request * NUM_NODES
        row = tl.load(links.retrieve_index + root_row + path.nodes, mask=is_visited, other=0).to(tl.int64)
        column = request * (SPEC_STEPS + 1) + depth
        bonus = tl.sum(tl.where(is_visited & (depth == last), path.tokens, 0)) - tl.where(num_emitted > 0, 0, 1)
        tl.store(out.new_seq_lens + request, (seq_len + num_emitted).to(seq_len.dtype))
        tl.store(out.bonus_tokens + request, bonus.to(tl.int64))
        tl.store(out.accept_lengths + request, num_emitted)
        tl.store(out.tokens + column, tl.where(is_visited, path.tokens, -1).to(tl.int64), mask=in_row)
        tl.store(out.hidden_rows + column, tl.where(is_visited, row, root_row), mask=in_row)
        tl.store(out.last_row + request, request * (SPEC_STEPS + 1) + last)


def store_arguments(values: dict, out: Output) -> dict:
    """Returns the kernel arguments that `store_outputs` writes by."""
    return output_arguments(out) | {"commit": bundle(Commit, values)}


def walk_by_levels(values: dict, out: Output) -> None:
    """Walks all trees level by level and writes the outputs; `values` are the arguments of `verify_tree_sampled`."""
    rows, num_levels = values["target_logits"], values["spec_steps"] + 1
    device, (batch_size, num_nodes) = rows.device, values["candidates"].shape
    has_draw = sampling.has_filters(values) or logits.has_penalties(values) or values["return_logprobs"]
    levels = Levels(
        torch.empty((num_levels, batch_size), dtype=torch.int32, device=device),
        torch.empty((num_levels, batch_size, num_nodes), dtype=torch.int32, device=device),
        torch.empty((num_levels, batch_size), dtype=torch.int32, device=device),
        None if has_draw else torch.empty((num_levels + 1, batch_size), dtype=torch.int64, device=device),
    )
    walk = tree_arguments(values) | {
        "coins": bundle(Coins, values), "levels": levels,
        "scratch": sampling.allocate_scratch(values, rows, batch_size, num_levels), "batch_size": batch_size,
        "SPEC_STEPS": values["spec_steps"], "ACCEPT_POLICY": values["accept_policy"],
    }  # fmt: skip
    level = walk | {
        "target_logits_ptr": rows, "temperature_ptr": values["temperature"], "filters": bundle(FilterPointers, values),
        "processors": bundle(Processors, values), "stride_logits_row": rows.stride(0),
        **sampling.constants(values, rows),
    }  # fmt: skip
    scan = level | {"num_warps": sampling.scan_tuning(values, device)["num_warps"]}
    draw = level | store_arguments(values, out) | tuning.row(DRAW_TUNING, device)
    grid = (batch_size, sampling.num_slices(values, rows) + 1)
    for depth in range(num_levels):
        launch("verify_tree_sampled", _verify_tree_sampled_scan_kernel, grid, level=depth, **scan)
        if has_draw:
            launch("verify_tree_sampled", _verify_tree_sampled_draw_kernel, (batch_size,), level=depth, **draw)
    if not has_draw:
        sizes = {"VOCAB_SIZE": level["VOCAB_SIZE"], "BLOCK_CHUNK": level["BLOCK_CHUNK"]}
        path = walk | store_arguments(values, out) | sizes | tuning.row(WALK_TUNING, device)
        launch("verify_tree_sampled", _verify_tree_sampled_path_kernel, (batch_size,), **path)
