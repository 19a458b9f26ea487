"""verify_tree_rejection: its reference has exactly the target's law, wrong schemes do not, and the kernel equals it."""

import functools
import itertools

import pytest
import torch

from eagle_kernels.ops.rejection import verify_tree_rejection as op
from eagle_kernels.ops.rejection.shared import prepare_pair
from eagle_kernels.reference import random as reference_random
from eagle_kernels.reference.enumeration import EnumeratedDraws, enumerate_outcomes
from eagle_kernels.reference.ops.rejection.verify_tree_rejection import normalised, verify_request, without
from eagle_kernels.reference.tree import children_in
from op_tests.harness import check_operation, sweep, to_device
from op_tests.harness.retune import retune
from op_tests.harness.trees import depths_of, links_of, stars
from op_tests.ops.rejection.laws import Drawn, distance_to, draw_children, random_law
from op_tests.ops.verify.cases import make_tree

PATH = "rejection.verify_tree_rejection"
SHAPES = [(2, 1, 1, 1), (3, 1, 4, 5), (2, 8, 1, 9), (4, 4, 3, 8), (2, 8, 5, 32)]
REPLACEMENT = pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])


def make(
    batch_size, topk, spec_steps, num_nodes, *, vocab_size=61, replacement=False, reduced=None, probs=False,
    dtype=torch.float32, device="cpu",
):  # fmt: skip
    """A tree whose children are draws of the draft, which is not far from the target; row 1 has a greedy target.

    reduced: the size of the draft's vocabulary, if it has one of its own.
    """
    links, positions = make_tree(batch_size, topk, spec_steps, num_nodes, vocab_size=vocab_size)
    num_rows = batch_size * num_nodes
    target = 2.0 * torch.randn(num_rows, vocab_size)
    draft = target + torch.randn(num_rows, vocab_size)
    ids = torch.arange(vocab_size) if reduced is None else torch.randperm(vocab_size)[:reduced].sort().values
    draft = draft[:, ids]
    temperature = torch.tensor([0.9, 0.0, 1.0, 1.3]).repeat(batch_size)[:batch_size].contiguous()
    draft_temperature = torch.tensor([1.0, 1.0, 0.8, 0.7]).repeat(batch_size)[:batch_size].contiguous()
    scaled = draft / draft_temperature.repeat_interleave(num_nodes)[:, None]
    draw_children(links, torch.softmax(scaled, -1), ids, replacement)
    values = {
        **links,
        "target_logits": target.to(dtype),
        "draft_logits": draft.to(dtype),
        "positions": positions,
        "seeds": torch.randint(-(2**62), 2**62, (batch_size,)),
        "temperature": temperature,
        "draft_temperature": draft_temperature,
    }
    if reduced is not None:
        values["d2t"] = ids - torch.arange(reduced)
    if probs:
        for name, scale in (("target", temperature), ("draft", draft_temperature)):
            logits = values[f"{name}_logits"].float() / scale.clamp(min=0.01).repeat_interleave(num_nodes)[:, None]
            values |= {f"{name}_logits": None, f"{name}_probs": torch.softmax(logits, -1)}
    return to_device(values, device) | {"spec_steps": spec_steps, "replacement": replacement}


def ahead_of_time_cases():
    yield "bf16", make(2, 4, 3, 8, dtype=torch.bfloat16)
    yield "fp32, wide, with replacement", make(2, 8, 5, 64, dtype=torch.float32, replacement=True)
    yield "fp16, reduced vocabulary", make(2, 8, 5, 64, dtype=torch.float16, reduced=20)
    yield "probabilities, reduced vocabulary", make(2, 4, 3, 8, probs=True, reduced=20, replacement=True)
    yield "slices", make(1, 4, 3, 8, vocab_size=9000, dtype=torch.bfloat16)
    sliced = make(1, 2, 2, 4, vocab_size=9001, probs=True, reduced=4500, replacement=True)
    yield "slices of probs, reduced, with replacement", sliced
    yield "slices, level by level", make(160, 8, 1, 9, vocab_size=5000)
    yield "S=0 N=1 V=2", make(2, 1, 1, 1, vocab_size=2) | {"spec_steps": 0}


