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
from ....runtime.language import tl, triton
from ....runtime.launch import launch
from . import logits, sampling
from .accept_policy import Coins, next_node, plant
from .filters import load_filters
from .logits import Processors, Row
from .random import STREAM_TARGET, Noise
from .rows import read_temperature
from .sampled_output import WALK_TUNING, Commit, Output, store_arguments, store_outputs
from .sampling import DRAW_TUNING, Found, Scratch, draw_token, row_winner, scan_slice, store_slice_key
from .tree_walk import Links, Path, is_own, load_children, load_nodes, match_child, tree_arguments


@triton.jit(do_not_specialize=["stride_logits_row", "level", "batch_size"])
def _verify_tree_sampled_scan_kernel(
    # inputs
    candidates_ptr,
    retrieve_index_ptr,
    retrieve_next_token_ptr,
    retrieve_next_sibling_ptr,
    target_logits_ptr,
    positions_ptr,
    seeds_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    repetition_penalty_ptr,
    frequency_penalty_ptr,
    presence_penalty_ptr,
    prompt_mask_ptr,
    output_counts_ptr,
    logit_bias_ptr,
    token_bitmask_ptr,
    simulated_rates_ptr,
    # scratch
    path_ptr,
    children_ptr,
    drawn_ptr,
    keys_ptr,
    found_ptr,
    summary_ptr,
    raw_ptr,
    gathered_ptr,
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
    links = Links(candidates_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr)
    # read before the walk tells whether they are needed: it waits for memory once less
    temperature = tl.load(temperature_ptr + request)
    seed = tl.load(seeds_ptr + request)
    place = level * batch_size.to(tl.int64) + request
    if level == 0:
        root = tl.load(retrieve_index_ptr + request * NUM_NODES).to(tl.int64)
        current = tl.where(is_own(root, request, NUM_NODES), 0, -1)
    elif HAS_DRAW:
        current = tl.load(path_ptr + place)
    else:
        above = place - batch_size
        children = tl.load(children_ptr + above * NUM_NODES + nodes, mask=nodes < NUM_NODES, other=-1)
        token = row_winner(keys_ptr, above, VOCAB_SIZE, BLOCK_CHUNK)
        if ACCEPT_POLICY != "normal":
            coins = Coins(seeds_ptr, positions_ptr, simulated_rates_ptr)
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
        store_slice_key(keys_ptr, place, part, LOWEST_KEY, VOCAB_SIZE, BLOCK_CHUNK)
    if (current >= 0) & (not is_lister):
        node = request * NUM_NODES + current
        processors = Processors(
            repetition_penalty_ptr, frequency_penalty_ptr, presence_penalty_ptr, prompt_mask_ptr, output_counts_ptr,
            logit_bias_ptr, token_bitmask_ptr,
        )  # fmt: skip
        inverse_temperature, is_sampled = read_temperature(temperature)
        row_ptr = target_logits_ptr + tl.multiple_of(node * stride_logits_row, ALIGNMENT)
        drafts_ptr = drawn_ptr + request
        row = Row(row_ptr, processors, request, node, inverse_temperature, drafts_ptr, level, batch_size)
        scan_slice(
            row, is_sampled, load_filters(top_k_ptr, top_p_ptr, min_p_ptr, request, is_sampled, VOCAB_SIZE, IS_JOINT),
            Noise(seed, tl.load(positions_ptr + node).to(tl.int64) + 1, STREAM),
            Scratch(keys_ptr, summary_ptr, raw_ptr, gathered_ptr, place, request),
            Found(None if found_ptr is None else found_ptr + place, level > 0), part,
            VOCAB_SIZE=VOCAB_SIZE, HAS_FILTERS=HAS_FILTERS, HAS_PENALTIES=HAS_PENALTIES, HAS_LOGPROBS=HAS_LOGPROBS,
            VECTOR=VECTOR, BLOCK_CHUNK=BLOCK_CHUNK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["stride_logits_row", "level", "batch_size"])
def _verify_tree_sampled_draw_kernel(
    # inputs
    candidates_ptr,
    retrieve_index_ptr,
    retrieve_next_token_ptr,
    retrieve_next_sibling_ptr,
    target_logits_ptr,
    positions_ptr,
    seeds_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    repetition_penalty_ptr,
    frequency_penalty_ptr,
    presence_penalty_ptr,
    prompt_mask_ptr,
    output_counts_ptr,
    logit_bias_ptr,
    token_bitmask_ptr,
    simulated_rates_ptr,
    seq_lens_ptr,
    is_live_ptr,
    # scratch
    path_ptr,
    children_ptr,
    drawn_ptr,
    keys_ptr,
    summary_ptr,
    raw_ptr,
    gathered_ptr,
    # outputs
    logprobs_ptr,
    raw_logprobs_ptr,
    predicts_ptr,
    accept_index_ptr,
    accept_token_num_ptr,
    new_seq_lens_ptr,
    bonus_tokens_ptr,
    accept_lengths_ptr,
    tokens_ptr,
    hidden_rows_ptr,
    last_row_ptr,
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
    filters = load_filters(top_k_ptr, top_p_ptr, min_p_ptr, request, is_sampled, VOCAB_SIZE, IS_JOINT)
    seed = tl.load(seeds_ptr + request)
    place = level * batch_size.to(tl.int64) + request
    current = tl.load(path_ptr + place)
    nodes = tl.arange(0, BLOCK_NODE)
    children = tl.load(children_ptr + place * NUM_NODES + nodes, mask=nodes < NUM_NODES, other=-1)
    token = tl.full([], -1, tl.int32)
    logprob = tl.full([], float("-inf"), tl.float32)
    raw_logprob = tl.full([], float("-inf"), tl.float32)
    if current >= 0:
        node = request * NUM_NODES + current
        processors = Processors(
            repetition_penalty_ptr, frequency_penalty_ptr, presence_penalty_ptr, prompt_mask_ptr, output_counts_ptr,
            logit_bias_ptr, token_bitmask_ptr,
        )  # fmt: skip
        row_ptr = target_logits_ptr + tl.multiple_of(node * stride_logits_row, ALIGNMENT)
        drafts_ptr = drawn_ptr + request
        row = Row(row_ptr, processors, request, node, inverse_temperature, drafts_ptr, level, batch_size)
        token, logprob, raw_logprob = draw_token(
            row, filters, Noise(seed, tl.load(positions_ptr + node).to(tl.int64) + 1, STREAM),
            Scratch(keys_ptr, summary_ptr, raw_ptr, gathered_ptr, place, request),
            VOCAB_SIZE=VOCAB_SIZE, HAS_FILTERS=HAS_FILTERS, HAS_PENALTIES=HAS_PENALTIES, HAS_LOGPROBS=HAS_LOGPROBS,
            BLOCK_CHUNK=BLOCK_CHUNK,
        )  # fmt: skip
        if ACCEPT_POLICY != "normal":
            coins = Coins(seeds_ptr, positions_ptr, simulated_rates_ptr)
            links = Links(candidates_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr)
            tree = load_nodes(links, request, NUM_NODES, BLOCK_NODE)
            token = plant(
                token, current, level, tree, request, coins, SPEC_STEPS, NUM_NODES, ACCEPT_POLICY=ACCEPT_POLICY
            )
        tl.store(drawn_ptr + place, token)
    if HAS_LOGPROBS:
        column = request * (SPEC_STEPS + 1) + level
        tl.store(logprobs_ptr + column, logprob)
        tl.store(raw_logprobs_ptr + column, raw_logprob)
    if level < SPEC_STEPS:
        tl.store(path_ptr + place + batch_size, next_node(match_child(children, token), ACCEPT_POLICY))
    else:
        depth = tl.arange(0, BLOCK_DEPTH)
        is_above = depth < level
        places = depth.to(tl.int64) * batch_size + request
        path = tl.where(depth == level, current, tl.load(path_ptr + places, mask=is_above, other=-1))
        drawn = tl.where(depth == level, token, tl.load(drawn_ptr + places, mask=is_above & (path >= 0), other=-1))
        out = Output(
            predicts_ptr, accept_index_ptr, accept_token_num_ptr, logprobs_ptr, raw_logprobs_ptr, new_seq_lens_ptr,
            bonus_tokens_ptr, accept_lengths_ptr, tokens_ptr, hidden_rows_ptr, last_row_ptr,
        )  # fmt: skip
        commit = Commit(seq_lens_ptr, is_live_ptr)
        store_outputs(out, retrieve_index_ptr, commit, request, Path(path, drawn), SPEC_STEPS, NUM_NODES, BLOCK_NODE)


@triton.jit(do_not_specialize=["batch_size"])
def _verify_tree_sampled_path_kernel(
    # inputs
    candidates_ptr,
    retrieve_index_ptr,
    retrieve_next_token_ptr,
    retrieve_next_sibling_ptr,
    positions_ptr,
    seeds_ptr,
    simulated_rates_ptr,
    seq_lens_ptr,
    is_live_ptr,
    # scratch
    path_ptr,
    keys_ptr,
    # outputs
    predicts_ptr,
    accept_index_ptr,
    accept_token_num_ptr,
    new_seq_lens_ptr,
    bonus_tokens_ptr,
    accept_lengths_ptr,
    tokens_ptr,
    hidden_rows_ptr,
    last_row_ptr,
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
        links = Links(candidates_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr)
        tree = load_nodes(links, request, NUM_NODES, BLOCK_NODE)
    place = depth.to(tl.int64) * batch_size + request
    path = tl.load(path_ptr + place, mask=depth <= SPEC_STEPS, other=-1)
    drawn = row_winner(keys_ptr, place, VOCAB_SIZE, BLOCK_CHUNK, path >= 0)
    if ACCEPT_POLICY != "normal":
        coins = Coins(seeds_ptr, positions_ptr, simulated_rates_ptr)
        for level in range(SPEC_STEPS):
            is_here = depth == level
            token, node = tl.sum(tl.where(is_here, drawn, 0)), tl.sum(tl.where(is_here, path, 0))
            token = plant(token, node, level, tree, request, coins, SPEC_STEPS, NUM_NODES, ACCEPT_POLICY=ACCEPT_POLICY)
            drawn = tl.where(is_here & (path >= 0), token, drawn)
    out = Output(
        predicts_ptr, accept_index_ptr, accept_token_num_ptr, None, None, new_seq_lens_ptr, bonus_tokens_ptr,
        accept_lengths_ptr, tokens_ptr, hidden_rows_ptr, last_row_ptr,
    )  # fmt: skip
    commit = Commit(seq_lens_ptr, is_live_ptr)
    store_outputs(out, retrieve_index_ptr, commit, request, Path(path, drawn), SPEC_STEPS, NUM_NODES, BLOCK_NODE)


def walk_by_levels(values: dict, out: Output) -> None:
    """Walks all trees level by level and writes the outputs; `values` are the arguments of `verify_tree_sampled`."""
    rows, num_levels = values["target_logits"], values["spec_steps"] + 1
    device, (batch_size, num_nodes) = rows.device, values["candidates"].shape
    has_logprobs = values["return_logprobs"]
    has_draw = sampling.has_filters(values) or logits.has_penalties(values) or has_logprobs
    tree, constants = tree_arguments(values), sampling.constants(values, rows)
    shared = {
        "target_logits_ptr": rows,
        "positions_ptr": values["positions"],
        "simulated_rates_ptr": values["simulated_rates"],
        "path_ptr": torch.empty((num_levels, batch_size), dtype=torch.int32, device=device),
        "children_ptr": torch.empty((num_levels, batch_size, num_nodes), dtype=torch.int32, device=device),
        "drawn_ptr": torch.empty((num_levels, batch_size), dtype=torch.int32, device=device),
        "raw_ptr": sampling.allocate_raw(rows, batch_size) if has_logprobs else None,
        "stride_logits_row": rows.stride(0),
        "batch_size": batch_size,
        "SPEC_STEPS": values["spec_steps"],
        "HAS_LOGPROBS": has_logprobs,
        "ACCEPT_POLICY": values["accept_policy"],
        "STREAM": STREAM_TARGET,
        **tree,
        **sampling.pointers(values),
        **logits.pointers(values),
        **sampling.allocate_scratch(values, rows, batch_size, num_levels),
        **constants,
    }
    scan = shared | {
        "HAS_DRAW": has_draw,
        "found_ptr": None if has_draw else torch.empty((num_levels + 1, batch_size), dtype=torch.int64, device=device),
        "VECTOR": sampling.vector_size(rows),
        "num_warps": sampling.scan_tuning(values, device)["num_warps"],
    }
    writing = store_arguments(values, out)
    draw = shared | writing | {"logprobs_ptr": out.logprobs, "raw_logprobs_ptr": out.raw_logprobs}
    draw |= tuning.row(DRAW_TUNING, device)
    grid = (batch_size, sampling.num_slices(values, rows) + 1)
    for level in range(num_levels):
        launch("verify_tree_sampled", _verify_tree_sampled_scan_kernel, grid, level=level, **scan)
        if has_draw:
            launch("verify_tree_sampled", _verify_tree_sampled_draw_kernel, (batch_size,), level=level, **draw)
    if not has_draw:
        launch(
            "verify_tree_sampled",
            _verify_tree_sampled_path_kernel,
            (batch_size,),
            **tree,
            **writing,
            path_ptr=shared["path_ptr"],
            keys_ptr=shared["keys_ptr"],
            positions_ptr=values["positions"],
            seeds_ptr=values["seeds"],
            simulated_rates_ptr=values["simulated_rates"],
            batch_size=batch_size,
            VOCAB_SIZE=constants["VOCAB_SIZE"],
            ACCEPT_POLICY=values["accept_policy"],
            BLOCK_CHUNK=constants["BLOCK_CHUNK"],
            **tuning.row(WALK_TUNING, device),
        )
