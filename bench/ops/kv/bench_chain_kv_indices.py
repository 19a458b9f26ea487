"""chain_kv_indices for the root and its one draft, and for chains of four."""

import torch

from bench.harness import grid
from bench.harness.inputs import token_table

CASES = grid(length=[1024, 8192], num_tokens=[2, 4], batch_size=[1, 8, 32])
SMALL_CASES = [{"batch_size": 3, "length": 20, "num_tokens": 2}, {"batch_size": 2, "length": 9, "num_tokens": 4}]
HEADLINES = ["B=8 L=1024 N=2"]

name = "B={batch_size} L={length} N={num_tokens}".format


def is_checked(batch_size, length, num_tokens):
    return batch_size * length <= 65536  # the reference makes Python lists


def make(device, batch_size, length, num_tokens):
    return token_table(device, batch_size, length) | {
        "kv_lens": torch.full((batch_size,), length, device=device),
        "num_verify_tokens": num_tokens,
        "capacity": batch_size * _count(length, num_tokens),
    }


def _count(length, num_tokens):
    return num_tokens * length - num_tokens * (num_tokens - 1) // 2


def count_bytes(batch_size, length, num_tokens):
    """Each row read once, all lists and bounds written."""
    return 4 * (batch_size * (length + _count(length, num_tokens) + num_tokens) + 1)


def prepare_torch(values):
    """The total is known on the host, as repeat_interleave would wait for the device without it."""
    table, capacity, num_tokens = values["req_to_token"], values["capacity"], values["num_verify_tokens"]
    num_lists, device = len(values["kv_lens"]) * num_tokens, table.device
    kv_indptr = torch.zeros(num_lists + 1, dtype=torch.int32, device=device)
    which, entry = torch.arange(num_lists, device=device), torch.arange(capacity, device=device)
    token = torch.arange(num_tokens, device=device)

    def run():
        lengths = (values["kv_lens"][:, None] - num_tokens + 1 + token).flatten()
        kv_indptr[1:] = lengths.cumsum(0)
        owner = which.repeat_interleave(lengths, output_size=capacity)
        column = entry - kv_indptr.gather(0, owner)
        kv_indices = table[values["req_pool_indices"][owner // num_tokens], column]
        return {"kv_indptr": kv_indptr, "kv_indices": kv_indices}

    return run
