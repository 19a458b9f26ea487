"""The kinds of steps that a configuration chooses from, each with its own graphs, and the choice among them."""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ..batch.state import BatchState
from ..config.eagle_config import EAGLEConfig
from ..drafters.draft_reader import DraftReader
from ..drafters.methods import NaiveDrafter, make_drafter, make_readers, trees_of
from ..drafters.suffix import SuffixCache, SuffixFeed
from ..models.causal_draft import CausalDraft
from ..models.protocol import DraftModel, TargetModel, takes_rows
from .choice import Choice, Fastest
from .roster import Roster
from .runner import StepRunner
from .stepper import Stepper, Verified

_logger = logging.getLogger(__name__)


class Candidate(NamedTuple):
    """Describes a kind of steps that an engine chooses from.

    Attributes:
        draft: The name of the draft that makes the drafts, or the method without a model; None: plain decoding.
        topk, num_steps, num_draft_tokens, mean_draft_tokens: The tree, as in `EAGLEConfig`; 0, 0, 1 and None for plain
            decoding.
        steps: How many steps of the batch were of this kind.
        tokens_per_step: Tokens that such a step brings a request, in the latest steps; None: not known yet.
        resting: Why this draft, one of several, rests for now: it cannot be the fastest. None: it does not rest.
    """

    draft: str | None
    topk: int
    num_steps: int
    num_draft_tokens: int
    mean_draft_tokens: int | None
    steps: int
    tokens_per_step: float | None
    resting: str | None = None


class StepPlan(NamedTuple):
    """Holds the steps of a configuration."""

    # number 0 decodes plainly; with a draft model it keeps what the draft misses, so that other steps can follow
    runners: tuple[StepRunner, ...]
    choices: dict[int, Choice]  # choose a runner for each step, by the rows of prompts that it has beside its own
    feed: SuffixFeed | None  # makes the drafts of suffix decoding, on the host; None without suffix decoding
    methods: tuple[str | None, ...]  # the methods of drafting that requests choose from
    roster: Roster

    @property
    def plain(self) -> Stepper:
        return self.runners[0].stepper

    def choice_beside(self, prompt_tokens: int) -> Choice:
        """Returns the choice for steps with this number of prompt rows."""
        if prompt_tokens not in self.choices:
            self.choices[prompt_tokens] = self.choices[0].beside_prompts()
        return self.choices[prompt_tokens]

    def give_up(self, prompt_tokens: int, number: int, num_rows: int) -> bool:
        """Drops a step that does not fit into memory from a choice; returns whether it has others."""
        has_others = self.choice_beside(prompt_tokens).give_up(number, num_rows)
        if has_others:
            config = self.runners[number].stepper.config
            tree = config.topk, config.num_steps, config.num_verify_tokens, config.mean_draft_tokens
            beside = f" beside {prompt_tokens} tokens of prompts" if prompt_tokens else ""
            told = "adaptive='auto' drops the tree %s from %d requests on%s: it does not fit into memory"
            _logger.warning("EAGLEInference: " + told, tree, num_rows, beside)
        return has_others

    def candidates(self, draft_names: Sequence[str]) -> list[Candidate]:
        """Returns the kinds of steps, in the order of `runners`."""
        found = []
        for number, stepper in enumerate(runner.stepper for runner in self.runners):
            config, steps = stepper.config, sum(choice.steps[number] for choice in self.choices.values())
            tree = config.topk, config.num_steps, config.num_verify_tokens, config.mean_draft_tokens
            name = str(config.method) if stepper.own is None else draft_names[stepper.own.number]
            kind = (name, *tree) if number else (None, 0, 0, 1, None)
            reason = self.roster.reasons.get(number)
            found.append(Candidate(*kind, steps, self.choices[0].tokens_of(number), reason))
        return found

    def review(self, known: Collection[int]) -> list[int]:
        """Lets drafts rest that cannot win, and frees their graphs; see `Roster.review`. Returns those that read
        again."""
        resting, reading = self.roster.review(known)
        for runner in self.runners if resting else ():
            runner.free(resting)
        return reading

    @property
    def readers(self) -> list[DraftReader]:
        """Returns the readers of the draft models that read prompts and keep up: of those that do not rest for long."""
        return [each for each in self.plain.resting if each.number not in self.roster.absent]

    @property
    def overshoot(self) -> int:
        """Returns the slots that a request may need past its last token, whichever of the steps it takes."""
        return max(runner.stepper.drafter.overshoot for runner in self.runners)


