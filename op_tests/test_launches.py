"""A launcher checks, allocates and launches: as often as its docstring says, and it calls no other torch operator."""

import re

import pytest
import torch

from eagle_kernels.primitives.fp8 import FP8
from eagle_kernels.runtime.target import has_fp8

from .harness import assert_only_launches, assume_multiprocessors, to_device
from .harness.ahead_of_time import PATHS
from .harness.cases import cases_of, module_of_op, tensors_of

# launches of each case in turn, where the docstring names several numbers; tuning rows of a GPU may choose another one
NUMBERS = {
    "attention.gqa_decode": [1] * 16 + [2, 2, 1, 2],
    "attention.tree_attention": [2] * 8 + [1] + [2] * 6 + [1] + [2] * 8,
    "draft.ngram_match": [2, 2, 2, 3, 3],
    "experts.fused_experts": [3] * 6 + [4] * 2 + [3] * 26,
    "latent.mla_decode": [1] * 9 + [2, 2],
    "latent.mla_tree_attention": [2, 1, 2, 1, 1, 2, 2, 2, 2, 1, 1],
    "linear.linear_fp8": [1] * 4 + [2] * 8 + [1] * 10 + [2, 2, 1, 1],
    "linear.linear_w4a16": [1] * 29 + [2, 1, 1],
    "linear.linear_w8a16": [1] * 27 + [2, 1],
    "rejection.verify_chain": [4, 5, 5, 6, 5, 4, 4, 4],
    "rejection.verify_tree_rejection": [1, 1, 2, 2, 9, 5, 20, 1],
    "rejection.verify_tree_traversal": [2, 3, 3, 1, 10, 6, 2],
    "sampling.verify_tree_sampled": [3, 3, 3, 3, 7, 12, 12, 12],
    "tree.build_tree_from_blocks": [2, 2, 2, 1, 1, 1],
    "verify.verify_tree_greedy": [1, 1, *[2, 7] * 6, 1, 2],
}


@pytest.mark.smoke
@pytest.mark.parametrize("path", PATHS)
def test_launches_and_nothing_else(path, device, monkeypatch):
    assume_multiprocessors(monkeypatch, 132)
    cases = list(cases_of(path))
    said = re.search(r"^Launches:?\s+(\d+)", module_of_op(path).__doc__, re.MULTILINE)
    numbers = NUMBERS[path] if path in NUMBERS else [int(said[1])] * len(cases)
    for values, launches in zip(cases, numbers, strict=True):
        if device.type == "cpu":
            assert_only_launches(path, values, launches)
        elif all(tensor.dtype not in FP8 or has_fp8(device, tensor.dtype) for tensor in tensors_of(values).values()):
            assert_only_launches(path, to_device(values, device), set(numbers))
    assert path in NUMBERS or said


def test_one_node_takes_no_launch(device):
    values = {name: torch.zeros(2, 40, device=device) for name in ("candidate_scores", "candidate_tokens")}
    values["candidate_tokens"] = values["candidate_tokens"].long()
    assert_only_launches("tree.organize_draft_results", values | {"num_verify_tokens": 1}, launches=0)
