"""Reference of build_tree_from_blocks: a heap of what may come next, one node after another."""

import heapq
import math
from typing import NamedTuple

import torch

from .tree_from_parents import tree_from_parents


class Output(NamedTuple):
    tree_mask: torch.Tensor
    positions: torch.Tensor
    retrieve_index: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor
    draft_tokens: torch.Tensor
    scores: torch.Tensor


def build_tree_from_blocks(
    verified_id: torch.Tensor, logits: torch.Tensor | None, seq_lens: torch.Tensor, seq_lens_sum: int | None = None,
    candidate_tokens: torch.Tensor | None = None, candidate_scores: torch.Tensor | None = None,
    transition_scores: torch.Tensor | None = None, num_nodes: torch.Tensor | None = None,
    draft_to_target: torch.Tensor | None = None,
    *, topk: int, num_verify_tokens: int, tree_mask_mode: str = "packed", prefix_is_set: bool = False,
    out: Output | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/tree/build_tree_from_blocks.py."""
    batch_size, device, infinity = len(seq_lens), seq_lens.device, float("inf")
    if logits is not None:
        limits = {"nan": -infinity, "posinf": torch.finfo(torch.float32).max, "neginf": -infinity}
        logits = torch.nan_to_num(logits.float(), **limits)
        # logits of one row order as its log-probabilities, of which rounding makes more equal
        ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[..., :topk]
        candidate_scores = torch.log_softmax(logits, dim=-1).gather(-1, ids)
        candidate_tokens = ids if draft_to_target is None else ids + draft_to_target[ids]
    # [B, depth, rank of the parent, rank]; the root's rank is 0
    steps = candidate_scores[:, :, None].repeat(1, 1, topk, 1)
    if transition_scores is not None:
        steps[:, 1:] += transition_scores
    steps = steps.masked_fill(steps.isnan(), -infinity).clamp(max=0.0).cpu()

    shape = batch_size, num_verify_tokens - 1
    parents = torch.full(shape, -1, dtype=torch.int64, device="cpu")
    tokens = torch.full(shape, -1, dtype=torch.int64, device="cpu")
    scores = torch.full(shape, -infinity, dtype=torch.float32, device="cpu")
    for request, candidates in enumerate(candidate_tokens.tolist()):
        heap = _children(steps[request], 0, 0, 0, torch.zeros((), dtype=torch.float32, device="cpu"))
        most = num_verify_tokens
        if num_nodes is not None:
            most = min(max(int(num_nodes[request]), 1), most)
        for node in range(1, most):
            if not heap or heap[0][0] == math.inf:
                break
            score, level, parent, _, rank = heapq.heappop(heap)
            parents[request, node - 1], tokens[request, node - 1] = parent, candidates[level][rank]
            scores[request, node - 1] = -score
            for child in _children(steps[request], node, level + 1, rank, scores[request, node - 1]):
                heapq.heappush(heap, child)
    tree = tree_from_parents(
        verified_id, tokens.clamp(min=0).to(device), parents.to(device), seq_lens, seq_lens_sum,
        num_verify_tokens=num_verify_tokens, tree_mask_mode=tree_mask_mode, prefix_is_set=prefix_is_set, out=out,
    )  # fmt: skip
    return Output(*_with_tokens(tree, verified_id, tokens, parents), scores.to(device))


def _with_tokens(tree: NamedTuple, roots: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor) -> NamedTuple:
    """Returns the tree with the tokens of its nodes, whatever they are."""
    roots = roots.to(torch.int64)[:, None]
    own = torch.where((parents >= 0).to(roots.device), tokens.to(roots.device), roots)
    return tree._replace(draft_tokens=torch.cat([roots, own], dim=1).flatten())


def _children(steps: torch.Tensor, node: int, level: int, rank: int, score: torch.Tensor) -> list[tuple]:
    """Returns the children of a node in their order; of tuples, the smaller one is the better child."""
    if level == len(steps):
        return []
    own = steps[level, rank]
    ranks = sorted(range(len(own)), key=lambda each: -own[each].item())
    return [(-value, level, node, order, ranks[order]) for order, value in enumerate((score + own)[ranks].tolist())]
