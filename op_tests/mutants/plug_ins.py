"""Bugs of the plug-ins for servers and of the packages that have other projects' names."""

from __future__ import annotations

from .mutant import INTEGRATIONS, SGLANG, Mutant

_SEEDED = ["op_tests/integrations/test_sglang_sampling.py::test_one_seed_gives_one_text"]

MUTANTS = [
    Mutant(
        "the seed of the neighbour",
        [(SGLANG + "verification.py", "seeds(batch.req_pool_indices)", "seeds(batch.req_pool_indices.roll(1))")],
        _SEEDED,
    ),
    Mutant(
        "the penalties of the root for all nodes",
        [(SGLANG + "verification.py", "penalize(tree, logits", "penalize((*tree[:2], tree[3], tree[3]), logits")],
        _SEEDED,
    ),
    Mutant(
        "min-p left out",
        [(SGLANG + "sampling.py", "info.min_ps if info.need_min_p_sampling else None", "None")],
        ["op_tests/integrations/test_sglang_sampling.py::test_filters_that_leave_one_token"],
    ),
    Mutant(
        "thresholds of AITER's in each other's place",
        [(INTEGRATIONS + "aiter.py", "(threshold_single, threshold_acc)\n", "(threshold_acc, threshold_single)\n")],
        ["op_tests/integrations/test_aiter.py::test_each_threshold_of_the_walk_by_coins_has_its_place"],
    ),
]  # fmt: skip
