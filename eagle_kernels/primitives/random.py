"""Counter-based noise: a draw depends on its key alone, never on batch size, row order, padding or graph replay.

The generator is Philox4x32-10 (Salmon et al., SC 2011). The key is the request's 64-bit seed; the counter is
(token id // 4, position, stream tag, 0), and word `token id % 4` of the block belongs to the token.
"""

from __future__ import annotations

from ..runtime.language import tl, triton

# Draws for different purposes never share noise: verification and plain sampling draw from this stream, and drafts that
# sample (reference/random.py names theirs) must not.
STREAM_TARGET = 0


@triton.jit
def token_words(seed, position, STREAM: tl.constexpr, start, BLOCK: tl.constexpr):
    """Random 32-bit words uint32 [BLOCK] of the token ids start .. start + BLOCK - 1; `start` is a multiple of 4."""
    quad = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = tl.zeros([BLOCK // 4], dtype=tl.uint32)
    word0, word1, word2, word3 = tl.philox(
        seed.to(tl.int64).to(tl.uint64), quad, zero + position.to(tl.uint32), zero + STREAM, zero
    )
    # [BLOCK / 4] x 4 words -> [BLOCK] with the word index fastest
    return tl.reshape(tl.join(tl.join(word0, word2), tl.join(word1, word3)), [BLOCK])


@triton.jit
def exponential(words):
    """Exponential(1) variates fp32 from 32-bit words: E = -log1p(-u), u = (word + 1/2) / 2^32.

    Small values decide which token wins, so they must be the finely resolved ones: u keeps its relative precision
    near 0 (a uniform of 24 bits would tie once in 140 draws over a vocabulary of 128k, in favour of the lowest id).
    log1p is Kahan's: with v = fl(1 - u), log1p(-u) = log(v) * u / (1 - v).
    """
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.960464477539063e-08)
    rest = 1.0 - uniform
    lost = 1.0 - rest
    return tl.where(lost == 0.0, uniform, -tl.log(rest) * (uniform / tl.where(lost == 0.0, 1.0, lost)))


@triton.jit
def gumbel(words):
    """Standard Gumbel variates fp32 from 32-bit words."""
    return -tl.log(exponential(words))
