"""Selects the tokens of one level of drafting straight from the rows that the output layer reads.

Computes: select_top_k_tokens of linear_decode(hidden, weight): EAGLE-2 (arXiv 2406.16858, section 4.1).
Invariants: Logits have the bits of linear_decode(..., deterministic=True) in this dtype, so tokens, ties and candidates
    are those of the two ops; scores may differ in their last bits, as sums of exponentials are cut elsewhere. -0.0
    equals 0.0. Results of a row depend neither on the other rows nor on their number (except hidden_rows). With
    prefetch_weight, weights are read before the wait of primitives/dependent_launch.py, hidden rows after it.
Grid: (tiles,), one program multiplies all rows by a tile of 128 rows of weight, and keeps the topk best ids of each row
    and a sum of exponentials; then (B,), one program selects for one request, one warp for each beam.
Launches: 2
Traffic: element bytes * H * (Vd + rows) read. Of each row and tile 4 * (topk + 2) bytes are written, 8 of them and
    topk * topk * 4 of a row are read again.
"""

from __future__ import annotations

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import bundle, launch, launcher
from .shared import head_tiles
from .shared.levels import LEVEL_SIZES, Beams, Output, level_arguments, level_contract, load_scores, select_beams
from .shared.selection import NUM_LANES, largest_in_tiles

MAX_ROWS = head_tiles.MAX_ROWS
# ids of which one program can merge all tiles
MAX_VOCAB = 2**18
# up to how many rows this is preferred to the two ops: none, as it is slower on an H200 and was not measured elsewhere
FAST_ROWS = {"default": 0}


