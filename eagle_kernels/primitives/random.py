"""Counter-based noise: a draw depends on its key alone, never on batch size, row order, padding or graph replay.

Whatever is random at one position of one request begins with one Philox4x32-10 block (Salmon et al., SC 2011): the key
is the request's 64-bit seed, the counter (position, position >> 32, stream, draw). A few numbers are made of its words
directly (`uniform`). For numbers of every token they key a hash that gives each token id 64 bits of its own
(`token_words`): two rounds of multiply-and-fold as in wyhash, each a 32 x 32 -> 64 bit product and exclusive ors. The
second product's factors are folded in once more, as a product forgets one factor where the other is 0: neighbouring ids
would share such words, and words of 0 win whatever the logits are.

No key may serve two draws of a text, unless nothing that was decided between them depends on the first one: a number is
no longer random once something made of it is known. Coins are keyed by the place in the tree for this reason (traversal
and block verification look beyond what they accept). The keys of drafts do come again, of drafts that no verification
has read: `engine/drafters/model_drafter.py` says what this needs.

There are two ways from these words to Gumbel noise -ln E, for independent exponentials E of rate 1, one of each token:

plain       E is made of the token's own words: `add_gumbel`.
grouped     The tokens 8 g .. 8 g + 7 are a group, and the smallest of its eight exponentials is drawn first. It is an
            exponential M of rate 8, made of words of the group, and each of the eight is as likely to be the one that
            has it, whatever M is: words of the group choose this leader. All others are known to exceed M, and as an
            exponential has no memory, what they exceed it by is again an exponential of rate 1, independent of all
            else: made of the token's own words. So M for the leader and M + E for the others are eight independent
            exponentials of rate 1, exactly. Of a vocabulary that ends within a group the last ones are not asked for,
            which changes nothing for the others.

Target tokens are drawn with grouped noise (`add_grouped_gumbel`): no noise of a group exceeds -ln M, so one hash bounds
eight tokens (`add_group_bound`), and few groups have to be looked at. Whatever else is drawn has plain noise.
"""

from typing import Any, NamedTuple

from ..runtime.language import HAS_WIDE_PRODUCT, tl, triton

# Draws for different purposes never share noise. Plain sampling and sample-and-match draw tokens from TARGET.
STREAM_TARGET = 0
STREAM_DRAFT = 1
STREAM_ACCEPT = 2
STREAM_RESIDUAL = 3
STREAM_SIMULATE = 4

# Tokens that share the smallest of their exponentials.
GROUP = tl.constexpr(8)

# No grouped noise is larger, and no plain noise, which ends ln 8 below.
LARGEST_GUMBEL = tl.constexpr(47.14)

# What a group's number is hashed with, so that neither its minimum nor its leader shares words with a token.
_HAS_WIDE_PRODUCT = tl.constexpr(HAS_WIDE_PRODUCT)
_MINIMUM = tl.constexpr(0x80000000)
_LEADER = tl.constexpr(0xC0000000)


class Noise(NamedTuple):
    """The key of one row's noise. Rows that need none do without the eighty instructions of `noise_key`."""

    seed: Any
    position: Any
    stream: Any


class Coins(NamedTuple):
    """Pointers to what an op's coins and noise are keyed by: its arguments of these names; None: not given."""

    seeds: Any
    positions: Any
    simulated_rates: Any  # see accept_policy.py


@triton.jit
def noise_key(noise):
    """Returns the four words that the noise of a row's tokens is keyed by."""
    return random_block(noise.seed, noise.position, noise.stream, 0)


@triton.jit
def random_block(seed, position, STREAM: tl.constexpr, draw):
    """Returns four words uint32, for integer scalars or for tensors of one shape."""
    position = position.to(tl.int64)
    return tl.philox(
        seed.to(tl.int64).to(tl.uint64),
        position.to(tl.uint32),
        (position >> 32).to(tl.uint32),
        (position * 0 + STREAM).to(tl.uint32),
        (position * 0 + draw).to(tl.uint32),
    )


@triton.jit
def uniform(seed, position, STREAM: tl.constexpr, draw):
    """Returns a uniform fp32 in [0, 1), a multiple of 2^-24: `uniform < p` never holds for p = 0, always for p = 1."""
    word, _, _, _ = random_block(seed, position, STREAM, draw)
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def token_words(key, ids):
    """Returns 64 bits of each token id, for the four words of a `random_block`.
    They are a word uint32 and a second one that tells equal words apart."""
    key0, key1, key2, key3 = key
    # odd: different ids have different low halves
    low, high = _halves_of_product(ids.to(tl.uint32) ^ key0, key1 | 1)
    product_low, product_high = _halves_of_product(low ^ key2, high ^ key3)
    return product_high ^ product_low ^ low, product_low ^ high


