"""move_accepted_kv against its reference: ragged paths, overlapping moves, every dtype, and nothing else moved."""

import functools
import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.kv.move_accepted_kv import contract
from eagle_kernels.reference.ops.kv.move_accepted_kv import move_accepted_kv as one_by_one
from eagle_kernels.runtime import check
from op_tests.harness import check_operation, sweep
from op_tests.harness.graphs import replay_in_graph
from op_tests.harness.operation import as_bits
from op_tests.harness.pools import with_pools

PATH = "kv.move_accepted_kv"
# (layers, page_size, kv heads, head_dim, dtype, nodes, spec_steps, seq_lens)
SHAPES = [
    (1, 1, 1, 16, torch.float32, 4, 3, [0, 5]),
    (2, 16, 2, 80, torch.float16, 8, 3, [15, 16, 0]),
    (2, 4, 3, 96, torch.bfloat16, 16, 7, [3, 9]),
    (1, 64, 1, 33, torch.uint8, 33, 5, [60]),
    (1, 256, 8, 128, torch.float16, 64, 8, [250, 1]),
    (1, 32, 8, 256, torch.float32, 8, 4, [30]),  # rows wider than one block
    (2, 16, 2, 64, torch.float8_e4m3fn, 8, 3, [7, 40]),
    (2, 16, 4, 40, torch.int8, 8, 3, [7, 40]),
]


