"""verify_tree_coins: equal to its reference, whose every outcome is enumerated and has the target's joint law."""

import pytest
import torch

import eagle_kernels
from eagle_kernels.reference.enumeration import enumerate_outcomes
from eagle_kernels.reference.ops.verify import verify_tree_coins as reference
from op_tests.harness import assert_equal, check_operation, sweep, to_device
from op_tests.harness.trees import LINKS, links_of, prefixes_of, trees_of
from op_tests.ops.rejection.laws import distance_to, random_law
from op_tests.ops.verify.cases import follow_tree, make_tree

PATH = "verify.verify_tree_coins"
SHAPES = [(2, 1, 1, 1), (3, 1, 4, 5), (2, 8, 1, 9), (4, 4, 3, 8), (2, 8, 5, 32), (1, 8, 5, 128)]
LAST_COIN = 1.0 - 2.0**-24
run = eagle_kernels.raw.verify_tree_coins


def on_grid(logits, units=512):
    """Probabilities in multiples of 1 / units that sum to 1: all sums of them are exact in fp32, in any order."""
    counts = (torch.softmax(logits, dim=-1) * units).floor()
    counts.scatter_add_(-1, counts.argmax(-1, keepdim=True), units - counts.sum(-1, keepdim=True))
    return counts / units


def make(batch_size, topk, spec_steps, num_nodes, *, vocab_size=61, device="cpu", dtype=torch.int64, peak=6.0):
    """Rows that favour some child, and coins, all on a dyadic grid; coins meet edges exactly, now and then."""
    links, _ = make_tree(batch_size, topk, spec_steps, num_nodes, vocab_size=vocab_size, dtype=dtype)
    logits = follow_tree(links, vocab_size, peak=peak)
    values = {
        **links,
        "target_probs": on_grid(logits).view(batch_size, num_nodes, vocab_size),
        "uniform_samples": torch.randint(512, (batch_size, num_nodes)) / 512,
        "uniform_samples_for_final_sampling": torch.randint(512, (batch_size,)) / 512,
        "spec_steps": spec_steps,
    }
    return to_device(values, device)


def explicit(tokens, parents, probs, coins, final_coin, *, spec_steps=3, device="cpu"):
    """One request, all of it written out; `probs` [N, V], or [V] for the root's row where no other matters."""
    probs = torch.as_tensor(probs, dtype=torch.float32)
    values = {
        **trees_of(parents, [tokens]),
        "target_probs": (probs.expand(len(tokens), -1) if probs.dim() == 1 else probs)[None].contiguous(),
        "uniform_samples": torch.tensor([coins], dtype=torch.float32),
        "uniform_samples_for_final_sampling": torch.tensor([final_coin], dtype=torch.float32),
        "spec_steps": spec_steps,
    }
    return to_device(values, device)


def star(children, probs, coin, final_coin, **options):
    """A root with these children; only the root's row and coin count, unless a child is accepted."""
    return explicit([0, *children], [-1] + [0] * len(children), probs, [coin] + [0.0] * len(children), final_coin,
                    **options)  # fmt: skip


def outcome(values, case=""):
    """(accepted node or None, tokens emitted), kernel and reference agreeing."""
    output, _ = check_operation(PATH, values, case=case)
    path = [node for node in output.accept_index[0].tolist() if node >= 0]
    assert len(path) == output.accept_token_num[0] + 1
    return path[1:], [output.predicts[node].item() for node in path]


def ahead_of_time_cases():
    yield "two slices", make(2, 8, 5, 64, vocab_size=4200)
    for num_nodes, vocab_size in ((8, 128256), (64, 128256), (256, 50257)):
        values = make(1, 8, 5, num_nodes)
        values["target_probs"] = torch.empty(vocab_size).expand(1, num_nodes, vocab_size)  # recorded only
        yield f"N={num_nodes} V={vocab_size}", values
    yield "int32", make(2, 4, 3, 8, dtype=torch.int32)
    yield "any order", make(2, 4, 3, 8) | {"any_order": True}
    yield "S=0", star([1, 2, 3], [0.25] * 4, 0.0, 0.0, spec_steps=0)
    yield "S=0 N=1", make(2, 1, 1, 1) | {"spec_steps": 0}


size_sweep = sweep(lambda batch_size: make(batch_size, 4, 3, 8))


def wrong_calls():
    yield make(2, 4, 3, 8) | {"threshold_acc": 1.5}, "threshold_acc must lie in 0..1, got 1.5"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, device):
    output, _ = check_operation(PATH, make(*shape, device=device), case=str(shape))
    assert shape[3] == 1 or output.accept_token_num.sum() > 0, "the case accepts nothing, so it proves little"


