"""Stochastic verification by sample and match: the text that plain sampling would have drawn.

Computes
    From the root: draw the token that plain sampling draws at the current node (`sample_from_logits`: penalties, bias,
    grammar, temperature, top-k, top-p, min-p, Gumbel noise keyed by seed, position and token id). If a child carries
    it, that draft is accepted and becomes the current node; else the token ends the walk as the bonus. The drafts are a
    function of the prefix alone (top-k trees), so following a child has probability p(child): the law is the target's,
    for distinct siblings the same as that of the recursive rejection of EAGLE-2 (arXiv 2406.16858) and of SGLang's coin
    walk. Draft probabilities are not needed. Rows of temperature 0 are greedy. accept_policy and simulated_rates, for
    timing, as in verify_tree_greedy.
Shapes
    candidates              [B, N]      int    tokens of the nodes, node 0 the root
    retrieve_index          [B, N]      int    b * N + i
    retrieve_next_token     [B, N]      int    first child, -1 for none
    retrieve_next_sibling   [B, N]      int    next sibling, -1 for none
    target_logits           [B * N, V]  fp32 / fp16 / bf16, unit stride along V; V <= 2^20; of a padded vocabulary
                                        pass target_logits[:, :V]
    positions               [B * N]     int    position of each node; the token drawn at a node has position + 1
    seeds                   [B]         int
    temperature             [B]         fp32   0 (anything below 1e-5): greedy
    top_k, top_p, min_p     [B]         int, fp32, fp32, or None; off at <= 0 (or >= V), >= 1, <= 0
    repetition_penalty, frequency_penalty, presence_penalty  [B]  fp32  as in sample_from_logits; the drafts that lie
                                        between the root and a node count as output there
    prompt_mask             [B, ceil(V / 32)]      int32
    output_counts           [B, V]                 int32  committed output tokens, the root among them
    logit_bias              [B, V]                 fp32 / fp16 / bf16
    token_bitmask           [B * N, ceil(V / 32)]  int32  what the grammar allows after each node
    seq_lens, is_live       [B]         as in verify_commit, whose outputs are wanted where seq_lens is given
    simulated_rates         [S]         fp32   as in verify_tree_greedy
    -> predicts             [B * N]     int32  the token drawn at visited nodes, -1 elsewhere
    -> accept_index         [B, S + 1]  int32  retrieve_index of the path, root first, -1 padded
    -> accept_token_num     [B]         int32  accepted drafts; the bonus is not counted
    -> logprobs             [B, S + 1]  fp32   with return_logprobs, else [0, S + 1]: log-probability of each emitted
                                        token among those that were kept (greedy rows: among all, at temperature 1);
                                        -inf past the path
    -> raw_logprobs         [B, S + 1]  fp32   the same by the logits as given, at temperature 1
    -> new_seq_lens, bonus_tokens, accept_lengths, tokens, hidden_rows, last_row
                                        with seq_lens: the outputs of verify_commit; else with 0 for B
Invariants
    Equal logits, seed and position give the equal token, with or without a tree around it, in any batch. Duplicate
    siblings are harmless: the first one is followed. Malformed links and dead rows as in verify_tree_greedy.
Grid
    Every row that is read is cut into slices, (rows, slices), one program scans each; (rows,), one program draws a
    token each; (B,), one program writes a request's outputs.
    level by level          scanned and drawn are the rows of the nodes that the walks have reached: nothing is read or
                            normalised off the paths, and a walk that has ended costs no bytes. One more program per
                            row lists the node's children meanwhile. Without filters the programs of the next scan draw,
                            and step the walk themselves; with them the last draw writes the outputs.
    all rows, then walk     all at once, where this takes less time: few rows, which leave most of the GPU idle. Shapes
                            alone decide (`draws_all_rows`), and both give the same bits. Penalties and
                            log-probabilities go level by level, as they need the path.
Launches
    S + 2; 2 S + 2 with filters, penalties or log-probabilities; 3 for all rows
Traffic
    V * element size per visited node (at most S + 1 of N; all rows: N), and what filters gather. Extra memory: level by
    level V / 7 bytes per request with filters, else 8 bytes per slice and visited node, 4 N bytes per request and level
    for the children; all rows: of all rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.ordering import LOWEST_KEY
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher
from .shared import logits, sampling
from .shared.accept_policy import Coins, check_policy, plant, plant_path
from .shared.filters import load_filters
from .shared.logits import Processors, Row, read_temperature
from .shared.random import STREAM_TARGET, Noise
from .shared.sampling import Scratch, draw_token, row_winner, scan_slice, store_slice_key
from .shared.tree_walk import (
    Links,
    Path,
    check_tree,
    follow,
    is_own,
    load_children,
    load_nodes,
    match_child,
    output_arguments,
    store_path,
    tree_arguments,
)

SCAN_TUNING, DRAW_TUNING = sampling.SCAN_TUNING, sampling.DRAW_TUNING
TUNING = {"default": {"num_warps": 1}}
# Microseconds that a level takes besides reading, and that as many draws take as programs run at once, with filters and
# without; and how fast rows are scanned.
CHOICE_TUNING = {
    "default": {"level_us": 8.5, "draw_us": 7.0, "plain_level_us": 3.0, "plain_draw_us": 1.5, "programs": 132,
                "bytes_per_us": 2.2e6},
}  # fmt: skip


class Output(NamedTuple):
    """What `verify_tree_sampled` returns; fields that were not asked for are empty."""

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
    ALL_ROWS: tl.constexpr,
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
    """Scans a slice of the row of one walk's node of this level, path [level, B] (-1: ended); or of any row.

    Where no launch of its own draws the tokens, all programs of a request first take the step to the node. Meanwhile
    one more program lists the node's children, children [level, B, N], so that the next step waits for memory once.
    """
    await_predecessor(ENABLE_PDL)
    request = (tl.program_id(0) // NUM_NODES if ALL_ROWS else tl.program_id(0)).to(tl.int64)
    part = tl.program_id(1)
    is_lister = (part == tl.num_programs(1) - 1) & (not ALL_ROWS)
    nodes = tl.arange(0, BLOCK_NODE)
    # read before the walk tells whether they are needed: it waits for memory once less
    temperature = tl.load(temperature_ptr + request)
    seed = tl.load(seeds_ptr + request)
    place = level * batch_size.to(tl.int64) + request
    if ALL_ROWS:
        current = (tl.program_id(0) % NUM_NODES).to(tl.int32)
        place = tl.program_id(0).to(tl.int64)
    elif level == 0:
        root = tl.load(retrieve_index_ptr + request * NUM_NODES).to(tl.int64)
        current = tl.where(is_own(root, request, NUM_NODES), 0, -1)
    elif HAS_DRAW:
        current = tl.load(path_ptr + place)
    else:
        above = place - batch_size
        children = tl.load(children_ptr + above * NUM_NODES + nodes, mask=nodes < NUM_NODES, other=-1)
        token = row_winner(keys_ptr, above, VOCAB_SIZE, BLOCK_CHUNK)
        if ACCEPT_POLICY != "normal":
            trees = Links(candidates_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr)
            tree = load_nodes(trees, request, NUM_NODES, BLOCK_NODE)
            coins = Coins(seeds_ptr, positions_ptr, simulated_rates_ptr)
            parent = tl.load(path_ptr + above)
            token = plant(
                token, parent, level - 1, tree, request, coins, SPEC_STEPS, NUM_NODES, ACCEPT_POLICY=ACCEPT_POLICY
            )
        current = match_child(children, token)
    if not ALL_ROWS:
        if is_lister:
            trees = Links(candidates_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr)
            children = load_children(trees, request, current, NUM_NODES, BLOCK_NODE)
            tl.store(children_ptr + place * NUM_NODES + nodes, children, mask=nodes < NUM_NODES)
        elif part == 0:
            tl.store(path_ptr + place, current)
            if found_ptr is not None:  # of the next level; in the first one nobody prepared the place to tell
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
            Scratch(keys_ptr, summary_ptr, raw_ptr, gathered_ptr), place, place if ALL_ROWS else request, part,
            None if found_ptr is None else found_ptr + place, level > 0,
            VOCAB_SIZE, HAS_FILTERS, HAS_PENALTIES, HAS_LOGPROBS, VECTOR, BLOCK_CHUNK,
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
    ALL_ROWS: tl.constexpr,
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
    """Draws the token of one walk's node of this level, drawn [level, B], from the scanned row, and steps on; after the
    last level writes the outputs.

    Of all rows: draws the token of any row, drawn [B * N].
    """
    await_predecessor(ENABLE_PDL)
    request = (tl.program_id(0) // NUM_NODES if ALL_ROWS else tl.program_id(0)).to(tl.int64)
    # read before the walk tells whether they are needed: it waits for memory once less
    inverse_temperature, is_sampled = read_temperature(tl.load(temperature_ptr + request))
    filters = load_filters(top_k_ptr, top_p_ptr, min_p_ptr, request, is_sampled, VOCAB_SIZE, IS_JOINT)
    seed = tl.load(seeds_ptr + request)
    place = level * batch_size.to(tl.int64) + request
    if ALL_ROWS:
        current = (tl.program_id(0) % NUM_NODES).to(tl.int32)
        place = tl.program_id(0).to(tl.int64)
    else:
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
            Scratch(keys_ptr, summary_ptr, raw_ptr, gathered_ptr), place, place if ALL_ROWS else request,
            VOCAB_SIZE, HAS_FILTERS, HAS_PENALTIES, HAS_LOGPROBS, BLOCK_CHUNK,
        )  # fmt: skip
        if ACCEPT_POLICY != "normal" and not ALL_ROWS:  # which are planted where they are walked over
            trees = Links(candidates_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr)
            tree = load_nodes(trees, request, NUM_NODES, BLOCK_NODE)
            coins = Coins(seeds_ptr, positions_ptr, simulated_rates_ptr)
            token = plant(
                token, current, level, tree, request, coins, SPEC_STEPS, NUM_NODES, ACCEPT_POLICY=ACCEPT_POLICY
            )
        tl.store(drawn_ptr + place, token)
    if HAS_LOGPROBS:
        column = request * (SPEC_STEPS + 1) + level
        tl.store(logprobs_ptr + column, logprob)
        tl.store(raw_logprobs_ptr + column, raw_logprob)
    if not ALL_ROWS:
        if level < SPEC_STEPS:
            tl.store(path_ptr + place + batch_size, match_child(children, token))
        else:
            depth = tl.arange(0, BLOCK_DEPTH)
            is_above = depth < level
            places = depth.to(tl.int64) * batch_size + request
            path = tl.where(depth == level, current, tl.load(path_ptr + places, mask=is_above, other=-1))
            drawn = tl.where(depth == level, token, tl.load(drawn_ptr + places, mask=is_above & (path >= 0), other=-1))
            _store_outputs(
                Output(
                    predicts_ptr, accept_index_ptr, accept_token_num_ptr, logprobs_ptr, raw_logprobs_ptr,
                    new_seq_lens_ptr, bonus_tokens_ptr, accept_lengths_ptr, tokens_ptr, hidden_rows_ptr, last_row_ptr,
                ),
                retrieve_index_ptr, seq_lens_ptr, is_live_ptr, request, path, drawn,
                SPEC_STEPS, NUM_NODES, BLOCK_NODE, BLOCK_DEPTH,
            )  # fmt: skip


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
    path_ptr,
    drawn_ptr,
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
    ALL_ROWS: tl.constexpr,
    ACCEPT_POLICY: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Writes the outputs of one walk: by its path [S + 1, B] and its rows' winners, or it walks by drawn [B * N]."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    depth = tl.arange(0, BLOCK_DEPTH)
    if ALL_ROWS or ACCEPT_POLICY != "normal":
        trees = Links(candidates_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr)
        tree = load_nodes(trees, request, NUM_NODES, BLOCK_NODE)
    if ALL_ROWS:
        node = tl.arange(0, BLOCK_NODE)
        first_row = request * NUM_NODES
        predicted = tl.load(drawn_ptr + first_row + node, mask=node < NUM_NODES, other=-1)
        coins = Coins(seeds_ptr, positions_ptr, simulated_rates_ptr)
        predicted = plant_path(predicted, tree, request, coins, SPEC_STEPS, NUM_NODES, ACCEPT_POLICY)
        depth_of = follow(tree, predicted, request, SPEC_STEPS, NUM_NODES)
        # [depth, node]
        is_there = depth_of[None, :] == depth[:, None]
        path = tl.max(tl.where(is_there, node[None, :], -1), axis=1)
        drawn = tl.max(tl.where(is_there, predicted[None, :], -1), axis=1)
    else:
        place = depth.to(tl.int64) * batch_size + request
        path = tl.load(path_ptr + place, mask=depth <= SPEC_STEPS, other=-1)
        drawn = row_winner(keys_ptr, place, VOCAB_SIZE, BLOCK_CHUNK, path >= 0)
        if ACCEPT_POLICY != "normal":
            for level in range(SPEC_STEPS):
                is_here = depth == level
                coins = Coins(seeds_ptr, positions_ptr, simulated_rates_ptr)
                token, node = tl.sum(tl.where(is_here, drawn, 0)), tl.sum(tl.where(is_here, path, 0))
                token = plant(
                    token, node, level, tree, request, coins, SPEC_STEPS, NUM_NODES, ACCEPT_POLICY=ACCEPT_POLICY
                )
                drawn = tl.where(is_here & (path >= 0), token, drawn)
    _store_outputs(
        Output(
            predicts_ptr, accept_index_ptr, accept_token_num_ptr, None, None, new_seq_lens_ptr,
            bonus_tokens_ptr, accept_lengths_ptr, tokens_ptr, hidden_rows_ptr, last_row_ptr,
        ),
        retrieve_index_ptr, seq_lens_ptr, is_live_ptr, request, path, drawn,
        SPEC_STEPS, NUM_NODES, BLOCK_NODE, BLOCK_DEPTH,
    )  # fmt: skip


@triton.jit
def _store_outputs(
    out,
    retrieve_index_ptr,
    seq_lens_ptr,
    is_live_ptr,
    request,
    path,
    drawn,
    SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """Writes the outputs, all but log-probabilities, of a walk from its nodes and their drawn tokens, both [depth]."""
    depth = tl.arange(0, BLOCK_DEPTH)
    in_row = depth <= SPEC_STEPS
    is_visited = path >= 0
    walked = Path(path, drawn)
    store_path(out, retrieve_index_ptr, request, walked, SPEC_STEPS, NUM_NODES, False, BLOCK_NODE)
    if seq_lens_ptr is not None:
        if is_live_ptr is not None:
            is_visited = is_visited & (tl.load(is_live_ptr + request) != 0)
        num_emitted = tl.sum(is_visited.to(tl.int32))
        seq_len = tl.load(seq_lens_ptr + request)
        last = tl.maximum(num_emitted - 1, 0)
        root_row = request * NUM_NODES
        row = tl.load(retrieve_index_ptr + root_row + path, mask=is_visited, other=0).to(tl.int64)
        column = request * (SPEC_STEPS + 1) + depth
        bonus = tl.sum(tl.where(is_visited & (depth == last), drawn, 0)) - tl.where(num_emitted > 0, 0, 1)
        tl.store(out.new_seq_lens + request, (seq_len + num_emitted).to(seq_len.dtype))
        tl.store(out.bonus_tokens + request, bonus.to(tl.int64))
        tl.store(out.accept_lengths + request, num_emitted)
        tl.store(out.tokens + column, tl.where(is_visited, drawn, -1).to(tl.int64), mask=in_row)
        tl.store(out.hidden_rows + column, tl.where(is_visited, row, root_row), mask=in_row)
        tl.store(out.last_row + request, request * (SPEC_STEPS + 1) + last)


def contract(values: dict) -> Output:
    """Checks the arguments of `verify_tree_sampled` and describes its outputs."""
    args = check.Arguments("verify_tree_sampled", values)
    walk = check_tree(args)
    batch_size, num_columns = walk.accept_index.shape
    num_rows = batch_size * args.size("N")
    args.tensor("target_logits", (num_rows, "V"), check.FLOAT, contiguous=1)
    args.tensor("positions", (num_rows,), check.INTEGER)
    sampling.check_parameters(args, "B")
    sampling.check_vocabulary(args, "target_logits")
    logits.check_processors(args, "B", num_rows)
    check_policy(args)
    seq_lens = args.tensor("seq_lens", ("B",), check.INTEGER, optional=True)
    is_live = args.tensor("is_live", ("B",), (*check.INTEGER, torch.bool), optional=True)
    if is_live is not None and seq_lens is None:
        args.fail("is_live", "come with seq_lens, whose outputs it is for", "no seq_lens")
    num_logged = batch_size if values["return_logprobs"] else 0
    num_committed = 0 if seq_lens is None else batch_size
    return Output(
        *walk,
        logprobs=args.spec((num_logged, num_columns), torch.float32),
        raw_logprobs=args.spec((num_logged, num_columns), torch.float32),
        new_seq_lens=args.spec((num_committed,), torch.int64 if seq_lens is None else seq_lens.dtype),
        bonus_tokens=args.spec((num_committed,), torch.int64),
        accept_lengths=args.spec((num_committed,), torch.int32),
        tokens=args.spec((num_committed, num_columns), torch.int64),
        hidden_rows=args.spec((num_committed, num_columns), torch.int64),
        last_row=args.spec((num_committed,), torch.int64),
    )


def draws_all_rows(target_logits: torch.Tensor, batch_size: int, spec_steps: int, has_filters: bool) -> bool:
    """Whether scanning and drawing all rows at once takes less time than level by level those that are visited."""
    num_rows, vocab_size = target_logits.shape
    model = tuning.row(CHOICE_TUNING, target_logits.device)
    prefix = "" if has_filters else "plain_"
    row_us = vocab_size * target_logits.element_size() / model["bytes_per_us"]
    all_us = num_rows * row_us + model[prefix + "draw_us"] * -(-num_rows // model["programs"])
    return all_us <= (spec_steps + 1) * (batch_size * row_us + model[prefix + "level_us"])


@launcher
def verify_tree_sampled(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_logits: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    repetition_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None,
    prompt_mask: torch.Tensor | None = None,
    output_counts: torch.Tensor | None = None,
    logit_bias: torch.Tensor | None = None,
    token_bitmask: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    is_live: torch.Tensor | None = None,
    simulated_rates: torch.Tensor | None = None,
    *,
    spec_steps: int,
    filter_order: str = "top_k_first",
    return_logprobs: bool = False,
    accept_policy: str = "normal",
    out: Output | None = None,
) -> Output:
    """Samples and matches down every tree; shapes and the meaning of each parameter are in the module's docstring.

    spec_steps: S, the most drafts that can be accepted; accept_index has S + 1 columns.
    filter_order: "top_k_first" (top-p works on what top-k left, renormalised) or "joint" (both on all tokens).
    accept_policy: `normal`; `accept_all`, `reject_all` or `simulate` plant tokens, to time a given acceptance.
    """
    values = locals()
    contracted = contract(values)
    out = check.allocate("verify_tree_sampled", contracted, out)
    device, (batch_size, num_nodes) = candidates.device, candidates.shape
    has_filters = sampling.has_filters(values)
    needs_path = logits.has_penalties(values) or return_logprobs
    all_rows = not needs_path and draws_all_rows(target_logits, batch_size, spec_steps, has_filters)
    has_draw = needs_path or has_filters or all_rows
    num_levels, num_places = (1, batch_size * num_nodes) if all_rows else (spec_steps + 1, batch_size)
    scratch = sampling.allocate_scratch(values, target_logits, num_places, num_levels)
    scratch["path_ptr"] = torch.empty((num_levels, num_places), dtype=torch.int32, device=device)
    num_children = 0 if all_rows else num_nodes
    scratch["children_ptr"] = torch.empty((num_levels, num_places, num_children), dtype=torch.int32, device=device)
    scratch["drawn_ptr"] = torch.empty((num_levels, num_places), dtype=torch.int32, device=device)
    constants = sampling.constants(values, target_logits)
    tree = tree_arguments(values)
    walk = output_arguments(out) | {
        "seq_lens_ptr": seq_lens,
        "is_live_ptr": is_live,
        "new_seq_lens_ptr": out.new_seq_lens,
        "bonus_tokens_ptr": out.bonus_tokens,
        "accept_lengths_ptr": out.accept_lengths,
        "tokens_ptr": out.tokens,
        "hidden_rows_ptr": out.hidden_rows,
        "last_row_ptr": out.last_row,
    }
    shared = tree | scratch | constants | logits.pointers(values) | {
        "target_logits_ptr": target_logits,
        "positions_ptr": positions,
        "seeds_ptr": seeds,
        "temperature_ptr": temperature,
        "top_k_ptr": top_k,
        "top_p_ptr": top_p,
        "min_p_ptr": min_p,
        "simulated_rates_ptr": simulated_rates,
        "stride_logits_row": target_logits.stride(0),
        "batch_size": batch_size,
        "SPEC_STEPS": spec_steps,
        "ALL_ROWS": all_rows,
        "ACCEPT_POLICY": accept_policy,
        "STREAM": STREAM_TARGET,
    }  # fmt: skip
    scan = shared | {
        "HAS_DRAW": has_draw,
        "found_ptr": None if has_draw else torch.empty((num_levels + 1, num_places), dtype=torch.int64, device=device),
        "VECTOR": sampling.vector_size(target_logits),
        "num_warps": sampling.scan_tuning(values, device)["num_warps"],
    }
    draw = shared | walk | {
        "logprobs_ptr": out.logprobs,
        "raw_logprobs_ptr": out.raw_logprobs,
        **tuning.row(DRAW_TUNING, device),
    }  # fmt: skip
    num_listers = 0 if all_rows else 1
    grid = (num_places, sampling.num_slices(values, target_logits) + num_listers)
    for level in range(num_levels):
        launch("verify_tree_sampled", _verify_tree_sampled_scan_kernel, grid, level=level, **scan)
        if has_draw:
            launch("verify_tree_sampled", _verify_tree_sampled_draw_kernel, (num_places,), level=level, **draw)
    if all_rows or not has_draw:
        launch(
            "verify_tree_sampled",
            _verify_tree_sampled_path_kernel,
            (batch_size,),
            **tree,
            **walk,
            path_ptr=scratch["path_ptr"],
            drawn_ptr=scratch["drawn_ptr"],
            keys_ptr=scratch["keys_ptr"],
            positions_ptr=positions,
            seeds_ptr=seeds,
            simulated_rates_ptr=simulated_rates,
            ACCEPT_POLICY=accept_policy,
            batch_size=batch_size,
            VOCAB_SIZE=constants["VOCAB_SIZE"],
            ALL_ROWS=all_rows,
            BLOCK_CHUNK=constants["BLOCK_CHUNK"],
            **tuning.row(TUNING, device),
        )
    return out
