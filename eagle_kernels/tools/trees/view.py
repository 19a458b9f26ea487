"""The trees of a generation as they were verified: what was drafted, what was accepted, and why no more was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ...engine.models.tokenizer import Tokenizer
from ...engine.requests.inputs import Seeds
from ...engine.requests.request import Request
from .nodes import StepTree, Stop, TargetChoice, TreeNode, why
from .recorder import RecordedTree, TreeRecorder
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
