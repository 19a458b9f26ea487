"""Draws one token from each row of logits, as plain decoding does.

Computes
    argmax over the kept tokens of logits / temperature + Gumbel noise: a sample of the filtered, renormalised softmax.
    Before it, in this order: repetition penalty (prompt and output), frequency and presence penalties (output), bias,
    grammar bitmask, temperature, then top-k, top-p and min-p (relative to the most likely token). filter_order says
    what top-p works on: "top_k_first": what top-k left, renormalised; "joint": all tokens, as top-k does. Edges are
    exact; tokens that tie with an edge all stay.
Shapes
    logits              [R, V]  fp32 / fp16 / bf16, unit stride along V; V <= 2^20; of a padded vocabulary pass
                                logits[:, :V]
    positions           [R]     int    position of the token that is *drawn* (the next one of a row of n tokens: n)
    seeds               [R]     int    the request's seed
    temperature         [R]     fp32   0 (anything below 1e-5): greedy
    top_k               [R]     int    <= 0 or >= V: off
    top_p               [R]     fp32   >= 1: off; the most likely token always stays
    min_p               [R]     fp32   <= 0: off
    repetition_penalty  [R]     fp32   > 0; 1: off. Divides positive logits, multiplies negative ones
    frequency_penalty   [R]     fp32   subtracted once per occurrence in the output; 0: off
    presence_penalty    [R]     fp32   subtracted from tokens of the output; 0: off
    prompt_mask         [R, ceil(V / 32)]  int32  bit v % 32 of word v // 32: token v occurs in the prompt
    output_counts       [R, V]  int32  how often each token occurs in the output so far
    logit_bias          [R, V]  fp32 / fp16 / bf16
    token_bitmask       [R, ceil(V / 32)]  int32  bit set: the grammar allows the token (xgrammar, llguidance)
    -> tokens           [R]     int64  in [0, V)
Invariants
    The noise is keyed by (seed, position, token id) and shared with `verify_tree_sampled`: equal logits, seed and
    position give the equal token, in whichever row, batch or op. NaN counts as -inf; a row of nothing but -inf and NaN
    gives token 0. Ties of greedy rows go to the lowest id; of sampled rows they hardly occur, as noise in more bits
    than fp32 has decides them.
Grid
    (R, slices), programs that scan a slice of a row each; (R,), programs that draw a token each.
Launches
    2
Traffic
    R * V * element size read (once, and what is gathered), 8 R written.
"""

from __future__ import annotations

import torch

from ...runtime import check
from ...runtime.launch import launcher
from .shared import logits as processors
from .shared import sampling
from .shared.sample_rows import sample_rows

SCAN_TUNING, DRAW_TUNING = sampling.SCAN_TUNING, sampling.DRAW_TUNING


def contract(values: dict) -> check.Spec:
    """Checks the arguments of `sample_from_logits` and describes its output."""
    args = check.Arguments("sample_from_logits", values)
    args.tensor("logits", ("R", "V"), check.FLOAT, contiguous=1)
    args.tensor("positions", ("R",), check.INTEGER)
    sampling.check_parameters(args, "R")
    sampling.check_vocabulary(args, "logits")
    processors.check_processors(args, "R", "R")
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
    repetition_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None,
    prompt_mask: torch.Tensor | None = None,
    output_counts: torch.Tensor | None = None,
    logit_bias: torch.Tensor | None = None,
    token_bitmask: torch.Tensor | None = None,
    *,
    filter_order: str = "top_k_first",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draws tokens int64 [R]; shapes and the meaning of each parameter are in the module's docstring."""
    values = locals()
    contracted = contract(values)
    out = check.allocate("sample_from_logits", contracted, out)
    sample_rows("sample_from_logits", values, logits, out, rows_per_request=1, position_offset=0)
    return out
