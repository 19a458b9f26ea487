"""Rows of logits as sampling sees them: penalties, bias, grammar and temperature are applied where they are read.

No processed copy of the logits exists: whoever needs the logits of some tokens reads them with `load_scaled`, once or
again, and gets the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..runtime import check
from ..runtime.language import tl, triton
from .ordering import comparable

# Below this temperature sampling is greedy: logits over it would leave the range of fp32.
GREEDY_BELOW = tl.constexpr(1e-5)

LARGEST_FINITE = tl.constexpr(3.4028234663852886e38)

NAMES = (
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "prompt_mask",
    "output_counts",
    "logit_bias",
    "token_bitmask",
)


class Processors(NamedTuple):
    """Pointers to the op's arguments of these names; None: not given."""

    repetition_penalty: Any
    frequency_penalty: Any
    presence_penalty: Any
    prompt_mask: Any
    output_counts: Any
    logit_bias: Any
    token_bitmask: Any


class Row(NamedTuple):
    """One row of logits and what its tokens go through."""

    logits: Any  # pointers to what belongs to the row, None: not given
    prompt_mask: Any
    output_counts: Any
    logit_bias: Any
    token_bitmask: Any
    repetition_penalty: Any  # scalars
    frequency_penalty: Any
    presence_penalty: Any
    inverse_temperature: Any
    drafts: Any  # tokens int32 that count as output as well: num_drafts of them, stride_draft apart
    num_drafts: Any
    stride_draft: Any


@triton.jit
def open_row(
    logits_ptr,
    processors,
    temperature,
    request,
    node,
    drafts_ptr,
    num_drafts,
    stride_draft,
    VOCAB_SIZE: tl.constexpr,
):
    """The row at logits_ptr. Its penalties and bias are those of `request`, its bitmask that of `node`.

    Returns it and whether it is sampled; with a temperature below 1e-5 (or NaN) it is greedy and not scaled.
    """
    WORDS: tl.constexpr = (VOCAB_SIZE + 31) // 32
    is_sampled = temperature >= GREEDY_BELOW
    prompt_mask = processors.prompt_mask
    output_counts = processors.output_counts
    logit_bias = processors.logit_bias
    token_bitmask = processors.token_bitmask
    repetition, frequency, presence = 1.0, 0.0, 0.0
    if prompt_mask is not None:
        prompt_mask += request * WORDS
    if output_counts is not None:
        output_counts += request * VOCAB_SIZE
    if logit_bias is not None:
        logit_bias += request * VOCAB_SIZE
    if token_bitmask is not None:
        token_bitmask += node * WORDS
    if processors.repetition_penalty is not None:
        repetition = tl.load(processors.repetition_penalty + request)
    if processors.frequency_penalty is not None:
        frequency = tl.load(processors.frequency_penalty + request)
    if processors.presence_penalty is not None:
        presence = tl.load(processors.presence_penalty + request)
    inverse_temperature = tl.where(is_sampled, tl.math.div_rn(1.0, tl.where(is_sampled, temperature, 1.0)), 1.0)
    row = Row(
        logits_ptr, prompt_mask, output_counts, logit_bias, token_bitmask, repetition, frequency, presence,
        inverse_temperature, drafts_ptr, num_drafts, stride_draft,
    )  # fmt: skip
    return row, is_sampled


@triton.jit
def load_scaled(row, ids, mask, HAS_PENALTIES: tl.constexpr):
    """The tokens' logits as they are sampled from, fp32: NaN and masked lanes -inf, +inf the largest finite, -0 as 0.

    Order: repetition, frequency and presence penalties, bias, grammar bitmask, temperature.
    """
    logit = tl.load(row.logits + ids, mask=mask, other=float("-inf")).to(tl.float32)
    if HAS_PENALTIES:
        logit = _penalise(logit, row, ids, mask)
    if row.logit_bias is not None:
        logit += tl.load(row.logit_bias + ids, mask=mask, other=0.0).to(tl.float32)
    if row.token_bitmask is not None:
        word = tl.load(row.token_bitmask + ids // 32, mask=mask, other=0)
        logit = tl.where((word >> (ids % 32)) & 1 != 0, logit, float("-inf"))
    return tl.minimum(comparable(logit * row.inverse_temperature), LARGEST_FINITE)


@triton.jit
def load_raw(row, ids, mask):
    """The tokens' logits as the model gave them, NaN and +inf as in `load_scaled`."""
    logit = tl.load(row.logits + ids, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.minimum(comparable(logit), LARGEST_FINITE)


@triton.jit
def _penalise(logit, row, ids, mask):
    """As Hugging Face's repetition penalty and OpenAI's frequency and presence penalties."""
    count = tl.zeros(ids.shape, tl.int32)
    if row.output_counts is not None:
        count = tl.load(row.output_counts + ids, mask=mask, other=0)
    if row.drafts is not None:
        for index in range(row.num_drafts):
            count += (ids == tl.load(row.drafts + index * row.stride_draft)).to(tl.int32)
    is_output = count > 0
    is_seen = is_output
    if row.prompt_mask is not None:
        word = tl.load(row.prompt_mask + ids // 32, mask=mask, other=0)
        is_seen = is_seen | ((word >> (ids % 32)) & 1 != 0)
    repeated = tl.where(logit > 0.0, tl.math.div_rn(logit, row.repetition_penalty), logit * row.repetition_penalty)
    logit = tl.where(is_seen, repeated, logit)
    logit -= row.frequency_penalty * count.to(tl.float32)
    return logit - tl.where(is_output, row.presence_penalty, 0.0)


def check_processors(args: check.Arguments, axis: str, node_axis: str | int) -> bool:
    """Checks penalties, bias and grammar, one per row of `axis` (the bitmask: of node_axis); whether there is any."""
    words = -(-args.size("V") // 32)
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        args.tensor(name, (axis,), (torch.float32,), optional=True)
    args.tensor("prompt_mask", (axis, words), (torch.int32,), optional=True)
    args.tensor("output_counts", (axis, "V"), (torch.int32,), optional=True)
    args.tensor("logit_bias", (axis, "V"), check.FLOAT, optional=True)
    args.tensor("token_bitmask", (node_axis, words), (torch.int32,), optional=True)
    values = args.values
    if values["prompt_mask"] is not None and values["repetition_penalty"] is None:
        args.fail("prompt_mask", "come with repetition_penalty, which alone reads it", "no repetition_penalty")
    if values["output_counts"] is not None and not has_penalties(values):
        args.fail("output_counts", "come with a penalty, which reads it", "none")
    if values["repetition_penalty"] is not None:
        args.debug("repetition_penalty", "be positive", lambda: values["repetition_penalty"] > 0)
    return any(values[name] is not None for name in NAMES)


def has_penalties(values: dict) -> bool:
    """Whether any penalty is given."""
    return any(values[name] is not None for name in NAMES[:3])


def pointers(values: dict) -> dict:
    """The kernel arguments of the processors."""
    return {f"{name}_ptr": values[name] for name in NAMES}
