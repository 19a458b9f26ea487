"""verify_commit after a verification that accepted a deepest path."""

import torch

from bench.harness import grid
from bench.harness.inputs import ODD_BATCH, TREES, VOCABULARY, accepted_tree
from eagle_kernels import reference

CASES = grid(tree=TREES[:2], batch_size=[1, 8, ODD_BATCH, 32, 128], vocab_size=VOCABULARY)
SMALL_CASES = grid(batch_size=2, tree=TREES[0], vocab_size=300)


def name(batch_size, tree, vocab_size):
    return f"{tree} B={batch_size}"


def make(device, batch_size, tree, vocab_size):
    values = accepted_tree("cpu", batch_size, tree, vocab_size)
    del values["positions"]
    verdict = reference.ops.verify.verify_tree_greedy.verify_tree_greedy(**values, spec_steps=tree.spec_steps)
    values = verdict._asdict() | {"seq_lens": torch.full((batch_size,), 1024)}
    return {name: value.to(device) for name, value in values.items()}


def count_bytes(batch_size, tree, vocab_size):
    """Path and tokens read, the outputs written."""
    return batch_size * ((4 + 4 + 8 + 8) * (tree.spec_steps + 1) + 4 + 8 + 8 + 8 + 4 + 8)


def prepare_torch(values):
    batch_size, num_columns = values["accept_index"].shape
    device = values["accept_index"].device
    first_row = (torch.arange(batch_size, device=device) * (len(values["predicts"]) // batch_size))[:, None]
    first_place = torch.arange(batch_size, device=device) * num_columns

    def run():
        accepted = values["accept_token_num"].long()
        is_node = values["accept_index"] >= 0
        hidden_rows = torch.where(is_node, values["accept_index"].long(), first_row)
        tokens = torch.where(is_node, values["predicts"][hidden_rows].long(), -1)
        return {
            "new_seq_lens": values["seq_lens"] + accepted + 1,
            "bonus_tokens": tokens.gather(1, accepted[:, None])[:, 0],
            "accept_lengths": values["accept_token_num"] + 1,
            "tokens": tokens,
            "hidden_rows": hidden_rows,
            "last_row": first_place + accepted,
        }

    return run
