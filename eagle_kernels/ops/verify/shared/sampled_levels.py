"""`verify_tree_sampled` level by level: only rows of the nodes that the walks have reached are scanned and drawn.

With filters, penalties or log-probabilities each level takes two launches: its rows are scanned, then their tokens are
drawn, with which the walks step on; the last draw writes the outputs. Without them the winner of a row is known from
its slices' keys, so a level takes one launch: all programs of a request first find the winner of the level above and
take the step themselves. One more launch then writes the outputs.
"""

from __future__ import annotations

import torch

from ....primitives.dependent_launch import await_predecessor
from ....primitives.ordering import LOWEST_KEY
from ....runtime import tuning
from ....runtime.language import next_power_of_2, tl, triton
from ....runtime.launch import bundle, launch
from . import logits, sampling
from .accept_policy import Coins, next_node, plant
from .filters import FilterPointers, load_filters
from .logits import Processors, Row
from .random import STREAM_TARGET, Noise
from .rows import read_temperature
from .sampled_output import WALK_TUNING, Commit, Output, store_outputs
from .sampling import DRAW_TUNING, Found, Share, draw_token, row_winner, scan_slice, store_slice_key
from .tree_walk import Links, Path, is_own, load_children, load_nodes, match_child


@triton.jit(do_not_specialize=["stride_logits_row", "level", "batch_size"])
def _verify_tree_sampled_scan_kernel(
    # inputs
    links,
    target_logits_ptr,
    coins,
    temperature_ptr,
    filters,
    processors,
    # scratch
    path_ptr,
    children_ptr,
    drawn_ptr,
    found_ptr,
    scratch,
    # sizes
    stride_logits_row,
    level,
    batch_size,
    SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    HAS_DRAW: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
    IS_JOINT: tl.constexpr,
    ACCEPT_POLICY: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    STREAM: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Scans a slice of the row of one walk's node of this level, path [level, B] (-1: ended).

    Without HAS_DRAW, where the draw kernel does not run, all programs of a request first take the step to the node.
    Meanwhile one more program lists the node's children, children [level, B, N], so that the next step waits for memory
    once.
    """
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    is_lister = part == tl.num_programs(1) - 1
    nodes = tl.arange(0, BLOCK_NODE)
    # read before the walk tells whether they are needed: it waits for memory once less
    temperature = tl.load(temperature_ptr + request)
    seed = tl.load(coins.seeds + request)
    place = level * batch_size.to(tl.int64) + request
    if level == 0:
        root = tl.load(links.retrieve_index + request * NUM_NODES).to(tl.int64)
        current = tl.where(is_own(root, request, NUM_NODES), 0, -1)
    elif HAS_DRAW:
        current = tl.load(path_ptr + place)
    else:
        above = place - batch_size
        children = tl.load(children_ptr + above * NUM_NODES + nodes, mask=nodes < NUM_NODES, other=-1)
        token = row_winner(scratch.keys, above, VOCAB_SIZE, BLOCK_CHUNK)
        if ACCEPT_POLICY != "normal":
            tree = load_nodes(links, request, NUM_NODES, BLOCK_NODE)
            parent = tl.load(path_ptr + above)
            token = plant(
                token, parent, level - 1, tree, request, coins, SPEC_STEPS, NUM_NODES, ACCEPT_POLICY=ACCEPT_POLICY
            )
        current = next_node(match_child(children, token), ACCEPT_POLICY)
    if is_lister:
        children = load_children(links, request, current, NUM_NODES, BLOCK_NODE)
        tl.store(children_ptr + place * NUM_NODES + nodes, children, mask=nodes < NUM_NODES)
    elif part == 0:
        tl.store(path_ptr + place, current)
        if found_ptr is not None:  # the next level's slot; level 0's own is uninitialised and not told
            tl.store(found_ptr + place + batch_size, LOWEST_KEY)
    if (current < 0) & (not is_lister) & (not HAS_DRAW):
        # the next step reads the keys before it knows that the walk has ended
        store_slice_key(scratch.keys, place, part, LOWEST_KEY, VOCAB_SIZE, BLOCK_CHUNK)
    if (current >= 0) & (not is_lister):
        node = request * NUM_NODES + current
        inverse_temperature, is_sampled = read_temperature(temperature)
        row_ptr = target_logits_ptr + tl.multiple_of(node * stride_logits_row, ALIGNMENT)
        drafts_ptr = drawn_ptr + request
        row = Row(row_ptr, processors, request, node, inverse_temperature, drafts_ptr, level, batch_size)
        scan_slice(
            row, is_sampled, load_filters(filters, request, is_sampled, VOCAB_SIZE, IS_JOINT),
            Noise(seed, tl.load(coins.positions + node).to(tl.int64) + 1, STREAM),
            Share(scratch, place, request),
            Found(None if found_ptr is None else found_ptr + place, level > 0), part,
            VOCAB_SIZE=VOCAB_SIZE, HAS_FILTERS=HAS_FILTERS, HAS_PENALTIES=HAS_PENALTIES, HAS_LOGPROBS=HAS_LOGPROBS,
            VECTOR=VECTOR, BLOCK_CHUNK=BLOCK_CHUNK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["stride_logits_row", "level", "batch_size"])
def _verify_tree_sampled_draw_kernel(
    # inputs
    links,
    target_logits_ptr,
    coins,
    temperature_ptr,
    filters,
    processors,
    commit,
    # scratch
    path_ptr,
    children_ptr,
    drawn_ptr,
    scratch,
    out,
    # sizes
    stride_logits_row,
    level,
    batch_size,
    SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
    IS_JOINT: tl.constexpr,
    ACCEPT_POLICY: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Draws the token of one walk's node of this level from the scanned row, drawn [level, B], and steps on.

    At the last level there is no step, and it writes the outputs.
    """
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    # read before the walk tells whether they are needed: it waits for memory once less
    inverse_temperature, is_sampled = read_temperature(tl.load(temperature_ptr + request))
    filters = load_filters(filters, request, is_sampled, VOCAB_SIZE, IS_JOINT)
    seed = tl.load(coins.seeds + request)
    place = level * batch_size.to(tl.int64) + request
    current = tl.load(path_ptr + place)
    nodes = tl.arange(0, BLOCK_NODE)
    children = tl.load(children_ptr + place * NUM_NODES + nodes, mask=nodes < NUM_NODES, other=-1)
    token = tl.full([], -1, tl.int32)
    logprob = tl.full([], float("-inf"), tl.float32)
    raw_logprob = tl.full([], float("-inf"), tl.float32)
    if current >= 0:
        node = request * NUM_NODES + current
        row_ptr = target_logits_ptr + tl.multiple_of(node * stride_logits_row, ALIGNMENT)
        drafts_ptr = drawn_ptr + request
        row = Row(row_ptr, processors, request, node, inverse_temperature, drafts_ptr, level, batch_size)
        token, logprob, raw_logprob = draw_token(
            row, filters, Noise(seed, tl.load(coins.positions + node).to(tl.int64) + 1, STREAM),
            Share(scratch, place, request),
            VOCAB_SIZE=VOCAB_SIZE, HAS_FILTERS=HAS_FILTERS, HAS_PENALTIES=HAS_PENALTIES, HAS_LOGPROBS=HAS_LOGPROBS,
            BLOCK_CHUNK=BLOCK_CHUNK,
        )  # fmt: skip
        if ACCEPT_POLICY != "normal":
            tree = load_nodes(links, request, NUM_NODES, BLOCK_NODE)
            token = plant(
                token, current, level, tree, request, coins, SPEC_STEPS, NUM_NODES, ACCEPT_POLICY=ACCEPT_POLICY
            )
        tl.store(drawn_ptr + place, token)
    if HAS_LOGPROBS:
        column = request * (SPEC_STEPS + 1) + level
        tl.store(out.logprobs + column, logprob)
        tl.store(out.raw_logprobs + column, raw_logprob)
    if level < SPEC_STEPS:
        tl.store(path_ptr + place + batch_size, next_node(match_child(children, token), ACCEPT_POLICY))
    else:
        depth = tl.arange(0, BLOCK_DEPTH)
        is_above = depth < level
        places = depth.to(tl.int64) * batch_size + request
        path = tl.where(depth == level, current, tl.load(path_ptr + places, mask=is_above, other=-1))
        drawn = tl.where(depth == level, token, tl.load(drawn_ptr + places, mask=is_above & (path >= 0), other=-1))
        store_outputs(out, links.retrieve_index, commit, request, Path(path, drawn), SPEC_STEPS, NUM_NODES, BLOCK_NODE)


@triton.jit(do_not_specialize=["batch_size"])
def _verify_tree_sampled_path_kernel(
    # inputs
    links,
    coins,
    commit,
    # scratch
    path_ptr,
    scratch,
    out,
    # sizes
    batch_size,
    SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    ACCEPT_POLICY: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Writes the outputs of one walk from its path [S + 1, B] and the winners of its rows."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    depth = tl.arange(0, BLOCK_DEPTH)
    if ACCEPT_POLICY != "normal":
        tree = load_nodes(links, request, NUM_NODES, BLOCK_NODE)
    place = depth.to(tl.int64) * batch_size + request
    path = tl.load(path_ptr + place, mask=depth <= SPEC_STEPS, other=-1)
    drawn = row_winner(scratch.keys, place, VOCAB_SIZE, BLOCK_CHUNK, path >= 0)
    if ACCEPT_POLICY != "normal":
        for level in range(SPEC_STEPS):
            is_here = depth == level
            token, node = tl.sum(tl.where(is_here, drawn, 0)), tl.sum(tl.where(is_here, path, 0))
            token = plant(token, node, level, tree, request, coins, SPEC_STEPS, NUM_NODES, ACCEPT_POLICY=ACCEPT_POLICY)
            drawn = tl.where(is_here & (path >= 0), token, drawn)
    store_outputs(out, links.retrieve_index, commit, request, Path(path, drawn), SPEC_STEPS, NUM_NODES, BLOCK_NODE)


def walk_by_levels(values: dict, out: Output) -> None:
    """Walks all trees level by level and writes the outputs; `values` are the arguments of `verify_tree_sampled`."""
    rows, num_levels = values["target_logits"], values["spec_steps"] + 1
    device, (batch_size, num_nodes) = rows.device, values["candidates"].shape
    has_logprobs = values["return_logprobs"]
    has_draw = sampling.has_filters(values) or logits.has_penalties(values) or has_logprobs
    walk = {
        "links": bundle(Links, values),
        "coins": bundle(Coins, values),
        "path_ptr": torch.empty((num_levels, batch_size), dtype=torch.int32, device=device),
        "scratch": sampling.allocate_scratch(values, rows, batch_size, num_levels),
        "batch_size": batch_size,
        "SPEC_STEPS": values["spec_steps"],
        "NUM_NODES": num_nodes,
        "ACCEPT_POLICY": values["accept_policy"],
        "BLOCK_NODE": next_power_of_2(num_nodes),
    }
    level = walk | {
        "target_logits_ptr": rows,
        "temperature_ptr": values["temperature"],
        "filters": bundle(FilterPointers, values),
        "processors": bundle(Processors, values),
        "children_ptr": torch.empty((num_levels, batch_size, num_nodes), dtype=torch.int32, device=device),
        "drawn_ptr": torch.empty((num_levels, batch_size), dtype=torch.int32, device=device),
        "stride_logits_row": rows.stride(0),
        "HAS_LOGPROBS": has_logprobs,
        "STREAM": STREAM_TARGET,
        **sampling.constants(values, rows),
    }
    scan = level | {
        "HAS_DRAW": has_draw,
        "found_ptr": None if has_draw else torch.empty((num_levels + 1, batch_size), dtype=torch.int64, device=device),
        "VECTOR": sampling.vector_size(rows),
        "num_warps": sampling.scan_tuning(values, device)["num_warps"],
    }
    writing = {"out": out, "commit": bundle(Commit, values), "BLOCK_DEPTH": next_power_of_2(num_levels)}
    draw = level | writing | tuning.row(DRAW_TUNING, device)
    grid = (batch_size, sampling.num_slices(values, rows) + 1)
    for depth in range(num_levels):
        launch("verify_tree_sampled", _verify_tree_sampled_scan_kernel, grid, level=depth, **scan)
        if has_draw:
            launch("verify_tree_sampled", _verify_tree_sampled_draw_kernel, (batch_size,), level=depth, **draw)
    if not has_draw:
        sizes = {"VOCAB_SIZE": level["VOCAB_SIZE"], "BLOCK_CHUNK": level["BLOCK_CHUNK"]}
        path = walk | writing | sizes | tuning.row(WALK_TUNING, device)
        launch("verify_tree_sampled", _verify_tree_sampled_path_kernel, (batch_size,), **path)
