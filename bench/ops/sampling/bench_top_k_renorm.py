"""top_k_renorm of flat rows and of rows that hold little but zeros."""

import torch

from bench.harness.renorms import CASES, SMALL_CASES, count_bytes, divided, is_checked, make_probs, name  # noqa: F401
from bench.peers import flashinfer

DEFAULTS = {"top_k": 50}
PEERS = {"flashinfer": flashinfer.top_k_renorm}


def make(device, rows, vocab_size, kind, top_k):
    probs = make_probs(device, rows, vocab_size, kind)
    return {"probs": probs, "top_k": torch.full((rows,), top_k, dtype=torch.int32, device=device)}


def prepare_torch(values):
    probs, last = values["probs"], values["top_k"][:, None].long() - 1

    def run():
        ordered = probs.sort(dim=-1, descending=True).values
        return divided(probs.masked_fill(probs < ordered.gather(1, last), 0.0))

    return run
