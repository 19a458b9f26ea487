"""The noise: the reference's words, bounds that hold, uniform and independent bits, few ties, few instructions."""

import functools
import math
import os
import re
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

from eagle_kernels.ops.sampling.shared.logits import Processors, Row
from eagle_kernels.ops.sampling.shared.sampling import Found, Scratch, Share, scan_slice
from eagle_kernels.primitives.ordering import LOWEST_KEY, bits_value, largest_key, noisy_key, noisy_key_id
from eagle_kernels.primitives.random import (
    LARGEST_GUMBEL,
    STREAM_ACCEPT,
    STREAM_DRAFT,
    STREAM_RESIDUAL,
    STREAM_SIMULATE,
    STREAM_TARGET,
    Noise,
    add_group_bound,
    add_grouped_gumbel,
    add_gumbel,
    fine_bits,
    group_words,
    grouped_words,
    random_block,
    token_words,
    uniform,
)
from eagle_kernels.reference import random as reference
from eagle_kernels.runtime.language import tl, triton
from op_tests.harness.statistics import assert_follows_law

STREAMS = (STREAM_TARGET, STREAM_DRAFT, STREAM_ACCEPT, STREAM_RESIDUAL, STREAM_SIMULATE)
# Neighbours, and ids that differ in one high bit; of a large vocabulary the last ones too.
IDS = (0, 1, 2, 3, 7, 8, 31, 32, 63, 64, 1000, 1001, 65536, 65537, 128000, 262143)
NUM_KEYS = 2**16
VOCAB_SIZE = 128_256
# Instructions: for each token more, and with all that a slice of 1024 takes and one turn of looking at 32 in full.
MOST_PER_TOKEN, MOST_IN_ALL = 8, 20
# The first of the ids that stand for the minima of groups, and for their leaders.
MINIMA, LEADERS = reference.MINIMUM, reference.LEADER


