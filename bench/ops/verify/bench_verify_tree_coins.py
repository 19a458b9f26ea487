"""verify_tree_coins on rows that favour a deepest path, with coins that take it for some drafts or for all of it."""

import torch

from bench.harness import grid
from bench.harness.inputs import LARGE_VOCABULARY, ODD_BATCH, TREES, VOCABULARY, accepted_tree, of_vocabulary, parents
from bench.harness.torch_forms import Walk
from bench.peers import sgl_kernel

DEFAULTS = {"accepted": None, "vocab_size": VOCABULARY}
CASES = [
    *grid(tree=TREES[0], batch_size=[1, 8, 32, 128]),
    *grid(tree=TREES[1], batch_size=[1, 8, 32]),
    *grid(tree=TREES[1], accepted=[0, 3], batch_size=[1, 8, 32]),
    {"tree": TREES[0], "batch_size": ODD_BATCH, "vocab_size": LARGE_VOCABULARY},
]
SMALL_CASES = grid(batch_size=2, tree=TREES[0], accepted=[None, 0, 2], vocab_size=300)
PEERS = {"sgl_kernel": sgl_kernel.verify_tree_coins, "sgl_kernel_bare": sgl_kernel.verify_tree_coins_bare}


def name(batch_size, tree, accepted, vocab_size):
    depth = "full depth" if accepted is None else f"accepts {accepted}"
    return f"{tree} B={batch_size} {depth}{of_vocabulary(vocab_size)}"


def make(device, batch_size, tree, accepted, vocab_size):
    """The walk follows a deepest path for `accepted` drafts, or to its end.

    Coins stand in the middle of what they are to hit, so that sums in another order hit it as well.
    """
    _, spec_steps, num_nodes = tree
    accepted = spec_steps if accepted is None else accepted
    values = accepted_tree("cpu", batch_size, tree, vocab_size)
    depth = values.pop("positions").view(batch_size, num_nodes) - 1024
    planned, candidates = values.pop("target_predict"), values["candidates"]
    values = {name: value.to(device) for name, value in values.items()}
    logits = torch.randn(batch_size * num_nodes, vocab_size, device=device)
    logits.scatter_add_(1, planned.view(-1, 1).to(device), torch.full_like(logits[:, :1], 12.0))
    target_probs = torch.softmax(logits, dim=-1).view(batch_size, num_nodes, vocab_size)
    # all that follows is small, and on the CPU
    mass_before, mass_until, parent = (tensor.cpu() for tensor in sibling_mass(values, target_probs))
    node, request = torch.arange(num_nodes), torch.arange(batch_size)
    # [request, node, child]
    is_child = (parent[:, None, :] == node[:, None]) & (node > 0)
    is_taken = (candidates == planned.gather(1, parent)) & (depth.gather(1, parent) < accepted)
    taken = torch.where(is_child & is_taken[:, None, :], node, 0).amax(-1)
    of_all = torch.where(is_child, mass_until[:, None, :], 0.0).amax(-1)
    of_taken = (mass_before + mass_until).gather(1, taken)
    coins = torch.where(taken > 0, of_taken, of_all + 1.0) / 2
    last = torch.zeros(batch_size, 1, dtype=torch.int64)
    for _ in range(spec_steps):
        below = taken.gather(1, last)
        last = torch.where(below > 0, below, last)
    is_rejected = (parent == last) & (node > 0) & (depth.gather(1, last) < spec_steps)
    left = target_probs[request.to(device), last[:, 0].to(device)].cpu().double()
    at_request, at_node = is_rejected.nonzero(as_tuple=True)
    left[at_request, candidates[at_request, at_node]] = 0.0
    reached, token = left.cumsum(1), left.argmax(1)
    final_coins = ((reached[request, token] - left[request, token] / 2) / reached[:, -1]).float()
    return values | {
        "target_probs": target_probs,
        "uniform_samples": coins.to(device),
        "uniform_samples_for_final_sampling": final_coins.to(device),
        "spec_steps": spec_steps,
    }


def sibling_mass(values, target_probs):
    """What the siblings before each node weigh [B, N], the same with its own weight, and its parent (0: the root's)."""
    parent, is_before, place = siblings(values, target_probs.shape[2])
    probs = target_probs.flatten(1).gather(1, place)
    mass = torch.where(is_before, probs[:, None, :], 0.0).sum(-1)
    return mass - probs, mass, parent


def siblings(values, vocab_size):
    """Parents [B, N], the siblings before each node and itself [B, N, N], and tokens' places in their parents' rows."""
    parent = parents(values).to(values["candidates"].device).clamp(min=0)
    node = torch.arange(parent.shape[1], device=parent.device)
    # the root is nobody's sibling
    is_before = (parent[:, :, None] == parent[:, None, :]) & (node[None, :] <= node[:, None]) & (node > 0)
    return parent, is_before, parent * vocab_size + values["candidates"]


def count_bytes(batch_size, tree, accepted, vocab_size):
    """The row of the bonus, the links and coins, the outputs."""
    return batch_size * (4 * vocab_size + tree.num_nodes * (4 * 8 + 4 + 4) + 4 * (tree.spec_steps + 3))


def prepare_torch(values):
    """All nodes' children against their coins at once, the walk, then the residual's running sum.

    For trees whose siblings carry distinct tokens, at thresholds 1. Where its siblings lie, a torch user knows anyway.
    """
    walk = Walk(values)
    candidates, target_probs = values["candidates"], values["target_probs"]
    batch_size, num_nodes, vocab_size = target_probs.shape
    request = torch.arange(batch_size, device=candidates.device)
    (parent, is_before, place), node = siblings(values, vocab_size), torch.arange(num_nodes, device=candidates.device)

    def run():
        probs = target_probs.flatten(1).gather(1, place)
        mass = torch.where(is_before, probs[:, None, :], 0.0).sum(-1)
        coin = values["uniform_samples"].gather(1, parent)
        is_hit = (probs > 0) & (coin < mass) & (coin >= mass - probs) & (node > 0)
        # nobody's token where no child was hit; one more column takes what is not written
        chosen = torch.full((batch_size, num_nodes + 1), -1, device=candidates.device)
        chosen.scatter_(1, torch.where(is_hit, parent, num_nodes), candidates)
        outputs = walk.follow(chosen[:, :num_nodes])
        count = outputs["accept_token_num"].long()
        last = outputs["accept_index"].gather(1, count[:, None]).flatten().long() - request * num_nodes
        is_rejected = (parent == last[:, None]) & (node > 0) & (count < values["spec_steps"])[:, None]
        left = torch.cat([target_probs[request, last], target_probs.new_empty(batch_size, 1)], dim=1)
        left.scatter_(1, torch.where(is_rejected, candidates, vocab_size), 0.0)
        left = left[:, :vocab_size]
        reached = left.cumsum(-1)
        level = values["uniform_samples_for_final_sampling"][:, None] * reached[:, -1:]
        bonus = ((reached > level) & (left > 0)).int().argmax(-1)
        outputs["predicts"].view(batch_size, num_nodes)[request, last] = bonus.int()
        return outputs

    return run
