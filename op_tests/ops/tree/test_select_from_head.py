"""select_from_head against its reference, the product and the selection: ties, special values, odd sizes, neighbours.

Weights and hidden rows are small whole numbers, whose sums are exact in any order, but where a test says otherwise.
"""

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.tree import select_from_head as module
from eagle_kernels.ops.tree.shared import head_tiles
from op_tests.harness import assert_close, assert_equal, check_operation, replay_in_graph
from op_tests.harness.retune import retune

PATH = "tree.select_from_head"
FLOATS = ("scores", "candidate_scores")
# numpy says so in the interpreter where it makes an infinity, as it should
OVERFLOWS = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning"
)

# (batch, topk, level, vocabulary, columns): first and later levels, one beam, as many ids as beams, one id, a tile of
# 128, one more, several, more tiles than lanes; columns of less than a tile, rows that are no multiple of 16 bytes,
# several tiles; 64 rows
SHAPES = [(1, 1, 0, 1, 1), (2, 8, 0, 300, 64), (1, 8, 1, 129, 40), (2, 1, 3, 128, 16), (1, 16, 2, 16, 257),
          (1, 3, 2, 131, 300), (1, 2, 1, 4500, 8), (8, 8, 1, 140, 32), (1, 16, 0, 1000, 70),
          (3, 4, 7, 256, 128)]  # fmt: skip


