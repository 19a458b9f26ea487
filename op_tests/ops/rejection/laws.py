"""Exact laws of verifiers whose drafts are sampled: random targets and drafts that remember the whole text so far."""

import itertools
from collections.abc import Callable

import torch

from eagle_kernels.reference import enumeration
from eagle_kernels.reference.enumeration import EnumeratedDraws, enumerate_outcomes
from eagle_kernels.reference.ops.rejection import verify_chain as reference
from eagle_kernels.reference.tree import children_in


def random_law(vocab_size: int, depth: int, *, sharpness: float = 1.5, zeros: int = 0) -> dict[tuple, torch.Tensor]:
    """The distribution float64 [V] of the next token after every text of at most `depth` tokens.

    zeros: how many tokens, at random, have probability 0.
    """
    law = {}
    for length in range(depth + 1):
        for text in itertools.product(range(vocab_size), repeat=length):
            weights = torch.softmax(sharpness * torch.randn(vocab_size, dtype=torch.float64), dim=0)
            weights[torch.randperm(vocab_size)[:zeros]] = 0
            law[text] = weights / weights.sum()
    return law


def near(law: dict[tuple, torch.Tensor], share: float) -> dict[tuple, torch.Tensor]:
    """A draft that mixes the target with another law."""
    vocab_size = len(law[()])
    other = random_law(vocab_size, max(map(len, law)))
    return {text: share * law[text] + (1 - share) * other[text] for text in law}


def distance_to(target: dict, emitted: dict[tuple, float], length: int) -> float:
    """Total variation between the target's texts and what is emitted, where plain sampling goes on from it."""
    law = enumeration.completed(emitted, target, length)
    assert abs(sum(law.values()) - 1) < 1e-12
    return enumeration.total_variation(law, enumeration.text_law(target, length))


def dyadic_probs(num_rows: int, vocab_size: int, grid: int = 64) -> torch.Tensor:
    """Random probabilities fp32 [num_rows, V] that are multiples of 1 / grid, some of them 0: their sums are exact."""
    probs = torch.zeros(num_rows, vocab_size)
    ones = torch.ones(num_rows, grid)
    favoured = torch.randint(vocab_size, (num_rows, 4)).gather(1, torch.randint(4, (num_rows, grid)))
    anywhere = torch.randint(vocab_size, (num_rows, grid))
    return probs.scatter_add_(1, torch.where(torch.rand(num_rows, grid) < 0.7, favoured, anywhere), ones) / grid


class Drawn:
    """The tokens of a tree's nodes, each drawn when it is first asked for, from what its elder siblings left; -1 where
    nothing is left. The tree goes on from `text`; choose(probs): how a child is drawn."""

    def __init__(self, parents, draft, choose, *, replacement=False, text=()):
        self._parents, self._draft, self._choose, self._replacement = parents, draft, choose, replacement
        self._texts = {0: text}

    def text(self, node):
        """What a node ends."""
        if node not in self._texts:
            parent = self._parents[node]
            elder = [self[other] for other in range(1, node) if self._parents[other] == parent]
            probs = self._draft.get(self.text(parent), torch.zeros(1)).clone()
            probs[[token for token in elder if token >= 0 and not self._replacement]] = 0
            token = int(self._choose(probs / probs.sum())) if probs.sum() > 0 else -1
            self._texts[node] = (*self.text(parent), token)
        return self._texts[node]

    def __getitem__(self, node):
        return self.text(node)[-1]


def draw_children(links: dict, probs: torch.Tensor, ids: torch.Tensor, replacement: bool = False) -> None:
    """Replaces the candidates by draws of their parents' rows of probs [B * N, Vd]; ids [Vd]: target ids."""
    batch_size, num_nodes = links["candidates"].shape
    first, sibling = links["retrieve_next_token"].tolist(), links["retrieve_next_sibling"].tolist()
    for request, node in itertools.product(range(batch_size), range(num_nodes)):
        children = list(children_in(first[request], sibling[request], node))
        if children:
            row = probs[request * num_nodes + node].double() + 1e-12  # a one-hot row has no second child
            drawn = torch.multinomial(row, len(children), replacement=replacement)
            links["candidates"][request, children] = ids[drawn]


def coins_by(key: Callable) -> type[EnumeratedDraws]:
    """Draws with one coin for all of one key(position, draw): what keys that say too little come to."""

    class Coins(EnumeratedDraws):
        def __init__(self, source):
            super().__init__(source)
            self._coins = {}

        def uniform(self, position, draw=0):
            found = key(position, draw)
            if found not in self._coins:
                self._coins[found] = super().uniform(position, draw)
            return self._coins[found]

    return Coins


def draft_map(vocab_size: int, draft_vocab_size: int) -> torch.Tensor:
    """A random d2t [Vd]: target id - draft id, ascending in the target id as the heads have it."""
    kept = torch.randperm(vocab_size)[:draft_vocab_size].sort().values
    return kept - torch.arange(draft_vocab_size)


def emitted_by_a_chain(
    method, target, draft, num_drafts, *, claimed=None, propose=None, num_rounds=1, draws=EnumeratedDraws
):
    """Returns the exact law of what verify_chain's reference emits, and the expected number of accepted drafts.

    claimed: the draft distributions that the verifier is given, by default the true ones. propose(probs, source): how
    drafts are drawn. num_rounds: each drafts on from where the one before ended. draws(source): what all rounds of one
    request draw from.
    """
    claimed = claimed or draft
    propose = propose or (lambda probs, source: source.choose(probs))

    def run(source):
        text, of_request = (), draws(source)
        for _ in range(num_rounds):
            prefixes = [text]
            for _ in range(num_drafts):
                prefixes.append((*prefixes[-1], propose(draft[prefixes[-1]], source)))
            accepted, bonus = reference.verify_request(
                [0, *prefixes[-1][len(text) :]],
                torch.stack([target[prefix] for prefix in prefixes]),
                torch.stack([claimed[prefix] for prefix in prefixes[:-1]]),
                [len(prefix) for prefix in prefixes],
                of_request,
                method,
            )
            text = (*prefixes[accepted], bonus)
        return text

    law = enumerate_outcomes(run)
    return law, sum(probability * (len(text) - num_rounds) for text, probability in law.items())
