"""The sampling parameters of the requests of a batch, as tensors on the device."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from ..requests.sampling_params import MOST_ENDS, Features, SamplingParams
from .transfer import to_device

_FILTERS, _PENALTIES = ("top_k", "top_p", "min_p"), ("repetition_penalty", "frequency_penalty", "presence_penalty")


class RowSampling:
    """Holds the sampling parameters of the rows of a batch: tensors [R] that stay where they are.

    seeds          [R] int64
    numbers        [R] of each field of `SamplingParams`: top_k int32, the others fp32
    prompt_mask    [R, ceil(V / 32)] int32 bits of the tokens in the prompt, and
    output_counts  [R, V] int32, of the committed output; both None until a request has a penalty
    minimums       [R, 66] int64: min_new_tokens, tokens of the prompt, and the end tokens, -1 padded; None until a
                   request has min_new_tokens
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
        self.minimums: Tensor | None = None

    def make_room(self, features: Features) -> None:
        """Makes room for what such requests need of all rows."""
        num_rows, device = len(self.seeds), self.seeds.device
        if features.minimum and self.minimums is None:
            self.minimums = torch.full((num_rows, 2 + MOST_ENDS), -1, dtype=torch.int64, device=device)
        if features.penalties and self.prompt_mask is None:
            options = {"dtype": torch.int32, "device": device}
            self.output_counts = torch.zeros(num_rows, self.vocab_size, **options)
            self.prompt_mask = torch.zeros(num_rows, -(-self.vocab_size // 32), **options)

    def set_row(self, row: int, params: SamplingParams, seed: int, prompt: list[int], ends: Iterable[int] = ()) -> None:
        """Gives row `row` to a request, with the tokens that end it."""
        self.seeds[row] = seed
        self.make_room(Features.of([params]))
        if self.minimums is not None:
            numbers = [params.min_new_tokens, len(prompt), *(ends if params.min_new_tokens else ())]
            numbers += [-1] * (self.minimums.shape[1] - len(numbers))
            self.minimums[row] = to_device(numbers, self.minimums.device)
        for name, tensor in self.numbers.items():
            tensor[row] = getattr(params, name)
        if params.has_penalties:
            self.output_counts[row] = 0
            is_in_prompt = np.zeros(32 * self.prompt_mask.shape[1], dtype=bool)
            is_in_prompt[prompt] = True
            words = torch.from_numpy(np.packbits(is_in_prompt, bitorder="little").view(np.int32))
            self.prompt_mask[row] = words.to(self.prompt_mask.device)

    def tensors(self) -> list[Tensor]:
        """Returns every tensor that belongs to rows."""
        held = [self.seeds, *self.numbers.values(), self.prompt_mask, self.output_counts, self.minimums]
        return [tensor for tensor in held if tensor is not None]

    def arguments(self, features: Features, rows: slice | Tensor) -> dict[str, Tensor]:
        """Returns the arguments of `verify_tree_sampled` for these rows."""
        names = ("temperature", *(_FILTERS if features.filters else ()), *(_PENALTIES if features.penalties else ()))
        values = {name: self.numbers[name][rows] for name in names} | {"seeds": self.seeds[rows]}
        if features.penalties:
            values |= {"prompt_mask": self.prompt_mask[rows], "output_counts": self.output_counts[rows]}
        return values

    def early_ends(self, rows: slice | Tensor, lengths: Tensor) -> dict[str, Tensor]:
        """Returns the arguments by which `penalize_logits` keeps end tokens back, after `lengths` committed tokens."""
        least, prompt_lengths, ends = self.minimums[rows].split([1, 1, MOST_ENDS], dim=1)
        num_output_tokens = lengths + 1 - prompt_lengths[:, 0]
        return {
            "min_tokens": least[:, 0].clone(), "num_output_tokens": num_output_tokens, "end_token_ids": ends.clone()
        }  # fmt: skip

    def count(self, features: Features, rows: slice, tokens: Tensor) -> None:
        """Adds committed tokens [B, T], -1 for none, to the output of these rows."""
        if features.penalties:
            is_token = (tokens >= 0).to(torch.int32)
            self.output_counts[rows].scatter_add_(1, tokens.clamp(min=0).to(torch.int64), is_token)

    def count_first(self, features: Features, rows: Tensor, tokens: Tensor) -> None:
        """Adds a token [R] each to the output of rows [R], none of which is there twice."""
        if features.penalties:
            self.output_counts[rows, tokens] += torch.ones_like(tokens, dtype=torch.int32)