def make(batch_size, topk, level, vocab_size, num_columns, *, dtype=torch.float16, mapped=False, device="cpu"):
    rows = batch_size * (topk if level else 1)
    values = {
        "hidden": torch.randint(-2, 3, (rows, num_columns)).to(dtype),
        "weight": torch.randint(-2, 3, (vocab_size, num_columns)).to(dtype),
        "scores": None,
        "ancestors": None,
        # a draft vocabulary with holes: target ids ascend with draft ids
        "draft_to_target": torch.randint(0, 3, (vocab_size,)).cumsum(0) if mapped else None,
    }
    if level:
        values["scores"] = -torch.rand(batch_size, topk).sort(dim=1).values
        values["ancestors"] = torch.randint(-(2**63), 2**63 - 1, (batch_size, topk, -(-level * topk // 64)))
    values = {key: value if value is None else value.to(device) for key, value in values.items()}
    return values | {"topk": topk, "level": level}


# tiles of 16, 32 and 64 rows: half of a tile's reading of hidden rows is wasted on rows that do not exist
MOST_VARIANTS = {"_select_from_head_tiles_kernel": 3}
MAY_SPILL = {"K=16"}  # the 256 candidates of a request


def ahead_of_time_cases():
    yield "K=8 first", make(2, 8, 0, 1000, 256, dtype=torch.bfloat16)
    yield "K=8", make(1, 8, 3, 32000, 256, dtype=torch.bfloat16, mapped=True)
    yield "K=4 T=32", make(8, 4, 1, 1000, 256, dtype=torch.bfloat16) | {"prefetch_weight": True}
    yield "K=16", make(4, 16, 1, 300, 256)
    yield "K=1 odd", make(2, 1, 3, 300, 257)


def order_case():
    return make(2, 4, 1, 300, 70)


def size_sweep():
    for batch_size in (1, 2, 3, 5, 16):
        for vocab_size in (16, 33, 1000):
            yield make(batch_size, 4, 2, vocab_size, 64)


def check(values, case):
    return check_operation(PATH, values, case=case, close=FLOATS)[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, device):
    for dtype, mapped in ((torch.float16, False), (torch.bfloat16, True)):
        check(make(*shape, dtype=dtype, mapped=mapped, device=device), f"{shape} {dtype}")


def test_random_weights_give_what_the_two_ops_give(device):
    """In tiles of linear_decode's sums: the bits of all logits, so those of tokens; scores up to rounding."""
    for level, num_columns in ((0, 200), (1, 1100)):
        values = make(2, 4, level, 700, num_columns, device=device)
        for name in ("hidden", "weight"):
            values[name] = torch.randn(values[name].shape, device=device).half()
        result = eagle_kernels.raw.select_from_head(**values)
        logits = eagle_kernels.raw.linear_decode(values.pop("hidden"), values.pop("weight"), deterministic=True)
        expected = eagle_kernels.raw.select_top_k_tokens(logits, **values)
        for name, got, want in zip(result._fields, result, expected):
            compare = assert_close if name in FLOATS else assert_equal
            compare("select_from_head", f"level {level}", name, got, want)


def of_logits(logits, level, topk, device):
    """A head whose logits for one hidden value of 1 are these, of one request."""
    values = make(1, topk, level, logits.shape[1], logits.shape[0], dtype=logits.dtype)
    values["hidden"] = torch.eye(logits.shape[0]).to(logits.dtype)
    values["weight"] = logits.T.contiguous()
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in values.items()}


# of heads of one column, whose weights are the logits
SPECIAL = {
    "all -inf": lambda weight: weight.fill_(-float("inf")),
    "all NaN": lambda weight: weight.fill_(float("nan")),
    "fewer finite than topk": lambda weight: weight[3:].fill_(-float("inf")),
    "NaN among them": lambda weight: weight[::2].fill_(float("nan")),
    "two +inf": lambda weight: weight[129:131].fill_(float("inf")),
    "zeros of both signs": lambda weight: weight.zero_()[1::3].neg_(),
}


@OVERFLOWS
@pytest.mark.parametrize("special", SPECIAL)
def test_special_values(special, device):
    for level, dtype in ((0, torch.float16), (1, torch.bfloat16)):
        values = make(1, 4, level, 300, 1, dtype=dtype, device=device)
        values["hidden"].fill_(1.0)
        SPECIAL[special](values["weight"])
        check(values, special)


@OVERFLOWS
def test_a_sum_past_the_largest_half_is_infinite(device):
    """As in the output of linear_decode, and above the largest finite one."""
    values = make(1, 2, 0, 300, 2, device=device)
    values["hidden"].fill_(1.0)
    values["weight"][200], values["weight"][100] = 60000.0, 32752.0  # 120,000 and 65,504
    assert check(values, "overflow").tokens.tolist() == [[200, 100]]


def test_ties_go_to_the_lowest_ids(device):
    """Within a tile, and between tiles, of which later ones hold as many of the best."""
    logits = torch.zeros(4, 600)
    logits[0, [599, 130, 127, 128, 3]] = 2.0
    logits[1, 128:] = 1.0
    logits[2, [256, 255]] = 3.0
    logits[3, 400:410] = 5.0
    result = check(of_logits(logits.half(), 1, 4, device), "ties")
    expected = [3, 127, 128, 130, 128, 129, 130, 131, 255, 256, 0, 1, 400, 401, 402, 403]
    assert result.candidate_tokens.tolist() == [expected]


def test_logits_are_rounded_before_they_are_compared(device):
    """2049 and 2048 are the same in fp16, so that the lower id wins."""
    values = make(1, 1, 0, 200, 2, device=device)
    values["hidden"].fill_(1.0)
    values["weight"].zero_()
    values["weight"][7, 0], values["weight"][150, 0], values["weight"][150, 1] = 2048.0, 2048.0, 1.0
    assert check(values, "rounded").tokens.tolist() == [[7]]


def test_a_row_knows_no_other(device):
    """Bit by bit, alone and among 64 rows, beside rows of NaN. On a GPU also where sums are not exact."""
    values = make(16, 4, 1, 300, 64, device=device)
    if device.type == "cuda":
        values["hidden"] += torch.randn_like(values["hidden"])
    together = eagle_kernels.raw.select_from_head(**values)
    for request in (0, 9):
        rows = slice(4 * request, 4 * request + 4)
        own = {name: values[name][request : request + 1] for name in ("scores", "ancestors")}
        alone = eagle_kernels.raw.select_from_head(**values | own | {"hidden": values["hidden"][rows]})
        hidden = values["hidden"].clone()
        hidden[:4] = float("nan")
        beside = eagle_kernels.raw.select_from_head(**values | {"hidden": hidden})
        for name in together._fields:
            whole = getattr(together, name)[request : request + 1]
            if name != "hidden_rows":
                assert_equal("select_from_head", f"request {request} alone", name, getattr(alone, name), whole)
            if request:
                assert_equal(
                    "select_from_head", "beside NaN", name, getattr(beside, name)[request : request + 1], whole
                )


def test_sums_of_many_equal_and_of_many_tiny_exponentials(device):
    """Where rounding each of them would show first: within what rounding a sum in fp32 takes."""
    for best, dtype in ((0.0, torch.float16), (9.0, torch.float16), (9.0, torch.bfloat16)):
        values = make(1, 2, 0, 4096, 1, dtype=dtype, device=device)
        values["hidden"].fill_(1.0)
        values["weight"].zero_()[77] = best
        logits = values["weight"][:, 0].double()
        expected = (logits - logits.logsumexp(0))[[77, 0]] if best else (logits - logits.logsumexp(0))[:2]
        result = eagle_kernels.raw.select_from_head(**values)
        assert (result.scores[0].double() - expected).abs().max() < 2e-6


@pytest.mark.parametrize("numbers", [{"block_output": 16}, {"prefetched": True, "block_column": 128}], ids=str)
def test_tuning_changes_rounding_alone(numbers, device, monkeypatch):
    retune(monkeypatch, head_tiles.TUNING, **numbers)
    for values in (make(2, 3, 1, 530, 300, device=device), make(2, 3, 0, 3, 70, device=device)):
        check(values, str(numbers))
        expected = eagle_kernels.raw.select_from_head(**values)
        result = eagle_kernels.raw.select_from_head(**values, prefetch_weight=True)
        for name, got, want in zip(result._fields, result, expected):
            assert_equal("select_from_head", f"prefetched {numbers}", name, got, want)


def test_rows_are_tuned_alike():
    """The bits of a sum depend on where it is cut, so all numbers of rows are cut alike."""
    for rows in head_tiles.TUNING.values():
        assert len({row["block_output"] for row in rows}) == 1
        most = [row["max_rows"] for row in rows]
        assert most == sorted(most) and most[-1] == module.MAX_ROWS


def test_strided_rows_and_no_rows(device):
    values = make(2, 3, 1, 200, 40, device=device)
    wide = {name: torch.full((len(values[name]), 48), 9.0, device=device).half() for name in ("hidden", "weight")}
    for name, tensor in wide.items():
        tensor[:, :40] = values[name]
    check(values | {name: tensor[:, :40] for name, tensor in wide.items()}, "strided")
    check(make(0, 3, 1, 200, 40, device=device), "no rows")


def test_what_it_is_for(monkeypatch):
    weight = torch.empty(1000, 64, device="meta", dtype=torch.bfloat16)
    assert not module.is_for(1, weight)  # nothing was measured on this device
    monkeypatch.setitem(module.FAST_ROWS, "default", module.MAX_ROWS)
    assert module.is_for(64, weight) and not module.is_for(65, weight) and not module.is_for(1, weight.float())
    assert not module.is_for(1, torch.empty(module.MAX_VOCAB + 1, 1, device="meta", dtype=torch.bfloat16))


def test_wrong_calls_are_refused(device):
    values = make(1, 2, 1, 50, 8, device=device)
    for changed, told in (
        ({"hidden": values["hidden"].float()}, "hidden must"),
        ({"weight": values["weight"].bfloat16()}, "weight must"),
        ({"weight": values["weight"][:, :7]}, "weight must"),
        ({"weight": values["weight"][:1]}, "topk must be at most the draft vocabulary, 1"),
        ({"hidden": values["hidden"][:1]}, r"hidden must have B \* topk = 2 rows at level 1"),
        ({"hidden": values["hidden"].repeat(33, 1)}, "hidden must have at most 64 rows"),
        ({"level": 0}, "scores must not be given at level 0"),
    ):
        with pytest.raises((ValueError, TypeError), match=told):
            eagle_kernels.raw.select_from_head(**values | changed)


@pytest.mark.gpu
def test_waits_for_hidden_rows(device):
    """A chain in which each head reads what the linear before wrote; a hundred runs in a graph give the same bits."""
    values = make(1, 8, 1, 4000, 1024, device=device)
    shift = torch.eye(1024, device=device).roll(1, 0).half()

    def run():
        rows = eagle_kernels.raw.linear_decode(values["hidden"], shift, prefetch_weight=True)
        return eagle_kernels.raw.select_from_head(**values | {"hidden": rows, "prefetch_weight": True})

    expected = check(values | {"hidden": values["hidden"].roll(1, 1)}, "shifted")
    results = []
    graph = replay_in_graph(lambda: results.append(run()))
    for _ in range(100):
        graph.replay()
        for name, got, want in zip(expected._fields, results[-1], expected):
            assert_equal("select_from_head", "chained", name, got, want)
