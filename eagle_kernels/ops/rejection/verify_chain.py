"""Verifies chains of drafts that were sampled from a draft distribution, without loss: standard or block.

Computes:
    p_i, q_i: the distributions of target and draft after i drafts x_1 .. x_i, each at its temperature; gamma: the
    number of drafts.
    standard    The first draft that is not accepted is replaced by a token from the residual norm((p - q)+); after the
                last one comes a token from p.
    block       Block verification (Sun et al., arXiv 2403.10444, algorithm 2), which accepts the most drafts that
                a verifier of chains can, on average:
                    r_0 = 1, r_i = min(r_{i-1} p(x_i) / q(x_i), 1), S_i = sum of (r_i p_i - q_i)+,
                    h_i = S_i / (S_i + 1 - r_i) (1 for 0 / 0), h_gamma = r_gamma
                The drafts up to the last i whose coin is below h_i are accepted (whatever the coins before it); then
                comes a token from norm((r_i p_i - q_i)+), or from p_gamma.
    Coins and noise are those of primitives/random.py, with streams that drafting does not use. For "block", whose next
    round drafts again at positions that this one has looked at, coins are also keyed by the place in the chain.
Invariants: A draft of target probability 0 is never accepted (coin * q < p, strict). Where a draft cannot have been
    drawn from its row, or rounding leaves no residual, the next token is drawn from p. +inf counts as the largest
    finite number; a sampled row of nothing but -inf gives token 0. Results of a request do not depend on the batch
    around it.
Grid: map (parts of V,) inverts d2t; scan (rows of logits, slices) finds every row's maximum and sum; walk (B,)
    compares; for chains of T tokens mass (B * (T - 1), slices) sums S_i; draw (B, slices) finds the best key of each
    slice; finish (B,) writes.
Launches: 3: walk, draw and finish; one more each: scan for logits, mass for "block", map for d2t
Traffic: every row of logits once, for "block" the rows of p and q at drafts 2 .. gamma once more, and two rows for the
    draw.
"""

from __future__ import annotations

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.ordering import LOWEST_KEY
from ...primitives.random import Coins, token_words
from ...primitives.rows import Rows, in_units, load_row, row_probs
from ...primitives.tree_walk import Output, token_ids
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import bundle, launch, launcher
from .shared.block_verification import Scratch, block_chances, block_shares, launch_masses
from .shared.draws import accept_coin, drawn_token, keys_of_words, residual_key
from .shared.pair import Pair, PairRows, draft_probs, load_probs
from .shared.prepare_pair import SLICE_TUNING, check_pair, pair_arguments, scan_pair

# All statistics of one chain are merged in registers.
MAX_TOKENS = 256

# A program merges the slices of a chain's nodes, then one warp writes what was accepted.
WALK_TUNING = {"default": {"num_warps": 4}}
FINISH_TUNING = {"default": {"num_warps": 1}}


@triton.jit
def _load_coins(coins, seed, request, is_draft, NUM_TOKENS: tl.constexpr):
    """Returns the coins [draft] of a chain."""
    draft = tl.arange(0, next_power_of_2(NUM_TOKENS))
    position = tl.load(coins.positions + request * NUM_TOKENS + 1 + draft, mask=is_draft, other=0)
    return accept_coin(seed + tl.zeros(draft.shape, tl.int64), position, draft)


