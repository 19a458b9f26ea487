"""sample_children: the reference's tokens, the law of drawing one after the other, noise that its key alone sets."""

import pytest
import torch

import eagle_kernels
from op_tests.harness import check_operation, sweep
from op_tests.harness.statistics import assert_follows_law

PATH = "rejection.sample_children"
REPLACEMENT = pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
INFINITY = float("inf")


def make(num_rows, vocab_size, num_children=4, *, replacement=False, dtype=torch.float32, reduced=False, device="cpu"):
    values = {
        "draft_logits": (3.0 * torch.randn(num_rows, vocab_size)).to(dtype),
        "positions": torch.randint(0, 2**31 - 1, (num_rows,)),
        "seeds": torch.randint(-(2**62), 2**62, (num_rows,)),
        "temperature": torch.tensor([0.8, 0.0, 1.0, 1.7, 0.5]).repeat(num_rows)[:num_rows].contiguous(),
        "nodes": torch.randint(0, 64, (num_rows,)),
    }
    if reduced:
        values["d2t"] = torch.randperm(4 * vocab_size)[:vocab_size].sort().values - torch.arange(vocab_size)
    values = {key: value.to(device) for key, value in values.items()}
    return values | {"num_children": num_children, "replacement": replacement}


def ahead_of_time_cases():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield str(dtype), make(2, 64, dtype=dtype)
    yield "with replacement", make(2, 64, 8, replacement=True, reduced=True, dtype=torch.bfloat16)
    yield "two slices, many children", make(2, 5000, 64, dtype=torch.bfloat16, reduced=True)
    yield "more children than tokens", make(2, 3, 8)
    yield "one child, one token, with replacement", make(2, 1, 1, replacement=True)


size_sweep = sweep(lambda num_rows: make(num_rows, 1000))


@pytest.mark.cross
@REPLACEMENT
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "num_children"), [(3, 4096, 5), (6, 7, 3), (3, 1, 1), (2, 257, 64), (2, 9001, 8)]
)
def test_matches_reference(num_rows, vocab_size, num_children, replacement, device):
    values = make(num_rows, vocab_size, num_children, replacement=replacement, device=device)
    output, _ = check_operation(PATH, values, case=f"{vocab_size} {num_children}", close=("logprobs",))
    # without replacement no token comes twice
    assert replacement or all(len(set(row)) == num_children for row in output.tokens.tolist())


@REPLACEMENT
def test_support_smaller_than_the_children_asked_for(replacement, device):
    values = make(5, 6, 5, replacement=replacement, device=device)
    values["draft_logits"][:, [0, 2, 5]] = -INFINITY
    values["draft_logits"][3] = -INFINITY
    output, _ = check_operation(PATH, values, case="few tokens", close=("logprobs",))
    drawn = (output.tokens >= 0).sum(1).tolist()
    assert drawn == ([5, 5, 5, 0, 5] if replacement else [3, 3, 3, 0, 3])
    assert not torch.isin(output.tokens, torch.tensor([0, 2, 5], device=device)).any()
    assert ((output.logprobs == -INFINITY) == (output.tokens == -1)).all()
    more_than_all = make(5, 3, 8, device=device)
    output, _ = check_operation(PATH, more_than_all, case="k > V", close=("logprobs",))
    assert (output.tokens[:, 3:] == -1).all()
    assert (output.tokens[:, :3].sort(1).values == torch.arange(3, device=device)).all()


def test_greedy_rows_are_a_top_k_tree(device):
    values = make(5, 61, device=device)
    values["draft_logits"] = (2.0 * values["draft_logits"]).round() / 2.0  # ties
    values["temperature"].zero_()
    best = values["draft_logits"].sort(dim=1, descending=True, stable=True).indices[:, :4]
    output, _ = check_operation(PATH, values, case="greedy", close=("logprobs",))
    assert torch.equal(output.tokens, best)
    assert torch.allclose(output.logprobs, values["draft_logits"].log_softmax(1).gather(1, best), atol=1e-5)
    repeated = eagle_kernels.raw.sample_children(**{**values, "replacement": True})
    assert torch.equal(repeated.tokens, best[:, :1].expand(5, 4))


