"""compute_tree_statistics over tree sizes and batch sizes."""

import torch

from bench.harness import grid
from bench.harness.inputs import TREES, built_tree
from bench.harness.torch_forms import closed
from bench.peers.torch_compile import compiled

CASES = grid(tree=TREES, batch_size=[1, 8, 32, 128])
SMALL_CASES = grid(batch_size=2, tree=TREES[0])

name = "{tree} B={batch_size}".format


def make(device, batch_size, tree):
    built = built_tree(batch_size, tree)
    links = {name: getattr(built, name).to(device) for name in ("retrieve_next_token", "retrieve_next_sibling")}
    return links | {"spec_steps": tree.spec_steps}


def count_bytes(batch_size, tree):
    return batch_size * (2 * 8 * tree.num_nodes + 4 * (5 + tree.spec_steps))


def prepare_torch(values):
    """Tensor operations over [B, N, N] for sound links: paths by matrix powers."""
    children, siblings = values["retrieve_next_token"], values["retrieve_next_sibling"]
    num_nodes, device = children.shape[1], children.device
    node = torch.arange(num_nodes, device=device)
    level = torch.arange(values["spec_steps"] + 1, device=device)
    identity = torch.eye(num_nodes, device=device)

    def run():
        by_child = children[:, None, :] == node[:, None]
        by_sibling = siblings[:, None, :] == node[:, None]
        path = closed(by_child | by_sibling, identity)
        is_linked = path[:, :, 0] > 0
        depth = torch.where(is_linked, (path @ by_child.any(-1).float()[..., None])[..., 0].int(), -1)
        place = closed(by_sibling, identity).sum(-1).int()
        return {
            "depths": depth.amax(-1),
            "num_linked": is_linked.sum(-1).int(),
            "num_leaves": (is_linked & (children < 0)).sum(-1).int(),
            "max_branching": torch.where(is_linked & (node > 0), place, 0).amax(-1),
            "nodes_per_depth": (depth[:, :, None] == level).sum(1).int(),
        }

    return run


PEERS = {"torch_compile": compiled(prepare_torch)}
