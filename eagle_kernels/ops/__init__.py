"""L2, the operators. `eagle_kernels.<op>` is the public function, `eagle_kernels.raw.<op>` the bare launcher.

`verify_tree` is no op of its own but the front door of two; `generate_token_bitmask` runs on the host.
"""

from __future__ import annotations

from importlib import import_module

import torch

from ..runtime import check
from ..runtime.library import operator
from .registry import OPS
from .token_bitmask import generate_token_bitmask
from .tree.build_tree import Output as BuildTreeOutput
from .tree.build_tree import TreeMaskMode
from .verify.verify_commit import Output as CommitOutput
from .verify.verify_tree_greedy import Output as VerifyOutput
from .verify.verify_tree_sampled import Output as SampledOutput


def _operator(path: str):
    """Returns the public function of the op `eagle_kernels/ops/<path>.py` and its reference of the same name."""
    return operator(import_module("." + path, __name__), import_module("..reference.ops." + path, __name__))


_public = {name: _operator(path) for name, path in OPS.items()}
globals().update(_public)
# by name as well, for verify_tree
verify_tree_greedy, verify_tree_sampled = _public["verify_tree_greedy"], _public["verify_tree_sampled"]


def verify_tree(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_logits: torch.Tensor | None = None,
    *,
    target_predict: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    accept_policy: str = "normal",
    simulated_rates: torch.Tensor | None = None,
    spec_steps: int,
    out: VerifyOutput | None = None,
) -> VerifyOutput:
    """Verifies trees of `build_tree`; returns `predicts [B * N]`, `accept_index [B, S + 1]`, `accept_token_num [B]`.

    Both rules return these three, and take three buffers as `out`; verify_tree_sampled returns more.
    Without a sampling parameter (temperature, seeds, top_k, top_p, min_p) the walk is greedy, from
    `target_logits [B * N, V]` or the argmax `target_predict [B, N]` (verify_tree_greedy). With one it samples and
    matches (verify_tree_sampled): then `target_logits`, `positions`, `seeds` and `temperature` are needed, and rows of
    temperature 0 stay greedy. `accept_policy`, `simulated_rates` (which needs `seeds` and `positions` as well): for
    timing, see verify_tree_greedy.
    Both rules, `greedy` and `target_match`, are lossless. The lossy ones have ops of their own, which nobody calls by
    accident: verify_tree_typical, verify_tree_topp.
    Raises ValueError where the arguments do not fit together.
    """
    links = (candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling)
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    policy = {"accept_policy": accept_policy, "simulated_rates": simulated_rates}
    if accept_policy == "simulate":
        policy |= {"seeds": seeds, "positions": positions}  # then seeds alone do not ask for sampling
    if all(value is None for value in (temperature, *filters.values())) and (seeds is None or "seeds" in policy):
        return verify_tree_greedy(*links, target_predict, target_logits, spec_steps=spec_steps, **policy, out=out)
    needed = {"target_logits": target_logits, "positions": positions, "seeds": seeds, "temperature": temperature}
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise ValueError(f"eagle_kernels.verify_tree: sampling needs {', '.join(missing)} as well, got None")
    if target_predict is not None:
        raise ValueError("eagle_kernels.verify_tree: target_predict must not be given for sampling, which draws tokens")
    policy = {"accept_policy": accept_policy, "simulated_rates": simulated_rates}
    if out is not None:
        # what is no tensor is named by the op
        out = _with_unasked(check.unpack("verify_tree", out, 3), spec_steps, getattr(target_logits, "device", None))
    return VerifyOutput(*verify_tree_sampled(*links, **needed, **filters, **policy, spec_steps=spec_steps, out=out)[:3])


def _with_unasked(out: tuple, spec_steps: int, device: torch.device | None) -> SampledOutput:
    """Returns the buffers of verify_tree_sampled: three that are given, and empty ones for what nobody asked for."""
    row = (0, check.Arguments("verify_tree", {"spec_steps": spec_steps}).integer("spec_steps", 0) + 1)
    unasked = {
        "logprobs": (row, torch.float32),
        "raw_logprobs": (row, torch.float32),
        "new_seq_lens": (0, torch.int64),
        "bonus_tokens": (0, torch.int64),
        "accept_lengths": (0, torch.int32),
        "tokens": (row, torch.int64),
        "hidden_rows": (row, torch.int64),
        "last_row": (0, torch.int64),
    }
    empty = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in unasked.items()}
    return SampledOutput(*out, **empty)


__all__ = [
    "BuildTreeOutput",
    "CommitOutput",
    "TreeMaskMode",
    "VerifyOutput",
    "generate_token_bitmask",
    "verify_tree",
    *OPS,
]
