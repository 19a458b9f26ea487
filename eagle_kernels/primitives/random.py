"""Counter-based noise: a draw depends on its key alone, never on batch size, row order, padding or graph replay.

Whatever is random at one position of one request begins with one Philox4x32-10 block (Salmon et al., SC 2011): the key
is the request's 64-bit seed, the counter (position, position >> 32, stream, draw). Its words are what few numbers are
made of (`uniform`), or they key a hash that gives every token id 64 bits of its own (`token_words`): two rounds of
multiply-and-fold as in wyhash, each a 32 x 32 -> 64 bit product and exclusive ors.
"""

from __future__ import annotations

from ..runtime.language import tl, triton

# Draws for different purposes never share noise. Plain sampling and sample-and-match draw tokens from TARGET.
STREAM_TARGET = 0
STREAM_DRAFT = 1
STREAM_ACCEPT = 2
STREAM_RESIDUAL = 3
STREAM_SIMULATE = 4

# No noise is larger.
LARGEST_GUMBEL = tl.constexpr(45.06)


@triton.jit
def random_block(seed, position, STREAM: tl.constexpr, draw):
    """Four 32-bit words uint32, for integer scalars or for tensors of one shape."""
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
    """A uniform fp32 in [0, 1), a multiple of 2^-24, so that `uniform < p` never holds for p = 0, always for p = 1."""
    word, _, _, _ = random_block(seed, position, STREAM, draw)
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def token_words(key, ids):
    """64 bits of each token id, for the four words of a `random_block`: a random word uint32 and, to tell equal words
    apart, the low half of the product that it was folded from."""
    key0, key1, key2, key3 = key
    product = (ids.to(tl.uint32) ^ key0).to(tl.uint64) * key1.to(tl.uint64)
    product = (product.to(tl.uint32) ^ key2).to(tl.uint64) * ((product >> 32).to(tl.uint32) ^ key3).to(tl.uint64)
    low = product.to(tl.uint32)
    return (product >> 32).to(tl.uint32) ^ low, low


@triton.jit
def gumbel(words):
    """Standard Gumbel noise -ln E fp32 of `token_words`: E = -log1p(-u), u = (word + (low + 1/2) / 2^32) / 2^32."""
    return _log2_exponential(words) * -0.6931471805599453


@triton.jit
def add_gumbel(values, words):
    """values + gumbel(words), in the same bits wherever it is compiled: every product is part of a named operation."""
    return tl.fma(_log2_exponential(words), -0.6931471805599453, values)


@triton.jit
def add_gumbel_bound(logits, scale, words):
    """At least add_gumbel(logits * scale, words), without a logarithm: by at most 0.07 more for words from 2^8 to 2^28.

    E >= u, and the bits of a float, as an integer, are its logarithm with the mantissa taken linearly, which is less.
    They become a float without a conversion: as the mantissa of 2^23 + bits / 128 - constant.
    """
    word, _ = words
    u = tl.fma(word.to(tl.float32), 2.3283064365386963e-10, 2.710505431213761e-20)
    steps = ((u.to(tl.int32, bitcast=True) >> 7) + 0x4AC20000).to(tl.float32, bitcast=True)
    # ln 2 (193 - steps / 2^16), and what rounding may take away
    return tl.fma(steps, -1.0576584424268e-05, tl.fma(logits, scale, 133.7775))


@triton.jit
def _log2_exponential(words):
    """log2 E. The largest noise decides which token wins, and u is near 0 there: log1p's series keeps what 1 - u loses.

    (With 24-bit uniforms every 140th draw over a vocabulary of 128k would tie, in favour of the lowest id.)
    """
    word, low = words
    wide = word.to(tl.float32)
    u = tl.fma(low.to(tl.float32), 5.421010862427522e-20, tl.fma(wide, 2.3283064365386963e-10, 2.710505431213761e-20))
    series = u * tl.fma(u, tl.fma(u, tl.fma(u, tl.fma(u, 0.2, 0.25), 0.3333333333333333), 0.5), 1.0)
    rest = tl.maximum(tl.fma(wide, -2.3283064365386963e-10, 1.0), 2.9802322387695312e-08)
    return tl.log2(tl.where(u < 0.0625, series, tl.log2(rest) * -0.6931471805599453))
