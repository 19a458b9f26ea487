"""The trees of a generation as they were verified: what was drafted, what was accepted, and why no more was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ...engine.models.tokenizer import Tokenizer
from ...engine.requests.inputs import Seeds
from ...engine.requests.request import Request
from .recorder import RecordedTree, TreeRecorder

if TYPE_CHECKING:
    from ...engine.inference import EAGLEInference

# the tokens before a token that its text may depend on (spaces, characters of several tokens), and characters to show
_CONTEXT_TOKENS, _CONTEXT_CHARACTERS = 16, 32
# bytes of UTF-8's longest character; each may be a token
_MOST_BYTES = 4


@dataclass(frozen=True)
class TargetChoice:
    """The token that the target chose after a node: its argmax or a draw, or a draft that another rule kept.

    prob  the target's probability of it, after penalties, temperature and filters; greedy: at temperature 1
    """

    token_id: int
    text: str
    prob: float


@dataclass(frozen=True)
class TreeNode:
    """One node of a verified tree; number 0 is the root, the last token before the step.

    text         what the token adds to the text before it; "" if it makes no character by itself
    parent       number of the node that it follows; -1 for the root
    draft_prob   the drafter's probability of it after its parent; None: unknown
    path_prob    the same with all nodes above it, by which EAGLE-2 ranks drafts; None: unknown
    target_prob  the target's probability of it, if its parent is on the accepted path
    target       the target's choice after it, if it is on the accepted path
    is_accepted  whether verification accepted it; the root always is
    is_in_text   whether it was accepted and does not come after the end of the text
    """

    number: int
    token_id: int
    text: str
    parent: int
    depth: int
    draft_prob: float | None
    path_prob: float | None
    target_prob: float | None
    target: TargetChoice | None
    is_accepted: bool
    is_in_text: bool


@dataclass(frozen=True)
class Stop:
    """Where the accepted path ends within the text, and why.

    reason      "target": the target chose another token than the drafts there; "leaf": no draft follows; "no_drafts":
                there was none at all; "end_token", "stop_string": the text ends with this token; "length": the token
                limit cuts the rest off
    node        number of the last node that is in the text
    choice      the target's choice after it; None if the text ends with the node itself
    is_drafted  whether the choice was among the drafts there nevertheless, which lossy verification allows
    """

    reason: str
    node: int
    choice: TargetChoice | None
    is_drafted: bool


@dataclass(frozen=True)
class VerifiedTree:
    """One step of one request.

    step           counts from 1
    context        the end of the text before the root
    nodes          in the order of their numbers; there may be gaps, since padding has numbers too
    num_levels     levels of drafts
    tokens         tokens that the step added to the text
    finish_reason  that of `Request` if the text ended with this step
    """

    step: int
    context: str
    nodes: tuple[TreeNode, ...]
    num_levels: int
    stop: Stop
    tokens: tuple[int, ...]
    finish_reason: str | None

    @property
    def num_accepted(self) -> int:
        """Number of drafts in the text."""
        return sum(node.is_in_text for node in self.nodes) - 1

    def node(self, number: int) -> TreeNode:
        """Returns the node of this number."""
        return next(node for node in self.nodes if node.number == number)

    def children(self, number: int) -> list[TreeNode]:
        """Returns the nodes that follow node `number`."""
        return [node for node in self.nodes if node.parent == number]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as values that JSON can hold."""
        return asdict(self) | {"num_accepted": self.num_accepted, "why": why(self)}


def label(token_id: int, text: str) -> str:
    """Returns a token's text as Python writes strings, or its id if it has no text of its own."""
    return repr(text) if text else f"<{token_id}>"


def why(tree: VerifiedTree) -> str:
    """Explains the stop in one sentence."""
    stop, choice = tree.stop, tree.stop.choice
    node = tree.node(stop.node)
    after = f"after {label(node.token_id, node.text)}"
    where = "at the root" if node.parent < 0 else f"at depth {node.depth}, {after}"
    chosen = "" if choice is None else f"{label(choice.token_id, choice.text)} ({choice.prob:.2f})"
    if stop.reason == "target":
        drafted = "which was drafted but not accepted" if stop.is_drafted else "which was not drafted there"
        return f"stopped {where}: the target chose {chosen}, {drafted}"
    if stop.reason in ("leaf", "no_drafts"):
        nothing = "no draft follows" if stop.reason == "leaf" else "nothing was drafted"
        return f"stopped {where}: {nothing}; the target goes on with {chosen}"
    if stop.reason == "length":
        return f"stopped {where}: the token limit ends the text here"
    what = "an end token" if stop.reason == "end_token" else "the end of a stop string"
    if choice is None:
        return f"stopped at depth {node.depth}: {label(node.token_id, node.text)} is {what}"
    return f"stopped {where}: the target chose {chosen}, {what}"


def verified_trees(
    engine: EAGLEInference, prompt: list[int], max_new_tokens: int = 128, *, seeds: Seeds = None, **overrides: Any
) -> Iterator[VerifiedTree]:
    """Generates from one prompt and yields the tree of each step; close the iterator to stop early.

    The engine must be idle. Its steps run without CUDA graphs meanwhile. overrides: those of `generate`.
    """
    if engine.has_work or engine.on_tree is not None:
        raise RuntimeError("verified_trees: the engine must have no requests and no on_tree; trees are one request's")
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
                    yield _tree(recorder.trees.popleft(), request, engine.tokenizer, step)
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
    nodes: tuple[TreeNode, ...],
    last: int,
    choices: dict[int, TargetChoice],
    tokens: list[int],
    num_brought: int,
    finish_reason: str | None,
) -> Stop:
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