@triton.jit
def _halves_of_product(left, right):
    """Returns the lower and the upper 32 bits of the product of two uint32."""
    if _HAS_WIDE_PRODUCT:
        product = left.to(tl.uint64) * right.to(tl.uint64)
        return product.to(tl.uint32), (product >> 32).to(tl.uint32)
    else:
        return left * right, tl.umulhi(left, right)


@triton.jit
def fine_bits(words):
    """Returns uint32 that tell apart noise that is equal in fp32: the highest 12 bits, larger for more noise."""
    _, low = words
    return (low ^ 0xFFFFFFFF) & 0xFFF00000


@triton.jit
def add_gumbel(values, words):
    """Returns values + standard Gumbel noise -ln E of `token_words`.
    E = -log1p(-u), u = (word + (low + 1/2) / 2^32) / 2^32.
    It gives the same bits wherever it is compiled: every product is part of a named operation."""
    return _add_noise(values, _add_exponential(0.0, words))


@triton.jit
def group_words(key, groups):
    """Returns of groups, id // GROUP, what `token_words` returns of tokens."""
    return token_words(key, groups.to(tl.uint32) | _MINIMUM)


@triton.jit
def grouped_words(key, ids):
    """Returns what the grouped noise of token ids is made of: their own words, their groups', and which of them lead.
    The leader has a hash of its own, as `low` is not as random as `word`: of a product, whose last bits are more often
    0 than 1, and of words near 0, those of winners, it is the product's upper half as well, and rather small."""
    group = ids.to(tl.uint32) // GROUP
    leader, _ = token_words(key, group | _LEADER)
    return token_words(key, ids), group_words(key, group), leader >> 29 == ids.to(tl.uint32) % GROUP


@triton.jit
def add_grouped_gumbel(values, words):
    """Returns values + the grouped noise of `grouped_words`, and the fine bits of this noise."""
    own, group, is_leader = words
    minimum = _add_exponential(0.0, group) * 0.125
    exponential = tl.where(is_leader, minimum, _add_exponential(minimum, own))
    return _add_noise(values, exponential), tl.where(is_leader, fine_bits(group), fine_bits(own))


@triton.jit
def add_group_bound(logits, scale, words):
    """Returns an upper bound of value + grouped noise, for tokens of a group whose value is at most logits * scale.
    `words` are those of `group_words`. No logarithm is taken; the bound is by at most 0.07 above logits * scale - ln M
    for words from 2^8 to 2^28. E >= u, and the bits of a float, as an integer, are its logarithm with the mantissa
    taken linearly, which is less. They become a float without a conversion: as the mantissa of 2^23 + bits / 128 -
    constant."""
    word, _ = words
    u = tl.fma(word.to(tl.float32), 2.3283064365386963e-10, 2.710505431213761e-20)
    steps = ((u.to(tl.int32, bitcast=True) >> 7) + 0x4AC20000).to(tl.float32, bitcast=True)
    # ln 2 (193 - steps / 2^16) + ln 8, and what rounding may take away
    return tl.fma(steps, -1.0576584424268e-05, tl.fma(logits, scale, 135.857))


@triton.jit
def _add_noise(values, exponential):
    """Returns values - ln E."""
    return tl.fma(tl.log2(exponential), -0.6931471805599453, values)


@triton.jit
def _add_exponential(values, words):
    """Returns values + E. The largest noise decides which token wins, and u is near 0 there: log1p's series keeps what
    1 - u loses. (With 24-bit uniforms every 140th draw over a vocabulary of 128k would tie.)"""
    word, low = words
    wide = word.to(tl.float32)
    u = tl.fma(low.to(tl.float32), 5.421010862427522e-20, tl.fma(wide, 2.3283064365386963e-10, 2.710505431213761e-20))
    factor = tl.fma(u, tl.fma(u, tl.fma(u, tl.fma(u, 0.2, 0.25), 0.3333333333333333), 0.5), 1.0)
    rest = tl.maximum(tl.fma(wide, -2.3283064365386963e-10, 1.0), 2.9802322387695312e-08)
    logarithm = tl.fma(tl.log2(rest), -0.6931471805599453, values)
    return tl.where(u < 0.0625, tl.fma(u, factor, values), logarithm)
