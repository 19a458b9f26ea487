"""The engine's strategies of verification, enumerated with all that a request can ask for: the law of what they emit.

The verifier is the engine's own, on rows that hold the parameters as a batch does; only what is random is taken every
way in turn. Penalties, temperature and filters are at work all at once, so that no two of them can be exchanged.
"""

import functools
import itertools
import math

import pytest
import torch

from eagle_kernels import EAGLEConfig, SamplingParams, ops
from eagle_kernels.engine.batch.state import RowSampling
from eagle_kernels.engine.drafters.protocol import Proposal
from eagle_kernels.engine.requests.sampling_params import Features
from eagle_kernels.engine.step.stepper import Verified
from eagle_kernels.engine.step.verification import Verifier
from eagle_kernels.reference.enumeration import EnumeratedDraws, completed, enumerate_outcomes, total_variation
from eagle_kernels.reference.ops.rejection import verify_tree_rejection
from eagle_kernels.reference.ops.sampling.verify_tree_sampled import verify_tree_sampled
from eagle_kernels.reference.random import grouped_gumbel
from eagle_kernels.tools.trees.view import TreeRecorder
from op_tests.rounds import links_of
from op_tests.sampling_law import CASES, ORDER, Target, assert_every_exchange_shows, law

VOCAB = 7
# what a request can ask for
STEPS = tuple(name for name in ORDER if name in SamplingParams.__dataclass_fields__)


class Rows:
    """The rows of a batch whose requests ask for these things, as verification sees them."""

    def __init__(self, givens, seeds):
        size = len(givens)
        self.sampling = RowSampling(size, VOCAB, torch.device("cpu"))
        self.params = [SamplingParams(**{name: given[name] for name in STEPS if name in given}) for given in givens]
        for row, (given, params) in enumerate(zip(givens, self.params)):
            self.sampling.set_row(row, params, seeds[row], list(given["prompt"]))
            if params.has_penalties:
                self.sampling.output_counts[row] = torch.tensor(given["output_counts"])
        self.seeds, self.lengths, self.is_live = self.sampling.seeds, torch.full((size,), 9), torch.ones(size).int()

    def numbers(self, name):
        return self.sampling.numbers[name]

    def sampling_arguments(self, features):
        return self.sampling.arguments(features, slice(None))


def verify(strategy, givens, trees, logits, *, parents, seeds=(0,), draft_logits=None, on_tree=None, **options):
    """The verdict of a strategy on trees of tokens [B, N]; on_tree is shown it."""
    trees = torch.tensor(trees)
    size = len(trees)
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    rows = torch.arange(trees.numel()).view(size, -1)
    links = (torch.tensor([link] * size) for link in links_of(parents))
    positions = (9 + torch.tensor(depths)).repeat(size)
    tree = ops.BuildTreeOutput(None, positions, rows, *links, trees.flatten())
    batch, config = Rows(givens, seeds), EAGLEConfig(verify_strategy=strategy, **options)
    verifier = Verifier(config, max(depths), torch.device("cpu"))
    given = batch, Proposal(tree, draft_logits), logits, Features.of(batch.params)
    committed = verifier.verify(*given)
    if on_tree is not None:
        on_tree(Verified(*given, committed))
    return committed


def emitted_by(strategy, target, children, source):
    """The tokens that one step emits of a root and children: these tokens, or one that is drawn from a draft."""
    draft_logits = None
    if children is None:
        draft = [0.5, -1.0, 1.5, 2.0, 0.0, 1.0, -0.5]
        children = [source.choose(law(draft, {"temperature": target.given["temperature"]}))]
        draft_logits = torch.tensor([draft, draft])
    logits = torch.stack([target.logits(prefix) for prefix in ((), *((token,) for token in children))]).float()
    parents = [-1] + [0] * len(children)
    committed = verify(
        strategy, [target.given], [[0, *children]], logits, parents=parents, draft_logits=draft_logits
    )  # fmt: skip
    return tuple(token for token in committed.tokens[0].tolist() if token >= 0)


