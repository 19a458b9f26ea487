"""verify_tree_greedy from token ids, at three accepted lengths, and from logits, with the argmax in every provider."""

import torch

from bench.harness import grid
from bench.harness.inputs import LARGE_VOCABULARY, ODD_BATCH, TREES, VOCABULARY, accepted_tree, decisive_logits
from bench.harness.torch_forms import Walk
from bench.peers import sgl_kernel, sglang_triton

DEFAULTS = {"from_logits": False, "accepted": None, "vocab_size": VOCABULARY}
CASES = [
    *grid(tree=TREES, batch_size=[1, 8, 32, 128]),
    *grid(tree=TREES[1], accepted=[0, 3], batch_size=[1, 8, 32]),
    *grid(tree=TREES[:2], batch_size=[1, 8, 32], from_logits=True),
    {"tree": TREES[0], "batch_size": ODD_BATCH, "from_logits": True, "vocab_size": LARGE_VOCABULARY},
]
SMALL_CASES = grid(batch_size=2, tree=TREES[0], from_logits=[False, True], vocab_size=300)
PEERS = {
    "sgl_kernel": sgl_kernel.verify_tree_greedy,
    "sgl_kernel_bare": sgl_kernel.verify_tree_greedy_bare,
    "sglang_triton": sglang_triton.verify_tree_greedy,
}


def name(batch_size, tree, from_logits, accepted, vocab_size):
    depth = "full depth" if accepted is None else f"accepts {accepted}"
    return f"{tree} B={batch_size} {f'V={vocab_size}' if from_logits else 'ids'} {depth}"


def is_checked(batch_size, tree, from_logits, **others):
    return not from_logits or batch_size * tree.num_nodes <= 64  # the reference sorts every row


def make(device, batch_size, tree, from_logits, accepted, vocab_size):
    """The target follows a deepest path for `accepted` drafts, or to its end."""
    values = accepted_tree("cpu", batch_size, tree, vocab_size)
    depth = values.pop("positions").view(batch_size, tree.num_nodes) - 1024
    accepted = tree.spec_steps if accepted is None else accepted
    # nobody carries the token after the draft at depth `accepted`
    values["target_predict"] = torch.where(depth == accepted, vocab_size, values["target_predict"])
    values = {name: value.to(device) for name, value in values.items()}
    if from_logits:
        values["target_logits"] = decisive_logits(values.pop("target_predict").flatten() % vocab_size, vocab_size)
    return values | {"spec_steps": tree.spec_steps}


def count_bytes(batch_size, tree, from_logits, accepted, vocab_size):
    """The words of the visited nodes and the outputs; from logits, the rows of the visited nodes."""
    visited = (tree.spec_steps if accepted is None else accepted) + 1
    words = 8 * (4 * visited + 1) + 4 * (tree.num_nodes + tree.spec_steps + 2)
    return batch_size * (words + (2 * vocab_size * visited if from_logits else 0))


def prepare_torch(values):
    walk = Walk(values)
    shape = values["candidates"].shape

    def run():
        if "target_logits" in values:
            return walk.follow(values["target_logits"].argmax(-1).view(shape))
        return walk.follow(values["target_predict"])

    return run
