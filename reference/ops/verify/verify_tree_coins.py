"""Reference of verify_tree_coins: one coin a node walks down the tree, one more draws what follows.

Coins are only compared with `<`, and the last one scaled, so that a test can hand in uniforms that have no value yet
and have every outcome enumerated.
"""

from collections.abc import Callable, Sequence

import torch

from ...tree import Output, children_in, trees, write_paths


def verify_tree_coins(
    candidates: torch.Tensor, retrieve_index: torch.Tensor, retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor, target_probs: torch.Tensor, uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    *, spec_steps: int, threshold_single: float = 1.0, threshold_acc: float = 1.0, keep_unvisited: bool = False,
    any_order: bool = False, out: Output | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/verify/verify_tree_coins.py; `out` is read for keep_unvisited, not written."""
    batch_size, num_nodes = candidates.shape
    probs = target_probs.view(batch_size, num_nodes, target_probs.shape[-1])
    coins, final_coins = uniform_samples.cpu(), uniform_samples_for_final_sampling.cpu()
    tree_of = trees(candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling)

    def verified(request: int) -> tuple[list[int], int]:
        return verify_request(
            *tree_of(request), probs_at=lambda node: probs[request, node].cpu(), final_coin=final_coins[request],
            coin_at=lambda node: coins[request, node], spec_steps=spec_steps, threshold_single=threshold_single,
            threshold_acc=threshold_acc, any_order=any_order,
        )  # fmt: skip

    unvisited = out.predicts if keep_unvisited else None
    return write_paths(candidates, retrieve_index, spec_steps, verified, unvisited)


def verify_request(
    tokens: Sequence[int], first_child: Sequence[int], next_sibling: Sequence[int],
    *, probs_at: Callable[[int], torch.Tensor], coin_at: Callable[[int], torch.Tensor], final_coin: torch.Tensor,
    spec_steps: int, threshold_single: float = 1.0, threshold_acc: float = 1.0, any_order: bool = False,
) -> tuple[list[int], int]:  # fmt: skip
    """Returns the accepted nodes of one tree, root first, and the bonus token.
    probs_at: a node's row of target probabilities [V], whose dtype the arithmetic has.
    coin_at, final_coin: uniforms in [0, 1); anything with `<` that can be scaled."""
    path, rejected = [0], set()
    met = {0} if any_order else None
    while len(path) <= spec_steps:
        probs = as_probs(probs_at(path[-1]))
        coin, mass, rejected = coin_at(path[-1]), probs.new_zeros(()), set()
        single, acc = probs.new_tensor(threshold_single), probs.new_tensor(max(threshold_acc, 1e-9))
        for child in children_in(first_child, next_sibling, path[-1], met):
            token = tokens[child]
            is_new_token = 0 <= token < len(probs) and token not in rejected
            prob = probs[token] if is_new_token else probs.new_zeros(())
            mass = mass + prob
            if prob > 0 and (coin < mass / acc or prob >= single):
                path.append(child)
                rejected = set()
                break
            rejected.add(token)
        else:
            break
    return path, draw(residual(as_probs(probs_at(path[-1])), rejected), final_coin)


def as_probs(row: torch.Tensor) -> torch.Tensor:
    """Returns the row with 0 in place of NaN, infinities and negative values."""
    return torch.where((row > 0) & (row < float("inf")), row, torch.zeros_like(row))


def residual(probs: torch.Tensor, rejected: set[int]) -> torch.Tensor:
    """Returns the row without the rejected tokens, not renormalised."""
    left = probs.clone()
    left[[token for token in rejected if 0 <= token < len(probs)]] = 0
    return left


def draw(probs: torch.Tensor, coin: torch.Tensor) -> int:
    """Returns the first token of a positive probability at which the sum passes coin * mass.
    The last one of them if rounding lets none pass; V - 1 if there is none."""
    support = probs.nonzero().flatten()
    if len(support) == 0:
        return len(probs) - 1
    reached = probs[support].cumsum(0)
    level = coin * reached[-1]
    low, high = 0, len(support) - 1
    while low < high:
        middle = (low + high) // 2
        if level < reached[middle]:
            high = middle
        else:
            low = middle + 1
    return int(support[low])
