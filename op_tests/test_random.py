"""The noise: the reference's words, bounds that hold, uniform and independent bits, few ties, few instructions."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from eagle_kernels.primitives.random import (
    LARGEST_GUMBEL,
    STREAM_ACCEPT,
    STREAM_DRAFT,
    STREAM_RESIDUAL,
    STREAM_SIMULATE,
    STREAM_TARGET,
    add_gumbel,
    add_gumbel_bound,
    gumbel,
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
MOST_INSTRUCTIONS = 25


@triton.jit
def _words_kernel(
    seeds_ptr,
    positions_ptr,
    ids_ptr,
    block_ptr,
    uniform_ptr,
    words_ptr,
    draw,
    num_keys,
    STREAM: tl.constexpr,
    NUM_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
def _noise_kernel(words_ptr, logits_ptr, scales_ptr, gumbel_ptr, sum_ptr, bound_ptr, num_words, BLOCK: tl.constexpr):
    """gumbel, add_gumbel and add_gumbel_bound [num_words] of words [2, num_words]."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_words
    word = tl.load(words_ptr + index, mask=mask, other=0).to(tl.uint32)
    low = tl.load(words_ptr + num_words + index, mask=mask, other=0).to(tl.uint32)
    logit = tl.load(logits_ptr + index, mask=mask, other=0.0)
    scale = tl.load(scales_ptr + index, mask=mask, other=0.0)
    tl.store(gumbel_ptr + index, gumbel((word, low)), mask=mask)
    tl.store(sum_ptr + index, add_gumbel(logit * scale, (word, low)), mask=mask)
    tl.store(bound_ptr + index, add_gumbel_bound(logit, scale, (word, low)), mask=mask)


