"""Reference of verify_tree_greedy."""

import torch

from ...accept_policy import most_accepted, planted
from ...sampling import draw_tokens
from ...tree import Output, walk


def verify_tree_greedy(
    candidates: torch.Tensor, retrieve_index: torch.Tensor, retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor, target_predict: torch.Tensor | None = None,
    target_logits: torch.Tensor | None = None,
    *, spec_steps: int, accept_policy: str = "normal", simulated_rates: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None, positions: torch.Tensor | None = None, keep_unvisited: bool = False,
    any_order: bool = False, out: Output | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/verify/verify_tree_greedy.py; `out` is read for keep_unvisited, not written."""
    num_nodes = candidates.shape[1]
    if target_predict is None:
        rows = torch.zeros(len(target_logits), dtype=torch.int64, device=target_logits.device)
        target_predict = draw_tokens(target_logits, rows, rows, temperature=rows.float()).view(-1, num_nodes)
    target_predict = target_predict.to(torch.int64)
    is_token = (target_predict >= 0) & (target_predict < 2**31)
    predicted = torch.where(is_token, target_predict, -1).tolist()
    links = (candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling)
    token_at = planted(
        lambda request, node: predicted[request][node], *links, spec_steps=spec_steps, accept_policy=accept_policy,
        simulated_rates=simulated_rates, seeds=seeds, positions=positions,
    )  # fmt: skip
    most, unvisited = most_accepted(spec_steps, accept_policy), out.predicts if keep_unvisited else None
    return walk(*links, spec_steps, token_at, unvisited, any_order, most)
