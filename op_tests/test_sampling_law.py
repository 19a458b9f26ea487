"""Kernels draw what the definitions say (sampling_law.py): all steps at once, whose order each draw here depends on.

The references are enumerated exactly in test_laws.py and, behind the engine's strategies, in
engine/test_exact_laws.py. A kernel cannot be; but its noise is known, so its tokens are: rows are taken for which any
exchange of two steps gives other tokens.
"""

import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.reference.random import grouped_gumbel
from op_tests.harness import check_operation, to_device
from op_tests.harness.trees import trees_of
from op_tests.sampling_law import CASES, ORDER, arguments, assert_every_exchange_shows, can_matter, exchanged, law

FILTERS = ("top_k", "top_p", "min_p")


def telling_rows(filter_order: str, places: list[int], vocab_size: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Cases, positions (the seed is 0) and the tokens drawn there; for each exchange of two steps that can matter one
    row or more draws another token with it. places: the ids of the cases' tokens, of which there are no others."""
    positions = torch.arange(600)
    noise = grouped_gumbel(torch.zeros_like(positions), positions, vocab_size)[0][:, places].double()
    rows = {}
    for number, (logits, given) in enumerate(CASES):
        given = given | {"filter_order": filter_order}

        def keys(order, logits=logits, given=given):
            return torch.tensor(law(logits, given, order), dtype=torch.float64).log() + noise

        best = keys(ORDER).topk(2, dim=1)
        is_clear = best.values[:, 0] - best.values[:, 1] > 1e-3
        for pair in itertools.combinations(ORDER, 2):
            found = is_clear & (keys(exchanged(pair)).argmax(1) != best.indices[:, 0])
            if pair not in rows and found.any():
                position = int(found.nonzero()[0])
                rows[pair] = number, position, places[int(best.indices[position, 0])]
    assert rows.keys() == {pair for pair in itertools.combinations(ORDER, 2) if can_matter(pair, filter_order)}
    cases, positions, tokens = zip(*sorted(set(rows.values())))
    return list(cases), torch.tensor(positions), torch.tensor(tokens)


def scattered(values: torch.Tensor, places: list[int], vocab_size: int, rest: float) -> torch.Tensor:
    return values.new_full((len(values), vocab_size), rest).index_copy(1, torch.tensor(places), values)


def inputs_of(cases: list[int], filter_order: str, places: list[int], vocab_size: int) -> tuple[torch.Tensor, dict]:
    """Logits, and all steps as ops take them, of cases whose tokens have these ids."""
    givens = []
    for number in cases:
        given = dict(CASES[number][1])
        for name in ("prompt", "allowed"):
            given[name] = [places[token] for token in given[name]]
        givens.append(given)
    given = arguments(givens, vocab_size) | {"filter_order": filter_order}
    for name in ("output_counts", "logit_bias"):
        given[name] = scattered(given[name], places, vocab_size, 0)
    logits = torch.tensor([CASES[number][0] for number in cases])
    return scattered(logits, places, vocab_size, float("-inf")), given


@pytest.mark.parametrize("filter_order", ["top_k_first", "joint"])
@pytest.mark.parametrize(
    ("op", "places"),
    [
        *((op, range(7)) for op in ("sample_from_logits", "verify_tree_sampled", "penalize_logits")),
        *((op, (3, 700, 40, 1030, 2048, 2499, 1023)) for op in ("sample_from_logits", "verify_tree_sampled")),
    ],
    ids=str,
)
def test_no_two_steps_of_a_kernel_can_be_exchanged(op, places, filter_order, device):
    """In one tile and in several; with the penalties, biases and grammar in the sampler or before it."""
    places, vocab_size = list(places), max(places) + 1
    cases, positions, tokens = telling_rows(filter_order, places, vocab_size)
    logits, given = inputs_of(cases, filter_order, places, vocab_size)
    given, logits, positions = to_device(given, device), logits.to(device), positions.to(device)
    seeds = torch.zeros_like(positions)
    links = to_device(trees_of([-1], [[0]] * len(cases)), device)
    if op == "verify_tree_sampled":
        drawn = eagle_kernels.raw.verify_tree_sampled(
            **links, target_logits=logits, positions=positions - 1, seeds=seeds, **given, spec_steps=0
        ).predicts
    else:
        if op == "penalize_logits":
            later = {name: given.pop(name) for name in ("temperature", *FILTERS, "filter_order")}
            logits = eagle_kernels.raw.penalize_logits(**links, target_logits=logits, **given)
            given = later
        drawn = eagle_kernels.raw.sample_from_logits(logits, positions, seeds, **given)
    assert drawn.tolist() == tokens.tolist()


def test_the_renormalising_filters_in_their_order(device):
    """What is made of them, one after another, for the rules that take probabilities: none can stand elsewhere."""
    logits = torch.tensor([logits for logits, _ in CASES], device=device)
    steps = ("temperature", *FILTERS)
    given = to_device(arguments([{name: each[name] for name in steps} for _, each in CASES], 7), device)
    probs = torch.softmax(logits / given["temperature"][:, None], -1)
    for name in FILTERS:
        probs, _ = check_operation(f"sampling.{name}_renorm", {"probs": probs, name: given[name]})

    def distance(order):
        wanted = [law(logits, {name: each[name] for name in steps}, order) for logits, each in CASES]
        return float((probs.cpu() - torch.tensor(wanted)).abs().sum(1).max()) / 2

    assert_every_exchange_shows(distance, steps, tolerance=1e-5)
