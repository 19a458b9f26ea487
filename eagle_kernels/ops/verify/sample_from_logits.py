"""Draws one token from each row of logits, as plain decoding does.

Computes
    argmax over the kept tokens of logits / temperature + Gumbel noise: a sample of the filtered, renormalised softmax.
    Filters in order: temperature, top-k, top-p on what top-k left (renormalised), min-p relative to the most likely
    token. Edges are exact; tokens that tie with an edge all stay.
Shapes
    logits       [R, V]  fp32 / fp16 / bf16, unit stride along V
    positions    [R]     int    position of the token that is *drawn* (for the next token of a row of n tokens: n)
    seeds        [R]     int    the request's seed
    temperature  [R]     fp32   0 (anything below 1e-5): greedy
    top_k        [R]     int    <= 0 or >= V: off
    top_p        [R]     fp32   >= 1: off; the most likely token always stays
    min_p        [R]     fp32   <= 0: off
    -> tokens    [R]     int64  in [0, V)
Invariants
    The noise is keyed by (seed, position, token id) and shared with `verify_tree_sampled`: equal logits, seed and
    position give the equal token, in whichever row, batch or op. NaN counts as -inf; a row of nothing but -inf and NaN
    gives token 0. Ties go to the lowest id.
Grid
    (R,), one program draws one token.
Launches
    1
Traffic
    R * V * element size read (once without filters), 8 R written.
"""

from __future__ import annotations

import torch

from ...primitives import sampling
from ...primitives.dependent_launch import await_predecessor
from ...primitives.random import STREAM_TARGET
from ...primitives.sampling import draw_token
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher

TUNING = sampling.TUNING


@triton.jit(do_not_specialize=["vocab_size", "stride_logits_row"])
def _sample_from_logits_kernel(
    logits_ptr,
    positions_ptr,
    seeds_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    tokens_ptr,
    vocab_size,
    stride_logits_row,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    token = draw_token(
        logits_ptr + row * stride_logits_row,
        vocab_size,
        tl.load(temperature_ptr + row),
        tl.load(top_k_ptr + row) if HAS_TOP_K else 0,
        tl.load(top_p_ptr + row) if HAS_TOP_P else 1.0,
        tl.load(min_p_ptr + row) if HAS_MIN_P else 0.0,
        tl.load(seeds_ptr + row),
        tl.load(positions_ptr + row),
        HAS_TOP_K=HAS_TOP_K,
        HAS_TOP_P=HAS_TOP_P,
        HAS_MIN_P=HAS_MIN_P,
        STREAM=STREAM,
        BLOCK_VOCAB=BLOCK_VOCAB,
    )
    tl.store(tokens_ptr + row, token.to(tl.int64))


def contract(values: dict) -> check.Spec:
    """Checks the arguments of `sample_from_logits` and describes its output."""
    args = check.Arguments("sample_from_logits", values)
    args.tensor("logits", ("R", "V"), check.FLOAT, contiguous=1)
    args.tensor("positions", ("R",), check.INTEGER)
    sampling.check_parameters(args, "R")
    sampling.check_vocabulary(args, "logits")
    return args.spec((args.size("R"),), torch.int64)


@launcher
def sample_from_logits(
    logits: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draws tokens int64 [R]; shapes and the meaning of each parameter are in the module's docstring."""
    contracted = contract(locals())
    out = check.allocate("sample_from_logits", contracted, out)
    launch(
        "sample_from_logits",
        _sample_from_logits_kernel,
        (logits.shape[0],),
        logits_ptr=logits,
        positions_ptr=positions,
        seeds_ptr=seeds,
        temperature_ptr=temperature,
        top_k_ptr=top_k,
        top_p_ptr=top_p,
        min_p_ptr=min_p,
        tokens_ptr=out,
        vocab_size=logits.shape[1],
        stride_logits_row=logits.stride(0),
        HAS_TOP_K=top_k is not None,
        HAS_TOP_P=top_p is not None,
        HAS_MIN_P=min_p is not None,
        STREAM=STREAM_TARGET,
        **tuning.row(TUNING, logits.device),
    )
    return out
