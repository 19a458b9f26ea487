"""verify_tree_traversal: equal to its reference, whose emitted text has exactly the target's law; block's on chains."""

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.rejection import verify_tree_traversal as op
from eagle_kernels.ops.rejection.shared import prepare_pair
from eagle_kernels.reference.enumeration import EnumeratedDraws, enumerate_outcomes, total_variation
from eagle_kernels.reference.ops.rejection import verify_tree_traversal as reference
from eagle_kernels.reference.residual import Draws
from op_tests.harness import check_operation, sweep, to_device
from op_tests.harness.retune import retune
from op_tests.harness.trees import LINKS, depths_of, links_of
from op_tests.ops.rejection.laws import (
    Drawn,
    coins_by,
    distance_to,
    draft_map,
    draw_children,
    dyadic_probs,
    emitted_by_a_chain,
    near,
    random_law,
)
from op_tests.ops.verify.cases import make_tree

PATH = "rejection.verify_tree_traversal"
SHAPES = [(2, 1, 1, 1), (2, 1, 4, 5), (2, 4, 1, 5), (2, 3, 3, 8)]
pytestmark = pytest.mark.usefixtures("small_tiles")


def make(batch_size=2, topk=3, spec_steps=3, num_nodes=8, vocab_size=61, draft_vocab_size=None, *, dtype=torch.float32,
         target="logits", draft="logits", device="cpu"):  # fmt: skip
    """Random trees whose drafts are drawn from drafts near the target."""
    links, positions = make_tree(batch_size, topk, spec_steps, num_nodes, vocab_size=vocab_size)
    d2t = None if draft_vocab_size is None else draft_map(vocab_size, draft_vocab_size)
    known = torch.arange(vocab_size) if d2t is None else torch.arange(draft_vocab_size) + d2t
    logits = 2 * torch.randn(batch_size * num_nodes, vocab_size)
    draft_logits = (logits[:, known] + torch.randn(len(logits), len(known))).to(dtype)
    logits = logits.to(dtype)
    temperature = torch.tensor([1.0, 0.7, 1.3, 0.0]).repeat(batch_size)[:batch_size].contiguous()
    draft_temperature = temperature * 0.9
    draft_probs = reference.probs_of_logits(draft_logits, draft_temperature.repeat_interleave(num_nodes))
    target_probs = reference.probs_of_logits(logits, temperature.repeat_interleave(num_nodes))
    draw_children(links, draft_probs, known)
    values = links | {
        "target_logits": logits if target == "logits" else None,
        "draft_logits": draft_logits if draft == "logits" else None,
        "positions": positions,
        "seeds": torch.randint(-(2**62), 2**62, (batch_size,)),
        "temperature": temperature,
        "draft_temperature": draft_temperature,
        "target_probs": None if target == "logits" else target_probs,
        "draft_probs": None if draft == "logits" else draft_probs,
        "d2t": d2t,
    }
    return to_device(values, device) | {"spec_steps": spec_steps}


def make_small(trees):
    """One request for each (tokens, parents, target rows, draft rows) over four tokens; missing rows are flat."""
    num_nodes = max(len(tokens) for tokens, *_ in trees)
    values = {name: torch.full((len(trees), num_nodes), -1) for name in LINKS}
    values["retrieve_index"] = torch.arange(len(trees) * num_nodes).view(len(trees), num_nodes)
    probs = {name: torch.full((len(trees), num_nodes, 4), 0.25) for name in ("target_probs", "draft_probs")}
    for request, (tokens, parents, target, draft) in enumerate(trees):
        values["candidates"][request, : len(tokens)] = torch.tensor(tokens)
        links = links_of(parents)
        values["retrieve_next_token"][request, : len(tokens)] = torch.tensor(links[0])
        values["retrieve_next_sibling"][request, : len(tokens)] = torch.tensor(links[1])
        for name, rows in (("target_probs", target), ("draft_probs", draft)):
            for node, row in rows.items():
                probs[name][request, node] = torch.tensor(row)
    return values | {
        "target_logits": None,
        "draft_logits": None,
        "positions": torch.arange(7, 7 + len(trees) * num_nodes),
        "seeds": torch.arange(len(trees)),
        "temperature": None,
        "spec_steps": 3,
        **{name: rows.flatten(0, 1) for name, rows in probs.items()},
    }


