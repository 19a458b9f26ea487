"""Verification by coins from target probabilities: one coin a node against the mass of its children, then a residual.

Computes:
    Of the children of a node in sibling order, each of probability p:
        mass += p;  accepted iff p > 0 and (coin < mass / max(threshold_acc, 1e-9) or p >= threshold_single)
    The bonus is drawn by inverse CDF from the last node's row without its rejected tokens, unnormalised (relu(target -
    draft) with draft = target on them). With both thresholds 1 one coin picks a child or the residual as one draw from
    the row would: lossless. threshold_acc = a multiplies the chance that one of the children is accepted by up to
    1 / a.
Invariants: A token outside 0 .. V - 1 has probability 0. The bonus is the first token of a positive probability at
    which the sum passes coin * mass, the last one of them if rounding lets none pass. Results of a request do not
    depend on the batch around it.
Grid: walk (B,), one program walks one tree; mass (B, slices), one program sums a slice of the row at which a walk
    ended, in groups; draw (B,), one program finds the group and in it the token.
Launches: 3: walk, mass, draw
Traffic: V * 4 bytes a request for the row of the bonus, the children's probabilities of visited nodes, 6 words a node.
"""

from __future__ import annotations

import math

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.tree_walk import (
    MET,
    Output,
    Walk,
    all_nodes,
    check_tree,
    is_own,
    load_nodes,
    output_arguments,
    store_walk,
    tree_arguments,
)
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher

# One warp walks, and one draws: what they look up lies in its own registers.
TUNING = {"default": {"num_warps": 1}}
# A group of 128 tokens is what one warp loads at once, 16 bytes a lane.
MASS_TUNING = {"default": {"BLOCK_VOCAB": 4096, "BLOCK_GROUP": 128, "num_warps": 4}}
DRAW_TUNING = {"default": {"num_warps": 1}}


