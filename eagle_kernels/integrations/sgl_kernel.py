"""The tree ops of SGLang's `sgl_kernel`, in place and with its spellings, on top of ours.

    import eagle_kernels.integrations.sgl_kernel as sgl_kernel

Names, argument order, dtypes and written values are those of `sgl_kernel.speculative` as SGLang 0.5.23 uses it; SGLang
is never imported. B requests, N = draft_token_num nodes with the root, S + 1 columns of accept_index. The caller's
buffers are written in place; they must be contiguous, and all but accept_index and accept_token_num may be longer than
needed, as SGLang's graph buffers are.

Who writes what                  sgl_kernel                         here
    tree_mask, FULL_MASK         all but the prefix columns         the same (the CPU reference sets the prefix too)
    tree_mask, other modes       words are or-ed: zeroed before     written whole, whatever they held
    retrive_next_*  (build)      links only: -1 before              written whole, whatever they held
    predicts                     visited nodes only                 the same; a target's token that is no int32 id: -1
    accept_index                 the path only: -1 before           the path, then -1
    draft_probs                  rejected tokens: zeroed before     neither written nor read: any tensor, or None
    positions, retrive_index     written whole                      the same

Selections may be in any order and trees may be malformed: every output of a build is what SGLang's
test_build_eagle_tree_malformed.py asserts. That test is newer than 0.5.23, which hangs on cycles and reads past a row
if a parent is missing. No SGLang test asserts these differences:

Odd input                        sgl_kernel                         here
    candidate ids below 0        children of the root               have no parent
    ids past the parent list     read past the row                  have no parent, also all ids past topk at depth 1
    a parent's id past 31 bits   is cut to 32 bits                  is missing
    a link to the root, or to a  is followed: the node is accepted  ends the walk, as no link does; no node is
        node that a walk met     again, or the walk never ends      accepted twice
    N                            at most 1024                       at most 256 in a build, 1024 elsewhere
    integer inputs               int64                              int32 as well

A child of probability p, whose siblings up to itself have mass m, is accepted at a coin if
    0.5.23 and here     p > 0 and (coin < m / max(threshold_acc, 1e-9) or p >= threshold_single)
    0.5.17              coin <= m / max(threshold_acc, 1e-9) or p >= threshold_single
The older rule (its sgl_kernel is that of sglang-kernel 0.4.5) takes tokens of probability 0, also underflowed ones: the
first child always with threshold_single = 0, and with both thresholds at 1, which should be lossless, children of
probability 0 at a coin of 0. The newer rule never does. It also divides as IEEE does, where the older one multiplies by
a reciprocal and takes numbers below 2^-126 for 0. Two more differences from both: a token that two siblings carry
counts once here but twice there, which departs from the target's distribution; and sums for the bonus are made in
another order, so a final coin within rounding of an edge may give the token on its other side.

SGLang's functions and kernels for KV slots are in sglang_cache_locs.py and sglang_kv_indices.py; its norms, activation,
rotary embedding and renormalizing filters are in sglang_elementwise.py. This module has all of their names too.

segment_packbits, which SGLang itself no longer calls, is missing.
"""

import math
from enum import IntEnum

import torch
from torch import Tensor

from ..ops import BuildTreeOutput, VerifyOutput, build_tree, tree_from_mask
from ..ops import verify_tree_coins as _verify_tree_coins
from ..ops import verify_tree_greedy as _verify_tree_greedy
from ..ops.tree.build_tree import TreeMaskMode as _Layout
from ..ops.tree.tree_from_mask import Output as TreeFromMaskOutput
from . import sglang_cache_locs, sglang_elementwise, sglang_kv_indices
from .sglang_cache_locs import *  # noqa: F403
from .sglang_elementwise import *  # noqa: F403
from .sglang_kv_indices import *  # noqa: F403

