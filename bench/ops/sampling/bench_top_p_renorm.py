"""top_p_renorm of flat rows and of rows that hold little but zeros."""

import torch

from bench.harness.renorms import CASES, SMALL_CASES, count_bytes, divided, is_checked, make_probs, name  # noqa: F401
from bench.peers import flashinfer

DEFAULTS = {"top_p": 0.9}
PEERS = {"flashinfer": flashinfer.top_p_renorm}


def make(device, rows, vocab_size, kind, top_p):
    probs = make_probs(device, rows, vocab_size, kind)
    return {"probs": probs, "top_p": torch.full((rows,), top_p, device=device)}


def prepare_torch(values):
    probs, top_p = values["probs"], values["top_p"][:, None]

    def run():
        ordered, ids = probs.sort(dim=-1, descending=True)
        mass = ordered.cumsum(dim=-1)
        kept = ordered.masked_fill(mass - ordered >= top_p * mass[:, -1:], 0.0)
        return divided(torch.zeros_like(probs).scatter_(1, ids, kept))

    return run
