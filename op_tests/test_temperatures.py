"""From 1e-5 on rows are sampled, below they are greedy: for every op that has a temperature, kernel and reference.

At an infinite one all tokens are alike, but for +inf.
"""

import pytest
import torch

import eagle_kernels
from op_tests.harness.statistics import FALSE_ALARM, assert_follows_law
from op_tests.rounds import SCHEMES, emitted_in_rounds

# of the interpreter, in lanes that are masked
pytestmark = pytest.mark.filterwarnings("ignore:invalid value")

EDGE = torch.tensor(1e-5)
BELOW = torch.nextafter(EDGE, torch.tensor(0.0)).item()
SAMPLED = (EDGE.item(), 2e-4)
PROBS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def root_alone(count, device):
    """Trees without drafts."""
    zeros = torch.zeros(count, 1, dtype=torch.int64, device=device)
    return zeros, torch.arange(count, device=device)[:, None], zeros - 1, zeros - 1


def draw(op, logits, temperature, ops=eagle_kernels):
    """Tokens [R] behind roots, or first children, for logits [R, V] at one temperature: every op's own draw."""
    count, device = len(logits), logits.device
    keys = torch.full((count,), 9, device=device), torch.arange(count, device=device)
    temperature = torch.full((count,), temperature, device=device)
    links = root_alone(count, device)
    if op == "sample_from_logits":
        return ops.sample_from_logits(logits, *keys, temperature)
    if op == "sample_children":
        return ops.sample_children(logits, *keys, temperature, num_children=1).tokens[:, 0]
    if op == "verify_chain":
        return ops.verify_chain(links[0], logits, logits[:0], *keys, temperature).predicts
    if op == "verify_tree_sampled":
        return ops.verify_tree_sampled(*links, logits, *keys, temperature, spec_steps=0).predicts
    if op == "verify_tree_typical":
        return ops.verify_tree_typical(
            *links, logits, *keys, temperature, temperature, temperature, spec_steps=0
        ).predicts
    return getattr(ops, op)(*links, logits, logits, *keys, temperature, spec_steps=0).predicts


OPS = (
    "sample_children", "sample_from_logits", "verify_chain", "verify_tree_rejection", "verify_tree_sampled",
    "verify_tree_traversal", "verify_tree_typical",
)  # fmt: skip


@pytest.mark.cross
@pytest.mark.parametrize("op", OPS)
def test_where_greedy_begins(op, device):
    for temperature in (*SAMPLED, BELOW):
        logits = (temperature * PROBS.log()).float().to(device).repeat(300, 1)
        tokens = draw(op, logits, temperature).long().cpu()
        kernels = draw(op, logits[:10], temperature, eagle_kernels.raw).long().cpu()
        assert torch.equal(kernels, tokens[:10])
        if temperature == BELOW:
            assert (tokens == 0).all()
        else:
            assert_follows_law(tokens, PROBS, FALSE_ALARM / len(OPS) / len(SAMPLED))


@pytest.mark.parametrize("op", OPS)
def test_an_infinite_temperature(op, device):
    logits = 5 * torch.randn(8, 70)
    logits[range(6), [0, 3, 31, 32, 68, 69]] = float("inf")
    tokens = draw(op, logits, float("inf")).tolist()
    assert tokens[:6] == [0, 3, 31, 32, 68, 69]
    assert draw(op, logits.to(device), float("inf"), eagle_kernels.raw).tolist() == tokens


@pytest.mark.parametrize("scheme", SCHEMES)
def test_drafts_just_above_greedy(scheme, device):
    """Where a draft is taken as chosen that was drawn, or the other way round, the law of what is emitted shows it."""
    target, draft = (EDGE * PROBS[order].log() for order in ([0, 1, 2], [1, 2, 0]))
    tables = [each.float().to(device).repeat(3, 1) for each in (target, draft)]
    with device:
        text = emitted_in_rounds(scheme, SCHEMES[scheme], *tables, lanes=600, num_tokens=2, temperatures=(1e-5, 1e-5))
    law = PROBS[:, None] * PROBS
    assert_follows_law((text[:, 0] * 3 + text[:, 1]).cpu(), law.flatten(), FALSE_ALARM / len(SCHEMES))
