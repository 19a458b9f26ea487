"""extend_cache_locs for the nodes of a verification, N of each request, and for ranges given by their ends."""

import torch

from bench.harness import grid
from bench.harness.inputs import token_table
from bench.peers import sglang_triton

PREFIX = 8192

KINDS = ["uniform", "ragged"]
CASES = grid(kind=KINDS, num_tokens=[8, 64], batch_size=[1, 8, 32, 128])
SMALL_CASES = grid(batch_size=3, num_tokens=8, kind=KINDS)
HEADLINES = ["B=8 64 tokens uniform"]
PEERS = {"sglang_triton": sglang_triton.extend_cache_locs}

name = "B={batch_size} {num_tokens} tokens {kind}".format


def make(device, batch_size, num_tokens, kind):
    starts = torch.full((batch_size,), PREFIX, device=device)
    values = token_table(device, batch_size, PREFIX + num_tokens) | {"starts": starts}
    if kind == "uniform":
        return values | {"num_tokens": num_tokens}
    return values | {"ends": starts + num_tokens, "capacity": batch_size * num_tokens}


def count_bytes(batch_size, num_tokens, kind):
    """Slots read as int32, slots and positions written as int64."""
    return batch_size * num_tokens * (4 + 8 + 8) + 4 * (batch_size + 1)


def prepare_torch(values):
    """The number of slots is known on the host, as repeat_interleave would wait for the device without it."""
    table, starts, ends = values["req_to_token"], values["starts"], values.get("ends")
    rows = values["req_pool_indices"]
    if ends is None:
        offset = torch.arange(values["num_tokens"], device=table.device)

        def run():
            positions = starts[:, None] + offset
            cache_locs = table[rows[:, None], positions].long()
            return {"cache_locs": cache_locs.flatten(), "positions": positions.flatten()}

        return run
    request = torch.arange(len(starts), device=table.device)
    entry = torch.arange(values["capacity"], device=table.device)

    def run():
        counts = ends - starts
        owner = request.repeat_interleave(counts, output_size=len(entry))
        positions = starts[owner] + entry - (counts.cumsum(0) - counts)[owner]
        return {"cache_locs": table[rows[owner], positions].long(), "positions": positions}

    return run
