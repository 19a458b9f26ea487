"""The draft's tokens in the vLLM plug-in are those that the scattered logits of vLLM's own give."""

from types import SimpleNamespace

import pytest
import torch

from eagle_kernels.integrations.vllm import drafting, parts

HIDDEN, DRAFT_VOCAB, VOCAB = 8, 12, 40


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(parts.SWITCHES, "used", set())


def speculator_of(device, offsets=True, **changes):
    """A speculator whose head has a vocabulary of its own, and offsets from it to the target's."""
    head = torch.randn(DRAFT_VOCAB, HIDDEN, device=device)
    known = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values.to(device)
    model = SimpleNamespace(lm_head=head, logits_processor=lambda head, hidden: hidden @ head.T)
    if offsets:
        model.draft_id_to_target_id = known - torch.arange(DRAFT_VOCAB, device=device)
    fields = {"use_local_argmax_reduction": False, "draft_logits": None}
    return SimpleNamespace(model=model, **fields | changes), known


def scattered(speculator, known, hidden) -> torch.Tensor:
    """vLLM's own: the best of logits that are scattered into the target's vocabulary."""
    logits = torch.full((len(hidden), VOCAB), float("-inf"), device=hidden.device)
    logits[:, known] = speculator.model.logits_processor(speculator.model.lm_head, hidden)
    return logits.argmax(-1)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_tokens(backend, batch_size, device):
    speculator, known = speculator_of(device)
    hidden = torch.randn(batch_size, HIDDEN, device=device)
    tokens = drafting.sample_draft(None, speculator, hidden, *range(4), spec_step_idx=1)  # of which ours needs none
    assert tokens.dtype == torch.int64 and torch.equal(tokens, scattered(speculator, known, hidden))
    assert parts.SWITCHES.used == {"draft"}


def test_ties_go_to_the_first(backend, device):
    speculator, known = speculator_of(device)
    assert drafting.sample_draft(None, speculator, torch.zeros(2, HIDDEN, device=device)).tolist() == [known[0]] * 2


@pytest.mark.parametrize(
    ("offsets", "changes"),
    [(False, {}), (True, {"use_local_argmax_reduction": True}), (True, {"draft_logits": "kept"})],
    ids=["one vocabulary", "ranks", "drawn"],
)
def test_what_is_left_to_vllm(offsets, changes):
    """Heads with the target's vocabulary, or none of their own, ranks that each look for their best, and draws."""
    speculator, _ = speculator_of("cpu", offsets, **changes)
    original = lambda *given, **options: (*given, options)  # noqa: E731
    wanted = (speculator, "hidden", "positions", {"num_steps": 3})
    assert drafting.sample_draft(original, speculator, "hidden", "positions", num_steps=3) == wanted
    speculator.model.draft_id_to_target_id = None
    assert drafting.sample_draft(original, speculator, "hidden", "positions", num_steps=3) == wanted
    assert parts.SWITCHES.used == set()
