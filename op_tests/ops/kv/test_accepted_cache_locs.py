"""accepted_cache_locs against its reference: worked examples, ragged paths, frees by pages, malformed paths."""

from __future__ import annotations

import itertools

import pytest
import torch

import eagle_kernels
from op_tests.harness import check_operation

from .cases import BATCH_SIZES, NUM_STEPS, PAGE_SIZES, check_buffers

# (batch, nodes, spec_steps, page_size, longest prefix)
SHAPES = [
    (1, 1, 0, 1, 5),
    (3, 8, 3, 1, 20),
    (2, 16, 7, 4, 30),
    (3, 5, 9, 16, 40),
    (1, 300, 299, 64, 70),
    (2, 64, 8, 256, 600),
]

# which of the optional arguments are given
FORMS = {
    "path and frees": ("accept_token_num", "accept_index", "seq_lens"),
    "path alone": ("accept_index",),
    "chain": ("accept_token_num", "seq_lens"),
    "counted frees": ("accept_token_num", "accept_index", "free_token_num"),
    "counted frees of a path alone": ("accept_index", "free_token_num"),
    "chain without frees": ("accept_token_num",),
}


def make(
    batch_size, num_nodes, spec_steps, page_size, longest, form="path and frees", *, dtype=torch.int64, device="cpu"
):
    accept_index = torch.full((batch_size, spec_steps + 1), -1)
    accept_token_num = torch.randint(0, min(spec_steps, num_nodes - 1) + 1, (batch_size,))
    for request, accepted in enumerate(accept_token_num.tolist()):
        path = (1 + torch.randperm(num_nodes - 1)[:accepted]).sort().values
        accept_index[request, : accepted + 1] = request * num_nodes + torch.cat([path.new_zeros(1), path])
    values = {
        "accept_token_num": accept_token_num,
        "accept_index": accept_index,
        "seq_lens": torch.randint(0, longest + 1, (batch_size,)),
        "free_token_num": torch.randint(0, num_nodes + 1, (batch_size,)),
    }
    values = {"cache_locs": torch.randperm(batch_size * num_nodes) + 50} | {name: values[name] for name in FORMS[form]}
    values = {name: value.to(device=device, dtype=dtype) for name, value in values.items()}
    return values | {"num_verify_tokens": num_nodes, "page_size": page_size}


def ahead_of_time_cases():
    yield "int64", make(3, 8, 3, 4, 20)
    yield "int32", make(3, 8, 3, 4, 20, dtype=torch.int32)
    for form in ("path alone", "chain", "counted frees", "chain without frees"):
        yield form, make(3, 8, 3, 4, 20, form)


def size_sweep():
    for batch_size, longest in itertools.product((1, 2, 3, 16, 17, 64), (1, 100, 1024)):
        yield make(batch_size, 8, 3, 16, longest)


def wrong_calls():
    yield (
        make(3, 8, 3, 4, 20) | {"free_token_num": torch.zeros(3, dtype=torch.int64)},
        "free_token_num must not be given with seq_lens",
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, form, device):
    dtype = torch.int32 if shape[0] == 2 else torch.int64
    check_operation("kv.accepted_cache_locs", make(*shape, form, dtype=dtype, device=device), case=f"{shape} {form}")


