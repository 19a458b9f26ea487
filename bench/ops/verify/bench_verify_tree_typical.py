"""verify_tree_typical; the target's distribution is all but decided on a deepest path, which is then accepted."""

import torch

from bench.harness import grid, inputs
from bench.harness.torch_forms import Walk

CASES = [
    *grid(tree=inputs.TREES[:2], batch_size=[1, 8, 32], vocab_size=inputs.VOCABULARY),
    {"tree": inputs.TREES[0], "batch_size": inputs.ODD_BATCH, "vocab_size": inputs.LARGE_VOCABULARY},
]
SMALL_CASES = grid(batch_size=2, tree=inputs.TREES[0], vocab_size=300)


def name(batch_size, tree, vocab_size):
    return f"{tree} B={batch_size}{inputs.of_vocabulary(vocab_size)}"


def is_checked(batch_size, tree, vocab_size):
    return batch_size * tree.num_nodes <= 64  # the reference works in float64 on every row


def make(device, batch_size, tree, vocab_size):
    values = inputs.accepted_tree(device, batch_size, tree, vocab_size)
    values["target_logits"] = inputs.decisive_logits(values.pop("target_predict").flatten(), vocab_size)
    values["seeds"] = torch.randint(2**60, (batch_size,), device=device)
    for name, value in (("temperature", 1.0), ("epsilon", 0.09), ("delta", 0.3)):
        values[name] = torch.full((batch_size,), value, device=device)
    return values | {"spec_steps": tree.spec_steps}


def count_bytes(batch_size, tree, vocab_size):
    """The rows of the path: those of other nodes with children depend on the tree."""
    return batch_size * (tree.spec_steps + 1) * vocab_size * 2


def prepare_torch(values):
    """All rows' probabilities and entropies; parents and the ancestor mask, which a torch user has, are made once."""
    walk, candidates = Walk(values), values["candidates"]
    (batch_size, num_nodes), request, above = candidates.shape, walk.request, walk.above

    def run():
        scaled = values["target_logits"].float() / values["temperature"].repeat_interleave(num_nodes)[:, None]
        probs = torch.softmax(scaled, dim=-1).view(batch_size, num_nodes, -1)
        entropy = torch.special.entr(probs).sum(-1)
        limit = torch.minimum(values["epsilon"][:, None], values["delta"][:, None] * torch.exp(-entropy))
        is_likely = probs[request[:, None], above, candidates] > limit.gather(1, above)
        last, on_path, outputs = walk.accept(is_likely)
        bonus = torch.multinomial(probs[request, last], 1)[:, 0]
        after = torch.full_like(candidates, -1).scatter(1, torch.where(on_path, above, 0), candidates)
        after[request, last] = bonus
        return outputs

    return run
