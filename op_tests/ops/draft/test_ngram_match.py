"""ngram_match against its reference: rows of every length, however they are cut; ties, trees, budgets, odd tokens."""

import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.draft import ngram_match as op
from op_tests.harness import assert_in_bounds, check_operation, retune, to_device

PATH = "draft.ngram_match"
PREFER = ("latest", "earliest")


def make(batch_size, width, *, vocabulary=3, dtype=torch.int32, given=None, device="cpu", **options):
    values = {
        "token_ids": torch.randint(vocabulary, (batch_size, width), dtype=dtype),
        "seq_lens": torch.randint(width // 2, width + 1, (batch_size,)),
    }
    if given is not None:
        drafts = torch.randint(vocabulary, (batch_size, given), dtype=dtype)
        ends = torch.randint(given + 1, (batch_size, 1))
        values["draft_tokens"] = torch.where(torch.arange(given) == ends, -1, drafts)
    defaults = {"num_speculative_tokens": 12, "spec_steps": 5, "max_ngram_size": 4, "max_matches": 4}
    return to_device(values, device) | defaults | options


def draft(history, given=None, **options):
    """(tokens, parents) of one row without their padding, and the length of its match."""
    history = torch.as_tensor(history)[None]
    given = None if given is None else torch.as_tensor(given, device=history.device)[None]
    options = {"num_speculative_tokens": 8, "max_ngram_size": 4} | options
    lengths = torch.tensor([history.shape[1]], device=history.device)
    result, _ = check_operation(PATH, {"token_ids": history, "seq_lens": lengths, "draft_tokens": given} | options)
    count = int(result.num_drafts)
    return result.tokens[0, :count].tolist(), result.parents[0, :count].tolist(), int(result.match_len)


def ahead_of_time_cases():
    for dtype, prefer in zip((torch.int32, torch.int64), PREFER):
        yield f"chain {dtype}", make(2, 64, dtype=dtype, prefer=prefer, max_matches=1)
    yield "tree", make(2, 64, given=6, max_matches=16, num_speculative_tokens=63)
    yield "budget", make(2, 63, max_matches=5, token_budget=20) | {"max_drafts": torch.tensor([3, 4])}
    yield "largest", make(1, 64, given=255, max_matches=16, num_speculative_tokens=255, token_budget=300)


def size_sweep():
    for batch_size in (1, 2, 3, 16, 17, 64, 257):
        for width in (1, 2, 16, 17, 1024, 4097, 70000):
            token_ids = torch.empty(batch_size, width, dtype=torch.int32)
            values = make(batch_size, 1, token_budget=batch_size + width)
            yield values | {"token_ids": token_ids, "min_ngram_size": 1 + batch_size % 2, "spec_steps": width}


@pytest.fixture
def cut(monkeypatch):
    """cut(BLOCK_TOKEN=..., programs=...): rows in blocks and parts of other sizes."""
    return lambda **numbers: retune(monkeypatch, op.SCAN_TUNING, **numbers)


@pytest.mark.parametrize("prefer", PREFER)
@pytest.mark.parametrize(("dtype", "given"), [(torch.int32, None), (torch.int64, 3), (torch.int32, 0)])
@pytest.mark.parametrize("width", [5, 64, 203])
def test_matches_reference(width, dtype, given, prefer, device, cut):
    cut(BLOCK_TOKEN=32, programs=12)
    values = make(3, width, dtype=dtype, given=given, prefer=prefer, device=device)
    check_operation(PATH, values, case=f"L={width}")


@pytest.mark.parametrize("max_matches", range(1, 17))
def test_trees_of_every_number_of_matches(max_matches, device, cut):
    cut(BLOCK_TOKEN=64, programs=4)
    values = make(2, 100, max_matches=max_matches, num_speculative_tokens=40, device=device)
    result, _ = check_operation(PATH, values, case=f"J={max_matches}")
    assert (result.num_drafts > 0).all()
    tree = eagle_kernels.raw.tree_from_parents(
        values["seq_lens"], result.tokens, result.parents, values["seq_lens"], num_verify_tokens=41
    )
    # all drafts are linked, and nothing else
    is_draft = torch.arange(1, 41, device=device) <= result.num_drafts[:, None]
    linked = tree.positions.view(2, 41)[:, 1:] > values["seq_lens"][:, None]
    assert torch.equal(linked, is_draft)


def test_drafts_of_a_model_are_history(device):
    """The test vector of FastDeploy's hybrid of MTP and n-gram: the model drafted 7, the text goes on from there."""
    history = torch.tensor([10, 9, 8, 7, 6, 10, 9, 8], device=device)
    assert draft(history, [7], spec_steps=4) == ([6, 10, 9, 8], [0, 1, 2, 3], 4)
    assert draft(history, [7, -1, 6], spec_steps=4) == ([6, 10, 9, 8], [0, 1, 2, 3], 4)
    assert draft(history, [-1, 6, 10], spec_steps=4) == ([7, 6, 10, 9], [0, 1, 2, 3], 3)
    # a match may end among the drafts
    assert draft(history, [3, 4, 3], spec_steps=3) == ([4, 3, 4], [0, 1, 2], 1)


@pytest.mark.parametrize(
    ("prefer", "tokens", "parents"),
    [("latest", [3, 5, 4, 1, 1], [0, 1, 0, 3, 1]), ("earliest", [3, 1, 4, 1, 5], [0, 1, 0, 3, 1])],
)
def test_worked_tree(prefer, tokens, parents, device):
    """Three places where 1 2 stood before; two went on with 3, and part later."""
    history = torch.tensor([1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1, 2], device=device)
    options = {"spec_steps": 2, "max_ngram_size": 2, "max_matches": 3, "prefer": prefer}
    assert draft(history, **options) == (tokens, parents, 2)
    for most in (1, 2, 4):
        assert draft(history, **options | {"num_speculative_tokens": most})[:2] == (tokens[:most], parents[:most])


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_periodic_text_goes_on(period, device):
    """The latest match ends one period before the end: what it copies repeats itself past the end."""
    text = torch.arange(40, device=device) % period
    expected = [(40 + step) % period for step in range(8)]
    for prefer, max_matches in itertools.product(PREFER, (1, 4)):
        tokens, parents, length = draft(text, prefer=prefer, max_matches=max_matches)
        assert (tokens, parents, length) == (expected, list(range(8)), 4)


def test_longer_matches_come_first(device):
    """2 3 stood before at a distance, 3 alone closer: the longer one is taken, whichever is preferred."""
    history = torch.tensor([7, 3, 4, 2, 3, 5, 9, 3, 6, 2, 3], device=device)
    for prefer in PREFER:
        assert draft(history, prefer=prefer, spec_steps=1) == ([5], [0], 2)
    assert draft(history, max_ngram_size=1, spec_steps=1) == ([6], [0], 1)
    assert draft(history, max_ngram_size=1, spec_steps=1, prefer="earliest") == ([4], [0], 1)
    assert draft(history, spec_steps=1, max_matches=3) == ([5, 6, 4], [0, 0, 0], 2)
    assert draft(history, spec_steps=1, max_matches=3, min_ngram_size=2) == ([5], [0], 2)
    assert draft(history, min_ngram_size=3) == ([], [], 0)


@pytest.mark.parametrize("prefer", PREFER)
def test_ties_go_by_position_in_every_part(prefer, device, cut):
    """One token follows the same one at a hundred places; its neighbours tell which place was taken."""
    history = torch.full((200,), 7, device=device)
    history[1::2] = torch.arange(100, 200, device=device)
    history = torch.cat([history, history[:1]])
    chosen = [199, 198, 197, 196] if prefer == "latest" else [100, 101, 102, 103]
    for block, programs in ((16, 5), (64, 2), (256, 1)):
        cut(BLOCK_TOKEN=block, programs=programs)
        assert draft(history, spec_steps=1, max_matches=4, prefer=prefer) == (chosen, [0, 0, 0, 0], 1)


@pytest.mark.slow
@pytest.mark.parametrize("prefer", PREFER)
def test_the_result_does_not_depend_on_the_cut(prefer, device, cut):
    """The same rows in tensors of other widths and alignments, in blocks and parts of every size."""
    values = make(2, 131, given=2, prefer=prefer, max_matches=3, device=device)
    values["seq_lens"] = torch.tensor([130, 70], device=device)
    expected, _ = check_operation(PATH, values)
    shapes = {"as it is": (131, 0), "wider": (211, 0), "aligned": (256, 0), "shifted": (256, 1)}
    for number, (case, (width, start)) in enumerate(shapes.items()):
        token_ids = torch.full((2, width), 1, dtype=torch.int32, device=device)[:, start:]
        token_ids[:, :131] = values["token_ids"]
        for block, programs in ((16, 2), (32, 2 + number), (16, 64))[number % 3 :: 2]:
            cut(BLOCK_TOKEN=block, programs=programs)
            with assert_in_bounds():
                result = eagle_kernels.raw.ngram_match(**values | {"token_ids": token_ids})
            assert all(map(torch.equal, result, expected)), (case, block, programs)


def test_long_rows_in_the_shipped_blocks(device):
    """Rare tokens, so that whole blocks hold no match, and one of full length planted across two parts."""
    values = make(2, 9000, vocabulary=1000, max_ngram_size=16, max_matches=2, device=device)
    values["seq_lens"] = torch.tensor([9000, 8191], device=device)
    for row, length in enumerate((9000, 8191)):
        values["token_ids"][row, 4090:4110] = values["token_ids"][row, length - 20 : length]
    result, _ = check_operation(PATH, values)
    assert result.match_len.tolist() == [16, 16]
    assert torch.equal(result.tokens[0, :5].int(), values["token_ids"][0, 4110:4115])


def test_what_stands_after_the_history_is_of_no_account(device):
    values = make(3, 50, given=4, device=device)
    values["seq_lens"] = torch.tensor([50, 21, 0], device=device)
    values["draft_tokens"][:, 2] = -1
    expected, _ = check_operation(PATH, values)
    last = values["token_ids"][1, 20].clone()
    values["token_ids"][1, 21:] = last
    values["token_ids"][2] = last
    values["draft_tokens"][:, 3] = last
    assert all(map(torch.equal, eagle_kernels.raw.ngram_match(**values), expected))


def test_wide_tokens(device):
    """Tokens past 2^31, and drafts that equal tokens of the text in their low bits alone."""
    values = make(2, 40, dtype=torch.int64, given=3, device=device)
    values["token_ids"] += 2**32
    check_operation(PATH, values)
    values = make(2, 40, device=device)
    for wide in (2**32 + 1, 2**32 - 1, 2**62):
        given = torch.tensor([[0, wide], [wide, 1]], device=device)
        check_operation(PATH, values | {"draft_tokens": given}, case=str(wide))


@pytest.mark.parametrize(("num_speculative_tokens", "spec_steps"), [(1, None), (7, 100), (40, 1), (255, None)])
def test_sizes_of_the_trie(num_speculative_tokens, spec_steps, device):
    sizes = {"num_speculative_tokens": num_speculative_tokens, "spec_steps": spec_steps}
    check_operation(PATH, make(2, 90, max_matches=9, device=device, **sizes))


@pytest.mark.parametrize("budget", [0, 3, 5, 17, 30, 2**40])
def test_budget(budget, device):
    """Rows 1 and 4 are dead, row 3 finds nothing: its share goes to those after it."""
    values = make(6, 40, token_budget=budget, max_matches=3, device=device)
    values["seq_lens"] = torch.tensor([40, 0, 39, 30, -1, 38], device=device)
    values["token_ids"][3, 29] = 50
    unlimited, _ = check_operation(PATH, values | {"token_budget": None})
    result, _ = check_operation(PATH, values)
    room = max(0, budget - 4)
    for row, wanted in enumerate(unlimited.num_drafts.tolist()):
        count = int(result.num_drafts[row])
        assert count == min(wanted, room)
        room -= count
        assert torch.equal(result.tokens[row, :count], unlimited.tokens[row, :count])
        assert (result.tokens[row, count:] == -1).all() and (result.parents[row, count:] == -1).all()
    assert int(result.num_drafts.sum()) + 4 <= max(budget, 4)


A, B, C, NONE = 1, 2, 3, -1
NEARLY = {
    "shorter than the least": ([A] * 1022 + [B, A], {"min_ngram_size": 3}),
    "the same at both ends": (([A] * 1021 + [C, B, A]) * 2 + [A] * 1021 + [A, B, A], {}),
    "followed by nothing": ([A, NONE] * 511 + [B, A], {}),
    "lines of dashes": (([A] * 80 + [B]) * 12 + [A] * 3, {"min_ngram_size": 5, "max_ngram_size": 8}),
}


@pytest.mark.parametrize("prefer", PREFER)
@pytest.mark.parametrize("name", NEARLY)
def test_what_nearly_matches_everywhere_is_not_measured_everywhere(name, prefer, device, monkeypatch):
    """Each time that a match is too short all others that end early at its place are dropped, a whole block at once."""
    history, options = NEARLY[name]
    values = make(1, 0, num_speculative_tokens=5, max_matches=1, max_ngram_size=5, prefer=prefer, device=device)
    values |= {"token_ids": torch.tensor([history], dtype=torch.int32), "seq_lens": torch.tensor([len(history)])}
    values, measured = to_device(values, device) | options, []
    if device.type == "cpu":  # where kernels are Python
        measure = op.match_length
        monkeypatch.setattr(op, "match_length", lambda *args, **names: measured.append(1) or measure(*args, **names))
    check_operation(PATH, values, case=name)
    assert len(measured) <= 8 * -(-len(history) // 1024)