@triton.jit(do_not_specialize=["stride_probs_request", "stride_probs_node"])
def _verify_tree_coins_kernel(
    links, target_probs_ptr, uniform_samples_ptr,
    out, ends_ptr,  # outputs
    threshold_single, threshold_acc, stride_probs_request, stride_probs_node,
    SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr, VOCAB_SIZE: tl.constexpr, KEEPS_UNVISITED: tl.constexpr,
    ANY_ORDER: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Walks one tree and writes all outputs but the bonus. ends [B, 1 + N] gets the last node (-1 for a dead row) and
    the tokens rejected there. One loop goes over the siblings of all levels. A level waits for memory once: the row of
    a node that was just reached is read at the tokens of all nodes, whichever of them are its children."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    node = all_nodes(NUM_NODES)
    is_node = node < NUM_NODES
    retrieved, tokens, steps = load_nodes(links, request, NUM_NODES, ANY_ORDER)
    coins = tl.load(uniform_samples_ptr + request * NUM_NODES + node, mask=is_node, other=0.0)
    row_ptr = target_probs_ptr + request * stride_probs_request
    probs = _token_probs(row_ptr, tokens, VOCAB_SIZE)

    depth = tl.where((node == 0) & is_own(retrieved, request, NUM_NODES), 0, -1)
    is_live = tl.max(depth) == 0
    predicted = tl.full(node.shape, -1, tl.int32)
    is_rejected = node < 0
    current = tl.zeros([], dtype=tl.int32)
    accepted = tl.zeros([], dtype=tl.int32)
    mass = tl.zeros([], dtype=tl.float32)
    coin = _pick_float(coins, node == 0)
    child = tl.where(is_live, tl.sum(tl.where(node == 0, steps, 0)) >> 16, 0)
    if SPEC_STEPS > 0:  # triton 3.6 does not compile loads in a loop that it can tell to be never entered
        while child > 0:
            is_child = node == child
            child_links = tl.sum(tl.where(is_child, steps, 0))
            if ANY_ORDER:  # a node that was met before ends the walk, and is as if it were not there
                is_child = is_child & (child_links != MET)
                child_links = tl.where(child_links == MET, 0, child_links)
                steps = tl.where(is_child, MET, steps)
            token = tl.sum(tl.where(is_child, tokens, 0))
            child_coin = _pick_float(coins, is_child)
            is_repeated = tl.max((is_rejected & (tokens == token)).to(tl.int32)) > 0
            prob = tl.where(is_repeated, 0.0, _pick_float(probs, is_child))
            mass += prob
            # rounded as every division is: the sum of all children may stand exactly on the coin
            is_covered = coin < tl.math.div_rn(mass, threshold_acc)
            step = ((prob > 0.0) & (is_covered | (prob >= threshold_single))).to(tl.int32)
            is_accepted = step > 0  # of integers: Triton's interpreter spreads what two floats compare to as a float

            accepted += step
            depth = tl.where(is_child & is_accepted, accepted, depth)
            predicted = tl.where((node == current) & is_accepted, token, predicted)
            is_rejected = (is_rejected | is_child) & (is_accepted == 0)
            current = tl.where(is_accepted, child, current)
            coin = tl.where(is_accepted, child_coin, coin)
            mass = tl.where(is_accepted, 0.0, mass)
            below = tl.where(accepted < SPEC_STEPS, child_links >> 16, 0)
            child = tl.where(is_accepted, below, child_links & 0xFFFF)
            if is_accepted & (child > 0):
                probs = _token_probs(row_ptr + current * stride_probs_node.to(tl.int64), tokens, VOCAB_SIZE)

    # the last node's token is not known yet: -1 until it is drawn
    store_walk(out, request, Walk(retrieved, predicted, depth), SPEC_STEPS, NUM_NODES, KEEPS_UNVISITED)
    ends_ptr += request * (NUM_NODES + 1)
    tl.store(ends_ptr, tl.where(is_live, current, -1))
    tl.store(ends_ptr + 1 + node, tl.where(is_rejected, tokens, -1), mask=is_node)


@triton.jit(do_not_specialize=["stride_probs_request", "stride_probs_node"])
def _verify_tree_coins_mass_kernel(
    target_probs_ptr, ends_ptr, sums_ptr, stride_probs_request, stride_probs_node,
    NUM_NODES: tl.constexpr, VOCAB_SIZE: tl.constexpr, NUM_GROUPS: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr, BLOCK_GROUP: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Writes the residual mass of every group of one slice of the row at which a walk ended, to sums [B, groups]."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    last, rejected = _load_end(ends_ptr, request, NUM_NODES)
    if last >= 0:
        offset = request * stride_probs_request + last * stride_probs_node.to(tl.int64)
        row_ptr = target_probs_ptr + tl.multiple_of(offset, ALIGNMENT)
        probs = _residual(row_ptr, part * BLOCK_VOCAB, rejected, VOCAB_SIZE, BLOCK_VOCAB)
        SLICE_GROUPS: tl.constexpr = BLOCK_VOCAB // BLOCK_GROUP
        # [group, token]
        sums = tl.sum(tl.reshape(probs, [SLICE_GROUPS, BLOCK_GROUP]), axis=1)
        group = part * SLICE_GROUPS + tl.arange(0, SLICE_GROUPS)
        tl.store(sums_ptr + request * NUM_GROUPS + group, sums)


@triton.jit(do_not_specialize=["stride_probs_request", "stride_probs_node"])
def _verify_tree_coins_draw_kernel(
    target_probs_ptr, uniform_samples_for_final_sampling_ptr, ends_ptr, sums_ptr, predicts_ptr, stride_probs_request,
    stride_probs_node,
    NUM_NODES: tl.constexpr, VOCAB_SIZE: tl.constexpr, NUM_GROUPS: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Draws the bonus of one request: first the group, by the sums, then the token within it."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    last, rejected = _load_end(ends_ptr, request, NUM_NODES)
    coin = tl.load(uniform_samples_for_final_sampling_ptr + request)
    if last >= 0:
        group = tl.arange(0, next_power_of_2(NUM_GROUPS))
        sums = tl.load(sums_ptr + request * NUM_GROUPS + group, mask=group < NUM_GROUPS, other=0.0)
        reached = tl.cumsum(sums, axis=0)
        level = coin * tl.sum(tl.where(group == group.shape[0] - 1, reached, 0.0))
        chosen = _first_above(group, sums, reached, level)
        token = VOCAB_SIZE - 1
        if chosen >= 0:
            before = tl.sum(tl.where(group == chosen - 1, reached, 0.0))
            offset = request * stride_probs_request + last * stride_probs_node.to(tl.int64)
            row_ptr = target_probs_ptr + tl.multiple_of(offset, ALIGNMENT)
            start = chosen * BLOCK_GROUP
            probs = _residual(row_ptr, start, rejected, VOCAB_SIZE, BLOCK_GROUP)
            within = before + tl.cumsum(probs, axis=0)
            token = start + _first_above(tl.arange(0, BLOCK_GROUP), probs, within, level)
        tl.store(predicts_ptr + request * NUM_NODES + last, token)


@triton.jit
def _pick_float(values, is_lane):
    """Returns the fp32 of the one lane that is_lane marks; as bits, since a warp adds integers in one instruction."""
    bits = tl.where(is_lane, values.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits).to(tl.float32, bitcast=True)


@triton.jit
def _load_end(ends_ptr, request, NUM_NODES: tl.constexpr):
    """Loads the node at which a walk ended, -1 for none, and the tokens [node] rejected there, -1 for none."""
    node = all_nodes(NUM_NODES)
    ends_ptr += request * (NUM_NODES + 1)
    return tl.load(ends_ptr), tl.load(ends_ptr + 1 + node, mask=node < NUM_NODES, other=-1)


@triton.jit
def _as_probs(values):
    """Returns fp32 values with 0 in place of NaN, infinities and negative ones."""
    return tl.where((values > 0.0) & (values < float("inf")), values, 0.0)


@triton.jit
def _token_probs(row_ptr, tokens, VOCAB_SIZE: tl.constexpr):
    """Returns what the row gives each of the tokens int32; 0 for one outside the vocabulary."""
    is_token = (tokens >= 0) & (tokens < VOCAB_SIZE)
    return _as_probs(tl.load(row_ptr + tokens, mask=is_token, other=0.0))


@triton.jit
def _residual(row_ptr, start, rejected, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns BLOCK probabilities of a row from `start` on, 0 for the tokens in `rejected` and past the row's end.
    Rejected tokens within the block, mostly none, are masked one after another: each round ends one of them."""
    index = start + tl.arange(0, BLOCK)
    probs = _as_probs(tl.load(row_ptr + index, mask=index < VOCAB_SIZE, other=0.0))
    rejected = tl.where((rejected >= start) & (rejected < start + BLOCK), rejected, -1)
    token = tl.max(rejected)
    while token >= 0:
        probs = tl.where(index == token, 0.0, probs)
        rejected = tl.where(rejected == token, -1, rejected)
        token = tl.max(rejected)
    return probs


@triton.jit
def _first_above(index, values, reached, level):
    """Returns the first index of a positive value at which the running sum `reached` is above `level`.
    Where there is none, which rounding or a coin outside [0, 1) can cause, this is the last index of a positive value,
    or -1 without one."""
    is_positive = values > 0.0
    first = tl.min(tl.where(is_positive & (reached > level), index, 2147483647))
    return tl.where(first == 2147483647, tl.max(tl.where(is_positive, index, -1)), first)


def contract(values: dict) -> Output:
    args = check.Arguments("verify_tree_coins", values)
    output = check_tree(args)
    batch_size, num_nodes = args.size("B"), args.size("N")
    is_flat = isinstance(values["target_probs"], torch.Tensor) and values["target_probs"].dim() == 2
    shape = (batch_size * num_nodes, "V") if is_flat else ("B", "N", "V")
    args.tensor("target_probs", shape, (torch.float32,), contiguous=1)
    if args.size("V") == 0:
        args.fail("target_probs", "have at least one token a row", list(values["target_probs"].shape))
    args.tensor("uniform_samples", ("B", "N"), (torch.float32,))
    args.tensor("uniform_samples_for_final_sampling", ("B",), (torch.float32,))
    for name in ("threshold_single", "threshold_acc"):
        if not 0.0 <= values[name] <= 1.0:
            args.fail(name, "lie in 0..1", values[name])
    for name in ("uniform_samples", "uniform_samples_for_final_sampling"):
        args.debug(name, "lie in [0, 1)", lambda name=name: (values[name] >= 0) & (values[name] < 1))
    if values["keep_unvisited"] and values.get("out") is None:
        args.fail("keep_unvisited", "come with out, whose predicts it keeps", True)
    return output


@launcher
def verify_tree_coins(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_probs: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    *,
    spec_steps: int,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    keep_unvisited: bool = False,
    any_order: bool = False,
    out: Output | None = None,
) -> Output:
    """Verifies token trees with given coins and target probabilities; lossless at the default thresholds.

    The probabilities of a node's children are summed in sibling order; the first child whose sum exceeds the node's
    coin is accepted. If there is none, the bonus is drawn from the row without these children; after S drafts, from the
    whole row. The text follows the target's distribution if rows sum to 1, and coins are independent, uniform and
    unknown when the tree is drafted.
    Symbols: B requests, N nodes of a tree (1..1024), V tokens (at least 1).

    Args:
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling: [B, N] int. Trees, as in `verify_tree`.
        target_probs: [B, N, V] or [B * N, V] fp32. Unit stride along V. NaN, infinite and negative ones count as 0.
        uniform_samples: [B, N] fp32. Coin of each node in [0, 1), for its children.
        uniform_samples_for_final_sampling: [B] fp32. Coin of the bonus in [0, 1).
        spec_steps: S, 0..1024: the most drafts to accept.
        threshold_single: in 0..1. LOSSY below 1: a child of at least this probability is accepted whatever the coin.
        threshold_acc: in 0..1. LOSSY below 1: sums are divided by it before they are compared.
        keep_unvisited: leaves predicts off the path as they are; only with `out`.
        any_order: links may point backwards, too, as those of `build_tree(any_order=True)` do; a link to the root or to
            a visited node counts as none.
        out: three tensors to write into.

    Returns:
        A named tuple, as from `verify_tree`:
        predicts: [B * N] int32. The tokens emitted, -1 off the path.
        accept_index: [B, S + 1] int32. -1 padded.
        accept_token_num: [B] int32.

        A token that an earlier sibling carries has probability 0. Such tokens are not emitted, except V - 1 if a row
        has no mass left.

    Raises:
        ValueError, TypeError: an argument breaks a rule above. EAGLE_KERNELS_DEBUG=1 also checks coins and
            links.

    Source:
        SGLang's tree_speculative_sampling_target_only, by the rule of its newer versions, without draft_probs; SGLang
        counts repeated tokens twice, which is lossy. For trees of EAGLE, https://arxiv.org/abs/2401.15077, and EAGLE-2,
        https://arxiv.org/abs/2406.16858.

    Example:
        >>> tree = [torch.tensor([x]) for x in ([3, 1, 2], [0, 1, 2], [1, -1, -1], [-1, 2, -1])]  # 3 above 1 and 2
        >>> probs = torch.tensor([[0.0, 0.25, 0.5, 0.25], [0.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.0, 0.0]])
        >>> eagle_kernels.verify_tree_coins(  # 0.25 does not exceed the coin 0.6, 0.25 + 0.5 does
        ...     *tree, probs, torch.tensor([[0.6, 0.0, 0.0]]), torch.tensor([0.7]), spec_steps=1).predicts.tolist()
        [2, -1, 1]
    """
    values = locals()
    out = check.allocate("verify_tree_coins", contract(values), out)
    device, (batch_size, num_nodes) = candidates.device, candidates.shape
    vocab_size = target_probs.shape[-1]
    stride_node = target_probs.stride(-2)
    stride_request = num_nodes * stride_node if target_probs.dim() == 2 else target_probs.stride(0)
    mass = tuning.row(MASS_TUNING, device)
    num_slices = triton.cdiv(vocab_size, mass["BLOCK_VOCAB"])
    num_groups = num_slices * (mass["BLOCK_VOCAB"] // mass["BLOCK_GROUP"])
    ends = torch.empty((batch_size, 1 + num_nodes), dtype=torch.int32, device=device)
    sums = torch.empty((batch_size, num_groups), dtype=torch.float32, device=device)
    shared = {
        "target_probs_ptr": target_probs, "ends_ptr": ends, "stride_probs_request": stride_request,
        "stride_probs_node": stride_node, "NUM_NODES": num_nodes, "VOCAB_SIZE": vocab_size,
    }  # fmt: skip
    # what is known of the offset of every row, so that loads can be wide
    alignment = math.gcd(stride_request, stride_node, 16)
    row = shared | {"sums_ptr": sums, "NUM_GROUPS": num_groups, "ALIGNMENT": alignment}
    own = {
        "uniform_samples_ptr": uniform_samples, "threshold_single": float(threshold_single),
        "threshold_acc": max(float(threshold_acc), 1e-9), "KEEPS_UNVISITED": keep_unvisited, "ANY_ORDER": any_order,
    }  # fmt: skip
    walk = shared | tree_arguments(values) | output_arguments(out) | tuning.row(TUNING, device)
    launch("verify_tree_coins", _verify_tree_coins_kernel, (batch_size,), **own, **walk)
    launch("verify_tree_coins", _verify_tree_coins_mass_kernel, (batch_size, num_slices), **row, **mass)
    draw = {"predicts_ptr": out.predicts, "BLOCK_GROUP": mass["BLOCK_GROUP"], **tuning.row(DRAW_TUNING, device)}
    draw["uniform_samples_for_final_sampling_ptr"] = uniform_samples_for_final_sampling
    launch("verify_tree_coins", _verify_tree_coins_draw_kernel, (batch_size,), **row, **draw)
    return out