def order_case():
    """Two slices, which make rounds."""
    return make(2, 2, 2, 5, vocab_size=4200)


size_sweep = sweep(lambda batch_size: make(batch_size, 4, 3, 8))


# the law: exact enumeration of the shipped reference

TREES = {  # parent of each node
    "root alone": [-1],
    "two children": [-1, 0, 0],
    "three children": [-1, 0, 0, 0],
    "chain": [-1, 0, 1, 2],
    "ragged": [-1, 0, 0, 1, 1, 2],
    "full": [-1, 0, 0, 1, 1, 2, 2],
    "one deep branch": [-1, 0, 0, 1, 3],
}


def law_of(parents, target, draft, *, replacement=False, verify=verify_request, propose=None, certain=False):
    """The law of what the tree emits. propose(probs): how a child is drawn."""
    first, sibling = links_of(parents)

    def emitted(source):
        tree = Drawn(parents, draft, propose or source.choose, replacement=replacement)
        path, bonus = verify(
            tree, first, sibling, depths_of(parents),
            target_at=lambda node: target[tree.text(node)], scores_at=lambda node: draft[tree.text(node)].log(),
            children_are_certain=certain, spec_steps=len(parents), replacement=replacement,
            draws=EnumeratedDraws(source),
        )  # fmt: skip
        return (*tree.text(path[-1]), bonus)

    return enumerate_outcomes(emitted)


def distance(parents, target, draft, **scheme):
    return distance_to(target, law_of(parents, target, draft, **scheme), max(depths_of(parents)) + 1)


def pair(parents, vocab_size, zeros=0):
    """Target and draft of all texts as long as the tree is deep."""
    return [random_law(vocab_size, max(depths_of(parents)), zeros=zeros) for _ in range(2)]


@REPLACEMENT
@pytest.mark.parametrize(
    ("tree", "vocab_size"),
    [(tree, 3) for tree in TREES] + [("three children", 4), ("two children", 4), ("three children", 2)],
)
def test_the_law_is_the_targets(tree, vocab_size, replacement):
    assert distance(TREES[tree], *pair(TREES[tree], vocab_size), replacement=replacement) < 1e-12


@REPLACEMENT
@pytest.mark.parametrize("tree", ["three children", "ragged"])
def test_the_law_is_the_targets_where_probabilities_are_zero(tree, replacement):
    """Also where the draft's support is smaller than the number of children, which then are fewer."""
    for _ in range(3):
        assert distance(TREES[tree], *pair(TREES[tree], 3, zeros=1), replacement=replacement) < 1e-12


@pytest.mark.parametrize("tree", ["three children", "ragged"])
def test_the_law_is_the_targets_for_chosen_children(tree):
    """Draft temperature 0: the children are the draft's best tokens, each proposed with certainty."""
    assert distance(TREES[tree], *pair(TREES[tree], 3), propose=torch.argmax, certain=True) < 1e-12


def test_as_many_children_as_tokens_accept_always():
    parents = [-1, 0, 0, 0, 1, 1, 1]
    law = law_of(parents, *pair(parents, 3))
    assert sum(probability for text, probability in law.items() if len(text) == 1) < 1e-15
    assert law_of([-1, 0], *pair([-1, 0], 1)) == {(0, 0): 1.0}


def test_acceptance_is_what_the_formula_says():
    """One child: sum min(p, q). More children never accept less."""
    target, draft = pair([-1, 0], 4)
    rates = []
    for parents in ([-1, 0], [-1, 0, 0], [-1, 0, 0, 0]):
        law = law_of(parents, target, draft)
        rates.append(sum(probability for text, probability in law.items() if len(text) > 1))
    assert abs(rates[0] - float(torch.minimum(target[()], draft[()]).sum())) < 1e-12
    assert rates[0] < rates[1] < rates[2] < 1.0


