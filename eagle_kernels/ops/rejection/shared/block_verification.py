"""The part of verify_chain that only its method "block" has: r_i, S_i and h_i of its docstring.

shares   r_i, by the walk (`block_shares`)
masses   S_i, by a launched step of its own (`launch_masses`)
chances  h_i of one request in registers, by every program that draws (`block_chances`)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....primitives.dependent_launch import await_predecessor
from ....primitives.rows import Rows, in_units, load_row
from ....runtime.language import next_power_of_2, tl, triton
from ....runtime.launch import launch
from .pair import Pair, PairRows, load_probs


class Scratch(NamedTuple):
    """Pointers to what a launch of verify_chain leaves for the next ones."""

    ends: Any  # int32 [B, 2]: gamma (-1: dead) and the drafts accepted one by one
    shares: Any  # fp32 [B, T - 1]: r_i; None, as are the masses, but for "block"
    masses: Any  # fp32 [B, T - 1, slices]: S_i; 0 for i = 0 and from gamma on, where it is not needed
    accepted: Any  # int32 [B], -1: dead
    keys: Any  # int64 [B, 2, slices]: the best by the residual and by p


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


@triton.jit(do_not_specialize=["vocab_size", "draft_vocab_size", "stride_target", "stride_draft"])
def _verify_chain_mass_kernel(
    target, draft, target_to_draft_ptr, scratch, vocab_size, draft_vocab_size, stride_target, stride_draft,
    TARGET_UNIT: tl.constexpr, DRAFT_UNIT: tl.constexpr, NUM_TOKENS: tl.constexpr, NUM_SLICES: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Writes one slice of S_i to masses."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    request = row // (NUM_TOKENS - 1)
    index = row % (NUM_TOKENS - 1)
    mass = tl.zeros([], tl.float32)
    if (index > 0) & (index < tl.load(scratch.ends + request * 2)):
        target_rows = Rows(target, in_units(stride_target, TARGET_UNIT), in_units(vocab_size, TARGET_UNIT), 0)
        draft_rows = Rows(draft, in_units(stride_draft, DRAFT_UNIT), in_units(draft_vocab_size, DRAFT_UNIT), 0)
        rows = PairRows(target_rows, draft_rows, target_to_draft_ptr, vocab_size)
        target_row = load_row(rows.target, request, request * NUM_TOKENS + index, NUM_SLICES)
        pair = Pair(target_row, load_row(rows.draft, request, row, NUM_SLICES))
        ids = part * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
        target_prob, draft_prob = load_probs(rows, pair, ids, ids < target_row.size)
        share = tl.load(scratch.shares + row - 1)
        mass = tl.sum(tl.maximum(share * target_prob - draft_prob, 0.0))
    tl.store(scratch.masses + row * NUM_SLICES + part, mass)


def launch_masses(draw: dict) -> None:
    """Launches the sums S_i; draw: the arguments of the kernel that draws."""
    batch_size, num_drafts, num_slices = draw["scratch"].masses.shape
    mass = {name: value for name, value in draw.items() if name != "coins"}
    launch("verify_chain", _verify_chain_mass_kernel, (batch_size * num_drafts, num_slices), **mass)


@triton.jit
def block_chances(scratch, request, gamma, NUM_TOKENS: tl.constexpr, NUM_SLICES: tl.constexpr):
    """Returns the h_i [draft], draft 0 being x_1; only those of the first gamma drafts have a meaning."""
    draft = tl.arange(0, next_power_of_2(NUM_TOKENS))
    slices = tl.arange(0, next_power_of_2(NUM_SLICES))
    first = request * (NUM_TOKENS - 1)
    shares = tl.load(scratch.shares + first + draft, mask=draft < gamma, other=0.0)
    # for draft i + 1 the mass after it, S_{i + 1}: [draft, slice]
    place = (first + 1 + draft)[:, None] * NUM_SLICES + slices[None, :]
    is_mass = (draft + 1 < gamma)[:, None] & (slices < NUM_SLICES)[None, :]
    mass = tl.sum(tl.load(scratch.masses + place, mask=is_mass, other=0.0), axis=1)
    divisor = mass + (1.0 - shares)
    chance = tl.where(divisor > 0.0, tl.math.div_rn(mass, tl.where(divisor > 0.0, divisor, 1.0)), 1.0)
    return tl.where(draft + 1 < gamma, chance, shares)
