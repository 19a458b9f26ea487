"""align_evict_mask_to_page_size: examples, every phase of a page, nothing else cleared."""

import torch

import eagle_kernels
from op_tests.harness import sweep

# (batch, drafts, page_size, longest prefix)
SHAPES = [(1, 1, 1, 5), (3, 8, 1, 20), (5, 6, 4, 30), (3, 16, 16, 40), (2, 300, 64, 70), (2, 64, 256, 600),
          (4, 33, 3, 9)]  # fmt: skip


def make(batch_size, num_drafts, page_size, longest, *, dtype=torch.int64, is_chain=True, device="cpu"):
    num_kept = torch.randint(0, num_drafts + 1, (batch_size, 1))
    mask = torch.arange(num_drafts)[None] >= num_kept
    if not is_chain:
        mask = mask[:, torch.randperm(num_drafts)].contiguous()
    return {
        "seq_lens": torch.randint(0, longest + 1, (batch_size,)).to(device=device, dtype=dtype),
        "evict_mask": mask.to(device),
        "page_size": page_size,
    }


def ahead_of_time_cases():
    yield "int64", make(3, 8, 4, 20)
    yield "int32", make(3, 8, 4, 20, dtype=torch.int32)


size_sweep = sweep(lambda batch_size, longest: make(batch_size, 8, 16, longest), (1, 100, 1024))


def test_worked_examples(device):
    """SGLang's: pages of 4, six drafts."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]], device=device).bool()
    seq_lens = torch.tensor([5, 6, 7], device=device)
    eagle_kernels.raw.align_evict_mask_to_page_size(seq_lens, mask, page_size=4)
    assert mask.long().tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]
