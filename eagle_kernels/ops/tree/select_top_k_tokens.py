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

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import bundle, launch, launcher
from .shared.levels import LEVEL_SIZES, Beams, Output, level_arguments, level_contract, load_scores, select_beams
from .shared.selection import NUM_LANES, largest_in_rows, scan_rows


@triton.jit(do_not_specialize=["stride_logits_row", "vocab_size", "num_chunks", *LEVEL_SIZES])
def _select_top_k_tokens_kernel(
    logits_ptr, scan, beams, out,
    stride_logits_row, vocab_size, num_chunks, level, num_input_words, stride_candidate_scores_request,
    stride_candidate_tokens_request, stride_parent_slots_request,
    TOPK: tl.constexpr, NUM_BEAMS: tl.constexpr, BLOCK_SLOT: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    beam = tl.arange(0, next_power_of_2(NUM_BEAMS))[None, :, None]
    is_beam = beam < NUM_BEAMS
    row = tl.program_id(0).to(tl.int64) * NUM_BEAMS + beam
    beam_score = load_scores(beams.scores, row, is_beam)
    largest = largest_in_rows(
        logits_ptr, stride_logits_row, vocab_size, num_chunks, scan, row, is_beam, COUNT=TOPK, BLOCK_SLOT=BLOCK_SLOT
    )
    strides = stride_candidate_scores_request, stride_candidate_tokens_request, stride_parent_slots_request
    select_beams(largest, beam_score, beams, out, level, num_input_words, strides, TOPK=TOPK, NUM_BEAMS=NUM_BEAMS)


def contract(values: dict) -> Output:
    args = check.Arguments("select_top_k_tokens", values)
    rows = "B" if values["level"] == 0 else "B * topk"
    args.tensor("logits", (rows, "Vd"), check.FLOAT, contiguous=1)
    return level_contract(args, "logits")


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
    num_chunks, num_beams = scan.chunk_max.shape[1], 1 if level == 0 else topk
    launch(
        "select_top_k_tokens", _select_top_k_tokens_kernel, (out.scores.shape[0],),
        logits_ptr=logits, scan=scan, stride_logits_row=logits.stride(0), vocab_size=logits.shape[1],
        num_chunks=num_chunks, BLOCK_SLOT=next_power_of_2(triton.cdiv(num_chunks, NUM_LANES)),
        **level_arguments(bundle(Beams, locals()), out, level), num_warps=next_power_of_2(num_beams),
    )  # fmt: skip
    return out
