"""Sample and match, enumerated: the shipped reference of verify_tree_sampled emits exactly what the target would.

`verify_tree_sampled` is called as it is, with float64 logits and a `draw` that takes every way in turn; what it emits is
completed by the target and compared with the target's joint law, which is written down from the definitions
(sampling_law.py), so that a filter that is wrong in kernel and reference alike shows. Wrong schemes are the same call with a
`draw` that goes wrong: they must be far off, or enumeration would prove nothing.

Every other scheme is enumerated by the tests of its op, in op_tests/ops/verify:

| scheme | where |
|---|---|
| one coin a node, target probabilities | test_verify_tree_coins.py: test_the_law_is_the_target_s, test_wrong_schemes_are_seen |
| speculative sampling, block verification | test_verify_chain.py: test_the_law_is_exactly_the_targets, test_wrong_schemes_are_seen |
| recursive rejection, with and without replacement | test_verify_tree_rejection.py: test_the_law_is_the_targets, test_wrong_schemes_show |
| traversal verification | test_verify_tree_traversal.py: test_the_law_is_exactly_the_targets, test_wrong_schemes_are_seen |
| sample and match | here |

The enumeration itself is tested in test_enumeration.py; `python -m op_tests.mutants` tests the law tests.
"""  # noqa: E501

import functools
import importlib
import itertools

import pytest
import torch

from eagle_kernels.ops.registry import OPS
from eagle_kernels.reference.enumeration import EnumeratedDraws, enumerate_outcomes, total_variation
from eagle_kernels.reference.ops.sampling.verify_tree_sampled import verify_tree_sampled
from eagle_kernels.reference.residual import Draws
from op_tests.harness.noise_keys import NoiseKeys
from op_tests.harness.statistics import assert_follows_law
from op_tests.harness.trees import depths_of, links_of, prefixes_of
from op_tests.rounds import DRAFT_TEMPERATURE, SCHEMES, TEMPERATURE, emitted_in_rounds
from op_tests.sampling_law import CASES, Target, arguments, assert_every_exchange_shows, law

# trees: tokens and parents, node 0 the root, whose token is in no prefix


def shapes(num_nodes, most_children=3, most_depth=3):
    """The parents of every ordered tree, each node after the one before in depth-first order."""
    for parents in itertools.product(*(range(node) for node in range(1, num_nodes))):
        parents = [-1, *parents]
        is_tree = True
        for node in range(1, num_nodes):
            ancestors, above = [node - 1], parents[node - 1]
            while above >= 0:
                ancestors.append(above)
                above = parents[above]
            is_tree &= parents[node] in ancestors
        most = max([0, *(parents.count(node) for node in range(num_nodes))])
        if is_tree and most <= most_children and max(depths_of(parents)) <= most_depth:
            yield parents


def full(branching, depth):
    parents, level = [-1], [0]
    for _ in range(depth):
        level = [parents.append(parent) or len(parents) - 1 for parent in level for _ in range(branching)]
    return parents


