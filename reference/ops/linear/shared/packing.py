"""The layout in which the ops read quantised weights: packing, unpacking, and what the numbers stand for.

Weights [N, K] of 4 or 8 bits lie in words int32 [ceil(N / 16), ceil(K / 128), 16, W], W = 128 * bits / 32 (16 or 32).
Two words side by side hold two columns of a block side by side, w and w + 1 for an even w, and those W, 2 * W, ... to
the right of them. The lower half of the first word has the first half of those in line with w, from the lowest bits on,
its upper half the first half of those in line with w + 1; the second word has the second halves likewise. What is past
N and K is 0.

Scales and zero points of groups of 32, 64 or 128 columns lie in pairs of neighbouring groups of an output, [.., N, 2].
"""

import torch

BLOCK_OUTPUTS, BLOCK_COLUMNS = 16, 128


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns words for values [N, K] of this many bits; of negative ones the lowest bits are taken."""
    num_outputs, num_columns = values.shape
    pad = (0, -num_columns % BLOCK_COLUMNS, 0, -num_outputs % BLOCK_OUTPUTS)
    wide = torch.nn.functional.pad(values.to(torch.uint8) & ((1 << bits) - 1), pad)
    strips, blocks = wide.shape[0] // BLOCK_OUTPUTS, wide.shape[1] // BLOCK_COLUMNS
    places = wide.view(strips, BLOCK_OUTPUTS, blocks, 32 // bits, BLOCK_COLUMNS * bits // 32)
    words = torch.zeros(strips, blocks, BLOCK_OUTPUTS, places.shape[-1], dtype=torch.int32, device=values.device)
    for place in reversed(range(32 // bits)):
        words = (words << bits) | places[:, :, :, place].transpose(1, 2)
    return exchange_halves(words)


def unpack(words: torch.Tensor, bits: int, num_outputs: int, num_columns: int) -> torch.Tensor:
    """Returns values [N, K] int64 of 0 to 2^bits - 1."""
    shifts = bits * torch.arange(32 // bits, device=words.device)[:, None]
    values = (exchange_halves(words).to(torch.int64)[..., None, :] >> shifts) & ((1 << bits) - 1)
    return values.transpose(1, 2).flatten(2).flatten(0, 1)[:num_outputs, :num_columns]


def exchange_halves(words: torch.Tensor) -> torch.Tensor:
    """Returns words with the upper half of each first one of two and the lower half of the second one exchanged."""
    halves = words.contiguous().view(torch.int16).unflatten(-1, (-1, 2, 2))
    return halves.transpose(-1, -2).flatten(-3).view(torch.int32)


def pair_groups(numbers: torch.Tensor, group_size: int, num_columns: int) -> torch.Tensor:
    """Returns numbers [G, N] as the ops read them: those of two groups of an output, of 16 bits, together.
    There are groups for whole blocks of columns; those that no column is in are 0."""
    together = 2
    groups = -(-num_columns // BLOCK_COLUMNS) * BLOCK_COLUMNS // group_size
    paired = numbers.new_zeros(-(-groups // together), numbers.shape[1], together)
    for group in range(len(numbers)):
        paired[group // together, :, group % together] = numbers[group]
    return paired


def by_column(numbers: torch.Tensor, group_size: int | None, num_columns: int) -> torch.Tensor:
    """Returns a number for each weight, [N, K], out of those of groups, as above, or out of [N]."""
    if group_size is None:
        return numbers[:, None].expand(-1, num_columns)
    groups = numbers.transpose(1, 2).flatten(0, 1)
    return groups.T.repeat_interleave(group_size, dim=1)[:, :num_columns]


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Returns in float64 what the bytes of float8_e4m3fn stand for, without torch's own conversion."""
    exponent, fraction = (codes >> 3) & 15, (codes & 7).double()
    normal = (1.0 + fraction / 8) * torch.exp2(exponent.double() - 7)
    value = torch.where(exponent == 0, fraction / 8 * 2.0**-6, normal)
    value = torch.where((codes & 127) == 127, float("nan"), value)
    return torch.where(codes >= 128, -value, value)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Returns in float64 what floats of 4 bits stand for."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64, device=codes.device)
    return torch.where(codes >= 8, -values[codes & 7], values[codes & 7])
