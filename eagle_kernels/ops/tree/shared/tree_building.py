"""Device functions that build a token tree: parents of kept candidates, links, ancestor sets, masks.

A tree is one vector over its nodes, so all nodes are handled at once: parents and links by comparing all nodes with
all nodes (tiles that are reduced along their first axis, which keeps the result in the layout of the vectors), ancestor
sets by pointer doubling on packed words.
"""

from typing import Any, NamedTuple

from ....primitives.tree import ancestor_word, way_up
from ....runtime.language import tl, triton
from .tree_mask import row_starts


class Candidates(NamedTuple):
    """The candidates that a request keeps, with what determines their parents and the root."""

    ids: Any  # [node] int64, the root's has no meaning
    tokens: Any  # [node] int64
    verified_id: Any  # pointer, as is
    parent_list: Any
    parent_width: Any


@triton.jit
def store_tree(
    request, candidates, mask, out,
    TOPK: tl.constexpr, NUM_NODES: tl.constexpr, MASK_MODE: tl.constexpr, MAX_HOPS: tl.constexpr = 0,
):  # fmt: skip
    """Writes all that `build_tree` returns for one request to its outputs `out`, of which `mask` is one."""
    node = tl.arange(0, candidates.ids.shape[0])
    is_node = node < NUM_NODES
    offset = request * NUM_NODES + node
    # first the loads and stores that wait for nothing, so that they run while the parents are found
    seq_len = tl.load(mask.seq_lens + request).to(tl.int64)
    root_token = tl.load(candidates.verified_id + request).to(tl.int64)
    parent = _find_parents(request, candidates, MAX_HOPS > 0, TOPK, NUM_NODES)
    tl.store(out.draft_tokens + offset, tl.where(node == 0, root_token, candidates.tokens), mask=is_node)
    tl.store(out.retrieve_index + offset, offset, mask=is_node)
    store_links(request, parent, seq_len, mask, out, NUM_NODES, MASK_MODE, KEEP_LOOSE=True, MAX_HOPS=MAX_HOPS)


