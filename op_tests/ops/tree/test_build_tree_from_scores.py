"""build_tree_from_scores against its reference and against the two ops that it joins."""

import pytest
import torch

import eagle_kernels
from op_tests.harness import assert_equal, check_operation, sweep
from op_tests.ops.tree.cases import make_scored as make
from op_tests.ops.tree.masks import MODES

PATH = "tree.build_tree_from_scores"

# (batch, topk, spec_steps, nodes): roots alone, chains, stars, every candidate kept, word borders, the largest tree
SHAPES = [(1, 1, 1, 1), (1, 1, 1, 2), (2, 1, 4, 5), (3, 8, 1, 9), (2, 4, 3, 8), (1, 3, 4, 31), (2, 4, 3, 37),
          (1, 8, 5, 64), (1, 10, 8, 60), (1, 10, 3, 65), (1, 8, 5, 256)]  # fmt: skip


def ahead_of_time_cases():
    yield "N=8 full_mask", make(2, 4, 3, 8, mode="full_mask")
    yield "N=64 C=4096 int32", make(1, 16, 16, 64, dtype=torch.int32)


size_sweep = sweep(lambda batch_size: make(batch_size, 4, 3, 8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, device):
    mode = MODES[SHAPES.index(shape) % (4 if shape[3] <= 32 else 3)]
    check_operation(PATH, make(*shape, mode=mode, device=device), case=f"{shape} {mode}")


@pytest.mark.parametrize("is_tied", [False, True], ids=["few ties", "ties everywhere"])
def test_equals_the_two_ops(is_tied, device):
    values = make(3, 4, 4, 20, is_tied=is_tied, device=device)
    joined = eagle_kernels.raw.build_tree_from_scores(**values)
    scores, tokens = values.pop("candidate_scores"), values.pop("candidate_tokens")
    best = eagle_kernels.raw.organize_draft_results(scores, tokens, num_verify_tokens=20)
    tree = eagle_kernels.raw.build_tree(
        **values, top_scores_index=best.top_scores_index, draft_tokens=best.draft_tokens
    )
    for name, expected in {**tree._asdict(), "top_scores_index": best.top_scores_index}.items():
        assert_equal("build_tree_from_scores", "joined", name, getattr(joined, name), expected)


def test_every_node_hangs_below_the_root(device):
    """With ties everywhere only the order by id keeps parents in the tree and before their children."""
    tree = eagle_kernels.raw.build_tree_from_scores(**make(8, 4, 4, 12, is_tied=True, device=device))
    depth = tree.positions.view(8, 12) - tree.positions.view(8, 12)[:, :1]
    assert (depth[:, 1:] > 0).all()