def ahead_of_time_cases():
    yield "fp32", make(2, 8, 5, 64, 300)
    yield "fp16, draft probs", make(2, 4, 3, 8, 300, 100, draft="probs", dtype=torch.float16)
    yield "bf16, reduced", make(2, 8, 5, 64, 300, 100, dtype=torch.bfloat16)
    yield "probs", make(2, 4, 3, 8, 300, target="probs", draft="probs")
    yield "slices", make(1, 4, 3, 8, 9000, dtype=torch.bfloat16)
    yield "slices of probs, reduced", make(1, 2, 2, 4, 9001, 4500, target="probs", draft="probs")
    yield "S=0 N=1 V=2", make(2, 1, 1, 1, 2) | {"spec_steps": 0}


def order_case():
    """Two slices, which make rounds, and draws of which the first ones are seldom accepted."""
    return make(3, 3, 2, 7, 4200)


size_sweep = sweep(lambda batch_size: make(batch_size, 2, 2, 4, 61, 40))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, device):
    output, _ = check_operation(PATH, make(*shape, device=device), case=str(shape))
    assert shape[3] == 1 or output.accept_token_num.sum() > 0, "the case accepts nothing, so it proves little"


@pytest.mark.cross
@pytest.mark.parametrize(
    ("batch_size", "topk", "spec_steps", "num_nodes", "vocab_size"),
    [(6, 2, 2, 6, 12), (20, 4, 1, 5, 6)],  # of few tokens and many siblings, later ones decide
)
def test_exact_arithmetic_gives_the_reference(batch_size, topk, spec_steps, num_nodes, vocab_size, device):
    """Probabilities on a dyadic grid: sums are exact, whatever their order."""
    values = make(batch_size, topk, spec_steps, num_nodes, vocab_size, target="probs", draft="probs")
    values["target_probs"] = dyadic_probs(batch_size * num_nodes, vocab_size, 16)
    values["draft_probs"] = dyadic_probs(batch_size * num_nodes, vocab_size, 16)
    draw_children(values, values["draft_probs"], torch.arange(vocab_size))
    output, _ = check_operation(PATH, to_device(values, device), case="dyadic")
    assert output.accept_token_num.unique().numel() > 1
    assert (output.accept_index[:, 1] % num_nodes > 1).any(), "no second child was accepted"


# vocabularies of several slices: a round for each node, or too few of them

ROUNDS = pytest.mark.parametrize("rounds", [24, 1])


def cut(monkeypatch, block, rounds):
    """Makes slices small, and sets the number of rounds."""
    retune(monkeypatch, prepare_pair.SLICE_TUNING, BLOCK_VOCAB=block, num_warps=1)
    retune(monkeypatch, op.ROUND_TUNING, rounds=rounds)


@ROUNDS
def test_requests_that_end_in_different_rounds(rounds, device, monkeypatch):
    """Probabilities on a dyadic grid, few tokens and many siblings: now the first leaf is accepted, now the last."""
    cut(monkeypatch, 4, rounds)
    values = make(12, 4, 1, 5, 10, target="probs", draft="probs")
    values["target_probs"] = dyadic_probs(60, 10, 16)
    values["draft_probs"] = dyadic_probs(60, 10, 16)
    draw_children(values, values["draft_probs"], torch.arange(10))
    output, _ = check_operation(PATH, to_device(values, device), case=f"{rounds}")
    accepted = torch.where(output.accept_index[:, 1] >= 0, output.accept_index[:, 1] % 5, -1)
    assert accepted.unique().numel() > 2