def with_tokens(parents, vocab_size, seed=0):
    """Distinct tokens for siblings, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    left = {}
    tokens = [0]
    for parent in parents[1:]:
        pool = left.setdefault(parent, torch.randperm(vocab_size, generator=generator).tolist())
        tokens.append(pool.pop())
    return tokens, parents


SPECIAL = {  # tokens, parents
    "duplicate siblings": ([0, 1, 1, 2, 0, 1, 3, 3], [-1, 0, 0, 0, 1, 2, 2, 3]),
    "duplicates below duplicates": ([0, 1, 1, 2, 2, 2, 0], [-1, 0, 0, 1, 1, 2, 3]),
    "tokens of no vocabulary": ([0, -1, 7, 2, 1, 3], [-1, 0, 0, 0, 3, 1]),
    "a branch below what cannot be drawn": ([0, 3, 2, 1, 0, 2], [-1, 0, 1, 2, 0, 4]),
}
LARGE = {"binary": full(2, 3), "ternary": full(3, 3), "wide and deep": [-1, 0, 0, 0, 1, 1, 1, 4, 4, 4, 2, 10, 10]}


def gumbel_max(source, kept, node):
    """What the shipped noise does: a draw from the softmax of what is kept."""
    return source.choose(torch.softmax(kept, 0))


def text_law(tokens, parents, target, *, spec_steps=3, draw=gumbel_max):
    """The law of the first S + 1 tokens: what the shipped reference emits on this tree, completed by the target.

    draw(source, kept logits, node): the token for a node.
    """
    links = [torch.tensor([each]) for each in (tokens, range(len(tokens)), *links_of(parents))]
    prefixes = prefixes_of(tokens, parents)
    known = range(target.vocab_size)
    rows = [target.logits(prefix if all(token in known for token in prefix) else ()) for prefix in prefixes]
    logits, zeros = torch.stack(rows), torch.zeros(len(tokens), dtype=torch.int64)

    given = arguments([target.given], target.vocab_size, torch.float64)
    if "token_bitmask" in given:  # of nodes
        given["token_bitmask"] = given["token_bitmask"].repeat(len(tokens), 1)

    def emitted(source):
        output = verify_tree_sampled(
            *links, logits, zeros, zeros[:1], **given, spec_steps=spec_steps,
            draw=lambda kept, request, node: draw(source, kept, node),
        )  # fmt: skip
        path = output.accept_index[0, : int(output.accept_token_num[0]) + 1].tolist()
        return tuple(output.predicts[path].tolist())

    law = {}
    for text, probability in enumerate_outcomes(emitted).items():
        for rest in itertools.product(known, repeat=spec_steps + 1 - len(text)):
            whole = text + rest
            law[whole] = law.get(whole, 0.0) + probability * target.joint(whole, len(text))
    return law


def distance(tokens, parents, target, *, spec_steps=3, **scheme):
    law = text_law(tokens, parents, target, spec_steps=spec_steps, **scheme)
    texts = itertools.product(range(target.vocab_size), repeat=spec_steps + 1)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    return total_variation(law, {text: target.joint(text) for text in texts})


@pytest.mark.cross
@pytest.mark.parametrize(("num_nodes", "num_shapes"), [(5, 12), (1, 1), (2, 1), (3, 2), (4, 5), (6, 28)])
def test_every_shape(num_nodes, num_shapes):
    """All ordered trees with at most three children a node and three levels; the walk may end before the tree."""
    trees = list(shapes(num_nodes))
    assert len(trees) == num_shapes
    for seed, parents in enumerate(trees):
        tokens, _ = with_tokens(parents, 4, seed)
        assert distance(tokens, parents, Target(4, seed)) < 1e-12, parents
        assert distance(tokens, parents, Target(4, seed, impossible=True), spec_steps=2) < 1e-12, parents


@pytest.mark.parametrize("tree", [*SPECIAL, *LARGE])
def test_special_and_large_trees(tree):
    tokens, parents = SPECIAL[tree] if tree in SPECIAL else with_tokens(LARGE[tree], 5)
    assert distance(tokens, parents, Target(5 if tree in LARGE else 4, seed=3, impossible=tree in SPECIAL)) < 1e-12


PARAMETERS = {
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.4},
    "all filters": {"temperature": 1.6, "top_k": 3, "top_p": 0.8, "min_p": 0.1},
    "all filters, jointly": {"temperature": 1.6, "top_k": 3, "top_p": 0.8, "min_p": 0.1, "filter_order": "joint"},
    "repetition": {"repetition_penalty": 1.8, "output_counts": [0, 2, 0, 0], "prompt": (3,)},
    "frequency and presence": {"frequency_penalty": 0.6, "presence_penalty": 0.3, "output_counts": [1, 0, 2, 0]},
    "penalties and filters": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "top_k": 3, "top_p": 0.8},
    "bias": {"logit_bias": [1.0, -2.0, 0.0, 0.5], "min_p": 0.2},
}


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_every_parameter(parameters):
    """Penalties count the drafts before a node, as plain sampling would count them as text."""
    for seed, (tokens, parents) in enumerate((with_tokens(LARGE["binary"], 4, seed=4), SPECIAL["duplicate siblings"])):
        assert distance(tokens, parents, Target(4, seed, **PARAMETERS[parameters])) < 1e-12


def test_the_parameters_matter():
    """So that the tests above tell filtered and plain sampling apart."""
    tokens, parents = with_tokens(LARGE["binary"], 4, seed=4)
    plain = text_law(tokens, parents, Target(4))
    for parameters in PARAMETERS.values():
        assert total_variation(plain, text_law(tokens, parents, Target(4, **parameters))) > 0.05
    orders = [text_law(tokens, parents, Target(4, **PARAMETERS[name])) for name in list(PARAMETERS)[4:6]]
    assert total_variation(*orders) > 0.01


@pytest.mark.parametrize("filter_order", ["top_k_first", "joint"])
def test_no_two_steps_can_be_exchanged(filter_order):
    """Penalties, bias, grammar, temperature and filters, all at once: the law is that of their order alone."""
    tokens, parents = [0, 2, 5], [-1, 0, 0]
    targets = [Target(7, first=logits, filter_order=filter_order, **given) for logits, given in CASES]
    laws = [text_law(tokens, parents, target, spec_steps=1) for target in targets]
    texts = list(itertools.product(range(7), repeat=2))

    def distance(order):
        wanted = [
            {text: target.probs((), order)[text[0]] * target.probs(text[:1], order)[text[1]] for text in texts}
            for target in targets
        ]
        return max(map(total_variation, laws, wanted))

    assert_every_exchange_shows(distance, filter_order=filter_order)


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_target_and_draft_have_temperatures_of_their_own(scheme, is_last, monkeypatch):
    """Whole ops, from logits, for rules that hold drafts against what they were drawn from; beside a greedy request."""
    name = "verify_chain" if scheme in ("standard", "block") else f"verify_tree_{scheme.partition(',')[0]}"
    module = importlib.import_module(f"eagle_kernels.reference.ops.{OPS[name]}")
    parents = [-1, 0] if name == "verify_chain" else [-1, 0, 0]
    options = {"replacement": scheme.endswith("with")} if "rejection" in scheme else {"spec_steps": 1}
    options = {"method": scheme} if name == "verify_chain" else options | {"spec_steps": 1}
    target, draft = [1.5, -0.5, 0.0, 1.0], [0.0, 2.0, -1.0, 1.0]
    greedy, own = (0, 1) if is_last else (1, 0)

    def in_batch(row, value):
        """The request's row, and another one of the greedy request, where its place is."""
        both = [None, None]
        both[own], both[greedy] = torch.as_tensor(row), torch.full_like(torch.as_tensor(row), value)
        return torch.stack(both)

    def emitted(source):
        monkeypatch.setattr(module, "Draws", lambda seed: EnumeratedDraws(source))
        weights, tokens = law(draft, {"temperature": 1.8}), [0]
        for _ in parents[1:]:
            tokens.append(source.choose([weight / sum(weights) for weight in weights]))
            if not options.get("replacement"):
                weights = [weight * (token != tokens[-1]) for token, weight in enumerate(weights)]
        links = [in_batch(link, -1) for link in links_of(parents)]
        rows = torch.arange(2 * len(parents)).view(2, -1)
        tree = (in_batch(tokens, 3), *(() if name == "verify_chain" else (rows, *links)))
        num_draft_rows = len(parents) - (name == "verify_chain")
        logits = in_batch([target] * len(parents), 0.0), in_batch([draft] * num_draft_rows, 0.0)
        output = getattr(module, name)(
            *tree, *(part.flatten(0, 1) for part in logits), torch.arange(2 * len(parents)), torch.tensor([0, 0]),
            in_batch(0.7, 0.0), in_batch(1.8, 0.0), **options,
        )  # fmt: skip
        return int(output.predicts.view(2, -1)[own, 0])

    found = enumerate_outcomes(emitted)
    assert total_variation(found, dict(enumerate(law(target, {"temperature": 0.7})))) < 1e-6


