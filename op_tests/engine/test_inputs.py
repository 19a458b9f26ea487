"""Prompts, seeds and limits in every type a caller may hold them, and one clear line for the rest."""

import enum
import itertools

import numpy
import pytest
import torch

from eagle_kernels.engine.requests import inputs
from eagle_kernels.engine.requests.inputs import read_prompt, read_prompts

NESTED: list = []
NESTED.append(NESTED)


@pytest.mark.parametrize(
    "input_ids",
    [
        [1, 2, 3], (1, 2, 3), range(1, 4), torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3], dtype=torch.uint8),
        numpy.array([1, 2, 3]), [numpy.int64(1), numpy.int32(2), torch.tensor(3)],
        [1, enum.IntEnum("Token", {"TWO": 2}).TWO, 3],
    ],
)  # fmt: skip
def test_one_prompt(input_ids):
    assert read_prompts(input_ids) == ([[1, 2, 3]], True)


@pytest.mark.parametrize(
    "input_ids",
    [
        [[1, 2], [3, 4]], torch.tensor([[1, 2], [3, 4]]), numpy.array([[1, 2], [3, 4]]),
        [torch.tensor([1, 2]), numpy.array([3, 4])], ([numpy.int64(1), 2], (3, 4)),
        numpy.array([[1, 2], [3, 4], None], dtype=object)[:2], {0: [1, 2], 1: (3, 4)}.values(),
    ],
)  # fmt: skip
def test_several_prompts(input_ids):
    assert read_prompts(input_ids) == ([[1, 2], [3, 4]], False)


@pytest.mark.parametrize("input_ids", [[], (), torch.empty(0, 3, dtype=torch.int64), numpy.empty(0)])
def test_no_prompt(input_ids):
    """It is refused where there may be several, and an empty prompt where there must be one."""
    with pytest.raises(ValueError, match=r"^generate: input_ids must hold at least one prompt, got \[\]"):
        read_prompts(input_ids)
    assert read_prompt(input_ids, "submit: prompt") == []


def test_where_there_must_be_one_prompt():
    assert read_prompt(torch.tensor([1, 2]), "submit: prompt") == [1, 2]
    told = r"submit: prompt must be one prompt, a text or \[L\] token ids, got a batch of 2"
    with pytest.raises(ValueError, match=told):
        read_prompt([[1], [2]], "submit: prompt")


@pytest.mark.parametrize(
    ("input_ids", "message"),
    [
        ("text", "got 'text'"),
        (7, "got 7"),
        (["text"], "prompt 0 holds 'text'"),
        ([[1], "text"], "prompt 1 holds 'text'"),
        ([[1], 2], "prompt 1 holds 2"),
        ([[1], [1.5]], "prompt 1 holds 1.5"),
        ([1, True], "prompt 0 holds True"),
        (torch.tensor([True, False]), "prompt 0 holds True"),
        (numpy.array([True]), "prompt 0 holds True"),
        (torch.zeros(2), "prompt 0 holds 0.0"),
        ({1, 2}, r"got \{1, 2\}$"),
        ({"a": [1]}, r"got \{'a': \[1\]\}$"),
        (b"ab", "got b'ab'$"),
        (bytearray(b"ab"), "got bytearray"),
        (memoryview(b"ab"), "got <memory at "),
        ((token for token in (1, 2)), "got <generator object"),
        (itertools.count(), r"got count\(0\)$"),
        ([{1}], r"prompt 0 holds \{1\}$"),
        ([[1], (token for token in (1, 2))], "prompt 1 holds <generator object"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), r"got tensor\(\.\.\., device='meta', size=\(2,\), dtype="),
        (torch.tensor([1, 2]).to_sparse(), r"got tensor\(indices=.*\.\.\.$"),
        (torch.tensor([1j]), r"prompt 0 holds 1j$"),
        (numpy.array([1, None]), "prompt 0 holds None$"),
        (numpy.array(["a", "b"]), "prompt 0 holds 'a'"),
        (NESTED, r"prompt 0 holds \[\[+"),
        (torch.zeros(1, 1, 100, dtype=torch.int64), r"prompt 0 holds \[0, 0, .*\.\.\.$"),
    ],
)
def test_other_prompts_are_refused(input_ids, message):
    rule = r"^generate: input_ids must be text, integer ids \[L\] or \[B, L\] or a list of texts, (but )?"
    with pytest.raises(ValueError, match=rule + message):
        read_prompts(input_ids)


