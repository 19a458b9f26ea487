"""Compares texts of a plugged engine with those of a stock one.

SGLang cannot run this pair in fp32: its RMS norm on CUDA (`sgl_kernel.rmsnorm`) has no such instance. A product of
matrices in 16 bits depends on the size of the batch, so even a stock engine may give another token where two are
nearly as likely. A text that differs is therefore held against the target model in fp32, computed here by PyTorch: the
first token that differs, stock's in its place, and all that follow must be the most likely ones within rounding. fp16
is the default, since it rounds eight times finer than bf16: hardly any text needs this.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from eagle_kernels.engine.models.loading import demo_pair, load_target
from eagle_kernels.reference.causal_attend import causal_attend, positions_of

# How far the logit of a token may be below the largest: twice the largest error of the pair's logits in that type, over
# 1024 greedy tokens (0.032 and 0.26; the median errors are 0.002 and 0.018). Of these tokens 0.8 % and 6 % have a
# second one so near.
ROUNDING = {"float16": 0.065, "bfloat16": 0.52}
SAME, TIE = "same", "tie"  # else what differs


@functools.cache
def target():
    """Loads the pair's target in fp32, once."""
    return load_target(demo_pair()[0])


def gaps(prompt: Sequence[int], text: Sequence[int]) -> list[float]:
    """Returns how far the logit of each token of a text is below the largest, in fp32."""
    tokens = torch.tensor([[*prompt, *text]])
    with torch.no_grad():
        logits = target()(tokens[:, :-1], positions_of(tokens[:, :-1]), causal_attend).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(-1, tokens[0, len(prompt) :, None])[:, 0]
    return (logits.amax(-1) - chosen).tolist()


def verdict(prompt: Sequence[int], text: Sequence[int], stock: Sequence[int], is_cut: bool, rounding: float) -> str:
    """Returns SAME, TIE, or what differs. is_cut: the text was aborted, so that it may be the beginning of stock's."""
    if len(text) > len(stock) or (len(text) < len(stock) and not is_cut):
        return f"{len(text)} tokens, stock has {len(stock)}"
    first = next((place for place, pair in enumerate(zip(text, stock)) if pair[0] != pair[1]), None)
    if first is None:
        return SAME
    vocab_size = target().get_output_embeddings().weight.shape[0]
    if not all(0 <= token < vocab_size for token in text):
        return f"token {next(token for token in text if not 0 <= token < vocab_size)} is none of the vocabulary"
    ours = gaps(prompt, text)[first:]
    of_stock = gaps(prompt, stock[: first + 1])[-1]
    if max(*ours, of_stock) <= rounding:
        return TIE
    worst = max(range(len(ours)), key=ours.__getitem__)
    return (
        f"token {first} is {text[first]}, stock's is {stock[first]}; their logits are {ours[0]:.3f} and {of_stock:.3f} "
        f"below the largest, and that of token {first + worst} is {ours[worst]:.3f} below"
    )