def random_bits(shape, dtype, device):
    """Every bit pattern, NaN included: a move must not look at what it moves."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype).to(device)


def make(num_layers, page_size, num_kv_heads, head_dim, dtype, num_nodes, spec_steps, seq_lens, *, is_strided=False,
         index_dtype=torch.int32, device="cpu"):  # fmt: skip
    batch_size = len(seq_lens)
    counts = [-(-(seq_len + num_nodes) // page_size) for seq_len in seq_lens]
    num_pages = sum(counts) + 3
    pool = random_bits((num_layers, num_pages, 2, page_size, num_kv_heads, head_dim), dtype, device)
    k_cache, v_cache = pool[:, :, 0], pool[:, :, 1]
    block_table = torch.full((batch_size, max([1, *counts]) + 2), -1, dtype=index_dtype)
    order = torch.randperm(num_pages)
    accept_index = torch.full((batch_size, spec_steps + 1), -1, dtype=index_dtype)
    accept_token_num = torch.zeros(batch_size, dtype=index_dtype)
    first = 0
    for request, count in enumerate(counts):
        block_table[request, :count] = order[first : first + count]
        first += count
        accepted = int(torch.randint(0, min(spec_steps, num_nodes - 1) + 1, ()))
        path = (1 + torch.randperm(num_nodes - 1)[:accepted]).sort().values
        accept_index[request, : accepted + 1] = request * num_nodes + torch.cat([torch.zeros(1), path])
        accept_token_num[request] = accepted
    return {
        "k_cache": k_cache if is_strided else k_cache.contiguous(),
        "v_cache": v_cache if is_strided else v_cache.contiguous(),
        "block_table": block_table.to(device)[:, :-1] if is_strided else block_table.to(device),
        "seq_lens": torch.tensor(seq_lens, dtype=index_dtype, device=device),
        "accept_index": accept_index.to(device),
        "accept_token_num": accept_token_num.to(device),
        "num_verify_tokens": num_nodes,
    }


def set_path(values, request, path):
    """Request accepts exactly these nodes after the root."""
    row = torch.full_like(values["accept_index"][request], -1)
    row[: len(path) + 1] = request * values["num_verify_tokens"] + torch.tensor([0, *path], device=row.device)
    values["accept_index"][request] = row
    values["accept_token_num"][request] = len(path)


def ahead_of_time_cases():
    yield "bfloat16", make(2, 16, 8, 128, torch.bfloat16, 8, 3, [20])
    yield "packed", with_pools(make(2, 16, 8, 128, torch.bfloat16, 8, 3, [20]), "lpthw")
    yield "float32 int64", make(2, 1, 2, 80, torch.float32, 8, 3, [20], index_dtype=torch.int64)
    # entries that are no caches: who runs a case does so with copies of its tensors
    no_caches = {"cache_addresses": torch.zeros(2, 3, dtype=torch.int64)}
    yield "addresses", make(1, 16, 8, 128, torch.bfloat16, 8, 3, [20]) | no_caches


def wrong_calls():
    values = make(1, 4, 1, 32, torch.float16, 8, 3, [5, 6])
    rule = "v_cache must have dtype torch.float16 like k_cache, got torch.bfloat16"
    yield values | {"v_cache": values["v_cache"].bfloat16()}, rule
    two = make(2, 4, 1, 32, torch.float16, 8, 3, [5, 6])
    table = torch.zeros(2, 2, dtype=torch.int64)
    yield two | {"cache_addresses": table}, r"k_cache must have one layer beside cache_addresses, got \[2, "
    yield values | {"cache_addresses": table.int()}, "cache_addresses must have dtype int64, got int32"
    yield values | {"cache_addresses": table[:1]}, r"cache_addresses must have shape \[2, C\], got \[1, 2\]"


size_sweep = sweep(
    lambda batch_size, longest: make(1, 16, 1, 16, torch.float16, 8, 3, [longest] * batch_size), (1, 100, 1024)
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, device):
    check_operation(PATH, make(*shape, device=device), case=str(shape))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("path", [
    list(range(2, 16)),  # a long chain shifted by one: every row is source, then destination
    list(range(1, 16)),  # in place already
    [15],
    [1, 2, 3, 9, 10],
    [3, 4, 5, 6, 7, 8, 9, 10, 11],
    [],
], ids=str)  # fmt: skip
def test_overlapping_moves(path, page_size, device):
    values = make(1, page_size, 1, 32, torch.float32, 16, 15, [6, 1], device=device)
    nodes = values["k_cache"].clone()
    for request in range(2):
        set_path(values, request, path)
    check_operation(PATH, values, case=str(path))
    for request, seq_len in enumerate((6, 1)):
        for depth, node in enumerate([0, *path]):
            rows = []
            for cache, slot in ((values["k_cache"], seq_len + depth), (nodes, seq_len + node)):
                page = int(values["block_table"][request, slot // page_size])
                rows.append(as_bits(cache[0, page, slot % page_size]))
            assert torch.equal(*rows), f"depth {depth} does not hold node {node}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_latents_move_as_their_two_halves(dtype, device):
    """A row of 512 + 64 elements that is key and value in one: the halves of it are what moves."""
    values = make(2, 16, 1, 576, dtype, 8, 3, [15, 40], device=device)
    latents = values["k_cache"].clone()
    check_operation(PATH, values | {"v_cache": latents.clone()}, case="whole")
    halves = latents.unflatten(-1, (2, 288)).squeeze(3)
    check_operation(PATH, values | {"k_cache": halves[..., :1, :], "v_cache": halves[..., 1:, :]}, case="halves")
    assert torch.equal(as_bits(latents), as_bits(values["k_cache"]))


# caches that are no one tensor


def bytes_of(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.uint8)


LAYOUTS = {  # what a layer allocates, of pages, slots, heads and elements, and its keys and values
    "two tensors": lambda *sizes: (bytes_of(*sizes), bytes_of(*sizes)),
    "heads": lambda pages, slots, heads, size: bytes_of(pages, slots, heads, 2 * size).split(size, -1),
    "pages": lambda pages, *sizes: bytes_of(pages, 2, *sizes).unbind(1),
    "heads outside of slots": lambda pages, slots, heads, size: (
        bytes_of(pages, heads, slots, 2 * size).transpose(1, 2).split(size, -1)
    ),
}  # fmt: skip


@pytest.fixture(params=["triton", "reference"])
def backend(request, device, monkeypatch):
    if request.param == "reference" and device.type != "cpu":
        pytest.skip("the reference reads addresses of the CPU alone")
    monkeypatch.setenv("EAGLE_KERNELS_BACKEND", request.param)


def apart(values: dict, layout: str = "two tensors") -> tuple[list, list]:
    """The layers of a pool of `make`, each where it was allocated by itself, with others in between."""
    sides, between = ([], []), []
    for layers in zip(values["k_cache"], values["v_cache"]):
        with layers[0].device:
            raw = LAYOUTS[layout](*layers[0].shape[:3], layers[0].shape[3] * layers[0].itemsize)
        for side, cache, layer in zip(sides, raw, layers):
            side.append(cache.view(layer.dtype).copy_(layer))
        between.append(torch.empty(1000 + 16 * len(between)))
    return sides


def in_one_launch(values: dict, k_caches: list, v_caches: list, **changes) -> dict:
    """The arguments of a call for these caches, of which the last ones show the layout."""
    table = eagle_kernels.cache_addresses(k_caches, v_caches)
    caches = {"k_cache": k_caches[-1][None], "v_cache": v_caches[-1][None], "cache_addresses": table}
    return values | caches | changes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [
    (3, 4, 2, 16, torch.float16, 8, 4, [6, 0, 9]),
    (5, 1, 1, 33, torch.uint8, 16, 7, [3]),
    (2, 16, 8, 256, torch.float32, 8, 4, [14, 30]),  # rows wider than one block
    (1, 3, 4, 40, torch.float8_e4m3fn, 12, 5, [7, 40]),
    (2, 2, 3, 96, torch.bfloat16, 33, 6, [1]),
], ids=str)  # fmt: skip
def test_caches_at_addresses_move_as_a_pool_does(layout, shape, device, backend):
    values = make(*shape, device=device)
    k_caches, v_caches = apart(values, layout)
    one_by_one(**values)
    eagle_kernels.move_accepted_kv(**in_one_launch(values, k_caches, v_caches))
    for layer, number in itertools.product(range(shape[0]), range(2)):
        moved, wanted = (k_caches, v_caches)[number][layer], values[("k_cache", "v_cache")[number]][layer]
        assert torch.equal(as_bits(moved), as_bits(wanted)), f"{'keys' if number == 0 else 'values'} of layer {layer}"


@pytest.mark.parametrize("path", [[2, 3, 4, 5, 6, 7], [1, 2, 3], [7], []], ids=str)
def test_overlapping_moves_at_addresses(path, device, backend):
    values = make(3, 2, 1, 16, torch.float32, 8, 7, [5, 0, 8], device=device)
    for request in range(3):
        set_path(values, request, path[request:])
    k_caches, v_caches = apart(values)
    one_by_one(**values)
    eagle_kernels.move_accepted_kv(**in_one_launch(values, k_caches, v_caches))
    assert torch.equal(as_bits(torch.stack(k_caches)), as_bits(values["k_cache"]))
    assert torch.equal(as_bits(torch.stack(v_caches)), as_bits(values["v_cache"]))


def test_only_what_the_table_names_moves(device, backend):
    """Neither the caches that show the layout nor entries that are none."""
    values = make(4, 4, 1, 16, torch.float16, 8, 3, [5, 6], device=device)
    set_path(values, 0, [2, 5])
    k_caches, v_caches = apart(values)
    before = [cache.clone() for cache in (*k_caches, *v_caches)]
    call = in_one_launch(values, k_caches, v_caches)
    call["cache_addresses"][0, 1], call["cache_addresses"][1, 2], call["cache_addresses"][:, 3] = 0, -(2**63), -1
    eagle_kernels.move_accepted_kv(**call)
    is_moved = [not torch.equal(as_bits(one), as_bits(was)) for one, was in zip((*k_caches, *v_caches), before)]
    assert is_moved == [True, False, True, False, True, True, False, False]


def test_a_table_of_nothing(device, backend):
    values = make(1, 4, 1, 16, torch.float16, 8, 3, [5, 6], device=device)
    before = values["k_cache"].clone()
    table = torch.empty(2, 0, dtype=torch.int64, device=device)
    eagle_kernels.move_accepted_kv(**values, cache_addresses=table)
    assert torch.equal(as_bits(values["k_cache"]), as_bits(before))


def test_caches_that_do_not_begin_at_multiples_of_16_bytes(device, backend):
    values = make(2, 4, 2, 20, torch.float16, 8, 3, [5, 6], device=device)
    set_path(values, 1, [3, 4])
    sides = []
    for pool in (values["k_cache"], values["v_cache"]):
        moved = [torch.zeros(layer.numel() + 1, dtype=layer.dtype, device=device)[1:].view_as(layer) for layer in pool]
        sides.append([cache.copy_(layer) for cache, layer in zip(moved, pool)])
    one_by_one(**values)
    eagle_kernels.move_accepted_kv(**in_one_launch(values, *sides))
    assert torch.equal(as_bits(torch.stack(sides[0])), as_bits(values["k_cache"]))
    assert torch.equal(as_bits(torch.stack(sides[1])), as_bits(values["v_cache"]))


def test_the_reference_reads_no_addresses_of_other_devices():
    values = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in make(1, 4, 1, 16, torch.float16, 8, 3, [5]).items()
    }
    values["cache_addresses"] = torch.zeros(2, 1, dtype=torch.int64, device="meta")
    assert contract(values) is None
    with pytest.raises(ValueError, match="cache_addresses must be None for the reference, .*, got meta"):
        contract(check.OfReference(values))


def test_pages_at_addresses_that_are_2_to_the_31_rows_apart(device, backend):
    """Memory of which little is ever touched."""
    stride = 4 * (2**31 + 8)
    memory = torch.empty(stride + 64, dtype=torch.uint8, device=device)
    caches = [memory.as_strided((2, 1, 1, 4), (stride, 4, 4, 1), 16 * at) for at in range(4)]
    for number, cache in enumerate(caches):
        cache[0], cache[1] = 0, number + 1
    ints = functools.partial(torch.tensor, device=device)
    given = {"block_table": ints([[0, 1]]), "seq_lens": ints([0]), "accept_index": ints([[1]])}
    values = given | {"accept_token_num": ints([0]), "num_verify_tokens": 2}
    eagle_kernels.move_accepted_kv(**in_one_launch(values, caches[:2], caches[2:]))
    assert [cache.flatten().tolist() for cache in caches] == [[number] * 8 for number in range(1, 5)]


@pytest.mark.gpu
def test_a_graph_moves_at_addresses(device):
    values = make(3, 4, 2, 16, torch.float16, 8, 4, [6, 0, 9], device=device)
    k_caches, v_caches = apart(values)
    before = [[cache.clone() for cache in side] for side in (k_caches, v_caches)]
    call = in_one_launch(values, k_caches, v_caches)

    def restore():
        for side, was in zip((k_caches, v_caches), before):
            for cache, content in zip(side, was):
                cache.copy_(content)

    replay_in_graph(lambda: eagle_kernels.raw.move_accepted_kv(**call), change=restore)
    one_by_one(**values)
    assert torch.equal(as_bits(torch.stack(k_caches)), as_bits(values["k_cache"]))
    assert torch.equal(as_bits(torch.stack(v_caches)), as_bits(values["v_cache"]))
