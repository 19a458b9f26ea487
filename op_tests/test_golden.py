"""Tokens that stay what they are from release to release: a seed stands for a text: keys and hashes are promises.

Kernel and reference give the tokens that stand here. Where one is not given any more, noise is keyed or made in another
way, and the texts of all users change: new tokens come here only with a release that says so. The inputs are made of
whole numbers, not by torch's generator, and give the same tokens when they are moved by far more than rounding moves
them.
"""

import pytest
import torch

import eagle_kernels
from eagle_kernels import EAGLEConfig, EAGLEInference
from op_tests.engine.toys import Markov
from op_tests.harness import to_device
from op_tests.harness.trees import depths_of, trees_of

SEEDS = torch.tensor([0, 1, -5, 2**40 + 3, -(2**62), 77])
POSITIONS = torch.tensor([0, 7, 300, 2**31 - 1, 2**33 + 1, 41])
NUM_ROWS = len(SEEDS)
# of a root with two children, the first of which has two
PARENTS = [-1, 0, 0, 1, 1]


def grid(num_rows, vocab_size=300, salt=3):
    """Logits -4 .. 4."""
    row, token = torch.arange(num_rows)[:, None], torch.arange(vocab_size)
    return ((row * 31 + token * 17 + row * token * 5 + token * token * salt) % 33 - 16) / 4.0


def rows():
    return {"positions": POSITIONS, "seeds": SEEDS, "temperature": torch.full((NUM_ROWS,), 0.8)}


def drafts(num_nodes):
    """Tokens [R, N], and logits of target and draft, which finds them nearly twice as likely: coins decide."""
    tokens = (torch.arange(NUM_ROWS)[:, None] * 7 + torch.arange(num_nodes) * 3 + 2) % 40
    target = grid(NUM_ROWS, 40).repeat_interleave(num_nodes, 0)
    draft = target.unflatten(0, (NUM_ROWS, num_nodes)).clone()
    draft.scatter_add_(2, tokens[:, None].repeat(1, num_nodes, 1), torch.full((NUM_ROWS, num_nodes, num_nodes), 0.5))
    return tokens, target, draft


def trees():
    tokens, target, draft = drafts(len(PARENTS))
    return {
        **trees_of(PARENTS, tokens.tolist()),
        "target_logits": target, "draft_logits": draft.flatten(0, 1), "spec_steps": 2,
        **rows(), "positions": (POSITIONS[:, None] + torch.tensor(depths_of(PARENTS))).flatten(),
    }  # fmt: skip


def chains():
    tokens, target, draft = drafts(3)
    positions = (POSITIONS[:, None] + torch.arange(3)).flatten()
    pair = {"target_logits": target, "draft_logits": draft[:, :-1].flatten(0, 1)}
    return {"candidates": tokens, **pair, **rows(), "positions": positions}


def without(values, *names):
    return {name: value for name, value in values.items() if name not in names}


def per_row(value):
    return torch.full((NUM_ROWS,), value)


