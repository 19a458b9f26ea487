"""The counter-based noise of the samplers, in integers that PyTorch has (see primitives/random.py).

One block of Philox4x32-10 (Salmon et al., SC 2011) per seed, position, stream and draw keys a hash that gives every
token id 64 bits. Noise comes with the 12 fine bits that decide where noisy values are equal: see `largest`.
"""

import torch

STREAM_TARGET = 0
STREAM_DRAFT = 1
STREAM_ACCEPT = 2
STREAM_RESIDUAL = 3
STREAM_SIMULATE = 4

GROUP = 8
# What a group's number is hashed with for its minimum, and for its leader.
MINIMUM = 0x80000000
LEADER = 0xC0000000
NO_NOISE = 0xFFF

_MASK = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(seed: torch.Tensor, counter: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns four random 32-bit words for an int64 seed and four 32-bit counters, elementwise; all in int64."""
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    counter0, counter1, counter2, counter3 = counter
    for _ in range(10):
        high0, low0 = _multiply(counter0, _PHILOX_MULTIPLIERS[0])
        high1, low1 = _multiply(counter2, _PHILOX_MULTIPLIERS[1])
        counter0, counter1, counter2, counter3 = high1 ^ counter1 ^ key0, low1, high0 ^ counter3 ^ key1, low0
        key0, key1 = (key0 + _PHILOX_KEY_STEPS[0]) & _MASK, (key1 + _PHILOX_KEY_STEPS[1]) & _MASK
    return [counter0, counter1, counter2, counter3]


def random_block(seeds: torch.Tensor, positions: torch.Tensor, stream: int, draw: int = 0) -> list[torch.Tensor]:
    """Returns four words in int64, each of the shape of `seeds` and `positions`."""
    positions = positions.to(torch.int64)
    constant = torch.zeros_like(positions)
    counter = [positions & _MASK, (positions >> 32) & _MASK, constant + stream, constant + draw]
    return philox(seeds.to(torch.int64), counter)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, stream: int, draw: int = 0) -> torch.Tensor:
    """Returns uniforms fp32 in [0, 1), multiples of 2^-24."""
    return (random_block(seeds, positions, stream, draw)[0] >> 8).to(torch.float32) * 2.0**-24


def token_words(key: list[torch.Tensor], num_tokens: int, domain: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns 64 bits of each id, two int64 words [R, num_tokens], for the four words [R] of a `random_block`.
    domain: bits that no id has, for words that no id has."""
    key0, key1, key2, key3 = (word[:, None] for word in key)
    high, low = _multiply((torch.arange(num_tokens, device=key0.device) | domain) ^ key0, key1 | 1)
    high_product, low_product = _multiply(low ^ key2, high ^ key3)
    return high_product ^ low_product ^ low, low_product ^ high


def gumbel(words: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Returns plain noise: standard Gumbel noise -ln E fp32 of `token_words`."""
    return (-exponential(words).log()).to(torch.float32)


def fine_bits(words: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Returns 12 bits int64 that tell equal noise of `token_words` apart."""
    return 0xFFF - (words[1] >> 20)


def exponential(words: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Returns E = -log1p(-u) fp64 of `token_words`, u = (word + (low + 1/2) / 2^32) / 2^32."""
    word, low = words
    u = (word.to(torch.float64) + (low.to(torch.float64) + 0.5) * 2.0**-32) * 2.0**-32
    return -torch.log1p(-u.clamp(max=1.0 - 2.0**-53))


def grouped_gumbel(
    seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int, stream: int = STREAM_TARGET
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns grouped noise fp32 [R, num_tokens] of rows with `seeds` and `positions` [R], and its fine bits int64.
    Of the exponentials of tokens 8 g .. 8 g + 7 one has the minimum M, which is an exponential of rate 8: the leader.
    The others exceed M by exponentials of rate 1."""
    key = random_block(seeds, positions, stream)
    token = torch.arange(num_tokens, device=seeds.device)
    num_groups = -(-num_tokens // GROUP)
    group_words = [word[:, token // GROUP] for word in token_words(key, num_groups, MINIMUM)]
    own_words = token_words(key, num_tokens)
    leader = token_words(key, num_groups, LEADER)[0][:, token // GROUP] >> 29
    is_leader = leader == token % GROUP
    minimum = exponential(group_words) / GROUP
    noise = -torch.where(is_leader, minimum, minimum + exponential(own_words)).log()
    return noise.to(torch.float32), torch.where(is_leader, fine_bits(group_words), fine_bits(own_words))


def largest(values: torch.Tensor, fine: torch.Tensor) -> torch.Tensor:
    """Returns the index [R] of the largest of values [R, V]; of equal ones by fine bits [R, V], then the lowest."""
    is_largest = values == values.max(dim=1, keepdim=True).values
    fine = torch.where(is_largest, fine, -1)
    tokens = torch.arange(values.shape[1], device=values.device).expand_as(values)
    # torch.max promises no tie rule
    return torch.where(fine == fine.max(dim=1, keepdim=True).values, tokens, values.shape[1]).min(dim=1).values


def _multiply(value: torch.Tensor, factor: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the high and low 32-bit halves of a 32 x 32 bit product, without leaving int64's positive range."""
    low_part = value * (factor & 0xFFFF)
    high_part = value * (factor >> 16)
    low_sum = low_part + ((high_part & 0xFFFF) << 16)
    return ((high_part >> 16) + (low_sum >> 32)) & _MASK, low_sum & _MASK
