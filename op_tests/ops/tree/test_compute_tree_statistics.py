"""compute_tree_statistics against its reference: sound trees, chains, stars, dead rows and links of any kind."""

import pytest
import torch

from op_tests.harness import check_operation, sweep, to_device
from op_tests.ops.tree.masks import links_from, random_parents

PATH = "tree.compute_tree_statistics"
SIZES = (1, 2, 15, 16, 17, 63, 64, 65, 256)


def make(batch_size, num_nodes, *, spec_steps=8, parents=None, dtype=torch.int64, device="cpu"):
    links = links_from(random_parents(batch_size, num_nodes) if parents is None else parents)
    values = dict(zip(("retrieve_next_token", "retrieve_next_sibling"), (link.to(dtype) for link in links)))
    return to_device(values, device) | {"spec_steps": spec_steps}


MAY_SPILL = {"N=256"}  # 65536 pairs of nodes, compared once


def ahead_of_time_cases():
    yield "N=8", make(2, 8)
    yield "N=64", make(2, 64)
    yield "N=64 int32", make(2, 64, dtype=torch.int32)
    yield "N=256", make(1, 256)


size_sweep = sweep(lambda batch_size, spec_steps: make(batch_size, 8, spec_steps=spec_steps), (1, 2, 3, 5, 15, 16, 40))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_nodes", SIZES)
def test_sound_trees(num_nodes, dtype, device):
    parents = random_parents(3, num_nodes)
    values = make(3, num_nodes, parents=parents, spec_steps=num_nodes, dtype=dtype, device=device)
    result, _ = check_operation(PATH, values, case=f"N = {num_nodes}")
    for request, row in enumerate(parents.tolist()):
        depth = [0]
        for parent in row[1:]:
            depth.append(depth[parent] + 1)
        children = [row.count(node) for node in range(num_nodes)]
        described = [int(field[request]) for field in result[:4]]
        assert described == [max(depth), num_nodes, children.count(0), max(children)]
        assert result.nodes_per_depth[request].tolist() == [depth.count(level) for level in range(num_nodes + 1)]


@pytest.mark.parametrize("num_nodes", [1, 2, 33, 256])
def test_chains_and_stars(num_nodes, device):
    """The longest paths, along children and along siblings; depths past spec_steps are in no column."""
    node = torch.arange(num_nodes)
    parents = torch.stack([node - 1, torch.where(node > 0, 0, -1)])
    result, _ = check_operation(PATH, make(2, num_nodes, parents=parents, spec_steps=3, device=device))
    most = num_nodes - 1
    assert result.depths.tolist() == [most, min(most, 1)]
    assert result.max_branching.tolist() == [min(most, 1), most]
    assert result.num_leaves.tolist() == [1, max(most, 1)]
    assert result.nodes_per_depth[0].tolist() == [int(level < num_nodes) for level in range(4)]