@pytest.mark.parametrize("coin", [0.0, LAST_COIN])
def test_first_and_last_coin(coin, device):
    values = make(4, 4, 3, 8, device=device)
    for name in ("uniform_samples", "uniform_samples_for_final_sampling"):
        values[name].fill_(coin)
    output, _ = check_operation(PATH, values, case=str(coin))
    emitted = output.predicts >= 0
    assert (values["target_probs"].view(32, 61)[emitted].gather(1, output.predicts[emitted][:, None].long()) > 0).all()


def test_comparisons_are_strict(device):
    """A coin of 0 accepts no child of probability 0, and a coin on the edge belongs to what lies above it."""
    probs = [0.25, 0.25, 0.0, 0.5]
    assert outcome(star([2, 1], probs, 0.0, 0.0, device=device)) == ([2], [1, 0])
    assert outcome(star([2], probs, 0.0, 0.0, device=device)) == ([], [0])
    assert outcome(star([1, 3], probs, 0.25, 0.0, device=device)) == ([2], [3, 0])
    assert outcome(star([1], probs, 0.25, 0.25, device=device)) == ([], [0])
    # of what is left, 0.25 and 0.5, a third of the mass is token 0
    assert outcome(star([1], probs, 0.25, 0.34375, device=device)) == ([], [3])
    assert outcome(star([2], probs, 0.5, 0.25, device=device)) == ([], [1])
    assert outcome(star([2], probs, 0.5, 0.5, device=device)) == ([], [3])
    assert outcome(star([2], [0.5, 0.5, 0.0, 0.0], 0.5, LAST_COIN, device=device)) == ([], [1])


def test_one_hot_and_disjoint_supports(device):
    one_hot = [0.0, 0.0, 1.0, 0.0, 0.0]
    for coin in (0.0, LAST_COIN):
        assert outcome(star([1, 2, 3], one_hot, coin, coin, device=device)) == ([2], [2, 2])
        assert outcome(star([1, 3], one_hot, coin, coin, device=device)) == ([], [2])
    halves = [0.0, 0.5, 0.0, 0.5, 0.0]
    for final_coin, token in ((0.0, 1), (0.5, 3), (LAST_COIN, 3)):
        assert outcome(star([0, 2, 4], halves, 0.0, final_coin, device=device)) == ([], [token])


def test_no_mass_is_left(device):
    """All mass on a rejected child, which takes a row that sums to less than 1, or no mass at all: V - 1."""
    for final_coin in (0.0, LAST_COIN):
        assert outcome(star([1, 2], [0.0, 0.5, 0.25, 0.0, 0.0], 0.75, final_coin, device=device)) == ([], [4])
        assert outcome(star([1, 2], [0.0] * 5, 0.0, final_coin, device=device)) == ([], [4])
        # a trace beside them is all that is left
        trace = [2.0**-20, 0.5, 0.25, 0.0, 0.0]
        assert outcome(star([1, 2], trace, 0.75, final_coin, device=device)) == ([], [0])


def test_nothing_is_removed_where_no_child_was_tried(device):
    """At S drafts the children below are not looked at, and the bonus may be one of them."""
    probs = [0.0, 0.5, 0.5, 0.0]
    for spec_steps, expected in ((2, ([1, 2], [1, 1, 1])), (1, ([1], [1, 1])), (0, ([], [1]))):
        coins = [0.0, 0.0, LAST_COIN]
        values = explicit([0, 1, 1], [-1, 0, 1], probs, coins, 0.0, spec_steps=spec_steps, device=device)
        assert outcome(values, case=str(spec_steps)) == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1.0, -0.5])
def test_coins_out_of_range_stay_in_range(bad, device):
    """Nothing is promised but a token of the row."""
    values = make(3, 4, 3, 8, device=device)
    for name in ("uniform_samples", "uniform_samples_for_final_sampling"):
        values[name][1] = bad
    output, _ = check_operation(PATH, values, case=str(bad))
    last = output.accept_index[1][output.accept_token_num[1]]
    assert values["target_probs"].view(24, 61)[last, output.predicts[last].long()] > 0