@triton.jit
def _words_kernel(seeds_ptr, positions_ptr, ids_ptr, block_ptr, uniform_ptr, words_ptr, draw, num_keys,
                  STREAM: tl.constexpr, NUM_IDS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """block [4, num_keys], uniform [num_keys] and words [2, num_keys, NUM_IDS] of keys and ids."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_key = index < num_keys
    seed = tl.load(seeds_ptr + index, mask=is_key, other=0)
    position = tl.load(positions_ptr + index, mask=is_key, other=0)
    key0, key1, key2, key3 = random_block(seed, position, STREAM, draw)
    tl.store(block_ptr + index, key0.to(tl.int64), mask=is_key)
    tl.store(block_ptr + num_keys + index, key1.to(tl.int64), mask=is_key)
    tl.store(block_ptr + 2 * num_keys + index, key2.to(tl.int64), mask=is_key)
    tl.store(block_ptr + 3 * num_keys + index, key3.to(tl.int64), mask=is_key)
    tl.store(uniform_ptr + index, uniform(seed, position, STREAM, draw), mask=is_key)
    place = tl.arange(0, NUM_IDS)
    ids = tl.load(ids_ptr + place)[None, :]
    word, low = token_words((key0[:, None], key1[:, None], key2[:, None], key3[:, None]), ids)
    offset = index[:, None] * NUM_IDS + place[None, :]
    is_word = is_key[:, None] & (place < NUM_IDS)[None, :]
    tl.store(words_ptr + offset, word.to(tl.int64), mask=is_word)
    tl.store(words_ptr + num_keys * NUM_IDS + offset, low.to(tl.int64), mask=is_word)


@triton.jit
def _noise_kernel(words_ptr, leads_ptr, logits_ptr, scales_ptr, plain_ptr, grouped_ptr, bound_ptr, plain_fine_ptr,
                  grouped_fine_ptr, num_words, BLOCK: tl.constexpr):  # fmt: skip
    """Of words [4, num_words], a token's own and its group's: logit * scale with either noise and as bounded by the
    group's words; the fine bits of either."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_words
    word = tl.load(words_ptr + index, mask=mask, other=0).to(tl.uint32)
    low = tl.load(words_ptr + num_words + index, mask=mask, other=0).to(tl.uint32)
    group_word = tl.load(words_ptr + 2 * num_words + index, mask=mask, other=0).to(tl.uint32)
    group_low = tl.load(words_ptr + 3 * num_words + index, mask=mask, other=0).to(tl.uint32)
    is_leader = tl.load(leads_ptr + index, mask=mask, other=0) != 0
    logit = tl.load(logits_ptr + index, mask=mask, other=0.0)
    scale = tl.load(scales_ptr + index, mask=mask, other=0.0)
    grouped, grouped_fine = add_grouped_gumbel(logit * scale, ((word, low), (group_word, group_low), is_leader))
    tl.store(plain_ptr + index, add_gumbel(logit * scale, (word, low)), mask=mask)
    tl.store(grouped_ptr + index, grouped, mask=mask)
    tl.store(bound_ptr + index, add_group_bound(logit, scale, (group_word, group_low)), mask=mask)
    tl.store(plain_fine_ptr + index, (fine_bits((word, low)) >> 20).to(tl.int64), mask=mask)
    tl.store(grouped_fine_ptr + index, (grouped_fine >> 20).to(tl.int64), mask=mask)


@triton.jit
def _grouped_kernel(seeds_ptr, positions_ptr, ids_ptr, noise_ptr, fine_ptr, leads_ptr, bound_ptr, num_keys,
                    NUM_IDS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Grouped noise of ids, its fine bits, which of them lead and their groups' bounds: [num_keys, NUM_IDS]."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds_ptr + index, mask=index < num_keys, other=0)
    position = tl.load(positions_ptr + index, mask=index < num_keys, other=0)
    key0, key1, key2, key3 = random_block(seed, position, 0, 0)
    key = (key0[:, None], key1[:, None], key2[:, None], key3[:, None])
    place = tl.arange(0, NUM_IDS)
    ids = tl.load(ids_ptr + place)[None, :]
    words = grouped_words(key, ids)
    noise, fine = add_grouped_gumbel(tl.zeros([BLOCK, NUM_IDS], tl.float32), words)
    _, _, is_leader = words
    offset = index[:, None] * NUM_IDS + place[None, :]
    mask = (index < num_keys)[:, None] & (place < NUM_IDS)[None, :]
    tl.store(noise_ptr + offset, noise, mask=mask)
    tl.store(fine_ptr + offset, (fine >> 20).to(tl.int64), mask=mask)
    tl.store(leads_ptr + offset, is_leader.to(tl.int8), mask=mask)
    tl.store(bound_ptr + offset, add_group_bound(0.0, 1.0, group_words(key, ids // 8)), mask=mask)


@triton.jit
def _winner_kernel(seeds_ptr, first_row, winners_ptr, num_best_ptr, noise_ptr, VOCAB_SIZE: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    """Of a flat row, whose position is its number: which token has the largest noise, how many have it, fine bits and
    all, and this noise."""
    row = tl.program_id(0).to(tl.int64)
    key = random_block(tl.load(seeds_ptr), first_row + row, 0, 0)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], LOWEST_KEY, tl.int64)
    num_best = tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        token = start + lane
        noise, fine = add_grouped_gumbel(tl.zeros([BLOCK], tl.float32), grouped_words(key, token))
        noisy = tl.where(token < VOCAB_SIZE, noisy_key(noise, fine, token), LOWEST_KEY)
        # all of a key but the id
        is_tie = noisy >> 20 == best >> 20
        num_best = tl.where(is_tie, num_best + 1, tl.where(noisy > best, 1, num_best))
        best = tl.maximum(best, noisy)
    largest = tl.max(best)
    tl.store(winners_ptr + row, noisy_key_id(largest).to(tl.int64))
    tl.store(num_best_ptr + row, tl.sum(tl.where(best >> 20 == largest >> 20, num_best, 0)))
    tl.store(noise_ptr + row, bits_value((largest >> 32).to(tl.int32)))


@triton.jit
def _key_kernel(values_ptr, fine_ptr, ids_ptr, keys_ptr, largest_ptr, BLOCK: tl.constexpr):
    """Noisy keys [BLOCK], the ids that they give back, and the id of the largest one."""
    index = tl.arange(0, BLOCK)
    fine = tl.load(fine_ptr + index).to(tl.uint32) << 20
    keys = noisy_key(tl.load(values_ptr + index), fine, tl.load(ids_ptr + index))
    tl.store(keys_ptr + index, keys)
    tl.store(keys_ptr + BLOCK + index, noisy_key_id(keys).to(tl.int64))
    tl.store(largest_ptr, noisy_key_id(largest_key(keys)))


@triton.jit
def _price_kernel(logits_ptr, seeds_ptr, keys_ptr, scale, VOCAB_SIZE: tl.constexpr, BLOCK_CHUNK: tl.constexpr):
    """Draws from a slice of a row: all that a scan does for each of its tokens."""
    noise = Noise(tl.load(seeds_ptr), tl.load(seeds_ptr + 1), 0)
    row = Row(logits_ptr, Processors(None, None, None, None, None, None, None), 0, 0, scale, None, VOCAB_SIZE, False)
    share = Share(Scratch(keys_ptr, None, None, None), 0, 0)
    scan_slice(row, True, None, noise, share, Found(None, False), tl.program_id(0), False, BLOCK_CHUNK=BLOCK_CHUNK)


def padded(ids, device) -> torch.Tensor:
    """The ids, and zeros up to a power of two, as tiles are; results of those are cut off again."""
    wide = torch.zeros(triton.next_power_of_2(len(ids)), dtype=torch.int64, device=device)
    wide[: len(ids)] = torch.as_tensor(ids)
    return wide


def tile_of(num_keys: int, num_ids: int, device) -> int:
    """Keys of a program: the interpreter's time goes by programs, a GPU's registers by elements."""
    most = 2**11 if device.type == "cuda" else 2**20
    return max(1, min(triton.next_power_of_2(num_keys), most // num_ids))


def make_words(seeds, positions, ids=IDS, *, stream=STREAM_TARGET, draw=0):
    """block [4, n], uniform [n] and words [2, n, ids] from the kernels' functions."""
    device, num_keys = seeds.device, len(seeds)
    wide = padded(ids, device)
    block = torch.empty(4, num_keys, dtype=torch.int64, device=device)
    uniforms = torch.empty(num_keys, dtype=torch.float32, device=device)
    words = torch.empty(2, num_keys, len(wide), dtype=torch.int64, device=device)
    size = tile_of(num_keys, len(wide), device)
    _words_kernel[(triton.cdiv(num_keys, size),)](
        seeds, positions, wide, block, uniforms, words, draw, num_keys, STREAM=stream, NUM_IDS=len(wide), BLOCK=size
    )
    return block, uniforms, words[:, :, : len(ids)]


def make_noise(words, leads=None, logits=None, scales=None):
    """Of words [4, n], a token's own and its group's, or [2, n], both: see `_noise_kernel`."""
    words = torch.cat([words, words]) if len(words) == 2 else words
    device, num_words = words.device, words.shape[1]
    leads = torch.ones(num_words, dtype=torch.bool, device=device) if leads is None else leads
    logits = torch.zeros(num_words, device=device) if logits is None else logits
    scales = torch.ones(num_words, device=device) if scales is None else scales
    results = [torch.empty(num_words, device=device) for _ in range(3)]
    results += [torch.empty(num_words, dtype=torch.int64, device=device) for _ in range(2)]
    size = min(1024 if device.type == "cuda" else 2**20, triton.next_power_of_2(num_words))
    grid = (triton.cdiv(num_words, size),)
    _noise_kernel[grid](words.contiguous(), leads.to(torch.int8), logits, scales, *results, num_words, BLOCK=size)
    return MadeNoise(*results)


class MadeNoise(NamedTuple):
    plain: torch.Tensor
    grouped: torch.Tensor
    bound: torch.Tensor
    plain_fine: torch.Tensor
    grouped_fine: torch.Tensor


class Grouped(NamedTuple):
    noise: torch.Tensor
    fine: torch.Tensor
    leads: torch.Tensor
    bound: torch.Tensor


def make_grouped(seeds, positions, ids) -> Grouped:
    """See `_grouped_kernel`."""
    device, num_keys = seeds.device, len(seeds)
    wide = padded(ids, device)
    dtypes = (torch.float32, torch.int64, torch.int8, torch.float32)
    results = [torch.empty(num_keys, len(wide), dtype=dtype, device=device) for dtype in dtypes]
    size = tile_of(num_keys, len(wide), device)
    grid = (triton.cdiv(num_keys, size),)
    _grouped_kernel[grid](seeds, positions, wide, *results, num_keys, NUM_IDS=len(wide), BLOCK=size)
    return Grouped(*(result[:, : len(ids)] for result in results))


def random_keys(num_keys, device, generator_seed=1):
    generator = torch.Generator().manual_seed(generator_seed)
    seeds = torch.randint(-(2**62), 2**62, (num_keys,), generator=generator)
    positions = torch.randint(0, 2**40, (num_keys,), generator=generator)
    return seeds.to(device), positions.to(device)


def random_words(num_words, device):
    """Words of which every magnitude is as likely, so that both ends of the noise are seen."""
    words = torch.randint(2**32, (2, num_words))
    words[0] >>= torch.randint(0, 33, (num_words,))
    words[0] = torch.where(torch.rand(num_words) < 0.3, 2**32 - 1 - words[0], words[0])
    corners = torch.tensor([0, 1, 2**8 - 1, 2**24, 2**28 - 1, 2**28, 2**31, 2**32 - 129, 2**32 - 1])
    corners = torch.cartesian_prod(corners, torch.tensor([0, 1, 2**31, 2**32 - 1])).T
    return torch.cat([corners, words], dim=1).to(device)


# of Random123, philox4x32 of ten rounds: counter (position, its upper half, stream, draw), key (seed, its upper half)
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def signed(low: int, high: int) -> torch.Tensor:
    """int64 [1] of two words."""
    return torch.tensor([(high - (high >> 31 << 32) << 32) | low])


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_philox_known_answers(counter, key, words, device):
    """By the function that every kernel calls, and by the reference."""
    low, high, stream, draw = (int(word, 16) for word in counter.split())
    keys = [signed(*(int(word, 16) for word in key.split())), signed(low, high)]
    block = make_words(*(each.to(device) for each in keys), (0,), stream=stream, draw=draw)[0]
    assert block.flatten().tolist() == [int(word, 16) for word in words.split()]
    assert block.cpu().equal(torch.stack(reference.random_block(*keys, stream, draw)))


@pytest.mark.parametrize(("stream", "draw"), [(STREAM_TARGET, 0), (STREAM_DRAFT, 7), (STREAM_SIMULATE, 2**31 - 1)])
def test_words_are_those_of_the_reference(stream, draw, device):
    seeds, positions = random_keys(500, device)
    extremes = torch.tensor([0, -1, 2**63 - 1, -(2**63), 2**32, -(2**32)], device=device)
    seeds[:6], positions[6:10] = extremes, torch.tensor([0, 2**32 - 1, 2**32, 2**31], device=device)
    for dtype in (torch.int64, torch.int32):
        seeds, positions = seeds.to(dtype), positions.to(dtype)
        block, uniforms, words = make_words(seeds, positions, range(100), stream=stream, draw=draw)
        expected = reference.random_block(seeds, positions, stream, draw)
        assert torch.equal(block, torch.stack(expected))
        assert torch.equal(uniforms, reference.uniform(seeds, positions, stream, draw))
        assert torch.equal(words, torch.stack(reference.token_words(expected, 100)))
        for domain in (MINIMA, LEADERS):
            ids = torch.arange(100) | domain
            words = make_words(seeds, positions, ids, stream=stream, draw=draw)[2]
            assert torch.equal(words, torch.stack(reference.token_words(expected, 100, domain)))


def test_words_of_the_last_ids(device):
    seeds, positions = random_keys(2, device)
    first = 2**18 - 256
    _, _, words = make_words(seeds, positions, range(first, 2**18))
    expected = reference.token_words(reference.random_block(seeds, positions, STREAM_TARGET), 2**18)
    assert torch.equal(words, torch.stack(expected)[:, :, first:])


def test_uniforms_end_before_one(device):
    uniforms = make_words(*random_keys(NUM_KEYS, device), (0,))[1]
    assert uniforms.min() >= 0 and uniforms.max() < 1
    assert torch.equal(uniforms * 2.0**24, (uniforms * 2.0**24).round())
    assert_follows_law((uniforms * 64).long().cpu(), torch.full((64,), 1 / 64))


def test_noise_is_the_logarithm_of_an_exponential(device):
    """Large noise, which decides, to 1e-5; the smallest, of u next to 1 in fp32, more roughly; monotone."""
    words = random_words(200_000, device)
    words = words[:, (words[0] * 2.0**32 + words[1]).argsort()]
    actual = make_noise(words)
    expected = reference.gumbel(words)
    u = words[0] * 2.0**-32
    # a leader's exponential is an eighth of that of the group's words
    for noise, wanted in ((actual.plain, expected.double()), (actual.grouped, expected.double() + math.log(8))):
        error = (noise.double() - wanted).abs()
        assert error[u < 0.5].max() < 1e-5
        assert error[u < 1 - 2.0**-14].max() < 1e-4
        assert error.max() < 0.8
        assert ((error / wanted.abs())[wanted > 5]).max() < 1e-6
        # of a 64-bit number: the larger it is, the smaller the noise, but for the rounding of one step of the logarithm
        assert (noise[1:] - noise[:-1]).max() < 1e-5
    assert actual.grouped.max() <= LARGEST_GUMBEL.value < actual.grouped.max() + 0.01
    assert torch.equal(actual.plain_fine, reference.fine_bits(words))
    assert torch.equal(actual.grouped_fine, reference.fine_bits(words))
    # equal words differ in fine bits as they do in noise
    assert (reference.fine_bits((0 * words[1], words[1].sort().values)).diff() <= 0).all()


def test_grouped_noise_of_those_that_do_not_lead(device):
    """-ln of the sum of both exponentials, an eighth of the group's and the token's own, with the token's fine bits."""
    words = torch.cat([random_words(100_000, device), random_words(100_000, device)])
    actual = make_noise(words, torch.zeros(words.shape[1], dtype=torch.bool, device=device))
    own, group = reference.exponential(words[:2]), reference.exponential(words[2:]) / 8
    wanted = -(own + group).log()
    error = (actual.grouped.double() - wanted).abs()
    assert error[(words[0] < 2**31) & (words[2] < 2**31)].max() < 1e-5
    assert (error / wanted.abs())[wanted > 5].max() < 1e-6 and error.max() < 0.8
    assert torch.equal(actual.grouped_fine, reference.fine_bits(words[:2]))
    assert (actual.grouped <= make_noise(words).grouped).all(), "the leader has the most"


def test_words_that_are_large_or_small_give_finite_noise(device):
    words = torch.tensor([[0, 0, 2**32 - 1, 2**32 - 1], [0, 2**32 - 1, 0, 2**32 - 1]], device=device)
    actual = make_noise(words)
    assert all(torch.isfinite(values).all() for values in actual)
    assert torch.allclose(actual.plain[:2].cpu(), torch.tensor([45.0546, 22.1807]), atol=1e-4)


@pytest.mark.cross
@pytest.mark.parametrize("magnitude", [0.0, 1.0, 30.0, 1e3, 1e6, 1e30])
def test_bound_holds(magnitude, device):
    """Of a group's largest logit: for the token that leads, and for the others."""
    words = torch.cat([random_words(300_000, device), random_words(300_000, device)])
    num_words = words.shape[1]
    leads = torch.arange(num_words, device=device) % 3 != 0
    logits = magnitude * torch.randn(num_words, device=device)
    scales = torch.tensor([1.0, 0.5, 1.25, 1 / 0.7, 20.0, 1e5, 0.01], device=device)
    scales = scales[torch.arange(num_words, device=device) % 7]
    # where logit and noise cancel, rounding is largest beside the sum
    logits[::5] = -(make_noise(words, leads).grouped / scales)[::5]
    actual = make_noise(words, leads, logits, scales)
    noisy, bound = actual.grouped, actual.bound
    # a bound of large logits is rounded, and compared with that in mind
    assert (bound + bound.abs() * 1e-6 >= noisy).all()
    small = (noisy.abs() < 100).logical_and(bound.abs() < 100)
    assert (bound >= noisy)[small].all(), "where rounding is small the bound needs no allowance"
    # below 2^8, once in 2^24 groups, the bits that the bound leaves out begin to count
    near = small & leads & (words[2] < 2**25) & (words[2] >= 2**8)
    assert near.sum() > 1000
    assert ((bound - noisy)[near] < 0.07).all()


def test_bound_of_special_logits(device):
    words = random_words(100, device)
    fill = torch.ones(words.shape[1], device=words.device)
    for logit, scale in ((float("inf"), 1.0), (float("-inf"), 1.0), (3e38, 20.0), (-3e38, 20.0)):
        actual = make_noise(words, None, fill * logit, fill * scale)
        assert torch.equal(actual.bound, fill * float("inf") * logit)
        assert (actual.bound >= actual.grouped).all()
    assert make_noise(words, None, fill * float("nan"), fill).bound.isnan().all()


def assert_independent(first: torch.Tensor, second: torch.Tensor) -> None:
    """chi-square of two words int64 [n] each, by their highest bits, by inner bits, and of one where the other wins."""
    first, second = first.flatten().cpu(), second.flatten().cpu()
    cells = torch.full((256,), 1 / 256, dtype=torch.float64)
    for shift_first, shift_second in ((28, 28), (23, 24), (28, 0), (0, 28)):
        joint = ((first >> shift_first) & 15) * 16 + ((second >> shift_second) & 15)
        assert_follows_law(joint, cells)
    assert_follows_law((first ^ second) >> 24, cells)
    assert_follows_law(((first - second) & 0xFFFFFFFF) >> 24, cells)
    # words near 0 are those that win
    wins = first < 2**26
    assert_follows_law(second[wins] >> 27, torch.full((32,), 1 / 32))


@pytest.mark.cross
@pytest.mark.parametrize("varying", ["seeds", "positions", "both"])
def test_neighbouring_ids_are_independent(varying, device):
    """Over many keys: random ones, and ones that count up, as positions and the seeds of a batch do."""
    seeds, positions = random_keys(NUM_KEYS, device)
    count = torch.arange(NUM_KEYS, device=device)
    seeds = {"seeds": count, "positions": torch.full_like(count, 5)}.get(varying, seeds)
    positions = {"positions": count, "seeds": torch.full_like(count, 9)}.get(varying, positions)
    word, low = make_words(seeds, positions)[2].cpu()
    for first in range(len(IDS) - 1):
        assert_independent(word[:, first], word[:, first + 1])
    for first, second in ((0, 2), (0, 10), (4, 10), (0, 12), (1, 13), (0, 14), (14, 15)):
        assert_independent(word[:, first], word[:, second])
    # of groups: with their tokens, with their leaders, with the next group
    ids = (0, 7, 1000, 0 | MINIMA, 1 | MINIMA, 125 | MINIMA, 0 | LEADERS, 1 | LEADERS, 125 | LEADERS)
    word = make_words(seeds, positions, ids)[2][0].cpu()
    for first, second in ((0, 3), (1, 3), (2, 5), (3, 4), (3, 6), (4, 7), (5, 8), (0, 6), (2, 8), (6, 7)):
        assert_independent(word[:, first], word[:, second])
    for column in (0, 1, 14):
        # the low word is half of a product, of which the word holds the other half: it only tells equal words apart
        assert_follows_law(low[:, column] >> 24, torch.full((256,), 1 / 256))


@pytest.mark.parametrize("varying", ["seeds", "positions", "upper halves of seeds", "upper halves of positions"])
def test_neighbouring_keys_are_independent(varying, device):
    count = torch.arange(NUM_KEYS + 64, device=device) << (32 if "halves" in varying else 0)
    fixed = torch.full_like(count, 1234567)
    keys = (count, fixed) if varying.endswith("seeds") else (fixed, count)
    word = make_words(*keys, (0, 1, 999, 128000))[2][0].cpu()
    for step in (1, 2, 64):
        for column in range(4):
            assert_independent(word[step:, column], word[:-step, column])
        # the next position's noise of the next token, as in a text that repeats itself
        assert_independent(word[step:, 0], word[:-step, 1])


def test_streams_and_draws_are_independent_and_share_no_word(device):
    seeds, positions = random_keys(NUM_KEYS, device)
    keys = [(stream, 0) for stream in STREAMS] + [(STREAM_DRAFT, 1), (STREAM_DRAFT, 2), (STREAM_ACCEPT, 1)]
    drawn = [make_words(seeds, positions, (0, 5), stream=stream, draw=draw) for stream, draw in keys]
    for index, (block, uniforms, words) in enumerate(drawn):
        for other_block, other_uniforms, other_words in drawn[:index]:
            for ours, theirs in zip((*block, words[0, :, 1]), (*other_block, other_words[0, :, 1])):
                assert_follows_law(((ours >> 28) * 16 + (theirs >> 28)).cpu(), torch.full((256,), 1 / 256))
            # by chance 2^-32 of them are equal
            assert (block == other_block).sum() <= 2 and (words == other_words).sum() <= 2
            assert (uniforms == other_uniforms).sum() <= 2
        assert_independent(words[0, :, 1], drawn[index - 1][2][0, :, 1])
    blocks = torch.stack([block for block, _, _ in drawn])
    pairs = blocks[:, 0] * 2**31 + (blocks[:, 1] >> 1)
    assert len(pairs.unique()) == pairs.numel(), "two draws began with the same words"


def grouped_of_the_reference(seeds, positions, ids) -> Grouped:
    noise, fine = reference.grouped_gumbel(seeds, positions, max(ids) + 1)
    words = reference.token_words(reference.random_block(seeds, positions, STREAM_TARGET), max(ids) // 8 + 1, LEADERS)
    ids = torch.as_tensor(ids, device=seeds.device)
    return Grouped(noise[:, ids], fine[:, ids], words[0][:, ids // 8] >> 29 == ids % 8, None)


def test_grouped_noise_is_that_of_the_reference(device):
    """Of the first ids, and of the last ones of the largest vocabulary, which ends within a group."""
    seeds, positions = random_keys(400, device)
    for ids, rows in ((range(128), 400), (range(2**20 - 125, 2**20 - 3), 2)):
        actual = make_grouped(seeds[:rows], positions[:rows], ids)
        expected = grouped_of_the_reference(seeds[:rows], positions[:rows], ids)
        error = (actual.noise - expected.noise).abs()
        # small noise, which does not decide, is of a u next to 1 in fp32
        assert error[expected.noise > 0].max() < 1e-5 and error.max() < 1e-2
        assert torch.equal(actual.fine, expected.fine)
        assert torch.equal(actual.leads.bool(), expected.leads)
        assert (actual.bound >= actual.noise).all()


def exceeds(noise: torch.Tensor, rate: float = 1.0) -> torch.Tensor:
    """exp(-rate E) of noise -ln E: uniform in [0, 1] if E is an exponential of this rate, and near 1 for winners."""
    return torch.exp(-rate * torch.exp(-noise.double())).clamp(max=1 - 2.0**-53).cpu()


def assert_uniform(values: torch.Tensor) -> None:
    """chi-square of [n] numbers in [0, 1): as a whole, and the highest 64th, where winners are."""
    assert_follows_law((values * 64).long(), torch.full((64,), 1 / 64))
    highest = values[values >= 1 - 1 / 64]
    assert_follows_law(((highest - (1 - 1 / 64)) * 64 * 16).long(), torch.full((16,), 1 / 16))


def assert_jointly_uniform(first: torch.Tensor, second: torch.Tensor) -> None:
    """chi-square of two numbers in [0, 1) by 16 cells each, and of one where the other is high."""
    assert_follows_law((first * 16).long() * 16 + (second * 16).long(), torch.full((256,), 1 / 256))
    for one, other in ((first, second), (second, first)):
        assert_follows_law((one[other >= 1 - 1 / 32] * 16).long(), torch.full((16,), 1 / 16))


# Groups 0, 1 and 125, and one far away.
GROUPED_IDS = (*range(16), *range(1000, 1008), *range(2**18 - 8, 2**18))


@pytest.fixture
def grouped(device):
    return grouped_of_many_keys(device)


@functools.cache
def grouped_of_many_keys(device) -> Grouped:
    """Grouped noise of GROUPED_IDS: half of the keys are random, half of them positions that count up."""
    seeds, positions = random_keys(NUM_KEYS, device)
    count = torch.arange(NUM_KEYS, device=device)
    return make_grouped(torch.cat([seeds, 0 * count + 7]), torch.cat([positions, count]), GROUPED_IDS)


@pytest.mark.slow
def test_a_group_has_one_leader_whichever_it_is(grouped):
    leads = grouped.leads.view(-1, 4, 8).cpu()
    assert (leads.sum(dim=2) == 1).all()
    leader = leads.argmax(dim=2)
    noise = grouped.noise.view(-1, 4, 8).cpu()
    assert torch.equal(noise.gather(2, leader[:, :, None])[:, :, 0], noise.max(dim=2).values)
    minimum = exceeds(noise.max(dim=2).values, 8)
    for group in range(4):
        assert_follows_law(leader[:, group], torch.full((8,), 1 / 8))
        # also where the minimum is so small that the group may win
        for edge in (1 - 1 / 16, 1 - 1 / 256):
            assert_follows_law(leader[:, group][minimum[:, group] > edge], torch.full((8,), 1 / 8))
    for first, second in ((0, 1), (0, 2), (1, 2), (2, 3)):
        assert_follows_law(leader[:, first] * 8 + leader[:, second], torch.full((64,), 1 / 64))


def test_a_minimum_is_an_exponential_of_rate_8(grouped):
    minimum = exceeds(grouped.noise.view(-1, 4, 8).max(dim=2).values, 8)
    for group in range(4):
        assert_uniform(minimum[:, group])
    for first, second in ((0, 1), (0, 2), (1, 2), (2, 3)):
        assert_jointly_uniform(minimum[:, first], minimum[:, second])


def test_grouped_noise_is_independent(grouped):
    """Each token's is Gumbel noise, and of two, of one group or of two, neither tells of the other."""
    noise = exceeds(grouped.noise)
    for place in range(len(GROUPED_IDS)):
        assert_uniform(noise[:, place])
    for first in range(8):
        for second in range(first):
            assert_jointly_uniform(noise[:, first], noise[:, second])
    for first, second in ((7, 8), (0, 8), (15, 16), (3, 19), (8, 24), (16, 31)):
        assert_jointly_uniform(noise[:, first], noise[:, second])
    # next to each other in position
    for place in (0, 5):
        later, earlier = noise[NUM_KEYS + 1 :, place], noise[NUM_KEYS:-1, place]
        assert_jointly_uniform(later, earlier)


def test_what_exceeds_a_minimum_is_independent_of_it(grouped):
    """The leader's exponential, and what two others of the group exceed it by."""
    exponential = torch.exp(-grouped.noise[:, :8].double()).cpu()
    leader = grouped.leads[:, :8].cpu().argmax(dim=1, keepdim=True)
    minimum = exponential.gather(1, leader)
    # small differences are what fp32 noise leaves of them
    others = (exponential - minimum).gather(1, (leader + torch.tensor([1, 2, 7])) % 8)
    excess = torch.exp(-others).clamp(max=1 - 2.0**-53)
    minimum = torch.exp(-8 * minimum[:, 0])
    for place in range(3):
        assert_uniform(excess[:, place])
        assert_jointly_uniform(minimum, excess[:, place])
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert_jointly_uniform(excess[:, first], excess[:, second])


@pytest.mark.cross
@pytest.mark.parametrize("vocab_size", [64, 640])
def test_winners_of_flat_rows_are_uniform(vocab_size, device):
    """Of ids in 64 ranges; and whether the winner's range is independent of the next position's."""
    num_rows = 2**14 if vocab_size == 64 else 2**12
    seeds = torch.full((num_rows,), 77, device=device)
    noise = make_grouped(seeds, torch.arange(num_rows, device=device), range(vocab_size)).noise
    winner = noise.argmax(dim=1).cpu() * 64 // vocab_size
    assert_follows_law(winner, torch.full((64,), 1 / 64))
    joint = (winner[1:] // 8) * 8 + winner[:-1] // 8
    assert_follows_law(joint, torch.full((64,), 1 / 64))


def test_bits_of_one_row_are_uniform(device):
    """One key, a whole vocabulary: chi-square of the words, over the ids and over every other id."""
    seeds, positions = random_keys(8, device)
    words = make_words(seeds, positions, range(VOCAB_SIZE))[2].cpu()
    cells = torch.full((256,), 1 / 256)
    for word, low in zip(*words):
        for bits in (word >> 24, word & 255, low >> 24):
            assert_follows_law(bits, cells)
        assert_follows_law(word[::2] >> 24, cells)
        assert len(((word << 31) ^ low).unique()) == VOCAB_SIZE


def test_equal_values_go_by_fine_bits_and_then_to_the_lowest_id(device):
    """Noisy keys order as (value, fine bits, -id) do, up to the largest id."""
    choices = [
        torch.tensor([float("-inf"), -3.4e38, -1.0, -1e-45, 0.0, 1e-45, 2.0, 3.4e38]),
        torch.tensor([0, 1, 2047, 2048, 4095]),
        torch.tensor([0, 1, 2**19, 2**20 - 1]),
    ]
    values, fine, ids = (choice[torch.randint(len(choice), (256,))].to(device) for choice in choices)
    keys = torch.empty(2, 256, dtype=torch.int64, device=device)
    largest = torch.empty(1, dtype=torch.int32, device=device)
    for each in (values, -values.abs(), torch.zeros_like(values)):  # of values of either sign the largest is one
        each = torch.where(each == 0, 0.0, each)
        _key_kernel[(1,)](each, fine, ids, keys, largest, BLOCK=256)
        assert torch.equal(keys[1], ids)
        pairs = sorted(zip(each.tolist(), fine.tolist(), (-ids).tolist(), keys[0].tolist()))
        assert [pair[3] for pair in pairs] == sorted(keys[0].tolist())
        assert len(set(keys[0].tolist())) == len({pair[:3] for pair in pairs})
        assert largest.item() == -pairs[-1][2]
        by_id = ids.argsort(stable=True)
        assert ids[by_id[reference.largest(each[None, by_id], fine[None, by_id])]].tolist() == [-pairs[-1][2]]


@pytest.mark.slow
@pytest.mark.parametrize("is_grouped", [False, True], ids=["plain", "grouped"])
def test_ties_are_rare(is_grouped, device, note):
    """The two smallest exponentials of a flat row of 128,256, drawn directly: how often their noise is equal in fp32,
    and how often its fine bits are too.

    They are Exp / V and that plus Exp / (V - 1), and are put into words as the noise takes them out again.
    """
    num_rows = 2**21
    generator = torch.Generator().manual_seed(3)
    steps = torch.empty(2, num_rows, dtype=torch.float64).exponential_(generator=generator)
    exponential = torch.stack([steps[0] / VOCAB_SIZE, steps[0] / VOCAB_SIZE + steps[1] / (VOCAB_SIZE - 1)])
    scaled = -torch.expm1(-exponential * (8 if is_grouped else 1)) * 2.0**32
    word = scaled.floor()
    words = torch.stack([word.flatten(), ((scaled - word) * 2.0**32).floor().flatten()]).long()
    actual = make_noise(words.to(device))
    noise = (actual.grouped if is_grouped else actual.plain).view(2, num_rows)
    fine = (actual.grouped_fine if is_grouped else actual.plain_fine).view(2, num_rows)
    is_equal = noise[0] == noise[1]
    num_ties = int((is_equal & (fine[0] == fine[1])).sum())
    note(f"{is_equal.sum()} equal in {num_rows} flat rows of {VOCAB_SIZE}, {num_ties} of them with equal fine bits")
    assert (noise[0] >= noise[1] - 2e-6).all()
    assert is_equal.sum() > 0, "nothing was equal, so the fine bits prove nothing"
    assert num_ties == 0


def find_winners(num_rows, vocab_size, device, seed=2024):
    winners = torch.empty(num_rows, dtype=torch.int64, device=device)
    num_best = torch.empty(num_rows, dtype=torch.int32, device=device)
    seeds = torch.full((1,), seed, dtype=torch.int64, device=device)
    noise = torch.empty(num_rows, device=device)
    _winner_kernel[(num_rows,)](seeds, 0, winners, num_best, noise, VOCAB_SIZE=vocab_size, BLOCK=2048)
    return winners, num_best, noise


def test_winners_are_those_of_the_reference(device):
    """The kernel that counts ties, where there is time to check it."""
    winners, num_best, noise = find_winners(40, 5000, device)
    seeds, positions = torch.full((40,), 2024, device=device), torch.arange(40, device=device)
    expected, fine = reference.grouped_gumbel(seeds, positions, 5000)
    assert torch.equal(winners, reference.largest(expected, fine))
    assert torch.allclose(noise, expected.max(dim=1).values, rtol=1e-6)
    assert (num_best == 1).all()


@pytest.mark.gpu
def test_a_million_draws_of_a_flat_row(device, note):
    """At most one tie, the winners uniform over 64 ranges of ids, and their noise ln V above Gumbel noise: a token must
    not win because its words are degenerate, which would let it win over any logits."""
    winners, num_best, noise = find_winners(10**6, VOCAB_SIZE, device)
    num_ties = int((num_best > 1).sum())
    note(f"{num_ties} ties in {len(winners)} draws of a flat row of {VOCAB_SIZE}")
    assert num_ties <= 1
    assert_follows_law(winners.cpu() * 64 // VOCAB_SIZE, torch.full((64,), 1 / 64))
    above = noise.double().cpu() - math.log(VOCAB_SIZE)
    assert_follows_law((torch.exp(-torch.exp(-above)) * 64).long().clamp(max=63), torch.full((64,), 1 / 64))
    # by chance once in 10^5 such tests
    assert above.max() < 25


def test_no_key_makes_words_degenerate():
    """Keys that make one factor of a product 0 for some id: its neighbours do not share its words, nor are they 0.

    Once in V / 2^32 rows there is such an id; the reference's words are the kernel's in all other tests.
    """
    ids = torch.arange(512)
    for key1 in (0, 1, 2, 2**16, 2**20 + 2**17, 2**31, 3 * 2**29, 0x9E3779B9, 2**32 - 1):
        for target in (0, 5, 300):
            product = (target ^ 12345) * (key1 | 1)
            for key2, key3 in ((7, product >> 32), (product & 0xFFFFFFFF, 7)):
                key = [torch.tensor([part]) for part in (12345, key1, key2, key3)]
                word, low = reference.token_words(key, len(ids))
                assert len(set(zip(word[0].tolist(), low[0].tolist()))) == len(ids)
                assert not ((word == 0) & (low == 0)).any()


@pytest.mark.slow
def test_instructions_per_token(note):
    """Of a scan, in the PTX for sm_90: what a slice twice as large has more of, its share of hash and bound included;
    and all that a slice of 1024 has, Philox and one turn of looking at 32 tokens in full included."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "op_tests.test_random"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-4000:]
    single, double = (int(line) for line in child.stdout.split())
    per_token, in_all = (double - single) / 32, single / 32
    note(f"{per_token:.1f} instructions for each token more, {in_all:.1f} a token with all that a slice of 1024 takes")
    assert 2 < per_token <= MOST_PER_TOKEN and in_all <= MOST_IN_ALL


def _count_of_slice(num_chunks: int) -> int:
    """Instructions of one thread that draws from a slice of bf16 logits, 32 tokens of each chunk."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"logits_ptr": "*bf16", "seeds_ptr": "*i64", "keys_ptr": "*i64", "scale": "fp32"}
    signature |= {"VOCAB_SIZE": "constexpr", "BLOCK_CHUNK": "constexpr"}
    attributes = {(index,): [["tt.divisibility", 16]] for index in (0, 1, 2)}
    source = ASTSource(_price_kernel, signature, {(4,): VOCAB_SIZE, (5,): num_chunks}, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    return count_instructions(compiled.asm["ptx"])


def count_instructions(ptx: str) -> int:
    """PTX lines that do something: no directives, labels or comments, and no moves, which registers make free."""
    lines = (line.split("//")[0].strip() for line in ptx.splitlines())
    names = [re.match(r"(?:@!?%\w+\s+)?([a-z]\w*)", line) for line in lines if line.endswith(";")]
    return sum(1 for name in names if name and name[1] != "mov")


if __name__ == "__main__":
    print(_count_of_slice(1), _count_of_slice(2))
