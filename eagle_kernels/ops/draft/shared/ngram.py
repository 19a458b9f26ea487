"""What looks for the last tokens of a text in the text itself, merges what followed into a trie, and cuts tries.

A match that ends at position e is one int64 key, larger is better, 0 is none:

    bit  62 ........ 32 31 ................ 0
         match length  | e, or ~e if the earliest is preferred

Keys of different ends differ, so the best keys do not depend on how a text is cut.
"""

from typing import Any, NamedTuple

import torch

from ....primitives.dependent_launch import await_predecessor
from ....runtime import tuning
from ....runtime.language import next_power_of_2, tl, triton
from ....runtime.launch import launch

# Each program reads the lengths of the batch, BLOCK_BATCH at a time: for the batches of servers in one read.
BUDGET_TUNING = {"default": {"BLOCK_BATCH": 256, "num_warps": 1}}


class Text(NamedTuple):
    """Pointers to what makes the texts of all requests, arguments of the op; None: not given."""

    token_ids: Any
    seq_lens: Any
    draft_tokens: Any


class History(NamedTuple):
    """A request's text: tokens of a row, then those of drafts that count as history."""

    row_ptr: Any
    drafts: Any  # pointer to those of all requests; None: no drafts
    first_draft: Any  # int64
    committed: Any  # tokens of the row, int32
    length: Any  # of both, int32; 0 for dead rows


@triton.jit
def history_lengths(text, request, width, NUM_GIVEN: tl.constexpr):
    """Returns (tokens of a request's row, tokens of its history), int32; its drafts end at the first negative one."""
    seq_len = tl.load(text.seq_lens + request).to(tl.int64)
    committed = tl.minimum(tl.maximum(seq_len, 0), width).to(tl.int32)
    length = committed
    if text.draft_tokens is not None:
        place = tl.arange(0, next_power_of_2(NUM_GIVEN))
        draft = tl.load(text.draft_tokens + request * NUM_GIVEN + place, mask=place < NUM_GIVEN, other=-1)
        num_given = tl.min(tl.where(draft < 0, place, NUM_GIVEN))
        length = tl.where(committed > 0, committed + num_given, 0)
    return committed, length


@triton.jit
def load_token(history, position):
    """Returns the token at one position up to the end of the text, int64; -1 before the text."""
    return load_tokens(history, position, position >= 0)


@triton.jit
def load_tokens(history, position, is_wanted):
    """Returns the tokens at several positions of the text, int64; -1 where none is wanted."""
    token = tl.load(history.row_ptr + position, mask=is_wanted & (position < history.committed), other=-1).to(tl.int64)
    if history.drafts is not None:
        place = position - history.committed
        draft = tl.load(history.drafts + history.first_draft + place, mask=is_wanted & (place >= 0), other=-1)
        token = tl.where(place >= 0, draft.to(tl.int64), token)
    return token


@triton.jit
def as_row_token(token, row_ptr):
    """Returns (a token int64 in the type of the rows, whether a row can hold it: not below 0 nor too large)."""
    own = token.to(row_ptr.dtype.element_ty)
    return own, (token >= 0) & (own == token)


@triton.jit
def smallest(values):
    """Returns the smallest of integers taken as unsigned: one instruction each, where booleans take many."""
    unsigned: tl.constexpr = tl.uint64 if values.dtype.primitive_bitwidth == 64 else tl.uint32
    return tl.min(values.to(unsigned, bitcast=True))


@triton.jit
def add_difference(difference, history, position, shift):
    """Returns difference [N], now also not 0 where the token `shift` places before is not the text's own one."""
    wanted, is_wanted = as_row_token(load_token(history, history.length - 1 - shift), history.row_ptr)
    may_end = (difference == 0) & (position >= shift) & is_wanted
    wanted = tl.where(is_wanted, wanted, 0)
    return difference | (tl.load(history.row_ptr + position - shift, mask=may_end, other=-1) ^ wanted)


@triton.jit
def zeros_as_bits(values, VECTOR: tl.constexpr):
    """Returns which values [N] are 0, as words of at most 16 bits. Bit i VECTOR + j of word k is that of the value at
    (i words + k) VECTOR + j, so that what a thread has loaded, VECTOR values at once, stays with it."""
    NUM_VALUES: tl.constexpr = values.shape[0]
    WANTED_WORDS: tl.constexpr = NUM_VALUES // 16 if NUM_VALUES > 512 else 32
    MOST_WORDS: tl.constexpr = NUM_VALUES // VECTOR
    NUM_WORDS: tl.constexpr = WANTED_WORDS if WANTED_WORDS < MOST_WORDS else MOST_WORDS
    NUM_VECTORS: tl.constexpr = NUM_VALUES // (NUM_WORDS * VECTOR)
    values = tl.reshape(values, (NUM_VECTORS, NUM_WORDS, VECTOR))
    bit = tl.arange(0, NUM_VECTORS)[:, None, None] * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    return tl.sum(tl.sum(tl.where(values == 0, 1 << bit, 0), axis=2), axis=0)


