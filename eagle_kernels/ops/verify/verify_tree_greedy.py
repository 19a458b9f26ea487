"""Greedy verification: follows the target's argmax through the tree.

Computes
    From the root: the target's token at the current node (its argmax) is the next token of plain greedy decoding. If a
    child carries it, that draft is accepted and becomes the current node; else the token ends the walk as the bonus.
    EAGLE (arXiv 2401.15077) with the first-child / next-sibling walk of SGLang.
Shapes
    candidates              [B, N]      int    tokens of the nodes, node 0 the root
    retrieve_index          [B, N]      int    b * N + i
    retrieve_next_token     [B, N]      int    first child, -1 for none
    retrieve_next_sibling   [B, N]      int    next sibling, -1 for none
    target_predict          [B, N]      int    the target's token at every node; or
    target_logits           [B * N, V]  fp32 / fp16 / bf16, unit stride along V: argmax taken of visited nodes only
    -> predicts             [B * N]     int32  the target's token at visited nodes, -1 elsewhere
    -> accept_index         [B, S + 1]  int32  retrieve_index of the path, root first, -1 padded
    -> accept_token_num     [B]         int32  accepted drafts; the bonus is not counted
Invariants
    Every output is written whole. At most spec_steps = S drafts are accepted. Ties go to the lowest id, NaN counts as
    -inf; a target id outside int32 counts as -1. Links that do not point forward within the tree end the walk; a token
    of -1 is never accepted. A row whose root has a retrieve_index outside the request is dead: predicts and
    accept_index -1, accept_token_num 0.
Grid
    (B,), one program walks one tree.
Launches
    1
Traffic
    from ids: a few words per visited node; from logits: V * element size per visited node, at most S + 1 of N.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives import sampling
from ...primitives.random import STREAM_TARGET
from ...primitives.sampling import draw_token
from ...primitives.tree import advance, is_own, store_walk
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch

TUNING = sampling.TUNING


class Output(NamedTuple):
    """What the verify ops return."""

    predicts: torch.Tensor
    accept_index: torch.Tensor
    accept_token_num: torch.Tensor


@triton.jit(do_not_specialize=["vocab_size", "stride_logits_row"])
def _verify_tree_greedy_kernel(
    # inputs
    candidates_ptr,
    retrieve_index_ptr,
    retrieve_next_token_ptr,
    retrieve_next_sibling_ptr,
    target_predict_ptr,
    target_logits_ptr,
    # outputs
    predicts_ptr,
    accept_index_ptr,
    accept_token_num_ptr,
    # sizes
    vocab_size,
    stride_logits_row,
    SPEC_STEPS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    HAS_LOGITS: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    offset = request * NUM_NODES
    node = tl.arange(0, BLOCK_NODE)
    root = tl.load(retrieve_index_ptr + offset).to(tl.int64)
    is_walking = is_own(root, request, NUM_NODES)
    predicts = tl.full([BLOCK_NODE], -1, tl.int32)
    accept_index = tl.where((tl.arange(0, BLOCK_DEPTH) == 0) & is_walking, root, -1)
    current = tl.zeros([], dtype=tl.int32)
    accepted = tl.zeros([], dtype=tl.int32)
    while is_walking:
        if HAS_LOGITS:
            row_ptr = target_logits_ptr + (offset + current) * stride_logits_row
            token = draw_token(
                row_ptr, vocab_size, 0.0, 0, 1.0, 0.0, request, request,
                HAS_TOP_K=False, HAS_TOP_P=False, HAS_MIN_P=False, STREAM=STREAM, BLOCK_VOCAB=BLOCK_VOCAB,
            )  # fmt: skip
        else:
            wide_token = tl.load(target_predict_ptr + offset + current).to(tl.int64)
            token = tl.where((wide_token >= 0) & (wide_token < 2147483648), wide_token, -1).to(tl.int32)
        predicts = tl.where(node == current, token, predicts)
        is_walking, current, accepted, accept_index = advance(
            candidates_ptr, retrieve_index_ptr, retrieve_next_token_ptr, retrieve_next_sibling_ptr,
            request, current, token, accepted, accept_index, SPEC_STEPS, NUM_NODES, BLOCK_DEPTH,
        )  # fmt: skip
    store_walk(
        predicts_ptr, accept_index_ptr, accept_token_num_ptr, request, predicts, accept_index, accepted,
        SPEC_STEPS, NUM_NODES, BLOCK_NODE, BLOCK_DEPTH,
    )  # fmt: skip


def contract(values: dict) -> Output:
    """Checks the arguments of `verify_tree_greedy` and describes its outputs."""
    args = check.Arguments("verify_tree_greedy", values)
    output = tree_contract(args)
    if args.exactly_one("target_predict", "target_logits") == "target_predict":
        args.tensor("target_predict", ("B", "N"), check.INTEGER)
    else:
        args.tensor("target_logits", (args.size("B") * args.size("N"), "V"), check.FLOAT, contiguous=1)
        sampling.check_vocabulary(args, "target_logits")
    return output


def tree_contract(args: check.Arguments) -> Output:
    """What every tree-verification op asks of the tree, and what it returns."""
    spec_steps = args.integer("spec_steps", 0)
    for name in ("candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling"):
        args.tensor(name, ("B", "N"), check.INTEGER)
    batch_size, num_nodes = args.size("B"), args.size("N")
    if num_nodes == 0:
        args.fail("candidates", "hold at least the root", [batch_size, num_nodes])
    return Output(
        args.spec((batch_size * num_nodes,), torch.int32),
        args.spec((batch_size, spec_steps + 1), torch.int32),
        args.spec((batch_size,), torch.int32),
    )


def verify_tree_greedy(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor | None = None,
    target_logits: torch.Tensor | None = None,
    *,
    spec_steps: int,
    out: Output | None = None,
) -> Output:
    """Walks every tree greedily; give the target's token ids or its logits. Shapes are in the module's docstring.

    spec_steps: S, the most drafts that can be accepted; accept_index has S + 1 columns.
    """
    contracted = contract(locals())
    out = check.allocate("verify_tree_greedy", contracted, out)
    batch_size, num_nodes = candidates.shape
    from_logits = target_logits is not None
    launch(
        "verify_tree_greedy",
        _verify_tree_greedy_kernel,
        (batch_size,),
        candidates_ptr=candidates,
        retrieve_index_ptr=retrieve_index,
        retrieve_next_token_ptr=retrieve_next_token,
        retrieve_next_sibling_ptr=retrieve_next_sibling,
        target_predict_ptr=target_predict,
        target_logits_ptr=target_logits,
        predicts_ptr=out.predicts,
        accept_index_ptr=out.accept_index,
        accept_token_num_ptr=out.accept_token_num,
        vocab_size=target_logits.shape[1] if from_logits else 0,
        stride_logits_row=target_logits.stride(0) if from_logits else 0,
        SPEC_STEPS=spec_steps,
        NUM_NODES=num_nodes,
        HAS_LOGITS=from_logits,
        STREAM=STREAM_TARGET,
        BLOCK_NODE=triton.next_power_of_2(num_nodes),
        BLOCK_DEPTH=triton.next_power_of_2(spec_steps + 1),
        **tuning.row(TUNING, candidates.device),
    )
    return out
