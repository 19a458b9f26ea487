"""verify_tree_sampled with and without filters; the target has all but decided on a deepest path or a part of it.

Elsewhere it has decided on other tokens, or, where a case says "flat off the path", its logits are standard normal.
The first are easy, the second hard for a search over probabilities, which the pipeline makes of all rows.
"""

import torch

from bench.harness import Unavailable, grid, inputs
from bench.harness.torch_forms import Walk, sample
from bench.peers import sgl_kernel

# torch's own sort of more probabilities takes more memory than a GPU has
_MAX_SORTED = 1 << 29

FILTERS = ["no filters", "top-k 50 top-p 0.9"]
DEFAULTS = {"filters": FILTERS[1], "accepted": None, "vocab_size": inputs.VOCABULARY, "is_flat": False}
CASES = [
    *(
        sizes
        for filters in FILTERS
        for sizes in (
            # three drafts are the whole depth of the smaller tree
            *grid(filters=filters, tree=inputs.TREES[0], accepted=[0, None], batch_size=[1, 8, 32, 128]),
            *grid(filters=filters, tree=inputs.TREES[1], accepted=[0, 3, None], batch_size=[1, 8, 32]),
        )
    ),
    *grid(tree=inputs.TREES[0], batch_size=[1, 8, 32, 128], is_flat=True),
    *grid(tree=inputs.TREES[1], batch_size=[1, 8, 32], is_flat=True),
    *grid(tree=inputs.TREES[0], batch_size=inputs.ODD_BATCH, filters=FILTERS, vocab_size=inputs.LARGE_VOCABULARY),
]
SMALL_CASES = grid(batch_size=2, tree=inputs.TREES[0], filters=FILTERS, accepted=[None, 0, 2], vocab_size=300)
# what of them is no case; the sweeps meet where 64 nodes are verified for 8 requests
SWEEP = [
    *grid(tree=inputs.TREES[0], batch_size=[2, 4, 16, 64, 256]),
    *grid(tree=inputs.TREES[1], batch_size=[2, 4, 16, 64, 128, 256]),
    *({"tree": inputs.Tree(8, 5, num_nodes), "batch_size": 8} for num_nodes in (1, 2, 4, 8, 16, 32, 128, 256)),
]
HEADLINES = [
    *(f"{tree} B=32 no filters full depth" for tree in inputs.TREES[:2]),
    *(f"{tree} B={batch_size} top-k 50 top-p 0.9 full depth" for tree in inputs.TREES[:2] for batch_size in (8, 32)),
]
PEERS = {"pipeline": sgl_kernel.verify_tree_sampled}


def name(batch_size, tree, filters, accepted, vocab_size, is_flat):
    depth = "full depth" if accepted is None else f"accepts {accepted}"
    flat = " flat off the path" if is_flat else ""
    return f"{tree} B={batch_size} {filters} {depth}{flat}{inputs.of_vocabulary(vocab_size)}"


def is_checked(batch_size, tree, **others):
    return batch_size * tree.num_nodes <= 64  # the reference draws noise for every row


def make(device, batch_size, tree, filters, accepted, vocab_size, is_flat):
    values = inputs.accepted_tree("cpu", batch_size, tree, vocab_size)
    winners = inputs.ends_after(values, tree.spec_steps if accepted is None else accepted, vocab_size)
    off_path, winners = _off_path(values, winners).flatten().to(device), winners.flatten()
    del values["target_predict"]
    values = {name: value.to(device) for name, value in values.items()}
    values["target_logits"] = inputs.decisive_logits(winners.to(device), vocab_size, inputs.NARROW_LEAD)
    if is_flat:
        place = winners[:, None].to(device)
        flat = torch.where(off_path[:, None], 0.0, inputs.NARROW_LEAD).to(torch.bfloat16)
        values["target_logits"].scatter_(1, place, flat)
    values["seeds"] = torch.randint(2**60, (batch_size,), device=device)
    values["temperature"] = torch.ones(batch_size, device=device)
    if filters == FILTERS[1]:
        values["top_k"] = torch.full((batch_size,), 50, dtype=torch.int32, device=device)
        values["top_p"] = torch.full((batch_size,), 0.9, device=device)
    return values | {"spec_steps": tree.spec_steps}


def _off_path(values, winners):
    """Which nodes [B, N] the walk by the winners does not visit."""
    off_path = torch.ones_like(winners, dtype=torch.bool)
    first, sibling = values["retrieve_next_token"].tolist(), values["retrieve_next_sibling"].tolist()
    for request, tokens in enumerate(values["candidates"].tolist()):
        node = 0
        while node >= 0:
            off_path[request, node] = False
            winner, node = int(winners[request, node]), first[request][node]
            while node >= 0 and tokens[node] != winner:
                node = sibling[request][node]
    return off_path


def count_bytes(batch_size, tree, filters, accepted, vocab_size, is_flat):
    """One read of the visited rows."""
    visited = (tree.spec_steps if accepted is None else accepted) + 1
    return batch_size * min(visited, tree.num_nodes) * vocab_size * 2


def prepare_torch(values):
    """Samples all nodes, then walks."""
    if values["target_logits"].numel() > _MAX_SORTED:
        raise Unavailable(f"sorts no more than {_MAX_SORTED} probabilities")
    walk = Walk(values)
    shape = values["candidates"].shape
    per_node = [
        None if values.get(name) is None else values[name].repeat_interleave(shape[1])
        for name in ("temperature", "top_k", "top_p")
    ]
    return lambda: walk.follow(sample(values["target_logits"], *per_node).view(shape))
