"""verify_tree_rejection; the target is all but decided, on a deepest path or on tokens that no child carries."""

import torch

from bench.harness import grid, inputs

CASES = [
    *grid(replacement=[False, True], is_accepted=[True, False], tree=inputs.TREES[:2], batch_size=[1, 8, 32],
          vocab_size=inputs.VOCABULARY),
    *grid(batch_size=inputs.ODD_BATCH, tree=inputs.TREES[0], is_accepted=[True, False], replacement=False,
          vocab_size=inputs.LARGE_VOCABULARY),
]  # fmt: skip
SMALL_CASES = grid(
    batch_size=2, tree=inputs.TREES[0], is_accepted=[True, False], replacement=[False, True], vocab_size=300
)  # fmt: skip


def name(batch_size, tree, is_accepted, replacement, vocab_size):
    kind = ("full depth" if is_accepted else "none accepted") + (", with replacement" if replacement else "")
    return f"{tree} B={batch_size} {kind}{inputs.of_vocabulary(vocab_size)}"


def is_checked(batch_size, tree, **others):
    return batch_size * tree.num_nodes <= 64  # the reference reads every row


def make(device, batch_size, tree, is_accepted, replacement, vocab_size):
    values = inputs.accepted_tree(device, batch_size, tree, vocab_size)
    winners = values.pop("target_predict").flatten()
    if not is_accepted:
        winners = torch.randint(vocab_size, (len(winners),), device=device)
    values["target_logits"] = inputs.decisive_logits(winners, vocab_size)
    values["draft_logits"] = torch.empty_like(values["target_logits"]).normal_()
    values["seeds"] = torch.randint(2**60, (batch_size,), device=device)
    values["temperature"] = torch.ones(batch_size, device=device)
    return values | {"spec_steps": tree.spec_steps, "replacement": replacement}


def count_bytes(batch_size, tree, is_accepted, replacement, vocab_size):
    """One read of the target's visited rows, and of the draft's where they have children."""
    visited = tree.spec_steps + 1 if is_accepted else 1
    return batch_size * (2 * visited - is_accepted) * vocab_size * 2


def prepare_torch(values):
    """Level by level and sibling by sibling, all requests at once; lists of children are made once."""
    candidates = values["candidates"]
    device, (batch_size, num_nodes) = candidates.device, candidates.shape
    lists = [[[] for _ in range(num_nodes)] for _ in range(batch_size)]
    for place, node, child in inputs.edges(values):
        lists[place][node].append(child)
    width = max(len(one) for rows in lists for one in rows)
    children = torch.tensor([[one + [-1] * (width - len(one)) for one in rows] for rows in lists], device=device)
    request = torch.arange(batch_size, device=device)
    spec_steps, temperature = values["spec_steps"], values["temperature"][:, None]

    def run():
        current = torch.zeros(batch_size, dtype=torch.int64, device=device)
        alive = torch.ones(batch_size, dtype=torch.bool, device=device)
        predicts = torch.full((batch_size, num_nodes), -1, dtype=torch.int32, device=device)
        accept_index = torch.full((batch_size, spec_steps + 1), -1, dtype=torch.int32, device=device)
        for level in range(spec_steps + 1):
            row = request * num_nodes + current
            accept_index[:, level] = torch.where(alive, row, -1)
            target = torch.softmax(values["target_logits"][row].float() / temperature, -1)
            draft = torch.softmax(values["draft_logits"][row].float() / temperature, -1)
            chosen = torch.zeros_like(current)
            for rank in range(width if level < spec_steps else 0):
                child = children[request, current, rank]
                token = candidates[request, child.clamp(min=0)]
                is_open = alive & (child >= 0) & (chosen == 0)
                coin = torch.rand(batch_size, device=device)
                accepts = coin * draft[request, token] < target[request, token]
                chosen = torch.where(is_open & accepts, child, chosen)
                rejects = (is_open & ~accepts)[:, None]
                left = (target - draft).clamp(min=0)
                target = torch.where(rejects, left / left.sum(-1, keepdim=True), target)
                if not values["replacement"]:
                    rest = draft.scatter(1, token[:, None], 0.0)
                    draft = torch.where(rejects, rest / rest.sum(-1, keepdim=True), draft)
            bonus = (target / torch.empty_like(target).exponential_()).argmax(-1)
            token = torch.where(chosen > 0, candidates[request, chosen], bonus)
            predicts[request, current] = torch.where(alive, token.int(), predicts[request, current])
            alive = alive & (chosen > 0)
            current = torch.where(alive, chosen, current)
        accepted = (accept_index >= 0).sum(1, dtype=torch.int32) - 1
        return {"predicts": predicts.flatten(), "accept_index": accept_index, "accept_token_num": accepted}

    return run
