"""The trees of a generation as they were verified: what was drafted, what was accepted, and why no more was. A
`TreeRecorder` keeps what `EAGLEInference.on_tree` shows, as numbers on the host; `verified_trees` adds texts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import ops
from ...engine.models.tokenizer import Tokenizer
from ...engine.requests.inputs import Seeds
from ...engine.requests.request import Request
from ...engine.step.stepper import Verified
from ...engine.step.verification import penalized, without_early_ends
from .nodes import StepTree, Stop, TargetChoice, TreeNode, why
from .svg import trees_svg
from .text import title

if TYPE_CHECKING:
    from ...engine.inference import EAGLEInference

# the tokens before a token that its text may depend on (spaces, characters of several tokens), and characters to show
_CONTEXT_TOKENS, _CONTEXT_CHARACTERS = 16, 32
# bytes of UTF-8's longest character; each may be a token
_MOST_BYTES = 4


@dataclass(frozen=True, repr=False)
class VerifiedTree(StepTree):
    """One step of one request; a notebook draws it."""

    def __repr__(self) -> str:
        return f"VerifiedTree({title(self)})"

    def _repr_svg_(self) -> str:
        return trees_svg([self])

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as values that JSON can hold."""
        return asdict(self) | {"num_accepted": self.num_accepted, "why": why(self)}


def verified_trees(
    engine: EAGLEInference, prompt: list[int], max_new_tokens: int = 128, *, seeds: Seeds = None, **overrides: Any
) -> Iterator[VerifiedTree]:
    """Generates from one prompt and yields the tree of each step; close the iterator to stop early.
    The engine must be idle. Its steps run without CUDA graphs meanwhile. overrides: those of `generate`."""
    if engine.has_work or engine.on_tree is not None:
        raise RuntimeError("verified_trees: engine must have no other requests and no on_tree of its own")
    recorder = TreeRecorder()
    engine.on_tree = recorder
    try:
        stream = engine.stream(prompt, max_new_tokens, seeds=seeds, **overrides)
        if len(stream.requests) != 1:
            raise ValueError(f"verified_trees: prompt must be one prompt, got {len(stream.requests)}")
        request, step = stream.requests[0], 0
        try:
            for _ in stream:
                # a step's tokens all come at once; a step after the end is dropped
                while recorder.trees and _num_before(recorder.trees[0], request) < len(request.output_ids):
                    step += 1
                    yield _tree(recorder.trees.popleft(), request, engine.session.tokenizer, step)
        finally:
            stream.close()
    finally:
        engine.on_tree = None


def _num_before(seen: RecordedTree, request: Request) -> int:
    """Returns the number of tokens of the output up to the root."""
    return seen.length - len(request.prompt) + 1


def _tree(seen: RecordedTree, request: Request, tokenizer: Tokenizer | None, step: int) -> VerifiedTree:
    start = _num_before(seen, request)
    before = request.prompt + request.output_ids[: start - 1]
    tokens = request.output_ids[start : start + len(seen.brought)]
    is_last = request.is_finished and start + len(tokens) == len(request.output_ids)
    in_text = seen.path[: 1 + min(len(tokens), len(seen.path) - 1)]
    # the tokens that each node's text may depend on, itself included
    lines: dict[int, list[int]] = {-1: before[-_CONTEXT_TOKENS:]}
    for number, parent in seen.parents.items():
        lines[number] = [*lines[parent], seen.tokens[number]]
    choices = {
        number: TargetChoice(token, _text(tokenizer, lines[number], token), prob)
        for number, token, prob in zip(seen.path, seen.brought, seen.choice_probs)
    }
    nodes = tuple(
        TreeNode(
            number, seen.tokens[number], _text(tokenizer, lines[parent], seen.tokens[number]), parent,
            seen.depths[number], seen.draft_probs.get(number), seen.path_probs.get(number),
            seen.target_probs.get(number), choices.get(number), number in seen.path, number in in_text,
        )
        for number, parent in seen.parents.items()
    )  # fmt: skip
    finish_reason = request.finish_reason if is_last else None
    stop = _stop(nodes, in_text[-1], choices, tokens, len(seen.path), finish_reason)
    # enough tokens for whole characters, even if the first one is cut
    end = before[-_MOST_BYTES * _CONTEXT_CHARACTERS :]
    detokenizer = tokenizer.detokenizer() if tokenizer else None
    context = (detokenizer.push(end) + detokenizer.finish())[-_CONTEXT_CHARACTERS:] if tokenizer else ""
    return VerifiedTree(step, context, nodes, seen.num_levels, stop, tuple(tokens), finish_reason)


def _stop(
    nodes: tuple[TreeNode, ...], last: int, choices: dict[int, TargetChoice], tokens: list[int], num_brought: int,
    finish_reason: str | None,
) -> Stop:  # fmt: skip
    """Finds why the path ends at node `last`; num_brought: tokens of the step, also those after the end of the text."""
    drafts = [node.token_id for node in nodes if node.parent == last]
    is_cut = len(tokens) < num_brought
    choice = None if is_cut else choices[last]
    is_drafted = choice is not None and choice.token_id in drafts
    if finish_reason in ("eos", "stop"):
        return Stop("end_token" if finish_reason == "eos" else "stop_string", last, choice, is_drafted)
    if is_cut:
        return Stop("length", last, None, False)
    if drafts:
        return Stop("target", last, choice, is_drafted)
    return Stop("leaf" if len(nodes) > 1 else "no_drafts", last, choice, False)


def _text(tokenizer: Tokenizer | None, before: list[int], token: int) -> str:
    """Returns what the token adds to the text before it; "" if that is nothing or not a whole character."""
    if tokenizer is None:
        return ""
    detokenizer = tokenizer.detokenizer()
    detokenizer.push(before)
    text = detokenizer.push([token])
    return "" if "\N{REPLACEMENT CHARACTER}" in text else text


@dataclass
class RecordedTree:
    """The tree of one request's step. Nodes have the numbers that verification gives them; padding is left out."""

    length: int  # committed tokens before the root
    tokens: list[int]
    parents: dict[int, int]  # each node's parent, parents first; -1 for the root
    depths: dict[int, int]
    path: list[int]  # nodes that verification accepted, root first
    brought: list[int]  # the target's choice after each of them: the accepted drafts and one more token
    choice_probs: list[float]  # the target's probabilities of these choices
    draft_probs: dict[int, float]  # the drafter's probability of a node after its parent, where known
    path_probs: dict[int, float]  # the same with all nodes above it
    target_probs: dict[int, float]  # the target's probabilities of the children of path nodes
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
