"""prune_trees over batches that keep a quarter of their drafts, the sure ones of a few requests."""

import torch

from bench.harness import grid
from bench.harness.inputs import TREES, Tree, built_tree

CASES = grid(tree=[TREES[0], Tree(4, 4, 16), TREES[1]], batch_size=[1, 8, 12, 32, 128])
SMALL_CASES = grid(batch_size=3, tree=Tree(2, 3, 6))
HEADLINES = ["N=16 B=32"]

name = "N={tree.num_nodes} B={batch_size}".format


def make(device, batch_size, tree):
    """Trees of random drafts; log-probabilities fall along paths, faster in later requests."""
    built, num_nodes = built_tree(batch_size, tree), tree.num_nodes
    tokens, positions = (part.view(batch_size, num_nodes) for part in (built.draft_tokens, built.positions))
    depth = positions - positions[:, :1]
    unsure = 0.2 + torch.arange(batch_size)[:, None] / batch_size
    scores = -(depth * unsure + 0.01 * torch.arange(num_nodes))[:, 1:].contiguous()
    values = {"draft_tokens": tokens.to(device), "tree_mask": built.tree_mask.to(device), "scores": scores.to(device)}
    return values | {"max_rows": batch_size + batch_size * (num_nodes - 1) // 4}


def count_bytes(batch_size, tree):
    num_nodes = tree.num_nodes
    num_words = -(-num_nodes // 64)
    return batch_size * (4 * (num_nodes - 1) + 16 * num_nodes * (1 + num_words) + 4)


def prepare_torch(values):
    """A sort of all scores, and tensor operations over [B, N, N]; for trees of one word."""
    tokens, masks, scores = values["draft_tokens"], values["tree_mask"], values["scores"]
    batch_size, num_nodes = tokens.shape
    node = torch.arange(num_nodes, device=tokens.device)
    wanted = values["max_rows"] - batch_size

    def run():
        order = scores.flatten().argsort(descending=True, stable=True)
        is_best = torch.zeros(scores.numel() + 1, dtype=torch.bool, device=tokens.device)
        is_best[order[:wanted]] = True
        is_best = torch.nn.functional.pad(is_best[:-1].view_as(scores), (1, 0), value=True)
        sees = (masks >> node) & 1 == 1
        is_kept = is_best & ~(sees & (node < node[:, None]) & ~is_best[:, None]).any(-1)
        place = (~is_kept).to(torch.int8).argsort(dim=1, stable=True)
        count = is_kept.sum(1)
        is_used = node < count[:, None]
        moved = sees.gather(1, place[..., None].expand_as(sees)).gather(2, place[:, None].expand_as(sees))
        bits = ((moved & is_used[:, None]).long() << node).sum(-1)
        return {
            "draft_tokens": torch.where(is_used, tokens.gather(1, place), -1),
            "tree_mask": torch.where(is_used, bits, 0)[..., None],
            "num_nodes": count.int(),
        }

    return run
