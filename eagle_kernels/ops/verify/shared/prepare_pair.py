"""The first launches of ops that compare the target's distributions with the draft's; also checks these arguments.

Both come as rows of logits or of probabilities. Before a kernel can read them (`pair.py`), two steps are launched:

    map     parts of the target's vocabulary: inverts d2t, the map of a draft that has a reduced vocabulary
    scan    (rows of logits, slices): finds the statistics of every slice
"""

from __future__ import annotations

import math

import torch

from ....primitives.dependent_launch import await_predecessor
from ....runtime import check, tuning
from ....runtime.language import next_power_of_2, tl, triton
from ....runtime.launch import launch
from .rows import GREEDY_BELOW, in_units, store_no_scan, store_scan
from .sampling import check_vocabulary

# A slice is a tile: 16 tokens a thread, so that p, q and noise stay in registers.
SLICE_TUNING = {"default": {"BLOCK_VOCAB": 4096, "num_warps": 8}}
MAP_TUNING = {"default": {"BLOCK_TARGET": 4096, "BLOCK_DRAFT": 4096, "num_warps": 8}}


@triton.jit(do_not_specialize=["vocab_size", "draft_vocab_size"])
def _draft_map_kernel(
    d2t_ptr,
    target_to_draft_ptr,
    vocab_size,
    draft_vocab_size,
    BLOCK_TARGET: tl.constexpr,
    BLOCK_DRAFT: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Writes one part of target_to_draft [V] int32, from d2t [Vd]: target id - draft id, one to one.

    Every program reads all of d2t, so that none has to wait for another.
    """
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
    target_ptr,
    draft_ptr,
    temperature_ptr,
    draft_temperature_ptr,
    first_child_ptr,
    scans_ptr,
    # sizes
    num_target_scans,
    vocab_size,
    draft_vocab_size,
    stride_target,
    stride_draft,
    TARGET_IS_PROBS: tl.constexpr,
    DRAFT_IS_PROBS: tl.constexpr,
    TARGET_ROWS: tl.constexpr,
    DRAFT_ROWS: tl.constexpr,
    SKIPS_GREEDY_DRAFT: tl.constexpr,
    TARGET_UNIT: tl.constexpr,
    DRAFT_UNIT: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Writes the statistics of one slice of a row of logits to scans [rows, 3, slices]: target rows, then draft rows.

    first_child_ptr: if it is given, the draft's rows of nodes without a child are not read, as no kernel reads them.
    So are, with SKIPS_GREEDY_DRAFT, those whose draft temperature is greedy.
    """
    await_predecessor(ENABLE_PDL)
    scan = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    scans_ptr += scan * (3 * NUM_SLICES)
    if scan < num_target_scans:
        if not TARGET_IS_PROBS:
            temperature = tl.load(temperature_ptr + scan // TARGET_ROWS)
            row_ptr = target_ptr + scan * in_units(stride_target, TARGET_UNIT)
            store_scan(
                row_ptr, in_units(vocab_size, TARGET_UNIT), temperature, scans_ptr, part, NUM_SLICES, BLOCK_VOCAB
            )
    else:
        if not DRAFT_IS_PROBS:
            row = scan - num_target_scans
            temperature = tl.load(draft_temperature_ptr + row // DRAFT_ROWS)
            is_read = part >= 0
            if first_child_ptr is not None:
                is_read = tl.load(first_child_ptr + row) > 0
            if SKIPS_GREEDY_DRAFT:
                is_read = is_read & (temperature >= GREEDY_BELOW)
            if is_read:
                row_ptr = draft_ptr + row * in_units(stride_draft, DRAFT_UNIT)
                size = in_units(draft_vocab_size, DRAFT_UNIT)
                store_scan(row_ptr, size, temperature, scans_ptr, part, NUM_SLICES, BLOCK_VOCAB)
            else:
                store_no_scan(scans_ptr, part, NUM_SLICES)


def check_pair(args: check.Arguments, num_target_rows: int, num_draft_rows: int) -> None:
    """Checks the distributions of target and draft, and what the draws are keyed by; B must be bound already."""
    if args.exactly_one("target_logits", "target_probs") == "target_logits":
        args.tensor("target_logits", (num_target_rows, "V"), check.FLOAT, contiguous=1)
    else:
        args.tensor("target_probs", (num_target_rows, "V"), (torch.float32,), contiguous=1)
    if args.exactly_one("draft_logits", "draft_probs") == "draft_logits":
        args.tensor("draft_logits", (num_draft_rows, "Vd"), check.FLOAT, contiguous=1)
    else:
        args.tensor("draft_probs", (num_draft_rows, "Vd"), (torch.float32,), contiguous=1)
    for name, axis in (("target", "V"), ("draft", "Vd")):
        given = name + ("_logits" if args.values[name + "_logits"] is not None else "_probs")
        check_vocabulary(args, given, axis)
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
    launch(
        op,
        _draft_map_kernel,
        (triton.cdiv(vocab_size, row["BLOCK_TARGET"]),),
        d2t_ptr=d2t,
        target_to_draft_ptr=target_to_draft,
        vocab_size=vocab_size,
        draft_vocab_size=len(d2t),
        **row,
    )
    return target_to_draft


def pair_arguments(op: str, values: dict) -> dict:
    """Launches the map and returns the arguments of kernels that read the rows (as a Pair), but for the scans.

    values: the op's arguments.
    """
    target = values["target_logits"] if values["target_probs"] is None else values["target_probs"]
    draft = values["draft_logits"] if values["draft_probs"] is None else values["draft_probs"]
    draft_temperature = values["draft_temperature"]
    vocab_size, draft_vocab_size = target.shape[1], draft.shape[1]
    return {
        "target_ptr": target,
        "draft_ptr": draft,
        "temperature_ptr": values["temperature"],
        "draft_temperature_ptr": values["temperature"] if draft_temperature is None else draft_temperature,
        # without a map any pointer to floats: triton 3.6 has no functions that return a tuple that holds None
        "target_to_draft_ptr": target if values["d2t"] is None else invert_draft_map(op, values["d2t"], vocab_size),
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "stride_target": target.stride(0),
        "stride_draft": draft.stride(0),
        "num_target_scans": len(target) if values["target_probs"] is None else 0,
        "TARGET_IS_PROBS": values["target_probs"] is not None,
        "DRAFT_IS_PROBS": values["draft_probs"] is not None,
        # divisors of all sizes and strides
        "TARGET_UNIT": math.gcd(vocab_size, target.stride(0), 16),
        "DRAFT_UNIT": math.gcd(draft_vocab_size, draft.stride(0), 16),
    }


def slice_arguments(pair: dict) -> dict:
    """Returns how kernels cut the rows of `pair_arguments` into slices."""
    block = tuning.row(SLICE_TUNING, pair["target_ptr"].device)["BLOCK_VOCAB"]
    num_slices = triton.cdiv(max(pair["vocab_size"], pair["draft_vocab_size"]), block)
    return {"NUM_SLICES": num_slices, "BLOCK_SLICE": next_power_of_2(num_slices)}


def scan_pair(
    op: str,
    pair: dict,
    target_rows: int,
    draft_rows: int,
    first_child: torch.Tensor | None,
    skips_greedy_draft: bool = False,
) -> torch.Tensor | None:
    """Launches the scan of all rows and returns it, None if no rows hold logits.

    pair: `pair_arguments` and `slice_arguments`. target_rows, draft_rows: rows of each request. first_child [draft
    rows] and skips_greedy_draft: see the scan kernel; without them all rows are read.
    """
    num_scans = pair["num_target_scans"] + (0 if pair["DRAFT_IS_PROBS"] else len(pair["draft_ptr"]))
    if pair["TARGET_IS_PROBS"] and pair["DRAFT_IS_PROBS"]:
        return None
    device, num_slices = pair["target_ptr"].device, pair["NUM_SLICES"]
    scans = torch.empty((num_scans, 3, num_slices), dtype=torch.int32, device=device)
    launch(
        op,
        _scan_pair_kernel,
        (num_scans, num_slices),
        first_child_ptr=first_child,
        scans_ptr=scans,
        TARGET_ROWS=target_rows,
        DRAFT_ROWS=max(draft_rows, 1),
        SKIPS_GREEDY_DRAFT=skips_greedy_draft,
        **{name: value for name, value in pair.items() if name not in ("target_to_draft_ptr", "BLOCK_SLICE")},
        **tuning.row(SLICE_TUNING, device),
    )
    return scans


def prepare_pair(op: str, values: dict, target_rows: int, draft_rows: int, first_child: torch.Tensor | None) -> dict:
    """Launches both steps and returns the arguments of kernels that read the rows (as a Pair); see `scan_pair`."""
    pair = pair_arguments(op, values)
    pair |= slice_arguments(pair)
    return pair | {"scans_ptr": scan_pair(op, pair, target_rows, draft_rows, first_child)}
