"""Levels of a draft from the head's rows: what is drafted, and so what is emitted, is what its logits give."""

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, ops
from eagle_kernels.engine.models.running import fused_weight
from eagle_kernels.ops.tree import select_from_head
from op_tests.engine.toys import random_eagle1_head, random_head, random_llama

HEADS = {"EAGLE-3": random_head, "EAGLE-1": random_eagle1_head}
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6]]


def fast(monkeypatch) -> None:
    monkeypatch.setattr(select_from_head, "FAST_ROWS", {"default": select_from_head.MAX_ROWS})


@pytest.mark.parametrize("head", HEADS)
def test_drafts_and_texts_are_those_of_logits(head, device, monkeypatch):
    target = random_llama(num_layers=8, device=device).to(torch.bfloat16)
    config = EAGLEConfig(topk=3, num_steps=3, num_draft_tokens=8, accept_policy="accept_all", cuda_graph=False)
    draft, calls, run = HEADS[head](target).to(torch.bfloat16).bind(target), [], ops.select_from_head
    monkeypatch.setattr(ops, "select_from_head", lambda *args, **options: calls.append(0) or run(*args, **options))
    monkeypatch.setattr(select_from_head, "FAST_ROWS", {"default": 0})
    expected = EAGLEInference(draft, target, config).generate(PROMPTS, 20)[0]
    assert not calls
    fast(monkeypatch)
    assert EAGLEInference(draft, target, config).generate(PROMPTS, 20)[0] == expected
    assert calls


def test_only_plain_heads_of_16_bit_are_fused(device, monkeypatch):
    target = random_llama(num_layers=8, device=device)
    draft = random_head(target)
    fast(monkeypatch)
    assert fused_weight(draft, 8) is None  # fp32
    draft = draft.to(torch.bfloat16)
    with torch.no_grad():
        assert fused_weight(draft, 64) is draft.lm_head.weight and fused_weight(draft, 65) is None
        draft.lm_head.bias = torch.nn.Parameter(torch.zeros(len(draft.lm_head.weight)))
        assert fused_weight(draft, 8) is None
        draft.lm_head = type("Quantised", (torch.nn.Linear,), {})(4, 4, bias=False).to(torch.bfloat16)
        assert fused_weight(draft, 8) is None
    assert fused_weight(target, 8) is None
