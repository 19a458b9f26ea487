"""The layouts of a tree mask, and functions that read and write rows of any of them.

A row says which of the Nk draft keys one of the Nq query rows sees. Keys come in words of 64, whatever the layout.
"""

from enum import Enum
from typing import Any, NamedTuple

import torch

from ....primitives.dependent_launch import await_predecessor
from ....runtime import check, tuning
from ....runtime.language import tl, triton
from ....runtime.launch import launch


class TreeMaskMode(str, Enum):
    """Names the layouts of a tree mask, which says what each node sees; plain strings work as well.

    In `out` a "full_mask" may be longer than needed, and the rest is not written; without `out`, seq_lens_sum gives its
    size. If the size contradicts seq_lens, the mask holds what fits.

    Ops that read a mask take uint8 for bool (every value but 0 is set), a flat "qlen_only" [B * N * N], and words of
    more than N bits. They do not read the prefix, and cells past the end of a "full_mask" count as not set.

    Attributes:
        PACKED: "packed", the default: [B, N, ceil(N / 64)] int64. Bit j % 64 of word j // 64 of row i: node i sees j.
        FULL_MASK: "full_mask": [sum of N * (seq_len + N)] bool, request after request; True in the prefix.
        QLEN_ONLY: "qlen_only": [B, N, N] bool.
        QLEN_ONLY_BITPACKING: "qlen_only_bitpacking": [B, N] uint8, uint16 or uint32, for N <= 8, 16 or 32. Bit j of the
            word of node i: it sees j.
    """

    PACKED = "packed"
    FULL_MASK = "full_mask"
    QLEN_ONLY = "qlen_only"
    QLEN_ONLY_BITPACKING = "qlen_only_bitpacking"

    def __str__(self) -> str:
        return self.value


class TreeMask(NamedTuple):
    """A tree mask of any layout as kernels take it, with what determines where its rows start."""

    mask: Any
    seq_lens: Any  # read for FULL_MASK only
    size: Any  # elements


# A program converts BLOCK_ROW rows of one tree.
CONVERT_TUNING = {"default": {"BLOCK_ROW": 16, "BLOCK_FILL": 64, "num_warps": 4}}
# Rows are as long as the context: each has a program, since a small batch would leave most of the GPU idle.
FULL_MASK_TUNING = {"default": {"BLOCK_ROW": 1, "BLOCK_FILL": 512, "num_warps": 4}}

# lengths that are read at once
_BLOCK_BATCH = tl.constexpr(128)
_CELL = (torch.bool, torch.uint8)
_SMALL_WORD_BITS = {torch.uint8: 8, torch.uint16: 16, torch.uint32: 32}


@triton.jit
def _full_mask_start(seq_lens_ptr, request, NUM_NODES: tl.constexpr):
    """Returns where the block of `request` starts in the flat FULL_MASK: the cells of all requests before it."""
    length_before = tl.zeros([_BLOCK_BATCH], dtype=tl.int64)
    for start in range(0, request.to(tl.int32), _BLOCK_BATCH):
        other = start + tl.arange(0, _BLOCK_BATCH)
        length_before += tl.load(seq_lens_ptr + other, mask=other < request, other=0).to(tl.int64)
    return NUM_NODES * (tl.sum(length_before) + request * NUM_NODES)


