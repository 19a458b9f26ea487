"""The target's hidden states over windows of text: computed in one pass, and learnt from by drafts of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.protocol import FINAL_NORM
from eagle_kernels.reference.causal_attend import causal_attend, positions_of

from .unrolled import LOGIT_ROWS, Lesson


class View(NamedTuple):
    """Holds some windows: what a draft reads of them, and the target's last stream, from which it predicts."""

    tokens: Tensor  # [B, T] int64
    features: Tensor  # [B, T, F]
    normed: Tensor  # [B, T, H]


class States:
    """Holds windows of tokens [W, T] and the target's streams at each, [W, T, len(layers), H]; the last is FINAL_NORM.

    It takes 2 bytes for each element on a GPU: 2 KiB a token of a target of width 256 whose four streams are read.
    """

    def __init__(self, tokens: Tensor, streams: Tensor, layers: tuple[int, ...]) -> None:
        self.tokens, self.streams, self.layers = tokens, streams, layers

    def __len__(self) -> int:
        return len(self.tokens)

    def view(self, places: Tensor, layers: Sequence[int]) -> View:
        """Returns the windows at `places` [B], with the features that a draft of these layers reads."""
        streams = self.streams[places.to(self.streams.device)]
        features = torch.cat([streams[:, :, self.layers.index(layer)] for layer in layers], dim=-1)
        return View(self.tokens[places.to(self.tokens.device)].long(), features, streams[:, :, -1])


@torch.no_grad()
def capture_states(
    target: Decoder,
    windows: Tensor,
    layers: Sequence[int],
    batch_size: int,
    tell: Callable[[str], None] | None = None,
) -> States:
    """Returns the target's states over windows [W, T]; a pass of batch_size windows at a time.

    layers: hidden_states indices, as in `capture` of a target; FINAL_NORM is read besides.
    """
    layers = (*sorted({*layers} - {FINAL_NORM}), FINAL_NORM)
    dtype = torch.bfloat16 if target.device.type == "cuda" else target.dtype
    size = (*windows.shape, len(layers), target.hidden_size)
    streams = torch.empty(size, dtype=dtype, device=target.device)
    for first in range(0, len(windows), batch_size):
        tokens = windows[first : first + batch_size].to(target.device).long()
        with torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=target.device.type == "cuda"):
            # the logits of one row are the fewest that a target computes
            features = target(tokens, positions_of(tokens), causal_attend, capture=layers, last_only=True).features
        streams[first : first + batch_size] = features.unflatten(-1, (len(layers), -1))
        if tell is not None:
            tell(f"states of {min(first + batch_size, len(windows))} of {len(windows)} windows")
    return States(windows.to(target.device, torch.int32), streams, layers)


@torch.no_grad()
def lesson_of(target: Decoder, view: View, target_ids: Tensor | None) -> Lesson:
    """Returns what the target says in every row; target_ids: the draft's tokens, None: all."""
    choices, probs = [], []
    for rows in view.normed.flatten(0, 1).split(LOGIT_ROWS):
        logits = target.lm_head(rows.to(target.lm_head.weight.dtype)[None])[0].float()
        choices.append(logits.argmax(-1))
        probs.append((logits if target_ids is None else logits[:, target_ids]).softmax(-1))
    shape = view.tokens.shape
    return Lesson(view.features, torch.cat(choices).view(shape), torch.cat(probs).unflatten(0, shape))
