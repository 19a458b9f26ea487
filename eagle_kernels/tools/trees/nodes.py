"""The nodes of a verified tree, and why its accepted path ends."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TargetChoice:
    """The token that the target chose after a node: its argmax or a draw, or a draft that another rule kept."""

    token_id: int
    text: str
    prob: float  # the target's probability of it, after penalties, temperature and filters; greedy: at temperature 1


@dataclass(frozen=True)
class TreeNode:
    """One node of a verified tree; number 0 is the root, the last token before the step."""

    number: int
    token_id: int
    text: str  # what the token adds to the text before it; "" if it makes no character by itself
    parent: int  # number of the node that it follows; -1 for the root
    depth: int
    draft_prob: float | None  # the drafter's probability of it after its parent; None: unknown
    path_prob: float | None  # the same with all nodes above it, by which EAGLE-2 ranks drafts; None: unknown
    target_prob: float | None  # the target's probability of it, if its parent is on the accepted path
    target: TargetChoice | None  # the target's choice after it, if it is on the accepted path
    is_accepted: bool  # whether verification accepted it; the root always is
    is_in_text: bool  # whether it was accepted and does not come after the end of the text


@dataclass(frozen=True)
class Stop:
    """Where the accepted path ends within the text, and why."""

    # "target": the target chose another token than the drafts there; "leaf": no draft follows; "no_drafts": there was
    # none at all; "end_token", "stop_string": the text ends with this token; "length": the token limit
    reason: str
    node: int  # number of the last node that is in the text
    choice: TargetChoice | None  # the target's choice after it; None if the text ends with the node itself
    is_drafted: bool  # whether the choice was among the drafts there nevertheless, which lossy verification allows


@dataclass(frozen=True)
class StepTree:
    """One step of one request, as data."""

    step: int  # counts from 1
    context: str  # the end of the text before the root
    nodes: tuple[TreeNode, ...]  # in the order of their numbers; there may be gaps, since padding has numbers too
    num_levels: int  # levels of drafts
    stop: Stop
    tokens: tuple[int, ...]  # tokens that the step added to the text
    finish_reason: str | None  # that of `Request` if the text ended with this step

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


def label(token_id: int, text: str) -> str:
    """Returns a token's text as Python writes strings, or its id if it has no text of its own."""
    return repr(text) if text else f"<{token_id}>"


def why(tree: StepTree) -> str:
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
