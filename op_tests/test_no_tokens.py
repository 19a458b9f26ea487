"""A child that carries no token of the vocabulary is passed over; its sibling, which does, is accepted."""

import itertools

import pytest
import torch

from eagle_kernels.ops.rejection import verify_tree_rejection, verify_tree_traversal
from eagle_kernels.ops.rejection.shared import prepare_pair
from eagle_kernels.ops.sampling import verify_tree_sampled
from eagle_kernels.ops.verify import verify_tree_greedy, verify_tree_typical
from op_tests.harness import check_operation, to_device
from op_tests.harness.retune import retune
from op_tests.harness.trees import stars

# of the interpreter, in lanes that are masked
pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")

TILE = 16
GOOD = 3


def probabilities(count: int, size: int) -> torch.Tensor:
    """Of all nodes; what a token past the end of the root's row would find in the next row is certain."""
    probs = torch.zeros(3 * count, size)
    probs[::3, GOOD] = 1.0
    probs[1::3, :2] = 0.5
    probs[2::3, 0] = 1.0
    return probs


def values_of(op: str, nones: list[int], size: int, kind: str) -> dict:
    """Of each request a root, a child of no token, and its sibling."""
    count = len(nones)
    probs, one = probabilities(count, size), torch.ones(count)
    values = stars([[none, GOOD] for none in nones], root=7) | {"spec_steps": 1}
    drawn = {"positions": torch.arange(3 * count), "seeds": torch.arange(count), "temperature": one}
    of_rows = {f"{name}_{kind}": probs if kind == "probs" else probs.log() for name in ("target", "draft")}
    of_rows |= {f"{name}_{other}": None for name in ("target", "draft") for other in ({"probs", "logits"} - {kind})}
    ids = torch.tensor([[GOOD, 0]] * (3 * count))
    return values | {
        "verify.verify_tree_greedy": {"target_logits": probs},
        "verify.verify_tree_typical": drawn | {"target_logits": probs.log(), "epsilon": one / 9, "delta": one / 3},
        "verify.verify_tree_coins": {
            "target_probs": probs, "uniform_samples": torch.full((count, 3), 0.75),
            "uniform_samples_for_final_sampling": one / 2,
        },
        "verify.verify_tree_topp": {
            "candidate_ids": ids, "candidate_lens": torch.ones(3 * count).long(),
            "target_predict": torch.full((count, 3), GOOD),
        },
        "sampling.verify_tree_sampled": drawn | {"target_logits": probs.log()},
        "rejection.verify_tree_rejection": drawn | of_rows,
        "rejection.verify_tree_traversal": drawn | of_rows,
    }[op]  # fmt: skip


OPS = [
    ("verify.verify_tree_typical", "logits", False),
    ("verify.verify_tree_coins", "probs", False),
    ("verify.verify_tree_topp", "ids", False),
    *(("verify.verify_tree_greedy", "logits", by_level) for by_level in (False, True)),
    *(("sampling.verify_tree_sampled", "logits", by_level) for by_level in (False, True)),
    *(("rejection.verify_tree_traversal", kind, False) for kind in ("logits", "probs")),
    *(("rejection.verify_tree_rejection", *way) for way in itertools.product(("logits", "probs"), (False, True))),
]


@pytest.mark.parametrize(("op", "kind", "by_level"), OPS)
def test_a_child_without_a_token_is_passed_over(op, kind, by_level, device, monkeypatch):
    """Whether a row is one tile, or two that are full, so that the next id is in no tile."""
    for table in (
        verify_tree_rejection.TUNING, verify_tree_traversal.TUNING, prepare_pair.SLICE_TUNING,
        verify_tree_typical.SCAN_TUNING,
    ):  # fmt: skip
        retune(monkeypatch, table, BLOCK_VOCAB=TILE)
    retune(monkeypatch, verify_tree_greedy.CHOICE_TUNING, level_bytes=2**40 * (not by_level))
    monkeypatch.setattr(verify_tree_sampled, "draws_all_rows", lambda *_: not by_level)
    monkeypatch.setattr(verify_tree_rejection, "goes_by_level", lambda *_: by_level)
    for size in (TILE, 2 * TILE):
        nones = [-1, size, size + 1, 2**31 - 1]
        values = to_device(values_of(op, nones, size, kind), device)
        output, _ = check_operation(op, values, case=f"{size}")
        assert output.accept_index.tolist() == [[3 * request, 3 * request + 2] for request in range(len(nones))]
