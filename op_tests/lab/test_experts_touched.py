"""Experts touched by rows of text: counted as they are, next to what even routing gives."""

import pytest
import torch

from bench.lab.experts_touched import count_touched, touched_by_rows
from eagle_kernels.engine.models.loading import load_target

pytest.importorskip("transformers")


def test_counts_by_hand():
    experts = torch.tensor([[0, 1], [1, 2], [3, 4], [3, 4], [9, 9]])
    assert count_touched(experts, 1) == pytest.approx(9 / 5)
    assert count_touched(experts, 2) == pytest.approx((3 + 2) / 2)
    assert count_touched(experts, 4) == 5


@pytest.mark.parametrize("case", ["qwen3 moe", "ernie moe"])
def test_a_model_is_measured(case, tmp_path):
    from op_tests.engine.families import CASES, SIZES, write_target

    write_target(*CASES[case], tmp_path)
    target = load_target(tmp_path)
    table = list(touched_by_rows(target, torch.randint(SIZES["vocab_size"], (60,))))
    assert [num_rows for num_rows, _, _ in table] == [1, 2, 4, 8, 16, 32]
    assert table[0][1:] == (pytest.approx(3), pytest.approx(3))
    assert all(3 <= touched <= 7 for _, touched, _ in table) and table[-1][1] > 6
    assert not any(module._forward_hooks for module in target.modules())
