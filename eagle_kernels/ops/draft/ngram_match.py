"""Looks up what followed the last tokens earlier in a request's own text: drafts without a model.

Computes: h is the history: token_ids[b, :seq_len], then draft_tokens[b] up to the first negative one. The match length
    of an end position e < len(h) - 1 is the largest n <= max_ngram_size with h[e - n + 1 .. e] = the last n tokens,
    none of them negative; e is a match if that is at least min_ngram_size and h[e + 1] is not negative. The first
    max_matches of these are taken, by descending match length, equal ones by position as `prefer` says. Each continues
    with h[e + 1], h[e + 2], ... up to a negative token, past the end of h with the continuation itself from its
    beginning on, again and again (as LZ77 copies). The trie's nodes are numbered as they are made. token_budget: row i
    has the first min(want_i, max(0, budget - live rows - sum of want_j, j < i)) drafts of its trie.
Invariants: Tokens past seq_len and past a row's drafts do not matter. Parents precede their children, siblings differ.
    The result does not depend on the width of token_ids, on how a row is cut into parts, or, without a token_budget, on
    other rows.
Grid: (B, parts), one program scans one part of a row's history, in blocks; (B,), one program merges the matches of a
    row's parts and makes the trie; with token_budget (B,), one program cuts one trie.
Launches: 2 (3 with token_budget)
Traffic: element size * sum of seq_lens read, 16 B M + 8 B written, for M = num_speculative_tokens; 8 B * parts *
    max_matches written and read. Rows whose last token is frequent read some of it again, out of the cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher
from .shared.ngram import (
    History,
    Text,
    add_difference,
    as_row_token,
    cut_to_budget,
    end_keys,
    erase_drafts,
    history_lengths,
    keep_best,
    keep_if_better,
    load_token,
    load_tokens,
    match_length,
    match_lengths,
    merge_paths,
    smallest,
    take_first,
    zeros_as_bits,
)


class Output(NamedTuple):
    """What `ngram_match` returns."""

    tokens: torch.Tensor
    parents: torch.Tensor
    num_drafts: torch.Tensor
    match_len: torch.Tensor


MAX_DRAFTS = 255
MAX_NGRAM = 32
MAX_MATCHES = 16

# bench/results/NVIDIA_H100_80GB_HBM3/tuning/ngram_match.txt. A program of one warp waits for no other warp.
# BLOCK_TOKEN: a whole number of 16-byte loads of all lanes; a match is searched in that many tokens at once, so trees,
# which look for many matches, want few. programs: about how many scan; more parts than max_parts would only cost the
# merging program.
SCAN_TUNING = {
    "default": {"BLOCK_TOKEN": 1024, "programs": 4096, "max_parts": 256, "num_warps": 1},
    "sm_90": {"BLOCK_TOKEN": 512, "programs": 8192, "max_parts": 256, "num_warps": 1},
}
# One program merges what the programs of a request found, BLOCK_KEY keys at a time.
MERGE_TUNING = {"default": {"BLOCK_KEY": 256, "num_warps": 2}}


@triton.jit(do_not_specialize=["stride_token_ids_request", "width", "min_ngram_size", "max_ngram_size"])
def _ngram_match_scan_kernel(
    text, keys_ptr,
    stride_token_ids_request, width, min_ngram_size, max_ngram_size,
    NUM_GIVEN: tl.constexpr, MAX_MATCHES: tl.constexpr, IS_LATEST: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_TOKEN: tl.constexpr, BLOCK_NGRAM: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Finds the best matches that end in one part of one row, except in its last few tokens, which fill no vector."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    num_parts = tl.num_programs(1)
    row_ptr = text.token_ids + tl.multiple_of(request * stride_token_ids_request, VECTOR)
    committed, length = history_lengths(text, request, width, NUM_GIVEN)
    history = History(row_ptr, text.draft_tokens, request * NUM_GIVEN, committed, length)
    # whole vectors: the compiler sees that the bound is a multiple of them, and loads vectors
    num_vectors = committed // VECTOR
    num_blocks = tl.cdiv(num_vectors * VECTOR, BLOCK_TOKEN)
    blocks_of_part = tl.cdiv(num_blocks, num_parts)
    first_block = part * blocks_of_part
    last_block = tl.minimum(first_block + blocks_of_part, num_blocks)

    last, is_last = as_row_token(load_token(history, length - 1), row_ptr)
    last_block = tl.where(is_last, last_block, first_block)
    slot = tl.arange(0, next_power_of_2(MAX_MATCHES))
    kept = tl.where(slot < MAX_MATCHES, 0, 2**62).to(tl.int64)
    # only longer matches are of use from now on: blocks come in the order of preference
    worst_size = min_ngram_size - 1
    done = 0
    while (first_block + done < last_block) & (worst_size < max_ngram_size):
        block = first_block + done
        if IS_LATEST:
            block = last_block - 1 - done
        position = block * BLOCK_TOKEN + tl.arange(0, BLOCK_TOKEN)
        token = tl.load(row_ptr + position, mask=position < num_vectors * VECTOR, other=-1)
        # 0 where a match may end; most blocks have no such place if the token is rare
        difference = token ^ last
        if smallest(difference) == 0:
            difference = tl.where(position < length - 1, difference, -1)
            if worst_size > 0:  # only where a match may be longer
                difference = add_difference(difference, history, position, worst_size)
            place, ends = take_first(zeros_as_bits(difference, VECTOR), VECTOR, IS_LATEST)
            while (place >= 0) & (worst_size < max_ngram_size):
                end = block * BLOCK_TOKEN + place
                size = match_length(history, end, max_ngram_size, BLOCK_NGRAM)
                key = end_keys(history, end, size, min_ngram_size, IS_LATEST)
                if (size >= min_ngram_size) & (key == 0):
                    # nothing follows this match, and perhaps others
                    may_end = (difference == 0) & (position + 1 < committed)
                    following = tl.load(row_ptr + position + 1, mask=may_end, other=0)
                    difference = tl.where(following < 0, -1, difference)
                    ends &= zeros_as_bits(difference, VECTOR)
                if size <= worst_size:  # exclude all that differ where this one does
                    difference = add_difference(difference, history, position, size)
                    ends &= zeros_as_bits(difference, VECTOR)
                kept = keep_if_better(kept, key)
                worst_size = tl.maximum((tl.min(kept) >> 32).to(tl.int32), worst_size)
                place, ends = take_first(ends, VECTOR, IS_LATEST)
        done += 1
    tl.store(keys_ptr + (request * num_parts + part) * MAX_MATCHES + slot, kept, mask=slot < MAX_MATCHES)


@triton.jit(do_not_specialize=["stride_token_ids_request", "width", "num_parts", "vector", "min_ngram_size",
                               "max_ngram_size", "spec_steps"])  # fmt: skip
def _ngram_match_merge_kernel(
    text, max_drafts_ptr, keys_ptr, out,
    stride_token_ids_request, width, num_parts, vector, min_ngram_size, max_ngram_size, spec_steps,
    NUM_DRAFTS: tl.constexpr, NUM_GIVEN: tl.constexpr, MAX_MATCHES: tl.constexpr, IS_LATEST: tl.constexpr,
    BLOCK_KEY: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Picks a row's matches among those of its parts and those that end in its last few tokens; makes the trie."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    row_ptr = text.token_ids + request * stride_token_ids_request
    committed, length = history_lengths(text, request, width, NUM_GIVEN)
    history = History(row_ptr, text.draft_tokens, request * NUM_GIVEN, committed, length)
    slot = tl.arange(0, next_power_of_2(MAX_MATCHES))
    kept = tl.where(slot < MAX_MATCHES, 0, 2**62).to(tl.int64)
    first_key_ptr = keys_ptr + request * num_parts * MAX_MATCHES
    for start in range(0, num_parts * MAX_MATCHES, BLOCK_KEY):
        index = start + tl.arange(0, BLOCK_KEY)
        key = tl.load(first_key_ptr + index, mask=index < num_parts * MAX_MATCHES, other=0)
        kept = keep_best(kept, key, MAX_MATCHES)
    # the tokens that fill no vector, and the given drafts after them
    tail = committed // vector * vector + tl.arange(0, next_power_of_2(NUM_GIVEN + 4))
    last_token = load_token(history, length - 1)
    is_match = (tail < length - 1) & (last_token >= 0)
    is_match = is_match & (load_tokens(history, tail, is_match) == last_token)
    size = match_lengths(history, tail, is_match, max_ngram_size)
    key = end_keys(history, tail, size, min_ngram_size, IS_LATEST)
    kept = keep_best(kept, key, MAX_MATCHES)

    limit = tl.full([], NUM_DRAFTS, tl.int64)
    if max_drafts_ptr is not None:
        limit = tl.minimum(tl.maximum(tl.load(max_drafts_ptr + request).to(tl.int64), 0), limit)
    first = request * NUM_DRAFTS
    count, longest = merge_paths(
        history, tl.where(slot < MAX_MATCHES, kept, 0), spec_steps, limit.to(tl.int32), out.tokens + first,
        out.parents + first, IS_LATEST, BLOCK_NODE=next_power_of_2(NUM_DRAFTS),
    )  # fmt: skip
    erase_drafts(out, request, count, NUM_DRAFTS, NUM_DRAFTS)
    tl.store(out.num_drafts + request, count)
    tl.store(out.match_len + request, longest)


def contract(values: dict) -> Output:
    args = check.Arguments("ngram_match", values)
    num_drafts = args.integer("num_speculative_tokens", 1, MAX_DRAFTS)
    if values["spec_steps"] is not None:
        args.integer("spec_steps", 1)
    longest = args.integer("max_ngram_size", 1, MAX_NGRAM)
    args.integer("min_ngram_size", 1, longest)
    args.integer("max_matches", 1, MAX_MATCHES)
    args.choice("prefer", ("latest", "earliest"))
    if values["token_budget"] is not None:
        args.integer("token_budget", 0, math.inf)
    width = args.tensor("token_ids", ("B", "L"), check.INTEGER, contiguous=1).shape[1]
    if width >= 2**30:
        args.fail("token_ids", "have L below 2^30", width)
    args.tensor("seq_lens", ("B",), check.INTEGER)
    drafts = args.tensor("draft_tokens", ("B", "D"), check.INTEGER, optional=True)
    if drafts is not None and drafts.shape[1] > MAX_DRAFTS:
        args.fail("draft_tokens", f"have D in 0..{MAX_DRAFTS}", drafts.shape[1])
    args.tensor("max_drafts", ("B",), check.INTEGER, optional=True)
    node, row = (args.size("B"), num_drafts), (args.size("B"),)
    node, row = args.spec(node, torch.int64), args.spec(row, torch.int32)
    return Output(node, node, row, row)


@launcher
def ngram_match(
    token_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    draft_tokens: torch.Tensor | None = None,
    max_drafts: torch.Tensor | None = None,
    *,
    num_speculative_tokens: int,
    spec_steps: int | None = None,
    max_ngram_size: int,
    min_ngram_size: int = 1,
    max_matches: int = 1,
    prefer: str = "latest",
    token_budget: int | None = None,
    out: Output | None = None,
) -> Output:
    """Drafts what followed earlier occurrences of a request's last tokens in its own text.

    A match is an earlier place of the last n tokens of a request's history: `token_ids`, then `draft_tokens`. Longer
    matches come first. The spec_steps tokens after each, repeated from their start where the history ends, are merged
    into a trie below the last token, the root.

    Args:
        token_ids: [B, L] int, L < 2^30. Prompt and output; negative tokens match nothing. Rows may be strided.
        seq_lens: [B] int. Tokens of each request, limited to L; 0 or less is a dead row.
        draft_tokens: None or [B, D] int, D <= 255. Drafts that count as history, -1 padded.
        max_drafts: None or [B] int. The most drafts of each request; 0 or less is none.
        num_speculative_tokens: M, the most drafts of any request, 1..255.
        spec_steps: the most drafts of a path, at least 1. None: M.
        max_ngram_size: the largest n, 1..32.
        min_ngram_size: the smallest n, 1..max_ngram_size.
        max_matches: 1 drafts a chain; more, up to 16, a tree.
        prefer: "latest" or "earliest", the first of equally long matches.
        token_budget: the most tokens that the batch verifies, roots of live rows included, `draft_tokens` not. Rows
            take theirs in order. None: no limit.
        out: four tensors to write into.

    Returns:
        A named tuple:
        tokens: [B, M] int64. Tokens of nodes 1..M of the trie, -1 padded. Siblings differ.
        parents: [B, M] int64. Their parents, 0 for the root; -1 padded.
        num_drafts: [B] int32. Drafts of each request.
        match_len: [B] int32. Length n of the first match, 0 for none, even if no drafts are kept.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Source:
        Prompt lookup. Among the longest matches, "earliest" picks the one that transformers'
        PromptLookupCandidateGenerator does, "latest" that of vLLM's GPU n-gram speculator. draft_tokens and
        token_budget are as in FastDeploy. The rest is eagle_kernels' own.

    Example:
        >>> drafts = eagle_kernels.ngram_match(
        ...     torch.tensor([[1, 2, 3, 4, 1, 2]]), torch.tensor([6]), num_speculative_tokens=5, max_ngram_size=3)
        >>> drafts.tokens.tolist()  # the text began with 1 2 as well
        [[3, 4, 1, 2, 3]]
    """
    out = check.allocate("ngram_match", contract(locals()), out)
    (batch_size, width), device = token_ids.shape, token_ids.device
    scan, merge = tuning.row(SCAN_TUNING, device), tuning.row(MERGE_TUNING, device)
    num_parts = _num_parts(batch_size, width, scan)
    vector = 16 // token_ids.element_size()
    if token_ids.data_ptr() % 16 or token_ids.stride(0) % vector:
        vector = 1
    wanted = out
    if token_budget is not None:
        wanted = out._replace(num_drafts=torch.empty(batch_size, dtype=torch.int32, device=device))
    shared = {
        "text": Text(token_ids, seq_lens, draft_tokens),
        "keys_ptr": torch.empty((batch_size, num_parts, max_matches), dtype=torch.int64, device=device),
        "stride_token_ids_request": token_ids.stride(0), "width": width,
        "min_ngram_size": min_ngram_size, "max_ngram_size": max_ngram_size,
        "NUM_GIVEN": 0 if draft_tokens is None else draft_tokens.shape[1],
        "MAX_MATCHES": max_matches, "IS_LATEST": prefer == "latest",
    }  # fmt: skip
    launch(
        "ngram_match", _ngram_match_scan_kernel, (batch_size, num_parts),
        **shared,
        VECTOR=vector, BLOCK_TOKEN=scan["BLOCK_TOKEN"], BLOCK_NGRAM=next_power_of_2(max_ngram_size),
        num_warps=scan["num_warps"],
    )  # fmt: skip
    launch(
        "ngram_match", _ngram_match_merge_kernel, (batch_size,),
        **shared, max_drafts_ptr=max_drafts, out=wanted, num_parts=num_parts, vector=vector,
        spec_steps=num_speculative_tokens if spec_steps is None else min(spec_steps, num_speculative_tokens),
        NUM_DRAFTS=num_speculative_tokens, **merge,
    )  # fmt: skip
    if token_budget is not None:
        cut_to_budget("ngram_match", seq_lens, wanted.num_drafts, out, token_budget)
    return out


def _num_parts(batch_size: int, width: int, scan: dict) -> int:
    """Returns the parts that each row is cut into: enough programs for a GPU, each with a block of a full row."""
    wanted = math.ceil(scan["programs"] / max(batch_size, 1))
    return max(1, min(wanted, scan["max_parts"], math.ceil(width / scan["BLOCK_TOKEN"])))
