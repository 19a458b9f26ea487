"""Draws the children of tree nodes from the draft's distribution, without or with replacement.

Computes:
    With Gumbel noise g(v) keyed by seed, position, node and id:
    without replacement     the num_children largest of log q(v) + g(v), in order. This is sequential sampling: each
                            next child is drawn from q without the children before it, renormalised (Gumbel top-k:
                            Kool et al., arXiv 1903.06059, Alg. 1 without its tree; Vieira 2014). The order follows the
                            Plackett-Luce distribution.
    with replacement        num_children independent draws from q, each with noise of its own.
Invariants: +inf counts as the largest finite number. Without replacement greedy rows give the children and the scores
    of a top-k tree.
Grid: (R, slices): one program finds the best children of a slice of a row. Then (R,): one finds the best of a row's
    slices.
Launches: 2
Traffic: R * Vd * element size read, and per slice 8 K + 8 bytes written and read.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.ordering import LOWEST_KEY, NO_NOISE, check_vocabulary, noisy_key, noisy_key_id
from ...primitives.random import STREAM_DRAFT, Coins, add_gumbel, fine_bits, random_block, token_words
from ...primitives.rows import load_scaled, read_temperature
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import bundle, launch, launcher

MAX_CHILDREN = 64

# Slices of a row, each for a program: 16 tokens a thread stay in registers. Then one program merges their best keys.
TUNING = {"default": {"BLOCK_VOCAB": 4096, "num_warps": 8}}
MERGE_TUNING = {"default": {"num_warps": 4}}

# With replacement each draw has a counter of its own: child * this + node.
_NODES = tl.constexpr(65536)
_STREAM = tl.constexpr(STREAM_DRAFT)


class Scratch(NamedTuple):
    """Pointers to what is found in slices."""

    keys: Any  # int64 [R, slices, K], of the best token for every child
    maxima: Any  # fp32 [R, slices]
    sums: Any  # fp32 [R, slices], of exponentials relative to the maximum


class Output(NamedTuple):
    """What `sample_children` returns."""

    tokens: torch.Tensor
    logprobs: torch.Tensor


@triton.jit
def _keys(scaled, token, noise_key, IS_SAMPLED: tl.constexpr):
    """Returns keys, the largest of which is drawn; LOWEST_KEY for tokens that must not be."""
    if IS_SAMPLED:
        words = token_words(noise_key, token)
        key = noisy_key(add_gumbel(scaled, words), fine_bits(words), token)
    else:
        key = noisy_key(scaled, NO_NOISE, token)
    return tl.where(scaled == float("-inf"), LOWEST_KEY, key)


@triton.jit
def _store_best(keys, keys_ptr, NUM_CHILDREN: tl.constexpr):
    """Writes the NUM_CHILDREN largest keys, in order."""
    for child in range(NUM_CHILDREN):
        largest = tl.max(keys)
        tl.store(keys_ptr + child, largest)
        keys = tl.where(keys == largest, LOWEST_KEY, keys)


@triton.jit(do_not_specialize=["stride_logits_row"])
def _sample_children_slice_kernel(
    draft_logits_ptr, coins, temperature_ptr, nodes_ptr, scratch, stride_logits_row,
    VOCAB_SIZE: tl.constexpr, NUM_SLICES: tl.constexpr, NUM_CHILDREN: tl.constexpr, WITH_REPLACEMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr, BLOCK_VOCAB: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Finds the best tokens of a slice for every child, its maximum and its sum of exponentials."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    place = row * NUM_SLICES + part
    temperature = tl.load(temperature_ptr + row)
    seed = tl.load(coins.seeds + row)
    position = tl.load(coins.positions + row)
    node = tl.zeros([], tl.int64) if nodes_ptr is None else tl.load(nodes_ptr + row).to(tl.int64)
    token = part * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    row_ptr = draft_logits_ptr + tl.multiple_of(row * stride_logits_row, ALIGNMENT)
    scale, is_sampled = read_temperature(temperature)
    scaled = load_scaled(row_ptr, token, token < VOCAB_SIZE, scale)

    largest = tl.max(scaled)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(scratch.maxima + place, largest)
    tl.store(scratch.sums + place, tl.sum(tl.exp(scaled - shift)))

    keys_ptr = scratch.keys + place * NUM_CHILDREN
    if is_sampled:
        if WITH_REPLACEMENT:
            for child in range(NUM_CHILDREN):
                noise_key = random_block(seed, position, _STREAM, node + child * _NODES)
                tl.store(keys_ptr + child, tl.max(_keys(scaled, token, noise_key, True)))
        else:
            _store_best(_keys(scaled, token, random_block(seed, position, _STREAM, node), True), keys_ptr, NUM_CHILDREN)
    else:
        keys = _keys(scaled, token, None, False)
        if WITH_REPLACEMENT:
            largest_key = tl.max(keys)
            for child in range(NUM_CHILDREN):
                tl.store(keys_ptr + child, largest_key)
        else:
            _store_best(keys, keys_ptr, NUM_CHILDREN)


@triton.jit(do_not_specialize=["stride_logits_row"])
def _sample_children_merge_kernel(
    draft_logits_ptr, temperature_ptr, d2t_ptr, scratch, out, stride_logits_row,
    NUM_SLICES: tl.constexpr, NUM_CHILDREN: tl.constexpr, WITH_REPLACEMENT: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Writes ids and log probabilities of the best among the slices' best."""
    await_predecessor(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, next_power_of_2(NUM_SLICES))
    child = tl.arange(0, next_power_of_2(NUM_CHILDREN))
    place = row * NUM_SLICES + part
    is_key = (part < NUM_SLICES)[:, None] & (child < NUM_CHILDREN)[None, :]
    keys = tl.load(scratch.keys + place[:, None] * NUM_CHILDREN + child[None, :], mask=is_key, other=LOWEST_KEY)
    if WITH_REPLACEMENT:
        best = tl.max(keys, axis=0)
    else:
        best = tl.full(child.shape, LOWEST_KEY, tl.int64)
        for rank in range(NUM_CHILDREN):
            largest = tl.max(tl.max(keys, axis=0), axis=0)
            best = tl.where(child == rank, largest, best)
            keys = tl.where(keys == largest, LOWEST_KEY, keys)

    slice_max = tl.load(scratch.maxima + place, mask=part < NUM_SLICES, other=float("-inf"))
    slice_sum = tl.load(scratch.sums + place, mask=part < NUM_SLICES, other=0.0)
    row_max = tl.max(slice_max)
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.sum(tl.where(slice_max == float("-inf"), 0.0, slice_sum * tl.exp(slice_max - shift)))

    is_drawn = best != LOWEST_KEY
    token = tl.where(is_drawn, noisy_key_id(best), 0)
    scale, _ = read_temperature(tl.load(temperature_ptr + row))
    scaled = load_scaled(draft_logits_ptr + row * stride_logits_row, token, is_drawn, scale)
    logprob = scaled - shift - tl.log(tl.where(row_sum > 0.0, row_sum, 1.0))
    if d2t_ptr is not None:
        token += tl.load(d2t_ptr + token, mask=is_drawn, other=0).to(tl.int64)
    offset = row * NUM_CHILDREN + child
    tl.store(out.tokens + offset, tl.where(is_drawn, token, -1), mask=child < NUM_CHILDREN)
    tl.store(out.logprobs + offset, tl.where(is_drawn, logprob, float("-inf")), mask=child < NUM_CHILDREN)


