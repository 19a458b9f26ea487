"""One level of drafting: the best tokens of every beam become candidates, the best candidates the next beams.

Computes
    EAGLE-2 (arXiv 2406.16858, section 4.1): a candidate's score is the log-probability of its path. Each of the topk
    beams (one root at level 0) proposes the topk most probable tokens of its draft logits; the topk best of these
    candidates are expanded next.
Shapes
    logits            [B, Vd] at level 0, else [B * K, Vd]  float  draft logits; row b * K + j is beam j of request b;
                                                            rows may be strided
    scores            [B, K]           fp32   scores of the beams; not given at level 0
    ancestors         [B, K, W_in]     int64  draft slots that each beam sees, itself among them; not given at level 0;
                                              ceil(level * K / 64) <= W_in <= W
    draft_to_target   [Vd]             int64  offsets: target id = draft id + draft_to_target[draft id]
    -> scores            [B, K]        fp32   scores of the new beams, descending
    -> tokens            [B, K]        int64  their tokens, target ids
    -> parents           [B, K]        int64  the beam each comes from, whose hidden state is row b * K + parent
    -> parent_slots      [B, K]        int64  flat candidate ids, this level's entries of parent_list
    -> candidate_scores  [B, C]        fp32   C = K at level 0, else K * K, in flat order beam * K + rank
    -> candidate_tokens  [B, C]        int64  their tokens, target ids
    -> ancestors         [B, K, W]     int64  new beam j takes draft slot level * K + j; its parent's slots and its own;
                                              W = ceil((level + 1) * K / 64)
    Rows of out.candidate_scores and out.candidate_tokens may be strided: slices of one buffer [B, K + (S - 1) * K * K]
    that holds the candidates of all levels, as organize_draft_results reads it.
Invariants
    A beam's candidates are ordered by logit, then by ascending id; beams by score, then by ascending flat id. NaN
    counts as -inf, +inf as the largest finite fp32, -0.0 equals 0.0. A row of -inf alone proposes ids 0 .. K - 1 with
    score -inf. Results of a row do not depend on the batch around it. draft_to_target is not checked for range.
Grid
    (rows, slices), one program scans one slice of a row's vocabulary; then (B,), one program selects for one request.
Launches
    2
Traffic
    rows * Vd * element size read once; the slices' partial results (8 B * K + 8 B each) written and read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.ordering import (
    HIGHEST_KEY,
    LOWEST_KEY,
    comparable,
    key_id,
    key_value,
    largest_keys,
    ordered_key,
)
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch


class Output(NamedTuple):
    """What `select_top_k_tokens` returns."""

    scores: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    parent_slots: torch.Tensor
    candidate_scores: torch.Tensor
    candidate_tokens: torch.Tensor
    ancestors: torch.Tensor


MAX_TOPK = 16
MAX_SLICES = 16

TUNING = {"default": {"BLOCK_VOCAB": 2048, "num_warps": 4}}
SELECT_TUNING = {"default": {"num_warps": 4}}


@triton.jit(do_not_specialize=["stride_logits_row", "vocab_size", "blocks_per_slice"])
def _select_top_k_tokens_scan_kernel(
    logits_ptr,
    partial_keys_ptr,
    partial_sums_ptr,
    stride_logits_row,
    vocab_size,
    blocks_per_slice,
    TOPK: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
):
    """The best keys of one slice of a row, and the slice's maximum with the sum of exponentials relative to it."""
    row = tl.program_id(0).to(tl.int64)
    partial = row * tl.num_programs(1) + tl.program_id(1)
    rank = tl.arange(0, BLOCK_TOPK)
    # empty lanes differ, so that one key replaces one of them; lanes from TOPK on are never the smallest
    best = tl.where(rank < TOPK, rank.to(tl.int64) + LOWEST_KEY, HIGHEST_KEY)
    running_max = tl.full([], float("-inf"), tl.float32)
    running_sum = tl.full([], 0.0, tl.float32)
    for block in range(0, blocks_per_slice):
        start = (tl.program_id(1) * blocks_per_slice + block) * BLOCK_VOCAB
        token = start + tl.arange(0, BLOCK_VOCAB)
        is_token = token < vocab_size
        logit = tl.load(logits_ptr + row * stride_logits_row + token, mask=is_token, other=float("-inf"))
        # an infinite maximum would make NaN of the differences below
        logit = tl.minimum(comparable(logit.to(tl.float32)), 3.4028234663852886e38)
        block_max = tl.max(logit)
        new_max = tl.maximum(running_max, block_max)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        running_sum = running_sum * tl.exp(running_max - shift) + tl.sum(tl.exp(logit - shift))
        running_max = new_max
        # no key of the block is above that of its maximum at its first id: most blocks end here
        smallest = tl.min(best)
        if ordered_key(block_max, start) > smallest:
            keys = tl.where(is_token, ordered_key(logit, token), LOWEST_KEY)
            num_above = tl.sum((keys > smallest).to(tl.int32))
            for _ in range(0, tl.minimum(num_above, TOPK)):
                largest = tl.max(keys)
                best = tl.where(best == tl.min(best), tl.maximum(best, largest), best)
                keys = tl.where(keys == largest, LOWEST_KEY, keys)
    tl.store(partial_keys_ptr + partial * TOPK + rank, best, mask=rank < TOPK)
    tl.store(partial_sums_ptr + partial * 2, running_max)
    tl.store(partial_sums_ptr + partial * 2 + 1, running_sum)