@triton.jit(do_not_specialize=["vocab_size", "draft_vocab_size", "stride_target", "stride_draft"])
def _verify_chain_walk_kernel(
    candidates_ptr, coins, target, draft, target_to_draft_ptr, scratch, vocab_size, draft_vocab_size, stride_target,
    stride_draft,
    TARGET_UNIT: tl.constexpr, DRAFT_UNIT: tl.constexpr, NUM_TOKENS: tl.constexpr, NUM_SLICES: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Finds the end of one chain, and the drafts accepted one by one or their shares."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    root = token_ids(tl.load(candidates_ptr + request * NUM_TOKENS))
    gamma = tl.zeros([], tl.int32)
    accepted = tl.zeros([], tl.int32)
    if NUM_TOKENS > 1:
        drafts = tl.arange(0, next_power_of_2(NUM_TOKENS))
        is_draft = drafts < NUM_TOKENS - 1
        place = request * NUM_TOKENS + 1 + drafts
        token = token_ids(tl.load(candidates_ptr + place, mask=is_draft, other=-1))
        coin = _load_coins(coins, tl.load(coins.seeds + request), request, is_draft, NUM_TOKENS)
        target_rows = Rows(target, in_units(stride_target, TARGET_UNIT), in_units(vocab_size, TARGET_UNIT), 0)
        draft_rows = Rows(draft, in_units(stride_draft, DRAFT_UNIT), in_units(draft_vocab_size, DRAFT_UNIT), 0)
        rows = PairRows(target_rows, draft_rows, target_to_draft_ptr, vocab_size)
        row = tl.minimum(drafts, NUM_TOKENS - 2)
        target_row = load_row(rows.target, request, request * NUM_TOKENS + row, NUM_SLICES, IS_VECTOR=True)
        draft_row = load_row(rows.draft, request, request * (NUM_TOKENS - 1) + row, NUM_SLICES, IS_VECTOR=True)
        is_token = is_draft & (token >= 0)
        target_prob, draft_prob = load_probs(rows, Pair(target_row, draft_row), token, is_token)
        is_drawn = draft_prob > 0.0
        gamma = tl.min(tl.where(is_drawn, NUM_TOKENS - 1, drafts))
        if scratch.shares is not None:
            shares = block_shares(target_prob, draft_prob, NUM_TOKENS)
            tl.store(scratch.shares + request * (NUM_TOKENS - 1) + drafts, shares, mask=is_draft)
        else:
            is_accepted = is_drawn & (coin * draft_prob < target_prob)
            accepted = tl.min(tl.where(is_accepted, NUM_TOKENS - 1, drafts))
    tl.store(scratch.ends + request * 2, tl.where(root >= 0, gamma, -1))
    tl.store(scratch.ends + request * 2 + 1, accepted)


@triton.jit(do_not_specialize=["vocab_size", "draft_vocab_size", "stride_target", "stride_draft"])
def _verify_chain_draw_kernel(
    coins, target, draft, target_to_draft_ptr, scratch, vocab_size, draft_vocab_size, stride_target, stride_draft,
    TARGET_UNIT: tl.constexpr, DRAFT_UNIT: tl.constexpr, NUM_TOKENS: tl.constexpr, NUM_SLICES: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Finds how many drafts of a chain are accepted, and draws from one slice, by the residual and by p."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    seed = tl.load(coins.seeds + request)
    gamma = tl.load(scratch.ends + request * 2)
    accepted = tl.load(scratch.ends + request * 2 + 1)
    share = tl.full([], 1.0, tl.float32)
    if scratch.shares is not None:
        if NUM_TOKENS > 1:
            drafts = tl.arange(0, next_power_of_2(NUM_TOKENS))
            coin = _load_coins(coins, seed, request, drafts < gamma, NUM_TOKENS)
            chance = block_chances(scratch, request, gamma, NUM_TOKENS, NUM_SLICES)
            accepted = tl.max(tl.where((drafts < gamma) & (coin < chance), drafts + 1, 0))
            if accepted > 0:
                share = tl.load(scratch.shares + request * (NUM_TOKENS - 1) + accepted - 1)
    accepted = tl.where(gamma >= 0, accepted, -1)
    if part == 0:
        tl.store(scratch.accepted + request, accepted)
    if accepted >= 0:
        ids = part * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
        target_rows = Rows(target, in_units(stride_target, TARGET_UNIT), in_units(vocab_size, TARGET_UNIT), 0)
        draft_rows = Rows(draft, in_units(stride_draft, DRAFT_UNIT), in_units(draft_vocab_size, DRAFT_UNIT), 0)
        rows = PairRows(target_rows, draft_rows, target_to_draft_ptr, vocab_size)
        row = request * NUM_TOKENS + accepted
        target_row = load_row(rows.target, request, row, NUM_SLICES)
        is_token = ids < target_row.size
        target_prob = row_probs(rows.target, target_row, ids, is_token)
        draft_prob = tl.zeros([BLOCK_VOCAB], tl.float32)
        if accepted < gamma:
            row -= request  # T - 1 a request
            draft_prob = draft_probs(
                rows, load_row(rows.draft, request, row, NUM_SLICES), ids, is_token, target_row.size
            )
        else:
            share = 1.0
        noise_key = residual_key(seed, tl.load(coins.positions + request * NUM_TOKENS + accepted).to(tl.int64) + 1)
        words = token_words(noise_key, ids)
        left = tl.maximum(share * target_prob - draft_prob, 0.0)
        keys_ptr = scratch.keys + request * 2 * NUM_SLICES + part
        tl.store(keys_ptr, tl.max(keys_of_words(left, ids, words)))
        tl.store(keys_ptr + NUM_SLICES, tl.max(keys_of_words(target_prob, ids, words)))


@triton.jit
def _verify_chain_finish_kernel(
    candidates_ptr, accepted_ptr, keys_ptr, out,
    NUM_TOKENS: tl.constexpr, NUM_SLICES: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Writes the outputs of one request."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    accepted = tl.load(accepted_ptr + request)
    slices = tl.arange(0, next_power_of_2(NUM_SLICES))
    is_key = (slices < NUM_SLICES) & (accepted >= 0)
    keys_ptr += request * 2 * NUM_SLICES
    residual = tl.max(tl.load(keys_ptr + slices, mask=is_key, other=LOWEST_KEY))
    plain = tl.max(tl.load(keys_ptr + NUM_SLICES + slices, mask=is_key, other=LOWEST_KEY))
    bonus = drawn_token(tl.where(residual == LOWEST_KEY, plain, residual))

    index = tl.arange(0, next_power_of_2(NUM_TOKENS))
    is_token = index < NUM_TOKENS
    place = request * NUM_TOKENS + index
    # every accepted draft is a token of a vocabulary, so int32 holds it
    draft = tl.load(candidates_ptr + place + 1, mask=index < accepted, other=-1).to(tl.int32)
    tl.store(out.predicts + place, tl.where(index == accepted, bonus, draft), mask=is_token)
    tl.store(out.accept_index + place, tl.where(index <= accepted, place, -1).to(tl.int32), mask=is_token)
    tl.store(out.accept_token_num + request, tl.maximum(accepted, 0))


def contract(values: dict) -> Output:
    args = check.Arguments("verify_chain", values)
    args.choice("method", ("standard", "block"))
    args.tensor("candidates", ("B", "T"), check.INTEGER)
    batch_size, num_tokens = args.size("B"), args.size("T")
    if not 1 <= num_tokens <= MAX_TOKENS:
        args.fail("candidates", f"hold the root and at most {MAX_TOKENS - 1} drafts", [batch_size, num_tokens])
    check_pair(args, batch_size * num_tokens, batch_size * (num_tokens - 1))
    predicts, path = (
        args.spec((batch_size * num_tokens,), torch.int32),
        args.spec((batch_size, num_tokens), torch.int32),
    )
    return Output(predicts, path, args.spec((batch_size,), torch.int32))


@launcher
def verify_chain(
    candidates: torch.Tensor,
    target_logits: torch.Tensor | None,
    draft_logits: torch.Tensor | None,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor | None,
    draft_temperature: torch.Tensor | None = None,
    target_probs: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    *,
    method: str = "standard",
    out: Output | None = None,
) -> Output:
    """Verifies chains of drafts that were sampled from a draft distribution, without loss.

    The text follows the target's distribution if every draft was drawn from its row of draft probabilities, with the
    noise of `sample_children` or any other that is independent of this op's, which is keyed by seed and position.
    Symbols: B requests, T tokens of a chain (1..256), its root included, V and Vd vocabularies of target and draft
    (1..2^20), p and q their distributions.

    Args:
        candidates: [B, T] int. The root, then drafts as target ids; -1 ends a chain early.
        target_logits: None or [B * T, V] fp32, fp16 or bf16. This or target_probs, as in `verify_tree_rejection`.
        draft_logits: None or [B * (T - 1), Vd] fp32, fp16 or bf16. This or draft_probs; candidates[b, i + 1] was drawn
            from row b * (T - 1) + i.
        positions: [B * T] int. Position of each token; the token emitted after it has position + 1.
        seeds: [B] int. Seed of each request.
        temperature: None or [B] fp32. Below 1e-5 a row is one-hot at its argmax. None if no logits need it.
        draft_temperature: None or [B] fp32. For draft_logits. None: temperature.
        target_probs: None or [B * T, V] fp32.
        draft_probs: None or [B * (T - 1), Vd] fp32.
        d2t: None or [Vd] int. As in `verify_tree_rejection`.
        method: "standard": drafts are accepted one by one, with probability min(1, p / q). "block": all at once, on
            average no fewer; a position must then have a different node in each round, see `sample_children`.
        out: three tensors to write into.

    Returns:
        A named tuple:
        predicts: [B * T] int32. The token emitted after the root and each accepted draft, -1 elsewhere.
        accept_index: [B, T] int32. b * T + i of the root and the accepted drafts, -1 padded.
        accept_token_num: [B] int32. Accepted drafts, without the token after them.

        A draft that cannot have been drawn (q is 0, NaN, negative or above 1.001, or it has no draft id) ends the chain
        before it. A dead row, whose root is no token, gives -1 and accept_token_num 0.

    Raises:
        ValueError, TypeError: an argument breaks a rule above. EAGLE_KERNELS_DEBUG=1 also checks temperatures; d2t and
            sums of probabilities are unchecked.

    Source:
        Standard: Leviathan et al., https://arxiv.org/abs/2211.17192, algorithm 1; Chen et al.,
        https://arxiv.org/abs/2302.01318. Block: Sun et al., https://arxiv.org/abs/2403.10444, algorithm 2. Coins and
        noise are eagle_kernels' own.

    Example:
        >>> p, q = torch.eye(4)[[1, 2, 0]], torch.eye(4)[[1, 3]]  # both are sure of 1; then q of 3, but p of 2
        >>> eagle_kernels.verify_chain(
        ...     torch.tensor([[0, 1, 3]]), None, None, torch.tensor([5, 6, 7]), torch.tensor([1]), None,
        ...     target_probs=p, draft_probs=q).predicts.tolist()
        [1, 2, -1]
    """
    values = locals()
    out = check.allocate("verify_chain", contract(values), out)
    device, (batch_size, num_tokens) = candidates.device, candidates.shape
    pair = pair_arguments("verify_chain", values)
    scan_pair("verify_chain", pair, num_tokens, num_tokens - 1, None)
    num_slices, is_block = pair["NUM_SLICES"], method == "block"

    def allocate(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((batch_size, *shape), dtype=dtype, device=device)

    scratch = Scratch(
        ends=allocate(torch.int32, 2), shares=allocate(torch.float32, num_tokens - 1) if is_block else None,
        masses=allocate(torch.float32, num_tokens - 1, num_slices) if is_block else None,
        accepted=allocate(torch.int32), keys=allocate(torch.int64, 2, num_slices),
    )  # fmt: skip
    tokens = {"candidates_ptr": candidates, "NUM_TOKENS": num_tokens}
    draw = pair | {"coins": bundle(Coins, values), "scratch": scratch, "NUM_TOKENS": num_tokens}
    walk = draw | tokens | tuning.row(WALK_TUNING, device)
    launch("verify_chain", _verify_chain_walk_kernel, (batch_size,), **walk)
    draw |= tuning.row(SLICE_TUNING, device)
    if is_block:
        launch_masses(draw)
    launch("verify_chain", _verify_chain_draw_kernel, (batch_size, num_slices), **draw)
    finish = tokens | {"accepted_ptr": scratch.accepted, "keys_ptr": scratch.keys, "out": out, "NUM_SLICES": num_slices}
    finish |= tuning.row(FINISH_TUNING, device)
    launch("verify_chain", _verify_chain_finish_kernel, (batch_size,), **finish)
    return out
