"""`verify_tree`, the front door to two ops: greedy without a sampling parameter, else sample and match."""

from __future__ import annotations

from typing import Any

import torch

from ..runtime import check
from ..runtime.calls import with_kinds
from ..runtime.library import with_reference
from .operators import find, reference_of
from .sampling.verify_tree_sampled import Output as SampledOutput
from .verify.verify_tree_greedy import Output as VerifyOutput

_OPS = {op: find(op).function for op in ("verify_tree_greedy", "verify_tree_sampled")}


@with_kinds
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
    """Verifies trees from `build_tree`, greedily or by sampling; both are lossless.

    Without a sampling parameter (temperature, seeds, top_k, top_p, min_p) this is `verify_tree_greedy`. With one it is
    `verify_tree_sampled`, which needs target_logits, positions, seeds and temperature. The lossy rules are separate
    ops: `verify_tree_typical`, `verify_tree_topp`.
    Symbols: B requests, N nodes of a tree (1..1024; node 0 is the root), V tokens.

    Args:
        candidates: [B, N] int. Tokens of the nodes; -1 is never accepted.
        retrieve_index: [B, N] int. b * N + i for node i of request b.
        retrieve_next_token, retrieve_next_sibling: [B, N] int. First child and next sibling of each node, -1 for none.
            A link that does not point forward within the tree counts as none.
        target_logits: None or [B * N, V] fp32, fp16 or bf16. Unit stride along V.
        target_predict: None or [B, N] int. Greedy only, instead of target_logits: the target's tokens.
        positions: None or [B * N] int. Position of each node; a token drawn at a node has position + 1.
        seeds: None or [B] int. Seed of each request.
        temperature: None or [B] fp32. 0 (anything below 1e-5): greedy.
        top_k: None or [B] int. As in `sample_from_logits`.
        top_p, min_p: None or [B] fp32. Likewise.
        accept_policy: as in `verify_tree_greedy`. With "simulate", seeds alone do not ask for sampling.
        simulated_rates: None or [S] fp32. Likewise; needs seeds and positions.
        spec_steps: S, 0..1024: the most drafts to accept.
        out: three tensors to write into, for either rule.

    Returns:
        A named tuple (`verify_tree_sampled` itself returns more):
        predicts: [B * N] int32. The target's token at each node of the path, -1 elsewhere.
        accept_index: [B, S + 1] int32. retrieve_index of the path, root first, -1 padded.
        accept_token_num: [B] int32. Accepted drafts, without the bonus.

        A dead row, whose root has a retrieve_index outside the request, gives -1 and accept_token_num 0.

    Raises:
        ValueError, TypeError: as for the op called; also if sampling lacks an argument or has target_predict.

    Source:
        eagle_kernels' own.

    Example:
        >>> tree = [torch.tensor([x]) for x in ([4, 1, 2], [0, 1, 2], [1, -1, -1], [-1, 2, -1])]  # 4 above 1 and 2
        >>> logits = 100 * torch.eye(5)[[2, 0, 4]]  # the target is sure of 2 at the root, and of 4 at node 2
        >>> eagle_kernels.verify_tree(*tree, logits, spec_steps=1).predicts.tolist()  # greedy
        [2, -1, 4]
    """
    links = (candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling)
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    policy = {"accept_policy": accept_policy, "simulated_rates": simulated_rates}
    if accept_policy == "simulate":
        policy |= {"seeds": seeds, "positions": positions}  # then seeds alone do not ask for sampling
    if all(value is None for value in (temperature, *filters.values())) and (seeds is None or "seeds" in policy):
        predicted = target_predict, target_logits
        if "positions" not in policy and positions is not None:
            _check_positions(candidates, positions)
        return _call("verify_tree_greedy", *links, *predicted, spec_steps=spec_steps, **policy, out=out)
    needed = {"target_logits": target_logits, "positions": positions, "seeds": seeds, "temperature": temperature}
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise ValueError(f"eagle_kernels.verify_tree: {', '.join(missing)} must also be given for sampling, got None")
    if target_predict is not None:
        raise ValueError("eagle_kernels.verify_tree: target_predict must not be given for sampling, which draws tokens")
    policy = {"accept_policy": accept_policy, "simulated_rates": simulated_rates}
    if out is not None:
        # what is no tensor is named by the op
        out = _with_unasked(check.unpack("verify_tree", out, 3), spec_steps, getattr(target_logits, "device", None))
    sampled = _call("verify_tree_sampled", *links, **needed, **filters, **policy, spec_steps=spec_steps, out=out)
    return VerifyOutput(*sampled[:3])


with_reference(verify_tree, reference_of("verify_tree"))


def _check_positions(candidates: torch.Tensor, positions: torch.Tensor) -> None:
    """Checks positions where nothing is drawn at them."""
    args = check.Arguments("verify_tree", {"candidates": candidates, "positions": positions})
    args.tensor("candidates", ("B", "N"), check.INTEGER)
    args.tensor("positions", (args.size("B") * args.size("N"),), check.INTEGER)


def _call(op: str, *args: Any, **kwargs: Any) -> Any:
    """Calls an op, whose errors then name the function that was called."""
    if torch.compiler.is_compiling():
        return _OPS[op](*args, **kwargs)
    try:
        return _OPS[op](*args, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        text, own = str(error), f"eagle_kernels.{op}:"
        if not text.startswith(own):
            raise
        raise type(error)("eagle_kernels.verify_tree:" + text.removeprefix(own)) from None


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