@triton.jit(
    do_not_specialize=[
        "num_slices",
        "level",
        "first_candidate",
        "num_input_words",
        "num_words",
        "stride_candidate_scores_request",
        "stride_candidate_tokens_request",
    ]
)
def _select_top_k_tokens_kernel(
    # inputs
    partial_keys_ptr,
    partial_sums_ptr,
    beam_scores_ptr,
    beam_ancestors_ptr,
    draft_to_target_ptr,
    # outputs
    scores_ptr,
    tokens_ptr,
    parents_ptr,
    parent_slots_ptr,
    candidate_scores_ptr,
    candidate_tokens_ptr,
    ancestors_ptr,
    # sizes
    num_slices,
    level,
    first_candidate,
    num_input_words,
    num_words,
    stride_candidate_scores_request,
    stride_candidate_tokens_request,
    TOPK: tl.constexpr,
    NUM_BEAMS: tl.constexpr,
    BLOCK_SLICE: tl.constexpr,
    BLOCK_BEAM: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    beam = tl.arange(0, BLOCK_BEAM)
    rank = tl.arange(0, BLOCK_TOPK)
    is_beam = beam < NUM_BEAMS
    row = request * NUM_BEAMS + beam

    # maximum and sum of exponentials of each beam's row, [beam, slice]
    part = tl.arange(0, BLOCK_SLICE)
    is_part = is_beam[:, None] & (part < num_slices)[None, :]
    part_offset = (row[:, None] * num_slices + part[None, :]) * 2
    part_max = tl.load(partial_sums_ptr + part_offset, mask=is_part, other=float("-inf"))
    part_sum = tl.load(partial_sums_ptr + part_offset + 1, mask=is_part, other=0.0)
    row_max = tl.max(part_max, axis=1)
    row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.sum(part_sum * tl.exp(part_max - row_max[:, None]), axis=1)
    log_sum = tl.log(tl.where(row_sum > 0.0, row_sum, 1.0))

    # candidates: the best of each row, [beam, rank]
    column = tl.arange(0, BLOCK_SLICE * BLOCK_TOPK)
    keys = tl.load(
        partial_keys_ptr + row[:, None] * (num_slices * TOPK) + column[None, :],
        mask=is_beam[:, None] & (column < num_slices * TOPK)[None, :],
        other=LOWEST_KEY,
    )
    best = largest_keys(keys, TOPK, BLOCK_TOPK)
    is_candidate = is_beam[:, None] & (rank < TOPK)[None, :]
    # the maximum first: its difference from the best logits is exact or nearly so
    score = (key_value(best) - row_max[:, None]) - log_sum[:, None]
    if beam_scores_ptr is not None:
        score += tl.load(beam_scores_ptr + row, mask=is_beam, other=0.0)[:, None]
    score = comparable(score)
    token = key_id(best)
    if draft_to_target_ptr is not None:
        token += tl.load(draft_to_target_ptr + token, mask=is_candidate, other=0)
    flat = beam[:, None] * TOPK + rank[None, :]
    tl.store(candidate_scores_ptr + request * stride_candidate_scores_request + flat, score, mask=is_candidate)
    tl.store(candidate_tokens_ptr + request * stride_candidate_tokens_request + flat, token, mask=is_candidate)

    # beams: the best candidates, [rank]
    keys = tl.where(is_candidate, ordered_key(score, flat), LOWEST_KEY)
    kept = largest_keys(tl.reshape(keys, [1, BLOCK_BEAM * BLOCK_TOPK]), TOPK, BLOCK_TOPK)
    kept = tl.reshape(kept, [BLOCK_TOPK])
    is_kept = rank < TOPK
    kept_flat = tl.where(is_kept, key_id(kept), 0).to(tl.int32)
    parent = kept_flat // TOPK
    kept_token = tl.gather(tl.reshape(token, [BLOCK_BEAM * BLOCK_TOPK]), parent * BLOCK_TOPK + kept_flat % TOPK, 0)
    kept_offset = request * TOPK + rank
    tl.store(scores_ptr + kept_offset, key_value(kept), mask=is_kept)
    tl.store(tokens_ptr + kept_offset, kept_token, mask=is_kept)
    tl.store(parents_ptr + kept_offset, parent, mask=is_kept)
    tl.store(parent_slots_ptr + kept_offset, kept_flat + first_candidate, mask=is_kept)

    slot = level * TOPK + rank
    for word in range(0, num_words):
        words = tl.where(slot // 64 == word, tl.full([BLOCK_TOPK], 1, tl.int64) << (slot % 64), 0)
        if beam_ancestors_ptr is not None:
            parent_word = (request * TOPK + parent) * num_input_words + word
            words |= tl.load(beam_ancestors_ptr + parent_word, mask=is_kept & (word < num_input_words), other=0)
        tl.store(ancestors_ptr + kept_offset * num_words + word, words, mask=is_kept)


def contract(values: dict) -> Output:
    """Checks the arguments of `select_top_k_tokens` and describes its outputs."""
    args = check.Arguments("select_top_k_tokens", values)
    topk = args.integer("topk", 1, MAX_TOPK)
    level = args.integer("level", 0)
    num_words = -(-(level + 1) * topk // 64)
    logits = args.tensor("logits", ("B" if level == 0 else "B * topk", "Vd"), check.FLOAT, contiguous=1)
    if args.size("Vd") < topk:
        args.fail("topk", f"be at most the draft vocabulary, {args.size('Vd')}", topk)
    args.tensor("draft_to_target", ("Vd",), (torch.int64,), optional=True)
    if level == 0:
        for name in ("scores", "ancestors"):
            if values[name] is not None:
                args.fail(name, "not be given at level 0, which has no beams yet", "a tensor")
    else:
        args.tensor("scores", ("B", topk), (torch.float32,))
        ancestors = args.tensor("ancestors", ("B", topk, None), (torch.int64,))
        if logits.shape[0] != args.size("B") * topk:
            rule = f"have B * topk = {args.size('B') * topk} rows at level {level}"
            args.fail("logits", rule, f"shape {list(logits.shape)}")
        if not -(-level * topk // 64) <= ancestors.shape[2] <= num_words:
            rule = f"have {-(-level * topk // 64)}..{num_words} words at level {level}"
            args.fail("ancestors", rule, f"shape {list(ancestors.shape)}")
    batch_size = args.size("B")
    num_candidates = topk if level == 0 else topk * topk
    beam = args.spec((batch_size, topk), torch.int64)
    return Output(
        scores=args.spec((batch_size, topk), torch.float32),
        tokens=beam,
        parents=beam,
        parent_slots=beam,
        candidate_scores=args.spec((batch_size, num_candidates), torch.float32, contiguous=1),
        candidate_tokens=args.spec((batch_size, num_candidates), torch.int64, contiguous=1),
        ancestors=args.spec((batch_size, topk, num_words), torch.int64),
    )


def select_top_k_tokens(
    logits: torch.Tensor,
    scores: torch.Tensor | None = None,
    ancestors: torch.Tensor | None = None,
    draft_to_target: torch.Tensor | None = None,
    *,
    topk: int,
    level: int,
    out: Output | None = None,
) -> Output:
    """Selects the candidates and the next beams of one draft level; shapes are in the module's docstring.

    topk: K, beams per request and candidates per beam, 1..16.
    level: 0 for the root's own logits, i for the logits of the beams that level i - 1 returned.
    out: seven tensors to write into; the rows of the candidates' may be strided.
    """
    contracted = contract(locals())
    out = check.allocate("select_top_k_tokens", contracted, out)
    device, (num_rows, vocab_size) = logits.device, logits.shape
    scan = tuning.row(TUNING, device)
    num_blocks = triton.cdiv(vocab_size, scan["BLOCK_VOCAB"])
    blocks_per_slice = triton.cdiv(num_blocks, MAX_SLICES)
    num_slices = triton.cdiv(num_blocks, blocks_per_slice)
    block_topk = triton.next_power_of_2(topk)
    partial_keys = torch.empty((num_rows, num_slices, topk), dtype=torch.int64, device=device)
    partial_sums = torch.empty((num_rows, num_slices, 2), dtype=torch.float32, device=device)
    launch(
        "select_top_k_tokens",
        _select_top_k_tokens_scan_kernel,
        (num_rows, num_slices),
        logits_ptr=logits,
        partial_keys_ptr=partial_keys,
        partial_sums_ptr=partial_sums,
        stride_logits_row=logits.stride(0),
        vocab_size=vocab_size,
        blocks_per_slice=blocks_per_slice,
        TOPK=topk,
        BLOCK_TOPK=block_topk,
        **scan,
    )
    num_beams = 1 if level == 0 else topk
    launch(
        "select_top_k_tokens",
        _select_top_k_tokens_kernel,
        (out.scores.shape[0],),
        partial_keys_ptr=partial_keys,
        partial_sums_ptr=partial_sums,
        beam_scores_ptr=scores,
        beam_ancestors_ptr=ancestors,
        draft_to_target_ptr=draft_to_target,
        scores_ptr=out.scores,
        tokens_ptr=out.tokens,
        parents_ptr=out.parents,
        parent_slots_ptr=out.parent_slots,
        candidate_scores_ptr=out.candidate_scores,
        candidate_tokens_ptr=out.candidate_tokens,
        ancestors_ptr=out.ancestors,
        num_slices=num_slices,
        level=level,
        first_candidate=0 if level == 0 else topk + topk * topk * (level - 1),
        num_input_words=0 if ancestors is None else ancestors.shape[2],
        num_words=out.ancestors.shape[2],
        stride_candidate_scores_request=out.candidate_scores.stride(0),
        stride_candidate_tokens_request=out.candidate_tokens.stride(0),
        TOPK=topk,
        NUM_BEAMS=num_beams,
        BLOCK_SLICE=MAX_SLICES,
        BLOCK_BEAM=triton.next_power_of_2(num_beams),
        BLOCK_TOPK=block_topk,
        **tuning.row(SELECT_TUNING, device),
    )
    return out
