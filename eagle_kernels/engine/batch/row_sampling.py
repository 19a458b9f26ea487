"""The sampling parameters of the requests of a batch, as tensors on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..requests.sampling_params import Features, SamplingParams

_FILTERS, _PENALTIES = ("top_k", "top_p", "min_p"), ("repetition_penalty", "frequency_penalty", "presence_penalty")


class RowSampling:
    """Holds the sampling parameters of the rows of a batch: tensors [R] that stay where they are.

    seeds          [R] int64
    numbers        [R] of each field of `SamplingParams`: top_k int32, the others fp32
    prompt_mask    [R, ceil(V / 32)] int32 bits of the tokens in the prompt, and
    output_counts  [R, V] int32, of the committed output; both None until a request has a penalty
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.vocab_size = vocab_size
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.numbers: dict[str, Tensor] = {}
        for name in ("temperature", *_FILTERS, *_PENALTIES):
            off, dtype = getattr(SamplingParams(), name), torch.int32 if name == "top_k" else torch.float32
            self.numbers[name] = torch.full((num_rows,), off, dtype=dtype, device=device)
        self.prompt_mask: Tensor | None = None
        self.output_counts: Tensor | None = None

    def add_penalties(self) -> None:
        """Makes room for the tokens of all rows."""
        if self.prompt_mask is None:
            num_rows, options = len(self.seeds), {"dtype": torch.int32, "device": self.seeds.device}
            self.output_counts = torch.zeros(num_rows, self.vocab_size, **options)
            self.prompt_mask = torch.zeros(num_rows, -(-self.vocab_size // 32), **options)

    def set_row(self, row: int, params: SamplingParams, seed: int, prompt: list[int]) -> None:
        """Gives row `row` to a request."""
        self.seeds[row] = seed
        for name, tensor in self.numbers.items():
            tensor[row] = getattr(params, name)
        if params.has_penalties:
            self.add_penalties()
            self.output_counts[row] = 0
            is_in_prompt = np.zeros(32 * self.prompt_mask.shape[1], dtype=bool)
            is_in_prompt[prompt] = True
            words = torch.from_numpy(np.packbits(is_in_prompt, bitorder="little").view(np.int32))
            self.prompt_mask[row] = words.to(self.prompt_mask.device)

    def tensors(self) -> list[Tensor]:
        """Returns every tensor that belongs to rows."""
        held = [self.seeds, *self.numbers.values(), self.prompt_mask, self.output_counts]
        return [tensor for tensor in held if tensor is not None]

    def arguments(self, features: Features, rows: slice) -> dict[str, Tensor]:
        """Returns the arguments of `verify_tree_sampled` for these rows."""
        names = ("temperature", *(_FILTERS if features.filters else ()), *(_PENALTIES if features.penalties else ()))
        values = {name: self.numbers[name][rows] for name in names} | {"seeds": self.seeds[rows]}
        if features.penalties:
            values |= {"prompt_mask": self.prompt_mask[rows], "output_counts": self.output_counts[rows]}
        return values

    def count(self, features: Features, rows: slice, tokens: Tensor) -> None:
        """Adds committed tokens [B, T], -1 for none, to the output of these rows."""
        if features.penalties:
            is_token = (tokens >= 0).to(torch.int32)
            self.output_counts[rows].scatter_add_(1, tokens.clamp(min=0).to(torch.int64), is_token)
