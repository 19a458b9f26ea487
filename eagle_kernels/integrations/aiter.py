"""The functions of AITER's speculative package (`aiter.ops.speculative` and its Triton kernels), on top of our ops.

    import eagle_kernels.integrations.aiter as speculative

Names, argument order, returned shapes and counts are AITER's; AITER is never imported. Its counts differ from
ours in two places: `accept_length` excludes the bonus token (our statistics include it), and its acceptance rate
divides by num_draft_tokens, the nodes verified with their root.

One difference is deliberate: trees are trees. AITER's CPU path links the nodes into a chain and its kernel walks one;
here mask, positions, links and walk are SGLang's, on which AITER is modeled (`sgl_kernel.py`). `use_triton` is accepted
and ignored: CPU tensors run the reference, GPU tensors the kernel. Ties go to the lower index.

`compute_tree_statistics`, `generate_token_bitmask` and `select_top_k_tokens` share their names with functions of
`eagle_kernels` that do more and take other arguments.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops import build_tree
from ..ops import organize_draft_results as _organize_draft_results
from ..ops import sample_from_logits as _sample_from_logits
from ..ops import select_top_k_tokens as _select_top_k_tokens
from ..runtime import check
from . import sgl_kernel
from .aiter_engine import EAGLEConfig, EAGLEInference
from .sgl_kernel import TreeMaskMode

__all__ = [
    "EAGLEConfig", "EAGLEInference", "TreeMaskMode", "build_tree_efficient_triton", "build_tree_kernel_efficient",
    "build_tree_kernel_triton", "build_tree_structure", "calculate_acceptance_rate", "compute_tree_statistics",
    "fast_topk_torch", "generate_token_bitmask", "next_power_of_2", "organize_draft_results", "pad_to_alignment",
    "sample_from_logits", "select_top_k_tokens", "tree_speculative_sampling_kernel", "verify_tree_greedy",
    "verify_tree_greedy_func", "verify_tree_greedy_kernel", "verify_tree_greedy_triton",
]  # fmt: skip

Tree = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


# aiter.ops.triton._triton_kernels.eagle


def build_tree_efficient_triton(
    verified_id: Tensor, parent_list: Tensor, top_scores_index: Tensor, draft_tokens: Tensor, seq_lens: Tensor,
    seq_lens_sum: int, topk: int, spec_steps: int, num_verify_tokens: int, tree_mask_mode: int = TreeMaskMode.FULL_MASK,
) -> Tree:  # fmt: skip
    """Builds every request's tree; returns tree_mask, positions, the three retrive_* and the tokens with their root.
    seq_lens_sum sizes a FULL_MASK; other modes ignore it. tree_mask is flat; QLEN_ONLY_BITPACKING (which AITER lists
    without packing) gives one word of 8, 16 or 32 bits for each node, as SGLang packs them."""
    mode = TreeMaskMode(tree_mask_mode)
    tree = build_tree(
        verified_id, sgl_kernel.parent_slots(parent_list, spec_steps), top_scores_index, draft_tokens, seq_lens,
        seq_lens_sum if mode == TreeMaskMode.FULL_MASK else None,
        topk=topk, spec_steps=spec_steps, num_verify_tokens=num_verify_tokens,
        tree_mask_mode=sgl_kernel.layout(mode), any_order=True,
    )  # fmt: skip
    return (tree.tree_mask.view(-1), *tree[1:])


def verify_tree_greedy_triton(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, target_predict: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Calls `sgl_kernel.verify_tree_greedy`, which writes the first three arguments in place, and returns these."""
    links = (retrive_index, retrive_next_token, retrive_next_sibling)
    sgl_kernel.verify_tree_greedy(predicts, accept_index, accept_token_num, candidates, *links, target_predict)
    return predicts, accept_index, accept_token_num


class _Kernel:
    """Makes a function callable like a Triton kernel, `kernel[grid](...)`; our ops choose their own grids."""

    def __init__(self, function: Callable[..., None]):
        functools.update_wrapper(self, function)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.__wrapped__

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self.__wrapped__(*arguments, **options)


