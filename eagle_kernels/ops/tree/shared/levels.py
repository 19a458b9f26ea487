"""What the ops that draft one level have in common: which candidates become beams, checks and outputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....primitives.ordering import LOWEST_KEY, bits_value, comparable, ordered_bits, ordered_key
from ....runtime import check
from ....runtime.language import next_power_of_2, tl, triton

MAX_TOPK = 16
# sizes of every kernel, for which none is compiled again
LEVEL_SIZES = ["level", "num_input_words", "stride_candidate_scores_request", "stride_candidate_tokens_request",
               "stride_parent_slots_request"]  # fmt: skip


class Output(NamedTuple):
    """What `select_top_k_tokens` and `select_from_head` return."""

    scores: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    hidden_rows: torch.Tensor
    parent_slots: torch.Tensor
    candidate_scores: torch.Tensor
    candidate_tokens: torch.Tensor
    ancestors: torch.Tensor


class Beams(NamedTuple):
    """Pointers to what is known of the beams and their tokens; see `select_top_k_tokens`."""

    scores: Any  # None: there are none yet
    ancestors: Any  # likewise
    draft_to_target: Any  # None: the draft model has the target's ids


@triton.jit
def load_scores(scores_ptr, row, is_beam):
    """Loads the scores of beams, to be used when the best ids of their rows are known."""
    if scores_ptr is None:
        return tl.zeros(row.shape, tl.float32)
    else:
        return tl.load(scores_ptr + row, mask=is_beam, other=0.0)


@triton.jit
def select_beams(
    largest, beam_score, beams, out, level, num_input_words, strides, TOPK: tl.constexpr, NUM_BEAMS: tl.constexpr
):
    """Makes candidates of the best ids of all beams of a request, and beams of the best candidates.
    largest: what `largest_in_rows` returns. beam_score: what `load_scores` returns, [1, BEAM, 1]. strides: of a
    request's candidate_scores, candidate_tokens and parent_slots."""
    request = tl.program_id(0).to(tl.int64)
    BLOCK_BEAM: tl.constexpr = next_power_of_2(NUM_BEAMS)
    # [rank, beam, lane], the same in all lanes
    bits, token, row_max, log_sum = largest
    # the maximum first: its difference from the best logits is exact or nearly so
    score = comparable((bits_value(bits) - row_max) - log_sum + beam_score)

    # [candidate]
    NUM_CANDIDATES: tl.constexpr = next_power_of_2(TOPK) * BLOCK_BEAM
    score = bits_value(tl.reshape(tl.max(ordered_bits(score), axis=2), [NUM_CANDIDATES]))
    token = tl.reshape(tl.max(token, axis=2), [NUM_CANDIDATES]).to(tl.int64)
    candidate = tl.arange(0, NUM_CANDIDATES)
    beam = candidate % BLOCK_BEAM
    rank = candidate // BLOCK_BEAM
    is_candidate = (beam < NUM_BEAMS) & (rank < TOPK)
    flat = beam * TOPK + rank
    # loaded here, used where the order is known
    if beams.draft_to_target is not None:
        token += tl.load(beams.draft_to_target + token, mask=is_candidate, other=0)
    words = tl.zeros([NUM_CANDIDATES], tl.int64)
    if beams.ancestors is not None:
        beam_words_ptr = beams.ancestors + (request * TOPK + beam) * num_input_words
        words = tl.load(beam_words_ptr, mask=is_candidate & (num_input_words > 0), other=0)

    # a candidate becomes the beam whose number is how many candidates are better
    key = tl.where(is_candidate, ordered_key(score, flat), LOWEST_KEY)
    place = tl.sum((key[:, None] > key[None, :]).to(tl.int32), axis=0)
    is_kept = is_candidate & (place < TOPK)
    kept = request * TOPK + place
    tl.store(out.candidate_scores + request * strides[0] + flat, score, mask=is_candidate)
    tl.store(out.candidate_tokens + request * strides[1] + flat, token, mask=is_candidate)
    tl.store(out.scores + kept, score, mask=is_kept)
    tl.store(out.tokens + kept, token, mask=is_kept)
    tl.store(out.parents + kept, beam, mask=is_kept)
    tl.store(out.hidden_rows + kept, request * NUM_BEAMS + beam, mask=is_kept)
    # candidates of the levels before: TOPK and, from level 1 on, TOPK * TOPK of each
    first_candidate = tl.where(level > 0, TOPK + (level - 1) * TOPK * TOPK, 0)
    tl.store(out.parent_slots + request * strides[2] + place, flat + first_candidate, mask=is_kept)
    slot = level * TOPK + place
    num_words = tl.cdiv((level + 1) * TOPK, 64)
    for word in range(0, num_words):
        own = tl.where(slot // 64 == word, tl.full([NUM_CANDIDATES], 1, tl.int64) << (slot % 64), 0)
        tl.store(out.ancestors + kept * num_words + word, words | own, mask=is_kept)
        if beams.ancestors is not None:
            words = tl.load(beam_words_ptr + word + 1, mask=is_kept & (word + 1 < num_input_words), other=0)


def level_contract(args: check.Arguments, name: str) -> Output:
    """Checks what the ops take of a level, and returns the specs of its outputs.
    name: the argument that has a row for each beam, whose first axis was named B or, from level 1 on, B * topk, and
    whose vocabulary was named Vd."""
    values, rows = args.values, args.values[name]
    topk = args.integer("topk", 1, MAX_TOPK)
    level = args.integer("level", 0)
    num_words = -(-(level + 1) * topk // 64)
    if args.size("Vd") < topk:
        args.fail("topk", f"be at most the draft vocabulary, {args.size('Vd')}", topk)
    args.tensor("draft_to_target", ("Vd",), (torch.int64,), optional=True)
    if level == 0:
        for field in ("scores", "ancestors"):
            if values[field] is not None:
                args.fail(field, "not be given at level 0, which has no beams yet", "a tensor")
    else:
        args.tensor("scores", ("B", topk), (torch.float32,))
        ancestors = args.tensor("ancestors", ("B", topk, None), (torch.int64,))
        if rows.shape[0] != args.size("B") * topk:
            rule = f"have B * topk = {args.size('B') * topk} rows at level {level}"
            args.fail(name, rule, f"shape {list(rows.shape)}")
        if not -(-level * topk // 64) <= ancestors.shape[2] <= num_words:
            rule = f"have {-(-level * topk // 64)}..{num_words} words at level {level}"
            args.fail("ancestors", rule, f"shape {list(ancestors.shape)}")
    batch_size = args.size("B")
    num_candidates = topk if level == 0 else topk * topk
    beam = args.spec((batch_size, topk), torch.int64)
    return Output(
        scores=args.spec((batch_size, topk), torch.float32),
        tokens=beam, parents=beam, hidden_rows=beam,
        parent_slots=args.spec((batch_size, topk), torch.int64, contiguous=1),
        candidate_scores=args.spec((batch_size, num_candidates), torch.float32, contiguous=1),
        candidate_tokens=args.spec((batch_size, num_candidates), torch.int64, contiguous=1),
        ancestors=args.spec((batch_size, topk, num_words), torch.int64),
    )  # fmt: skip


def level_arguments(beams: Beams, out: Output, level: int) -> dict:
    """Returns the launch arguments that every kernel takes which selects the beams of a level."""
    topk = out.scores.shape[1]
    return {
        "beams": beams, "out": out, "level": level,
        "num_input_words": 0 if beams.ancestors is None else beams.ancestors.shape[2],
        "stride_candidate_scores_request": out.candidate_scores.stride(0),
        "stride_candidate_tokens_request": out.candidate_tokens.stride(0),
        "stride_parent_slots_request": out.parent_slots.stride(0),
        "TOPK": topk, "NUM_BEAMS": 1 if level == 0 else topk,
    }  # fmt: skip
