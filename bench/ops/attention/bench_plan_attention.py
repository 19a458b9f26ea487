"""plan_attention: the lengths of a batch summed up, once a step."""

import torch

from bench.harness import grid
from bench.harness.inputs import ODD_BATCH, lengths

CASES = [*grid(batch_size=[1, ODD_BATCH, 32, 256], num_drafts=0), {"batch_size": 32, "num_drafts": 64}]
SMALL_CASES = grid(batch_size=3, num_drafts=[0, 8])
HEADLINES = ["B=32 N=0"]

name = "B={batch_size} N={num_drafts}".format


def make(device, batch_size, num_drafts):
    return {"seq_lens": lengths(batch_size, 8192, "ragged").to(device), "num_drafts": num_drafts}


def count_bytes(batch_size, num_drafts):
    return 4 * (2 * batch_size + 1)


def prepare_torch(values):
    seq_lens, num_drafts = values["seq_lens"], values["num_drafts"]

    def run():
        blocks = ((seq_lens + num_drafts + 31) // 32).clamp(min=1)
        return {"output": torch.nn.functional.pad(blocks.cumsum(0, dtype=torch.int32), (1, 0))}

    return run