class Letters:
    def encode(self, text):
        return [*map(ord, text)]


def test_texts_are_encoded():
    """By the tokenizer of an engine; a list of texts makes several prompts."""
    options = "submit: prompt", lambda user: Letters()
    assert read_prompts("ab", *options) == ([[97, 98]], True) and read_prompt("ab", *options) == [97, 98]
    for texts in (["ab", "c"], ("ab", "c"), numpy.array(["ab", "c"])):
        assert read_prompts(texts, *options) == ([[97, 98], [99]], False)
    assert read_prompts(["ab"], *options) == ([[97, 98]], False)
    for texts, message in (
        (["ab", [1]], "submit: prompt must be text, .* but prompt 0 holds 'ab'"),
        ([["ab"]], "prompt 0 holds 'ab'"),
        (["a", None], "prompt 0 holds 'a'"),
        ("", "submit: prompt must hold at least one token, got ''"),
        (["a", ""], "submit: prompt must hold at least one token, got ''"),
    ):
        with pytest.raises(ValueError, match=message):
            read_prompts(texts, *options)
    with pytest.raises(ValueError, match="must be one prompt, a text or .* got a batch of 1"):
        read_prompt(["ab"], *options)


@pytest.mark.parametrize(
    "seeds", [4, numpy.int64(4), torch.tensor(4), [4, 4], (4, 4), torch.tensor([4, 4]), numpy.array([4, 4])]
)
def test_seeds(seeds):
    assert inputs.read_seeds(seeds, 2) == [4, 4] and inputs.read_seeds(torch.tensor([4]), 1) == [4]


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (1.5, "seeds must be ints, got 1.5"),
        ("4", "seeds must be ints, got '4'"),
        ([1, None], "seeds must be ints, got None"),
        (True, "seeds must be ints, got True"),
        ([2**63, 0], "seeds must fit in 64 bits"),
        (10**5000, "seeds must fit in 64 bits, got one that cannot be shown, of type int"),
        ([1], "got 1 for 2 prompts"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_seeds_are_refused(seeds, message):
    with pytest.raises(ValueError, match="^generate: " + message + "|" + message + "$"):
        inputs.read_seeds(seeds, 2)


def test_max_new_tokens():
    assert inputs.read_max_new_tokens(3) == inputs.read_max_new_tokens(numpy.int64(3)) == 3
    for value in (3.0, "3", None, True, [3]):
        with pytest.raises(ValueError, match="^generate: max_new_tokens must be an int, got "):
            inputs.read_max_new_tokens(value)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        inputs.read_max_new_tokens(0)
    with pytest.raises(ValueError, match="max_new_tokens must fit in 64 bits, got one that cannot be shown"):
        inputs.read_max_new_tokens(10**5000)


def test_samples():
    assert [inputs.read_samples(n, 2, "generate") for n in (numpy.int64(3), 2**19)] == [3, 2**19]
    for n, message in (
        (0, "generate: n must be an int of at least 1, got 0"),
        (2**19 + 1, "generate: n must be at most 524288 for 2 prompts, 1048576 requests in all, got 524289"),
        (10**5000, "generate: n must be at most 524288 for 2 prompts, .* got one that cannot be shown"),
        (torch.ones(9, 9), r"generate: n must be an int of at least 1, got tensor\(.*\.\.\.$"),
    ):
        with pytest.raises(ValueError, match=message):
            inputs.read_samples(n, 2, "generate")
    with pytest.raises(ValueError, match="input_ids must hold at most 1048576 prompts, got 1048577"):
        inputs.read_samples(1, 2**20 + 1, "generate")