def plan_steps(
    target: TargetModel, drafts: Sequence[DraftModel], config: EAGLEConfig, state: BatchState, speculative: bool,
    lag: int, suffix_cache: SuffixCache | None, on_tree: Callable[[Verified], None] | None,
) -> StepPlan:  # fmt: skip
    """Plans the steps for `config`; only plain decoding when `speculative` is off.
    lag: how many steps the host is behind the device.
    suffix_cache: None: no method of the configuration needs one.
    on_tree: see `Stepper`."""
    may_draft = speculative and config.may_speculate
    readers = make_readers(config, target, drafts) if may_draft else ()
    trees = trees_of(config, readers, takes_rows(target)) if may_draft else []
    feed_trees = [] if suffix_cache is None else [tree for _, tree, _ in trees if tree is not None]
    feed = SuffixFeed(feed_trees, suffix_cache, state, lag) if feed_trees else None
    drafters = [None if tree is None else make_drafter(tree, reader, target.device, feed) for _, tree, reader in trees]
    keeps_history = any(drafter.reads_history for drafter in drafters if drafter is not None)
    steppers, table = [Stepper(target, NaiveDrafter(), config, readers, keeps_history, on_tree)], []
    for (most_rows, tree, _), drafter in zip(trees, drafters):
        table.append((most_rows, 0 if drafter is None else len(steppers)))
        if drafter is not None:
            steppers.append(Stepper(target, drafter, tree, readers, keeps_history, on_tree))
    if keeps_history:
        state.keep_history()
    is_automatic = bool(trees) and config.adaptive == "auto"
    # a step brings a request no more tokens than it verifies nodes of it
    most_tokens = [min(stepper.num_steps + 1, stepper.mean_nodes) for stepper in steppers]
    runners = tuple(_runner(stepper, state) for stepper in steppers)
    rows = [stepper.mean_nodes for stepper in steppers] if runners[0].uses_graphs else None
    choices, own = {0: Choice(table)}, {}
    if is_automatic:
        read_bytes = getattr(target, "read_bytes", None)
        kinds = [None if stepper.own is None else stepper.own.number for stepper in steppers]
        choices[0] = Fastest(most_tokens, config.max_spec_batch, rows, read_bytes=read_bytes, kinds=kinds)
        for number, draft in enumerate(kinds if len(readers) > 1 else ()):
            own.setdefault(draft, []).append(number)
        own.pop(None, None)  # of plain steps
    return StepPlan(runners, choices, feed, config.methods, Roster(own, choices))


def warn_of_eager_steps(target: TargetModel, drafts: Sequence[DraftModel], config: EAGLEConfig) -> None:
    """Warns about each model that prevents steps from being CUDA graphs, unless the caller set `cuda_graph`."""
    if target.device.type != "cuda" or config.cuda_graph is not None:
        return
    for role, model in (("target", target), *(("draft", draft) for draft in drafts)):
        if not getattr(model, "can_be_captured", True):
            model = model.model if isinstance(model, CausalDraft) else model
            name = type(getattr(model, "model", model)).__name__  # `TransformersTarget` wraps the model
            reason = f"the forward of the {role}, {name}, waits for the device; cuda_graph=False silences this"
            _logger.warning("EAGLEInference: steps run eagerly, not as CUDA graphs: %s", reason)


def _runner(stepper: Stepper, state: BatchState) -> StepRunner:
    is_gpu, wanted = stepper.target.device.type == "cuda", stepper.config.cuda_graph
    if wanted and stepper.on_tree is not None:
        raise ValueError("EAGLEInference: cuda_graph must not be True with on_tree, which is called in every step")
    if wanted and not stepper.can_be_captured:
        reason = "the forward pass of one of the models waits for the device"
        raise ValueError(f"EAGLEInference: cuda_graph must not be True here: {reason}")
    can_be_captured = stepper.on_tree is None and stepper.can_be_captured
    return StepRunner(stepper, state, is_gpu and can_be_captured and wanted is not False)