@pytest.mark.cross
@REPLACEMENT
def test_the_key_alone_decides(replacement, device):
    """Not the batch, the row, the number of children, or the integers' type; but the node, position and seed."""
    values = make(5, 200, 6, replacement=replacement, device=device)
    values["temperature"].fill_(1.5)
    whole = eagle_kernels.raw.sample_children(**values)
    names = ("draft_logits", "positions", "seeds", "temperature", "nodes")
    alone = eagle_kernels.raw.sample_children(**values | {name: values[name][3:4].contiguous() for name in names})
    assert torch.equal(alone.tokens[0], whole.tokens[3])
    fewer = eagle_kernels.raw.sample_children(**{**values, "num_children": 2})
    assert torch.equal(fewer.tokens, whole.tokens[:, :2])
    narrow = {name: values[name].to(torch.int32) for name in ("positions", "nodes")}
    assert torch.equal(eagle_kernels.raw.sample_children(**values | narrow).tokens, whole.tokens)
    for name in ("nodes", "positions", "seeds"):
        other = eagle_kernels.raw.sample_children(**{**values, name: values[name] + 1})
        assert (other.tokens != whole.tokens).any(1).all(), name
    root = eagle_kernels.raw.sample_children(**{**values, "nodes": None})
    zeros = eagle_kernels.raw.sample_children(**{**values, "nodes": torch.zeros_like(values["nodes"])})
    assert torch.equal(root.tokens, zeros.tokens)


@REPLACEMENT
def test_law_of_ordered_pairs(replacement, device):
    """Plackett-Luce without replacement, independence with: chi-square over all pairs."""
    lanes, probs = 1 << 16, torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03], dtype=torch.float64)
    pairs = draw_pairs(lanes, probs, replacement, device)
    law = probs[:, None] * probs[None, :]
    if not replacement:
        law = law / (1.0 - probs[:, None])
        law.fill_diagonal_(0.0)
    assert_follows_law(pairs, law.flatten())


@pytest.mark.gpu
@REPLACEMENT
def test_law_of_ordered_pairs_over_a_million_lanes(replacement, device):
    probs = torch.softmax(torch.linspace(-2.0, 2.0, 12, dtype=torch.float64), 0)
    law = probs[:, None] * probs[None, :]
    if not replacement:
        law = law / (1.0 - probs[:, None])
        law.fill_diagonal_(0.0)
    assert_follows_law(draw_pairs(1 << 20, probs, replacement, device), law.flatten())


def draw_pairs(lanes, probs, replacement, device):
    temperature = 0.7
    output = eagle_kernels.sample_children(
        (temperature * probs.log()).to(torch.float32).expand(lanes, -1).contiguous().to(device),
        torch.full((lanes,), 12, device=device),
        torch.arange(lanes, device=device) // 4,
        torch.full((lanes,), temperature, device=device),
        torch.arange(lanes, device=device) % 4,  # nodes of one request draw independently
        num_children=2,
        replacement=replacement,
    )
    return (output.tokens[:, 0] * len(probs) + output.tokens[:, 1]).cpu()


@REPLACEMENT
def test_nodes_of_one_request_draw_independently(replacement, device):
    """Nodes next to each other at one position: chi-square on the two children of each, jointly."""
    lanes, probs = 1 << 13, torch.tensor([0.6, 0.3, 0.1])
    numbers, law = torch.zeros(lanes, dtype=torch.int64), torch.ones(1)
    of_pairs = probs[:, None] * (probs if replacement else (probs / (1 - probs[:, None])).fill_diagonal_(0.0))
    for node in (1, 2):
        tokens = eagle_kernels.sample_children(
            probs.log().expand(lanes, -1).contiguous().to(device),
            torch.full((lanes,), 12, device=device),
            torch.arange(lanes, device=device),
            torch.ones(lanes, device=device),
            torch.full((lanes,), node, device=device),
            num_children=2,
            replacement=replacement,
        ).tokens.cpu()
        numbers = (numbers * 3 + tokens[:, 0]) * 3 + tokens[:, 1]
        law = (law[:, None] * of_pairs.flatten()).flatten()
    assert_follows_law(numbers, law)


@pytest.mark.gpu
@REPLACEMENT
def test_large_vocabulary(replacement, device):
    values = make(32, 128256, 8, replacement=replacement, device=device, dtype=torch.bfloat16)
    check_operation(PATH, values, case="128256", close=("logprobs",))
