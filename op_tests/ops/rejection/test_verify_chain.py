"""verify_chain: equal to its reference, whose emitted text has exactly the target's law, for both methods."""

import pytest
import torch

from eagle_kernels.reference.ops.rejection import verify_chain as reference
from eagle_kernels.reference.residual import Draws
from op_tests.harness import check_operation, sweep, to_device
from op_tests.ops.rejection.laws import coins_by, distance_to, draft_map, dyadic_probs, near, random_law
from op_tests.ops.rejection.laws import emitted_by_a_chain as emitted_law

PATH = "rejection.verify_chain"
METHODS = ("standard", "block")
pytestmark = pytest.mark.usefixtures("small_tiles")


def make(batch_size=3, num_tokens=4, vocab_size=61, draft_vocab_size=None, *, method="standard", dtype=torch.float32,
         target="logits", draft="logits", device="cpu", spread=2):  # fmt: skip
    """Chains whose drafts are drawn from a draft that is near the target."""
    num_drafts = num_tokens - 1
    logits = spread * torch.randn(batch_size, num_tokens, vocab_size)
    d2t = None if draft_vocab_size is None else draft_map(vocab_size, draft_vocab_size)
    known = torch.arange(vocab_size) if d2t is None else torch.arange(draft_vocab_size) + d2t
    draft_logits = (logits[:, :num_drafts, known] + torch.randn(batch_size, num_drafts, len(known))).flatten(0, 1)
    logits, draft_logits = logits.flatten(0, 1).to(dtype), draft_logits.to(dtype)
    temperature = torch.tensor([1.0, 0.7, 1.3, 0.0]).repeat(batch_size)[:batch_size].contiguous()
    draft_temperature = temperature * 0.9
    sampled_from = reference.probs_of_logits(draft_logits, draft_temperature.repeat_interleave(num_drafts))
    drafts = known[torch.multinomial(sampled_from, 1)[:, 0]] if num_drafts and batch_size else torch.empty(0).long()
    target_probs = reference.probs_of_logits(logits, temperature.repeat_interleave(num_tokens))
    values = {
        "candidates": torch.cat([torch.randint(vocab_size, (batch_size, 1)), drafts.view(batch_size, num_drafts)], 1),
        "target_logits": logits if target == "logits" else None,
        "draft_logits": draft_logits if draft == "logits" else None,
        "positions": (torch.randint(0, 50, (batch_size, 1)) + torch.arange(num_tokens)).flatten(),
        "seeds": torch.randint(-(2**62), 2**62, (batch_size,)),
        "temperature": temperature,
        "draft_temperature": draft_temperature,
        "target_probs": None if target == "logits" else target_probs,
        "draft_probs": None if draft == "logits" else sampled_from,
        "d2t": d2t,
    }
    return to_device(values, device) | {"method": method}


def make_probs(cases, method):
    """One request for each (tokens, target rows, draft rows) over four tokens; shorter chains end with -1."""
    num_tokens = max(len(tokens) for tokens, *_ in cases)
    rest = [[0.25] * 4] * num_tokens
    return {
        "candidates": torch.tensor([(tokens + [-1] * num_tokens)[:num_tokens] for tokens, *_ in cases]),
        "target_logits": None,
        "draft_logits": None,
        "positions": torch.arange(7, 7 + num_tokens).repeat(len(cases)),
        "seeds": torch.arange(len(cases)),
        "temperature": None,
        "target_probs": torch.tensor([(target + rest)[:num_tokens] for _, target, _ in cases]).flatten(0, 1),
        "draft_probs": torch.tensor([(draft + rest)[: num_tokens - 1] for *_, draft in cases]).flatten(0, 1),
        "method": method,
    }


def ahead_of_time_cases():
    for dtype, method in ((torch.float32, "standard"), (torch.float16, "block"), (torch.bfloat16, "block")):
        yield f"{dtype} {method}", make(2, 6, 300, method=method, dtype=dtype)
    yield "reduced", make(2, 6, 300, 100, method="block", dtype=torch.bfloat16)
    yield "probs", make(2, 6, 300, 100, method="block", target="probs", draft="probs")
    yield "target probs", make(2, 6, 300, target="probs", dtype=torch.bfloat16)
    yield "no drafts", make(2, 1, 300)
    yield "no drafts, V=2", make(2, 1, 2)


