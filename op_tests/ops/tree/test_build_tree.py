"""build_tree against its reference: valid trees of every shape, all mask layouts, and malformed trees."""

from __future__ import annotations

import itertools

import pytest
import torch

import eagle_kernels
from op_tests.harness import Guarded, assert_equal, check_operation, to_device
from op_tests.ops.tree.cases import make_tree as make

MODES = ("packed", "full_mask", "qlen_only", "qlen_only_bitpacking")

# (batch, topk, spec_steps, nodes): single nodes, chains, stars, word borders, the largest tree
SHAPES = [(1, 1, 1, 1), (2, 1, 4, 5), (3, 8, 1, 9), (2, 4, 3, 8), (1, 3, 4, 31), (2, 4, 3, 32), (1, 8, 5, 33),
          (1, 8, 5, 64), (1, 10, 3, 65), (1, 8, 5, 129), (1, 8, 5, 256)]  # fmt: skip


def ahead_of_time_cases():
    for mode in MODES:
        yield f"N=8 {mode}", make(2, 4, 3, 8, mode=mode)
    yield "N=32 full_mask int32", make(2, 8, 5, 32, mode="full_mask", dtype=torch.int32)
    yield "N=256", make(1, 8, 5, 256)
    yield "N=100 any order", make(1, 8, 5, 100) | {"any_order": True}


def size_sweep():
    for batch_size in (1, 2, 3, 16, 17, 64, 257):
        yield make(batch_size, 4, 3, 8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, device):
    check_operation("tree.build_tree", make(*shape, device=device), case=str(shape))


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[3] in (1, 5, 9, 31, 64)], ids=str)
def test_mask_layouts(shape, mode, device):
    if mode == "qlen_only_bitpacking" and shape[3] > 32:
        with pytest.raises(ValueError, match="at most 32 for 'qlen_only_bitpacking'"):
            eagle_kernels.raw.build_tree(**make(*shape, mode=mode, device=device))
        return
    check_operation("tree.build_tree", make(*shape, mode=mode, device=device), case=f"{shape} {mode}")


def test_int32_inputs(device):
    check_operation("tree.build_tree", make(3, 4, 3, 16, dtype=torch.int32, device=device), case="int32")


def test_empty_batch(device):
    result = eagle_kernels.build_tree(**make(0, 4, 3, 8, device=device))
    assert result.tree_mask.shape == (0, 8, 1) and result.positions.shape == (0,)


def test_worked_example(device):
    """The example of SGLang's survey: K = 2, three levels, five nodes."""
    as_tensor = lambda data: torch.tensor(data, device=device)  # noqa: E731
    result = eagle_kernels.build_tree(
        as_tensor([9]), as_tensor([[-1, 0, 1, 2, 4]]), as_tensor([[0, 1, 2, 4]]), as_tensor([[11, 12, 21, 23]]),
        as_tensor([4]), topk=2, spec_steps=3, num_verify_tokens=5,
    )  # fmt: skip
    assert result.tree_mask.flatten().tolist() == [0b00001, 0b00011, 0b00101, 0b01011, 0b10101]
    assert result.positions.tolist() == [4, 5, 5, 6, 6]
    assert result.retrieve_next_token.tolist() == [[1, 3, 4, -1, -1]]
    assert result.retrieve_next_sibling.tolist() == [[-1, 2, -1, -1, -1]]
    assert result.draft_tokens.tolist() == [9, 11, 12, 21, 23]


MALFORMED = {
    "cyclic": lambda v: v["parent_list"].copy_(
        torch.arange(v["parent_list"].shape[1]).flip(0).expand_as(v["parent_list"])
    ),
    "missing parents": lambda v: v["parent_list"].fill_(-1),
    "parents far out of range": lambda v: v["parent_list"].fill_(2**40),
    "candidate ids out of range": lambda v: v["top_scores_index"][:, -3:].fill_(2**40),
    "negative candidate ids": lambda v: v["top_scores_index"][:, ::2].fill_(-1),
    "one candidate everywhere": lambda v: v["top_scores_index"].fill_(5),
    "descending candidates": lambda v: v["top_scores_index"].copy_(v["top_scores_index"].flip(1)),
    "candidate ids at the end of 31 bits": lambda v: (
        v["top_scores_index"][:, -2:].fill_(2**31 - 1),
        v["parent_list"][:, -4:].fill_(2**31 - 1),
    ),
    "tokens out of range": lambda v: v["draft_tokens"].fill_(-1),
}


