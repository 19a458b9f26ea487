"""The first launches of ops that compare the target's distributions with the draft's; also checks these arguments.

Both come as rows of logits or of probabilities. Before a kernel can read them (`pair.py`), two steps are launched:

    map     parts of the target's vocabulary: inverts d2t, the map of a draft that has a reduced vocabulary
    scan    (rows of logits, slices): finds the statistics of every slice
"""

from __future__ import annotations

import math

import torch

from ....primitives.dependent_launch import await_predecessor
from ....primitives.ordering import check_vocabulary
from ....primitives.rows import GREEDY_BELOW, RowPointers, Rows, in_units, store_no_scan, store_scan
from ....runtime import check, tuning
from ....runtime.language import tl, triton
from ....runtime.launch import launch

# A slice is a tile: 16 tokens a thread, so that p, q and noise stay in registers.
SLICE_TUNING = {"default": {"BLOCK_VOCAB": 4096, "num_warps": 8}}
MAP_TUNING = {"default": {"BLOCK_TARGET": 4096, "BLOCK_DRAFT": 4096, "num_warps": 8}}


@triton.jit(do_not_specialize=["vocab_size", "draft_vocab_size"])
def _draft_map_kernel(
    d2t_ptr, target_to_draft_ptr, vocab_size, draft_vocab_size,
    BLOCK_TARGET: tl.constexpr, BLOCK_DRAFT: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Writes one part of target_to_draft [V] int32, from d2t [Vd]: target id - draft id, one to one.
    Every program reads all of d2t, so that none has to wait for another."""
    await_predecessor(ENABLE_PDL)
    start = tl.program_id(0).to(tl.int64) * BLOCK_TARGET
    stop = tl.minimum(start + BLOCK_TARGET, vocab_size)
    target = start + tl.arange(0, BLOCK_TARGET)
    tl.store(target_to_draft_ptr + target, tl.full([BLOCK_TARGET], -1, tl.int32), mask=target < stop)
    tl.debug_barrier()  # other threads write there
    for first in range(0, draft_vocab_size, BLOCK_DRAFT):
        draft = first + tl.arange(0, BLOCK_DRAFT)
        is_draft = draft < draft_vocab_size
        mapped = draft + tl.load(d2t_ptr + draft, mask=is_draft, other=0).to(tl.int64)
        tl.store(target_to_draft_ptr + mapped, draft, mask=is_draft & (mapped >= start) & (mapped < stop))


@triton.jit(do_not_specialize=["num_target_scans", "vocab_size", "draft_vocab_size", "stride_target", "stride_draft"])
def _scan_pair_kernel(
    target, draft, first_child_ptr, num_target_scans, vocab_size, draft_vocab_size, stride_target, stride_draft,
    TARGET_ROWS: tl.constexpr, DRAFT_ROWS: tl.constexpr, SKIPS_GREEDY_DRAFT: tl.constexpr, TARGET_UNIT: tl.constexpr,
    DRAFT_UNIT: tl.constexpr, NUM_SLICES: tl.constexpr, BLOCK_VOCAB: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    """Writes the statistics of one slice of a row of logits to its scan.
    first_child_ptr: if it is given, the draft's rows of nodes without a child are not read, as no kernel reads them.
    So are, with SKIPS_GREEDY_DRAFT, those whose draft temperature is greedy."""
    await_predecessor(ENABLE_PDL)
    scan = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if scan < num_target_scans:
        if target.scans is not None:
            rows = Rows(target, in_units(stride_target, TARGET_UNIT), in_units(vocab_size, TARGET_UNIT), 0)
            store_scan(rows, scan, tl.load(target.temperature + scan // TARGET_ROWS), part, NUM_SLICES, BLOCK_VOCAB)
    else:
        if draft.scans is not None:
            rows = Rows(draft, in_units(stride_draft, DRAFT_UNIT), in_units(draft_vocab_size, DRAFT_UNIT), 0)
            row = scan - num_target_scans
            temperature = tl.load(draft.temperature + row // DRAFT_ROWS)
            is_read = part >= 0
            if first_child_ptr is not None:
                is_read = tl.load(first_child_ptr + row) > 0
            if SKIPS_GREEDY_DRAFT:
                is_read = is_read & (temperature >= GREEDY_BELOW)
            if is_read:
                store_scan(rows, row, temperature, part, NUM_SLICES, BLOCK_VOCAB)
            else:
                store_no_scan(rows, row, part, NUM_SLICES)


def check_pair(args: check.Arguments, num_target_rows: int, num_draft_rows: int) -> None:
    """Checks the distributions of target and draft, and what the draws are keyed by; B must be bound already."""
    given = []
    for logits, probs, shape in (
        ("target_logits", "target_probs", (num_target_rows, "V")),
        ("draft_logits", "draft_probs", (num_draft_rows, "Vd")),
    ):
        given.append(args.exactly_one(logits, probs))
        args.tensor(given[-1], shape, check.FLOAT if given[-1] == logits else (torch.float32,), contiguous=1)
    for name, axis in zip(given, ("V", "Vd")):
        check_vocabulary(args, name, axis)
    args.tensor("positions", (num_target_rows,), check.INTEGER)
    args.tensor("seeds", ("B",), check.INTEGER)
    draft_needs = args.values["draft_logits"] is not None and args.values["draft_temperature"] is None
    is_needed = args.values["target_logits"] is not None or draft_needs
    args.tensor("temperature", ("B",), (torch.float32,), optional=not is_needed)
    args.tensor("draft_temperature", ("B",), (torch.float32,), optional=True)
    args.debug_numbers("temperature", 0)
    args.debug_numbers("draft_temperature", 0)
    args.tensor("d2t", ("Vd",), check.INTEGER, optional=True)


def invert_draft_map(op: str, d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Launches the inversion of d2t and returns target_to_draft [V] for `draft_ids`."""
    target_to_draft = torch.empty(vocab_size, dtype=torch.int32, device=d2t.device)
    row = tuning.row(MAP_TUNING, d2t.device)
    sizes = {"vocab_size": vocab_size, "draft_vocab_size": len(d2t)}
    grid = (triton.cdiv(vocab_size, row["BLOCK_TARGET"]),)
    launch(op, _draft_map_kernel, grid, d2t_ptr=d2t, target_to_draft_ptr=target_to_draft, **sizes, **row)
    return target_to_draft


def pair_arguments(op: str, values: dict) -> dict:
    """Launches the map and returns the arguments of kernels that read the rows (as a Pair), but for the scans.
    values: the op's arguments."""
    target = values["target_logits"] if values["target_probs"] is None else values["target_probs"]
    draft = values["draft_logits"] if values["draft_probs"] is None else values["draft_probs"]
    draft_temperature = values["draft_temperature"]
    draft_temperature = values["temperature"] if draft_temperature is None else draft_temperature
    vocab_size, draft_vocab_size = target.shape[1], draft.shape[1]
    block = tuning.row(SLICE_TUNING, target.device)["BLOCK_VOCAB"]
    return {
        "target": RowPointers(values["target_logits"], values["target_probs"], values["temperature"], None),
        "draft": RowPointers(values["draft_logits"], values["draft_probs"], draft_temperature, None),
        "target_to_draft_ptr": None if values["d2t"] is None else invert_draft_map(op, values["d2t"], vocab_size),
        "vocab_size": vocab_size, "draft_vocab_size": draft_vocab_size,
        "stride_target": target.stride(0), "stride_draft": draft.stride(0),
        # divisors of all sizes and strides
        "TARGET_UNIT": math.gcd(vocab_size, target.stride(0), 16),
        "DRAFT_UNIT": math.gcd(draft_vocab_size, draft.stride(0), 16),
        "NUM_SLICES": triton.cdiv(max(vocab_size, draft_vocab_size), block),
    }  # fmt: skip


def allocate_scans(pair: dict, num_scans: int | None = None) -> tuple[int, int]:
    """Gives rows of logits room for scans, one for each row or `num_scans`; returns how many target and draft have."""
    counts = []
    for name in ("target", "draft"):
        rows, count = pair[name], 0
        if rows.logits is not None:
            count = len(rows.logits) if num_scans is None else num_scans
            scans = torch.empty((count, 3, pair["NUM_SLICES"]), dtype=torch.int32, device=rows.logits.device)
            pair[name] = rows._replace(scans=scans)
        counts.append(count)
    return tuple(counts)


def scan_pair(
    op: str, pair: dict, target_rows: int, draft_rows: int, first_child: torch.Tensor | None,
    skips_greedy_draft: bool = False,
) -> None:  # fmt: skip
    """Launches the scan of all rows of logits and puts it into `pair`, which comes from `pair_arguments`.
    target_rows, draft_rows: rows of each request. first_child [draft rows] and skips_greedy_draft: see the scan kernel;
    without them all rows are read."""
    num_target_scans, num_draft_scans = allocate_scans(pair)
    scanned = [rows.logits for rows in (pair["target"], pair["draft"]) if rows.logits is not None]
    if not scanned:
        return
    rows = {"first_child_ptr": first_child, "num_target_scans": num_target_scans}
    rows |= {"TARGET_ROWS": target_rows, "DRAFT_ROWS": max(draft_rows, 1), "SKIPS_GREEDY_DRAFT": skips_greedy_draft}
    rows |= {name: value for name, value in pair.items() if name != "target_to_draft_ptr"}
    grid = (num_target_scans + num_draft_scans, pair["NUM_SLICES"])
    launch(op, _scan_pair_kernel, grid, **rows, **tuning.row(SLICE_TUNING, scanned[0].device))
