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
    Every row that is read is cut into slices: (rows, slices), one program scans a slice; (rows,), one program draws a
    token; (B,), one program writes a request's outputs.
    level by level          only the rows of nodes that the walks have reached are scanned and drawn: nothing is read or
    (`sampled_levels.py`)   normalised off the paths, and a walk that has ended costs no bytes. One more program per row
                            lists the node's children meanwhile. Without filters the programs of the next scan draw,
                            and step the walk themselves; with them the last draw writes the outputs.
    all rows, then walk     all rows are drawn at once (`sample_rows.py`) where this takes less time: few rows, which
                            leave most of the GPU idle. Shapes alone decide (`draws_all_rows`), and both give the same
                            bits. Penalties and log-probabilities go level by level, as they need the path.
Launches
    S + 2; 2 S + 2 with filters, penalties or log-probabilities; 3 for all rows
Traffic
    V * element size per visited node (at most S + 1 of N; all rows: N), and what filters gather. Extra memory: level by
    level V / 7 bytes per request with filters, else 8 bytes per slice and visited node, 4 N bytes per request and level
    for the children; all rows: of all rows.
"""

from __future__ import annotations

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher
from .shared import logits, sampling
from .shared.accept_policy import Coins, check_policy, plant_path
from .shared.sample_rows import sample_rows
from .shared.sampled_levels import walk_by_levels
from .shared.sampled_output import WALK_TUNING, Commit, Output, store_arguments, store_outputs
from .shared.tree_walk import Links, Path, check_tree, follow, load_nodes, tree_arguments

# Microseconds that a level takes besides reading, and microseconds that `programs` draws take, which run at once: with
# filters, and without (plain_). Then the speed at which rows are scanned.
CHOICE_TUNING = {
    "default": {"level_us": 8.5, "draw_us": 7.0, "plain_level_us": 3.0, "plain_draw_us": 1.5, "programs": 132,
                "bytes_per_us": 2.2e6},
}  # fmt: skip


@triton.jit
def _verify_tree_sampled_walk_kernel(
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
    drawn_ptr,
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
    SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    ACCEPT_POLICY: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Walks one tree by the tokens of all its rows, drawn [B * N], and writes the outputs."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    depth = tl.arange(0, BLOCK_DEPTH)
    links = Links(candidates_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr)
    tree = load_nodes(links, request, NUM_NODES, BLOCK_NODE)
    node = tl.arange(0, BLOCK_NODE)
    predicted = tl.load(drawn_ptr + request * NUM_NODES + node, mask=node < NUM_NODES, other=-1)
    coins = Coins(seeds_ptr, positions_ptr, simulated_rates_ptr)
    predicted = plant_path(predicted, tree, request, coins, SPEC_STEPS, NUM_NODES, ACCEPT_POLICY)
    node_depth = follow(tree, predicted, request, SPEC_STEPS, NUM_NODES)
    # [depth, node]
    is_there = node_depth[None, :] == depth[:, None]
    nodes = tl.max(tl.where(is_there, node[None, :], -1), axis=1)
    tokens = tl.max(tl.where(is_there, predicted[None, :], -1), axis=1)
    out = Output(
        predicts_ptr, accept_index_ptr, accept_token_num_ptr, None, None, new_seq_lens_ptr, bonus_tokens_ptr,
        accept_lengths_ptr, tokens_ptr, hidden_rows_ptr, last_row_ptr,
    )  # fmt: skip
    commit = Commit(seq_lens_ptr, is_live_ptr)
    store_outputs(out, retrieve_index_ptr, commit, request, Path(nodes, tokens), SPEC_STEPS, NUM_NODES, BLOCK_NODE)


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
    """Tells whether scanning and drawing all rows at once takes less time than the visited ones level by level."""
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
    needs_path = logits.has_penalties(values) or return_logprobs
    if needs_path or not draws_all_rows(target_logits, len(candidates), spec_steps, sampling.has_filters(values)):
        walk_by_levels(values, out)
        return out
    drawn = torch.empty((len(target_logits),), dtype=torch.int32, device=target_logits.device)
    # the position of a token that is drawn at a node is one above that of the node
    sample_rows(
        "verify_tree_sampled", values, target_logits, drawn, rows_per_request=candidates.shape[1], position_offset=1
    )
    launch(
        "verify_tree_sampled",
        _verify_tree_sampled_walk_kernel,
        (len(candidates),),
        drawn_ptr=drawn,
        positions_ptr=positions,
        seeds_ptr=seeds,
        simulated_rates_ptr=simulated_rates,
        ACCEPT_POLICY=accept_policy,
        **tree_arguments(values),
        **store_arguments(values, out),
        **tuning.row(WALK_TUNING, candidates.device),
    )
    return out
