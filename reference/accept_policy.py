"""Forced acceptance: tokens planted in the place of the target's (see eagle_kernels/primitives/accept_policy.py)."""

from collections.abc import Callable

import torch

from .random import STREAM_SIMULATE, uniform
from .tree import children


def planted(
    token_at: Callable[[int, int], int], candidates: torch.Tensor, retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor, retrieve_next_sibling: torch.Tensor,
    *, spec_steps: int, accept_policy: str, simulated_rates: torch.Tensor | None, seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> Callable[[int, int], int]:  # fmt: skip
    """Returns `token_at` for `tree.walk` with the policy's tokens; it must be asked as a walk asks, root first."""
    if accept_policy in ("normal", "reject_all"):
        return token_at
    batch_size, num_nodes = candidates.shape
    tokens = candidates.tolist()
    children_of = children(retrieve_index, retrieve_next_token, retrieve_next_sibling)
    wanted = [[accept_policy == "accept_all"] * spec_steps] * batch_size
    if accept_policy == "simulate":
        wanted = simulated_acceptance(simulated_rates, seeds, positions.view(batch_size, num_nodes)[:, 0]).tolist()
    depth_of = {(request, 0): 0 for request in range(batch_size)}

    def planted_at(request: int, node: int) -> int:
        token, depth = token_at(request, node), depth_of[request, node]
        below = children_of(request, node)
        depth_of.update({(request, child): depth + 1 for child in below})
        carried = [tokens[request][child] for child in below if 0 <= tokens[request][child] < 2**31]
        if depth == spec_steps or not carried:
            return token
        if wanted[request][depth]:
            return carried[0]
        if token not in carried:
            return token
        return next(other for other in range(len(carried) + 1) if other not in carried)

    return planted_at


def most_accepted(spec_steps: int, accept_policy: str) -> int:
    """Returns the most drafts that a walk accepts."""
    return 0 if accept_policy == "reject_all" else spec_steps


def simulated_acceptance(rates: torch.Tensor, seeds: torch.Tensor, root_positions: torch.Tensor) -> torch.Tensor:
    """Tells whether the coin of each depth accepts, [B, S]: at the rate of that depth over the one before it."""
    before = torch.cat([torch.ones_like(rates[:1]), rates[:-1]])
    wanted = [
        uniform(seeds, root_positions.to(torch.int64) + depth + 1, STREAM_SIMULATE) * before[depth] < rates[depth]
        for depth in range(len(rates))
    ]
    return torch.stack(wanted, dim=1) if wanted else torch.zeros(len(seeds), 0, dtype=torch.bool, device="cpu")