size_sweep = sweep(lambda batch_size: make(batch_size, 4, 61, 40, method="block"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("target", "draft", "draft_vocab_size", "num_tokens"),
    [("logits", "logits", None, 4), ("logits", "probs", 40, 3), ("probs", "logits", 61, 2), ("probs", "probs", 40, 5),
     ("logits", "logits", 40, 1)],
)  # fmt: skip
def test_matches_reference(target, draft, draft_vocab_size, num_tokens, method, device):
    options = {"draft_vocab_size": draft_vocab_size, "target": target, "draft": draft, "method": method}
    values = make(max(2, 8 // num_tokens), num_tokens, **options, device=device)
    output, _ = check_operation(PATH, values, case=method)
    assert num_tokens == 1 or output.accept_token_num.sum() > 0, "the case accepts nothing, so it proves little"


@pytest.mark.cross
@pytest.mark.parametrize("method", METHODS)
def test_exact_arithmetic_gives_the_reference(method, device):
    """Probabilities on a dyadic grid: sums are exact, whatever their order."""
    batch_size, num_tokens, vocab_size = 24, 4, 12
    target_probs = dyadic_probs(batch_size * num_tokens, vocab_size)
    draft_probs = dyadic_probs(batch_size * (num_tokens - 1), vocab_size)
    draft_probs[::2] = target_probs.view(batch_size, num_tokens, -1)[:, :-1].flatten(0, 1)[::2]
    drafts = torch.multinomial(draft_probs, 1).view(batch_size, num_tokens - 1)
    values = make(batch_size, num_tokens, vocab_size, target="probs", draft="probs", method=method)
    values |= {"candidates": torch.cat([torch.zeros(batch_size, 1, dtype=torch.int64), drafts], dim=1)}
    values |= {"target_probs": target_probs, "draft_probs": draft_probs}
    output, _ = check_operation(PATH, to_device(values, device), case=method)
    assert output.accept_token_num.unique().numel() == num_tokens


ONE_HOT = [0.0, 0.0, 1.0, 0.0]
HALVES = [0.5, 0.5, 0.0, 0.0]
OTHER_HALVES = [0.0, 0.0, 0.5, 0.5]
NAN = float("nan")


# tokens, target rows, draft rows -> accepted, what the token after may be
SPECIAL = [
    ([9, 2], [ONE_HOT, HALVES], [[0.25] * 4], 1, {0, 1}),  # one-hot on the draft
    ([9, 1], [ONE_HOT, HALVES], [[0.25] * 4], 0, {2}),  # one-hot off the draft
    ([9, 0, 3], [OTHER_HALVES, HALVES, HALVES], [HALVES, [0.25] * 4], 0, {2, 3}),  # disjoint
    ([9, 0, 3], [HALVES, OTHER_HALVES, ONE_HOT], [HALVES, OTHER_HALVES], 2, {2}),  # p = q: all, 0 / 0 and all
    ([9, 0], [[0.0, 1.0, 0.0, 0.0], ONE_HOT], [HALVES], 0, {1}),  # p(child) = 0
    ([9, 0], [[0.0, 0.5, 0.5, 0.0], ONE_HOT], [[1.0] * 4], 0, {1, 2}),  # no residual: p
    ([9, 2], [HALVES, ONE_HOT], [[0.5, 0.0, 0.0, 0.5]], 0, {0, 1}),  # q(child) = 0: nothing was drawn
    ([9, 2], [ONE_HOT, HALVES], [[0.5, 0.0, 0.0, 0.5]], 0, {2}),  # and p is 1 there
    ([9, 2], [HALVES, ONE_HOT], [[0.5, 0.0, NAN, 0.5]], 0, {0, 1}),
    ([9, 2], [HALVES, ONE_HOT], [[0.5, 0.0, 1.5, 0.5]], 0, {0, 1}),
    ([9, 2], [ONE_HOT, HALVES], [[0.0, 0.0, 1.0005, 0.0]], 1, {0, 1}),  # 1 but for rounding
    ([9, -1, 1], [ONE_HOT, HALVES, HALVES], [HALVES, HALVES], 0, {2}),  # ends early
    ([9, 2, -1], [ONE_HOT, HALVES, ONE_HOT], [ONE_HOT, HALVES], 1, {0, 1}),
    ([9, 2**30], [HALVES, ONE_HOT], [HALVES], 0, {0, 1}),  # outside both vocabularies
    ([9, 2**40], [HALVES, ONE_HOT], [HALVES], 0, {0, 1}),
    ([9, 0], [[NAN, 0.0, 1.0, 0.0], ONE_HOT], [HALVES], 0, {2}),
    ([9, 0], [[0.0] * 4, ONE_HOT], [HALVES], 0, {0}),  # a row without mass
    ([-1, 2], [ONE_HOT, HALVES], [ONE_HOT], 0, {-1}),  # a dead row
]


@pytest.mark.cross
@pytest.mark.parametrize("method", METHODS)
def test_special_probabilities(method, device):
    values = to_device(make_probs([case[:3] for case in SPECIAL], method), device)
    output, _ = check_operation(PATH, values, case=method)
    predicts = output.predicts.view(len(SPECIAL), -1).tolist()
    for row, (tokens, _, _, accepted, bonus) in enumerate(SPECIAL):
        assert int(output.accept_token_num[row]) == accepted, f"row {row}: {tokens}"
        assert predicts[row][accepted] in bonus, f"row {row}: {tokens}"
        emitted = accepted + 1 if tokens[0] >= 0 else 0
        assert predicts[row][emitted:] == [-1] * (3 - emitted)
        assert (output.accept_index[row] >= 0).sum() == emitted


# what seeds give the draft at position 8
COINS = {25553040: 0.0, 20128588: 1 - 2.0**-24}


@pytest.mark.parametrize("method", METHODS)
def test_coins_at_the_ends(method, device):
    """The least coin accepts nothing that has probability 0, the largest refuses nothing that is certain."""
    cases = [([9, 0], [ONE_HOT, HALVES], [HALVES]), ([9, 0], [HALVES, ONE_HOT], [HALVES])]
    for seed, coin in COINS.items():
        assert Draws(seed).uniform(8) == coin
        values = make_probs(cases, method)
        values["seeds"].fill_(seed)
        output, _ = check_operation(PATH, to_device(values, device), case=f"{coin} {method}")
        assert output.accept_token_num.tolist() == [0, 1]


# the law


def deviation(method, target, draft, num_drafts, *, num_rounds=1, **options):
    emitted, _ = emitted_law(method, target, draft, num_drafts, num_rounds=num_rounds, **options)
    return distance_to(target, emitted, num_rounds * (num_drafts + 1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("vocab_size", "num_drafts"), [(2, 1), (3, 2), (4, 2), (3, 3)])
def test_the_law_is_exactly_the_targets(vocab_size, num_drafts, method):
    target = random_law(vocab_size, num_drafts)
    zeros = random_law(vocab_size, num_drafts, zeros=1)
    for law, draft in ((target, near(target, 0.5)), (target, zeros), (zeros, target), (target, target)):
        assert deviation(method, law, draft, num_drafts) < 1e-12


def deviation_of_two_rounds(method, **options):
    """Most drafts are rejected, so that the second round drafts where the first had drafted already."""
    return deviation(method, random_law(2, 8), random_law(2, 8), 3, num_rounds=2, **options)


@pytest.mark.parametrize("method", METHODS)
def test_the_law_of_two_rounds_is_exactly_the_targets(method):
    """And no coin is looked at twice: block verification knows coins of positions that the next round drafts again."""
    assert deviation_of_two_rounds(method) < 1e-12


@pytest.mark.slow
def test_coins_that_the_next_round_finds_again_are_seen():
    """By block verification, which looks past the draft that it ends with; the standard method does not."""
    by_position = coins_by(lambda position, draw: position)
    assert max(deviation_of_two_rounds("block", draws=by_position) for _ in range(2)) > 0.005
    assert deviation_of_two_rounds("standard", draws=by_position) < 1e-12


def test_block_accepts_no_less_than_standard():
    gains = []
    for _ in range(6):
        target = random_law(3, 3)
        draft = near(target, 0.6)
        standard, block = (emitted_law(method, target, draft, 3)[1] for method in METHODS)
        gains.append(block - standard)
    assert min(gains) > -1e-12 and max(gains) > 0.01


def test_standard_accepts_the_overlap():
    target = random_law(4, 1)
    draft = near(target, 0.5)
    overlap = float(torch.minimum(target[()], draft[()]).sum())
    for method in METHODS:
        assert abs(emitted_law(method, target, draft, 1)[1] - overlap) < 1e-12


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("wrong", ["residual not subtracted", "drafts by argmax", "draft temperature ignored"])
def test_wrong_schemes_are_seen(wrong, method, monkeypatch):
    """p / q is for drafts that were sampled, and from what is claimed."""
    options, draft = {}, None
    if wrong == "residual not subtracted":
        monkeypatch.setattr(reference, "subtract", lambda target, draft, share: (target, target.sum()))
    elif wrong == "drafts by argmax":
        options["propose"] = lambda probs, source: int(probs.argmax())
    else:
        draft = random_law(3, 2)
        options["claimed"] = {text: probs**0.4 / (probs**0.4).sum() for text, probs in draft.items()}
    targets = [random_law(3, 2) for _ in range(4)]
    assert max(deviation(method, target, draft or near(target, 0.3), 2, **options) for target in targets) > 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_large_vocabulary(method, device):
    # wide logits: a few tokens hold most of the probability, also of 32,000
    values = make(8, 6, 32000, 8000, method=method, dtype=torch.bfloat16, device=device, spread=8)
    output, _ = check_operation(PATH, values, case=method)
    assert output.accept_token_num.sum() > 0
