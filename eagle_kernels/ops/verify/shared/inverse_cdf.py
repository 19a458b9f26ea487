"""Drawing from a row of probabilities by inverse CDF, in blocks; rows are taken as they are, not normalised."""

from __future__ import annotations

from ....runtime.language import tl, triton


@triton.jit
def as_probs(values):
    """Returns fp32 values with 0 in place of NaN, infinities and negative ones."""
    return tl.where((values > 0.0) & (values < float("inf")), values, 0.0)


@triton.jit
def token_probs(row_ptr, tokens, VOCAB_SIZE: tl.constexpr):
    """Returns what the row gives each of the tokens int32; 0 for one outside the vocabulary."""
    is_token = (tokens >= 0) & (tokens < VOCAB_SIZE)
    return as_probs(tl.load(row_ptr + tokens, mask=is_token, other=0.0))


@triton.jit
def residual(row_ptr, start, rejected, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns BLOCK probabilities of a row from `start` on, 0 for the tokens in `rejected` and past the row's end.

    Rejected tokens within the block, mostly none, are masked one after another: each round ends one of them.
    """
    index = start + tl.arange(0, BLOCK)
    probs = as_probs(tl.load(row_ptr + index, mask=index < VOCAB_SIZE, other=0.0))
    rejected = tl.where((rejected >= start) & (rejected < start + BLOCK), rejected, -1)
    token = tl.max(rejected)
    while token >= 0:
        probs = tl.where(index == token, 0.0, probs)
        rejected = tl.where(rejected == token, -1, rejected)
        token = tl.max(rejected)
    return probs


@triton.jit
def first_above(index, values, reached, level):
    """Returns the first index of a positive value at which the running sum `reached` is above `level`.

    Where there is none, which rounding or a coin outside [0, 1) can cause, this is the last index of a positive value,
    or -1 without one.
    """
    is_positive = values > 0.0
    first = tl.min(tl.where(is_positive & (reached > level), index, 2147483647))
    return tl.where(first == 2147483647, tl.max(tl.where(is_positive, index, -1)), first)
