"""What the ops that rank candidates have in common on the host: checks and tuning rows."""

from __future__ import annotations

import torch

from ....runtime import check, tuning

MAX_CANDIDATES = 4096

# Few candidates are counted by one warp, which waits for no other; more than four warps wait longer than they count.
# bench/results/NVIDIA_H100_80GB_HBM3/tuning/build_tree.txt
TUNING = {"default": {"candidates_per_warp": 128, "max_warps": 4}}


def candidates_contract(args: check.Arguments) -> int:
    """Checks the candidates of an op that ranks them, and returns their number."""
    args.tensor("candidate_scores", ("B", "C"), (torch.float32,), contiguous=1)
    args.tensor("candidate_tokens", ("B", "C"), check.INTEGER, contiguous=1)
    num_candidates = args.size("C")
    if num_candidates > MAX_CANDIDATES:
        args.fail("candidate_scores", f"have at most {MAX_CANDIDATES} candidates", num_candidates)
    return num_candidates


def ranking_warps(block_candidate: int, device: torch.device) -> int:
    """Returns the warps of a program that ranks this many candidates."""
    tuned = tuning.row(TUNING, device)
    return min(max(block_candidate // tuned["candidates_per_warp"], 1), tuned["max_warps"])
