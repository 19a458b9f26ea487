"""`verify_tree`, the front door of two ops: greedy without a sampling parameter, else sample and match."""

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
    """Verifies trees of `build_tree`, greedily or by sampling; both are lossless.

    Without a sampling parameter (temperature, seeds, top_k, top_p, min_p) this is `verify_tree_greedy`. With one it is
    `verify_tree_sampled`, which needs target_logits, positions, seeds and temperature; rows of temperature 0 stay
    greedy. The lossy rules have ops of their own, which nobody calls by accident: `verify_tree_typical`,
    `verify_tree_topp`.
    Symbols: B requests, N nodes of a tree (1..1024), its root (node 0) included, V tokens, S = spec_steps. Integers may
    be int32 or int64.

    Args:
        candidates: [B, N] int. Tokens of the nodes; node 0 is the root.
        retrieve_index: [B, N] int. b * N + i for node i of request b.
        retrieve_next_token: [B, N] int. First child of each node, -1 for none.
        retrieve_next_sibling: [B, N] int. Next sibling of each node, -1 for none.
        target_logits: None or [B * N, V] fp32, fp16 or bf16. Unit stride along V.
        target_predict: None or [B, N] int. Greedy only, instead of target_logits: the target's token at every node.
        positions: None or [B * N] int. For sampling: position of each node; a token drawn at a node has position + 1.
        seeds: None or [B] int. For sampling: seed of each request.
        temperature: None or [B] fp32. For sampling; 0 (anything below 1e-5): greedy.
        top_k: None or [B] int. Tokens that top-k keeps; off at <= 0 or >= V.
        top_p: None or [B] fp32. Share of what top-k left that top-p keeps; off at >= 1.
        min_p: None or [B] fp32. Keeps tokens of at least min_p times the largest probability; off at <= 0.
        accept_policy: "normal", "reject_all", "accept_all" or "simulate", as in `verify_tree_greedy`. Seeds that come
            with "simulate" alone do not ask for sampling.
        simulated_rates: None or [S] fp32. Of "simulate" only, which needs seeds and positions as well: the probability
            that at least 1, 2, .. S drafts are accepted.
        spec_steps: S, 0..1024: the most drafts that can be accepted.
        out: three tensors to write into, for either rule.

    Returns:
        A named tuple, every element of which is written; `verify_tree_sampled` itself returns more:
        predicts: [B * N] int32. The target's token at every node of the path, -1 elsewhere.
        accept_index: [B, S + 1] int32. retrieve_index of the path's nodes, root first, -1 padded.
        accept_token_num: [B] int32. Accepted drafts; the bonus is not counted.
        A link that does not point forward within the tree counts as none. A row whose root has a retrieve_index outside
        the request is dead, with predicts and accept_index -1, accept_token_num 0.

    Raises:
        ValueError, TypeError: what the op that is called refuses, an argument that sampling needs as well, or
            target_predict together with a sampling parameter; the message names it.

    Source:
        EAGLE, https://arxiv.org/abs/2401.15077, and EAGLE-2, https://arxiv.org/abs/2406.16858; links and outputs as in
        SGLang's verify_tree_greedy. One function for both rules is eagle_kernels' own.

    Example:
        >>> tree = (torch.tensor([[4, 1, 2]]), torch.arange(3)[None],  # two children of the root, of tokens 1 and 2
        ...         torch.tensor([[1, -1, -1]]), torch.tensor([[-1, 2, -1]]))
        >>> logits = 100 * torch.eye(5)[[2, 0, 4]]  # the target is sure of 2 at the root, and of 4 at node 2
        >>> eagle_kernels.verify_tree(*tree, logits, spec_steps=1).predicts.tolist()  # greedy
        [2, -1, 4]
        >>> eagle_kernels.verify_tree(
        ...     *tree, logits, positions=torch.tensor([7, 8, 8]), seeds=torch.tensor([1]), temperature=torch.ones(1),
        ...     spec_steps=1).predicts.tolist()
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
        raise ValueError(f"eagle_kernels.verify_tree: {', '.join(missing)} must be given too for sampling, got None")
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