__all__ = [
    "TreeMaskMode", "build_tree_kernel_efficient", "reconstruct_indices_from_tree_mask",
    "tree_speculative_sampling_target_only", "verify_tree_greedy",
]  # fmt: skip
__all__ += sglang_cache_locs.__all__
__all__ += sglang_elementwise.__all__
__all__ += sglang_kv_indices.__all__


class TreeMaskMode(IntEnum):
    """Names the numbers that `tree_mask_mode` takes."""

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2

    @classmethod
    def _missing_(cls, value):
        raise ValueError(f"eagle_kernels.integrations.sgl_kernel: tree_mask_mode must be 0, 1 or 2, got {value!r}")


def build_tree_kernel_efficient(
    parent_list: Tensor, selected_index: Tensor, verified_seq_len: Tensor, tree_mask: Tensor, positions: Tensor,
    retrive_index: Tensor, retrive_next_token: Tensor, retrive_next_sibling: Tensor,
    topk: int, depth: int, draft_token_num: int, tree_mask_mode: int,
) -> None:  # fmt: skip
    """Writes tree_mask, positions and the three retrive_* of every request's tree.
    parent_list [B, topk * (depth - 1) + 1], of any width for depth 1; selected_index [B, N - 1]; verified_seq_len [B];
    tree_mask of any dtype, since only its bytes matter; positions [B * N] int64; retrive_* [B, N] int64.
    Raises ValueError if a buffer is too short (FULL_MASK: cells past its end are not written)."""
    op = "build_tree_kernel_efficient"
    mode, batch_size = TreeMaskMode(tree_mask_mode), verified_seq_len.shape[0]
    nodes = (batch_size, draft_token_num)
    out = BuildTreeOutput(
        tree_mask=_mask_view(op, tree_mask, mode, *nodes),
        positions=_front(op, "positions", positions, batch_size * draft_token_num),
        retrieve_index=_front(op, "retrive_index", retrive_index, *nodes),
        retrieve_next_token=_front(op, "retrive_next_token", retrive_next_token, *nodes),
        retrieve_next_sibling=_front(op, "retrive_next_sibling", retrive_next_sibling, *nodes),
        draft_tokens=torch.empty(batch_size * draft_token_num, dtype=torch.int64, device=verified_seq_len.device),
    )
    # Our op also lays out the tokens, which this interface does not have: give it what it reads anyway, and scratch to
    # write to (through views: a launch is planned for tensors that are all different).
    build_tree(
        verified_seq_len.view(-1), parent_slots(parent_list, depth), selected_index,
        selected_index.view_as(selected_index), verified_seq_len,
        topk=topk, spec_steps=depth, num_verify_tokens=draft_token_num, tree_mask_mode=layout(mode),
        prefix_is_set=mode == TreeMaskMode.FULL_MASK, any_order=True, out=out,
    )  # fmt: skip


def verify_tree_greedy(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, target_predict: Tensor,
) -> None:  # fmt: skip
    """Walks every tree along the target's tokens; writes predicts, accept_index and accept_token_num, all int32.
    predicts [B * N] or longer; accept_index [B, S + 1], whose width bounds the walk; accept_token_num [B] counts the
    accepted drafts without the bonus; the inputs are [B, N]."""
    predicts = _front("verify_tree_greedy", "predicts", predicts, candidates.numel())
    _verify_tree_greedy(
        candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict,
        spec_steps=accept_index.shape[1] - 1, keep_unvisited=True, any_order=True,
        out=VerifyOutput(predicts, accept_index, accept_token_num),
    )  # fmt: skip