def assert_agrees_near_edges(values, note):
    """Walks agree on any probabilities; the bonus may be another one where coin * mass is within 8 ulp of an edge."""
    actual = run(**values)
    expected = reference.verify_tree_coins(**values)
    for name in ("accept_index", "accept_token_num"):
        assert_equal(PATH, "continuous", name, getattr(actual, name), getattr(expected, name))
    batch_size, num_nodes, _ = values["target_probs"].shape
    differs = (actual.predicts != expected.predicts).nonzero().flatten().tolist()
    for place in differs:
        request, node = divmod(place, num_nodes)
        count = int(expected.accept_token_num[request])
        assert place == expected.accept_index[request, count], "a draft that was accepted has another token"
        tokens = values["candidates"][request].tolist()
        first, sibling = (values[name][request].tolist() for name in LINKS[2:])
        below = reference.children_in(first, sibling, node) if count < values["spec_steps"] else ()
        probs = values["target_probs"][request, node].double().cpu()
        reached = reference.residual(probs, {tokens[child] for child in below}).cumsum(0)
        level = values["uniform_samples_for_final_sampling"][request].item() * reached[-1]
        ulp = reached[-1] * 2.0**-24
        for token in (int(actual.predicts[place]), int(expected.predicts[place])):
            before = reached[token - 1] if token else 0.0
            assert before - 8 * ulp <= level <= reached[token] + 8 * ulp and reached[token] > before
    note(f"{len(differs)} of {batch_size} bonus tokens lie on another side of an edge within 8 ulp")
    return len(differs) / batch_size


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.3, 0.7)], ids=str)
def test_continuous_probabilities(thresholds, note, device):
    values = make(12, 4, 3, 8, vocab_size=300, device=device)
    values["target_probs"] = torch.softmax(follow_tree(values, 300).view(12, 8, 300) * 1.1, dim=-1)
    values["uniform_samples"] = torch.rand(12, 8, device=device)
    values["uniform_samples_for_final_sampling"] = torch.rand(12, device=device)
    values |= dict(zip(("threshold_single", "threshold_acc"), thresholds))
    assert assert_agrees_near_edges(values, note) < 0.1


@pytest.mark.parametrize(
    "thresholds", [(1.0, 0.5), (0.25, 1.0), (0.0, 0.0), (1.0, 0.0), (0.125, 1 / 3), (1, 1)], ids=str
)
def test_thresholds(thresholds, device):
    values = make(3, 4, 3, 8, device=device) | dict(zip(("threshold_single", "threshold_acc"), thresholds))
    lossless = run(**make(3, 4, 3, 8, device=device))
    output, _ = check_operation(PATH, values, case=str(thresholds))
    assert thresholds == (1, 1) or output.accept_token_num.sum() >= lossless.accept_token_num.sum()


def test_thresholds_of_the_documented_example(device):
    """A root of probabilities .30 .45 .01 0 .24 with the children 3 and 1, as SGLang's kernel takes it."""
    probs = torch.tensor([0.30, 0.45, 0.01, 0.0, 0.24], dtype=torch.float64)

    def law(tokens=(3, 1), **thresholds):
        first, sibling = links_of([-1, 0, 0])

        def emitted(source):
            coins = [source.uniform() for _ in first]
            path, bonus = reference.verify_request(
                [0, *tokens], first, sibling, probs_at=lambda node: probs, coin_at=coins.__getitem__,
                final_coin=source.uniform(), spec_steps=1, **thresholds,
            )  # fmt: skip
            return [bonus, *tokens][path[-1]]

        found = enumerate_outcomes(emitted)
        return [found.get(token, 0.0) for token in range(5)]

    assert law() == pytest.approx(probs.tolist(), abs=1e-15)
    left = [0.1 * prob / 0.55 for prob in (0.30, 0.0, 0.01, 0.0, 0.24)]
    assert law(threshold_acc=0.5) == pytest.approx([left[0], 0.9, *left[2:]], abs=1e-15)
    # one threshold is for a child alone, the other one for all that have been tried
    assert law((0, 1), threshold_single=0.5) == pytest.approx(probs.tolist(), abs=1e-15)
    assert law((0, 1), threshold_single=0.4) == pytest.approx([0.3, 0.7, 0.0, 0.0, 0.0], abs=1e-15)
    assert law((0, 1), threshold_acc=0.75) == pytest.approx([0.4, 0.6, 0.0, 0.0, 0.0], abs=1e-15)
    for thresholds in ({"threshold_single": 0.4}, {"threshold_acc": 0.0}, {"threshold_acc": 0.45}):
        assert law(**thresholds) == [0.0, 1.0, 0.0, 0.0, 0.0]
    for coin, threshold_single, accepted in ((0.5, 0.4, [2]), (0.5, 0.5, []), (0.4375, 0.5, [2]), (0.0, 0.0, [2])):
        values = star([3, 1], probs, coin, 0.5, device=device) | {"threshold_single": threshold_single}
        assert outcome(values)[0] == accepted


# the law, by enumeration of the reference

