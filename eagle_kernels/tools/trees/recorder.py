"""Recording of trees as steps verify them: what `EAGLEInference.on_tree` shows, as numbers on the host."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import ops
from ...engine.step.stepper import Verified
from ...engine.step.verification import penalized, without_early_ends


@dataclass
class RecordedTree:
    """The tree of one request's step. Nodes have the numbers that verification gives them; padding is left out.

    length        committed tokens before the root
    parents       each node's parent, parents first; -1 for the root
    path          nodes that verification accepted, root first
    brought       the target's choice after each of them: the accepted drafts and one more token
    choice_probs  the target's probabilities of these choices
    draft_probs   the drafter's probability of a node after its parent, where known
    path_probs    the same with all nodes above it
    target_probs  the target's probabilities of the children of path nodes
    """

    length: int
    tokens: list[int]
    parents: dict[int, int]
    depths: dict[int, int]
    path: list[int]
    brought: list[int]
    choice_probs: list[float]
    draft_probs: dict[int, float]
    path_probs: dict[int, float]
    target_probs: dict[int, float]
    num_levels: int


class TreeRecorder:
    """An `on_tree` that keeps the trees of the batch's first row, oldest first, while a request has that row.
    The first request of an empty batch has it until it ends."""

    def __init__(self) -> None:
        self.trees: deque[RecordedTree] = deque()

    def __call__(self, seen: Verified) -> None:
        if seen.batch.is_live[0]:  # not a warm-up, nor a step after the last request's end
            self.trees.append(_record(seen))


def _record(seen: Verified) -> RecordedTree:
    tree, verdict = seen.proposal.tree, seen.committed
    num_nodes = tree.retrieve_index.shape[1]
    tokens = tree.draft_tokens[:num_nodes].tolist()
    parents, depths = _walk(tree.retrieve_next_token[0].tolist(), tree.retrieve_next_sibling[0].tolist())
    count = 1 + int(verdict.accept_token_num[0])
    path = verdict.accept_index[0, :count].tolist()
    brought = verdict.tokens[0, :count].tolist()

    path_probs: dict[int, float] = {}
    if seen.proposal.path_probs is not None and num_nodes > 1:
        probs = seen.proposal.path_probs()[0].tolist()
        path_probs = {node: probs[node - 1] for node in parents if node and not math.isnan(probs[node - 1])}
    draft_probs = {}
    for node, prob in path_probs.items():
        above = path_probs.get(parents[node], 1.0) if parents[node] else 1.0
        draft_probs[node] = min(prob / above, 1.0) if above else 0.0

    law = _target_law(seen, path)
    places = {node: place for place, node in enumerate(path)}
    places_above = {node: places[parent] for node, parent in parents.items() if parent in places}
    target_probs = {node: float(law[place, tokens[node]]) for node, place in places_above.items()}
    return RecordedTree(
        length=int(seen.batch.lengths[0]), tokens=tokens, parents=parents, depths=depths, path=path, brought=brought,
        choice_probs=[float(row[token]) for row, token in zip(law, brought)],
        draft_probs=draft_probs, path_probs=path_probs, target_probs=target_probs, num_levels=max(depths.values()),
    )  # fmt: skip


def _walk(first_child: list[int], next_sibling: list[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Returns parents and depths of the nodes that verification can reach, in the order of their numbers."""
    parents, depths = {0: -1}, {0: 0}
    for node in range(len(first_child)):
        child, before = first_child[node], node
        # links point forward, so a node is known before its children are
        while node in parents and before < child < len(first_child):
            parents[child], depths[child] = node, depths[node] + 1
            child, before = next_sibling[child], child
    order = sorted(parents)
    return {node: parents[node] for node in order}, depths


def _target_law(seen: Verified, path: list[int]) -> Tensor:
    """Returns what the target draws from at nodes of the first row's path, [D, V] fp32; greedy: at temperature 1."""
    batch = seen.batch
    tree, features = seen.proposal.tree, seen.features
    logits = without_early_ends(batch, tree, penalized(batch, tree, seen.logits, features), features)[path].float()
    temperature = float(batch.numbers("temperature")[0])
    if temperature <= 0:
        return torch.softmax(logits, dim=-1)
    probs = torch.softmax(logits / temperature, dim=-1)
    for renorm, name in ((ops.top_k_renorm, "top_k"), (ops.top_p_renorm, "top_p"), (ops.min_p_renorm, "min_p")):
        probs = renorm(probs, batch.numbers(name)[:1].repeat(len(path)))
    return probs
