"""pack_tree_mask against its reference: every layout, rectangular masks, bits past the keys, masks that do not fit."""

import pytest
import torch

import eagle_kernels
from op_tests.harness import check_operation, sweep, to_device
from op_tests.ops.tree.masks import MODES, in_layout

PATH = "tree.pack_tree_mask"
SIZES = (1, 8, 9, 32, 63, 64, 65, 130)


def random_mask(batch_size, num_rows, num_keys):
    return torch.rand(batch_size, num_rows, num_keys) < 0.4


def make(batch_size, num_nodes, *, mode="qlen_only", num_rows=None, dtype=torch.int64, device="cpu"):
    """A mask of any bits; FULL_MASK comes with lengths and N, as its shape tells neither."""
    seq_lens = torch.randint(0, 20, (batch_size,))
    visible = random_mask(batch_size, num_rows or num_nodes, num_nodes)
    values = {"tree_mask": in_layout(visible, seq_lens, mode), "tree_mask_mode": mode}
    if mode == "full_mask":
        values |= {"seq_lens": seq_lens.to(dtype), "num_verify_tokens": num_nodes}
    return to_device(values, device)


def ahead_of_time_cases():
    for mode in MODES:
        yield f"N=32 {mode}", make(2, 32, mode=mode)
    yield "16 x 200", make(1, 200, num_rows=16)


size_sweep = sweep(lambda batch_size: make(batch_size, 8, mode="full_mask"))


def wrong_calls():
    rule = "num_verify_tokens must be given for a flat mask"
    yield make(2, 8, mode="qlen_only") | {"tree_mask": torch.zeros(128).bool()}, rule
    yield make(2, 8, mode="full_mask") | {"num_verify_tokens": None}, rule


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_nodes", SIZES)
def test_matches_reference(num_nodes, mode, device):
    if mode == "qlen_only_bitpacking" and num_nodes > 32:
        return
    check_operation(PATH, make(2, num_nodes, mode=mode, device=device), case=f"N = {num_nodes} {mode}")


def test_bits_past_the_keys_are_cleared(device):
    words = torch.full((2, 5, 2), -1, device=device)
    values = {"tree_mask": words, "tree_mask_mode": "packed"}
    assert torch.equal(check_operation(PATH, values, case="copied")[0], words)
    result, _ = check_operation(PATH, values | {"num_verify_tokens": 70}, case="70 keys")
    assert result.unique().tolist() == [-1, 63]
    small = {"tree_mask": words[..., 0, None].to(torch.uint8)[:, :, 0], "tree_mask_mode": "qlen_only_bitpacking"}
    assert eagle_kernels.raw.pack_tree_mask(**small).unique().tolist() == [31]
