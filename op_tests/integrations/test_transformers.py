"""Hugging Face's own models with our attention, against their eager one: padding, caches, windows, caps, sinks."""

from __future__ import annotations

import pytest
import torch

from eagle_kernels.integrations.transformers import attention, register

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "a window": lambda: transformers.MistralConfig(**SIZES, sliding_window=5),
    "a soft cap and windows": lambda: transformers.Gemma2Config(
        **SIZES, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=10
    ),
    "sinks and windows": lambda: transformers.GptOssConfig(
        **SIZES, sliding_window=4, num_local_experts=2, num_experts_per_tok=1
    ),
}


@pytest.fixture(autouse=True)
def registered():
    register()


def pair(kind: str, device):
    """The same random weights behind eager attention and behind ours."""
    models = []
    for name in ("eager", "eagle_kernels"):
        torch.manual_seed(0)
        config = CONFIGS[kind]()
        config._attn_implementation = name
        models.append(transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name))
    models[1].load_state_dict(models[0].state_dict())
    assert models[1].config._attn_implementation == "eagle_kernels"
    return [model.eval().to(device) for model in models]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
def test_logits(kind, padding, device):
    eager, ours = pair(kind, device)
    tokens = torch.randint(97, (3, 11), device=device)
    mask = torch.ones_like(tokens)
    if padding == "left":
        mask[1, :4], mask[2, :10] = 0, 0
    elif padding == "right":
        mask[1, 7:], mask[2, 1:] = 0, 0
    elif padding == "holes":
        mask[0, 3], mask[2, 5:7], mask[2, 0] = 0, 0, 0
    if padding == "holes" and kind != "llama":
        pytest.skip("eager windows count padding between tokens")
    with torch.no_grad():
        expected, got = (model(tokens, attention_mask=mask).logits for model in (eager, ours))
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_generation(kind, device):
    """Tokens of greedy decoding from left-padded prompts; every step but the first attends one query."""
    eager, ours = pair(kind, device)
    tokens = torch.randint(97, (2, 6), device=device)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected, got = (model.generate(tokens, **options) for model in (eager, ours))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("num_prompt", [3, 6])
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
def test_generation_with_a_preallocated_cache(kind, num_prompt, is_padded, device):
    """The cache is longer than what it holds, which only the mask tells; windows fill at once, later, or never."""
    eager, ours = pair(kind, device)
    tokens = torch.randint(97, (2, num_prompt), device=device)
    mask = torch.ones_like(tokens)
    mask[1, : num_prompt // 2] = not is_padded
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    options |= {"cache_implementation": "static", "disable_compile": True}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    expected, got = (model.generate(tokens, **options) for model in (eager, ours))
    assert torch.equal(got.sequences, expected.sequences)
    for logits, wanted in zip(got.logits, expected.logits):
        torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=2e-5)


def test_what_is_not_supported_is_named():
    query, key = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    module = torch.nn.Identity()
    with pytest.raises(ValueError, match="attention has no dropout, got dropout=0.1"):
        attention(module, query, key, key, None, dropout=0.1)
    with pytest.raises(ValueError, match=r"attention_mask must be \[batch, tokens\] or None, got shape \[1, 1, 3, 3\]"):
        attention(module, query, key, key, torch.zeros(1, 1, 3, 3))
    with pytest.raises(ValueError, match="must have one head dimension"):
        attention(module, query, key, torch.zeros(1, 2, 3, 8), None)
