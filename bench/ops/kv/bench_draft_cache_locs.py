"""draft_cache_locs for five steps of eight branches, each on pages of its own but where pages hold one token."""

import torch

from bench.harness import grid
from bench.harness.inputs import token_table
from bench.peers import sglang_triton

TOPK = 8
NUM_STEPS = 5
PREFIX = 8192

CASES = grid(page_size=[1, 16, 64], batch_size=[1, 8, 32])
SMALL_CASES = grid(batch_size=2, page_size=[1, 4])
HEADLINES = ["B=8 P=16"]
PEERS = {"sglang_triton": sglang_triton.draft_cache_locs}

name = "B={batch_size} P={page_size}".format


def make(device, batch_size, page_size):
    columns = PREFIX + page_size + TOPK * (NUM_STEPS + 2 * page_size)
    return token_table(device, batch_size, columns) | {
        "seq_lens": PREFIX + torch.randint(0, page_size, (batch_size,), device=device),
        "topk": TOPK,
        "num_steps": NUM_STEPS,
        "page_size": page_size,
    }


def count_bytes(batch_size, page_size):
    """Slots read as int32 and written as int64, positions, and copies of half a page on the average."""
    capacity = batch_size * (TOPK - 1) * (page_size - 1)
    return batch_size * TOPK * (12 * NUM_STEPS + 8) + 4 * capacity + 16 * capacity + 4 * (batch_size + 1)


def prepare_torch(values):
    """Copies are packed by a running sum and a scatter: a mask as an index would wait for the device."""
    table, page_size = values["req_to_token"], values["page_size"]
    device, batch_size = table.device, len(values["seq_lens"])
    branch, step = torch.arange(TOPK, device=device), torch.arange(NUM_STEPS, device=device)
    offset = torch.arange(page_size - 1, device=device)
    capacity = batch_size * (TOPK - 1) * (page_size - 1)

    def run():
        rows, seq_lens = values["req_pool_indices"], values["seq_lens"]
        in_page = seq_lens % page_size
        width = (in_page + NUM_STEPS + page_size - 1) // page_size * page_size if page_size > 1 else NUM_STEPS
        first = seq_lens[:, None] + branch * (width[:, None] if page_size > 1 else width)
        cache_locs = table[rows[:, None, None], first[:, :, None] + step].long().view(-1, NUM_STEPS)
        outputs = {"cache_locs": cache_locs, "positions": seq_lens.repeat_interleave(TOPK)}
        if capacity == 0:
            return outputs
        target = (first[:, 1:] - in_page[:, None])[:, :, None] + offset
        source = (seq_lens - in_page)[:, None, None] + offset.expand_as(target)
        is_copied = (offset < in_page[:, None, None]).expand_as(target).flatten()
        place = torch.where(is_copied, is_copied.cumsum(0) - 1, capacity)
        for name, column in (("source_locs", source), ("target_locs", target)):
            packed = torch.full((capacity + 1,), -1, device=device)
            packed.scatter_(0, place, table[rows[:, None, None], column].long().flatten())
            outputs[name] = packed[:-1]
        return outputs

    return run
