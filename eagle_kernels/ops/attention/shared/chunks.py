"""Divides the keys of a batch among programs: even chunks of all its keys (`cuts.py`).

There is one chunk for each program that runs at once, so that all of them end together; fewer where a chunk would be
short, and several rounds of them where there are many tiles of rows. A program attends to its chunk request by request:
to whole ones, whose result it writes, and at both ends of the chunk to parts of one, whose results are merged
afterwards.
"""

from __future__ import annotations

from ....primitives.dependent_launch import await_predecessor
from ....runtime import target, tuning
from ....runtime.language import tl, triton
from ....runtime.launch import launch
from .batch import Batch, request_rows, slot_range
from .cuts import BLOCK_SLOTS, chunk_span, count_blocks, cut_slot, find_block, find_cut, is_short
from .merge_shares import allocate_partial, launch_merge
from .share import SIZES, Keys, Sizes, attend_share, finish_share


@triton.jit(do_not_specialize=[*SIZES, "num_chunks"])
def _attention_kernel(
    inputs,
    lengths,
    # outputs
    out,
    partial,
    # sizes
    scale,
    soft_cap,
    window,
    reach,
    batch_size,
    table_size,
    num_pages,
    num_query,
    num_rows,
    num_drafts,
    num_words,
    num_chunks,
    stride_page_table_request,
    stride_k_page,
    stride_v_page,
    stride_query_batch,
    stride_query_token,
    stride_draft_key_batch,
    stride_draft_key_token,
    stride_draft_value_batch,
    stride_draft_value_token,
    SHAPE: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    """Attends one tile of rows of one KV head to one chunk of the keys."""
    await_predecessor(ENABLE_PDL)
    kv_head = tl.program_id(0) % SHAPE.NUM_KV_HEADS
    row_tile = tl.program_id(0) // SHAPE.NUM_KV_HEADS
    chunk = tl.program_id(1)
    batch = Batch(lengths, stride_page_table_request, table_size, batch_size, num_query, num_rows, num_drafts, reach)
    sizes = Sizes(
        scale, soft_cap, window, num_pages, num_words, stride_k_page, stride_v_page, stride_query_batch,
        stride_query_token, stride_draft_key_batch, stride_draft_key_token, stride_draft_value_batch,
        stride_draft_value_token,
    )  # fmt: skip
    cut = find_cut(batch, num_chunks, LEAST_BLOCKS, SHAPE, BLOCK_BATCH)
    block, chunk_stop = chunk_span(cut, chunk)
    request, gap_begin, chunk_stop = find_block(batch, cut, block, chunk_stop, SHAPE, BLOCK_BATCH)
    while (block < chunk_stop) & (request < batch_size):
        first, prefix, stop = slot_range(batch, request, SHAPE)
        num_blocks = count_blocks(first, stop)
        if lengths.plan is not None:
            num_blocks = tl.load(lengths.plan + request + 1) - tl.load(lengths.plan + request)
        first_block = gap_begin + tl.where(is_short(num_blocks), cut.gap, 0)
        stop_block = first_block + num_blocks
        is_first, is_last = block <= first_block, stop_block <= chunk_stop
        _, num_tokens = request_rows(lengths.qo_indptr, request, num_query, num_rows, True)
        if row_tile * BLOCK_ROW < num_tokens * SHAPE.GROUP_SIZE:
            begin, share_stop = cut_slot(first, stop, block - first_block, SHAPE.BLOCK_KEY), stop
            if not is_last:
                share_stop = tl.minimum(cut_slot(first, stop, chunk_stop - first_block, SHAPE.BLOCK_KEY), stop)
            pool_stop = share_stop
            if SHAPE.DRAFTS == "beside":
                pool_stop = tl.minimum(share_stop, prefix)
            # The same row in every request, which the compiler must not see: it would compute the addresses of a whole
            # tile of rows once for the loop, and keep them in registers that the inner loop needs.
            first_row = tl.where(block < stop_block, row_tile * BLOCK_ROW, 0)
            rows, state = attend_share(
                inputs, sizes, batch, request, kv_head, row=first_row, row_stop=None, path_token=None,
                keys=Keys(begin, share_stop, first, prefix, pool_stop, None),
                SHAPE=SHAPE, BLOCK_ROW=BLOCK_ROW, BLOCK_NODE=0,
            )  # fmt: skip
            # a chunk has two places for parts of requests: that in which it begins, and that in which it ends
            place = 2 * chunk + is_first.to(tl.int32)
            finish_share(
                inputs, out, partial, rows, state, rows.is_row & is_first, place.to(tl.int64) * num_query,
                is_first & is_last, SHAPE=SHAPE,
            )  # fmt: skip
        block, gap_begin = stop_block, stop_block
        request += 1


def count_chunks(batch_size: int, num_tiles: int, num_processors: int, programs: tuple[int, int]) -> int:
    """Returns the number of chunks, num_tiles programs for each, that gives every multiprocessor its programs.

    programs: how many those are where there is a chunk for each request or more, and where there are fewer. Side by
    side, programs hide how each of them goes from request to request; where requests are cut anyway, fewer programs
    make fewer parts to merge. The number is a little less if requests of equal lengths are then cut alike, best into
    multiples of 16 parts, which are merged at once.
    """
    batch_size, num_tiles = max(batch_size, 1), max(num_tiles, 1)
    few, many = (max(number * num_processors // num_tiles, 1) for number in programs)
    most = few if few >= batch_size else many
    numbers = range(most, most - most // 10 - 1, -1)
    alike = (number for number in numbers if number % batch_size == 0 or batch_size % number == 0)
    return next((number for number in numbers if number % (16 * batch_size) == 0), next(alike, most))


def launch_chunks(op: str, arguments: dict, tuned: dict) -> None:
    """Launches the attention and, where a request can have several parts, their merge.

    arguments: of the kernel, but those that are found here. tuned: the op's tuning row.
    """
    lengths, shape, batch_size = (arguments[name] for name in ("lengths", "SHAPE", "batch_size"))
    num_tiles = shape.NUM_KV_HEADS * triton.cdiv(arguments["num_query"] * shape.GROUP_SIZE, arguments["BLOCK_ROW"])
    least_blocks = max(1, tuned["share_keys"] // BLOCK_SLOTS)
    # the most blocks that these page tables have room for; in the CSR form all requests share them
    draft_blocks = triton.cdiv(arguments["num_drafts"], BLOCK_SLOTS) if shape.DRAFTS == "beside" else 0
    page_blocks = triton.cdiv(arguments["table_size"] * shape.PAGE_SIZE, BLOCK_SLOTS)
    each = page_blocks + draft_blocks + (draft_blocks > 0)
    most_blocks = batch_size * max(each, 1)
    if lengths.kv_indptr is not None:
        most_blocks = min(most_blocks, each + batch_size * (1 + draft_blocks))
    num_processors = target.num_multiprocessors(arguments["out"].output.device)
    num_chunks = count_chunks(batch_size, num_tiles, num_processors, tuned["programs"])
    if num_chunks < 4:  # the last programs would leave much of the GPU idle: up to four rounds of them
        four_rounds = triton.cdiv(4 * tuned["programs"][1] * num_processors, max(num_tiles, 1))
        num_chunks = max(num_chunks, min(batch_size, four_rounds))
    num_chunks = min(num_chunks, triton.cdiv(most_blocks, least_blocks))
    has_parts = num_chunks > 1 and each > 1
    if not has_parts:
        arguments["lengths"] = lengths._replace(plan=None)  # no request is cut then, whatever a plan says
    arguments["partial"] = allocate_partial(arguments, 2 * num_chunks if has_parts else 0)
    launch(
        op,
        _attention_kernel,
        (num_tiles, num_chunks),
        num_chunks=num_chunks,
        LEAST_BLOCKS=least_blocks,
        BLOCK_BATCH=1 if batch_size == 1 else 32 if batch_size <= 32 else 128,  # one request looks for no others
        **arguments,
        **tuning.compiler_options(tuned),
    )
    if has_parts:
        # about the parts of one request at once, or all of one alone; more of them leave room for fewer rows
        alone = count_chunks(1, num_tiles, num_processors, tuned["programs"])
        rows, parts = (4, 16) if arguments["num_query"] > 1 or alone <= 16 else (1, 32)
        if num_chunks <= 4 * batch_size:
            rows, parts = 4, 4
        cutting = {"LEAST_BLOCKS": least_blocks, "BLOCK_BATCH": 1 if batch_size == 1 else 128}
        launch_merge(op, num_chunks, rows, parts, arguments, **cutting)