@triton.jit
def _winner_kernel(seeds_ptr, first_row, winners_ptr, num_best_ptr, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Of a flat row, whose position is its number: which token has the largest noise, and how many have it."""
    row = tl.program_id(0).to(tl.int64)
    key = random_block(tl.load(seeds_ptr), first_row + row, 0, 0)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = lane
    num_best = tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        token = start + lane
        noise = tl.where(token < VOCAB_SIZE, add_gumbel(0.0, token_words(key, token)), float("-inf"))
        num_best = tl.where(noise > best, 1, num_best + (noise == best).to(tl.int32))
        best_token = tl.where(noise > best, token, best_token)
        best = tl.maximum(best, noise)
    largest = tl.max(best)
    tl.store(winners_ptr + row, tl.min(tl.where(best == largest, best_token, VOCAB_SIZE)).to(tl.int64))
    tl.store(num_best_ptr + row, tl.sum(tl.where(best == largest, num_best, 0)))


@triton.jit
def _price_kernel(logits_ptr, seeds_ptr, scale, bounds_ptr, HAS_NOISE: tl.constexpr, TILE: tl.constexpr):
    """Bounds of a tile of tokens, or without HAS_NOISE what reading and writing them costs."""
    key = random_block(tl.load(seeds_ptr), tl.load(seeds_ptr + 1), 0, 0)
    token = tl.arange(0, TILE)
    logit = tl.load(logits_ptr + token)
    if HAS_NOISE:
        tl.store(bounds_ptr + token, add_gumbel_bound(logit, scale, token_words(key, token)))
    else:
        tl.store(bounds_ptr + token, logit * scale)


def make_words(seeds, positions, ids=IDS, *, stream=STREAM_TARGET, draw=0):
    """block [4, n], uniform [n] and words [2, n, ids] from the kernels' functions."""
    device, num_keys = seeds.device, len(seeds)
    # a power of two, as tiles are; what fills it up is cut off again
    wide = torch.zeros(triton.next_power_of_2(len(ids)), dtype=torch.int64, device=device)
    wide[: len(ids)] = torch.as_tensor(ids)
    block = torch.empty(4, num_keys, dtype=torch.int64, device=device)
    uniforms = torch.empty(num_keys, dtype=torch.float32, device=device)
    words = torch.empty(2, num_keys, len(wide), dtype=torch.int64, device=device)
    # the interpreter's time goes by programs, a GPU's registers by elements
    most = 2**11 if device.type == "cuda" else 2**20
    size = max(1, min(triton.next_power_of_2(num_keys), most // len(wide)))
    _words_kernel[(triton.cdiv(num_keys, size),)](
        seeds, positions, wide, block, uniforms, words, draw, num_keys, STREAM=stream, NUM_IDS=len(wide), BLOCK=size
    )
    return block, uniforms, words[:, :, : len(ids)]


def make_noise(words, logits=None, scales=None):
    """gumbel, add_gumbel and add_gumbel_bound of words [2, n]."""
    device, num_words = words.device, words.shape[1]
    logits = torch.zeros(num_words, device=device) if logits is None else logits
    scales = torch.ones(num_words, device=device) if scales is None else scales
    results = [torch.empty(num_words, device=device) for _ in range(3)]
    size = 1024 if device.type == "cuda" else 2**20
    size = min(size, triton.next_power_of_2(num_words))
    _noise_kernel[(triton.cdiv(num_words, size),)](words.contiguous(), logits, scales, *results, num_words, BLOCK=size)
    return results


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
    actual, added, _ = make_noise(words)
    expected = reference.gumbel_of_words((words[0], words[1]))
    error = (actual.double() - expected.double()).abs()
    u = words[0] * 2.0**-32
    assert error[u < 0.5].max() < 1e-5
    assert error[u < 1 - 2.0**-14].max() < 1e-4
    assert error.max() < 0.8
    assert ((error / expected.abs())[expected > 5]).max() < 1e-6
    assert actual.max() <= LARGEST_GUMBEL.value < actual.max() + 0.01
    assert torch.equal(added, actual)
    # of a 64-bit number: the larger it is, the smaller the noise, but for the rounding of one step of the logarithm
    assert (actual[1:] - actual[:-1]).max() < 1e-5


def test_words_that_are_large_or_small_give_finite_noise(device):
    words = torch.tensor([[0, 0, 2**32 - 1, 2**32 - 1], [0, 2**32 - 1, 0, 2**32 - 1]], device=device)
    actual, _, bound = make_noise(words)
    assert torch.isfinite(actual).all() and torch.isfinite(bound).all()
    assert torch.allclose(actual[:2].cpu(), torch.tensor([45.0546, 22.1807]), atol=1e-4)


@pytest.mark.parametrize("magnitude", [0.0, 1.0, 30.0, 1e3, 1e6, 1e30])
def test_bound_holds(magnitude, device):
    words = random_words(300_000, device)
    num_words = words.shape[1]
    logits = magnitude * torch.randn(num_words, device=device)
    scales = torch.tensor([1.0, 0.5, 1.25, 1 / 0.7, 20.0, 1e5, 0.01], device=device)
    scales = scales[torch.arange(num_words, device=device) % 7]
    # where logit and noise cancel, rounding is largest beside the sum
    noise = make_noise(words)[0]
    logits[::5] = -(noise / scales)[::5]
    _, added, bound = make_noise(words, logits, scales)
    # a bound of large logits is rounded, and compared with that in mind
    assert (bound + bound.abs() * 1e-6 >= added).all()
    small = (added.abs() < 100).logical_and(bound.abs() < 100)
    assert (bound >= added)[small].all(), "where rounding is small the bound needs no allowance"
    # below 2^8, once in 2^24 tokens, the bits that the bound leaves out begin to count
    near = small & (words[0] < 2**25) & (words[0] >= 2**8)
    assert near.sum() > 1000
    assert ((bound - added)[near] < 0.07).all()


def test_bound_of_special_logits(device):
    words = random_words(100, device)
    fill = torch.ones(words.shape[1], device=words.device)
    for logit, scale in ((float("inf"), 1.0), (float("-inf"), 1.0), (3e38, 20.0), (-3e38, 20.0)):
        _, added, bound = make_noise(words, fill * logit, fill * scale)
        assert torch.equal(bound, fill * float("inf") * logit)
        assert (bound >= added).all()
    assert make_noise(words, fill * float("nan"), fill)[2].isnan().all()


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
    for column in (0, 1, 14):
        # the low word is half of a product, of which the word holds the other half: it only tells equal words apart
        assert_follows_law(low[:, column] >> 24, torch.full((256,), 1 / 256))


@pytest.mark.parametrize("varying", ["seeds", "positions"])
def test_neighbouring_keys_are_independent(varying, device):
    count = torch.arange(NUM_KEYS + 64, device=device)
    fixed = torch.full_like(count, 1234567)
    keys = (count, fixed) if varying == "seeds" else (fixed, count)
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


@pytest.mark.parametrize("vocab_size", [64, 640])
def test_winners_of_flat_rows_are_uniform(vocab_size, device):
    """Of ids in 64 ranges; and whether the winner's range is independent of the next position's."""
    num_rows = 2**14 if vocab_size == 64 else 2**12
    seeds = torch.full((num_rows,), 77, device=device)
    word = make_words(seeds, torch.arange(num_rows, device=device), range(vocab_size))[2][0]
    winner = word.argmin(dim=1).cpu() * 64 // vocab_size
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


def test_ties_are_rare(device, note):
    """The two smallest exponentials of a flat row of 128,256, drawn directly: how often their noise is equal in fp32.

    They are Exp / V and that plus Exp / (V - 1), and are put into words as the noise takes them out again.
    """
    num_rows = 2**21
    generator = torch.Generator().manual_seed(3)
    steps = torch.empty(2, num_rows, dtype=torch.float64).exponential_(generator=generator)
    exponential = torch.stack([steps[0] / VOCAB_SIZE, steps[0] / VOCAB_SIZE + steps[1] / (VOCAB_SIZE - 1)])
    scaled = -torch.expm1(-exponential) * 2.0**32
    word = scaled.floor()
    words = torch.stack([word.flatten(), ((scaled - word) * 2.0**32).floor().flatten()]).long()
    noise = make_noise(words.to(device))[0].view(2, num_rows)
    num_ties = int((noise[0] == noise[1]).sum())
    note(f"{num_ties} ties in {num_rows} flat rows of {VOCAB_SIZE}")
    assert (noise[0] >= noise[1] - 2e-6).all()
    assert num_ties <= 5


def find_winners(num_rows, vocab_size, device, seed=2024):
    winners = torch.empty(num_rows, dtype=torch.int64, device=device)
    num_best = torch.empty(num_rows, dtype=torch.int32, device=device)
    seeds = torch.full((1,), seed, dtype=torch.int64, device=device)
    _winner_kernel[(num_rows,)](seeds, 0, winners, num_best, VOCAB_SIZE=vocab_size, BLOCK=2048)
    return winners, num_best


def test_winners_are_those_of_the_reference(device):
    """The kernel that counts ties, where there is time to check it."""
    winners, num_best = find_winners(40, 5000, device)
    seeds, positions = torch.full((40,), 2024, device=device), torch.arange(40, device=device)
    assert torch.equal(winners, reference.gumbel(seeds, positions, 5000).argmax(dim=1))
    assert (num_best == 1).all()


@pytest.mark.gpu
def test_a_million_draws_of_a_flat_row(device, note):
    """At most one tie, and the winners uniform over 64 ranges of ids."""
    winners, num_best = find_winners(10**6, VOCAB_SIZE, device)
    num_ties = int((num_best > 1).sum())
    note(f"{num_ties} ties in {len(winners)} draws of a flat row of {VOCAB_SIZE}")
    assert num_ties <= 1
    assert_follows_law(winners.cpu() * 64 // VOCAB_SIZE, torch.full((64,), 1 / 64))


def test_instructions_per_token(note):
    """Hash and bound of a token in the PTX for sm_90: what a tile twice as large has more of."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "op_tests.test_random"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-4000:]
    with_noise, without = (float(line) for line in child.stdout.split())
    note(f"{with_noise:.1f} instructions per token with its load and store, {without:.1f} of them not noise")
    assert 10 < with_noise <= MOST_INSTRUCTIONS


def _instructions_per_token(has_noise: bool) -> float:
    """Instructions of one thread, one tile less than the other, by the tokens that it has more."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    counts = {}
    num_warps = 4
    for tile in (1024, 2048):
        signature = dict.fromkeys(("logits_ptr", "bounds_ptr"), "*fp32") | {"seeds_ptr": "*i64", "scale": "fp32"}
        signature |= {"HAS_NOISE": "constexpr", "TILE": "constexpr"}
        signature = {name: signature[name] for name in _price_kernel.arg_names}
        attributes = {(index,): [["tt.divisibility", 16]] for index in (0, 1, 3)}
        source = ASTSource(_price_kernel, signature, {(4,): has_noise, (5,): tile}, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        counts[tile] = count_instructions(compiled.asm["ptx"])
    return (counts[2048] - counts[1024]) / (1024 / (32 * num_warps))


def count_instructions(ptx: str) -> int:
    """PTX lines that do something: no directives, labels or comments, and no moves, which registers make free."""
    lines = (line.split("//")[0].strip() for line in ptx.splitlines())
    names = [re.match(r"(?:@!?%\w+\s+)?([a-z]\w*)", line) for line in lines if line.endswith(";")]
    return sum(1 for name in names if name and name[1] != "mov")


if __name__ == "__main__":
    print(_instructions_per_token(True), _instructions_per_token(False))