@_Kernel
def build_tree_kernel_triton(
    parent_list: Tensor, selected_index: Tensor, verified_seq_len: Tensor, tree_mask: Tensor, positions: Tensor,
    retrive_index: Tensor, retrive_next_token: Tensor, retrive_next_sibling: Tensor,
    topk: int, depth: int, draft_token_num: int, draft_token_num_p2: int, tree_mask_mode: int,
) -> None:  # fmt: skip
    """Calls `sgl_kernel.build_tree_kernel_efficient`, which writes tree_mask to retrive_next_sibling.
    draft_token_num_p2 is accepted and ignored."""
    written = (tree_mask, positions, retrive_index, retrive_next_token, retrive_next_sibling)
    sizes = (topk, depth, draft_token_num, tree_mask_mode)
    sgl_kernel.build_tree_kernel_efficient(parent_list, selected_index, verified_seq_len, *written, *sizes)


@_Kernel
def verify_tree_greedy_kernel(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, target_predict: Tensor,
    num_speculative_tokens: int, num_draft_tokens: int,
) -> None:  # fmt: skip
    """Calls `sgl_kernel.verify_tree_greedy`, which writes the first three arguments; checks the two numbers."""
    _check_sizes("verify_tree_greedy_kernel", accept_index, num_speculative_tokens, candidates, num_draft_tokens)
    links = (retrive_index, retrive_next_token, retrive_next_sibling)
    sgl_kernel.verify_tree_greedy(predicts, accept_index, accept_token_num, candidates, *links, target_predict)


@_Kernel
def tree_speculative_sampling_kernel(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, uniform_samples: Tensor, uniform_samples_final: Tensor,
    target_probs: Tensor, draft_probs: Tensor | None,
    threshold_single: float, threshold_acc: float, vocab_size: int, num_speculative_tokens: int, num_draft_tokens: int,
) -> None:  # fmt: skip
    """Calls `sgl_kernel.tree_speculative_sampling_target_only`, which writes the first three arguments.
    draft_probs is not read: drafts were chosen, not drawn, and SGLang's walk, on which AITER is modeled, keeps the
    target's distribution without them (AITER's own kernel divides by them, and does not)."""
    op = "tree_speculative_sampling_kernel"
    _check_sizes(op, accept_index, num_speculative_tokens, candidates, num_draft_tokens)
    _check_width(op, "vocab_size", vocab_size, "target_probs", target_probs)
    links, coins = (retrive_index, retrive_next_token, retrive_next_sibling), (uniform_samples, uniform_samples_final)
    written, thresholds = (predicts, accept_index, accept_token_num), (threshold_single, threshold_acc)
    sgl_kernel.tree_speculative_sampling_target_only(
        *written, candidates, *links, *coins, target_probs, draft_probs, *thresholds
    )


def _check_sizes(op: str, accept_index: Tensor, width: int, candidates: Tensor, num_nodes: int) -> None:
    _check_width(op, "num_speculative_tokens", width, "accept_index", accept_index)
    _check_width(op, "num_draft_tokens", num_nodes, "candidates", candidates)


def _check_width(op: str, name: str, value: int, of: str, tensor: Tensor) -> None:
    if tensor.shape[-1] != value:
        raise ValueError(f"{op}: {name} must be the width of {of}, {tensor.shape[-1]}, got {value}")


# the names under which AITER exports two of them again
build_tree_kernel_efficient = build_tree_efficient_triton
verify_tree_greedy_func = verify_tree_greedy_triton


# aiter.ops.speculative.eagle_utils


