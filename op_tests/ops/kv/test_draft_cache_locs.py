"""draft_cache_locs: worked examples, the copies of partial pages, capacity, dead rows."""

import sys

import pytest
import torch

import eagle_kernels
from op_tests.harness import sweep

from .cases import example_rows, random_rows

# (batch, topk, num_steps, page_size, longest prefix)
SHAPES = [(1, 1, 1, 1, 5), (3, 1, 4, 16, 40), (2, 4, 3, 1, 20), (3, 4, 5, 4, 30), (2, 2, 64, 16, 33),
          (1, 3, 6, 600, 900)]  # fmt: skip


def make(batch_size, topk, num_steps, page_size, longest, *, dtype=torch.int64, device="cpu", **options):
    columns = longest + topk * (num_steps + 2 * page_size)
    return random_rows(batch_size, columns, dtype=dtype, device=device) | options | {
        "seq_lens": torch.randint(0, longest + 1, (batch_size,)).to(device=device, dtype=dtype),
        "topk": topk, "num_steps": num_steps, "page_size": page_size,
    }  # fmt: skip


def ahead_of_time_cases():
    yield "int64 pages", make(2, 4, 5, 16, 20)
    yield "int32 pages, given capacity", make(2, 8, 6, 16, 20, dtype=torch.int32, capacity=33)
    yield "chain", make(2, 1, 3, 16, 20, dtype=torch.int32, is_step_major=True)


size_sweep = sweep(lambda batch_size, longest: make(batch_size, 4, 3, 16, longest), (1, 100, 1024))


def test_worked_example(device):
    """SGLang's: rows 1000.. and 2000.., lengths 3 and 2, two branches, two steps."""
    rows, seq_lens = example_rows(0, 1, device=device), torch.tensor([3, 2], device=device)
    sizes = {"seq_lens": seq_lens, "topk": 2, "num_steps": 2}
    result = eagle_kernels.raw.draft_cache_locs(**rows, **sizes)
    assert result.cache_locs.flatten().tolist() == [1003, 1004, 1005, 1006, 2002, 2003, 2004, 2005]
    assert result.positions.tolist() == [3, 3, 2, 2]
    assert result.source_locs.numel() == 0 and result.copy_indptr.tolist() == [0, 0, 0]
    result = eagle_kernels.raw.draft_cache_locs(**rows, **sizes, is_step_major=True)
    assert result.cache_locs.tolist() == [[1003, 1005, 2002, 2004], [1004, 1006, 2003, 2005]]


def test_worked_example_of_copies(device):
    """SGLang's: pages of 8, three tokens in the last one, so 8, 9, 10 are copied to 16, 17, 18 and 24, 25, 26."""
    table = torch.arange(40, device=device)[None]
    first = torch.tensor([0], device=device)
    result = eagle_kernels.raw.draft_cache_locs(first, table, first + 11, topk=3, num_steps=5, page_size=8)
    assert result.source_locs[:6].tolist() == [8, 9, 10, 8, 9, 10]
    assert result.target_locs[:6].tolist() == [16, 17, 18, 24, 25, 26]
    assert (result.source_locs[6:] == -1).all() and len(result.source_locs) == 14
    assert result.copy_indptr.tolist() == [0, 6]
    assert result.cache_locs.tolist() == [[11, 12, 13, 14, 15], [19, 20, 21, 22, 23], [27, 28, 29, 30, 31]]


def test_the_picture_in_the_docstring(device):
    table = torch.arange(24, device=device)[None]
    first = torch.tensor([0], device=device)
    result = eagle_kernels.raw.draft_cache_locs(first, table, first + 9, topk=2, num_steps=5, page_size=4)
    drawn = next(line for line in sys.modules[eagle_kernels.raw.draft_cache_locs.__module__].__doc__.splitlines()
                 if line.strip().startswith("p p p"))  # fmt: skip
    picture = drawn.replace("|", " ").split()
    drafts, copies = result.cache_locs.flatten().tolist(), result.target_locs.tolist()
    assert [slot for slot, is_kind in enumerate(picture) if is_kind == "x"] == drafts
    assert [slot for slot, is_kind in enumerate(picture) if is_kind == "c"] == [slot for slot in copies if slot >= 0]


@pytest.mark.parametrize(("topk", "page_size"), [(1, 1), (4, 1), (1, 16), (4, 16)])
def test_slots_are_those_that_draft_kv_indices_reads(topk, page_size, device):
    """A branch's last list ends with its own drafts; after the copies its pages hold its whole last page."""
    values = make(3, topk, 4, page_size, 40, device=device)
    written = eagle_kernels.raw.draft_cache_locs(**values)
    read = eagle_kernels.raw.draft_kv_indices(**values, capacity=4000)
    for branch, end in enumerate(read.kv_indptr[-1, 1:].tolist()):
        assert read.kv_indices[-1, end - 4 : end].tolist() == written.cache_locs[branch].tolist()
    bounds = written.copy_indptr.tolist()
    for request, seq_len in enumerate(values["seq_lens"].tolist()):
        in_page = seq_len % page_size if topk > 1 else 0
        row = values["req_to_token"][values["req_pool_indices"][request]]
        sources = written.source_locs[bounds[request] : bounds[request + 1]].view(topk - 1, -1) if topk > 1 else None
        assert bounds[request + 1] - bounds[request] == (topk - 1) * in_page
        for copied in () if sources is None else sources:
            assert torch.equal(copied, row[seq_len - in_page : seq_len])
