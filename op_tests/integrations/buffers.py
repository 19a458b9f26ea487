"""Poisoned buffers for sgl_kernel's build_tree_kernel_efficient, and a run of it on them."""

import torch

import eagle_kernels.integrations.sgl_kernel as sgl_kernel
from eagle_kernels.integrations.sgl_kernel import TreeMaskMode
from op_tests.harness import Guarded

FULL_MASK, QLEN_ONLY, BITPACKING = TreeMaskMode


def mask_buffer(seq_lens, num_nodes, mode, device) -> Guarded:
    batch_size = len(seq_lens)
    if mode == BITPACKING:
        word = torch.uint8 if num_nodes <= 8 else torch.uint16 if num_nodes <= 16 else torch.uint32
        return Guarded((batch_size * num_nodes,), word, device)
    prefix = num_nodes * int(seq_lens.sum()) if mode == FULL_MASK else 0
    return Guarded((prefix + batch_size * num_nodes**2,), torch.bool, device)


def build(drafts, topk, depth, num_nodes, mode, device):
    """Runs the op on poisoned buffers between guard zones; returns the mask and the four others."""
    batch_size = len(drafts[2])
    mask = mask_buffer(drafts[2], num_nodes, mode, device)
    if mode == FULL_MASK:
        mask.tensor.fill_(True)  # as every caller does
    positions = Guarded((batch_size * num_nodes,), torch.int64, device)
    links = [Guarded((batch_size, num_nodes), torch.int64, device) for _ in range(3)]
    buffers = [mask, positions, *links]
    result = sgl_kernel.build_tree_kernel_efficient(
        *drafts, *(buffer.tensor for buffer in buffers), topk, depth, num_nodes, int(mode)
    )
    assert result is None
    for buffer, name in zip(buffers, ("tree_mask", "positions", "retrive_index", "next_token", "next_sibling")):
        buffer.check("build_tree_kernel_efficient", name)
    return [buffer.tensor for buffer in buffers]