@ROUNDS
def test_every_node_is_deleted(rounds, device, monkeypatch):
    """Two levels of children that the target does not have: one round for each."""
    cut(monkeypatch, 2, rounds)
    tree = ([9, 0, 1, 0, 1, 0], [-1, 0, 0, 1, 1, 2])
    target = {0: [0.0625, 0.0625, 0.5, 0.375], 1: [0.0, 0.0, 0.5, 0.5], 2: [0.0, 0.0, 0.25, 0.75]}
    draft = {0: [0.5, 0.25, 0.25, 0.0], 1: [0.5, 0.25, 0.125, 0.125], 2: HALVES}
    values = make_small([(*tree, {**target, 0: OTHER_HALVES}, draft), (*tree, target, draft), (*tree, target, draft)])
    output, _ = check_operation(PATH, to_device(values, device), case=f"{rounds}")
    assert output.accept_token_num[0] == 0


@ROUNDS
@pytest.mark.parametrize("kind", ["probs", "logits"])
def test_special_probabilities_in_slices(kind, rounds, device, monkeypatch):
    cut(monkeypatch, 2, rounds)
    values = make_small([case[:4] for case in SPECIAL])
    if kind == "logits":
        values |= {f"{which}_logits": values[f"{which}_probs"].log() for which in ("target", "draft")}
        values |= {"target_probs": None, "draft_probs": None, "temperature": torch.ones(len(SPECIAL))}
    check_operation(PATH, to_device(values, device), case=f"special {rounds}")


ONE_HOT = [0.0, 0.0, 1.0, 0.0]
HALVES = [0.5, 0.5, 0.0, 0.0]
OTHER_HALVES = [0.0, 0.0, 0.5, 0.5]
FLAT = [0.25] * 4
NAN = float("nan")
TWO, CHAIN = [-1, 0, 0], [-1, 0, 1]

# tokens, parents, target rows, draft rows -> accepted nodes, what the token after may be
SPECIAL = [
    ([9, 2, 1], TWO, {0: ONE_HOT, 1: HALVES}, {0: FLAT}, [1], {0, 1}),  # one-hot on the first child
    ([9, 1, 2], TWO, {0: ONE_HOT, 2: HALVES}, {0: FLAT}, [2], {0, 1}),  # on the second
    ([9, 0, 1], TWO, {0: ONE_HOT}, {0: FLAT}, [], {2}),  # on no child
    ([9, 0, 1], TWO, {0: OTHER_HALVES}, {0: HALVES}, [], {2, 3}),  # disjoint
    ([9, 0, 3], CHAIN, {0: HALVES, 1: OTHER_HALVES, 2: ONE_HOT}, {0: HALVES, 1: OTHER_HALVES}, [1, 2], {2}),  # p = q
    ([9, 0, 3], CHAIN, {0: ONE_HOT, 1: HALVES}, {0: HALVES, 1: FLAT}, [], {2}),  # p(child) = 0, and all below it
    ([9, 2, 0], CHAIN, {0: ONE_HOT, 1: ONE_HOT}, {0: FLAT, 1: HALVES}, [1], {2}),  # only the leaf is rejected
    ([9, 0, 2], TWO, {0: [0.0, 0.5, 0.5, 0.0]}, {0: [1.0, 0.0, 0.0, 0.0]}, [], {1, 2}),  # Q is exhausted
    ([9, 0, 1], TWO, {0: [0.0, 0.0, 0.5, 0.5]}, {0: [1.0] * 4}, [], {2, 3}),  # no residual: p
    ([9, 0], [-1, 0], {0: OTHER_HALVES}, {0: [1.0] * 4}, [], {2, 3}),  # nor of the last child
    ([9, 0, 0], TWO, {0: ONE_HOT}, {0: HALVES}, [], {2}),  # a second sibling of one token
    ([9, 3, 2], TWO, {0: ONE_HOT, 2: ONE_HOT}, {0: [0.5, 0.0, 0.5, 0.0]}, [2], {2}),  # q(child) = 0: passed over
    ([9, 3, 2], TWO, {0: ONE_HOT, 2: ONE_HOT}, {0: [0.5, 0.0, 0.5, NAN]}, [2], {2}),
    ([9, 3, 2], TWO, {0: ONE_HOT, 2: ONE_HOT}, {0: [0.5, 0.0, 0.5, 1.5]}, [2], {2}),
    ([9, -1, 2], TWO, {0: ONE_HOT, 2: ONE_HOT}, {0: FLAT}, [2], {2}),
    ([9, 2**30, 2], TWO, {0: ONE_HOT, 2: ONE_HOT}, {0: FLAT}, [2], {2}),
    ([9, 3, 2], CHAIN, {0: ONE_HOT, 1: ONE_HOT}, {0: ONE_HOT}, [], {2}),  # nor is anything below it accepted
    ([9, 2], [-1, 0], {0: [0.0] * 4}, {0: FLAT}, [], {0}),  # a row without mass
    ([9], [-1], {0: [NAN, 0.0, 0.0, 1.0]}, {}, [], {3}),
]