@pytest.mark.parametrize("num_steps", NUM_STEPS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pairwise(num_steps, page_size, device):
    for topk, batch_size in ((1, 3), (4, 1)):
        num_nodes = 1 + topk * num_steps
        check_operation("kv.accepted_cache_locs", make(batch_size, num_nodes, num_steps, page_size, 300, device=device))


def test_more_paths_than_a_tile(device):
    check_operation("kv.accepted_cache_locs", make(130, 5, 3, 4, 20, device=device))


def test_worked_example(device):
    """SGLang's: four nodes a request at slots 100..107; it pads with slot 0, which is its dummy."""
    cache_locs = torch.arange(100, 108, device=device)
    paths = torch.tensor([[0, 2, 3], [4, 6, -1]], device=device)
    for accepted in (None, torch.tensor([2, 1], device=device)):
        result = eagle_kernels.raw.accepted_cache_locs(cache_locs, accepted, paths, num_verify_tokens=4)
        assert result.target_locs.tolist() == [100, 101, 102, 104, 105, -1]
        assert result.source_locs.tolist() == [100, 102, 103, 104, 106, -1]
        assert result.path_indptr.tolist() == [0, 3, 5]
        assert result.free_locs.numel() == 0 and result.overflow.tolist() == [0, 0]


def test_worked_example_of_free_slots(device):
    """Pages of 4: five tokens and two accepted end in the page of tokens 4..7, so of tokens 5..10 the last three go."""
    result = eagle_kernels.raw.accepted_cache_locs(
        torch.arange(100, 112, device=device), torch.tensor([1, 1], device=device),
        torch.tensor([[0, 3], [6, 8]], device=device), torch.tensor([5, 6], device=device),
        num_verify_tokens=6, page_size=4,
    )  # fmt: skip
    assert result.free_locs.tolist() == [103, 104, 105, 108, 109, 110, 111] + [-1] * 5
    assert result.free_indptr.tolist() == [0, 3, 7]
    assert result.source_locs.tolist() == [100, 103, 106, 108]
    assert result.target_locs.tolist() == [100, 101, 106, 107]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_frees_are_what_an_aligned_mask_evicts(page_size, device):
    """Of a chain both ways of telling what is free agree."""
    values = make(6, 9, 8, page_size, 30, "chain", device=device)
    freed = eagle_kernels.raw.accepted_cache_locs(**values)
    mask = torch.arange(9, device=device)[None] > values["accept_token_num"][:, None]
    eagle_kernels.raw.align_evict_mask_to_page_size(values["seq_lens"], mask, page_size=page_size)
    assert freed.free_locs[: int(mask.sum())].tolist() == values["cache_locs"].view(6, 9)[mask].tolist()
    assert (freed.free_locs[int(mask.sum()) :] == -1).all()


@pytest.mark.parametrize("page_size", [1, 4])
def test_moving_makes_the_path_contiguous(page_size, device):
    """A mover that goes through the pairs in order; what is kept then holds the path, and nothing kept is freed."""
    values = make(4, 12, 6, page_size, 30, device=device)
    listed = eagle_kernels.raw.accepted_cache_locs(**values)
    before = torch.randn(200, device=device)
    pool = before.clone()
    for source, target in zip(listed.source_locs.tolist(), listed.target_locs.tolist()):
        if source >= 0:
            pool[target] = pool[source]
    slots, freed = values["cache_locs"].view(4, 12), set(listed.free_locs.tolist())
    for request, accepted in enumerate(values["accept_token_num"].tolist()):
        nodes = values["accept_index"][request, : accepted + 1] - 12 * request
        assert torch.equal(pool[slots[request, : accepted + 1]], before[slots[request, nodes]])
        assert not freed & set(slots[request, : accepted + 1].tolist())


@pytest.mark.parametrize("capacities", [(0, 0), (1, 2), (6, 4), (7, 40)], ids=str)
def test_overflow_is_told_and_nothing_is_overrun(capacities, device):
    values = make(3, 6, 4, 1, 20, device=device)
    values["accept_token_num"].copy_(torch.tensor([1, 3, 0]))
    values["accept_index"].copy_(torch.tensor([[0, 2, -1, -1, -1], [6, 7, 9, 10, -1], [12, -1, -1, -1, -1]]))
    values |= dict(zip(("capacity", "free_capacity"), capacities))
    result, _ = check_operation("kv.accepted_cache_locs", values, case=str(capacities))
    assert result.overflow.tolist() == [need if need > room else 0 for need, room in zip((7, 11), capacities)]


MALFORMED = {
    "indices of another request": lambda v: v["accept_index"].add_(8),
    "indices far out of range": lambda v: v["accept_index"].fill_(2**40),
    "negative indices": lambda v: v["accept_index"].fill_(-(2**63)),
    "a dead request": lambda v: v["accept_index"][1].fill_(-1),
    "holes in the path": lambda v: v["accept_index"][:, 1].fill_(-1),
    "more accepted than the path holds": lambda v: v["accept_token_num"].fill_(2**40),
    "negative counts": lambda v: v["accept_token_num"].fill_(-7),
    "no slots": lambda v: v["cache_locs"].fill_(-1),
    "slots below 0": lambda v: v["cache_locs"][::2].fill_(-9),
    "negative lengths": lambda v: v["seq_lens"].fill_(-4),
    "huge lengths": lambda v: v["seq_lens"].fill_(2**30),
    "nodes that are named twice": lambda v: v["accept_index"].copy_(torch.tensor([[0, 5, 5, 5], [8, 9, 9, 8]])),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_malformed_paths_stay_in_bounds(fault, device):
    values = make(2, 8, 3, 4, 20, device=device)
    MALFORMED[fault](values)
    check_operation("kv.accepted_cache_locs", values, case=fault)


@pytest.mark.parametrize("count", [-3, 9, 2**40])
def test_malformed_counts_of_free_slots(count, device):
    values = make(2, 8, 3, 4, 20, "counted frees", device=device)
    values["free_token_num"].fill_(count)
    check_operation("kv.accepted_cache_locs", values, case=str(count))


def test_paths_longer_than_trees(device):
    """More path entries than nodes: there are no targets for those past the last slot."""
    values = make(2, 3, 7, 1, 20, "path alone", device=device)
    values["accept_index"].copy_(torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1], [3, 4, 5, 5, 5, 5, 5, 5]]))
    check_operation("kv.accepted_cache_locs", values, case="long")


def test_paths_without_columns(device):
    values = make(2, 3, 2, 1, 20, device=device)
    values["accept_index"] = values["accept_index"][:, :0]
    result, _ = check_operation("kv.accepted_cache_locs", values, case="none")
    assert result.path_indptr.tolist() == [0, 0, 0] and result.free_indptr.tolist() == [0, 0, 0]


@pytest.mark.parametrize("keep_unused", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_into_buffers(dtype, keep_unused, device):
    fields = ("source_locs", "target_locs", "free_locs")
    check_buffers("kv.accepted_cache_locs", make(3, 8, 3, 4, 20, device=device), dtype, fields, keep_unused)


@pytest.mark.parametrize("form", ["path and frees", "chain"])
def test_empty_batch(form, device):
    values = make(0, 8, 3, 4, 20, form, device=device) | {"capacity": 5, "free_capacity": 5}
    result, _ = check_operation("kv.accepted_cache_locs", values, case="empty")
    assert result.path_indptr.tolist() == [0] and (result.free_locs == -1).all()


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("num_nodes", [2, 8, 64, 256])
@pytest.mark.parametrize("num_steps", NUM_STEPS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_full_cross(num_nodes, num_steps, page_size, batch_size, device):
    for form in FORMS:
        check_operation(
            "kv.accepted_cache_locs", make(batch_size, num_nodes, num_steps, page_size, 700, form, device=device)
        )
