"""Rows of logits as sampling sees them: penalties, bias, grammar and temperature are applied where they are read. No
processed copy of the logits exists: a kernel that needs the logits of some tokens reads them with `load_scaled`, once
or again, and gets the same bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....primitives.ordering import comparable, widened
from ....primitives.rows import LARGEST_FINITE, scale_logits
from ....runtime import check
from ....runtime.language import tl, triton


class Processors(NamedTuple):
    """Pointers to the op's arguments of these names; None: not given."""

    repetition_penalty: Any
    frequency_penalty: Any
    presence_penalty: Any
    prompt_mask: Any
    output_counts: Any
    logit_bias: Any
    token_bitmask: Any


class Drafts(NamedTuple):
    """Tokens int32 that count as output as well."""

    tokens: Any  # pointer
    number: Any
    stride: Any


class Row(NamedTuple):
    """One row of logits and what its tokens go through.
    It is made where it is handed on, as is `Noise`: assigned to a variable or returned, constants become numbers."""

    logits: Any  # pointer to its first logit
    processors: Any
    request: Any  # row of the penalties, their tensors and the bias
    node: Any  # row of the grammar's bitmask
    inverse_temperature: Any
    drafts: Any  # Drafts; None: none
    VOCAB_SIZE: Any
    HAS_PENALTIES: Any  # whether any penalty is given


@triton.jit
def load_scaled(row, ids, mask):
    """Loads the tokens' logits as they are sampled from.
    NaN and masked lanes count as -inf, +inf as the largest finite fp32, -0 as 0."""
    return scaled(row, load_processed(row, ids, mask))


@triton.jit
def scaled(row, logit):
    """Returns processed logits as they are sampled from."""
    return scale_logits(logit, row.inverse_temperature)


@triton.jit
def load_processed(row, ids, mask):
    """Loads the tokens' logits fp32 and applies repetition, frequency and presence penalties, bias and grammar."""
    logit = widened(tl.load(row.logits + ids, mask=mask, other=float("-inf")))
    if row.HAS_PENALTIES:
        return process(logit, load_counts(row, ids, mask), row, ids, mask)
    else:
        return process(logit, None, row, ids, mask)


@triton.jit
def process(logit, count, row, ids, mask):
    """Processes the tokens' logits fp32; with penalties `count` says how often each token occurs in the output."""
    processors = row.processors
    if row.HAS_PENALTIES:
        logit = _penalise(logit, count, row, ids, mask)
    if processors.logit_bias is not None:
        bias_ptr = processors.logit_bias + row.request * row.VOCAB_SIZE
        logit += tl.load(bias_ptr + ids, mask=mask, other=0.0).to(tl.float32)
    if processors.token_bitmask is not None:
        is_allowed = _load_bits(processors.token_bitmask, row.node, ids, mask, row.VOCAB_SIZE)
        logit = tl.where(is_allowed, logit, float("-inf"))
    return logit


@triton.jit
def load_raw(row, ids, mask):
    """Loads the tokens' logits as the model gave them, NaN and +inf as in `load_scaled`."""
    logit = tl.load(row.logits + ids, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.minimum(comparable(logit), LARGEST_FINITE)


@triton.jit
def load_counts(row, ids, mask):
    """Counts how often each of the tokens occurs in the output, int32: in the request's counts and the row's drafts."""
    count = tl.zeros(ids.shape, tl.int32)
    if row.processors.output_counts is not None:
        count = tl.load(row.processors.output_counts + row.request * row.VOCAB_SIZE + ids, mask=mask, other=0)
    if row.drafts is not None:
        for index in range(row.drafts.number):
            count += (ids == tl.load(row.drafts.tokens + index * row.drafts.stride)).to(tl.int32)
    return count


@triton.jit
def _penalise(logit, count, row, ids, mask):
    """Applies Hugging Face's repetition penalty and OpenAI's frequency and presence penalties."""
    processors = row.processors
    if processors.repetition_penalty is not None:
        penalty = tl.load(processors.repetition_penalty + row.request)
        is_seen = count > 0
        if processors.prompt_mask is not None:
            is_seen = is_seen | _load_bits(processors.prompt_mask, row.request, ids, mask, row.VOCAB_SIZE)
        repeated = tl.where(logit > 0.0, tl.math.div_rn(logit, penalty), logit * penalty)
        logit = tl.where(is_seen, repeated, logit)
    if processors.frequency_penalty is not None:
        # one rounding, by name: left to itself the compiler fuses in one kernel and not in another
        penalty = tl.load(processors.frequency_penalty + row.request)
        logit = tl.fma(-penalty, count.to(tl.float32), logit)
    if processors.presence_penalty is not None:
        logit -= tl.where(count > 0, tl.load(processors.presence_penalty + row.request), 0.0)
    return logit


@triton.jit
def _load_bits(words_ptr, index, ids, mask, VOCAB_SIZE: tl.constexpr):
    """Loads the tokens' bits in row `index` of [_, ceil(VOCAB_SIZE / 32)] words."""
    WORDS: tl.constexpr = (VOCAB_SIZE + 31) // 32
    word = tl.load(words_ptr + index * WORDS + ids // 32, mask=mask, other=0)
    return (word >> (ids % 32)) & 1 != 0


def check_processors(args: check.Arguments, axis: str, node_axis: str | int) -> None:
    """Checks penalties, bias and grammar, one per row of `axis` (the bitmask: of node_axis)."""
    words = -(-args.size("V") // 32)
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        args.tensor(name, (axis,), (torch.float32,), optional=True)
    args.tensor("prompt_mask", (axis, words), (torch.int32,), optional=True)
    args.tensor("output_counts", (axis, "V"), (torch.int32,), optional=True)
    args.tensor("logit_bias", (axis, "V"), check.FLOAT, optional=True)
    args.tensor("token_bitmask", (node_axis, words), (torch.int32,), optional=True)
    values = args.values
    if values["prompt_mask"] is not None and values["repetition_penalty"] is None:
        args.fail("prompt_mask", "come with repetition_penalty, the only one that reads it", "no repetition_penalty")
    if values["output_counts"] is not None and not has_penalties(values):
        args.fail("output_counts", "come with a penalty, which reads it", "none")
    if values["repetition_penalty"] is not None:
        args.debug("repetition_penalty", "be a number above 0", lambda: values["repetition_penalty"] > 0)
    args.debug_numbers("frequency_penalty")
    args.debug_numbers("presence_penalty")


def has_penalties(values: dict) -> bool:
    """Tells whether any penalty is given."""
    return any(values[name] is not None for name in Processors._fields[:3])