def test_special_probabilities(device):
    values = to_device(make_small([case[:4] for case in SPECIAL]), device)
    output, _ = check_operation(PATH, values, case="special")
    predicts = output.predicts.view(len(SPECIAL), -1)
    for row, (tokens, parents, *_, path, bonus) in enumerate(SPECIAL):
        want = [row * 3 + node for node in (0, *path)]
        assert output.accept_index[row].tolist() == (want + [-1] * 4)[:4], f"row {row}: {tokens} {parents}"
        assert int(predicts[row, (0, *path)[-1]]) in bonus, f"row {row}: {tokens} {parents}"
        assert (predicts[row] >= 0).sum() == len(path) + 1


# what seeds give node 1 of depth 1 at position 8
COINS = {19481284: 0.0, 4350746: 1 - 2.0**-24}


def test_coins_at_the_ends(device):
    """The least coin accepts nothing that has probability 0, the largest refuses nothing that is certain."""
    trees = [([9, 0], [-1, 0], {0: target}, {0: HALVES}) for target in (ONE_HOT, HALVES)]
    for seed, coin in COINS.items():
        assert Draws(seed).uniform(8, 65536 + 1) == coin
        values = make_small(trees)
        values["seeds"].fill_(seed)
        values["positions"] = torch.tensor([7, 8, 7, 8])
        output, _ = check_operation(PATH, to_device(values, device), case=str(coin))
        assert output.accept_token_num.tolist() == [0, 1]


def test_links_that_share_nodes_are_walked_once(device):
    """Every node names the next one as child and as sibling: 2^N ways down."""
    values = make(1, 1, 5, 6)
    values["retrieve_next_sibling"].copy_(values["retrieve_next_token"])
    check_operation(PATH, to_device(values, device), case="shared")
    values = make(1, 1, 29, 30, 8, target="probs", draft="probs")
    values["retrieve_next_sibling"].copy_(values["retrieve_next_token"])
    eagle_kernels.reference.ops.rejection.verify_tree_traversal.verify_tree_traversal(**values)


# the law


def emitted_law(parents, target, draft, *, claimed=None, propose=None, then=(), draws=EnumeratedDraws):
    """The exact law of what the shipped reference emits, and the expected number of accepted drafts.

    claimed: the draft distributions that the verifier is given, by default the true ones. propose(probs, source): how
    a child is drawn from what its elder siblings left. then: the parents of the trees of further rounds, each going on
    from where the one before ended. draws(source): what all rounds of one request draw from.
    """
    trees = (parents, *then)
    claimed = claimed or draft
    propose = propose or (lambda probs, source: source.choose(probs))

    def run(source):
        text, of_request = (), draws(source)
        for parents in trees:
            tree = Drawn(parents, draft, lambda probs: propose(probs, source), text=text)
            texts = [tree.text(node) for node in range(len(parents))]
            path, bonus = reference.verify_request(
                [0, *(text[-1] for text in texts[1:])],
                *links_of(parents),
                torch.stack([target[text] for text in texts]),
                torch.stack([claimed[text] for text in texts]),
                [len(text) for text in texts],
                of_request,
                len(parents),
            )
            text = (*texts[path[-1]], bonus)
        return text

    law = enumerate_outcomes(run)
    return law, sum(probability * (len(text) - len(trees)) for text, probability in law.items())


def deviation(parents, target, draft, *, then=(), **options):
    emitted, _ = emitted_law(parents, target, draft, then=then, **options)
    return distance_to(target, emitted, sum(max(depths_of(tree)) + 1 for tree in (parents, *then)))


