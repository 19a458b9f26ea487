"""tree_from_parents against its reference: sound trees in all layouts, padding, and parents that make no tree."""

import itertools

import pytest
import torch

import eagle_kernels
from op_tests.harness import check_operation, sweep
from op_tests.harness.trees import random_drafts
from op_tests.ops.tree.cases import make_parents as make
from op_tests.ops.tree.masks import MODES, in_layout, links_from, random_parents, visible_from

PATH = "tree.tree_from_parents"
SIZES = (1, 2, 7, 8, 9, 16, 31, 32, 33, 63, 64, 65, 130, 256)


def ahead_of_time_cases():
    for mode in MODES:
        yield f"N=8 {mode}", make(2, 8, mode=mode)
    yield "N=32 full_mask int32", make(2, 32, mode="full_mask", dtype=torch.int32)
    yield "N=256", make(1, 256)


size_sweep = sweep(lambda batch_size: make(batch_size, 8))


@pytest.mark.parametrize("num_nodes", SIZES)
def test_sound_trees(num_nodes, device):
    parents = random_parents(2, num_nodes)
    values = make(2, num_nodes, parents=parents, device=device)
    result, _ = check_operation(PATH, values, case=f"N = {num_nodes}")
    assert torch.equal(result.tree_mask.cpu(), in_layout(visible_from(parents), values["seq_lens"], "packed"))
    for got, want in zip(result[3:5], links_from(parents)):
        assert torch.equal(got.cpu(), want)


def test_worked_example(device):
    """Node 2 is padding, node 3 hangs on it, node 6 has no token: the three are nobody's, and harmless."""
    as_tensor = lambda data: torch.tensor(data, device=device)  # noqa: E731
    result = eagle_kernels.tree_from_parents(
        as_tensor([9]), as_tensor([[11, 12, 13, 14, 15, -1, 17]]), as_tensor([[0, -1, 2, 0, 1, 1, 4]]), as_tensor([40]),
        num_verify_tokens=8,
    )  # fmt: skip
    assert result.draft_tokens.tolist() == [9, 11, 9, 9, 14, 15, 9, 17]
    assert result.positions.tolist() == [40, 41, 40, 40, 41, 42, 40, 42]
    assert result.retrieve_next_token.tolist() == [[1, 5, -1, -1, 7, -1, -1, -1]]
    assert result.retrieve_next_sibling.tolist() == [[-1, 4, -1, -1, -1, -1, -1, -1]]
    seen = [[0], [0, 1], [2], [3], [0, 4], [0, 1, 5], [6], [0, 4, 7]]
    assert result.tree_mask.flatten().tolist() == [sum(1 << node for node in row) for row in seen]


def test_siblings_of_one_token_stay(device):
    values = make(1, 4, parents=torch.tensor([[-1, 0, 0, 0]]), device=device)
    values["draft_tokens"].fill_(5)
    result, _ = check_operation(PATH, values)
    assert result.retrieve_next_sibling.tolist() == [[-1, 2, 3, -1]]


@pytest.mark.parametrize("mode", MODES)
def test_says_what_build_tree_says(mode, device):
    """A sound tree of candidates, its parents read off its links."""
    parent_list, top_scores_index, draft_tokens = (tensor.to(device) for tensor in random_drafts(3, 8, 5, 32))
    lengths = torch.tensor([5, 0, 17], device=device)
    sizes = {"num_verify_tokens": 32, "tree_mask_mode": mode}
    built = eagle_kernels.build_tree(
        lengths, parent_list, top_scores_index, draft_tokens, lengths, 22, topk=8, spec_steps=5, **sizes
    )
    parents = torch.full((3, 32), -1)
    for request, node in itertools.product(range(3), range(32)):
        child = int(built.retrieve_next_token[request, node])
        while child >= 0:
            parents[request, child] = node
            child = int(built.retrieve_next_sibling[request, child])
    parents = parents[:, 1:].contiguous().to(device)
    made = eagle_kernels.raw.tree_from_parents(lengths, draft_tokens, parents, lengths, 22, **sizes)
    for got, want in zip(made, built):
        assert torch.equal(got, want)
