"""verify_chain: equal to its reference, whose emitted text has exactly the target's law, for both methods."""

from __future__ import annotations

import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.rejection.shared import prepare_pair
from eagle_kernels.reference.enumeration import EnumeratedDraws, completed, text_law, total_variation
from eagle_kernels.reference.ops.rejection import verify_chain as reference
from eagle_kernels.reference.residual import Draws
from op_tests.harness import check_operation, sweep, to_device
from op_tests.harness.statistics import assert_follows_law
from op_tests.ops.rejection.laws import draft_map, dyadic_probs, near, random_law
from op_tests.ops.rejection.laws import emitted_by_a_chain as emitted_law

PATH = "rejection.verify_chain"
METHODS = ("standard", "block")


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch, device):
    """The interpreter takes its time by the lane; a launch of few small tiles is soon done."""
    if device.type == "cpu":
        monkeypatch.setitem(prepare_pair.SLICE_TUNING, "default", {"BLOCK_VOCAB": 64, "num_warps": 4})
        monkeypatch.setitem(prepare_pair.MAP_TUNING, "default", {"BLOCK_TARGET": 32, "BLOCK_DRAFT": 32, "num_warps": 4})


def make(
    batch_size=3,
    num_tokens=4,
    vocab_size=61,
    draft_vocab_size=None,
    *,
    method="standard",
    dtype=torch.float32,
    target="logits",
    draft="logits",
    device="cpu",
    spread=2,
):
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
    [
        ("logits", "logits", None, 4),
        ("logits", "probs", 40, 3),
        ("probs", "logits", 61, 2),
        ("probs", "probs", 40, 5),
        ("logits", "logits", 40, 1),
    ],
)
def test_matches_reference(target, draft, draft_vocab_size, num_tokens, method, device):
    values = make(
        max(2, 8 // num_tokens),
        num_tokens,
        draft_vocab_size=draft_vocab_size,
        target=target,
        draft=draft,
        method=method,
        device=device,
    )
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


# --- the law ---


def deviation(method, target, draft, num_drafts, *, num_rounds=1, **options):
    emitted, _ = emitted_law(method, target, draft, num_drafts, num_rounds=num_rounds, **options)
    length = num_rounds * (num_drafts + 1)
    return total_variation(completed(emitted, target, length), text_law(target, length))


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


class CoinsByPosition(EnumeratedDraws):
    """One coin for a position, whichever round looks at it: what keys without the place in the chain come to."""

    def __init__(self, source):
        super().__init__(source)
        self._coins = {}

    def uniform(self, position, draw=0):
        if position not in self._coins:
            self._coins[position] = super().uniform(position)
        return self._coins[position]


@pytest.mark.slow
def test_coins_that_the_next_round_finds_again_are_seen():
    """By block verification, which looks behind the draft that it ends with; the standard method does not."""
    assert max(deviation_of_two_rounds("block", draws=CoinsByPosition) for _ in range(2)) > 0.005
    assert deviation_of_two_rounds("standard", draws=CoinsByPosition) < 1e-12


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


def worst(method, **options):
    """The largest deviation over a few targets."""
    return max(
        deviation(method, target, options.get("draft") or near(target, 0.3), 2, **options.get("wrong", {}))
        for target in (random_law(3, 2) for _ in range(4))
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_residual_that_is_not_subtracted_is_seen(method, monkeypatch):
    monkeypatch.setattr(reference, "subtract", lambda target, draft, share: (target, target.sum()))
    assert worst(method) > 0.05


@pytest.mark.parametrize("method", METHODS)
def test_argmax_drafts_are_seen(method):
    """p / q is for drafts that were sampled."""
    assert worst(method, wrong={"propose": lambda probs, source: int(probs.argmax())}) > 0.05


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_temperature_that_is_ignored_is_seen(method):
    draft = random_law(3, 2)
    claimed = {text: probs**0.4 / (probs**0.4).sum() for text, probs in draft.items()}
    assert worst(method, draft=draft, wrong={"claimed": claimed}) > 0.05


@pytest.mark.cross
@pytest.mark.parametrize("lanes", [2000, pytest.param(2**20, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("method", METHODS)
def test_joint_law_of_the_emitted_tokens(method, lanes, device):
    """Chi-square over three tokens: two drafts from a draft that remembers one token, completed by the target.

    The kernel's with a GPU, else the reference's, whose tokens the kernel has: the interpreter takes its time.
    """
    vocab_size, num_tokens = 4, 3
    table = torch.softmax(1.5 * torch.randn(vocab_size, vocab_size), dim=-1)
    draft_table = 0.5 * table + 0.5 * torch.softmax(1.5 * torch.randn(vocab_size, vocab_size), dim=-1)
    text = torch.zeros(lanes, num_tokens, dtype=torch.int64)
    for index in range(1, num_tokens):
        text[:, index] = torch.multinomial(draft_table[text[:, index - 1]], 1)[:, 0]
    output = eagle_kernels.verify_chain(
        text.to(device),
        table[text].flatten(0, 1).log().to(device),
        draft_table[text[:, :-1]].flatten(0, 1).log().to(device),
        torch.arange(5, 5 + num_tokens, device=device).repeat(lanes),
        torch.arange(lanes, device=device),
        torch.ones(lanes, device=device),
        method=method,
    )
    predicts, count = output.predicts.view(lanes, num_tokens).cpu().long(), output.accept_token_num.cpu()
    emitted, last = [], torch.zeros(lanes, dtype=torch.int64)
    for index in range(num_tokens):
        plain = torch.multinomial(table[last], 1)[:, 0]
        last = torch.where(index <= count, predicts[:, index], plain)
        emitted.append(last)
    step = table.double()
    law = torch.tensor(
        [step[0, a] * step[a, b] * step[b, c] for a, b, c in itertools.product(range(vocab_size), repeat=3)]
    )
    assert_follows_law((emitted[0] * vocab_size + emitted[1]) * vocab_size + emitted[2], law / law.sum())


# --- the house rules ---


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_large_vocabulary(method, device):
    # wide logits: a few tokens hold most of the probability, also of 32,000
    values = make(8, 6, 32000, 8000, method=method, dtype=torch.bfloat16, device=device, spread=8)
    output, _ = check_operation(PATH, values, case=method)
    assert output.accept_token_num.sum() > 0