def tree_speculative_sampling_target_only(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor, target_probs: Tensor, draft_probs: Tensor | None,
    threshold_single: float = 1.0, threshold_acc: float = 1.0, deterministic: bool = True,
) -> None:  # fmt: skip
    """Walks every tree by coins and draws the bonus; writes predicts, accept_index and accept_token_num, all int32.
    predicts [B * N] or longer; accept_index [B, S + 1], whose width bounds the walk; accept_token_num [B] counts the
    accepted drafts without the bonus. uniform_samples [B, N], uniform_samples_for_final_sampling [B], target_probs
    [B, N, V], all fp32. Thresholds below 1 are lossy. `deterministic` is ignored: results always are."""
    op = "tree_speculative_sampling_target_only"
    _verify_tree_coins(
        candidates, retrive_index, retrive_next_token, retrive_next_sibling,
        target_probs, uniform_samples, uniform_samples_for_final_sampling,
        spec_steps=accept_index.shape[1] - 1, threshold_single=threshold_single, threshold_acc=threshold_acc,
        keep_unvisited=True, any_order=True,
        out=VerifyOutput(_front(op, "predicts", predicts, candidates.numel()), accept_index, accept_token_num),
    )  # fmt: skip


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor, verified_seq_len: Tensor, positions: Tensor, retrive_index: Tensor, retrive_next_token: Tensor,
    retrive_next_sibling: Tensor, batch_size: int, draft_token_num: int,
) -> None:  # fmt: skip
    """Writes positions and the three retrive_* of trees given as QLEN_ONLY masks (n-gram drafts).
    tree_mask [B * N * N] of any one-byte dtype; verified_seq_len [B] or longer; outputs as of the build."""
    op, nodes = "reconstruct_indices_from_tree_mask", (batch_size, draft_token_num)
    cells = tree_mask.view(-1).view(torch.uint8)
    tree_from_mask(
        _front(op, "tree_mask", cells, batch_size, draft_token_num, draft_token_num),
        _front(op, "verified_seq_len", verified_seq_len, batch_size),
        num_verify_tokens=draft_token_num,
        tree_mask_mode=layout(TreeMaskMode.QLEN_ONLY),
        out=TreeFromMaskOutput(
            positions=_front(op, "positions", positions, batch_size * draft_token_num),
            retrieve_index=_front(op, "retrive_index", retrive_index, *nodes),
            retrieve_next_token=_front(op, "retrive_next_token", retrive_next_token, *nodes),
            retrieve_next_sibling=_front(op, "retrive_next_sibling", retrive_next_sibling, *nodes),
        ),
    )


def layout(mode: int) -> str:
    """Returns our name of a mask mode."""
    return _Layout[TreeMaskMode(mode).name]


def parent_slots(parent_list: Tensor, depth: int) -> Tensor:
    """Returns parent_list as our op takes it: a tree of one level has only the root's slot, which is not read."""
    if depth == 1 and parent_list.shape[1] != 1:
        return parent_list.new_empty(parent_list.shape[0], 1)
    return parent_list


def _mask_view(op: str, tree_mask: Tensor, mode: TreeMaskMode, batch_size: int, num_nodes: int) -> Tensor:
    """Returns the bytes of the caller's mask, whatever their dtype, in the shape that our op writes."""
    cells = tree_mask.view(-1).view(torch.uint8)
    if mode == TreeMaskMode.FULL_MASK:
        return cells.view(torch.bool)
    if mode == TreeMaskMode.QLEN_ONLY:
        return _front(op, "tree_mask", cells, batch_size, num_nodes, num_nodes).view(torch.bool)
    word = torch.uint8 if num_nodes <= 8 else torch.uint16 if num_nodes <= 16 else torch.uint32
    return _front(op, "tree_mask", cells, batch_size, num_nodes * word.itemsize).view(word)


def _front(op: str, name: str, buffer: Tensor, *shape: int) -> Tensor:
    """Returns the first elements of a contiguous buffer in this shape."""
    size = math.prod(shape)
    if buffer.numel() < size:
        raise ValueError(
            f"eagle_kernels.integrations.sgl_kernel.{op}: {name} must hold at least {size} elements of "
            f"{buffer.element_size()} bytes, got {buffer.numel()}"
        )
    return buffer.view(-1)[:size].view(shape)
