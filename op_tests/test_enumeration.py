"""The enumeration itself, on laws that are known."""

import pytest
import torch

from eagle_kernels.reference.enumeration import enumerate_outcomes, total_variation


def test_a_uniform_is_cut_down_by_what_is_asked_of_it():
    """One uniform asked about twice is one uniform; half of it is another way to ask."""
    law = enumerate_outcomes(lambda source: [u < 0.25 or (u < 0.75, u * 0.5 < 0.4375) for u in [source.uniform()]][0])
    assert law == pytest.approx({True: 0.25, (True, True): 0.5, (False, True): 0.125, (False, False): 0.125})


def test_answers_that_are_certain_are_no_branches():
    def asked(source):
        uniform = source.uniform()
        return uniform < 1.0, uniform < 0.0, uniform < float("nan"), source.choose([0.0, 1.0])

    assert enumerate_outcomes(asked) == {(True, False, False, 1): 1.0}


def test_uniforms_are_independent():
    law = enumerate_outcomes(lambda source: (source.uniform() < 0.5, source.uniform() < torch.tensor(0.25)))
    assert law == {(True, True): 0.125, (True, False): 0.375, (False, True): 0.125, (False, False): 0.375}


def test_choices_and_loops():
    """Draws until a 2 comes, at most twice again: ways of different lengths."""

    def drawn(source):
        tokens = [source.choose([0.5, 0.0, 0.5])]
        while tokens[-1] != 2 and len(tokens) < 3:
            tokens.append(source.choose([0.5, 0.0, 0.5]))
        return tuple(tokens)

    assert enumerate_outcomes(drawn) == {(2,): 0.5, (0, 2): 0.25, (0, 0, 2): 0.125, (0, 0, 0): 0.125}


def test_other_comparisons_are_refused():
    """They would be answered by nothing but chance."""
    for asked in (lambda u: u <= 0.5, lambda u: u > 0.5, lambda u: u + 0.5, lambda u: u >= 0.5, lambda u: -u):
        with pytest.raises(TypeError):
            enumerate_outcomes(lambda source, asked=asked: asked(source.uniform()))


def test_too_many_ways_are_given_up():
    with pytest.raises(RuntimeError, match="more than 50 ways"):
        enumerate_outcomes(lambda source: tuple(source.uniform() < 0.5 for _ in range(8)), most=50)


def test_hidden_state_is_seen():
    state = iter(range(10))
    with pytest.raises(AssertionError, match="does not do the same"):
        enumerate_outcomes(lambda source: source.uniform() < 0.1 * (1 + next(state)))


def test_total_variation():
    assert total_variation({"a": 0.5, "b": 0.5}, {"a": 0.25, "c": 0.75}) == 0.75
