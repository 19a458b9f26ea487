"""Tuning rows of the ops with quantised weights.

Not yet measured. They follow from what a tile costs: a program reads all of its rows of x, which for 4 bits are soon
more bytes than its weights. So tiles have as many outputs as registers allow, and columns are cut into parts where
there are too few tiles for two programs an SM, of which one unpacks while the other one's products run; for up to 8
rows x costs less than parts. For many rows, 256 of them are multiplied by what is unpacked once.
"""

# The first entry that allows the number of rows and of outputs is taken; with num_parts or deterministic one without
# column_warps, which are warps of a program with columns of their own; deterministic also without late, which
# multiplies scales with the sums of 128 columns, and with at least 16 rows.
# rows_left: x is the left operand, with column_warps only. blocks: of 128 columns, in a turn. merged: how many programs
# an SM has; where there are fewer they make parts, which another launch adds up, but not deterministic ones; 0: never.
# prefetched: the first block of weights is kept in registers.
_TILE = {"max_rows": 2**31, "least_outputs": 0, "block_row": 64, "block_output": 64, "column_warps": 1, "rows_left": 0,
         "blocks": 1, "merged": 0, "late": 0, "prefetched": 0, "num_warps": 4, "num_stages": 3}  # fmt: skip
_FEW = {rows: {"max_rows": rows, "block_row": max(rows, 8)} for rows in (4, 8, 16, 32, 64)}
_WIDE = {"least_outputs": 16384}
_COLUMNS = _TILE | {"block_output": 32, "column_warps": 8, "late": 1, "prefetched": 1, "num_warps": 8}
_STREAM = _TILE | {"block_output": 128, "blocks": 2, "merged": 2, "late": 1, "prefetched": 1}
_STREAM_WIDE = _STREAM | _WIDE | {"block_output": 256, "blocks": 1, "merged": 1, "num_warps": 8}
_LARGE = _TILE | {"block_output": 128, "merged": 1, "num_warps": 8}
_LARGE_WIDE = _LARGE | _WIDE | {"block_output": 256}


def entries(bits: int) -> dict[str, tuple[dict, ...]]:
    """Returns the tuning table for weights of 4 or 8 bits."""
    more, most = ({"num_stages": 4}, {"num_stages": 5}) if bits == 4 else ({}, {"num_stages": 4})
    # of 8 bits, two programs of 64 rows would not fit into registers, nor 256 rows with zero points into shared memory
    some, many = ({"merged": 2}, {"block_row": 256}) if bits == 4 else ({}, {"block_row": 128})
    return {
        "default": (_TILE | _FEW[16], _TILE | _FEW[32], _TILE),
        # 64 KiB of shared memory
        "gfx942": (_TILE | _FEW[16], _TILE | _FEW[32] | {"num_stages": 2}, _TILE | {"num_stages": 2}),
        "sm_90": (
            _STREAM | _FEW[8] | _WIDE | more,
            _COLUMNS | _FEW[8],
            _STREAM | _FEW[8] | more,
            _STREAM | _FEW[16] | more,
            _STREAM | _FEW[16] | {"late": 0} | more,
            _STREAM_WIDE | _FEW[32] | most,
            _STREAM | _FEW[32] | {"blocks": 1} | most,
            _STREAM | _FEW[32] | {"blocks": 1, "late": 0} | most,
            _LARGE_WIDE | _FEW[64] | more,
            _LARGE | _FEW[64] | some | more,
            # twice as many outputs would not fit into registers
            _LARGE | {"max_rows": 256, "block_row": 128} | more,
            _LARGE | many,
        ),
    }


def rounded_entries() -> dict[str, tuple[dict, ...]]:
    """Returns the tuning table for x in 8 bits as well, where sums of 128 columns take registers of their own."""
    return {
        "default": (_TILE | _FEW[16], _TILE | _FEW[32], _TILE),
        "sm_90": (
            _STREAM | _FEW[16] | {"blocks": 1, "late": 0, "num_stages": 4},
            _LARGE | _FEW[64] | {"num_stages": 4},
            _LARGE | {"block_row": 128, "num_stages": 4},
        ),
    }
