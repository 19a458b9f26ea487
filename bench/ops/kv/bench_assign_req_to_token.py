"""assign_req_to_token for what a verification accepted, and for a prompt."""

import torch

from bench.harness import grid

CASES = [
    *grid(batch_size=[1, 8, 32, 128], num_tokens=5, prefix=8192),
    *grid(batch_size=[1, 8], num_tokens=8192, prefix=0),
]
SMALL_CASES = grid(batch_size=3, num_tokens=5, prefix=20)
HEADLINES = ["B=8 5 tokens behind 8192"]

name = "B={batch_size} {num_tokens} tokens behind {prefix}".format


def make(device, batch_size, prefix, num_tokens):
    starts = torch.full((batch_size,), prefix, device=device)
    return {
        "req_pool_indices": torch.randperm(batch_size, device=device),
        "req_to_token": torch.zeros(batch_size, prefix + num_tokens, dtype=torch.int32, device=device),
        "starts": starts,
        "ends": starts + num_tokens,
        "cache_locs": torch.randperm(batch_size * num_tokens, device=device),
    }


def count_bytes(batch_size, prefix, num_tokens):
    """Slots read as int64 and written as int32."""
    return 12 * batch_size * num_tokens


def prepare_torch(values):
    """The number of slots is known on the host, as repeat_interleave would wait for the device without it."""
    table, slots = values["req_to_token"], values["cache_locs"]
    request = torch.arange(len(values["starts"]), device=table.device)
    entry = torch.arange(len(slots), device=table.device)

    def run():
        counts = values["ends"] - values["starts"]
        owner = request.repeat_interleave(counts, output_size=len(slots))
        column = values["starts"][owner] + entry - (counts.cumsum(0) - counts)[owner]
        table[values["req_pool_indices"][owner], column] = slots.to(table.dtype)

    return run