def wrong_request(
    tokens, first_child, next_sibling, positions, *, target_at, scores_at, fault, replacement, draws, **unused
):
    """The recursion with one mistake, on a tree of one level."""
    target, scores = target_at(0), scores_at(0)
    original, draft = target, normalised(scores)
    for child in children_in(first_child, next_sibling, 0):
        token = tokens[child]
        if not draft[token] > 0:
            break
        if draws.uniform(0, child) < target[token] / draft[token]:
            return [0, child], draws.choose(target_at(child), 1)
        left = (target - draft).clamp(min=0)
        if fault != "residual not subtracted":
            target = left / left.sum() if fault != "no renormalisation" else left
        if fault == "q not renormalised":
            draft = draft.clone()
            draft[token] = 0
        elif not replacement and fault != "q keeps the rejected token":
            scores = without(scores, token)
            draft = normalised(scores)
    if fault == "bonus from p" or target.sum() <= 0:
        target = original
    return [0], draws.choose(target / target.sum(), 1)


# target and draft of the examples: far from each other, as a small draft model is at a high temperature
FAR = [
    dict.fromkeys([(), (0,), (1,), (2,)], torch.tensor(probs, dtype=torch.float64))
    for probs in ([0.1, 0.3, 0.6], [0.6, 0.05, 0.35])
]


def test_the_wrong_schemes_are_right_without_their_mistake():
    """So that what the negative controls show is the mistake."""
    scheme = functools.partial(wrong_request, fault=None)
    for replacement in (False, True):
        assert distance([-1, 0, 0], *FAR, replacement=replacement, verify=scheme) < 1e-12


@pytest.mark.parametrize(
    ("fault", "replacement"),
    [
        *itertools.product(("residual not subtracted", "no renormalisation", "bonus from p"), (True, False)),
        ("q not renormalised", False),
        ("q keeps the rejected token", False),
    ],
)
def test_wrong_schemes_show(fault, replacement):
    scheme = functools.partial(wrong_request, fault=fault)
    assert distance([-1, 0, 0], *FAR, replacement=replacement, verify=scheme) > 0.05


def test_top_k_children_are_no_draws():
    """The scheme most often found: the draft's best tokens, verified as if they had been drawn."""
    assert distance([-1, 0, 0], *FAR, propose=torch.argmax) > 0.05
    assert distance([-1, 0, 0], *FAR, propose=torch.argmax, certain=True) < 1e-12


def test_the_scheme_must_fit_the_children():
    """Draws without replacement verified as independent ones are wrong; the other way round only accepts less.

    A token that comes again ends the list, and one that does not is a draw from what the ones before it left.
    """

    def as_with(*tree, replacement, **values):
        return verify_request(*tree, replacement=True, **values)

    def as_without(*tree, replacement, **values):
        return verify_request(*tree, replacement=False, **values)

    assert distance([-1, 0, 0], *FAR, verify=as_with) > 0.05
    assert distance([-1, 0, 0, 0], *FAR, replacement=True, verify=as_without) < 1e-12


# the kernel: equal to the reference


@REPLACEMENT
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, replacement, device):
    values = make(*shape, replacement=replacement, device=device)
    output, _ = check_operation(PATH, values, case=f"{shape}")
    assert shape[3] == 1 or output.accept_token_num.sum() > 0, "the case accepts nothing, so it proves little"


def test_draft_logits_padded_past_the_vocabulary(device):
    """Tokens that the target does not have carry probability of q, and are never accepted."""
    values = make(4, 4, 3, 8, device=device)
    padded = torch.nn.functional.pad(values["draft_logits"], (0, 7), value=2.0)
    values["candidates"][:, 1] = 64
    output, _ = check_operation(PATH, {**values, "draft_logits": padded}, case="padded")
    assert (output.accept_index[:, 1].cpu() % 8 != 1).all() and output.predicts.max() < 61


# vocabularies of several slices

# rounds at the most
WAYS = {"all nodes at once": 8, "level by level": 8, "too few rounds": 1}
WAY = pytest.mark.parametrize("way", WAYS)


