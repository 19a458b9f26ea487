"""Reference of verify_tree, the front door of two ops."""

import torch

from ..tree import Output
from .sampling.verify_tree_sampled import verify_tree_sampled
from .verify.verify_tree_greedy import verify_tree_greedy


def verify_tree(
    candidates: torch.Tensor, retrieve_index: torch.Tensor, retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor, target_logits: torch.Tensor | None = None,
    *, target_predict: torch.Tensor | None = None, positions: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None, temperature: torch.Tensor | None = None, top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None, min_p: torch.Tensor | None = None, accept_policy: str = "normal",
    simulated_rates: torch.Tensor | None = None, spec_steps: int,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/front_door.py."""
    links = (candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling)
    options = {"spec_steps": spec_steps, "accept_policy": accept_policy, "simulated_rates": simulated_rates}
    asks_for_sampling = any(value is not None for value in (temperature, top_k, top_p, min_p))
    if asks_for_sampling or (seeds is not None and accept_policy != "simulate"):
        draws = (positions, seeds, temperature, top_k, top_p, min_p)
        return Output(*verify_tree_sampled(*links, target_logits, *draws, **options)[:3])
    return verify_tree_greedy(*links, target_predict, target_logits, seeds=seeds, positions=positions, **options)
