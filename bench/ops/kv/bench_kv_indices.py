"""kv_indices: slots of prefixes, and their pages."""

import torch

from bench.harness import grid

CASES = [
    *grid(page_size=1, prefix=[1024, 8192], batch_size=[1, 8, 32]),
    *grid(page_size=16, prefix=8192, batch_size=[1, 8, 32]),
]
SMALL_CASES = grid(batch_size=3, prefix=20, page_size=[1, 4])
HEADLINES = ["B=8 L=1024 P=1"]

name = "B={batch_size} L={prefix} P={page_size}".format


def is_checked(batch_size, prefix, page_size):
    return batch_size * prefix <= 65536  # the reference makes Python lists


def make(device, batch_size, prefix, page_size):
    pages = torch.randperm(batch_size * prefix // page_size, device=device).view(batch_size, -1, 1)
    slots = pages * page_size + torch.arange(page_size, device=device)
    return {
        "req_pool_indices": torch.randperm(batch_size, device=device),
        "req_to_token": slots.flatten(1).to(torch.int32),
        "seq_lens": torch.full((batch_size,), prefix, device=device),
        "capacity": batch_size * prefix // page_size,
        "page_size": page_size,
    }


def count_bytes(batch_size, prefix, page_size):
    """One slot a page read, the indices, bounds and last lengths written."""
    num_indices = batch_size * prefix // page_size
    return 4 * (2 * num_indices + 2 * batch_size + 1)


def prepare_torch(values):
    """Row by row of the owner; the total is known on the host, as repeat_interleave would wait for the device."""
    table, capacity, page_size = values["req_to_token"], values["capacity"], values["page_size"]
    batch_size, device = len(values["seq_lens"]), table.device
    kv_indptr = torch.zeros(batch_size + 1, dtype=torch.int32, device=device)
    request, entry = torch.arange(batch_size, device=device), torch.arange(capacity, device=device)

    def run():
        counts = (values["seq_lens"] + page_size - 1) // page_size
        kv_indptr[1:] = counts.cumsum(0)
        owner = request.repeat_interleave(counts, output_size=capacity)
        column = (entry - kv_indptr.gather(0, owner)) * page_size
        kv_indices = table[values["req_pool_indices"][owner], column] // page_size
        last_page_len = values["seq_lens"] - (counts - 1) * page_size
        return {"kv_indptr": kv_indptr, "kv_indices": kv_indices, "last_page_len": last_page_len}

    return run