def cut(monkeypatch, way, block=32, rounds=None):
    """Makes slices small, and the launcher go one of the WAYS."""
    retune(monkeypatch, prepare_pair.SLICE_TUNING, BLOCK_VOCAB=block, num_warps=1)
    retune(monkeypatch, op.ROUND_TUNING, rounds=rounds or WAYS[way])
    monkeypatch.setattr(op, "goes_by_level", lambda *_: way == "level by level")


@pytest.mark.parametrize(
    ("batch_size", "tree", "is_level"),
    [(1, (3, 8), False), (4, (3, 8), False), (8, (3, 8), True), (32, (3, 8), True), (1, (5, 64), True),
     (8, (5, 64), True)],
    ids=str,
)  # fmt: skip
def test_the_faster_way_is_taken(batch_size, tree, is_level, device):
    """As it was measured: bench/results/NVIDIA_H100_80GB_HBM3/tuning/verify_tree_rejection.txt."""
    spec_steps, num_nodes = tree
    rows = torch.empty(1, device=device).expand(batch_size * num_nodes, 128256)
    assert op.goes_by_level(rows, min(num_nodes - 1, 8), spec_steps, batch_size) == is_level


def launches_of(way, spec_steps, num_nodes, has_scan=True):
    num_levels = spec_steps + 1 if way == "level by level" else 1
    return num_levels * (min(WAYS[way], num_nodes - 1) + 1 + has_scan)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "rounds"), [("all nodes at once", 2), ("all nodes at once", 8), ("level by level", 5)])
def test_requests_that_end_in_different_rounds(way, rounds, device, monkeypatch):
    """Seven children, of which the first, the third or none is accepted; seven rounds at the most are needed."""
    cut(monkeypatch, way, 16, rounds)
    tokens = [0, 1, 33, 20, 5, 17, 36]
    target, draft = torch.zeros(2, 40)
    target[[0, 1, 20, 33, 39]] = torch.tensor([2.0, 1.0, 2.0, 3.0, 8.0]) / 16
    draft[[0, 1, 33, 20, 5, 17, 36]] = torch.tensor([8.0, 2.0, 1.0, 1.0, 1.0, 1.0, 2.0]) / 16
    values = one_level(tokens, target.tolist(), draft.tolist(), num_requests=6, device=device)
    output, _ = check_operation(PATH, values, case=f"{way} {rounds}")
    accepted = torch.where(output.accept_index[:, 1] >= 0, output.accept_index[:, 1] % 8, -1)
    assert accepted.unique().tolist() == [-1, 1, 3]


# three children; after two of them so little of q is left that it gets a scale of its own
LITTLE = ([0, 1, 4], [0.0, 0.0, 0.0, 0.4, 0.3, 0.3], [1 - 2e-9, 1.2e-9, 0.0, 0.27e-9, 0.27e-9, 0.27e-9])


def rare_cases(kind, device):
    """What decides where hardly anything is left, in one batch; the last children are chosen, not drawn."""
    cases = [(*SPECIAL[name][:3], 1.0) for name in RARE] + [(*LITTLE, 1.0)] * 4
    cases += [(tokens, [0.0] * 4 + [1.0], [0.0, 0.2, 0.2, 0.0, 0.6], 0.0) for tokens in ([4], [1, 4])]
    requests = []
    for number, (tokens, target, draft, temperature) in enumerate(cases):
        target, draft = (torch.tensor(row + [0.0] * (6 - len(row))) for row in (target, draft))
        one = one_level([*tokens, *[-1] * (3 - len(tokens))], target.tolist(), draft.tolist(), num_requests=1)
        one["seeds"] += number
        one["draft_temperature"] = torch.tensor([temperature])
        requests.append(one)
    tensors = {name for name, value in requests[0].items() if isinstance(value, torch.Tensor)}
    values = requests[0] | {name: torch.cat([one[name] for one in requests]) for name in tensors}
    values["retrieve_index"] = torch.arange(4 * len(requests)).view(-1, 4)
    if kind == "logits":
        values |= {f"{which}_logits": values[f"{which}_probs"].log() for which in ("target", "draft")}
        values |= {"target_probs": None, "draft_probs": None}
    return to_device(values, device)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:divide by zero")