# several rounds: whatever is random in one may be random in the next as well


@pytest.mark.cross
@pytest.mark.parametrize("scheme", [*SCHEMES, "coins"])
def test_rounds_of_drafting_and_verifying(scheme, device):
    """Chi-square over one, two and three tokens. Drafting, coins and residuals take their noise from one seed a request
    and the positions, and text goes on where a round ended: noise that is used twice would show.

    Without a GPU the references', whose tokens the kernels draw (test_matches_reference): the interpreter is slow.
    """
    # so far apart that most drafts are rejected
    target = [[0.0, 1.0, 2.0, 0.5], [2.0, 0.0, 1.0, 0.5], [1.0, 2.0, 0.0, 0.5], [0.5, 1.0, 1.5, 2.0]]
    draft = [[3.0, 1.0, 0.0, 2.0], [0.0, 3.0, 1.0, 2.0], [1.0, 0.0, 3.0, 2.0], [3.0, 1.0, 2.0, 0.0]]
    target, draft = torch.tensor(target, device=device), torch.tensor(draft, device=device)
    with device:
        lanes = 1000 if device.type == "cpu" else 2**18
        text = emitted_in_rounds(scheme, SCHEMES.get(scheme, [-1, 0, 0, 1]), target, draft, lanes=lanes).cpu()
    step = torch.softmax(target.double().cpu() / TEMPERATURE, -1)
    numbers, law = text[:, 0], step[0]
    assert_follows_law(numbers, law)
    for token in text.T[1:]:
        numbers = 4 * numbers + token
        law = (law.view(-1, 4)[:, :, None] * step[None]).flatten()
        assert_follows_law(numbers, law)


