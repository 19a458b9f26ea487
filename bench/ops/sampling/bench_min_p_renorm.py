"""min_p_renorm of flat rows and of rows that hold little but zeros."""

import torch

from bench.harness.renorms import CASES, SMALL_CASES, count_bytes, divided, is_checked, make_probs, name  # noqa: F401

DEFAULTS = {"min_p": 0.1}


def make(device, rows, vocab_size, kind, min_p):
    probs = make_probs(device, rows, vocab_size, kind)
    return {"probs": probs, "min_p": torch.full((rows,), min_p, device=device)}


def prepare_torch(values):
    probs, min_p = values["probs"], values["min_p"][:, None]

    def run():
        return divided(probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0.0))

    return run
