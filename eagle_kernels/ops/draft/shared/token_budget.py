"""Cuts the tries of a batch to what a budget of verified tokens leaves them."""

from __future__ import annotations

import torch

from ....primitives.dependent_launch import await_predecessor
from ....runtime import tuning
from ....runtime.language import next_power_of_2, tl, triton
from ....runtime.launch import launch

BUDGET_TUNING = {"default": {"BLOCK_BATCH": 256, "num_warps": 1}}


@triton.jit(do_not_specialize=["batch_size", "token_budget"])
def _ngram_match_budget_kernel(
    # inputs
    seq_lens_ptr,
    wanted_ptr,
    # outputs
    tokens_ptr,
    parents_ptr,
    num_drafts_ptr,
    # sizes
    batch_size,
    token_budget,
    NUM_DRAFTS: tl.constexpr,
    BLOCK_NODE: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Cuts one row's trie to what the budget leaves it."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    num_live = tl.zeros([BLOCK_BATCH], tl.int64)
    before = tl.zeros([BLOCK_BATCH], tl.int64)
    for start in range(0, batch_size, BLOCK_BATCH):
        other = start + tl.arange(0, BLOCK_BATCH)
        num_live += (tl.load(seq_lens_ptr + other, mask=other < batch_size, other=0) > 0).to(tl.int64)
        before += tl.load(wanted_ptr + other, mask=other < request, other=0).to(tl.int64)
    room = tl.maximum(tl.maximum(token_budget - tl.sum(num_live), 0) - tl.sum(before), 0)
    wanted = tl.load(wanted_ptr + request)
    granted = tl.minimum(wanted.to(tl.int64), room).to(tl.int32)
    tl.store(num_drafts_ptr + request, granted)
    node = tl.arange(0, BLOCK_NODE)
    is_cut = (node >= granted) & (node < wanted)
    nothing = tl.full([BLOCK_NODE], -1, tl.int64)
    tl.store(tokens_ptr + request * NUM_DRAFTS + node, nothing, mask=is_cut)
    tl.store(parents_ptr + request * NUM_DRAFTS + node, nothing, mask=is_cut)


def cut_to_budget(
    op: str,
    seq_lens: torch.Tensor,
    wanted: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    num_drafts: torch.Tensor,
    token_budget: int,
) -> None:
    """Cuts the tries `tokens`, `parents` [B, M] of wanted [B] drafts each, and writes num_drafts [B], what is left.

    token_budget: the most tokens that the batch verifies, the root of every live row counted.
    """
    batch_size, most_drafts = tokens.shape
    launch(
        op,
        _ngram_match_budget_kernel,
        (batch_size,),
        seq_lens_ptr=seq_lens,
        wanted_ptr=wanted,
        tokens_ptr=tokens,
        parents_ptr=parents,
        num_drafts_ptr=num_drafts,
        batch_size=batch_size,
        token_budget=token_budget,
        NUM_DRAFTS=most_drafts,
        BLOCK_NODE=next_power_of_2(most_drafts),
        **tuning.row(BUDGET_TUNING, tokens.device),
    )