@triton.jit
def row_starts(
    seq_lens_ptr, request, row, NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr, MASK_MODE: tl.constexpr
):  # fmt: skip
    """Returns where the draft keys of each row start: its first word, or its first cell after the prefix (int64)."""
    index = request * NUM_ROWS + row.to(tl.int64)
    if MASK_MODE == "packed":
        start = index * ((NUM_KEYS + 63) // 64)
    elif MASK_MODE == "qlen_only_bitpacking":
        start = index
    elif MASK_MODE == "qlen_only":
        start = index * NUM_KEYS
    else:
        seq_len = tl.load(seq_lens_ptr + request).to(tl.int64)
        start = _full_mask_start(seq_lens_ptr, request, NUM_KEYS)
        start += row * (seq_len + NUM_KEYS) + seq_len
    return start


@triton.jit
def load_keys(
    tree_mask_ptr, row_start, is_row, word, mask_size, NUM_KEYS: tl.constexpr, MASK_MODE: tl.constexpr
):  # fmt: skip
    """Returns [row, 64]: whether each row sees the draft keys word * 64 and on; False for a missing row or key."""
    column = tl.arange(0, 64)
    key = word * 64 + column
    exists = is_row[:, None] & (key < NUM_KEYS)[None, :]
    if (MASK_MODE == "packed") or (MASK_MODE == "qlen_only_bitpacking"):
        bits = tl.load(tree_mask_ptr + row_start + word, mask=is_row, other=0).to(tl.int64)
        seen = ((bits[:, None] >> column[None, :]) & 1) != 0
    else:
        cell = row_start[:, None] + key[None, :]
        # lengths that do not fit the mask must not lead out of it
        in_bounds = exists & (cell >= 0) & (cell < mask_size)
        seen = tl.load(tree_mask_ptr + cell, mask=in_bounds, other=0) != 0
    return seen & exists


@triton.jit
def store_keys(
    tree_mask_ptr, row_start, is_row, word, seen, mask_size, NUM_KEYS: tl.constexpr, MASK_MODE: tl.constexpr
):  # fmt: skip
    """Writes what `load_keys` reads: seen [row, 64] as the draft keys word * 64 and on of each row."""
    column = tl.arange(0, 64)
    if (MASK_MODE == "packed") or (MASK_MODE == "qlen_only_bitpacking"):
        # bits are distinct, so their sum is their union
        bits = tl.sum(seen.to(tl.int64) << column[None, :], axis=1)
        tl.store(tree_mask_ptr + row_start + word, bits.to(tree_mask_ptr.dtype.element_ty), mask=is_row)
    else:
        key = word * 64 + column
        cell = row_start[:, None] + key[None, :]
        in_bounds = is_row[:, None] & (key < NUM_KEYS)[None, :] & (cell >= 0) & (cell < mask_size)
        tl.store(tree_mask_ptr + cell, seen, mask=in_bounds)


@triton.jit
def fill_prefix(
    mask, request, part, num_parts,
    NUM_NODES: tl.constexpr, IS_ALIGNED: tl.constexpr, BLOCK_ROW: tl.constexpr = 4, BLOCK_FILL: tl.constexpr = 128,
):  # fmt: skip
    """Fills one of num_parts of the rows of a FULL_MASK `mask`: every node sees the whole committed prefix.
    It writes BLOCK_ROW rows at a time, and of each BLOCK_FILL words."""
    seq_len = tl.maximum(tl.load(mask.seq_lens + request).to(tl.int64), 0)
    request_begin = _full_mask_start(mask.seq_lens, request, NUM_NODES)
    for first_row in range(part * BLOCK_ROW, NUM_NODES, num_parts * BLOCK_ROW):
        row = first_row + tl.arange(0, BLOCK_ROW)
        row_begin = request_begin + row * (seq_len + NUM_NODES)
        begin = tl.minimum(tl.maximum(row_begin, 0), mask.size)
        end = tl.maximum(tl.minimum(row_begin + seq_len, mask.size), begin)
        end = tl.where(row < NUM_NODES, end, begin)
        _fill(mask.mask, begin, end, tl.minimum(seq_len, mask.size), IS_ALIGNED, BLOCK_ROW, BLOCK_FILL)


@triton.jit
def _fill(
    mask_ptr, begin, end, length, IS_ALIGNED: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_FILL: tl.constexpr
):  # fmt: skip
    """Writes True to the cells begin .. end - 1 of each row, at most `length` of them, which start anywhere.
    Stores are aligned pairs of words in the middle and bytes at the ends, or bytes alone if the mask itself is not
    aligned to 16 bytes."""
    lane = tl.arange(0, BLOCK_FILL)[None, :]
    if IS_ALIGNED:
        first_pair = (begin + 15) // 16
        last_pair = tl.maximum(end // 16, first_pair)
        words_ptr = mask_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
        all_seen = tl.full([BLOCK_ROW, BLOCK_FILL], 0x0101010101010101, tl.int64)
        for start in range(0, length // 16 * 2, BLOCK_FILL):
            word = (first_pair * 2)[:, None] + start + lane
            tl.store(words_ptr + word, all_seen, mask=word < (last_pair * 2)[:, None])
        # up to 15 cells before the first pair, and up to 15 after the last
        near = tl.arange(0, 32)[None, :]
        head = begin[:, None] + near
        tail = (last_pair * 16)[:, None] + near - 16
        cell = tl.where(near < 16, head, tail)
        limit = tl.where(near < 16, tl.minimum(first_pair * 16, end)[:, None], end[:, None])
        tl.store(mask_ptr + cell, tl.full([BLOCK_ROW, 32], 1, tl.int1), mask=cell < limit)
    else:
        seen = tl.full([BLOCK_ROW, BLOCK_FILL], 1, tl.int1)
        for start in range(0, length, BLOCK_FILL):
            cell = begin[:, None] + start + lane
            tl.store(mask_ptr + cell, seen, mask=cell < end[:, None])


@triton.jit(do_not_specialize=["mask_size"])
def _convert_tree_mask_kernel(
    tree_mask_ptr, seq_lens_ptr, output_ptr, mask_size,
    NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr, SOURCE_MODE: tl.constexpr, TARGET_MODE: tl.constexpr,
    IS_ALIGNED: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_FILL: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Writes a block of rows in another layout. mask_size: elements of the mask that is not packed."""
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK_ROW + tl.arange(0, BLOCK_ROW)
    is_row = row < NUM_ROWS
    source = row_starts(seq_lens_ptr, request, row, NUM_ROWS, NUM_KEYS, SOURCE_MODE)
    target = row_starts(seq_lens_ptr, request, row, NUM_ROWS, NUM_KEYS, TARGET_MODE)
    if TARGET_MODE == "full_mask":
        mask = TreeMask(output_ptr, seq_lens_ptr, mask_size)
        fill_prefix(
            mask, request, tl.program_id(1), tl.num_programs(1), NUM_KEYS, IS_ALIGNED,
            BLOCK_ROW=BLOCK_ROW, BLOCK_FILL=BLOCK_FILL,
        )  # fmt: skip
    for word in range((NUM_KEYS + 63) // 64):
        seen = load_keys(tree_mask_ptr, source, is_row, word, mask_size, NUM_KEYS, SOURCE_MODE)
        store_keys(output_ptr, target, is_row, word, seen, mask_size, NUM_KEYS, TARGET_MODE)


def convert(op: str, tree_mask, seq_lens, out, modes: tuple[str, str], sizes: tuple[int, int, int]) -> None:
    """Launches the kernel above, from layout modes[0] to modes[1]; sizes: requests, query rows and draft keys."""
    (source, target), (batch_size, num_rows, num_keys) = map(str, modes), sizes
    is_full = target == TreeMaskMode.FULL_MASK
    row = tuning.row(FULL_MASK_TUNING if is_full else CONVERT_TUNING, out.device)
    launch(
        op, _convert_tree_mask_kernel, (batch_size, triton.cdiv(num_rows, row["BLOCK_ROW"])),
        tree_mask_ptr=tree_mask, seq_lens_ptr=seq_lens, output_ptr=out,
        mask_size=(out if source == TreeMaskMode.PACKED else tree_mask).numel(),
        NUM_ROWS=num_rows, NUM_KEYS=num_keys, SOURCE_MODE=source, TARGET_MODE=target,
        IS_ALIGNED=is_full and out.data_ptr() % 16 == 0, **row,
    )  # fmt: skip


def check_lengths(args: check.Arguments, mode: str) -> None:
    """Checks seq_lens, which only a mask of layout FULL_MASK needs, beside a mask of another layout as well."""
    if mode == TreeMaskMode.FULL_MASK and args.values["seq_lens"] is None:
        args.fail("seq_lens", "be given for 'full_mask', whose rows begin where the lengths say", None)
    if args.tensor("seq_lens", ("B",), check.INTEGER, optional=True) is not None:
        args.debug("seq_lens", "not be negative", lambda: args.values["seq_lens"] >= 0)


def check_mask(args: check.Arguments, mode: str, num_nodes: int | None) -> tuple[int, int, int]:
    """Checks the argument `tree_mask`, a mask of layout `mode`; returns how many (requests, query rows, draft keys).
    num_nodes: draft keys, None where the mask's shape gives them. FULL_MASK needs `seq_lens` checked before."""
    tree_mask = args.values["tree_mask"]
    is_flat = isinstance(tree_mask, torch.Tensor) and tree_mask.dim() == 1
    if num_nodes is None and (mode == TreeMaskMode.FULL_MASK or (mode == TreeMaskMode.QLEN_ONLY and is_flat)):
        args.fail("num_verify_tokens", "be given for a flat mask, whose shape does not say it", None)
    if mode == TreeMaskMode.FULL_MASK:
        args.tensor("tree_mask", (None,), _CELL)
        return args.size("B"), num_nodes, num_nodes
    if mode == TreeMaskMode.QLEN_ONLY and is_flat:
        size = args.tensor("tree_mask", (None,), _CELL).shape[0]
        if size % (num_nodes * num_nodes):
            args.fail("tree_mask", f"hold {num_nodes} x {num_nodes} cells per request", f"{size} cells")
        return size // (num_nodes * num_nodes), num_nodes, num_nodes
    if mode == TreeMaskMode.QLEN_ONLY:
        return tuple(args.tensor("tree_mask", ("B", "Nq", "Nk" if num_nodes is None else num_nodes), _CELL).shape)
    if mode == TreeMaskMode.PACKED:
        words = None if num_nodes is None else -(-num_nodes // 64)
        batch_size, num_rows, num_words = args.tensor("tree_mask", ("B", "Nq", words), (torch.int64,)).shape
        return batch_size, num_rows, 64 * num_words if num_nodes is None else num_nodes
    words = args.tensor("tree_mask", ("B", "N" if num_nodes is None else num_nodes), tuple(_SMALL_WORD_BITS))
    if words.shape[1] > _SMALL_WORD_BITS[words.dtype]:
        dtype = str(words.dtype).removeprefix("torch.")
        args.fail("tree_mask", f"have words of at least {words.shape[1]} bits, one per node", dtype)
    return words.shape[0], words.shape[1], words.shape[1]


def mask_spec(args: check.Arguments, mode: str, batch_size: int, num_rows: int, num_keys: int, out=None) -> check.Spec:
    """Describes a mask of layout `mode` as an output; `out` is the caller's buffer for it, if there is one.
    FULL_MASK: a given buffer may be larger than needed (for the longest batch) and is never overrun; without one the
    argument `seq_lens_sum` gives the size. Where lengths and size contradict each other, cells that the lengths place
    past the end are left out, and cells that they do not reach are not written; with EAGLE_KERNELS_DEBUG=1 a wrong sum
    and a buffer that is too short are errors."""
    if args.values.get("seq_lens_sum") is not None:  # also where no mask depends on it
        args.integer("seq_lens_sum", 0)
    if mode == TreeMaskMode.PACKED:
        return args.spec((batch_size, num_rows, -(-num_keys // 64)), torch.int64)
    if mode == TreeMaskMode.QLEN_ONLY:
        return args.spec((batch_size, num_rows, num_keys), torch.bool)
    if mode == TreeMaskMode.FULL_MASK:
        return args.spec((_full_mask_size(args, batch_size, num_keys, out),), torch.bool)
    for dtype, bits in _SMALL_WORD_BITS.items():
        if num_keys <= bits:
            return args.spec((batch_size, num_keys), dtype)
    rule = "be at most 32 for 'qlen_only_bitpacking' ('packed' has no such limit)"
    return args.fail("num_verify_tokens", rule, num_keys)


def _full_mask_size(args: check.Arguments, batch_size: int, num_nodes: int, out: torch.Tensor | None) -> int:
    """Returns the cells of a FULL_MASK, or of the caller's buffer for it; checks them where lengths can be read."""
    seq_lens, seq_lens_sum = args.values["seq_lens"], args.values["seq_lens_sum"]
    if seq_lens_sum is None and out is None:
        args.fail("seq_lens_sum", "be given for 'full_mask' without out: the mask's size depends on it", None)
    size = out.numel() if isinstance(out, torch.Tensor) else num_nodes * ((seq_lens_sum or 0) + batch_size * num_nodes)
    if check.can_read(seq_lens):
        total = int(seq_lens.sum())
        if seq_lens_sum not in (None, total):
            args.fail("seq_lens_sum", f"be {total}, the sum of seq_lens", seq_lens_sum)
        needed = num_nodes * (total + batch_size * num_nodes)
        if size < needed:
            name = "out" if isinstance(args.values["out"], torch.Tensor) else "out.tree_mask"
            args.fail(name, f"hold the {needed} cells that seq_lens ask for", size)
    return size
