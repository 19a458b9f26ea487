"""align_evict_mask_to_page_size for chains of eight drafts, half of them accepted."""

import torch

from bench.harness import grid

CASES = grid(batch_size=[1, 8, 32, 128], num_drafts=8, page_size=16)
SMALL_CASES = grid(batch_size=3, num_drafts=8, page_size=4)
HEADLINES = ["B=8 N=8 P=16"]

name = "B={batch_size} N={num_drafts} P={page_size}".format


def make(device, batch_size, num_drafts, page_size):
    place = torch.arange(num_drafts, device=device)
    return {
        "seq_lens": 1024 + torch.randint(0, 100, (batch_size,), device=device),
        "evict_mask": (place >= num_drafts // 2).repeat(batch_size, 1),
        "page_size": page_size,
    }


def count_bytes(batch_size, num_drafts, page_size):
    """Masks and lengths read, what is left of the last page written."""
    return batch_size * (num_drafts + 8 + min(num_drafts, page_size))


def prepare_torch(values):
    mask, page_size = values["evict_mask"], values["page_size"]
    place = torch.arange(mask.shape[1], device=mask.device)

    def run():
        last_page = (values["seq_lens"] + (~mask).sum(1) - 1) // page_size
        mask.logical_and_((values["seq_lens"][:, None] + place) // page_size != last_page[:, None])

    return run
