"""Rounds of drafting and verifying by the public ops, for the law of what they emit."""

import torch

import eagle_kernels
from op_tests.harness.trees import depths_of, links_of

TEMPERATURE, DRAFT_TEMPERATURE = 0.9, 1.8


def draw_tree(draft, root, positions, seeds, parents, temperature, ops=eagle_kernels, **options):
    """Tokens and positions [lanes, N] of a tree of which every node's children are drawn by sample_children."""
    tokens = [root] + [None] * (len(parents) - 1)
    depth = depths_of(parents)
    for node in range(len(parents)):
        children = [child for child in range(len(parents)) if parents[child] == node]
        if children:
            drawn = ops.sample_children(
                draft[tokens[node]], positions + depth[node] + 1, seeds, temperature, torch.full((len(root),), node),
                num_children=len(children), **options,
            ).tokens  # fmt: skip
            for child, token in zip(children, drawn.T):
                tokens[child] = token
    return torch.stack(tokens, 1), positions[:, None] + torch.tensor(depth)


SCHEMES = {"standard": [-1, 0, 1], "block": [-1, 0, 1]} | dict.fromkeys(
    ("rejection, without", "rejection, with", "traversal"), [-1, 0, 0, 1]
)


def emitted_in_rounds(
    scheme, parents, target, draft, *, lanes, num_tokens=3, temperatures=(TEMPERATURE, DRAFT_TEMPERATURE),
    ops=eagle_kernels,
):  # fmt: skip
    """The first tokens [lanes, num_tokens] after token 0, for logits [last token, next token].

    Each request is a lane; `coins` takes torch's uniforms, all other schemes have the noise of seeds and positions.
    """
    is_chain = scheme in ("standard", "block")
    options = {"replacement": scheme.endswith("with")} if scheme.startswith("rejection") else {}
    text = torch.full((lanes, num_tokens + len(parents)), -1)
    length = torch.zeros(lanes, dtype=torch.int64)
    while (length < num_tokens).any():
        going = (length < num_tokens).nonzero()[:, 0]
        count = len(going)
        last = torch.where(length[going] > 0, text[going, length[going] - 1], 0)
        warm, draft_warm = (torch.full((count,), temperature) for temperature in temperatures)
        tokens, positions = draw_tree(draft, last, 10 + length[going], going, parents, draft_warm, ops, **options)
        draft_rows = tokens[:, :-1] if is_chain else tokens
        logits, draft_logits = target[tokens].flatten(0, 1), draft[draft_rows].flatten(0, 1)
        pair = logits, draft_logits, positions.flatten(), going, warm, draft_warm
        rows = torch.arange(count * len(parents)).view(count, -1)
        tree = (tokens, rows, *(torch.tensor(link).repeat(count, 1) for link in links_of(parents)))
        spec_steps = int(positions[0].max() - positions[0, 0])
        if is_chain:
            output = ops.verify_chain(tokens, *pair, method=scheme)
        elif scheme == "coins":
            probs = torch.softmax(logits / temperatures[0], -1)
            output = ops.verify_tree_coins(
                *tree, probs, torch.rand(rows.shape), torch.rand(count), spec_steps=spec_steps
            )
        elif scheme == "target match":
            output = ops.verify_tree_sampled(*tree, logits, positions.flatten(), going, warm, spec_steps=spec_steps)
        else:
            name = "verify_tree_traversal" if scheme == "traversal" else "verify_tree_rejection"
            output = getattr(ops, name)(*tree, *pair, spec_steps=spec_steps, **options)
        for depth in range(output.accept_index.shape[1]):
            node = output.accept_index[:, depth].long()
            is_emitting = node >= 0
            lane = going[is_emitting]
            text[lane, length[lane] + depth] = output.predicts[node[is_emitting]].long()
        length[going] += output.accept_token_num + 1
    return text[:, :num_tokens]