TREES = {  # tokens, parents
    "root": ([0], [-1]),
    "chain": ([0, 2, 1, 2], [-1, 0, 1, 2]),
    "star": ([0, 3, 1, 0], [-1, 0, 0, 0]),
    "binary": ([0, 1, 2, 0, 2, 1, 3], [-1, 0, 0, 1, 1, 2, 2]),
    "ragged": ([0, 2, 0, 1, 3, 1, 0, 2, 3], [-1, 0, 0, 0, 1, 3, 3, 5, 5]),
    "deep": ([0, 1, 0, 2, 1, 0, 2, 1, 3, 2], [-1, 0, 0, 1, 1, 1, 4, 4, 4, 2]),
    "duplicates": ([0, 1, 1, 2, 0, 1, 3, 3], [-1, 0, 0, 0, 1, 2, 2, 3]),
    "out of vocabulary": ([0, -1, 7, 2, 1], [-1, 0, 0, 0, 3]),
}


def emitted_law(tree, target, *, spec_steps, coins="independent", **thresholds):
    """The law of what the reference emits on this tree."""
    tokens, parents = TREES[tree]
    first, sibling = links_of(parents)
    prefix = prefixes_of(tokens, parents)

    def emitted(source):
        shared = source.uniform()
        coin_of = [source.uniform() if coins == "independent" else shared for _ in tokens]
        path, bonus = reference.verify_request(
            tokens, first, sibling, probs_at=lambda node: target[prefix[node]], coin_at=coin_of.__getitem__,
            final_coin=shared if coins == "all reused" else source.uniform(), spec_steps=spec_steps, **thresholds,
        )  # fmt: skip
        return (*prefix[path[-1]], bonus)

    return enumerate_outcomes(emitted)


def distance(tree, vocab_size, *, spec_steps=3, zeros=0, **options):
    target = random_law(vocab_size, spec_steps, zeros=zeros)
    return distance_to(target, emitted_law(tree, target, spec_steps=spec_steps, **options), spec_steps + 1)


@pytest.mark.parametrize("tree", TREES)
def test_the_law_is_the_target_s(tree):
    for vocab_size, spec_steps, zeros in ((4, 3, 0), (4, 3, 1), (5, 3, 2), (4, 1, 1), (4, 0, 0)):
        assert distance(tree, vocab_size, spec_steps=spec_steps, zeros=zeros) < 1e-12


WRONG = {
    "threshold_acc": {"threshold_acc": 0.9},
    "threshold_single": {"threshold_single": 0.25},
    "a coin for all levels": {"coins": "levels reused"},
    "the coin of the walk draws the bonus": {"coins": "all reused"},
}


class Forgetful(set):
    """What the reference's set of rejected tokens would be if it did not know what it holds."""

    def __contains__(self, token):
        return False


@pytest.mark.parametrize("wrong", [*WRONG, "residual not subtracted", "duplicates counted twice"])
def test_wrong_schemes_are_seen(wrong, monkeypatch):
    """What enumeration is worth: each of these leaves the target's law by far on some tree."""
    if wrong == "residual not subtracted":
        monkeypatch.setattr(reference, "residual", lambda probs, rejected: probs)
    if wrong == "duplicates counted twice":
        monkeypatch.setattr(reference, "set", Forgetful, raising=False)
    worst = max(distance(tree, 4, **WRONG.get(wrong, {})) for tree in ("binary", "deep", "duplicates"))
    assert worst > 0.05


@pytest.mark.gpu
def test_large_vocabulary(note, device):
    values = make(64, 8, 5, 64, vocab_size=32000, device=device)
    values["target_probs"] = torch.softmax(follow_tree(values, 32000).view(64, 64, 32000) + 0.1, dim=-1)
    values["uniform_samples"] = torch.rand(64, 64, device=device) * 0.01
    values["uniform_samples_for_final_sampling"] = torch.rand(64, device=device)
    assert_agrees_near_edges(values, note)


@pytest.mark.gpu
def test_the_same_bits_every_time(device):
    values = make(32, 8, 5, 64, vocab_size=50257, device=device)
    values["target_probs"] = torch.softmax(torch.randn(32, 64, 50257, device=device), dim=-1)
    first = run(**values)
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(run(**values), first))


@pytest.mark.gpu
def test_probabilities_past_2_31_elements(device):
    """The last request of a batch whose rows do not fit 31 bits is as it is alone."""
    values = make(264, 8, 5, 64, vocab_size=97, device=device)
    probs = torch.zeros(264, 64, 128256, device=device)
    assert probs.numel() > 2**31
    probs[..., -97:] = values["target_probs"]
    values["candidates"] += 128256 - 97
    whole = run(**values | {"target_probs": probs})
    alone = {key: value[-1:] if isinstance(value, torch.Tensor) else value for key, value in values.items()}
    alone["retrieve_index"] = alone["retrieve_index"] - 263 * 64
    last = run(**alone | {"target_probs": probs[-1:]})
    assert torch.equal(whole.predicts[-64:], last.predicts) and last.accept_token_num[0] == whole.accept_token_num[-1]