@WAY
@REPLACEMENT
@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_what_several_slices_leave(kind, replacement, way, device, monkeypatch):
    """Where nothing is left of p or q, or hardly anything, the next step differs."""
    cut(monkeypatch, way, block=4)
    output, _ = check_operation(PATH, rare_cases(kind, device) | {"replacement": replacement}, case=way)
    assert output.accept_token_num.unique().numel() == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:divide by zero")
@WAY
def test_draft_logits_far_below_the_rejected_child_in_slices(way, device, monkeypatch):
    cut(monkeypatch, way, block=2)
    logits = torch.tensor([0.0, -95.0, -95.5, -96.0, -400.0, -401.0])
    values = one_level([0, 1, 2, 3, 4, 5], [0.0, 0.0, 0.2, 0.0, 0.3, 0.5], [0.0] * 6)
    values |= {"draft_probs": None, "draft_logits": logits.expand(len(values["target_probs"]), -1).contiguous()}
    output, _ = check_operation(PATH, to_device(values, device), case=way)
    assert (output.accept_token_num == 1).all()


@pytest.mark.cross
@WAY
def test_chosen_children_in_slices(way, device, monkeypatch):
    cut(monkeypatch, way, block=2)
    values = one_level([1, 3], [0.4, 0.3, 0.2, 0.1], [0.25] * 4, num_requests=6)
    values["draft_temperature"] = torch.tensor([0.0, 1.0]).repeat(3)
    values |= {"draft_probs": None, "draft_logits": values["draft_probs"].log()}
    check_operation(PATH, to_device(values, device), case=way)


def one_level(tokens, target, draft, *, num_requests=4, device="cpu", **changes):
    """Many requests with one tree of one level and other seeds; rows of probabilities for the root."""
    rows = num_requests * (len(tokens) + 1)
    values = stars([tokens] * num_requests) | {
        **dict.fromkeys(("target_logits", "draft_logits")),
        "positions": torch.full((rows,), 5),
        "seeds": torch.arange(num_requests),
        "temperature": torch.ones(num_requests),
        "target_probs": torch.tensor(target).expand(rows, -1).contiguous(),
        "draft_probs": torch.tensor(draft).expand(rows, -1).contiguous(),
    }
    return to_device(values | changes, device) | {"spec_steps": 1, "replacement": False}


# tokens of the children, target, draft -> what may come of it: which child is accepted, the token that follows the root
SPECIAL = {
    "one-hot on the child": ([2], [0.0, 0.0, 1.0, 0.0], [0.25, 0.25, 0.25, 0.25], {1}, {2}),
    "one-hot off the child": ([2], [0.0, 1.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], {-1}, {1}),
    "one-hot on the second child": ([2, 1], [0.0, 1.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], {2}, {1}),
    "disjoint supports": ([2, 3], [0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5], {-1}, {0, 1}),
    "equal": ([2, 3], [0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25], {1}, {2}),
    "child of probability 0": ([3], [0.5, 0.25, 0.25, 0.0], [0.0, 0.25, 0.25, 0.5], {-1}, {0}),
    "all of q on a rejected child": ([0, 2], [0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], {1, -1}, {0, 1}),
    "no draw of the draft": ([0, 1], [0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5], {-1}, {0, 1}),
    # p below q everywhere (it sums to less than 1): nothing of it is left, so the child is accepted
    "residual of no mass": ([0], [0.25, 0.25, 0.0, 0.0], [0.5, 0.25, 0.25, 0.0], {1}, {0}),
    # but not a child of probability 0: p stays as it was
    "residual of no mass, child of 0": ([2], [0.25, 0.25, 0.0, 0.0], [0.5, 0.25, 0.25, 0.0], {-1}, {0, 1}),
    # ends the list where it cannot have been drawn, else it is rejected again
    "a repeated token": ([0, 0, 1], [0.25, 0.75, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], {1, 3, -1}, {0, 1}),
    "no target": ([0], [0.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], {-1}, {0}),
    "no child": ([], [0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], {-1}, {0, 1}),
    "tokens that are none": ([-1, 4, 1], [0.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], {3}, {1}),
}
RARE = ("all of q on a rejected child", "residual of no mass", "residual of no mass, child of 0", "a repeated token")


