"""Stochastic verification by sample and match: the text that plain sampling would have drawn.

Computes: The drafts are a function of the prefix alone (top-k trees), so a child is followed with probability p(child).
    For distinct siblings the paths, too, have the distribution of the recursive rejection of EAGLE-2 (arXiv 2406.16858)
    and of SGLang's coin walk.
Invariants: A token is drawn with the same bits with or without a tree around it, in any batch.
Grid:
    Every row that is read is cut into slices: (rows, slices), one program scans a slice; (rows,), one program draws a
    token; (B,), one program writes a request's outputs.
    level by level          only the rows of nodes that the walks have reached are scanned and drawn: nothing is read or
    (`sampled_levels.py`)   normalised off the paths, and a walk that has ended costs no bytes. One more program per row
                            lists the node's children meanwhile. Without filters the programs of the next scan draw,
                            and step the walk themselves; with them the last draw writes the outputs.
    all rows, then walk     all rows are drawn at once (`sample_rows.py`) where this takes less time: few rows, which
                            leave most of the GPU idle. Shapes alone decide (`draws_all_rows`), and both give the same
                            bits. Penalties and log-probabilities go level by level, as they need the path.
Launches: S + 2; 2 S + 2 with filters, penalties or log-probabilities; 3 for all rows
Traffic: V * element size per visited node (at most S + 1 of N; all rows: N), and what filters gather. Extra memory:
    level by level V / 7 bytes per request with filters, else 8 bytes per slice and visited node, 4 N bytes per request
    and level for the children; all rows: of all rows.
"""

from __future__ import annotations

import torch

from ...primitives.accept_policy import check_policy, plant_path
from ...primitives.dependent_launch import await_predecessor
from ...primitives.ordering import check_vocabulary
from ...primitives.random import Coins
from ...primitives.tree_walk import Path, all_depths, all_nodes, check_tree, follow, load_nodes, tree_arguments
from ...runtime import check, target, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import bundle, launch, launcher
from .shared import logits, sampling
from .shared.sample_rows import sample_rows
from .shared.sampled_levels import WALK_TUNING, Output, store_arguments, store_outputs, walk_by_levels

# An H100's: microseconds that a level takes besides reading, and microseconds of one draw on every multiprocessor,
# with filters and without (plain_); then the speed at which rows are scanned.
CHOICE_TUNING = {
    "default": {"level_us": 8.5, "draw_us": 7.0, "plain_level_us": 3.0, "plain_draw_us": 1.5, "bytes_per_us": 2.2e6},
}  # fmt: skip


