"""Draws one token from each row of logits, as plain decoding does.

Computes: argmax over the kept tokens of logits / temperature + Gumbel noise: a sample of the filtered, renormalized
    softmax (`shared/sampling.py`). Edges of filters are exact.
Invariants: The noise is keyed by (seed, position, token id) and shared with `verify_tree_sampled`. Ties hardly occur in
    sampled rows, as noise in more bits than fp32 has decides them.
Grid: (R, slices), programs that scan a slice of a row each; (R,), programs that draw a token each.
Launches: 2
Traffic: R * V * element size read (once, and what is gathered), 8 R written.
"""

from __future__ import annotations

import torch

from ...primitives.ordering import check_vocabulary
from ...runtime import check
from ...runtime.launch import launcher
from .shared import logits as processors
from .shared import sampling
from .shared.sample_rows import sample_rows

SCAN_TUNING, DRAW_TUNING = sampling.SCAN_TUNING, sampling.DRAW_TUNING


def contract(values: dict) -> check.Spec:
    args = check.Arguments("sample_from_logits", values)
    args.tensor("logits", ("R", "V"), check.FLOAT, contiguous=1)
    args.tensor("positions", ("R",), check.INTEGER)
    sampling.check_parameters(args, "R")
    check_vocabulary(args, "logits")
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
    """Draws one token from each row of logits, as plain decoding does.

    Applies, in this order, repetition, frequency and presence penalty, bias, grammar, temperature, top-k, top-p and
    min-p, then takes the argmax with Gumbel noise, which samples the softmax of what is left. Tokens that tie at a
    filter's edge all stay.
    Symbols: R rows of V tokens (1..2^20).

    Args:
        logits: [R, V] fp32, fp16 or bf16. Unit stride along V; for a padded vocabulary, pass `logits[:, :V]`. NaN
            counts as -inf; a row of only -inf gives token 0.
        positions: [R] int. Position of the token that is drawn: n, if it follows n tokens.
        seeds: [R] int. The request's seed.
        temperature: [R] fp32. 0 (anything below 1e-5): greedy, without filters; ties go to the lowest id.
        top_k: None or [R] int. Tokens to keep; off at <= 0 or >= V.
        top_p: None or [R] fp32. Share of the probability to keep, at least one token; off at >= 1.
        min_p: None or [R] fp32. Keeps tokens of at least min_p times the largest probability; off at <= 0.
        repetition_penalty: None or [R] fp32. Divides positive logits of tokens in the prompt or the output, multiplies
            negative ones; above 0, off at 1.
        frequency_penalty: None or [R] fp32. Subtracted once per occurrence in the output; off at 0.
        presence_penalty: None or [R] fp32. Subtracted once for tokens in the output; off at 0.
        prompt_mask: None or [R, ceil(V / 32)] int32. Bit v % 32 of word v // 32: token v occurs in the prompt. Only
            with repetition_penalty.
        output_counts: None or [R, V] int32. Occurrences of each token in the output so far. Only with a penalty.
        logit_bias: None or [R, V] fp32, fp16 or bf16. Added to the logits.
        token_bitmask: None or [R, ceil(V / 32)] int32. Bit v % 32 of word v // 32: the grammar allows token v
            (xgrammar, llguidance).
        filter_order: what top-p works on: "top_k_first", the tokens that top-k left, renormalized; "joint", all tokens.
        out: a tensor to write into.

    Returns:
        [R] int64. Tokens in [0, V). Equal logits, seed and position give the same token, in any row or batch, and in
        `verify_tree_sampled`.

    Raises:
        ValueError, TypeError: an argument breaks a rule above. EAGLE_KERNELS_DEBUG=1 also checks that temperature is at
            least 0 and repetition_penalty above 0, and top_p, min_p and the other penalties for NaN.

    Source:
        Hugging Face's repetition penalty, OpenAI's frequency and presence penalties, FlashInfer's filter orders (its
        filter_apply_order). The noise, one hash for each group of eight tokens, is eagle_kernels' own.

    Example:
        >>> logits = torch.tensor([[0.0, 5.0, 1.0], [0.0, 1.0, 5.0]])
        >>> eagle_kernels.sample_from_logits(  # greedy; top-k leaves one token
        ...     logits, torch.tensor([4, 4]), torch.tensor([1, 2]), torch.tensor([0.0, 1.0]),
        ...     top_k=torch.tensor([0, 1])).tolist()
        [1, 2]
    """
    values = locals()
    out = check.allocate("sample_from_logits", contract(values), out)
    sample_rows("sample_from_logits", values, logits, out, rows_per_request=1, position_offset=0)
    return out
