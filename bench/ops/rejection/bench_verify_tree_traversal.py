"""verify_tree_traversal from logits; the target is all but decided on a deepest path, whose nodes are last children."""

import torch

from bench.harness import grid, inputs

# T = 6 as a tree, a small tree, a wide one
CASES = [
    *grid(tree=[inputs.Tree(1, 5, 6), inputs.TREES[0]], batch_size=[1, 8, 32], vocab_size=inputs.VOCABULARY),
    {"tree": inputs.TREES[1], "batch_size": 1, "vocab_size": inputs.VOCABULARY},
    {"tree": inputs.TREES[0], "batch_size": inputs.ODD_BATCH, "vocab_size": inputs.LARGE_VOCABULARY},
]
SMALL_CASES = grid(batch_size=2, tree=inputs.TREES[0], vocab_size=300)


def name(batch_size, tree, vocab_size):
    return f"{tree} B={batch_size}{inputs.of_vocabulary(vocab_size)}"


def is_checked(batch_size, tree, vocab_size):
    return batch_size * tree.num_nodes <= 64  # the reference keeps P and Q of every node


def make(device, batch_size, tree, vocab_size):
    """Every child is as likely as its siblings by the draft, so that those beside the path are rejected, one by one."""
    values = inputs.accepted_tree("cpu", batch_size, tree, vocab_size)
    wanted = values.pop("target_predict").flatten()
    draft_logits = torch.randn(batch_size * tree.num_nodes, vocab_size).to(torch.bfloat16)
    for request, parent, child in inputs.edges(values):
        token = values["candidates"][request, child]
        draft_logits[request * tree.num_nodes + parent, token] = 64.0
    values = {name: value.to(device) for name, value in values.items()}
    return values | {
        "target_logits": inputs.decisive_logits(wanted.to(device), vocab_size),
        "draft_logits": draft_logits.to(device),
        "seeds": torch.randint(2**60, (batch_size,), device=device),
        "temperature": torch.ones(batch_size, device=device),
        "spec_steps": tree.spec_steps,
    }


def count_bytes(batch_size, tree, vocab_size):
    """One read of the target's rows, in bf16."""
    return batch_size * tree.num_nodes * vocab_size * 2


def prepare_torch(values):
    """Leaves come before their parents in an order that the tree alone decides, so all requests go in step.

    Each step either enters a child or tests a leaf; P and Q of all nodes are kept as matrices. A request that has
    accepted keeps its result. The order is made once, on the host.
    """
    candidates, spec_steps = values["candidates"], values["spec_steps"]
    device, (batch_size, num_nodes) = candidates.device, candidates.shape
    events, parent, depth = _schedule(values)
    steps = [(node, is_entry.bool()) for node, is_entry in events.to(device)]
    parent, depth = parent.to(device), depth.to(device)
    request = torch.arange(batch_size, device=device)
    temperature = values["temperature"][:, None, None]
    column = torch.arange(spec_steps + 1, device=device)

    def once():
        target = torch.softmax(values["target_logits"].view(batch_size, num_nodes, -1).float() / temperature, -1)
        draft = torch.softmax(values["draft_logits"].view(batch_size, num_nodes, -1).float() / temperature, -1)
        acceptance = torch.ones(batch_size, num_nodes, device=device)
        last = torch.full((batch_size,), -1, device=device)
        coins = torch.rand(batch_size, num_nodes, device=device)
        for node, is_entry in steps:
            above = parent[request, node].clamp(min=0)
            token = candidates[request, node]
            share = acceptance[request, above]
            ratio = target[request, above, token] / draft[request, above, token]
            entered = torch.nan_to_num(share * ratio, nan=0.0).clamp(max=1.0)
            is_root = node == 0
            is_open = last < 0
            # a test: accept, or delete
            accepts = is_open & ~is_entry & (is_root | (coins[request, node] < acceptance[request, node]))
            last = torch.where(accepts, node, last)
            deletes = is_open & ~is_entry & ~accepts
            left = (share[:, None] * target[request, above] - draft[request, above]).clamp(min=0)
            mass = left.sum(-1)
            rest = draft[request, above].scatter(1, token[:, None], 0.0)
            new_target = left / mass.clamp(min=1e-30)[:, None]
            new_draft = rest / rest.sum(-1, keepdim=True).clamp(min=1e-30)
            changes = (deletes & (mass > 0))[:, None]
            target[request, above] = torch.where(changes, new_target, target[request, above])
            draft[request, above] = torch.where(deletes[:, None], new_draft, draft[request, above])
            chance = torch.nan_to_num(mass / (mass + 1.0 - share), nan=1.0)
            acceptance[request, above] = torch.where(deletes, chance, share)
            kept = torch.where(is_root, 1.0, acceptance[request, node])
            acceptance[request, node] = torch.where(is_entry & is_open, entered, kept)
        weights = target[request, last]
        token = (weights / torch.empty_like(weights).exponential_()).argmax(-1)
        predicts = torch.full((batch_size, num_nodes), -1, device=device)
        path = torch.full((batch_size, spec_steps + 2), -1, device=device)
        accepted, node = depth[request, last], last
        for _ in range(spec_steps + 1):
            is_node = node >= 0
            place = node.clamp(min=0)
            predicts[request, place] = torch.where(is_node, token, predicts[request, place])
            path[request, torch.where(is_node, depth[request, place], spec_steps + 1)] = place
            token = candidates[request, place]
            node = torch.where(is_node, parent[request, place], -1)
        path = path[:, : spec_steps + 1]
        is_path = column <= accepted[:, None]
        return {
            "predicts": predicts.flatten().int(),
            "accept_index": torch.where(is_path, path + request[:, None] * num_nodes, -1).int(),
            "accept_token_num": accepted.int(),
        }

    return once


def _schedule(values):
    """events [steps, 2, B] (node, is an entry) of a walk in depth-first order, and parent and depth [B, N]."""
    batch_size, num_nodes = values["candidates"].shape
    parent = torch.full((batch_size, num_nodes), -1)
    depth = torch.zeros(batch_size, num_nodes, dtype=torch.int64)
    children: dict = {}
    for request, above, child in inputs.edges(values):
        parent[request, child] = above
        depth[request, child] = depth[request, above] + 1
        children.setdefault((request, above), []).append(child)
    events = []
    for request in range(batch_size):
        order, stack = [], [(0, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                order.append((node, False))
                continue
            if node > 0:
                order.append((node, True))
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(children.get((request, node), [])))
        events.append(order)
    # [step, 2, B]
    return torch.tensor(events).permute(1, 2, 0).contiguous(), parent, depth
