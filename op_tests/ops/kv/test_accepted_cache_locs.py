"""accepted_cache_locs: worked examples, ragged paths, frees by pages, malformed paths."""

import pytest
import torch

import eagle_kernels
from op_tests.harness import sweep

# (batch, nodes, spec_steps, page_size, longest prefix)
SHAPES = [(1, 1, 0, 1, 5), (3, 8, 3, 1, 20), (2, 16, 7, 4, 30), (3, 5, 9, 16, 40), (1, 300, 299, 64, 70),
          (2, 64, 8, 256, 600)]  # fmt: skip

# which of the optional arguments are given
FORMS = {
    "path and frees": ("accept_token_num", "accept_index", "seq_lens"),
    "path alone": ("accept_index",),
    "chain": ("accept_token_num", "seq_lens"),
    "counted frees": ("accept_token_num", "accept_index", "free_token_num"),
    "counted frees of a path alone": ("accept_index", "free_token_num"),
    "chain without frees": ("accept_token_num",),
}


def make(batch_size, num_nodes, spec_steps, page_size, longest, form="path and frees", *, dtype=torch.int64,
         device="cpu"):  # fmt: skip
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


size_sweep = sweep(lambda batch_size, longest: make(batch_size, 8, 3, 16, longest), (1, 100, 1024))


def wrong_calls():
    counts = {"free_token_num": torch.zeros(3, dtype=torch.int64)}
    yield make(3, 8, 3, 4, 20) | counts, "free_token_num must not be given with seq_lens"


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
    """Of a chain both say the same of what is free."""
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
