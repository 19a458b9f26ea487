"""move_accepted_kv against its reference: ragged paths, overlapping moves, every dtype, and nothing else moved."""

import pytest
import torch

from op_tests.harness import check_operation, sweep
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


def wrong_calls():
    values = make(1, 4, 1, 32, torch.float16, 8, 3, [5, 6])
    rule = "v_cache must have dtype torch.float16 like k_cache, got torch.bfloat16"
    yield values | {"v_cache": values["v_cache"].bfloat16()}, rule


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
