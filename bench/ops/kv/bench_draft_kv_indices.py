"""draft_kv_indices for five steps of eight branches."""

import torch

from bench.harness import Unavailable, grid
from bench.harness.inputs import token_table
from bench.peers import sglang_triton

TOPK = 8
NUM_STEPS = 5

SINK = {"window_size": 1024, "sink_size": 4}
MOVING = {"window_size": 1024, "window_counts_drafts": True}
CASES = [
    *grid(prefix=[1024, 8192], batch_size=[1, 8, 32]),
    *(sizes | window for window in (SINK, MOVING) for sizes in grid(prefix=8192, batch_size=[1, 8, 32])),
]
SMALL_CASES = [
    {"batch_size": 3, "prefix": 20} | window
    for window in ({}, {"window_size": 6, "sink_size": 2}, {"window_size": 6, "window_counts_drafts": True})
]
HEADLINES = ["B=8 L=1024"]
PEERS = {"sglang_triton": sglang_triton.draft_kv_indices}


def name(batch_size, prefix, window_size=0, sink_size=0, window_counts_drafts=False):
    kind = " of prefix and drafts" if window_counts_drafts else ""
    return f"B={batch_size} L={prefix}" + (f" window {window_size}+{sink_size}{kind}" if window_size else "")


def is_checked(batch_size, prefix, **window):
    return batch_size * prefix <= 8192  # the reference makes Python lists


def make(device, batch_size, prefix, **window):
    return (
        token_table(device, batch_size, prefix + TOPK * NUM_STEPS)
        | {
            "seq_lens": torch.full((batch_size,), prefix, device=device),
            "topk": TOPK,
            "num_steps": NUM_STEPS,
            "capacity": batch_size * TOPK * (_kept(prefix, **window) + NUM_STEPS),
        }
        | window
    )


def _kept(prefix, window_size=0, sink_size=0, window_counts_drafts=False):
    """How many tokens of the prefix are listed at the first step."""
    if window_size == 0:
        return prefix
    return min(prefix, window_size + sink_size - window_counts_drafts)


def count_bytes(batch_size, prefix, **window):
    """What is listed of each prefix read once, every step's indices and bounds written."""
    kept = _kept(prefix, **window)
    written = NUM_STEPS * (batch_size * TOPK * (kept + NUM_STEPS) + batch_size * TOPK + 1)
    return 4 * (batch_size * kept + written)


def prepare_torch(values):
    """Step by step; the totals are known on the host, as repeat_interleave would wait for the device without them."""
    if values.get("window_counts_drafts"):
        raise Unavailable("has no windows that count drafts")
    table, capacity = values["req_to_token"], values["capacity"]
    device, sink = table.device, values.get("sink_size", 0)
    most = values["window_size"] + sink if values.get("window_size") else table.shape[1]
    num_branches = len(values["seq_lens"]) * TOPK
    total = int(values["seq_lens"].clamp(max=most).sum()) * TOPK
    branch = torch.arange(num_branches, device=device)
    kv_indptr = torch.zeros(NUM_STEPS, num_branches + 1, dtype=torch.int32, device=device)
    kv_indices = torch.empty(NUM_STEPS, capacity, dtype=torch.int32, device=device)

    def run():
        lengths = values["seq_lens"].repeat_interleave(TOPK, output_size=num_branches)
        rows = values["req_pool_indices"].repeat_interleave(TOPK, output_size=num_branches)
        kept = lengths.clamp(max=most)
        for step in range(NUM_STEPS):
            size = total + num_branches * (step + 1)
            kv_indptr[step, 1:] = (kept + step + 1).cumsum(0)
            owner = branch.repeat_interleave(kept + step + 1, output_size=size)
            place = torch.arange(size, device=device) - kv_indptr[step].gather(0, owner)
            column = torch.where(place < sink, place, place + (lengths - kept)[owner])
            column = torch.where(place < kept[owner], column, column + owner % TOPK * NUM_STEPS)
            kv_indices[step, :size] = table[rows[owner], column]
            kv_indices[step, size:] = -1
        return {"kv_indptr": kv_indptr, "kv_indices": kv_indices}

    return run
