"""What `verify_tree_sampled` writes when a walk has ended."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....primitives.tree_walk import output_arguments, store_path
from ....runtime.language import tl, triton
from ....runtime.launch import bundle

# One warp walks, or reads a path, and writes: what it looks up lies in its own registers.
WALK_TUNING = {"default": {"num_warps": 1}}


class Output(NamedTuple):
    """The outputs of `verify_tree_sampled`; those that were not asked for are empty. In a kernel, pointers to them."""

    predicts: torch.Tensor
    accept_index: torch.Tensor
    accept_token_num: torch.Tensor
    logprobs: torch.Tensor
    raw_logprobs: torch.Tensor
    new_seq_lens: torch.Tensor
    bonus_tokens: torch.Tensor
    accept_lengths: torch.Tensor
    tokens: torch.Tensor
    hidden_rows: torch.Tensor
    last_row: torch.Tensor


class Commit(NamedTuple):
    """Pointers to what the outputs of `verify_commit` are made from; seq_lens None: they are not wanted."""

    seq_lens: Any
    is_live: Any


@triton.jit
def store_outputs(out, links, commit, request, path, SPEC_STEPS: tl.constexpr, NUM_NODES: tl.constexpr):
    """Writes the outputs of a walk, all but log-probabilities, from its Path."""
    depth = tl.arange(0, path.nodes.shape[0])
    in_row = depth <= SPEC_STEPS
    is_visited = path.nodes >= 0
    store_path(out, links, request, path, SPEC_STEPS, NUM_NODES)
    if commit.seq_lens is not None:
        if commit.is_live is not None:
            is_visited = is_visited & (tl.load(commit.is_live + request) != 0)
        num_emitted = tl.sum(is_visited.to(tl.int32))
        seq_len = tl.load(commit.seq_lens + request)
        last = tl.maximum(num_emitted - 1, 0)
        root_row = request * NUM_NODES
        row = tl.load(links.retrieve_index + root_row + path.nodes, mask=is_visited, other=0).to(tl.int64)
        column = request * (SPEC_STEPS + 1) + depth
        bonus = tl.sum(tl.where(is_visited & (depth == last), path.tokens, 0)) - tl.where(num_emitted > 0, 0, 1)
        tl.store(out.new_seq_lens + request, (seq_len + num_emitted).to(seq_len.dtype))
        tl.store(out.bonus_tokens + request, bonus.to(tl.int64))
        tl.store(out.accept_lengths + request, num_emitted)
        tl.store(out.tokens + column, tl.where(is_visited, path.tokens, -1).to(tl.int64), mask=in_row)
        tl.store(out.hidden_rows + column, tl.where(is_visited, row, root_row), mask=in_row)
        tl.store(out.last_row + request, request * (SPEC_STEPS + 1) + last)


def store_arguments(values: dict, out: Output) -> dict:
    """Returns the kernel arguments that `store_outputs` writes by."""
    return output_arguments(out) | {"commit": bundle(Commit, values)}