@triton.jit
def _verify_tree_sampled_walk_kernel(
    links, coins, commit, drawn_ptr, out,
    SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr, ACCEPT_POLICY: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Walks one tree by the tokens of all its rows, drawn [B * N], and writes the outputs."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    depth = all_depths(SPEC_STEPS)
    tree = load_nodes(links, request, NUM_NODES)
    node = all_nodes(NUM_NODES)
    predicted = tl.load(drawn_ptr + request * NUM_NODES + node, mask=node < NUM_NODES, other=-1).to(tl.int32)
    predicted = plant_path(predicted, tree, request, coins, SPEC_STEPS, NUM_NODES, ACCEPT_POLICY)
    MOST_ACCEPTED: tl.constexpr = 0 if ACCEPT_POLICY == "reject_all" else SPEC_STEPS
    node_depth = follow(tree, predicted, request, MOST_ACCEPTED, NUM_NODES)
    # [depth, node]
    is_there = node_depth[None, :] == depth[:, None]
    nodes = tl.max(tl.where(is_there, node[None, :], -1), axis=1)
    tokens = tl.max(tl.where(is_there, predicted[None, :], -1), axis=1)
    store_outputs(out, links, commit, request, Path(nodes, tokens), SPEC_STEPS, NUM_NODES)


def contract(values: dict) -> Output:
    args = check.Arguments("verify_tree_sampled", values)
    walk = check_tree(args)
    batch_size, num_columns = walk.accept_index.shape
    num_rows = batch_size * args.size("N")
    args.tensor("target_logits", (num_rows, "V"), check.FLOAT, contiguous=1)
    args.tensor("positions", (num_rows,), check.INTEGER)
    sampling.check_parameters(args, "B")
    check_vocabulary(args, "target_logits")
    logits.check_processors(args, "B", num_rows)
    check_policy(args)
    seq_lens = args.tensor("seq_lens", ("B",), check.INTEGER, optional=True)
    is_live = args.tensor("is_live", ("B",), (*check.INTEGER, torch.bool), optional=True)
    if is_live is not None and seq_lens is None:
        args.fail("is_live", "come with seq_lens, whose outputs it masks", "no seq_lens")
    num_logged = batch_size if values["return_logprobs"] else 0
    num_committed = 0 if seq_lens is None else batch_size
    log = args.spec((num_logged, num_columns), torch.float32)
    path = args.spec((num_committed, num_columns), torch.int64)
    return Output(
        *walk, logprobs=log, raw_logprobs=log,
        new_seq_lens=args.spec((num_committed,), torch.int64 if seq_lens is None else seq_lens.dtype),
        bonus_tokens=args.spec((num_committed,), torch.int64), accept_lengths=args.spec((num_committed,), torch.int32),
        tokens=path, hidden_rows=path, last_row=args.spec((num_committed,), torch.int64),
    )  # fmt: skip


def draws_all_rows(target_logits: torch.Tensor, batch_size: int, spec_steps: int, has_filters: bool) -> bool:
    """Tells whether scanning and drawing all rows at once takes less time than the visited ones level by level."""
    num_rows, vocab_size = target_logits.shape
    model = tuning.row(CHOICE_TUNING, target_logits.device)
    prefix = "" if has_filters else "plain_"
    row_us = vocab_size * target_logits.element_size() / model["bytes_per_us"]
    rounds = triton.cdiv(num_rows, target.num_multiprocessors(target_logits.device))
    all_us = num_rows * row_us + model[prefix + "draw_us"] * rounds
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
    """Verifies token trees by sample and match: emits exactly the text that plain sampling would draw.

    At each node it draws the token that `sample_from_logits` draws there: equal logits, seed and position give the same
    token, with or without a tree around it, in any batch. If a child carries it (the first, if several do), that draft
    is accepted and becomes the current node; otherwise the token ends the walk as the bonus. The text does not depend
    on the drafts or where they come from, and no draft probabilities are needed.
    Symbols: B requests, N nodes of a tree (1..1024), V tokens (1..2^20).

    Args:
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling: [B, N] int. Trees, as in `verify_tree`.
        target_logits: [B * N, V] fp32, fp16 or bf16. This and the parameters down to token_bitmask are as in
            `sample_from_logits`, but per node or per request.
        positions: [B * N] int. Position of each node; the token drawn at a node has position + 1.
        seeds: [B] int.
        temperature: [B] fp32.
        top_k: None or [B] int.
        top_p, min_p: None or [B] fp32.
        repetition_penalty, frequency_penalty, presence_penalty: None or [B] fp32. The drafts from the root to a node,
            the node included, count as output there.
        prompt_mask: None or [B, ceil(V / 32)] int32.
        output_counts: None or [B, V] int32. Occurrences in the committed output, the root included.
        logit_bias: None or [B, V] fp32, fp16 or bf16.
        token_bitmask: None or [B * N, ceil(V / 32)] int32. Tokens that the grammar allows after each node.
        seq_lens: None or [B] int. Committed tokens of each request, without the root: asks for `verify_commit`'s
            results, from new_seq_lens on.
        is_live: None or [B] int or bool. With seq_lens, for these outputs only: 0 for dead rows. None: all are live.
        simulated_rates: None or [S] fp32. As in `verify_tree_greedy`.
        spec_steps: S, 0..1024: the most drafts to accept.
        filter_order: as in `sample_from_logits`.
        return_logprobs: compute logprobs and raw_logprobs.
        accept_policy: as in `verify_tree_greedy`; with "reject_all" the bonus is what the root's row draws.
        out: eleven tensors to write into, of the shapes below.

    Returns:
        A named tuple, as from `verify_tree`; results not asked for have 0 in place of B:
        predicts: [B * N] int32. The tokens drawn, -1 off the path.
        accept_index: [B, S + 1] int32. -1 padded.
        accept_token_num: [B] int32.
        logprobs: [B, S + 1] fp32. Log-probability of each emitted token among the tokens that were kept (in greedy rows
            among all, at temperature 1), -inf past the path.
        raw_logprobs: [B, S + 1] fp32. The same, from the logits as given, at temperature 1.
        new_seq_lens: [B] int, the dtype of seq_lens.
        bonus_tokens: [B] int64.
        accept_lengths: [B] int32.
        tokens, hidden_rows: [B, S + 1] int64.
        last_row: [B] int64.

    Raises:
        ValueError, TypeError: an argument breaks a rule above. EAGLE_KERNELS_DEBUG=1 also checks links,
            simulated_rates, and what it checks in `sample_from_logits`.

    Source:
        EAGLE-2, https://arxiv.org/abs/2406.16858, whose recursive rejection has the same distribution for distinct
        siblings; the rule is FastDeploy's TARGET_MATCH on trees. Links as in SGLang's verify_tree_greedy.

    Example:
        >>> tree = [torch.tensor([x]) for x in ([4, 1, 2], [0, 1, 2], [1, -1, -1], [-1, 2, -1])]  # 4 above 1 and 2
        >>> logits = 100 * torch.eye(5)[[2, 0, 4]]  # the target is sure of 2 at the root, and of 4 at node 2
        >>> step = eagle_kernels.verify_tree_sampled(
        ...     *tree, logits, torch.tensor([7, 8, 8]), torch.tensor([1]), torch.tensor([1.0]), spec_steps=2)
        >>> step.predicts.tolist(), step.accept_index.tolist()
        ([2, -1, 4], [[0, 2, -1]])
    """
    values = locals()
    out = check.allocate("verify_tree_sampled", contract(values), out)
    needs_path = logits.has_penalties(values) or return_logprobs
    if needs_path or not draws_all_rows(target_logits, len(candidates), spec_steps, sampling.has_filters(values)):
        walk_by_levels(values, out)
        return out
    drawn = torch.empty((len(target_logits),), dtype=torch.int64, device=target_logits.device)
    # the position of a token that is drawn at a node is one above that of the node
    places = {"rows_per_request": candidates.shape[1], "position_offset": 1}
    sample_rows("verify_tree_sampled", values, target_logits, drawn, **places)
    walk = {"coins": bundle(Coins, values), "drawn_ptr": drawn, "ACCEPT_POLICY": accept_policy}
    walk |= tree_arguments(values) | store_arguments(values, out) | tuning.row(WALK_TUNING, candidates.device)
    launch("verify_tree_sampled", _verify_tree_sampled_walk_kernel, (len(candidates),), **walk)
    return out
