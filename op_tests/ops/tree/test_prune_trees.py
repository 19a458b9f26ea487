"""prune_trees against its reference: scores that fall along paths and others, equal ones, malformed masks, any room."""

import pytest
import torch

import eagle_kernels
from op_tests.harness import check_operation, sweep, to_device
from op_tests.ops.tree.masks import in_layout, random_parents, visible_from

PATH = "tree.prune_trees"
# (batch, nodes, rows)
SHAPES = [(1, 1, 1), (1, 8, 5), (3, 8, 3), (3, 8, 11), (7, 6, 42), (5, 64, 100), (2, 65, 90), (3, 130, 200),
          (40, 5, 99)]  # fmt: skip


def make(batch_size, num_nodes, max_rows, *, falls=True, seed=0, dtype=torch.int64, device="cpu"):
    """Random trees; scores fall along paths unless `falls` is off."""
    torch.manual_seed(seed)
    parents, lengths = random_parents(batch_size, num_nodes), torch.zeros(batch_size, dtype=torch.int64)
    scores = -torch.rand(batch_size, num_nodes)
    scores[:, 0] = 0
    for node in range(1, num_nodes) if falls else ():
        scores[:, node] += scores.gather(1, parents[:, node, None])[:, 0]
    values = {
        "draft_tokens": torch.randint(2**31 - 1, (batch_size, num_nodes)).to(dtype),
        "tree_mask": in_layout(visible_from(parents), lengths, "packed"),
        "scores": scores[:, 1:].contiguous(),
    }
    return to_device(values, device) | {"max_rows": max_rows}


def ahead_of_time_cases():
    yield "64 nodes", make(3, 64, 50) | {"max_drafts": torch.tensor([20])}
    yield "int32, 130 nodes", make(2, 130, 100, dtype=torch.int32)


size_sweep = sweep(lambda batch_size, max_rows: make(batch_size, 8, batch_size + max_rows), (0, 1, 100))


@pytest.mark.parametrize("falls", [True, False], ids=["falling", "any order"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, falls, device):
    batch_size, num_nodes, max_rows = shape
    values = make(*shape, falls=falls, device=device)
    output, _ = check_operation(PATH, values, case=f"{shape} {falls}")
    total = output.num_nodes.sum().item()
    assert total <= max_rows
    if falls:  # nothing is lost
        assert total == min(max_rows, batch_size * num_nodes)


def test_what_is_kept_in_words(device):
    """Two trees, 0 - 1 - 2 with 3 beside 1, of which three drafts stay: the third best is a child of the best."""
    sees = visible_from(torch.tensor([[-1, 0, 1, 0]] * 2))
    values = {
        "draft_tokens": torch.tensor([[9, 5, 6, 7], [8, 1, 2, 3]]),
        "tree_mask": in_layout(sees, torch.zeros(2).long(), "packed"),
        "scores": torch.tensor([[-0.1, -0.4, -2.0], [-0.9, -1.0, -0.3]]),
    }
    output, _ = check_operation(PATH, to_device(values, device) | {"max_rows": 5})
    assert output.draft_tokens.tolist() == [[9, 5, 6, -1], [8, 3, -1, -1]]
    assert output.tree_mask[..., 0].tolist() == [[1, 3, 7, 0], [1, 3, 0, 0]]
    assert output.num_nodes.tolist() == [3, 2]


def test_links_of_what_is_kept(device):
    """By `tree_from_mask`: each node that stays has its old parent; the others are linked to nothing."""
    values = make(6, 20, 60, seed=3, device=device)
    pruned = eagle_kernels.raw.prune_trees(**values)
    lengths = torch.full((6,), 10, device=device)
    old = eagle_kernels.raw.tree_from_mask(values["tree_mask"], lengths, num_verify_tokens=20)
    new = eagle_kernels.raw.tree_from_mask(pruned.tree_mask, lengths, num_verify_tokens=20)
    tokens = values["draft_tokens"].tolist()
    paths = [paths_of(tokens[b], old.retrieve_next_token[b], old.retrieve_next_sibling[b]) for b in range(6)]
    for b, count in enumerate(pruned.num_nodes.tolist()):
        kept = paths_of(pruned.draft_tokens[b].tolist(), new.retrieve_next_token[b], new.retrieve_next_sibling[b])
        assert len(kept) == count and set(kept) <= set(paths[b])


def paths_of(tokens, next_token, next_sibling) -> list[tuple[int, ...]]:
    """Returns the tokens from the root to each node that links lead to."""
    found, open_nodes = [], [(0, (tokens[0],))]
    while open_nodes:
        node, path = open_nodes.pop()
        found.append(path)
        child = int(next_token[node])
        while child >= 0:
            open_nodes.append((child, (*path, tokens[child])))
            child = int(next_sibling[child])
    return found


@pytest.mark.parametrize("max_rows", [4, 6, 9, 13, 24])
def test_equal_scores_stay_in_the_order_of_requests(max_rows, device):
    values = make(4, 6, max_rows, device=device)
    values["scores"].fill_(-0.5)
    values["scores"][2, 3] = 0.0
    check_operation(PATH, values, case=str(max_rows))
    values["scores"].copy_(torch.tensor([0.0, -0.0, 0.0, -0.0, 0.0]).expand(4, 5))
    check_operation(PATH, values, case=f"zeros {max_rows}")


@pytest.mark.parametrize("most", [-(2**62), -1, 0, 1, 7, 11, 12, 2**62])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_device_says_how_many(most, dtype, device):
    most = max(min(most, torch.iinfo(dtype).max), torch.iinfo(dtype).min)
    values = make(4, 6, 15, device=device)
    max_drafts = torch.tensor([most], dtype=dtype, device=device)
    output, _ = check_operation(PATH, values | {"max_drafts": max_drafts}, case=str(most))
    assert output.num_nodes.sum() == 4 + min(max(most, 0), 11)