@triton.jit(do_not_specialize=["num_tiles", *LEVEL_SIZES])
def _select_from_head_kernel(
    tiles, beams, out,
    num_tiles, level, num_input_words, stride_candidate_scores_request, stride_candidate_tokens_request,
    stride_parent_slots_request,
    TOPK: tl.constexpr, NUM_BEAMS: tl.constexpr, BLOCK_SLOT: tl.constexpr, TILE_SIZE: tl.constexpr,
    IS_BFLOAT16: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    beam = tl.arange(0, next_power_of_2(NUM_BEAMS))[None, :, None]
    is_beam = beam < NUM_BEAMS
    row = tl.program_id(0).to(tl.int64) * NUM_BEAMS + beam
    beam_score = load_scores(beams.scores, row, is_beam)
    largest = largest_in_tiles(
        tiles, num_tiles, row, is_beam, COUNT=TOPK, BLOCK_SLOT=BLOCK_SLOT, NUM_TOKENS=TILE_SIZE,
        TYPE=tl.bfloat16 if IS_BFLOAT16 else tl.float16,
    )  # fmt: skip
    strides = stride_candidate_scores_request, stride_candidate_tokens_request, stride_parent_slots_request
    select_beams(largest, beam_score, beams, out, level, num_input_words, strides, TOPK=TOPK, NUM_BEAMS=NUM_BEAMS)


def contract(values: dict) -> Output:
    args = check.Arguments("select_from_head", values)
    hidden = args.tensor(
        "hidden", ("B" if values["level"] == 0 else "B * topk", "H"), (torch.float16, torch.bfloat16), contiguous=1
    )
    if len(hidden) > MAX_ROWS:
        args.fail("hidden", f"have at most {MAX_ROWS} rows", len(hidden))
    if args.size("H") < 1:
        args.fail("hidden", "have H of at least 1", args.size("H"))
    args.tensor("weight", ("Vd", "H"), (hidden.dtype,), contiguous=1)
    if args.size("Vd") > MAX_VOCAB:
        args.fail("weight", f"have Vd of at most {MAX_VOCAB}", args.size("Vd"))
    return level_contract(args, "hidden")


def is_for(num_rows: int, weight: torch.Tensor) -> bool:
    """Returns whether `select_from_head` takes this many rows of a head, and is faster than the two ops together."""
    is_taken = weight.dtype in (torch.float16, torch.bfloat16) and weight.shape[0] <= MAX_VOCAB
    return is_taken and num_rows <= tuning.row(FAST_ROWS, weight.device)


@launcher
def select_from_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    scores: torch.Tensor | None = None,
    ancestors: torch.Tensor | None = None,
    draft_to_target: torch.Tensor | None = None,
    *,
    topk: int,
    level: int,
    prefetch_weight: bool = False,
    out: Output | None = None,
) -> Output:
    """Selects the candidates and beams of one draft level from the rows that the draft model's output layer reads.

    It returns what `select_top_k_tokens` does for the logits hidden @ weight.T, which it does not store. Flat ids are
    those of that op.

    Args:
        hidden: [B * K, H] fp16 or bf16, but [B, H] at level 0; at most 64 rows, H at least 1. Row b * K + j is beam j
            of request b. Rows may be strided.
        weight: [Vd, H], dtype of `hidden`, Vd at most 2^18. The output layer, without a bias. Rows may be strided.
        scores: None or [B, K] fp32. The `scores` of the previous level. None at level 0, and only there.
        ancestors: None or [B, K, W] int64, ceil(level * K / 64) <= W <= ceil((level + 1) * K / 64). The `ancestors` of
            the previous level. None at level 0, and only there.
        draft_to_target: None or [Vd] int64. Offsets: target id = draft id + draft_to_target[draft id]. None: the draft
            model has the target's ids. Results are not checked to be valid target ids.
        topk: K, beams of a request and candidates of a beam, 1..16 and at most Vd.
        level: 0 for the rows of the roots, i for those of the beams of level i - 1.
        prefetch_weight: reads the first weights before the previous kernel of the stream has ended, where the GPU can.
            Faster, but that kernel must not write `weight`.
        out: eight tensors to write into, as in `select_top_k_tokens`.

    Returns:
        A named tuple:
        scores: [B, K] fp32. Log-probabilities of the paths to the new beams, descending.
        tokens: [B, K] int64. Target ids of the new beams' tokens, which stand at the root's position + level + 1.
        parents: [B, K] int64. Beam that each new beam comes from; 0, the root, at level 0.
        hidden_rows: [B, K] int64. That beam's row of `hidden`.
        parent_slots: [B, K] int64. Candidate ids of the new beams: slots 1 + level * K and up of `parent_list`, which
            has none for the last level.
        candidate_scores: [B, C] fp32, where C is K at level 0 and K^2 at the others. In the order beam * K + rank.
        candidate_tokens: [B, C] int64. Target ids of their tokens.
        ancestors: [B, K, ceil((level + 1) * K / 64)] int64. New beam j becomes draft key level * K + j, and sees its
            parent's draft keys and its own, besides the text and the root. Bit s % 64 of word s // 64: draft key s.
            `unpack_tree_mask` turns them into booleans, with num_verify_tokens = (level + 1) * K.
        Logits are summed in fp32 and rounded once to the dtype of `hidden`; NaN counts as -inf, +inf as the largest
        finite fp32. Ties in logits or scores go to the lower id.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Source:
        EAGLE-2, https://arxiv.org/abs/2406.16858, section 4.1 (expansion); the kernels are eagle_kernels' own.

    Example:
        >>> hidden, weight = torch.tensor([[1.0, 2.0]]).half(), torch.tensor([[1, 0], [0, 1], [1, 1]]).half()
        >>> eagle_kernels.select_from_head(hidden, weight, topk=2, level=0).tokens.tolist()  # logits 1, 2, 3
        [[2, 1]]
    """
    out = check.allocate("select_from_head", contract(locals()), out)
    tiles = head_tiles.scan_head("select_from_head", hidden, weight, topk, prefetch_weight)
    num_tiles, num_beams = tiles.tile_sum.shape[1], 1 if level == 0 else topk
    launch(
        "select_from_head", _select_from_head_kernel, (out.scores.shape[0],),
        tiles=tiles, num_tiles=num_tiles, BLOCK_SLOT=next_power_of_2(triton.cdiv(num_tiles, NUM_LANES)),
        TILE_SIZE=head_tiles.tile_size(hidden.device), IS_BFLOAT16=hidden.dtype == torch.bfloat16,
        **level_arguments(bundle(Beams, locals()), out, level), num_warps=next_power_of_2(num_beams),
    )  # fmt: skip
    return out