@pytest.mark.parametrize("any_order", [False, True])
@pytest.mark.parametrize("fault", MALFORMED)
def test_malformed_trees_end_and_stay_in_bounds(fault, any_order, device):
    values = make(2, 4, 3, 16) | {"any_order": any_order}
    MALFORMED[fault](values)
    values = to_device(values, device)
    check_operation("tree.build_tree", values, case=f"{fault} {any_order}")


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[3] in (1, 5, 33, 129)], ids=str)
def test_any_order(shape, device):
    """Ascending selections of sound trees give the same tree; others, and wild parents, what the reference says."""
    values = make(*shape, device=device)
    expected = eagle_kernels.build_tree(**values)
    for got, want in zip(eagle_kernels.build_tree(**values, any_order=True), expected):
        assert torch.equal(got, want)
    kept = values["top_scores_index"]
    values["top_scores_index"] = kept[:, torch.randperm(shape[3] - 1, device=device)].contiguous()
    check_operation("tree.build_tree", values | {"any_order": True}, case=f"{shape} shuffled")
    is_wild = torch.rand(values["parent_list"].shape, device=device) < 0.3
    any_kept = kept[:, torch.randint(max(shape[3] - 1, 1), values["parent_list"].shape[1:])] if shape[3] > 1 else 0
    values["parent_list"] = torch.where(is_wild, any_kept, values["parent_list"])
    check_operation("tree.build_tree", values | {"any_order": True}, case=f"{shape} wild")


def test_full_mask_in_a_longer_buffer(device):
    """A server keeps one buffer for its longest batch; cells past the batch's own stay as they were."""
    values = make(2, 4, 3, 8, mode="full_mask", device=device)
    expected = eagle_kernels.build_tree(**values)
    buffer = torch.zeros(expected.tree_mask.numel() + 100, dtype=torch.bool, device=device)
    out = expected._replace(tree_mask=buffer)
    eagle_kernels.raw.build_tree(**{**values, "seq_lens_sum": None}, out=out)
    assert torch.equal(buffer[:-100], expected.tree_mask) and not buffer[-100:].any()
    buffer.fill_(False)
    eagle_kernels.raw.build_tree(**{**values, "seq_lens_sum": None}, prefix_is_set=True, out=out)
    seq_len = int(values["seq_lens"][0])
    assert not buffer[:seq_len].any() and buffer[seq_len]


@pytest.mark.parametrize("offset", [0, 1, 8, 15])
def test_full_mask_at_any_address(offset, device):
    """Prefixes are filled in words between the rows' ragged ends, wherever the mask and its rows start."""
    values = make(3, 4, 3, 8, mode="full_mask", device=device)
    values["seq_lens"] = torch.tensor([0, 3, 1200], device=device)
    values["seq_lens_sum"] = 1203
    expected = eagle_kernels.reference.ops.tree.build_tree.build_tree(**values)
    size = expected.tree_mask.numel()
    buffer = torch.zeros(size + 64, dtype=torch.bool, device=device)
    eagle_kernels.raw.build_tree(**values, out=expected._replace(tree_mask=buffer[offset : offset + size]))
    assert_equal("build_tree", f"offset {offset}", "tree_mask", buffer[offset : offset + size], expected.tree_mask)
    assert not buffer[:offset].any() and not buffer[offset + size :].any()


@pytest.mark.parametrize("function", [eagle_kernels.raw.build_tree, eagle_kernels.build_tree])
def test_a_mask_buffer_that_is_too_short_is_not_overrun(function, device):
    values = make(2, 4, 3, 8, mode="full_mask", device=device)
    expected = eagle_kernels.build_tree(**values)
    whole = torch.zeros_like(expected.tree_mask)
    half = whole.numel() // 2
    function(**values, out=expected._replace(tree_mask=whole[:half]))
    assert not whole[half:].any() and torch.equal(whole[:half], expected.tree_mask[:half])


@pytest.mark.parametrize("seq_lens", [[-40, 10], [10, -40], [2**40, 0], [2**60 - 9, 5]])
def test_impossible_lengths_stay_inside_the_mask(seq_lens, device):
    values = make(2, 4, 3, 8, mode="full_mask", device=device)
    expected = eagle_kernels.build_tree(**values)
    values["seq_lens"] = torch.tensor(seq_lens, device=device)
    guarded = Guarded((100,), torch.bool, device)
    eagle_kernels.raw.build_tree(**values, out=expected._replace(tree_mask=guarded.tensor))
    guarded.check("build_tree", "tree_mask")


CROSS = [
    (3, topk, spec_steps, num_nodes)
    for topk, spec_steps, num_nodes in itertools.product(
        (1, 2, 4, 8, 10), (1, 3, 5, 8), (1, 2, 8, 31, 32, 33, 63, 64, 65, 128, 255, 256)
    )
    if num_nodes <= 1 + topk + (spec_steps - 1) * topk**2
]


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("shape", CROSS, ids=str)
def test_full_cross(shape, device):
    modes = [mode for mode in MODES if mode != "qlen_only_bitpacking" or shape[3] <= 32]
    mode = modes[CROSS.index(shape) % len(modes)]
    check_operation("tree.build_tree", make(*shape, mode=mode, device=device), case=f"{shape} {mode}")