@pytest.mark.parametrize(
    ("strategy", "children"),
    [("target_match", [2, 5]), ("rejection", [2, 5]), ("rejection", None)],
    ids=["target_match", "rejection, chosen", "rejection, drawn"],
)
def test_lossless_strategies_have_exactly_the_law(strategy, children, monkeypatch):
    targets = [Target(VOCAB, first=logits, **{key: given[key] for key in given if key not in ("logit_bias", "allowed")})
               for logits, given in CASES]  # fmt: skip

    def emitted(source, target):
        draw = lambda kept, request, node: source.choose(torch.softmax(kept, 0))  # noqa: E731
        monkeypatch.setattr(ops, "verify_tree_sampled", functools.partial(verify_tree_sampled, draw=draw))
        monkeypatch.setattr(verify_tree_rejection, "Draws", lambda seed: EnumeratedDraws(source))
        return emitted_by(strategy, target, children, source)

    laws = []
    for target in targets:
        after = {(): target.probs(())} | {(token,): target.probs((token,)) for token in range(VOCAB)}
        laws.append(completed(enumerate_outcomes(functools.partial(emitted, target=target)), after, 2))

    def distance(order):
        return max(total_variation(found, law_of_two(target, order)) for found, target in zip(laws, targets))

    assert_every_exchange_shows(distance, STEPS, tolerance=1e-5)


def law_of_two(target, order):
    return {
        (one, other): target.probs((), order)[one] * target.probs((one,), order)[other]
        for one, other in itertools.product(range(VOCAB), repeat=2)
    }


def test_what_is_recorded_of_a_tree_is_the_law():
    """The target's probabilities of the drafts and of its own choice, as a person is shown them."""
    root, after = [], []
    for logits, given in CASES:
        target = Target(VOCAB, first=logits, **{key: given[key] for key in {*STEPS, "prompt", "output_counts"}})
        tokens, parents = [0, *range(VOCAB)], [-1] + [0] * VOCAB
        rows = torch.stack([target.logits(prefix) for prefix in ((), *((token,) for token in range(VOCAB)))]).float()
        seen = []
        verify("target_match", [target.given], [tokens], rows, parents=parents, on_tree=seen.append)
        recorder = TreeRecorder()
        recorder(seen[0])
        (tree,) = recorder.trees
        root.append([tree.target_probs[node] for node in range(1, VOCAB + 1)])
        first, second = tree.brought
        after.append((target, first, second, tree.choice_probs[1]))

    def distance(order):
        wanted = [target.probs((), order) for target, *_ in after]
        return max(sum(abs(p - q) for p, q in zip(*rows)) / 2 for rows in zip(root, wanted))

    assert_every_exchange_shows(distance, STEPS, tolerance=1e-5)
    for target, first, second, prob in after:
        assert prob == pytest.approx(target.probs((first,))[second], abs=1e-5)


EPSILON, DELTA = 0.2, 0.6


def is_candidate(probs, token):
    return probs[token] > 0


def is_typical(probs, token):
    """Medusa's rule: Cai et al., arXiv 2401.10774, section 2.3.1."""
    entropy = -sum(prob * math.log(prob) for prob in probs if prob > 0)
    return probs[token] > min(EPSILON, DELTA * math.exp(-entropy))


@pytest.mark.parametrize(
    ("strategy", "is_taken", "steps", "options"),
    [
        ("topp", is_candidate, STEPS, {"max_candidate_len": VOCAB, "verify_window": 2}),
        ("typical", is_typical, STEPS[:4], {"typical_epsilon": EPSILON, "typical_delta": DELTA}),
    ],
    ids=["topp", "typical"],
)
def test_lossy_strategies_go_by_the_same_law(strategy, is_taken, steps, options):
    """Which single draft is kept, and the token that is drawn after it or instead of it, with noise that is known."""
    names = {*steps, "prompt", "output_counts"}
    targets = [Target(VOCAB, first=logits, **{name: given[name] for name in names}) for logits, given in CASES]
    rows = [(target, seed % VOCAB, seed) for target in targets for seed in range(98)]
    drafts, seeds = torch.tensor([row[1] for row in rows]), torch.tensor([row[2] for row in rows])
    noise = [grouped_gumbel(seeds, torch.full_like(seeds, position), VOCAB)[0].double() for position in (10, 11)]
    logits = torch.stack([target.logits(prefix) for target, draft, _ in rows for prefix in ((), (draft,))]).float()
    committed = verify(
        strategy, [target.given for target, *_ in rows], torch.stack([torch.zeros_like(drafts), drafts], 1).tolist(),
        logits, parents=[-1, 0], seeds=seeds, **options,
    )  # fmt: skip

    def expected(row, order):
        target, draft, _ = rows[row]
        probs = torch.tensor([target.probs(prefix, order) for prefix in ((), (draft,))], dtype=torch.float64)
        drawn = [int((line.log() + noise[depth][row]).argmax()) for depth, line in enumerate(probs)]
        return [draft, drawn[1]] if is_taken(target.probs((), order), draft) else [drawn[0], -1]

    def distance(order):
        differ = [expected(row, order) != tokens for row, tokens in enumerate(committed.tokens.tolist())]
        return sum(differ) / len(rows)

    assert_every_exchange_shows(distance, steps)
