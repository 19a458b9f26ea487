"""Where the hybrid method puts the history's drafts: behind the model's path, beside it, or before it."""

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


TIE = [0, 8, 9, 15, 16, 10, 0, 8, 9, 12, 13, 14, 0, 8, 9]
NARROW = {"topk": 2, "num_steps": 5, "levels": 1, "num_drafts": 7, "min_ngram_size": 3}
# the history, the model's path, options, and what is drafted
PLACES = {
    # the longest match of the root's is another one, but with the model's path the history says what follows
    "behind the path": (HISTORY, [1, 2], {}, chain(9, 1, 2, 3, 4, 5, 6)),
    # its levels are the most tokens that may match: those before the path count as well
    "behind a path of many levels": (
        HISTORY, [1, 2, 3, 4], {"levels": 4, "max_ngram_size": 4}, chain(9, 1, 2, 3, 4, 5, 6)),
    # the path stands in the history, but nothing before it does
    "beside a path known by itself": (
        [5, 1, 2, 3, 4, 0, 8, 9, 12, 13, 14, 0, 8, 9], [1, 2], {}, [*chain(9, 1, 2), *chain(9, 12, 13, 14, 0)]),
    "beside it, one for each branch": (
        TIE, [1], {"topk": 2, "num_steps": 4, "levels": 1, "num_drafts": 8},
        [(1, 9), (X, 9), *chain(9, 12, 13, 14, 0), *chain(9, 15, 16)]),
    # the last three tokens match, with the model's path four
    "before it, where three match": (
        HISTORY, [1], NARROW | {"max_ngram_size": 3}, [*chain(9, 12, 13, 14, 0, 8), (1, 9), (X, 9)]),
    "behind it, where four match": (
        HISTORY, [1], NARROW | {"max_ngram_size": 4}, [(1, 9), (X, 9), *chain(1, 2, 3, 4, 5)]),
    "what both say takes one place": (HISTORY, [12, 13], {"max_ngram_size": 3}, chain(9, 12, 13, 14, 0, 8, 9)),
    # the model is so unsure after its first draft that the next level is that of another one
    "behind a path that ends before its levels": (
        [7, 9, 1, 2, 3, 4, 6, 9, 12, 13, 14, 5, 9], [1, 31], {"topk": 2, "num_drafts": 8, "unsure": 1},
        [(1, 9), (X, 9), (31, X), (X, X), *chain(1, 2, 3, 4, 6)]),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_where_the_drafts_of_the_history_stand(name, device):
    history, path, options, wanted = PLACES[name]
    assert drafts(device, history, path, **options) == wanted