TARGET_ALONE = without(trees(), "draft_logits")
CHILDREN_OF = {"draft_logits": grid(NUM_ROWS), **rows(), "nodes": torch.arange(NUM_ROWS), "num_children": 3}
SIMULATED = {"accept_policy": "simulate", "simulated_rates": torch.tensor([0.6, 0.3])}
SIMULATED["target_predict"] = torch.full((NUM_ROWS, 5), 39)
CASES = {
    "sample_from_logits": {"logits": grid(NUM_ROWS), **rows()},
    "sample_from_logits, filters": {"logits": grid(NUM_ROWS), **rows(), "min_p": per_row(0.3)},
    "sample_children, without": CHILDREN_OF,
    "sample_children, with": CHILDREN_OF | {"replacement": True},
    "verify_tree_sampled": TARGET_ALONE,
    "verify_tree_typical": TARGET_ALONE | {"epsilon": per_row(0.05), "delta": per_row(0.2)},
    "verify_tree_greedy, simulated": without(TARGET_ALONE, "target_logits", "temperature") | SIMULATED,
    "verify_tree_rejection": trees(),
    "verify_tree_traversal": trees(),
    "verify_chain, standard": chains(),
    "verify_chain, block": chains() | {"method": "block"},
}
# of each row; of trees and chains the nodes that were visited
TOKENS = {
    "sample_from_logits": [[84], [148], [222], [164], [97], [121]],
    "sample_from_logits, filters": [[173], [148], [222], [164], [97], [121]],
    "sample_children, without": [
        [54, 285, 71], [262, 148, 116], [277, 275, 88], [174, 150, 138], [6, 1, 130], [184, 19, 77],
    ],
    "sample_children, with": [
        [54, 153, 173], [262, 295, 97], [277, 88, 112], [174, 137, 67], [6, 36, 115], [184, 164, 107],
    ],
    "verify_tree_sampled": [[26], [0], [24], [25], [3], [21]],
    "verify_tree_typical": [[5, 23], [0], [22, 1], [25], [33, 39, 36], [0, 6, 17]],
    "verify_tree_greedy, simulated": [[5, 39], [12, 39], [39], [26, 32, 39], [39], [39]],
    "verify_tree_rejection": [[5, 38], [12, 18, 0], [19, 25, 2], [26, 32, 5], [33, 39, 19], [28]],
    "verify_tree_traversal": [[5, 11, 21], [33], [33], [18], [16], [28]],
    "verify_chain, standard": [[5, 38], [12, 15, 0], [19, 13], [26, 29, 5], [33, 36, 19], [28]],
    "verify_chain, block": [[21], [12, 15, 0], [33], [26, 29, 5], [16], [28]],
}  # fmt: skip


def tokens_of(case, device, ops, moved=0.0):
    values = to_device(CASES[case], device)
    for name in [name for name in values if name.endswith("logits")]:
        sign = torch.arange(values[name].numel(), device=device).view_as(values[name]) * 7 % 3 - 1
        values[name] = values[name] + moved * sign
    output = getattr(ops, case.partition(",")[0])(**values)
    output = output if isinstance(output, torch.Tensor) else output[0]
    return [[token for token in tokens if token >= 0] for tokens in output.view(NUM_ROWS, -1).tolist()]


@pytest.mark.cross
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")  # of the interpreter, in masked lanes
@pytest.mark.parametrize("case", CASES)
def test_tokens_of_ops(case, device):
    """Rows with seeds and positions of one word and of two."""
    assert tokens_of(case, device, eagle_kernels.raw) == TOKENS[case]
    for moved in (0.0, 1e-3, -1e-3):
        assert tokens_of(case, torch.device("cpu"), eagle_kernels, moved) == TOKENS[case]


TREES = {"chain": (1, 3, 4), "tree": (3, 3, 8)}
TEXTS = {
    "chain": [
        [11, 14, 2, 2, 0, 3, 0, 18, 18, 12, 14, 15, 16, 13, 5, 12],
        [5, 16, 3, 10, 10, 6, 15, 16, 9, 19, 10, 10, 4, 0, 18, 12],
    ],
    "tree": [
        [11, 14, 2, 2, 0, 17, 11, 14, 3, 1, 2, 15, 16, 6, 2, 12],
        [5, 16, 3, 10, 10, 6, 15, 16, 9, 19, 10, 10, 4, 0, 18, 12],
    ],
}


@pytest.mark.parametrize("tree", TREES)
def test_texts_of_drawn_drafts(tree):
    """How `rejection` numbers draws and coins of a whole tree; the embedded pair's texts are in test_demo_pair.py."""
    for moved in (0.0, 1e-3, -1e-3):
        assert texts_of(tree, moved) == TEXTS[tree]


def texts_of(tree, moved):
    target, draft = (Markov(vocab_size=20, max_length=64) for _ in range(2))
    target.table = grid(20, 20) / 2 + moved * grid(20, 20, salt=1)
    draft.table = grid(20, 20) / 2 + grid(20, 20, salt=2) / 5
    sizes = dict(zip(("topk", "num_steps", "num_draft_tokens"), TREES[tree]))
    engine = EAGLEInference(draft, target, EAGLEConfig(**sizes, verify_strategy="rejection"))
    return engine.generate([[1, 2], [3]], 16, seeds=[5, -(2**40)], temperature=0.9).output_ids