def organize_draft_results(
    score_list: Sequence[Tensor], token_list: Sequence[Tensor], parents_list: Sequence[Tensor], num_draft_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keeps the best num_draft_tokens - 1 candidates of all steps, ascending by flat id.
    A list has one tensor per step: scores [B, n] (or SGLang's [B, n, K]), tokens [B, n], parents [B, m].
    Returns parent_list (all steps but the last), top_scores_index and draft_tokens [B, num_draft_tokens - 1]."""
    kept = _organize_draft_results(
        torch.cat(list(score_list), dim=1).flatten(1).float(),
        torch.cat(list(token_list), dim=1),
        num_verify_tokens=num_draft_tokens,
    )
    first = parents_list[0]
    parent_list = torch.cat(list(parents_list[:-1]), dim=1) if len(parents_list) > 1 else first.new_empty(len(first), 0)
    return parent_list, kept.top_scores_index, kept.draft_tokens


def build_tree_structure(
    verified_id: Tensor, parent_list: Tensor, top_scores_index: Tensor, draft_tokens: Tensor, seq_lens: Tensor,
    topk: int, spec_steps: int, num_draft_tokens: int, tree_mask_mode: TreeMaskMode = TreeMaskMode.FULL_MASK,
    use_triton: bool = False,
) -> Tree:  # fmt: skip
    """Does what `build_tree_efficient_triton` does; FULL_MASK waits for the device to learn the sum of seq_lens."""
    seq_lens_sum = int(seq_lens.sum()) if tree_mask_mode == TreeMaskMode.FULL_MASK else 0
    drafts = (verified_id, parent_list, top_scores_index, draft_tokens, seq_lens, seq_lens_sum)
    return build_tree_efficient_triton(*drafts, topk, spec_steps, num_draft_tokens, tree_mask_mode)


def verify_tree_greedy(
    candidates: Tensor, target_predict: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor, use_triton: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns predicts [B * N] (0 where not visited), accept_index [B, N] (-1 padded) and accept_length [B]."""
    batch_size, num_draft_tokens = candidates.shape
    integers = {"dtype": torch.int32, "device": candidates.device}
    return verify_tree_greedy_triton(
        torch.zeros(batch_size * num_draft_tokens, **integers), torch.empty(batch_size, num_draft_tokens, **integers),
        torch.empty(batch_size, **integers),
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict,
    )  # fmt: skip


def compute_tree_statistics(accept_lengths: Tensor, num_draft_tokens: int, num_steps: int) -> dict[str, float]:
    """Waits for one verification and returns its statistics; accept_lengths exclude the bonus.
    num_steps is accepted and ignored, as in AITER. An empty batch gives zeros."""
    _arguments("compute_tree_statistics", num_draft_tokens=num_draft_tokens).integer("num_draft_tokens", 1)
    lengths = accept_lengths.tolist()
    mean = sum(lengths) / len(lengths) if lengths else 0.0
    return {
        "mean_accept_length": mean,
        "max_accept_length": max(lengths, default=0),
        "min_accept_length": min(lengths, default=0),
        "acceptance_rate": mean / num_draft_tokens,
        "total_proposed": num_draft_tokens * len(lengths),
        "total_accepted": sum(lengths),
        "batch_size": len(lengths),
    }


# aiter.ops.speculative.spec_utils


def _arguments(function: str, **values: Any) -> check.Arguments:
    """Returns the checks of a function's arguments."""
    return check.Arguments(f"integrations.aiter.{function}", values)


def _size_along(args: check.Arguments, name: str) -> int:
    """Checks a tensor and its axis `dim`; returns its size there."""
    tensor = args.values[name]
    if not check.is_dense(tensor) or tensor.dim() == 0:
        got = list(tensor.shape) if check.is_dense(tensor) else type(tensor).__name__
        args.fail(name, "be a dense tensor of at least one axis", got, TypeError)
    return tensor.shape[args.integer("dim", -tensor.dim(), tensor.dim() - 1)]


def fast_topk_torch(scores: Tensor, k: int, dim: int = -1, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Returns the k largest values along `dim` and their indices, always sorted, equal values by ascending index."""
    args = _arguments("fast_topk_torch", scores=scores, k=k, dim=dim)
    args.integer("k", 0, _size_along(args, "scores"))
    values, indices = torch.sort(scores, dim=dim, descending=True, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


def select_top_k_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k (up to 16) most likely tokens of each row of logits [B, V] or [B, n, V].
    The results are fp32 log-probabilities and token ids. AITER's docstring promises log-probabilities, its code returns
    logits; this keeps the promise. Rows that already are log-probabilities come back unchanged up to rounding."""
    level = _select_top_k_tokens(logits.reshape(-1, logits.shape[-1]), topk=k, level=0)
    shape = (*logits.shape[:-1], k)
    return level.scores.view(shape), level.tokens.view(shape)


def generate_token_bitmask(token_ids: Tensor, vocab_size: int) -> Tensor:
    """Returns bool [B, vocab_size], True at the ids of token_ids [B, n]; ids outside the vocabulary are skipped.
    Another function packs a grammar's words over a whole tree: `eagle_kernels.generate_token_bitmask`."""
    args = _arguments("generate_token_bitmask", token_ids=token_ids, vocab_size=vocab_size)
    args.tensor("token_ids", (None, None), check.INTEGER, contiguous=0)
    args.integer("vocab_size", 0)
    is_token = (token_ids >= 0) & (token_ids < vocab_size)
    bitmask = torch.zeros(token_ids.shape[0], vocab_size + 1, dtype=torch.bool, device=token_ids.device)
    bitmask.scatter_(1, torch.where(is_token, token_ids, vocab_size).long(), True)
    return bitmask[:, :vocab_size].contiguous()


def sample_from_logits(
    logits: Tensor, temperature: float = 1.0, top_p: float | None = None, top_k: int | None = None
) -> Tensor:
    """Draws one token from each row of logits [B, V]; returns int64 [B]. Temperature 0 is greedy.
    Seeds come from torch's generator of the device. top_p keeps the token that crosses it (the usual nucleus), which
    AITER drops."""
    args = _arguments("sample_from_logits", logits=logits, temperature=temperature, top_p=top_p, top_k=top_k)
    args.tensor("logits", (None, None), check.FLOAT, contiguous=1)
    args.number("temperature", 0)
    if top_p is not None:
        args.number("top_p")
    if top_k is not None:
        args.integer("top_k", -check.MAX_INT32)
    num_rows, device = logits.shape[0], logits.device

    def rows(value, dtype):
        return None if value is None else torch.full((num_rows,), value, dtype=dtype, device=device)

    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), device=device)
    return _sample_from_logits(
        logits, rows(0, torch.int64), seeds,
        rows(temperature, torch.float32), rows(top_k, torch.int64), rows(top_p, torch.float32),
    )  # fmt: skip


def calculate_acceptance_rate(accept_lengths: Tensor, num_draft_tokens: int) -> float:
    """Returns accepted over proposed drafts, 0 for none."""
    _arguments("calculate_acceptance_rate", num_draft_tokens=num_draft_tokens).integer("num_draft_tokens", 0)
    proposed = num_draft_tokens * accept_lengths.numel()
    return int(accept_lengths.sum()) / proposed if proposed else 0.0


def pad_to_alignment(tensor: Tensor, alignment: int, dim: int = 0, value: float = 0.0) -> Tensor:
    """Returns the tensor with `value` appended along `dim` until its size is a multiple of `alignment`."""
    args = _arguments("pad_to_alignment", tensor=tensor, alignment=alignment, dim=dim)
    args.integer("alignment", 1)
    _size_along(args, "tensor")
    missing = -tensor.shape[dim] % alignment
    if missing == 0:
        return tensor
    axes_after = tensor.dim() - 1 - dim % tensor.dim()
    return torch.nn.functional.pad(tensor, (0, 0) * axes_after + (0, missing), value=value)


def next_power_of_2(n: int) -> int:
    """Returns the smallest power of two that is at least n, 1 for n <= 0."""
    n = _arguments("next_power_of_2", n=n).integer("n", -math.inf, math.inf)
    return 1 << max(n - 1, 0).bit_length()