@triton.jit
def store_links(
    request, parent, seq_len, mask, out,
    NUM_NODES: tl.constexpr, MASK_MODE: tl.constexpr, KEEP_LOOSE: tl.constexpr, MAX_HOPS: tl.constexpr = 0,
):  # fmt: skip
    """Writes links, mask and positions of one request from its parents int32 [node], each an earlier node or -1.
    KEEP_LOOSE: nodes that no path joins to the root still see it, and are linked among themselves; otherwise they see
    themselves alone and are linked to nothing. Returns which nodes a path joins to the root.
    MAX_HOPS, with KEEP_LOOSE: parents may be any nodes, and a way up has at most that many steps, which a depth counts,
    the last one to a missing parent too."""
    BLOCK_NODE: tl.constexpr = parent.shape[0]
    node = tl.arange(0, BLOCK_NODE)
    is_node = node < NUM_NODES
    offset = request * NUM_NODES + node
    # links: the first child is the smallest node with this parent, the next sibling the next one up
    family = tl.where(parent >= 0, parent, -1 - node)  # without a parent, alone
    is_child = family[:, None] == node[None, :]
    first_child = tl.min(tl.where(is_child, node[:, None], BLOCK_NODE), axis=0)
    is_later_sibling = (family[:, None] == family[None, :]) & (node[:, None] > node[None, :])
    next_sibling = tl.min(tl.where(is_later_sibling, node[:, None], BLOCK_NODE), axis=0)
    first_child = tl.where(first_child < BLOCK_NODE, first_child, -1)
    next_sibling = tl.where(next_sibling < BLOCK_NODE, next_sibling, -1)
    if KEEP_LOOSE:
        tl.store(out.retrieve_next_token + offset, first_child.to(tl.int64), mask=is_node)
        tl.store(out.retrieve_next_sibling + offset, next_sibling.to(tl.int64), mask=is_node)

    mask_row = row_starts(mask.seq_lens, request, node, NUM_NODES, NUM_NODES, MASK_MODE)
    depth = tl.full([BLOCK_NODE], -1, tl.int32)
    is_linked = node == 0
    for word in tl.static_range((NUM_NODES + 63) // 64):
        bit = node - word * 64
        own = tl.where((bit >= 0) & (bit < 64), tl.full([BLOCK_NODE], 1, tl.int64) << (bit & 63), 0)
        if MAX_HOPS > 0:
            ancestors, depth = way_up(parent, word, MAX_HOPS)
        else:
            ancestors = ancestor_word(own, parent, NUM_NODES)
            if word == 0:
                is_linked = (ancestors & 1) != 0
            if not KEEP_LOOSE:
                ancestors = tl.where(is_linked, ancestors, own)
            depth += _count_bits(ancestors)
        if KEEP_LOOSE and word == 0:
            ancestors |= 1
        if (MASK_MODE == "packed") or (MASK_MODE == "qlen_only_bitpacking"):
            value = ancestors.to(mask.mask.dtype.element_ty)
            tl.store(mask.mask + mask_row + word, value, mask=is_node)
        else:
            column = tl.arange(0, 64)
            cell = mask_row[:, None] + word * 64 + column[None, :]
            visible = ((ancestors[:, None] >> column[None, :]) & 1) != 0
            in_bounds = is_node[:, None] & (word * 64 + column < NUM_NODES)[None, :]
            if MASK_MODE == "full_mask":  # lengths that do not fit the mask must not lead out of it
                in_bounds = in_bounds & (cell >= 0) & (cell < mask.size)
            tl.store(mask.mask + cell, visible, mask=in_bounds)
    tl.store(out.positions + offset, seq_len + depth, mask=is_node)
    if not KEEP_LOOSE:
        # only here, and from the links of all nodes: compilers would move what follows from paths to where all nodes
        # are compared, and follow the paths there many times. A linked node's children and siblings are linked too
        first_child = tl.where(is_linked, first_child, -1)
        next_sibling = tl.where(is_linked, next_sibling, -1)
        tl.store(out.retrieve_next_token + offset, first_child.to(tl.int64), mask=is_node)
        tl.store(out.retrieve_next_sibling + offset, next_sibling.to(tl.int64), mask=is_node)
    return is_linked


@triton.jit
def _find_parents(
    request, candidates, ANY_ORDER: tl.constexpr, TOPK: tl.constexpr, NUM_NODES: tl.constexpr
):  # fmt: skip
    """Returns parents [node]: slot -> the parent's candidate id -> the first node with it, -1 if there is none.
    Without ANY_ORDER the parent must be an earlier node."""
    row_ptr = candidates.parent_list + request * candidates.parent_width
    candidate = candidates.ids
    BLOCK_NODE: tl.constexpr = candidate.shape[0]
    node = tl.arange(0, BLOCK_NODE)
    is_draft = (node > 0) & (node < NUM_NODES)
    # ids in 32 bits: comparisons of all nodes with all nodes are half as wide
    candidate = tl.where(is_draft & (candidate >= 0) & (candidate < 2147483647), candidate, -1).to(tl.int32)
    slot = candidate // TOPK
    has_slot = (candidate >= 0) & (slot < candidates.parent_width)
    parent_candidate = tl.load(row_ptr + slot, mask=has_slot & (slot > 0), other=-1).to(tl.int64)
    is_id = (parent_candidate >= 0) & (parent_candidate < 2147483647)
    parent_candidate = tl.where(is_id, parent_candidate, -2).to(tl.int32)
    holds = candidate[:, None] == parent_candidate[None, :]
    first_holder = tl.min(tl.where(holds, node[:, None], BLOCK_NODE), axis=0)
    parent = tl.where(has_slot & (slot == 0), 0, first_holder)
    return tl.where(parent < (BLOCK_NODE if ANY_ORDER else node), parent, -1)


@triton.jit
def _count_bits(words):
    """Counts the set bits of int64 words, int32: sums of neighbours in pairs, fours, and bytes."""
    words -= (words >> 1) & 0x5555555555555555
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((words * 0x0101010101010101) >> 56).to(tl.int32)