def inspected_in_rounds(scheme, monkeypatch):
    with monkeypatch.context() as patch:
        keys = NoiseKeys(patch)
        emitted_in_rounds(scheme, SCHEMES[scheme], torch.randn(4, 4), torch.randn(4, 4), lanes=10, num_tokens=10)
    assert keys.streams == {"DRAFT", "ACCEPT", "RESIDUAL"}
    return keys


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rounds_inspect_no_noise_twice(scheme, monkeypatch):
    assert not inspected_in_rounds(scheme, monkeypatch).faults


@pytest.mark.parametrize("scheme", [*SCHEMES][1:])
def test_coins_that_are_found_again_are_seen(scheme, monkeypatch):
    """Keyed by position alone: by siblings, or by the next round. (A chain looks at one coin a position.)"""
    coin = Draws.uniform
    monkeypatch.setattr(Draws, "uniform", lambda draws, position, draw=0: coin(draws, position))
    assert "ACCEPT" in inspected_in_rounds(scheme, monkeypatch).faults[0]


@pytest.mark.cross
@pytest.mark.parametrize("scheme", ["rejection, with", "standard", "traversal"])
def test_a_residual_has_noise_of_its_own(scheme, device):
    """The draft's noise again would disfavour the tokens that the draft knew but did not draw: by a third, here."""
    target, draft = torch.tensor([0.0, 0.25, 0.75]), torch.tensor([0.5, 0.0, 0.5])
    rows = [(temperature * probs.log()).to(device).repeat(3, 1) for temperature, probs in
            ((TEMPERATURE, target), (DRAFT_TEMPERATURE, draft))]  # fmt: skip
    with device:
        text = emitted_in_rounds(scheme, [-1, 0], *rows, lanes=2000 if device.type == "cpu" else 2**18, num_tokens=1)
    assert_follows_law(text[:, 0].cpu(), target.double())


# negative controls: the same procedure with a draw that goes wrong


class ByChildren:
    """A draw that holds the children against coins, one after another, and then draws from what they left.

    Without a fault this is EAGLE's own procedure, of the same law. draft(node): what the tree's builder thought of the
    tokens, whose best ones the children are.
    """

    def __init__(self, tokens, parents, fault=None, draft=None):
        self._tokens, self._fault, self._draft = tokens, fault, draft
        self._children = {
            node: [child for child in range(len(tokens)) if parents[child] == node] for node in range(len(tokens))
        }
        self._coins = {}

    def __call__(self, source, kept, node):
        original = probs = torch.softmax(kept, 0)
        for child in self._children[node]:
            token = self._tokens[child]
            accepting = float(probs[token])
            if self._fault == "accept with p / q":
                accepting /= float(self._draft(node)[token])
            if source.uniform() < accepting:
                return token
            left = probs.clone()
            if self._fault == "accept with p / q":
                left = (probs - self._draft(node)).clamp(min=0)
            elif self._fault != "rejected token not removed":
                left[token] = 0.0
            if left.sum() > 0:
                probs = left if self._fault == "no renormalisation" else left / left.sum()
        if self._fault == "bonus from p":
            probs = original
        return source.choose(probs / probs.sum())


def one_coin_for_all(source, kept, node):
    """Inverse CDF with the coin of the root at every node."""
    if node == 0:
        source.coin = source.uniform()
    for token, reached in enumerate(torch.softmax(kept, 0).cumsum(0)[:-1]):
        if source.coin < reached:
            return token
    return len(kept) - 1


def best_children(target, parents, draft):
    """The tree of the draft's best tokens: what EAGLE verifies."""
    tokens, prefixes = [0], [()]
    for node, parent in enumerate(parents[1:], start=1):
        rank = parents[:node].count(parent)
        tokens.append(sorted(range(target.vocab_size), key=lambda token: -draft(prefixes[parent])[token])[rank])
        prefixes.append((*prefixes[parent], tokens[-1]))
    return tokens, prefixes


def control(fault):
    """The largest distance over a few targets, on a tree of the draft's two best tokens."""
    found = []
    for seed in range(4):
        target, other = Target(3, seed), Target(3, seed + 50, temperature=0.7)
        parents = full(2, 2)
        tokens, prefixes = best_children(target, parents, other.probs)
        draw = one_coin_for_all
        if fault != "one coin for all levels":
            draft = functools.partial(draft_row, other, prefixes)
            draw = ByChildren(tokens, parents, fault, draft)
        found.append(distance(tokens, parents, target, spec_steps=2, draw=draw))
    return found


def draft_row(other, prefixes, node):
    return torch.tensor(other.probs(prefixes[node]), dtype=torch.float64)


def test_the_controls_are_right_without_their_fault():
    assert max(control(None)) < 1e-12


FAULTS = ("accept with p / q", "no renormalisation", "rejected token not removed", "bonus from p",
          "one coin for all levels")  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_schemes_are_seen(fault):
    assert max(control(fault)) > 0.05
