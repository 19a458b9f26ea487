"""Where the hybrid method puts the history's drafts: behind the model's path, beside it, or before it."""

from __future__ import annotations

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.tools.trees.view import verified_trees
from op_tests.engine.toys import ToyModel

X, Y, Z = 30, 31, 32
# its last three tokens have stood there with 12, 13, 14 behind them, the last two also with 1 to 6
HISTORY = [7, 8, 9, 1, 2, 3, 4, 5, 6, 0, 8, 9, 12, 13, 14, 0, 8, 9]


class Script(ToyModel):
    """Says token p + 1 of a script at position p, and next likely a second one; anything after one it is unsure of."""

    def __init__(self, script, second, unsure, device):
        super().__init__(device=device)
        self.script, self.second = torch.tensor([*script[1:], 0], device=device), second
        self.unsure = unsure

    def forward(self, input_ids, positions, attend, *, capture=(), last_only=False):
        output = super().forward(input_ids, positions, attend, capture=capture, last_only=last_only)
        places = (positions[:, -1:] if last_only else positions).clamp(max=len(self.script) - 1)
        logits = torch.zeros_like(output.logits)
        logits[..., self.second] = 8.5
        logits = logits.scatter(-1, self.script[places][..., None], 9.0)
        before = input_ids[:, -1:] if last_only else input_ids
        return output._replace(logits=logits.masked_fill((before == self.unsure)[..., None], 0.0))


def drafts(device, history, path, **options):
    """[(token, token of its parent), ..] of the first tree, in its order; the root's token is the history's last.

    They are the same whatever the tokens are called, and which of them is 0.
    """
    told = [renamed_drafts(device, history, path, by, **options) for by in (0, -1, -12)]
    assert told[0] == told[1] == told[2]
    return told[0]


def renamed_drafts(device, history, path, by, *, num_drafts=6, topk=1, num_steps=6, levels=2, unsure=-1, **options):
    """The same with `by` added to every token, the drafts' tokens without it."""
    history, path = ([(token + by) % 40 for token in tokens] for tokens in (history, path))
    unsure = unsure if unsure < 0 else (unsure + by) % 40
    second, others = (X + by) % 40, ([(token + by) % 40] * 20 for token in (Y, Z))
    model, target = (Script([*history, *own, *rest], second, unsure, device) for own, rest in zip((path, []), others))
    config = EAGLEConfig(
        method="hybrid", topk=topk, num_steps=num_steps, num_draft_tokens=1 + num_drafts, num_model_steps=levels,
        **{"min_ngram_size": 1} | options,
    )  # fmt: skip
    engine = EAGLEInference(model, target, config)
    # the first token is the prompt's, and the target's: the model's next one is what it says behind that
    first = next(iter(verified_trees(engine, history[:-1], 4)))
    tokens = {node.number: node.token_id for node in first.nodes}
    assert tokens[0] == history[-1]
    return [((node.token_id - by) % 40, (tokens[node.parent] - by) % 40) for node in first.nodes[1:]]


def chain(*tokens):
    return list(zip(tokens[1:], tokens))


def test_behind_the_path_that_the_history_knows(device):
    """The longest match of the root's is another one, but with the model's path the history says what follows."""
    assert drafts(device, HISTORY, [1, 2]) == chain(9, 1, 2, 3, 4, 5, 6)
    # as many levels as tokens match at most: those before the path count as well
    assert drafts(device, HISTORY, [1, 2, 3, 4], levels=4, max_ngram_size=4) == chain(9, 1, 2, 3, 4, 5, 6)


def test_beside_a_path_that_is_only_known_by_itself(device):
    """The path stands in the history, but nothing before it does."""
    history = [5, 1, 2, 3, 4, 0, 8, 9, 12, 13, 14, 0, 8, 9]
    assert drafts(device, history, [1, 2]) == [*chain(9, 1, 2), *chain(9, 12, 13, 14, 0)]


def test_beside_the_path_as_many_continuations_as_the_tree_has_branches(device):
    history = [0, 8, 9, 15, 16, 10, 0, 8, 9, 12, 13, 14, 0, 8, 9]
    found = drafts(device, history, [1], topk=2, num_steps=4, levels=1, num_drafts=8)
    assert found == [(1, 9), (X, 9), *chain(9, 12, 13, 14, 0), *chain(9, 15, 16)]


@pytest.mark.parametrize(("max_ngram_size", "is_first"), [(3, True), (4, False)])
def test_before_the_path_where_so_many_tokens_match(max_ngram_size, is_first, device):
    """Its last three do; with the model's path four."""
    sizes = {"topk": 2, "num_steps": 5, "levels": 1, "num_drafts": 7, "max_ngram_size": max_ngram_size}
    found = drafts(device, HISTORY, [1], **sizes, min_ngram_size=3)
    model = [(1, 9), (X, 9)]
    assert found == ([*chain(9, 12, 13, 14, 0, 8), *model] if is_first else [*model, *chain(1, 2, 3, 4, 5)])


def test_what_both_say_takes_one_place(device):
    found = drafts(device, HISTORY, [12, 13], max_ngram_size=3)
    assert found == chain(9, 12, 13, 14, 0, 8, 9)


def test_behind_a_path_that_ends_before_its_levels(device):
    """The model is so unsure after its first draft that the next level is that of another one."""
    history = [7, 9, 1, 2, 3, 4, 6, 9, 12, 13, 14, 5, 9]
    found = drafts(device, history, [1, 31], topk=2, num_drafts=8, unsure=1)
    assert found == [(1, 9), (X, 9), (31, X), (X, X), *chain(1, 2, 3, 4, 6)]