@triton.jit
def take_first(words, VECTOR: tl.constexpr, IS_LATEST: tl.constexpr):
    """Returns (the place of the latest or the earliest value whose bit is set, -1 for none; the words without it)."""
    NUM_WORDS: tl.constexpr = words.shape[0]
    bits = words
    if not IS_LATEST:
        bits = words & -words
    # a float's exponent is the highest bit
    bit = tl.maximum((bits.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, 0)
    place = (bit // VECTOR * NUM_WORDS + tl.arange(0, NUM_WORDS)) * VECTOR + bit % VECTOR
    if IS_LATEST:
        first = tl.max(tl.where(words != 0, place, -1))
    else:
        NOWHERE: tl.constexpr = 0x7FFFFFFF
        first = tl.min(tl.where(words != 0, place, NOWHERE))
        first = tl.where(first == NOWHERE, -1, first)
    return first, tl.where(place == first, words & ~(1 << bit), words)


@triton.jit
def match_lengths(history, position, is_match, max_ngram_size):
    """Returns how many tokens that end at each position [n] match the text's last ones, at most max_ngram_size, int32.
    is_match: whether the last token, which is not negative, is at the position, before its own place."""
    length = is_match.to(tl.int32)
    shift = 1
    while (shift < max_ngram_size) & (tl.max(is_match.to(tl.int32)) > 0):
        wanted = load_token(history, history.length - 1 - shift)
        is_match = is_match & (position >= shift) & (wanted >= 0)
        token = load_tokens(history, position - shift, is_match)
        is_match = is_match & (token == wanted)
        length += is_match.to(tl.int32)
        shift += 1
    return length


@triton.jit
def match_length(history, end, max_ngram_size, BLOCK_NGRAM: tl.constexpr):
    """Returns the same for one position, int32, all tokens at once: 0 if it is not before the text's last place."""
    shift = tl.arange(0, BLOCK_NGRAM)
    last = history.length - 1
    is_inside = (shift < max_ngram_size) & (end >= shift) & (end < last)
    token = load_tokens(history, end - shift, is_inside)
    is_same = is_inside & (token >= 0) & (token == load_tokens(history, last - shift, is_inside))
    return tl.min(tl.where(is_same, BLOCK_NGRAM, shift))


@triton.jit
def end_keys(history, position, length, min_ngram_size, IS_LATEST: tl.constexpr):
    """Returns the keys of matches of these lengths that end at these positions, or of one; 0 if it does not count."""
    counts = length >= min_ngram_size
    counts = counts & (load_tokens(history, position + 1, counts) >= 0)
    order = position
    if not IS_LATEST:
        order = 0x7FFFFFFF - position
    return tl.where(counts, (length.to(tl.int64) << 32) | order.to(tl.int64), 0)


@triton.jit
def _key_end(key, IS_LATEST: tl.constexpr):
    """Returns the positions int32 that keys were made of."""
    order = (key & 0x7FFFFFFF).to(tl.int32)
    if not IS_LATEST:
        order = 0x7FFFFFFF - order
    return order


@triton.jit
def keep_if_better(kept, key):
    """Returns kept [BLOCK_MATCH] with a key in the place of its worst one, if it is better."""
    BLOCK_MATCH: tl.constexpr = kept.shape[0]
    slot = tl.arange(0, BLOCK_MATCH)
    worst = tl.min(kept)
    place = tl.min(tl.where(kept == worst, slot, BLOCK_MATCH))
    return tl.where((slot == place) & (key > worst), key, kept)


@triton.jit
def keep_best(kept, key, MAX_MATCHES: tl.constexpr):
    """Returns the best keys of both, in no order: kept [BLOCK_MATCH], where slots not to be used hold huge ones."""
    best = tl.max(key)
    num_taken = 0
    while (num_taken < MAX_MATCHES) & (best > tl.min(kept)):
        kept = keep_if_better(kept, best)
        key = tl.where(key == best, 0, key)
        best = tl.max(key)
        num_taken += 1
    return kept


@triton.jit
def merge_paths(
    history, key, spec_steps, limit, tokens_ptr, parents_ptr, IS_LATEST: tl.constexpr, BLOCK_NODE: tl.constexpr
):  # fmt: skip
    """Writes tokens and parents of the trie of what follows the matches `key` [BLOCK_MATCH], its first `limit` nodes.
    Returns (how many nodes, length of the best match), int32. A path shares with the earlier paths the longest
    beginning that it has in common with one of them; its other nodes are new and numbered in a row. So a whole path is
    merged at once, from its tokens, that length, and the places of the nodes of earlier paths."""
    BLOCK_MATCH: tl.constexpr = key.shape[0]
    slot = tl.arange(0, BLOCK_MATCH)
    step = tl.arange(0, BLOCK_NODE)
    # best first; keys of no match, 0, come last
    rank = tl.sum((key[None, :] > key[:, None]).to(tl.int32), axis=1)
    key = tl.sum(tl.where(rank[:, None] == slot[None, :], key[:, None], 0), axis=0)
    is_found = key > 0
    first = tl.where(is_found, _key_end(key, IS_LATEST) + 1, 0)
    period = tl.where(is_found, history.length - first, 1)
    in_path = step < spec_steps
    # [match, step]
    place = first[:, None] + step[None, :] % period[:, None]
    paths = load_tokens(history, place, is_found[:, None] & in_path[None, :])

    num_found = tl.sum(is_found.to(tl.int32))
    num_shared = tl.zeros([BLOCK_MATCH], tl.int32)
    num_before = tl.zeros([BLOCK_MATCH], tl.int32)
    count = 0
    index = 0
    while (index < num_found) & (count < limit):
        own_first = tl.sum(tl.where(slot == index, first, 0))
        path = load_tokens(history, own_first + step % (history.length - own_first), in_path)
        path_length = tl.min(tl.where(path < 0, step, BLOCK_NODE))
        # with each of the earlier paths
        differs = (paths != path[None, :]) | (step >= path_length)[None, :]
        in_common = tl.min(tl.where(differs, step[None, :], BLOCK_NODE), axis=1)
        in_common = tl.where(slot < index, in_common, 0)
        shared = tl.max(in_common)
        # the first path that shares as much has made the node where this one leaves
        maker = tl.min(tl.where(in_common == shared, slot, BLOCK_MATCH))
        branching = tl.sum(tl.where(slot == maker, num_before + shared - num_shared, 0))
        node = count + 1 + step - shared
        parent = tl.where(step == shared, tl.where(shared > 0, branching, 0), node - 1)
        is_new = (step >= shared) & (step < path_length) & (node <= limit)
        tl.store(tokens_ptr + node - 1, path, mask=is_new)
        tl.store(parents_ptr + node - 1, parent.to(tl.int64), mask=is_new)
        num_shared = tl.where(slot == index, shared, num_shared)
        num_before = tl.where(slot == index, count, num_before)
        count += path_length - shared
        index += 1
    return tl.minimum(count, limit), (tl.max(key) >> 32).to(tl.int32)


@triton.jit
def erase_drafts(out, request, first, last, NUM_DRAFTS: tl.constexpr):
    """Writes -1 as the drafts first .. last - 1 of a request's NUM_DRAFTS."""
    place = tl.arange(0, next_power_of_2(NUM_DRAFTS))
    is_erased = (place >= first) & (place < last)
    nothing = tl.full(place.shape, -1, tl.int64)
    tl.store(out.tokens + request * NUM_DRAFTS + place, nothing, mask=is_erased)
    tl.store(out.parents + request * NUM_DRAFTS + place, nothing, mask=is_erased)


@triton.jit(do_not_specialize=["batch_size", "token_budget"])
def _ngram_match_budget_kernel(
    seq_lens_ptr, wanted_ptr, out,
    batch_size, token_budget,
    NUM_DRAFTS: tl.constexpr, BLOCK_BATCH: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Cuts one row's trie to what the budget leaves it."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    num_live = tl.zeros([BLOCK_BATCH], tl.int64)
    before = tl.zeros([BLOCK_BATCH], tl.int64)
    for start in range(0, batch_size, BLOCK_BATCH):
        other = start + tl.arange(0, BLOCK_BATCH)
        num_live += (tl.load(seq_lens_ptr + other, mask=other < batch_size, other=0) > 0).to(tl.int64)
        before += tl.load(wanted_ptr + other, mask=other < request, other=0).to(tl.int64)
    room = tl.maximum(tl.maximum(token_budget - tl.sum(num_live), 0) - tl.sum(before), 0)
    wanted = tl.load(wanted_ptr + request)
    granted = tl.minimum(wanted.to(tl.int64), room).to(tl.int32)
    tl.store(out.num_drafts + request, granted)
    erase_drafts(out, request, granted, wanted, NUM_DRAFTS)


def cut_to_budget(op: str, seq_lens: torch.Tensor, wanted: torch.Tensor, out: NamedTuple, token_budget: int) -> None:
    """Cuts the tries out.tokens, out.parents [B, M] of wanted [B] drafts each; writes out.num_drafts, what is left.
    token_budget: the most tokens that the batch verifies, the root of every live row counted."""
    batch_size, most_drafts = out.tokens.shape
    launch(
        op, _ngram_match_budget_kernel, (batch_size,),
        seq_lens_ptr=seq_lens, wanted_ptr=wanted, out=out, batch_size=batch_size, token_budget=token_budget,
        NUM_DRAFTS=most_drafts, **tuning.row(BUDGET_TUNING, wanted.device),
    )  # fmt: skip
