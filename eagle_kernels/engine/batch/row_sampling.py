"""What the requests of a batch asked of their tokens, as tensors on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..requests.sampling_params import Features, SamplingParams

# name, dtype, and the value that is off
_NUMBERS = (
    ("temperature", torch.float32, 0.0),
    ("top_k", torch.int32, 0),
    ("top_p", torch.float32, 1.0),
    ("min_p", torch.float32, 0.0),
    ("repetition_penalty", torch.float32, 1.0),
    ("frequency_penalty", torch.float32, 0.0),
    ("presence_penalty", torch.float32, 0.0),
)
_FILTERS, _PENALTIES = ("top_k", "top_p", "min_p"), ("repetition_penalty", "frequency_penalty", "presence_penalty")


class RowSampling:
    """The sampling parameters of the rows of a batch: tensors [R] that stay where they are.

    seeds          [R] int64
    prompt_mask    [R, ceil(V / 32)] int32 bits of the tokens in the prompt, and
    output_counts  [R, V] int32, of the committed output; both None until a request has a penalty
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.vocab_size = vocab_size
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.numbers = {name: torch.full((num_rows,), off, dtype=dtype, device=device) for name, dtype, off in _NUMBERS}
        self.prompt_mask: Tensor | None = None
        self.output_counts: Tensor | None = None

    def add_penalties(self) -> None:
        """Makes room for the tokens of all rows."""
        if self.prompt_mask is None:
            shape, device = (len(self.seeds), self.vocab_size), self.seeds.device
            self.output_counts = torch.zeros(shape, dtype=torch.int32, device=device)
            words = (shape[0], -(-shape[1] // 32))
            self.prompt_mask = torch.zeros(words, dtype=torch.int32, device=device)

    def set_row(self, row: int, params: SamplingParams, seed: int, prompt: list[int]) -> None:
        """Gives row `row` to a request."""
        self.seeds[row] = seed
        for name, tensor in self.numbers.items():
            tensor[row] = getattr(params, name)
        if params.has_penalties:
            self.add_penalties()
            self.output_counts[row] = 0
            self.prompt_mask[row] = _bits(prompt, self.prompt_mask.shape[1]).to(self.prompt_mask.device)

    def tensors(self) -> list[Tensor]:
        """Returns every tensor that belongs to rows."""
        held = [self.seeds, *self.numbers.values(), self.prompt_mask, self.output_counts]
        return [tensor for tensor in held if tensor is not None]

    def arguments(self, features: Features, rows: slice) -> dict[str, Tensor]:
        """Returns the arguments of `verify_tree_sampled` for these rows."""
        names = ["temperature"]
        names += _FILTERS if features.filters else ()
        names += _PENALTIES if features.penalties else ()
        values = {name: self.numbers[name][rows] for name in names} | {"seeds": self.seeds[rows]}
        if features.penalties:
            values |= {"prompt_mask": self.prompt_mask[rows], "output_counts": self.output_counts[rows]}
        return values

    def count(self, features: Features, rows: slice, tokens: Tensor) -> None:
        """Adds committed tokens [B, T], -1 for none, to the output of these rows."""
        if features.penalties:
            is_token = (tokens >= 0).to(torch.int32)
            self.output_counts[rows].scatter_add_(1, tokens.clamp(min=0).to(torch.int64), is_token)


def _bits(tokens: list[int], num_words: int) -> Tensor:
    """Returns int32 [num_words] in which bit v % 32 of word v // 32 is set for every token v."""
    words: dict[int, int] = {}
    for token in set(tokens):
        words[token // 32] = words.get(token // 32, 0) | 1 << token % 32
    mask = torch.zeros(num_words, dtype=torch.int64)
    for word, value in words.items():
        mask[word] = value - (1 << 32) * (value >> 31)
    return mask.to(torch.int32)