@REPLACEMENT
@pytest.mark.parametrize("name", SPECIAL)
def test_special_distributions(name, replacement, device):
    tokens, target, draft, accepted, emitted = SPECIAL[name]
    values = {**one_level(tokens, target, draft, device=device), "replacement": replacement}
    output, _ = check_operation(PATH, values, case=name)
    num_nodes = len(tokens) + 1
    path = output.accept_index[:, 1]
    assert set(torch.where(path >= 0, path % num_nodes, -1).tolist()) <= accepted
    assert set(output.predicts.view(-1, num_nodes)[:, 0].tolist()) <= emitted


def test_the_coin_is_compared_strictly(device):
    """p(t) equal to the coin rejects, the next larger number accepts; coin 0 does not accept p = 0."""
    seeds = torch.arange(4)
    coins = reference_random.uniform(seeds, torch.full((4,), 5), reference_random.STREAM_ACCEPT, 1)
    for edge, is_accepted in ((coins, False), (torch.nextafter(coins, torch.tensor(2.0)), True)):
        values = one_level([0], [0.5, 0.5], [1.0, 0.0])
        values["target_probs"] = torch.stack([edge, 1.0 - edge], 1).repeat_interleave(2, 0).contiguous()
        output, _ = check_operation(PATH, to_device(values, device), case=f"{is_accepted}")
        assert (output.accept_token_num == int(is_accepted)).all()


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # at rejected tokens, whose place is masked
def test_draft_logits_far_below_the_rejected_child(device):
    """What is left of q is less than fp32's smallest number, but a distribution: its children remain children.

    They are all of its tokens, so one of them is accepted.
    """
    tokens, target = [0, 1, 2, 3, 4, 5], [0.0, 0.0, 0.2, 0.0, 0.3, 0.5]
    values = one_level(tokens, target, [0.0] * 6, num_requests=8)
    logits = torch.tensor([0.0, -95.0, -95.5, -96.0, -400.0, -401.0])
    values |= {"draft_probs": None, "draft_logits": logits.expand(len(values["target_probs"]), -1).contiguous()}
    output, _ = check_operation(PATH, to_device(values, device))
    assert (output.accept_token_num == 1).all()
    assert set((output.accept_index[:, 1] % 7).tolist()) == {5, 6}


def test_chosen_children_need_no_draft(device):
    """Draft temperature 0, without replacement: what the draft's rows hold does not matter."""
    values = one_level([1, 3], [0.4, 0.3, 0.2, 0.1], [0.25] * 4, num_requests=8)
    values["draft_temperature"] = torch.zeros(8)
    values["draft_probs"].fill_(float("nan"))
    output, _ = check_operation(PATH, to_device(values, device))
    followed = output.predicts.view(-1, 3)[:, 0]
    assert torch.equal(output.accept_token_num == 1, (followed == 1) | (followed == 3))
    assert len(set(followed.tolist())) > 2


@REPLACEMENT
def test_equal_distributions_accept_every_first_child(replacement, device):
    values = make(4, 4, 3, 8, replacement=replacement, device=device)
    values["draft_logits"] = values["target_logits"].clone()
    values["temperature"] = values["draft_temperature"].clone()
    output, _ = check_operation(PATH, values)
    first = values["retrieve_next_token"].cpu()
    for request in range(4):
        node, path = 0, []
        while node >= 0 and len(path) <= 3:
            path.append(request * 8 + node)
            node = int(first[request, node])
        assert output.accept_index[request].tolist() == path + [-1] * (4 - len(path))


@pytest.mark.gpu
@REPLACEMENT
@pytest.mark.parametrize("reduced", [None, 8000])
def test_large_vocabulary(reduced, replacement, device):
    sizes = {"vocab_size": 32000, "reduced": reduced, "dtype": torch.bfloat16}
    values = make(8, 8, 5, 64, **sizes, replacement=replacement, device=device)
    output, _ = check_operation(PATH, values, case=f"{reduced}")
    assert output.accept_token_num.sum() > 0
