"""SGLang's names for KV slots: signatures, what is written and what is left, against its kernels in plain Python."""

import inspect
import itertools

import pytest
import torch

import eagle_kernels.integrations.sgl_kernel as sgl_kernel
from op_tests.harness import Guarded, replay_in_graph
from op_tests.integrations import oracles
from op_tests.ops.kv.cases import example_rows, random_rows

LEFT = -7  # what buffers hold before


@pytest.fixture(params=[torch.int32, torch.int64], ids=str)
def slot_dtype(request):
    """Of the buffers that slots are written to: FlashInfer's are int32, SGLang's own int64."""
    return request.param


def buffer(shape, dtype, device):
    guarded = Guarded(shape, dtype, device)
    guarded.tensor.fill_(LEFT)
    return guarded


def lists(*tensors):
    return [tensor.tolist() for tensor in tensors]


def draft_case(batch_size, topk, num_steps, page_size, device):
    """Rows, lengths and the arguments that only a kernel needs."""
    seq_lens = torch.randint(1, 20, (batch_size,), device=device)
    values = random_rows(batch_size, 20 + topk * (num_steps + 2 * page_size), device=device)
    values["req_to_token"] = values["req_to_token"].to(torch.int32)
    # buffers of a server are longer than the batch
    rows = torch.cat([values["req_pool_indices"], seq_lens.new_tensor([99])])
    return values["req_to_token"], rows, torch.cat([seq_lens, seq_lens.new_tensor([5])])


SHAPES = [(1, 1, 1, 1), (3, 2, 2, 1), (3, 2, 2, 4), (2, 4, 3, 16), (2, 1, 4, 16)]