TREES = {
    "two": (4, [-1, 0, 0]),
    "chain": (3, [-1, 0, 1, 2]),
    "all": (3, [-1, 0, 0, 0]),
    "first": (3, [-1, 0, 0, 1, 1]),
    "second": (3, [-1, 0, 0, 2, 2]),
    "both": (3, [-1, 0, 0, 1, 2]),
    "ragged": (2, [-1, 0, 0, 1, 1, 3]),
}


@pytest.mark.parametrize("name", TREES)
def test_the_law_is_exactly_the_targets(name):
    vocab_size, parents = TREES[name]
    target = random_law(vocab_size, max(depths_of(parents)))
    assert deviation(parents, target, near(target, 0.5)) < 1e-12
    assert deviation(parents, random_law(vocab_size, max(depths_of(parents)), zeros=1), target) < 1e-12


def deviation_of_two_rounds(**options):
    """First a chain; nodes 2 and 3 of the tree of the next round lie at positions that they had in the chain."""
    return deviation([-1, 0, 1, 2], random_law(2, 7), random_law(2, 7), then=([-1, 0, 0, 1],), **options)


def test_the_law_of_two_rounds_is_exactly_the_targets():
    """And no coin is looked at twice: of a leaf's coin something is known when its position is drafted again."""
    assert deviation_of_two_rounds() < 1e-12


def test_coins_that_the_next_round_finds_again_are_seen():
    """One coin for a node at a position, whatever its depth."""
    by_node = coins_by(lambda position, draw: (position, draw % 65536))
    assert max(deviation_of_two_rounds(draws=by_node) for _ in range(3)) > 0.005


def test_children_that_exhaust_the_draft_are_always_accepted():
    target = random_law(3, 1)
    _, accepted = emitted_law([-1, 0, 0, 0], target, random_law(3, 1))
    assert abs(accepted - 1) < 1e-12


def test_a_chain_is_block_verification():
    """Not the law of the text alone: how much of it is accepted as well."""
    for num_drafts in (1, 2, 3):
        target = random_law(3, num_drafts)
        draft = near(target, 0.5)
        traversal, _ = emitted_law(list(range(-1, num_drafts)), target, draft)
        assert total_variation(traversal, emitted_by_a_chain("block", target, draft, num_drafts)[0]) < 1e-12


def test_a_tree_accepts_no_less_than_its_first_path():
    for _ in range(4):
        target = random_law(3, 2)
        draft = near(target, 0.5)
        accepted = [emitted_law(parents, target, draft)[1] for parents in ([-1, 0, 1], [-1, 0, 0, 1, 1])]
        assert accepted[1] > accepted[0]


# tree, how much of the target is in the draft, how many targets
WRONG = {
    "residual not subtracted": ("both", 0.3, 3),
    "children by argmax": ("both", 0.3, 3),
    "draft temperature ignored": ("both", None, 3),
    "rejected tokens stay in Q": ("two", 0.0, 8),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_schemes_are_seen(wrong, monkeypatch):
    """p / q is for drafts that were sampled, and from what is claimed; Q must lose the tokens that are deleted."""
    (name, share, count), options = WRONG[wrong], {}
    vocab_size, parents = TREES[name]
    draft = random_law(3, 2) if share is None else None
    if wrong == "residual not subtracted":
        monkeypatch.setattr(reference, "subtract", lambda target, draft, acceptance: (target, target.sum()))
    elif wrong == "children by argmax":
        options["propose"] = lambda probs, source: probs.argmax()
    elif wrong == "draft temperature ignored":
        options["claimed"] = {text: probs**0.4 / (probs**0.4).sum() for text, probs in draft.items()}
    else:
        monkeypatch.setattr(reference, "remove", lambda draft, token: draft)
    targets = [random_law(vocab_size, max(depths_of(parents))) for _ in range(count)]
    assert max(deviation(parents, target, draft or near(target, share), **options) for target in targets) > 0.05


@pytest.mark.gpu
def test_large_vocabulary(device):
    values = make(32, 8, 5, 64, 32000, 8000, dtype=torch.bfloat16, device=device)
    output, _ = check_operation(PATH, values, case="large")
    assert output.accept_token_num.sum() > 0
