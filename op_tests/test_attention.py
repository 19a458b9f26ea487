"""What all ops of attention keep: head sizes, types, a scale, no requests, pages far away."""

import pytest
import torch

import eagle_kernels

from .harness import assert_equal
from .harness.ahead_of_time import module_of_tests
from .ops.attention.cases import EVERY_HEAD_DIM, beyond_int32, with_nan_beside

PATHS = ["attention.gqa_decode", "attention.prefill_attention", "attention.tree_attention"]


def make(path, lengths, head_dim, group_size, num_kv_heads, page_size, dtype, *, num_rows=3, **options) -> dict:
    """Requests of these numbers of keys, in the pool; prompts and trees have a few rows each."""
    make, heads = module_of_tests(path).make, (head_dim, group_size, num_kv_heads, page_size, dtype)
    if path == "attention.gqa_decode":
        return make(*heads, lengths, **options)
    if path == "attention.prefill_attention":
        return make([num_rows] * len(lengths), [length - num_rows for length in lengths], *heads, **options)
    return make(num_rows, num_rows, *heads, [length - num_rows for length in lengths], **options)


@pytest.mark.smoke
@pytest.mark.parametrize("path", PATHS)
def test_every_head_size_reads_its_own_columns_alone(path, device):
    for head_dim in EVERY_HEAD_DIM:
        values = with_nan_beside(make(path, [7], head_dim, 2, 2, 4, torch.float32, device=device))
        actual = module_of_tests(path).check(values, f"D={head_dim}")
        assert actual.output[..., :2, :].isfinite().all(), head_dim


@pytest.mark.smoke
@pytest.mark.parametrize("path", PATHS)
def test_bfloat16_and_a_scale(path, device):
    values = make(path, [70, 3], 64, 2, 2, 16, torch.bfloat16, device=device)
    module_of_tests(path).check(values, "bfloat16")
    module_of_tests(path).check(values | {"sm_scale": 0.5}, "sm_scale")


@pytest.mark.parametrize("form", ["block_table", "csr"])
@pytest.mark.parametrize("path", PATHS)
def test_no_requests(path, form, device):
    values = make(path, [], 64, 4, 1, 16, torch.float16, form=form, device=device)
    result = getattr(eagle_kernels.raw, path.rpartition(".")[2])(**values)
    rows = (0, 3) if path == "attention.tree_attention" else (0,)
    assert result.output.shape == (*rows, 4, 64) and result.lse.shape == (*rows, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
def test_pages_past_2_31_elements(path, device):
    values = make(path, [130, 70], 128, 4, 8, 16, torch.bfloat16, num_rows=40, device=device)
    results = [getattr(eagle_kernels.raw, path.rpartition(".")[2])(**each) for each in (values, beyond_int32(values))]
    assert_equal(path, "far pages", "output", results[1].output, results[0].output)
