"""Every op that lists slots against its reference: on all shapes of its own tests, whole, with each of its options."""

import itertools

import pytest
import torch

from op_tests.harness import check_operation
from op_tests.harness.ahead_of_time import module_of_tests

INTEGERS = (torch.int32, torch.int64)
OPTIONS = {
    "accepted_cache_locs": {"form": module_of_tests("kv.accepted_cache_locs").FORMS, "dtype": INTEGERS},
    "align_evict_mask_to_page_size": {"dtype": INTEGERS, "is_chain": (True, False)},
    "assign_req_to_token": {"table_dtype": INTEGERS},
    "chain_kv_indices": {"dtype": INTEGERS},
    "draft_cache_locs": {"dtype": INTEGERS, "is_step_major": (False, True)},
    "draft_kv_indices": {"dtype": INTEGERS},
    "extend_cache_locs": {"dtype": INTEGERS, "is_uniform": (False, True)},
    "find_slots": {"dtype": INTEGERS, "max_length": (None, 25)},
    "kv_indices": {"dtype": INTEGERS},
}
CASES = [(op, dict(zip(names, given))) for op, names in OPTIONS.items() for given in itertools.product(*names.values())]


@pytest.mark.parametrize(("op", "options"), CASES, ids=str)
def test_match_reference(op, options, device):
    module = module_of_tests(f"kv.{op}")
    for shape in module.SHAPES:
        output, _ = check_operation(f"kv.{op}", module.make(*shape, **options, device=device), case=str(shape))
        assert getattr(output, "overflow", torch.zeros(1)).sum() == 0
