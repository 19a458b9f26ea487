"""tree_from_mask over tree sizes, batch sizes and mask layouts."""

import torch

from bench.harness import grid
from bench.harness.inputs import TREES, drafts
from bench.peers import sgl_kernel
from bench.peers.torch_compile import compiled
from eagle_kernels import reference

CASES = grid(tree_mask_mode=["packed", "qlen_only"], tree=TREES, batch_size=[1, 8, 32, 128])
SMALL_CASES = grid(batch_size=2, tree=TREES[0], tree_mask_mode=["packed", "qlen_only"])

name = "N={tree.num_nodes} B={batch_size} {tree_mask_mode}".format


def make(device, batch_size, tree, tree_mask_mode):
    values = drafts("cpu", batch_size, tree)
    built = reference.ops.tree.build_tree.build_tree(**values, tree_mask_mode=tree_mask_mode)
    tensors = {"tree_mask": built.tree_mask.to(device), "seq_lens": values["seq_lens"].to(device)}
    return tensors | {"num_verify_tokens": tree.num_nodes, "tree_mask_mode": tree_mask_mode}


def count_bytes(batch_size, tree, tree_mask_mode):
    num_nodes = tree.num_nodes
    row_bytes = num_nodes if tree_mask_mode == "qlen_only" else 8 * -(-num_nodes // 64)
    return batch_size * (8 + num_nodes * (row_bytes + 4 * 8))


def prepare_torch(values):
    """Tensor operations over [B, N, N]."""
    tree_mask, seq_lens, num_nodes = values["tree_mask"], values["seq_lens"], values["num_verify_tokens"]
    batch_size, device = len(seq_lens), seq_lens.device
    node = torch.arange(num_nodes, device=device)
    retrieve_index = torch.arange(batch_size * num_nodes, device=device).view(batch_size, num_nodes)
    is_packed = values["tree_mask_mode"] == "packed"

    def run():
        cells = (tree_mask[..., node // 64] >> (node % 64)) & 1 == 1 if is_packed else tree_mask
        seen = cells & (node < node[:, None])
        parent = torch.where(seen, node, -1).amax(-1)
        is_sibling = (parent[:, None, :] == parent[:, :, None]) & (parent >= 0)[:, :, None]
        is_later_sibling = is_sibling & (node > node[:, None])
        return {
            "positions": (seq_lens[:, None] + seen.sum(-1)).flatten(),
            "retrieve_index": retrieve_index,
            "retrieve_next_token": torch.where(seen.any(1), seen.int().argmax(1), -1),
            "retrieve_next_sibling": torch.where(is_later_sibling.any(-1), is_later_sibling.int().argmax(-1), -1),
        }

    return run


PEERS = {"sgl_kernel": sgl_kernel.tree_from_mask, "torch_compile": compiled(prepare_torch)}
