"""Forced acceptance, for tests and timing.

    normal       a walk goes to the child that carries the target's token
    reject_all   it ends at the root: the text is the target's own, a token a step
    accept_all   it goes to the first child, whose token is planted in the place of the target's
    simulate     likewise, by coins with given rates of acceptance per depth; where it is to end, a token of a child
                 gives way to another one

Rows are read, walks made and KV moved as for a model with this acceptance; planted text is not the target's.
"""

import torch

from ..runtime import check
from ..runtime.language import tl, triton
from .random import STREAM_SIMULATE, uniform
from .tree_walk import NO_TOKEN, find_child

STREAM = tl.constexpr(STREAM_SIMULATE)

ACCEPT_POLICIES = ("normal", "accept_all", "reject_all", "simulate")


def check_policy(args: check.Arguments) -> None:
    """Checks accept_policy and, for simulate, its rates [S] and the seeds [B] and positions [B * N] of its coins."""
    if args.choice("accept_policy", ACCEPT_POLICIES) == "simulate":
        rates = args.tensor("simulated_rates", (args.values["spec_steps"],), (torch.float32,))
        args.debug("simulated_rates", "lie in 0..1", lambda: (rates >= 0) & (rates <= 1))
        args.tensor("seeds", ("B",), check.INTEGER)
        args.tensor("positions", (args.size("B") * args.size("N"),), check.INTEGER)
    elif args.values["simulated_rates"] is not None:
        args.fail("simulated_rates", "come with accept_policy='simulate'", repr(args.values["accept_policy"]))


@triton.jit
def plant(
    token, node, depth, tree, request, coins,
    SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr, ACCEPT_POLICY: tl.constexpr,
):  # fmt: skip
    """Returns what replaces the target's `token` (int32) at `node`, to which `depth` accepted drafts have led.
    Below depth SPEC_STEPS nothing is accepted, so nothing is planted."""
    if (ACCEPT_POLICY == "accept_all") | (ACCEPT_POLICY == "simulate"):
        if depth < SPEC_STEPS:
            is_wanted = tl.full([], True, tl.int1)
            if ACCEPT_POLICY == "simulate":
                is_wanted = is_accepted_by_coin(depth, request, coins, NUM_NODES)
            token = planted_token(token, node, is_wanted, tree)
    return token


@triton.jit
def next_node(child, ACCEPT_POLICY: tl.constexpr):
    """Returns the child that a walk goes to, -1 if the policy ends it before."""
    if ACCEPT_POLICY == "reject_all":
        child = tl.full([], -1, tl.int32)
    return child


@triton.jit
def is_accepted_by_coin(depth, request, coins, NUM_NODES: tl.constexpr):
    """Tells whether the coin of this depth accepts the draft below it. It does so with probability rates[depth] over
    the rate of the depth before: rates[depth] is the probability that more than `depth` drafts are accepted."""
    position = tl.load(coins.positions + request * NUM_NODES).to(tl.int64) + depth + 1
    coin = uniform(tl.load(coins.seeds + request), position, STREAM, 0)
    rate = tl.load(coins.simulated_rates + depth)
    rate_before = tl.load(coins.simulated_rates + depth - 1, mask=depth > 0, other=1.0)
    # not divided: 0 / 0 is no rate, and below 1 the product of equal rates stays below them
    return coin * rate_before < rate


@triton.jit
def planted_token(token, node, is_wanted, tree):
    """Returns the token to plant at `node`.
    If one more draft is wanted, this is the token of the first child that carries one, or `token` where none does. If
    not, a `token` that a child carries is replaced by the smallest id that none carries; any other stays."""
    tokens, links = tree.tokens, tree.links
    nodes = tl.arange(0, links.shape[0])
    is_child = nodes < 0
    first_token = tl.full([], NO_TOKEN, tl.int32)
    child = tl.sum(tl.where(nodes == node, links, 0)) >> 16
    while child > 0:
        is_here = nodes == child
        is_child = is_child | is_here
        first_token = tl.where(first_token >= 0, first_token, tl.sum(tl.where(is_here, tokens, 0)))
        child = tl.sum(tl.where(is_here, links, 0)) & 0xFFFF
    is_carried = tl.max((is_child & (tokens == token)).to(tl.int32)) > 0
    must_change = is_carried & (is_wanted == 0)
    stop_token = tl.where(must_change, 0, token)
    while must_change:  # at most once for every child, and once more
        must_change = tl.max((is_child & (tokens == stop_token)).to(tl.int32)) > 0
        stop_token += must_change.to(tl.int32)
    return tl.where(is_wanted & (first_token >= 0), first_token, stop_token)


@triton.jit
def plant_path(
    predicted, tree, request, coins, SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr, ACCEPT_POLICY: tl.constexpr
):
    """Returns the target's tokens `predicted` [node] with planted ones at the nodes that they lead to."""
    if (ACCEPT_POLICY == "accept_all") | (ACCEPT_POLICY == "simulate"):
        nodes = tl.arange(0, tree.links.shape[0])
        depth = tl.zeros([], dtype=tl.int32)
        node = tl.zeros([], dtype=tl.int32)
        is_walking = depth < SPEC_STEPS
        while is_walking:
            token = tl.sum(tl.where(nodes == node, predicted, 0))
            token = plant(token, node, depth, tree, request, coins, SPEC_STEPS, NUM_NODES, ACCEPT_POLICY=ACCEPT_POLICY)
            predicted = tl.where(nodes == node, token, predicted)
            node = find_child(tree, node, token)
            depth += 1
            is_walking = (node > 0) & (depth < SPEC_STEPS)
    return predicted