@pytest.mark.parametrize("window", [(0, 0), (0, 3), (4, 0), (5, 2), (100, 3)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_draft_indices(shape, window, slot_dtype, device, backend):
    batch_size, topk, num_steps, page_size = shape
    table, rows, seq_lens = draft_case(*shape, device)
    num_branches, width = batch_size * topk, topk * (int(seq_lens.sum()) + batch_size * num_steps)
    indices = buffer((num_steps, width), slot_dtype, device)
    indptr = buffer((num_steps + 1, num_branches + 4), torch.int32, device)
    indptr.tensor[:, 0] = 0
    wanted_indices, wanted_indptr = lists(indices.tensor, indptr.tensor)
    sizes = (table.stride(0), width, num_branches + 4, 4, 4, 16, page_size)
    grid = (num_steps, batch_size, topk)
    sgl_kernel.generate_draft_decode_kv_indices[grid](
        rows, table, seq_lens, indices.tensor, indptr.tensor, seq_lens.repeat_interleave(topk), *sizes, *window
    )
    lens = seq_lens[:batch_size].tolist()
    oracles.oracle_draft_indices(
        table.tolist(), rows.tolist(), lens, grid, page_size, *window, wanted_indices, wanted_indptr
    )
    assert lists(indices.tensor, indptr.tensor) == [wanted_indices, wanted_indptr]
    for guarded in (indices, indptr):
        guarded.check("generate_draft_decode_kv_indices", "an output")
    if num_steps > 1:  # by blocks of tokens: the grid holds steps times blocks
        again = buffer((num_steps, width), slot_dtype, device)
        sgl_kernel.generate_draft_decode_kv_indices[num_steps * 3, batch_size, topk](
            rows, table, seq_lens, again.tensor, indptr.tensor, seq_lens, *sizes, *window, NUM_STEPS=num_steps
        )
        assert torch.equal(again.tensor, indices.tensor)


@pytest.mark.parametrize("window", [1, 4, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_window_indices(shape, window, slot_dtype, device, backend):
    batch_size, topk, num_steps, page_size = shape
    table, rows, seq_lens = draft_case(*shape, device)
    num_branches = batch_size * topk
    indices = buffer((num_steps, num_branches * window), slot_dtype, device)
    indptr = buffer((num_steps, num_branches + 1), torch.int32, device)
    indptr.tensor[:, 0] = 0
    wanted_indices, wanted_indptr = lists(indices.tensor, indptr.tensor)
    grid = (num_steps, batch_size, topk)
    sgl_kernel.generate_draft_decode_window_kv_indices[grid](
        rows, table, seq_lens, indices.tensor, indptr.tensor, seq_lens.repeat_interleave(topk),
        table.stride(0), num_branches * window, num_branches + 1, 4, 4, 16, page_size, window,
    )  # fmt: skip
    lens = seq_lens[:batch_size].tolist()
    oracles.oracle_window_indices(
        table.tolist(), rows.tolist(), lens, grid, page_size, window, wanted_indices, wanted_indptr
    )
    assert lists(indices.tensor, indptr.tensor) == [wanted_indices, wanted_indptr]
    indices.check("generate_draft_decode_window_kv_indices", "kv_indices")


@pytest.mark.parametrize("grid", [3, (3,), (3, 8)], ids=str)
@pytest.mark.parametrize("has_starts", [False, True])
def test_flat_indices(has_starts, grid, slot_dtype, device, backend):
    values = random_rows(3, 40, device=device)
    lens, starts = torch.randint(0, 20, (2, 3), device=device)
    indptr = torch.zeros(6, dtype=torch.int32, device=device)
    indptr[1:4] = lens.cumsum(0)
    before = indptr.clone()
    indices = buffer((int(lens.sum()) + 5,), slot_dtype, device)
    wanted = indices.tensor.tolist()
    sgl_kernel.create_flashinfer_kv_indices_triton[grid](
        values["req_to_token"], values["req_pool_indices"], lens, indptr, starts if has_starts else None,
        indices.tensor, 40, TOKEN_BLOCK_PARALLEL=grid == (3, 8),
    )  # fmt: skip
    table, rows, lens, bounds = lists(values["req_to_token"], values["req_pool_indices"], lens, before)
    oracles.oracle_flat_indices(table, rows, lens, bounds, starts.tolist() if has_starts else None, wanted)
    assert indices.tensor.tolist() == wanted and torch.equal(indptr, before)
    indices.check("create_flashinfer_kv_indices_triton", "kv_indices")


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_list_for_each_of_the_last_tokens(count, slot_dtype, device, backend):
    """Of any number of them, which for the naive EAGLE is 2; each sees the tokens up to itself."""
    values, lens = random_rows(4, 20, device=device), torch.randint(count, 20, (4,), device=device)
    bounds = buffer((4 * count + 4,), torch.int32, device)
    indices = buffer((count * int(lens.sum()) + 3,), slot_dtype, device)
    sgl_kernel.create_draft_kv_indices[(4,)](
        bounds.tensor, indices.tensor, values["req_pool_indices"], values["req_to_token"], lens, count, 20, 4
    )
    table, rows, lens = lists(values["req_to_token"], values["req_pool_indices"], lens)
    wanted = [table[row][: length - back] for row, length in zip(rows, lens) for back in reversed(range(count))]
    assert bounds.tensor.tolist() == [*itertools.accumulate(map(len, wanted), initial=0)] + [LEFT] * 3
    flat = sum(wanted, [])
    assert indices.tensor.tolist() == flat + [LEFT] * (len(indices.tensor) - len(flat))


def ranges(batch_size, device):
    starts = torch.randint(0, 20, (batch_size,), device=device)
    return starts, starts + torch.randint(0, 9, (batch_size,), device=device)


def test_assign(slot_dtype, device, backend):
    values = random_rows(4, 30, device=device)
    table, (starts, ends) = values["req_to_token"].to(torch.int32), ranges(4, device)
    slots = torch.randint(1000, (int((ends - starts).sum()) + 3,), dtype=slot_dtype, device=device)
    wanted = table.tolist()
    sgl_kernel.assign_req_to_token_pool_func(values["req_pool_indices"], table, starts, ends, slots, 4)
    oracles.oracle_assign(wanted, *lists(values["req_pool_indices"], starts, ends, slots))
    assert table.tolist() == wanted


def test_extend(device, backend):
    values, (starts, ends) = random_rows(4, 30, device=device), ranges(4, device)
    result = sgl_kernel.assign_extend_cache_locs_func(
        values["req_pool_indices"], values["req_to_token"], starts, ends, 4, 9, device
    )
    wanted = oracles.oracle_extend(*lists(values["req_to_token"], values["req_pool_indices"], starts, ends))
    assert result.dtype == torch.int64
    assert result.tolist() == wanted + [-1] * (36 - len(wanted))


@pytest.mark.parametrize("has_more", [False, True])
def test_extend_equally(has_more, device, backend):
    values, (starts, _) = random_rows(4, 30, device=device), ranges(4, device)
    more = {}
    if has_more:
        more = {
            "positions_out": torch.full((5, 9), LEFT, device=device),  # as long as for a larger batch
            "anchor_src": torch.arange(4, device=device),
            "anchor_out": torch.full((4, 3), LEFT, device=device),
        }
    rows, table = values["req_pool_indices"], values["req_to_token"]
    result = sgl_kernel.assign_extend_cache_locs_uniform_func(rows, table, starts, 4, 9, device, **more)
    assert result.tolist() == oracles.oracle_extend(*lists(table, rows, starts, starts + 9))
    if has_more:
        columns = [list(range(start, start + 9)) for start in starts.tolist()]
        assert more["positions_out"].tolist() == [*columns, [LEFT] * 9]
        assert more["anchor_out"].tolist() == [[source, LEFT, LEFT] for source in range(4)]


@pytest.mark.parametrize("has_positions", [False, True])
def test_draft_slots(has_positions, slot_dtype, device, backend):
    values = random_rows(3, 40, device=device)
    seq_lens = torch.randint(0, 20, (3,), device=device)
    slots, positions = buffer((24,), slot_dtype, device), buffer((9,), torch.int64, device)
    result = sgl_kernel.assign_draft_cache_locs_contiguous_func(
        values["req_pool_indices"], values["req_to_token"], seq_lens, slots.tensor, 2, 4,
        positions.tensor if has_positions else None,
    )  # fmt: skip
    assert result is None
    table, rows = lists(values["req_to_token"], values["req_pool_indices"])
    assert slots.tensor.tolist() == oracles.oracle_extend(table, rows, *lists(seq_lens, seq_lens + 8))
    wanted = [seq_len for seq_len in seq_lens.tolist() for _ in range(2)]
    assert positions.tensor.tolist() == (wanted if has_positions else [LEFT] * 6) + [LEFT] * 3


def accepted_case(batch_size, num_tokens, spec_steps, device):
    """Slots of the windows, accept_index and the number of accepted drafts."""
    slots = torch.randperm(batch_size * num_tokens) + 50
    accepted = torch.randint(0, spec_steps + 1, (batch_size,))
    path = torch.full((batch_size, spec_steps + 1), -1)
    for request, count in enumerate(accepted.tolist()):
        drafts = (1 + torch.randperm(num_tokens - 1)[:count]).sort().values
        path[request, : count + 1] = request * num_tokens + torch.cat([drafts.new_zeros(1), drafts])
    return slots.to(device), path.to(device=device, dtype=torch.int32), accepted.to(device)


def test_fill_accept_and_front(slot_dtype, device, backend):
    """What SGLang moves after a verification; its buffers are padded with slot 0."""
    slots, path, accepted = accepted_case(4, 8, 5, device)
    slots = slots.to(slot_dtype)
    source, target = buffer((24,), slot_dtype, device), buffer((24,), slot_dtype, device)
    source.tensor.zero_(), target.tensor.zero_()
    wanted = source.tensor.tolist()
    sgl_kernel.fill_accept_out_cache_loc_func(path, slots, source.tensor, path.numel())
    oracles.oracle_fill_accept(path.flatten().tolist(), slots.tolist(), wanted)
    assert source.tensor.tolist() == wanted
    sgl_kernel.fill_front_out_cache_loc_func(accepted + 1, slots, target.tensor)
    front, _ = oracles.oracle_target(*lists(slots, accepted, 0 * accepted), 8)
    assert target.tensor.tolist() == front + [0] * (24 - len(front))
    for guarded in (source, target):
        guarded.check("fill_*_out_cache_loc_func", "an output")


def test_fill_accept_passes_over_requests_without_a_path(device, backend):
    path = torch.tensor([[-1, -1], [4, 6], [-1, -1], [12, -1]], dtype=torch.int32, device=device)
    result = torch.zeros(8, dtype=torch.int64, device=device)
    sgl_kernel.fill_accept_out_cache_loc_func(path, torch.arange(100, 116, device=device), result, 8)
    assert result.tolist() == [104, 106, 112, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("page_size", [1, 4])
def test_source_target_and_free_slots(page_size, slot_dtype, device, backend):
    """The older way: sizes are summed up on the host, buffers fit exactly."""
    slots, path, accepted = accepted_case(4, 8, 5, device)
    slots, seq_lens = slots.to(slot_dtype), torch.randint(1, 20, (4,), device=device)
    nodes = path[path >= 0].long()
    source, target, num_free = sgl_kernel.get_src_tgt_cache_loc(seq_lens, slots, nodes, accepted, 8, page_size)
    assert source.tolist() == slots[nodes].tolist() and target.tolist() == [0] * len(nodes)
    ends = [-(-(length + count + 1) // page_size) * page_size for length, count in zip(*lists(seq_lens, accepted))]
    assert num_free.tolist() == [max(length + 8 - end, 0) for length, end in zip(seq_lens.tolist(), ends)]
    freed = buffer((int(num_free.sum()),), slot_dtype, device)
    sgl_kernel.get_target_cache_loc[(4,)](target, freed.tensor, accepted, num_free, slots, 8, 8, 4)
    assert (target.tolist(), freed.tensor.tolist()) == oracles.oracle_target(*lists(slots, accepted, num_free), 8)
    freed.check("get_target_cache_loc", "to_free_slots")


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_align(page_size, device, backend):
    seq_lens, mask = torch.randint(1, 40, (9,), device=device), torch.rand(9, 6, device=device) < 0.6
    wanted = mask.flatten().tolist()
    sgl_kernel.align_evict_mask_to_page_size[(9,)](seq_lens, mask.view(-1), page_size, 6, 8)
    oracles.oracle_align(seq_lens.tolist(), wanted, page_size, 6)
    assert mask.flatten().tolist() == wanted


# buffers of a server


def calls_of_a_batch(device):
    """Every function that is told its sizes: its name, its grid, what it reads, what it writes, and its sizes.

    Three requests. What is read and written is in the order of the arguments; so are sizes, which follow. A string
    stands for an argument of the other list.
    """
    table = random_rows(3, 60, device=device)["req_to_token"].to(torch.int32)
    rows, seq_lens = torch.randperm(3, device=device), torch.tensor([7, 19, 3], device=device)
    ends, slots = seq_lens + torch.tensor([2, 0, 4], device=device), torch.randperm(24, device=device) + 50
    accepted, num_free = torch.tensor([2, 0, 3], device=device), torch.tensor([1, 3, 0], device=device)
    path = torch.tensor([[0, 2, 5, -1], [8, -1, -1, -1], [16, 17, 20, 22]], dtype=torch.int32, device=device)
    out = lambda size, dtype=torch.int64: torch.full((size,), LEFT, dtype=dtype, device=device)  # noqa: E731
    bounds, wide = out(7, torch.int32), (60, 99, 9, 4, 4, 16, 1)
    lists = torch.full((2, 80), LEFT, device=device), torch.full((2, 7), LEFT, dtype=torch.int32, device=device)
    mask = torch.rand(24, device=device) < 0.7
    yield "assign_req_to_token_pool_func", None, (rows, table.clone(), seq_lens, ends, slots), (3,), (0, 2, 3, 4)
    yield "assign_extend_cache_locs_func", None, (rows, table, seq_lens, ends), (3, 9, device), (0, 1, 2, 3)
    yield "assign_extend_cache_locs_uniform_func", None, (rows, table, seq_lens), (3, 5, device), (0, 1, 2)
    yield "assign_draft_cache_locs_contiguous_func", None, (rows, table, seq_lens, out(24)), (2, 4), (0, 1, 3)
    yield "fill_accept_out_cache_loc_func", None, (path, slots, out(8)), (12,), (0, 1, 2)
    yield "fill_front_out_cache_loc_func", None, (accepted, slots, out(8)), (), (2,)
    yield "get_target_cache_loc", (3,), (out(8), out(4), accepted, num_free, slots), (8, 8, 4), (0, 1, 2, 3, 4)
    yield "align_evict_mask_to_page_size", (3,), (seq_lens, mask), (4, 8, 8), (0, 1)
    yield "create_draft_kv_indices", (3,), (bounds, out(60), rows, table, seq_lens), (2, 60, 4), (0, 1, 2, 3, 4)
    flat = (table, rows, seq_lens, bounds[:4].clone(), accepted, out(40))
    yield "create_flashinfer_kv_indices_triton", (3,), flat, (60,), (0, 1, 2, 3, 4, 5)
    drafted = (rows, table, seq_lens, *lists, seq_lens.repeat(2))
    yield "generate_draft_decode_kv_indices", (2, 3, 2), drafted, (*wide, 5, 2), (0, 1, 2, 3, 4, 5)
    yield "generate_draft_decode_window_kv_indices", (2, 3, 2), drafted, (*wide, 4), (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("number", range(12))
def test_what_lies_behind_a_batch_is_neither_read_nor_written(number, device, backend):
    """All buffers that may be longer are, with numbers behind the batch that would be felt."""
    name, grid, tensors, sizes, longer = list(calls_of_a_batch(device))[number]
    function = getattr(sgl_kernel, name) if grid is None else getattr(sgl_kernel, name)[grid]
    exact = [tensor.clone() for tensor in tensors]
    result = function(*exact, *sizes)
    given = [torch.cat([each, each.flip(0)]) if place in longer else each.clone() for place, each in enumerate(tensors)]
    for place, tensor in enumerate(given):
        if place in longer and tensor.dtype != torch.bool:
            tensor[len(tensors[place]) :] += 1
    before = [tensor.clone() for tensor in given]
    again = function(*given, *sizes)
    assert (result is None) == (again is None) and (result is None or torch.equal(result, again))
    for tensor, wanted, kept in zip(given, exact, before):
        assert torch.equal(tensor[: len(wanted)], wanted)
        assert torch.equal(tensor[len(wanted) :], kept[len(wanted) :])
    assert result is not None or any(not torch.equal(one, other) for one, other in zip(tensors, exact))


# the interface

SIGNATURES = {
    "generate_draft_decode_kv_indices": "req_pool_indices req_to_token paged_kernel_lens kv_indices kv_indptr "
    "positions row_stride kv_indices_stride kv_indptr_stride bs_upper iter_upper num_tokens_upper page_size "
    "window_size=0 sink_size=0 NUM_STEPS=0 ENTRY_PAGE_SIZE=1 v2p=None TRANSLATE=False",
    "generate_draft_decode_window_kv_indices": "req_pool_indices req_to_token paged_kernel_lens window_kv_indices "
    "window_kv_indptr positions row_stride kv_indices_stride kv_indptr_stride bs_upper iter_upper num_tokens_upper "
    "page_size window ENTRY_PAGE_SIZE=1 v2p=None TRANSLATE=False",
    "create_flashinfer_kv_indices_triton": "req_to_token_ptr req_pool_indices_ptr page_kernel_lens_ptr kv_indptr "
    "kv_start_idx kv_indices_ptr req_to_token_ptr_stride ENTRY_PAGE_SIZE=1 TOKEN_BLOCK_PARALLEL=False "
    "token_mapping=None",
    "create_draft_kv_indices": "kv_indptr kv_indices req_pool req_to_token seq_lens expand_factor row_stride "
    "num_tokens_upper",
    "assign_req_to_token_pool_func": "req_pool_indices req_to_token start_offset end_offset out_cache_loc batch_size",
    "assign_extend_cache_locs_func": "req_pool_indices req_to_token start_offset end_offset batch_size draft_token_num "
    "device",
    "assign_extend_cache_locs_uniform_func": "req_pool_indices req_to_token start_offset batch_size draft_token_num "
    "device full_v2p=None swa_v2p=None full_out=None swa_out=None page_size=1 positions_out=None anchor_src=None "
    "anchor_out=None",
    "assign_draft_cache_locs_contiguous_func": "req_pool_indices req_to_token seq_lens out_cache_loc topk num_cols "
    "positions=None mrope=None",
    "fill_accept_out_cache_loc_func": "accept_index out_cache_loc accept_out_cache_loc size",
    "fill_front_out_cache_loc_func": "num_front out_cache_loc front_out_cache_loc",
    "get_src_tgt_cache_loc": "seq_lens out_cache_loc accept_index accept_length draft_token_num page_size",
    "get_target_cache_loc": "tgt_cache_loc to_free_slots accept_length to_free_num_slots out_cache_loc "
    "num_verify_tokens num_verify_tokens_upper bs_upper",
    "align_evict_mask_to_page_size": "seq_lens evict_mask page_size num_draft_tokens BLOCK_SIZE",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_and_order_of_arguments(name):
    function = getattr(sgl_kernel, name)
    parameters = list(inspect.signature(getattr(function, "__wrapped__", function)).parameters.values())
    if hasattr(function, "__wrapped__"):  # a kernel there: called with its grid in brackets
        assert parameters.pop(0).name == "grid"
    described = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert described == SIGNATURES[name].split()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ENTRY_PAGE_SIZE": 16}, "ENTRY_PAGE_SIZE must be 1, since tables of pages are not supported, got 16"),
        ({"TRANSLATE": True}, "a table that translates slots must not be given"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused(options, message, device):
    sizes = (32, 9, 5, 2, 2, 4, 1)
    integers = torch.zeros(1, 9, dtype=torch.int32, device=device)
    values = (integers[0, :2], example_rows(0, 1, device=device)["req_to_token"], integers[0, :2], integers, integers)
    with pytest.raises(ValueError, match="sglang_kv_indices.generate_draft_decode_kv_indices: " + message):
        sgl_kernel.generate_draft_decode_kv_indices[1, 2, 2](*values, integers, *sizes, **options)
    with pytest.raises(ValueError, match="assign_draft_cache_locs_contiguous_func: mrope must be None"):
        sgl_kernel.assign_draft_cache_locs_contiguous_func(*values[:3], integers, 2, 2, mrope=integers)


def test_empty_batches(device, backend):
    integers = torch.zeros(0, dtype=torch.int64, device=device)
    table = example_rows(device=device)["req_to_token"]
    sgl_kernel.assign_req_to_token_pool_func(integers, table, integers, integers, integers, 0)
    assert sgl_kernel.assign_extend_cache_locs_func(integers, table, integers, integers, 0, 9, device).numel() == 0
    sgl_kernel.fill_accept_out_cache_loc_func(integers, integers, integers.clone(), 0)
    sgl_kernel.align_evict_mask_to_page_size[(0,)](integers, integers.bool(), 4, 6, 8)
    bounds = torch.full((1,), LEFT, dtype=torch.int32, device=device)
    sgl_kernel.create_flashinfer_kv_indices_triton[(0,)](table, integers, integers, bounds, None, integers, 32)
    assert bounds.tolist() == [0]


@pytest.mark.gpu
def test_captured_without_waiting(device):
    """One graph around a round of them: none reads a tensor on the host."""
    values = random_rows(4, 60, device=device)
    rows, table = values["req_pool_indices"], values["req_to_token"].to(torch.int32)
    seq_lens = torch.randint(1, 20, (4,), device=device)
    slots, path, accepted = accepted_case(4, 8, 3, device)
    drafts, moved = (
        torch.zeros(24, dtype=torch.int64, device=device),
        torch.zeros(2, 16, dtype=torch.int64, device=device),
    )
    indices = torch.zeros(3, 400, dtype=torch.int64, device=device)
    indptr = torch.zeros(3, 9, dtype=torch.int32, device=device)

    def run():
        sgl_kernel.assign_draft_cache_locs_contiguous_func(rows, table, seq_lens, drafts, 2, 3)
        sgl_kernel.generate_draft_decode_kv_indices[3, 4, 2](
            rows, table, seq_lens, indices, indptr, seq_lens, 60, 400, 9, 4, 4, 8, 1
        )
        sgl_kernel.assign_extend_cache_locs_uniform_func(rows, table, seq_lens, 4, 8, device)
        sgl_kernel.fill_accept_out_cache_loc_func(path, slots, moved[0], path.numel())
        sgl_kernel.fill_front_out_cache_loc_func(accepted + 1, slots, moved[1])

    replay_in_graph(run)
    assert drafts.tolist() == oracles.oracle_extend(*lists(table, rows, seq_lens, seq_lens + 6))
    assert moved[0, : len(path[path >= 0])].tolist() == slots[path[path >= 0].long()].tolist()
