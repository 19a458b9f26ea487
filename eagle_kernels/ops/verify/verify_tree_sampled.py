"""Stochastic verification by sample and match: the text that plain sampling would have drawn.

Computes
    From the root: draw the token that plain sampling draws at the current node (`sample_from_logits`: temperature,
    top-k, top-p, min-p, Gumbel noise keyed by seed, position and token id). If a child carries it, that draft is
    accepted and becomes the current node; else the token ends the walk as the bonus. The drafts are a function of the
    prefix alone (top-k trees), so following a child has probability p(child): the law is the target's, for distinct
    siblings the same as that of the recursive rejection of EAGLE-2 (arXiv 2406.16858) and of SGLang's coin walk.
    Draft probabilities are not needed. Rows of temperature 0 are greedy.
Shapes
    candidates              [B, N]      int    tokens of the nodes, node 0 the root
    retrieve_index          [B, N]      int    b * N + i
    retrieve_next_token     [B, N]      int    first child, -1 for none
    retrieve_next_sibling   [B, N]      int    next sibling, -1 for none
    target_logits           [B * N, V]  fp32 / fp16 / bf16, unit stride along V
    positions               [B * N]     int    position of each node; the token drawn at a node has position + 1
    seeds                   [B]         int
    temperature             [B]         fp32   0 (anything below 1e-5): greedy
    top_k, top_p, min_p     [B]         int, fp32, fp32, or None; off at <= 0 (or >= V), >= 1, <= 0
    -> predicts             [B * N]     int32  the token drawn at visited nodes, -1 elsewhere
    -> accept_index         [B, S + 1]  int32  retrieve_index of the path, root first, -1 padded
    -> accept_token_num     [B]         int32  accepted drafts; the bonus is not counted
Invariants
    Equal logits, seed and position give the equal token, with or without a tree around it, in any batch. Duplicate
    siblings are harmless: the first one is followed. Malformed links and dead rows as in verify_tree_greedy.
Grid
    (B,), one program walks one tree.
Launches
    1
Traffic
    V * element size per visited node (at most S + 1 of N) without filters.
"""

from __future__ import annotations

import torch

from ...primitives import sampling
from ...primitives.dependent_launch import await_predecessor
from ...primitives.random import STREAM_TARGET
from ...primitives.sampling import draw_token
from ...primitives.tree_walk import Output, check_tree, find_child, is_own, load_nodes, store_walk
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher

TUNING = sampling.TUNING


@triton.jit(do_not_specialize=["vocab_size", "stride_logits_row"])
def _verify_tree_sampled_kernel(
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
    # outputs
    predicts_ptr,
    accept_index_ptr,
    accept_token_num_ptr,
    # sizes
    vocab_size,
    stride_logits_row,
    SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    offset = request * NUM_NODES
    seed = tl.load(seeds_ptr + request)
    temperature = tl.load(temperature_ptr + request)
    top_k = tl.load(top_k_ptr + request) if HAS_TOP_K else 0
    top_p = tl.load(top_p_ptr + request) if HAS_TOP_P else 1.0
    min_p = tl.load(min_p_ptr + request) if HAS_MIN_P else 0.0
    node = tl.arange(0, BLOCK_NODE)
    retrieved, tokens, links = load_nodes(
        candidates_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr,
        request, NUM_NODES, BLOCK_NODE,
    )  # fmt: skip
    depth = tl.where((node == 0) & is_own(retrieved, request, NUM_NODES), 0, -1)
    is_walking = tl.max(depth) == 0
    drawn = tl.full([BLOCK_NODE], -1, tl.int32)
    current = tl.zeros([], dtype=tl.int32)
    accepted = tl.zeros([], dtype=tl.int32)
    while is_walking:
        token = draw_token(
            target_logits_ptr + (offset + current) * stride_logits_row,
            vocab_size,
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            tl.load(positions_ptr + offset + current) + 1,
            HAS_TOP_K=HAS_TOP_K,
            HAS_TOP_P=HAS_TOP_P,
            HAS_MIN_P=HAS_MIN_P,
            STREAM=STREAM,
            BLOCK_VOCAB=BLOCK_VOCAB,
        )
        drawn = tl.where(node == current, token, drawn)
        child = find_child(tokens, links, current, token, BLOCK_NODE)
        is_walking = (child > 0) & (accepted < SPEC_STEPS)
        accepted += is_walking.to(tl.int32)
        current = tl.where(is_walking, child, current)
        depth = tl.where((node == child) & is_walking, accepted, depth)
    store_walk(
        predicts_ptr, accept_index_ptr, accept_token_num_ptr, request, retrieved, drawn, depth,
        SPEC_STEPS, NUM_NODES, False, BLOCK_NODE, BLOCK_DEPTH,
    )  # fmt: skip


def contract(values: dict) -> Output:
    """Checks the arguments of `verify_tree_sampled` and describes its outputs."""
    args = check.Arguments("verify_tree_sampled", values)
    output = check_tree(args)
    num_rows = args.size("B") * args.size("N")
    args.tensor("target_logits", (num_rows, "V"), check.FLOAT, contiguous=1)
    args.tensor("positions", (num_rows,), check.INTEGER)
    sampling.check_parameters(args, "B")
    sampling.check_vocabulary(args, "target_logits")
    return output


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
    *,
    spec_steps: int,
    out: Output | None = None,
) -> Output:
    """Samples and matches down every tree; shapes and the meaning of each parameter are in the module's docstring.

    spec_steps: S, the most drafts that can be accepted; accept_index has S + 1 columns.
    """
    contracted = contract(locals())
    out = check.allocate("verify_tree_sampled", contracted, out)
    batch_size, num_nodes = candidates.shape
    launch(
        "verify_tree_sampled",
        _verify_tree_sampled_kernel,
        (batch_size,),
        candidates_ptr=candidates,
        retrieve_index_ptr=retrieve_index,
        retrieve_next_token_ptr=retrieve_next_token,
        retrieve_next_sibling_ptr=retrieve_next_sibling,
        target_logits_ptr=target_logits,
        positions_ptr=positions,
        seeds_ptr=seeds,
        temperature_ptr=temperature,
        top_k_ptr=top_k,
        top_p_ptr=top_p,
        min_p_ptr=min_p,
        predicts_ptr=out.predicts,
        accept_index_ptr=out.accept_index,
        accept_token_num_ptr=out.accept_token_num,
        vocab_size=target_logits.shape[1],
        stride_logits_row=target_logits.stride(0),
        SPEC_STEPS=spec_steps,
        NUM_NODES=num_nodes,
        HAS_TOP_K=top_k is not None,
        HAS_TOP_P=top_p is not None,
        HAS_MIN_P=min_p is not None,
        STREAM=STREAM_TARGET,
        BLOCK_NODE=triton.next_power_of_2(num_nodes),
        BLOCK_DEPTH=triton.next_power_of_2(spec_steps + 1),
        **tuning.row(TUNING, candidates.device),
    )
    return out
