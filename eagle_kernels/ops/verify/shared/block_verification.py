"""The part of verify_chain that only its method "block" has: r_i, S_i and h_i of its docstring.

shares   r_i [B, T - 1] fp32, by the walk (`block_shares`)
masses   S_i [B, T - 1, slices] fp32, by a launched step of its own (`launch_masses`)
chances  h_i of one request in registers, by every program that draws (`block_chances`)
"""

from __future__ import annotations

import torch

from ....primitives.dependent_launch import await_predecessor
from ....runtime import tuning
from ....runtime.language import tl, triton
from ....runtime.launch import launch
from .pair import Pair, load_probs
from .prepare_pair import SLICE_TUNING
from .rows import Rows, in_units, load_row


@triton.jit
def block_shares(target_prob, draft_prob, NUM_TOKENS: tl.constexpr):
    """Returns the r_i [draft], draft 0 being x_1, from p and q [draft] of the drafts."""
    draft = tl.arange(0, target_prob.shape[0])
    is_drawn = draft_prob > 0.0
    ratio = tl.math.div_rn(target_prob, tl.where(is_drawn, draft_prob, 1.0))
    share = tl.full([], 1.0, tl.float32)
    for index in range(NUM_TOKENS - 1):
        share = tl.minimum(share * tl.sum(tl.where(draft == index, ratio, 0.0)), 1.0)
        ratio = tl.where(draft == index, share, ratio)
    return ratio


@triton.jit(do_not_specialize=["num_target_scans", "vocab_size", "draft_vocab_size", "stride_target", "stride_draft"])
def _verify_chain_mass_kernel(
    target_ptr,
    draft_ptr,
    temperature_ptr,
    draft_temperature_ptr,
    target_to_draft_ptr,
    scans_ptr,
    ends_ptr,
    shares_ptr,
    masses_ptr,
    # sizes
    num_target_scans,
    vocab_size,
    draft_vocab_size,
    stride_target,
    stride_draft,
    TARGET_IS_PROBS: tl.constexpr,
    DRAFT_IS_PROBS: tl.constexpr,
    TARGET_UNIT: tl.constexpr,
    DRAFT_UNIT: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_SLICE: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Writes one slice of S_i to masses; 0 for i = 0 and from gamma on, where it is not needed."""
    await_predecessor(ENABLE_PDL)
    vocab_size, stride_target = in_units(vocab_size, TARGET_UNIT), in_units(stride_target, TARGET_UNIT)
    draft_vocab_size, stride_draft = in_units(draft_vocab_size, DRAFT_UNIT), in_units(stride_draft, DRAFT_UNIT)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    request = row // (NUM_TOKENS - 1)
    index = row % (NUM_TOKENS - 1)
    mass = tl.zeros([], tl.float32)
    if (index > 0) & (index < tl.load(ends_ptr + request * 2)):
        target_rows = Rows(target_ptr, stride_target, vocab_size, temperature_ptr, scans_ptr, 0)
        draft_rows = Rows(draft_ptr, stride_draft, draft_vocab_size, draft_temperature_ptr, scans_ptr, num_target_scans)
        target_row = load_row(
            target_rows, request, request * NUM_TOKENS + index, NUM_SLICES, BLOCK_SLICE, TARGET_IS_PROBS
        )
        draft_row = load_row(draft_rows, request, row, NUM_SLICES, BLOCK_SLICE, DRAFT_IS_PROBS)
        pair = Pair(target_row, draft_row, target_to_draft_ptr)
        ids = part * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
        target, draft = load_probs(pair, ids, ids < vocab_size, TARGET_IS_PROBS, DRAFT_IS_PROBS)
        share = tl.load(shares_ptr + row - 1)
        mass = tl.sum(tl.maximum(share * target - draft, 0.0))
    tl.store(masses_ptr + row * NUM_SLICES + part, mass)


def launch_masses(pair: dict, ends: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Launches the sums S_i and returns them by slices; pair: what `prepare_pair` returned."""
    batch_size, num_drafts = shares.shape
    masses = torch.empty((batch_size, num_drafts, pair["NUM_SLICES"]), dtype=torch.float32, device=shares.device)
    launch(
        "verify_chain",
        _verify_chain_mass_kernel,
        (batch_size * num_drafts, pair["NUM_SLICES"]),
        ends_ptr=ends,
        shares_ptr=shares,
        masses_ptr=masses,
        NUM_TOKENS=num_drafts + 1,
        **pair,
        **tuning.row(SLICE_TUNING, shares.device),
    )
    return masses


@triton.jit
def block_chances(
    shares_ptr,
    masses_ptr,
    request,
    gamma,
    NUM_TOKENS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_TOKEN: tl.constexpr,
    BLOCK_SLICE: tl.constexpr,
):
    """Returns the h_i [draft], draft 0 being x_1; only those of the first gamma drafts have a meaning."""
    draft = tl.arange(0, BLOCK_TOKEN)
    slices = tl.arange(0, BLOCK_SLICE)
    first = request * (NUM_TOKENS - 1)
    shares = tl.load(shares_ptr + first + draft, mask=draft < gamma, other=0.0)
    # for draft i + 1 the mass after it, S_{i + 1}: [draft, slice]
    place = (first + 1 + draft)[:, None] * NUM_SLICES + slices[None, :]
    is_mass = (draft + 1 < gamma)[:, None] & (slices < NUM_SLICES)[None, :]
    mass = tl.sum(tl.load(masses_ptr + place, mask=is_mass, other=0.0), axis=1)
    divisor = mass + (1.0 - shares)
    chance = tl.where(divisor > 0.0, tl.math.div_rn(mass, tl.where(divisor > 0.0, divisor, 1.0)), 1.0)
    return tl.where(draft + 1 < gamma, chance, shares)