def contract(values: dict) -> Output:
    args = check.Arguments("sample_children", values)
    args.tensor("draft_logits", ("R", "Vd"), check.FLOAT, contiguous=1)
    args.tensor("positions", ("R",), check.INTEGER)
    args.tensor("seeds", ("R",), check.INTEGER)
    args.tensor("temperature", ("R",), (torch.float32,))
    args.tensor("nodes", ("R",), check.INTEGER, optional=True)
    args.tensor("d2t", ("Vd",), check.INTEGER, optional=True)
    num_children = args.integer("num_children", 1, MAX_CHILDREN)
    check_vocabulary(args, "draft_logits", "Vd")
    args.debug_numbers("temperature", 0)
    shape = (args.size("R"), num_children)
    return Output(args.spec(shape, torch.int64), args.spec(shape, torch.float32))


@launcher
def sample_children(
    draft_logits: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    nodes: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    *,
    num_children: int,
    replacement: bool = False,
    out: Output | None = None,
) -> Output:
    """Draws the children of tree nodes from the draft's distribution, without or with replacement.

    Symbols: R rows, one for each node whose children are drawn, Vd draft vocabulary (1..2^20), q =
    softmax(draft_logits / temperature).

    Args:
        draft_logits: [R, Vd] fp32, fp16 or bf16. Unit stride along Vd. NaN counts as -inf, which is never drawn.
        positions: [R] int. Position of the children.
        seeds: [R] int. Seed of the row's request.
        temperature: [R] fp32. 0 (anything below 1e-5): greedy, the largest logits, ties by lowest id; with replacement
            the argmax K times.
        nodes: None or [R] int. The node whose children are drawn, 0..65535; None: 0. Rows of one request at one
            position draw independently if their nodes differ. `verify_tree_traversal` and the method "block" of
            `verify_chain` look at drafts beyond those they accept: for them, a position must have a different node in
            each round; putting the depth into the node's number is enough.
        d2t: None or [Vd] int. Target id minus draft id, for the reduced vocabulary of EAGLE-3. None: 0.
        num_children: K, 1..64.
        replacement: draw independently, so that tokens may repeat, instead of one after another.
        out: two tensors to write into.

    Returns:
        A named tuple:
        tokens: [R, K] int64. Target ids in the order of the draws, -1 where q has no token left.
        logprobs: [R, K] fp32. log of each child's q before any draw, in greedy rows at temperature 1; -inf for -1.

        Equal logits, seed, position and node give equal children, in any row or batch; a smaller K gives the first.

    Raises:
        ValueError, TypeError: an argument breaks a rule above. EAGLE_KERNELS_DEBUG=1 also checks temperature; nodes and
            d2t are unchecked.

    Source:
        Gumbel top-k: Kool et al., https://arxiv.org/abs/1903.06059, algorithm 1 without its tree; Vieira 2014. The key
        of the noise is eagle_kernels' own.

    Example:
        >>> children = eagle_kernels.sample_children(
        ...     torch.tensor([[0.125, 0.5, 0.375]]).log(), torch.tensor([4]), torch.tensor([1]), torch.tensor([0.0]),
        ...     num_children=2)
        >>> children.tokens.tolist(), children.logprobs.exp().round(decimals=3).tolist()  # greedy
        ([[1, 2]], [[0.5, 0.375]])
    """
    values = locals()
    out = check.allocate("sample_children", contract(values), out)
    device, (num_rows, vocab_size) = draft_logits.device, draft_logits.shape
    scan = dict(tuning.row(TUNING, device))
    scan["BLOCK_VOCAB"] = min(scan["BLOCK_VOCAB"], next_power_of_2(vocab_size))
    num_slices = triton.cdiv(vocab_size, scan["BLOCK_VOCAB"])
    scratch = Scratch(
        torch.empty((num_rows, num_slices, num_children), dtype=torch.int64, device=device),
        torch.empty((num_rows, num_slices), dtype=torch.float32, device=device),
        torch.empty((num_rows, num_slices), dtype=torch.float32, device=device),
    )
    shared = {
        "draft_logits_ptr": draft_logits, "temperature_ptr": temperature, "scratch": scratch,
        "stride_logits_row": draft_logits.stride(0),
        "NUM_SLICES": num_slices, "NUM_CHILDREN": num_children, "WITH_REPLACEMENT": replacement,
    }  # fmt: skip
    own = {
        "coins": bundle(Coins, values), "nodes_ptr": nodes, "VOCAB_SIZE": vocab_size,
        "ALIGNMENT": math.gcd(draft_logits.stride(0), 16),  # a divisor of every row's offset, so that loads can be wide
    }  # fmt: skip
    launch("sample_children", _sample_children_slice_kernel, (num_rows, num_slices), **own, **shared, **scan)
    merge = shared | {"d2t_ptr": d2t, "out": out} | tuning.row(MERGE_TUNING, device)
    launch("sample_children", _sample_children_merge_kernel, (num_rows,), **merge)
    return out
