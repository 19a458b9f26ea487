"""The counter-based noise of the samplers, in integers that PyTorch has (see eagle_kernels/primitives/random.py).

One block of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) per seed, position,
stream and draw; its words key a hash that permutes the 32-bit integers and gives every token id a word.
"""

from __future__ import annotations

import torch

STREAM_TARGET = 0
STREAM_DRAFT = 1
STREAM_ACCEPT = 2
STREAM_RESIDUAL = 3
STREAM_SIMULATE = 4

_MASK = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
# (shift, multiplier) of each round, and the last shift
_HASH_ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
_HASH_LAST_SHIFT = 14


def philox(seed: torch.Tensor, counter: list[torch.Tensor]) -> list[torch.Tensor]:
    """Four random 32-bit words (in int64) for an int64 seed and four 32-bit counters (in int64), elementwise."""
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    counter0, counter1, counter2, counter3 = counter
    for _ in range(10):
        high0, low0 = _multiply(counter0, _PHILOX_MULTIPLIERS[0])
        high1, low1 = _multiply(counter2, _PHILOX_MULTIPLIERS[1])
        counter0, counter1, counter2, counter3 = high1 ^ counter1 ^ key0, low1, high0 ^ counter3 ^ key1, low0
        key0, key1 = (key0 + _PHILOX_KEY_STEPS[0]) & _MASK, (key1 + _PHILOX_KEY_STEPS[1]) & _MASK
    return [counter0, counter1, counter2, counter3]


def random_block(seeds: torch.Tensor, positions: torch.Tensor, stream: int, draw: int = 0) -> list[torch.Tensor]:
    """Four words in int64, each of the shape of `seeds` and `positions`."""
    positions = positions.to(torch.int64)
    constant = torch.zeros_like(positions)
    counter = [positions & _MASK, (positions >> 32) & _MASK, constant + stream, constant + draw]
    return philox(seeds.to(torch.int64), counter)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, stream: int, draw: int = 0) -> torch.Tensor:
    """Uniforms fp32 in [0, 1), multiples of 2^-24."""
    return (random_block(seeds, positions, stream, draw)[0] >> 8).to(torch.float32) * 2.0**-24


def token_words(key: list[torch.Tensor], num_tokens: int) -> torch.Tensor:
    """The words int64 [R, num_tokens] of token ids 0 .. num_tokens - 1, for the four words [R] of a `random_block`."""
    word = (torch.arange(num_tokens, device=key[0].device) + key[0][:, None]) & _MASK
    for (shift, multiplier), added in zip(_HASH_ROUNDS, key[1:]):
        word = word ^ (word >> shift)
        word = (_multiply(word, multiplier)[1] + added[:, None]) & _MASK
    return word ^ (word >> _HASH_LAST_SHIFT)


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int, stream: int = STREAM_TARGET) -> torch.Tensor:
    """Standard Gumbel noise fp32 [R, num_tokens] for rows with `seeds` [R] and `positions` [R]."""
    return gumbel_of_words(token_words(random_block(seeds, positions, stream), num_tokens))


def gumbel_of_words(words: torch.Tensor) -> torch.Tensor:
    """-ln E fp32 from 32-bit words, where E = -log1p(-u) and u = (word + 1/2) / 2^32."""
    u = (words.to(torch.float64) + 0.5) * 2.0**-32
    return (-(-torch.log1p(-u)).log()).to(torch.float32)


def _multiply(value: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32-bit halves of a 32 x 32 bit product, without leaving int64's positive range."""
    low_part = value * (factor & 0xFFFF)
    high_part = value * (factor >> 16)
    low_sum = low_part + ((high_part & 0xFFFF) << 16)
    return ((high_part >> 16) + (low_sum >> 32)) & _MASK, low_sum & _MASK
