"""One level of drafting: the best tokens of every beam become candidates, the best candidates the next beams.

Computes: EAGLE-2 (arXiv 2406.16858, section 4.1): a candidate's score is the log-probability of its path. Each of the
    topk beams (one root at level 0) proposes the topk most probable tokens of its draft logits; the topk best of these
    candidates are expanded next.
Invariants: -0.0 equals 0.0. Results of a row do not depend on the batch around it (except hidden_rows, which count its
    rows).
Grid: One program scans some chunks of 1024 ids of a row, one warp each; then (B,), one program selects for one request,
    one warp for each beam.
Launches: 2
Traffic: rows * Vd * element size read once, for a draft vocabulary of Vd. The maxima of groups of 32 ids (element size)
    and the maxima and sums of chunks (8 B) are written; those of chunks, topk * 32 of groups and topk * 32 logits are
    read again, per row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.ordering import LOWEST_KEY, bits_value, comparable, ordered_bits, ordered_key
from ...runtime import check
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher
from .shared.selection import NUM_LANES, largest_in_rows, scan_rows


class Output(NamedTuple):
    """What `select_top_k_tokens` returns."""

    scores: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    hidden_rows: torch.Tensor
    parent_slots: torch.Tensor
    candidate_scores: torch.Tensor
    candidate_tokens: torch.Tensor
    ancestors: torch.Tensor


MAX_TOPK = 16


@triton.jit(do_not_specialize=["stride_logits_row", "vocab_size", "num_chunks", "level", "num_input_words",
                               "stride_candidate_scores_request", "stride_candidate_tokens_request",
                               "stride_parent_slots_request"])  # fmt: skip
def _select_top_k_tokens_kernel(
    logits_ptr, scan, beam_scores_ptr, beam_ancestors_ptr, draft_to_target_ptr, out,
    stride_logits_row, vocab_size, num_chunks, level, num_input_words, stride_candidate_scores_request,
    stride_candidate_tokens_request, stride_parent_slots_request,
    TOPK: tl.constexpr, NUM_BEAMS: tl.constexpr, BLOCK_SLOT: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    BLOCK_BEAM: tl.constexpr = next_power_of_2(NUM_BEAMS)
    # until [candidate] below: [rank, beam, lane], the same in all lanes
    beam = tl.arange(0, BLOCK_BEAM)[None, :, None]
    is_beam = beam < NUM_BEAMS
    row = request * NUM_BEAMS + beam
    beam_score = tl.zeros([1, BLOCK_BEAM, 1], tl.float32)
    if beam_scores_ptr is not None:
        beam_score = tl.load(beam_scores_ptr + row, mask=is_beam, other=0.0)
    bits, token, row_max, log_sum = largest_in_rows(
        logits_ptr, stride_logits_row, vocab_size, num_chunks, scan, row, is_beam, COUNT=TOPK, BLOCK_SLOT=BLOCK_SLOT
    )
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
    if draft_to_target_ptr is not None:
        token += tl.load(draft_to_target_ptr + token, mask=is_candidate, other=0)
    words = tl.zeros([NUM_CANDIDATES], tl.int64)
    if beam_ancestors_ptr is not None:
        beam_words_ptr = beam_ancestors_ptr + (request * TOPK + beam) * num_input_words
        words = tl.load(beam_words_ptr, mask=is_candidate & (num_input_words > 0), other=0)

    # a candidate becomes the beam whose number is how many candidates are better
    key = tl.where(is_candidate, ordered_key(score, flat), LOWEST_KEY)
    place = tl.sum((key[:, None] > key[None, :]).to(tl.int32), axis=0)
    is_kept = is_candidate & (place < TOPK)
    kept = request * TOPK + place
    tl.store(out.candidate_scores + request * stride_candidate_scores_request + flat, score, mask=is_candidate)
    tl.store(out.candidate_tokens + request * stride_candidate_tokens_request + flat, token, mask=is_candidate)
    tl.store(out.scores + kept, score, mask=is_kept)
    tl.store(out.tokens + kept, token, mask=is_kept)
    tl.store(out.parents + kept, beam, mask=is_kept)
    tl.store(out.hidden_rows + kept, request * NUM_BEAMS + beam, mask=is_kept)
    # candidates of the levels before: TOPK and, from level 1 on, TOPK * TOPK of each
    first_candidate = tl.where(level > 0, TOPK + (level - 1) * TOPK * TOPK, 0)
    tl.store(out.parent_slots + request * stride_parent_slots_request + place, flat + first_candidate, mask=is_kept)
    slot = level * TOPK + place
    num_words = tl.cdiv((level + 1) * TOPK, 64)
    for word in range(0, num_words):
        own = tl.where(slot // 64 == word, tl.full([NUM_CANDIDATES], 1, tl.int64) << (slot % 64), 0)
        tl.store(out.ancestors + kept * num_words + word, words | own, mask=is_kept)
        if beam_ancestors_ptr is not None:
            words = tl.load(beam_words_ptr + word + 1, mask=is_kept & (word + 1 < num_input_words), other=0)


def contract(values: dict) -> Output:
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
        tokens=beam, parents=beam, hidden_rows=beam,
        parent_slots=args.spec((batch_size, topk), torch.int64, contiguous=1),
        candidate_scores=args.spec((batch_size, num_candidates), torch.float32, contiguous=1),
        candidate_tokens=args.spec((batch_size, num_candidates), torch.int64, contiguous=1),
        ancestors=args.spec((batch_size, topk, num_words), torch.int64),
    )  # fmt: skip


@launcher
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
    """Selects the candidates of one draft level, and the best of them as the beams that the next level expands.

    A candidate's flat id counts the candidates of all S levels: K of level 0, then K^2 of every other one.

    Args:
        logits: [B * K, Vd] fp16, bf16 or fp32, but [B, Vd] at level 0. Draft logits over Vd ids; row b * K + j is beam
            j of request b. NaN counts as -inf, +inf as the largest finite fp32. Rows may be strided.
        scores: None or [B, K] fp32. The `scores` of the previous level. None at level 0, and only there.
        ancestors: None or [B, K, W] int64, ceil(level * K / 64) <= W <= ceil((level + 1) * K / 64). The `ancestors` of
            the previous level. None at level 0, and only there.
        draft_to_target: None or [Vd] int64. Offsets: target id = draft id + draft_to_target[draft id]. None: the draft
            model has the target's ids. Results are not checked to be valid target ids.
        topk: K, beams of a request and candidates of a beam, 1..16 and at most Vd.
        level: 0 for the logits of the roots, i for those of the beams of level i - 1.
        out: eight tensors to write into. Rows of candidate_scores, candidate_tokens and parent_slots may be strided, as
            slices of buffers for all levels.

    Returns:
        A named tuple:
        scores: [B, K] fp32. Log-probabilities of the paths to the new beams, descending.
        tokens: [B, K] int64. Target ids of the new beams' tokens, which stand at the root's position + level + 1.
        parents: [B, K] int64. Beam that each new beam comes from; 0, the root, at level 0.
        hidden_rows: [B, K] int64. That beam's row of logits and of hidden states.
        parent_slots: [B, K] int64. Candidate ids of the new beams: slots 1 + level * K and up of `parent_list`, which
            has none for the last level.
        candidate_scores: [B, C] fp32, where C is K at level 0 and K^2 at the others. In the order beam * K + rank.
        candidate_tokens: [B, C] int64. Target ids of their tokens.
        ancestors: [B, K, ceil((level + 1) * K / 64)] int64. New beam j becomes draft key level * K + j, and sees its
            parent's draft keys and its own, besides the text and the root. Bit s % 64 of word s // 64: draft key s.
            `unpack_tree_mask` turns them into booleans, with num_verify_tokens = (level + 1) * K.
        Ties in logits or scores go to the lower id. A row of only -inf proposes ids 0..K-1 with score -inf.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Source:
        EAGLE-2, https://arxiv.org/abs/2406.16858, section 4.1 (expansion); candidate ids as in SGLang's
        select_top_k_tokens, which multiplies probabilities. draft_to_target is the `d2t` of EAGLE-3 checkpoints.

    Example:
        >>> root = eagle_kernels.select_top_k_tokens(torch.tensor([[0.6, 0.3, 0.1]]).log(), topk=2, level=0)
        >>> logits = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]]).log()
        >>> level = eagle_kernels.select_top_k_tokens(logits, root.scores, root.ancestors, topk=2, level=1)
        >>> level.candidate_scores.exp().mul(100).round().tolist()  # 0.6 * 0.7, 0.6 * 0.2, 0.3 * 0.7, 0.3 * 0.2
        [[42.0, 12.0, 21.0, 6.0]]
        >>> level.tokens.tolist(), level.parent_slots.tolist()
        ([[0, 2]], [[2, 4]])
    """
    out = check.allocate("select_top_k_tokens", contract(locals()), out)
    scan = scan_rows("select_top_k_tokens", logits)
    num_chunks = scan.chunk_max.shape[1]
    num_beams = 1 if level == 0 else topk
    launch(
        "select_top_k_tokens", _select_top_k_tokens_kernel, (out.scores.shape[0],),
        logits_ptr=logits, scan=scan, beam_scores_ptr=scores, beam_ancestors_ptr=ancestors,
        draft_to_target_ptr=draft_to_target, out=out, stride_logits_row=logits.stride(0), vocab_size=logits.shape[1],
        num_chunks=num_chunks, level=level, num_input_words=0 if ancestors is None else ancestors.shape[2],
        stride_candidate_scores_request=out.candidate_scores.stride(0),
        stride_candidate_tokens_request=out.candidate_tokens.stride(0),
        stride_parent_slots_request=out.parent_slots.stride(0),
        TOPK=topk, NUM_BEAMS=num_beams, BLOCK_SLOT=next_power_of_2(triton.cdiv(num_chunks, NUM_LANES)),
        num_warps=next_power_of_2(num_beams),
    )  # fmt: skip
    return out
