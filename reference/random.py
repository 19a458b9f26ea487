"""The counter-based noise of the samplers, in integers that PyTorch has (see eagle_kernels/primitives/random.py).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): key = the request's 64-bit seed,
counter = (token id // 4, position, stream tag, 0), word `token id % 4` of the block belongs to the token.
"""

from __future__ import annotations

import torch

STREAM_TARGET = 0
STREAM_DRAFT = 1

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(seed: torch.Tensor, counter: list[torch.Tensor]) -> list[torch.Tensor]:
    """Four random 32-bit words (in int64) for an int64 seed and four 32-bit counters (in int64), elementwise."""
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    counter0, counter1, counter2, counter3 = counter
    for _ in range(10):
        high0, low0 = _multiply(counter0, _MULTIPLIERS[0])
        high1, low1 = _multiply(counter2, _MULTIPLIERS[1])
        counter0, counter1, counter2, counter3 = high1 ^ counter1 ^ key0, low1, high0 ^ counter3 ^ key1, low0
        key0, key1 = (key0 + _KEY_STEPS[0]) & _MASK, (key1 + _KEY_STEPS[1]) & _MASK
    return [counter0, counter1, counter2, counter3]


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int, stream: int = STREAM_TARGET) -> torch.Tensor:
    """Standard Gumbel noise fp32 [R, num_tokens] for rows with `seeds` [R] and `positions` [R]."""
    tokens = torch.arange(num_tokens, device=seeds.device)
    shape = (len(seeds), num_tokens)
    position = (positions.to(torch.int64) & _MASK)[:, None].expand(shape)
    constant = torch.zeros(shape, dtype=torch.int64, device=seeds.device)
    words = philox(
        seeds.to(torch.int64)[:, None].expand(shape),
        [(tokens // 4).expand(shape), position, constant + stream, constant],
    )
    word = torch.stack(words, dim=-1).gather(-1, (tokens % 4).expand(shape)[..., None])[..., 0]
    # u keeps its relative precision near 0, where the winners are; log1p as Kahan writes it
    uniform = ((word.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    rest = 1.0 - uniform
    lost = 1.0 - rest
    exponential = torch.where(lost == 0.0, uniform, -torch.log(rest) * (uniform / lost))
    return -torch.log(exponential)


def _multiply(value: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32-bit halves of a 32 x 32 bit product, without leaving int64's positive range."""
    low_part = value * (factor & 0xFFFF)
    high_part = value * (factor >> 16)
    low_sum = low_part + ((high_part & 0xFFFF) << 16)
    return ((high_part >> 16) + (low_sum >> 32)) & _MASK, low_sum & _MASK
