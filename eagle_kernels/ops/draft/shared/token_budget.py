"""Cuts tries: ends their rows, and leaves those of a batch what a budget of verified tokens has for them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ....primitives.dependent_launch import await_predecessor
from ....runtime import tuning
from ....runtime.language import next_power_of_2, tl, triton
from ....runtime.launch import launch

# Each program reads the lengths of the batch, BLOCK_BATCH at a time: for the batches of servers in one read.
BUDGET_TUNING = {"default": {"BLOCK_BATCH": 256, "num_warps": 1}}


@triton.jit
def erase_drafts(out, request, first, last, NUM_DRAFTS: tl.constexpr):
    """Writes -1 as the drafts first .. last - 1 of a request's NUM_DRAFTS."""
    place = tl.arange(0, next_power_of_2(NUM_DRAFTS))
    is_erased = (place >= first) & (place < last)
    nothing = tl.full(place.shape, -1, tl.int64)
    tl.store(out.tokens + request * NUM_DRAFTS + place, nothing, mask=is_erased)
    tl.store(out.parents + request * NUM_DRAFTS + place, nothing, mask=is_erased)


@triton.jit(do_not_specialize=["batch_size", "token_budget"])
def _ngram_match_budget_kernel(
    # inputs
    seq_lens_ptr,
    wanted_ptr,
    # outputs
    out,
    # sizes
    batch_size,
    token_budget,
    NUM_DRAFTS: tl.constexpr,
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
    tl.store(out.num_drafts + request, granted)
    erase_drafts(out, request, granted, wanted, NUM_DRAFTS)


def cut_to_budget(op: str, seq_lens: torch.Tensor, wanted: torch.Tensor, out: NamedTuple, token_budget: int) -> None:
    """Cuts the tries out.tokens, out.parents [B, M] of wanted [B] drafts each; writes out.num_drafts, what is left.

    token_budget: the most tokens that the batch verifies, the root of every live row counted.
    """
    batch_size, most_drafts = out.tokens.shape
    launch(
        op,
        _ngram_match_budget_kernel,
        (batch_size,),
        seq_lens_ptr=seq_lens,
        wanted_ptr=wanted,
        out=out,
        batch_size=batch_size,
        token_budget=token_budget,
        NUM_DRAFTS=most_drafts,
        **tuning.row(BUDGET_TUNING, wanted.device),
    )
