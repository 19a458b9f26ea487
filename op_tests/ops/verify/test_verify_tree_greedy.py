"""verify_tree_greedy against its reference, from ids and from logits, on sound and malformed trees."""

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.verify import verify_tree_greedy as op
from eagle_kernels.runtime import launch
from op_tests.harness import assert_only_launches, check_operation, sweep
from op_tests.harness.trees import LINKS
from op_tests.ops.verify.cases import follow_tree, make_tree, padded

SHAPES = [(1, 1, 1, 1), (3, 1, 4, 5), (2, 8, 1, 9), (4, 4, 3, 8), (2, 8, 5, 64), (1, 8, 5, 256)]
PATH = "verify.verify_tree_greedy"


def make(batch_size, topk, spec_steps, num_nodes, *, source="ids", vocab_size=97, device="cpu", dtype=torch.int64):
    links, _ = make_tree(batch_size, topk, spec_steps, num_nodes, vocab_size=vocab_size, device=device, dtype=dtype)
    logits = follow_tree(links, vocab_size)
    if source == "ids":
        target = {"target_predict": logits.argmax(-1).view(batch_size, num_nodes).to(dtype)}
    else:
        target = {"target_logits": logits.to(source)}
    return {**links, **target, "spec_steps": spec_steps}


def make_padded(*shape, **options) -> dict:
    values = make(*shape, **options)
    return values | {"target_logits": padded(values["target_logits"])}


def without_plans(monkeypatch):
    """A planned launch would keep the arrangement that it was planned with."""
    monkeypatch.setattr(launch, "_can_plan", lambda: False)


@pytest.fixture(params=["all rows", "level by level"])
def arrangement(request, monkeypatch):
    """Both ways to scan logits, whatever the shapes say; cut into slices of 256 tokens."""
    without_plans(monkeypatch)
    monkeypatch.setattr(op, "scans_all_rows", lambda *sizes: request.param == "all rows")
    for table in ("ROWS_TUNING", "LEVEL_TUNING"):
        monkeypatch.setattr(op, table, {"default": getattr(op, table)["default"] | {"BLOCK_VOCAB": 256}})
    return request.param


def ahead_of_time_cases():
    yield "ids", make(2, 8, 5, 64)
    yield "any order", make(2, 8, 5, 64) | {"any_order": True}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield f"all rows {dtype}", unread_logits(1, 8, 5, 64, dtype)
        yield f"level by level {dtype}", unread_logits(32, 8, 5, 64, dtype)
    for policy in ("accept_all", "reject_all", "simulate"):
        for batch_size in (1, 32):
            yield f"{policy} B={batch_size}", with_policy(unread_logits(batch_size, 8, 5, 64, torch.bfloat16), policy)
    for source in ("ids", torch.float32):
        yield f"S=0 N=1 {source}", make(2, 1, 1, 1, source=source, vocab_size=2) | {"spec_steps": 0}


def short_rows():
    yield "", make_padded(2, 4, 3, 8, source=torch.float16, vocab_size=257)


def wrong_calls():
    values = make(2, 4, 3, 8, source=torch.float32)
    logits = {"target_predict": values.pop("target_logits")}
    yield values | logits, "target_predict must have dtype int32 or int64, and logits are target_logits, got torch.fl"


def order_case():
    """From logits, rows of two slices."""
    return make(2, 4, 3, 8, source=torch.float32, vocab_size=9000)


def with_policy(values: dict, policy: str) -> dict:
    """For launches that are recorded only."""
    coins = {}
    if policy == "simulate":
        batch_size, num_nodes = values["candidates"].shape
        seeds, positions = (torch.zeros(size, dtype=torch.int64) for size in (batch_size, batch_size * num_nodes))
        coins = {"simulated_rates": torch.ones(values["spec_steps"]), "seeds": seeds, "positions": positions}
    return values | coins | {"accept_policy": policy}


size_sweep = sweep(lambda batch_size: unread_logits(batch_size, 4, 3, 8, torch.float16))


def unread_logits(batch_size, topk, spec_steps, num_nodes, dtype):
    """For launches that are recorded only: one row of 128k tokens stands for all."""
    node = torch.zeros(batch_size, num_nodes, dtype=torch.int64)
    logits = torch.empty(128256, dtype=dtype).expand(batch_size * num_nodes, -1)
    return dict.fromkeys(LINKS, node) | {"target_logits": logits, "spec_steps": spec_steps}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ids_match_reference(shape, device):
    output, _ = check_operation(PATH, make(*shape, device=device), case=str(shape))
    assert shape[3] == 1 or output.accept_token_num.sum() > 0, "the case accepts nothing, so it proves little"


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.float32) for shape in SHAPES[:4]), (SHAPES[3], torch.float16), (SHAPES[3], torch.bfloat16)],
    ids=str,
)
def test_logits_match_reference(shape, dtype, arrangement, device):
    """A vocabulary of one slice or, with half precision, of several."""
    vocab_size = 97 if dtype == torch.float32 else 600
    values = make(*shape, source=dtype, vocab_size=vocab_size, device=device)
    output, _ = check_operation(PATH, values, case=f"{shape} {dtype}")
    assert shape[3] == 1 or output.accept_token_num.sum() > 0, "the case accepts nothing, so it proves little"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [97, 257, 5000])
def test_rows_that_end_within_a_block(vocab_size, dtype, device):
    """With the blocks that are in use: what the compiler knows to lie past the end of a row does not win."""
    check_operation(PATH, make_padded(3, 4, 3, 8, source=dtype, vocab_size=vocab_size, device=device))


def test_the_arrangement_follows_from_shapes():
    """At the sizes that servers run: few rows are all read, many only where the walks go."""
    kernels = {}
    for shape in ((1, 4, 3, 8), (8, 4, 3, 8), (1, 8, 5, 64), (8, 8, 5, 64), (32, 8, 5, 64)):
        recorded = []
        with launch.intercept(lambda *record, keep=recorded.append: keep(record[1].__name__)):
            op.verify_tree_greedy(**unread_logits(*shape, torch.bfloat16))
        kernels[shape] = recorded
    all_rows = ["_verify_tree_greedy_rows_kernel", "_verify_tree_greedy_kernel"]
    by_level = ["_verify_tree_greedy_level_kernel"] * 6 + ["_verify_tree_greedy_path_kernel"]
    assert list(kernels.values()) == [all_rows] * 3 + [by_level] * 2


def test_levels_launch_and_nothing_else(monkeypatch, device):
    without_plans(monkeypatch)
    monkeypatch.setattr(op, "scans_all_rows", lambda *sizes: False)
    assert_only_launches(PATH, make(2, 4, 3, 8, source=torch.float32, device=device), launches=5)


def test_a_tree_larger_than_any_is_refused():
    node = torch.zeros(1, 1025, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"candidates must hold the root and at most 1024 nodes, got \[1, 1025\]"):
        eagle_kernels.raw.verify_tree_greedy(node, node, node, node, node, spec_steps=3)
