"""build_tree against its reference: valid trees of every shape, all mask layouts, and malformed trees."""

import pytest
import torch

import eagle_kernels
from op_tests.harness import assert_equal, check_operation, sweep
from op_tests.ops.tree.cases import make_tree as make
from op_tests.ops.tree.masks import MODES

# (batch, topk, spec_steps, nodes): single nodes, chains, stars, word borders, the largest tree
SHAPES = [(1, 1, 1, 1), (2, 1, 4, 5), (3, 8, 1, 9), (2, 4, 3, 8), (1, 3, 4, 31), (2, 4, 3, 32), (1, 8, 5, 33),
          (1, 8, 5, 64), (1, 10, 3, 65), (1, 8, 5, 129), (1, 8, 5, 256)]  # fmt: skip


def ahead_of_time_cases():
    for mode in MODES:
        yield f"N=8 {mode}", make(2, 4, 3, 8, mode=mode)
    yield "N=32 full_mask int32", make(2, 8, 5, 32, mode="full_mask", dtype=torch.int32)
    yield "N=256", make(1, 8, 5, 256)
    yield "N=100 any order", make(1, 8, 5, 100) | {"any_order": True}


size_sweep = sweep(lambda batch_size: make(batch_size, 4, 3, 8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, device):
    check_operation("tree.build_tree", make(*shape, device=device), case=str(shape))


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


@pytest.mark.parametrize("offset", [0, 1, 8, 15])
def test_full_mask_at_any_address(offset, device):
    """Prefixes are filled in words between the rows' ragged ends, wherever the mask and its rows start."""
    values = make(3, 4, 3, 8, mode="full_mask", device=device)
    values |= {"seq_lens": torch.tensor([0, 3, 1200], device=device), "seq_lens_sum": 1203}
    expected = eagle_kernels.reference.ops.tree.build_tree.build_tree(**values)
    size = expected.tree_mask.numel()
    buffer = torch.zeros(size + 64, dtype=torch.bool, device=device)
    eagle_kernels.raw.build_tree(**values, out=expected._replace(tree_mask=buffer[offset : offset + size]))
    assert_equal("build_tree", f"offset {offset}", "tree_mask", buffer[offset : offset + size], expected.tree_mask)
    assert not buffer[:offset].any() and not buffer[offset + size :].any()
