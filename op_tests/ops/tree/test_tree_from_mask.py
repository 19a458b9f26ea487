"""tree_from_mask against its reference: sound trees in all layouts, any other bits, masks that do not fit."""

import pytest
import torch

import eagle_kernels
from op_tests.harness import check_operation, sweep, to_device
from op_tests.harness.trees import random_drafts
from op_tests.ops.tree.masks import MODES, in_layout, links_from, random_parents, visible_from

PATH = "tree.tree_from_mask"
SIZES = (1, 2, 7, 8, 9, 16, 31, 32, 33, 63, 64, 65, 130, 256)


def make(batch_size, num_nodes, *, mode="packed", dtype=torch.int64, visible=None, device="cpu"):
    seq_lens = torch.randint(0, 20, (batch_size,))
    if visible is None:
        visible = visible_from(random_parents(batch_size, num_nodes))
    values = {"tree_mask": in_layout(visible, seq_lens, mode), "seq_lens": seq_lens.to(dtype)}
    return to_device(values, device) | {"num_verify_tokens": num_nodes, "tree_mask_mode": mode}


def ahead_of_time_cases():
    for mode in MODES:
        yield f"N=32 {mode}", make(2, 32, mode=mode)
    yield "N=256", make(1, 256)


size_sweep = sweep(lambda batch_size: make(batch_size, 8, mode="full_mask"))


def wrong_calls():
    rule = r"hold 8 rows for each of 2 requests, got shape \[192\]"
    yield make(2, 8, mode="qlen_only") | {"tree_mask": torch.zeros(192).bool()}, rule


@pytest.mark.parametrize("num_nodes", SIZES)
def test_sound_trees(num_nodes, device):
    parents = random_parents(2, num_nodes)
    values = make(2, num_nodes, visible=visible_from(parents), device=device)
    result, _ = check_operation(PATH, values, case=f"N = {num_nodes}")
    for got, want in zip(result[2:], links_from(parents)):
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("num_nodes", [1, 8, 64])
def test_is_the_inverse_of_build_tree(num_nodes, device):
    topk, spec_steps = (1, 1) if num_nodes == 1 else (8, 5)
    drafts = [tensor.to(device) for tensor in random_drafts(3, topk, spec_steps, num_nodes)]
    lengths = torch.tensor([5, 0, 17], device=device)
    sizes = {"topk": topk, "spec_steps": spec_steps, "num_verify_tokens": num_nodes}
    for mode in ("packed", "full_mask", "qlen_only"):
        built = eagle_kernels.build_tree(lengths, *drafts, lengths, 22, **sizes, tree_mask_mode=mode)
        read = eagle_kernels.raw.tree_from_mask(
            built.tree_mask, lengths, num_verify_tokens=num_nodes, tree_mask_mode=mode
        )
        for got, want in zip(read, built[1:5]):
            assert torch.equal(got, want)


def test_worked_example(device):
    """SGLang's own: a root with two children, the second of which has one."""
    mask = torch.tensor([1, 0, 0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 0, 1, 1], dtype=torch.bool, device=device)
    result = eagle_kernels.raw.tree_from_mask(
        mask, torch.tensor([12], device=device), num_verify_tokens=4, tree_mask_mode="qlen_only"
    )
    assert result.positions.tolist() == [12, 13, 13, 14]
    assert result.retrieve_index.tolist() == [[0, 1, 2, 3]]
    assert result.retrieve_next_token.tolist() == [[1, -1, 3, -1]]
    assert result.retrieve_next_sibling.tolist() == [[-1, 2, -1, -1]]
