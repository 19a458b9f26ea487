"""unpack_tree_mask against its reference, and as the inverse of packing: every layout, buffers that do not fit."""

import pytest
import torch

import eagle_kernels
from op_tests.harness import check_operation
from op_tests.ops.tree.cases import make_words as make
from op_tests.ops.tree.masks import MODES, in_layout

PATH = "tree.unpack_tree_mask"
SIZES = (1, 8, 9, 16, 32, 63, 64, 65, 128, 200)


def ahead_of_time_cases():
    for mode in MODES:
        yield f"N=32 {mode}", make(2, 32, mode=mode)
    yield "N=8 qlen_only_bitpacking", make(2, 8, mode="qlen_only_bitpacking")


def size_sweep():
    for batch_size, longest in zip((1, 2, 3, 16, 17, 64, 257), (1, 17, 5000, 70000, 3, 20, 2)):
        values = make(batch_size, 8, mode="full_mask", longest=longest)
        yield values | {"out": torch.empty(8 * (values["seq_lens_sum"] + 8 * batch_size), dtype=torch.bool)}


def wrong_calls():
    rule = "seq_lens_sum must be given for 'full_mask' without out"
    yield make(2, 8, mode="full_mask") | {"seq_lens_sum": None}, rule


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_nodes", SIZES)
def test_matches_reference(num_nodes, mode, device):
    if mode == "qlen_only_bitpacking" and num_nodes > 32:
        return
    if mode == "full_mask" and num_nodes > 16 and num_nodes != 65 and device.type == "cpu":
        return  # a program a row takes the interpreter long
    batch_size = 1 if num_nodes == 65 else 2
    check_operation(PATH, make(batch_size, num_nodes, mode=mode, device=device), case=f"N = {num_nodes} {mode}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_nodes", [7, 9, 70])
def test_is_the_inverse_of_packing(num_nodes, mode, device):
    if num_nodes > 32 and mode in ("qlen_only_bitpacking", "full_mask"):
        return
    seq_lens = torch.tensor([3, 0, 9])
    visible = torch.rand(3, num_nodes, num_nodes) < 0.4
    mask, lengths = in_layout(visible, seq_lens, mode).to(device), seq_lens.to(device)
    sizes = {"num_verify_tokens": num_nodes, "tree_mask_mode": mode}
    words = eagle_kernels.raw.pack_tree_mask(mask, lengths, **sizes)
    back = eagle_kernels.raw.unpack_tree_mask(words, lengths, 12, **sizes)
    assert back.dtype == mask.dtype and torch.equal(back, mask)


@pytest.mark.parametrize("function", [eagle_kernels.raw.unpack_tree_mask, eagle_kernels.unpack_tree_mask])
def test_the_ancestors_of_a_drafting_level_need_their_number_of_keys(function, device, monkeypatch):
    """Without it, words that are too many are refused; keys of the last word are cut off, which debug mode sees."""
    topk = 16
    level = eagle_kernels.select_top_k_tokens(torch.randn(1, 40, device=device), topk=topk, level=0)
    for depth in range(1, 5):
        seen = function(level.ancestors, num_verify_tokens=depth * topk)
        assert seen.sum(dim=-1).eq(depth).all()  # each beam and those above it
        monkeypatch.setattr("eagle_kernels.runtime.check.DEBUG", True)
        if depth == 1:
            assert torch.equal(function(level.ancestors), seen)
        else:
            with pytest.raises(ValueError, match="have no key from Nq = 16 on without num_verify_tokens"):
                function(level.ancestors)
        monkeypatch.setattr("eagle_kernels.runtime.check.DEBUG", False)
        logits = torch.randn(topk, 40, device=device)
        level = eagle_kernels.select_top_k_tokens(logits, level.scores, level.ancestors, topk=topk, level=depth)
    with pytest.raises(ValueError, match=r"tree_mask must have shape \[B, Nq, 1\], got \[1, 16, 2\]"):
        function(level.ancestors)


@pytest.mark.gpu
def test_offsets_past_two_gigabytes(device):
    """FULL_MASK of more than 2^31 cells: the last row of the last request lands where it belongs."""
    values = make(2, 64, mode="full_mask", device=device)
    values["seq_lens"] = torch.tensor([2**25, 2**10], device=device)
    size = 64 * (2**25 + 2**10 + 128)
    out = torch.empty(size, dtype=torch.bool, device=device)
    eagle_kernels.raw.unpack_tree_mask(**values, out=out)
    last = out[-64 * (2**10 + 64) :].view(64, -1)
    assert last[:, : 2**10].all() and out[2**25 - 1]
    bits = (values["tree_mask"][1] >> torch.arange(64, device=device)) & 1
    assert torch.equal(last[:, 2**10 :], bits == 1)
