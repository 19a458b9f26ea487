"""verify_tree_topp along a deepest path of members, and where no draft is one."""

import torch

from bench.harness import grid
from bench.harness.inputs import ODD_BATCH, TREES, VOCABULARY, accepted_tree
from bench.harness.torch_forms import Walk

NUM_CANDIDATES = 5  # of a node

CASES = grid(tree=TREES[:2], is_accepted=[True, False], batch_size=[1, 8, ODD_BATCH, 32])
SMALL_CASES = grid(batch_size=2, tree=TREES[0], is_accepted=[True, False])


def name(batch_size, tree, is_accepted):
    return f"{tree} B={batch_size} {'full depth' if is_accepted else 'accepts 0'}"


def make(device, batch_size, tree, is_accepted):
    values, rows = accepted_tree("cpu", batch_size, tree, VOCABULARY), batch_size * tree.num_nodes
    del values["positions"]
    # ids that no tree carries, but for the target's own, which is the last of each list
    ids = VOCABULARY + torch.randint(VOCABULARY, (rows, NUM_CANDIDATES))
    if is_accepted:
        ids[:, -1] = values["target_predict"].flatten()
    values["candidate_ids"] = ids
    values["candidate_lens"] = torch.full((rows,), NUM_CANDIDATES, dtype=torch.int32)
    return {name: value.to(device) for name, value in values.items()} | {"spec_steps": tree.spec_steps}


def count_bytes(batch_size, tree, is_accepted):
    """The words and candidates of the visited nodes, and the outputs."""
    visited = tree.spec_steps + 1 if is_accepted else 1
    words = 8 * (4 * visited + 1) + (8 * NUM_CANDIDATES + 4) * visited + 4 * (tree.num_nodes + tree.spec_steps + 2)
    return batch_size * words


def prepare_torch(values):
    """Membership of all nodes at once, without the window; parents and the ancestor mask are made once."""
    walk, candidates = Walk(values), values["candidates"]
    batch_size, num_nodes = candidates.shape
    rank = torch.arange(values["candidate_ids"].shape[1], device=candidates.device)

    def run():
        in_list = rank < values["candidate_lens"].view(batch_size, num_nodes, 1)
        ids = torch.where(in_list, values["candidate_ids"].view(batch_size, num_nodes, -1), -1)
        is_member = (ids[walk.request[:, None], walk.above] == candidates[..., None]).any(-1)
        return walk.accept(is_member)[2]

    return run
