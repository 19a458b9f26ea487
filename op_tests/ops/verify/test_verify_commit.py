"""verify_commit against its reference: ragged paths, dead rows of both kinds, and paths that no tree has."""

import pytest
import torch

import eagle_kernels
from op_tests.harness import check_operation, sweep

PATH = "verify.verify_commit"
SHAPES = [(1, 1, 1), (3, 4, 5), (5, 6, 64), (2, 9, 60), (4, 71, 71)]


def make(batch_size, num_columns, num_nodes, *, with_live=False, dtype=torch.int32, device="cpu"):
    """Random ascending paths of all lengths, the root first."""
    accept_index = torch.full((batch_size, num_columns), -1, dtype=dtype)
    accepted = torch.randint(0, min(num_columns, num_nodes), (batch_size,))
    for request, count in enumerate(accepted.tolist()):
        path = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(num_nodes - 1)[:count].sort().values])
        accept_index[request, : count + 1] = request * num_nodes + path
    values = {
        "predicts": torch.randint(2**31, (batch_size * num_nodes,)).to(dtype),
        "accept_index": accept_index,
        "accept_token_num": accepted.to(dtype),
        "seq_lens": torch.randint(100, (batch_size,)).to(dtype),
    }
    if with_live:
        values["is_live"] = torch.arange(batch_size) % 3 != 1
    return {key: value.to(device) for key, value in values.items()}


def ahead_of_time_cases():
    yield "int32", make(2, 6, 64)
    yield "int64 with a mask", make(2, 6, 64, with_live=True, dtype=torch.int64)


size_sweep = sweep(lambda batch_size: make(batch_size, 4, 8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("with_live", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, with_live, dtype, device):
    values = make(*shape, with_live=with_live, dtype=dtype, device=device)
    output, _ = check_operation(PATH, values, case=f"{shape} {with_live} {dtype}")
    assert (output.accept_lengths > 0).any() and (not with_live or shape[0] == 1 or (output.accept_lengths == 0).any())


def test_a_path_in_words(device):
    """Request 0 accepts nodes 2 and 3; request 1 nothing; request 2 is dead, request 3 marked dead."""
    values = {
        "predicts": torch.tensor([7, -1, 8, 9, 5, -1, -1, -1, -1, -1, -1, -1, 4, -1, -1, -1]).int(),
        "accept_index": torch.tensor([[0, 2, 3], [4, -1, -1], [-1, -1, -1], [12, -1, -1]]).int(),
        "accept_token_num": torch.tensor([2, 0, 0, 0]).int(),
        "seq_lens": torch.tensor([10, 20, 0, 30]),
        "is_live": torch.tensor([1, 1, 1, 0]),
    }
    output, _ = check_operation(PATH, {key: value.to(device) for key, value in values.items()})
    assert output.new_seq_lens.tolist() == [13, 21, 0, 30]
    assert output.bonus_tokens.tolist() == [9, 5, -1, -1]
    assert output.accept_lengths.tolist() == [3, 1, 0, 0]
    assert output.tokens.tolist() == [[7, 8, 9], [5, -1, -1], [-1, -1, -1], [-1, -1, -1]]
    assert output.hidden_rows.tolist() == [[0, 2, 3], [4, 4, 4], [8, 8, 8], [12, 12, 12]]
    assert output.last_row.tolist() == [2, 3, 6, 9]


def test_follows_a_verification(device):
    """What a chain of three nodes emits: both drafts, then the bonus."""
    node = torch.arange(3, device=device)[None]
    after = torch.tensor([[1, 2, -1]], device=device)
    verdict = eagle_kernels.raw.verify_tree_greedy(
        node + 10, node, after, torch.full_like(node, -1), node + 11, spec_steps=2
    )
    output = eagle_kernels.raw.verify_commit(*verdict, torch.tensor([5], device=device))
    assert output.tokens.tolist() == [[11, 12, 13]] and output.bonus_tokens.tolist() == [13]
