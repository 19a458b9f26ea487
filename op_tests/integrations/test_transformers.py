"""Our attention by transformers' interface: against attention row by row, and Hugging Face's own models with it."""

import itertools

import pytest
import torch

from eagle_kernels.integrations import transformers as adapter
from eagle_kernels.integrations.transformers import attention, register

OPTIONS = {
    "plain": {}, "scaling": {"scaling": 0.4}, "window": {"sliding_window": 3}, "cap": {"softcap": 1.5},
    "sinks": {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "all": {"scaling": 0.7, "sliding_window": 2, "softcap": 2.0, "s_aux": torch.tensor([1.0, 0.0, -0.5, 3.0])},
}  # fmt: skip


def attended(query, key, value, is_token, *, is_causal, scaling=None, sliding_window=None, softcap=None, s_aux=None):
    """Attention in float64, the last rows of each sequence one after another; a window counts tokens, not padding."""
    query, key, value = query.double(), key.double(), value.double()
    (batch_size, num_heads, num_query, size), num_kept = query.shape, is_token.shape[1]
    output = torch.zeros(batch_size, num_query, num_heads, size, dtype=torch.float64, device=query.device)
    for request, row, head in itertools.product(range(batch_size), range(num_query), range(num_heads)):
        place, kv_head = num_kept - num_query + row, head * key.shape[1] // num_heads
        seen = [other for other in range(num_kept) if is_token[request, other] and (other <= place or not is_causal)]
        seen = seen[-sliding_window:] if sliding_window else seen
        if not is_token[request, place]:
            continue  # anything
        logits = key[request, kv_head, seen] @ query[request, head, row] * (scaling or size**-0.5)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        sink = logits.new_empty(0) if s_aux is None else s_aux[head : head + 1].double()
        weights = torch.cat([logits, sink]).softmax(-1)[: len(seen)]
        output[request, row, head] = weights @ value[request, kv_head, seen]
    return output


@pytest.mark.parametrize("num_query", [1, 3, 7])
@pytest.mark.parametrize("padding", ["none", "left", "right", "holes", "a longer cache"])
@pytest.mark.parametrize("name", OPTIONS)
def test_rows(name, padding, num_query, device):
    options = {key: value.to(device) if key == "s_aux" else value for key, value in OPTIONS[name].items()}
    query = torch.randn(3, 4, num_query, 16, device=device)
    key, value = torch.randn(2, 3, 2, 7 + 4 * (padding == "a longer cache"), 16, device=device)
    mask = torch.ones(3, 7, dtype=torch.bool, device=device)
    if padding == "left":
        mask[1, :4], mask[2, :6] = False, False
    elif padding == "right":
        mask[1, 5:], mask[2, 1:] = False, False
    elif padding == "holes":
        mask[0, 3], mask[2, 4:6], mask[2, 0] = False, False, False
    given = None if padding == "none" else mask
    for is_causal in (True, False) if name in ("plain", "scaling", "cap", "sinks") and num_query > 1 else (True,):
        wanted = attended(query, key, value, mask, is_causal=is_causal, **options)
        module = torch.nn.Module()
        module.is_causal = not is_causal
        output, weights = attention(module, query, key, value, given, is_causal=is_causal, **options)
        module.is_causal = is_causal
        again, _ = attention(module, query, key, value, given, **options)
        is_row = mask[:, -num_query:]
        torch.testing.assert_close(output[is_row], wanted[is_row].float(), atol=2e-5, rtol=2e-5)
        assert weights is None and torch.equal(again[is_row], output[is_row])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"kv_length": 5, "q_length": 5}, None),
        ({"kv_length": 9, "q_length": 1, "q_offset": 4}, 5),  # of a preallocated cache
        ({"kv_length": 9, "q_length": 2, "q_offset": torch.tensor(4)}, 6),
        ({"kv_length": 4, "q_length": 1, "q_offset": 8, "kv_offset": 5}, None),  # of one that keeps a window
        ({"kv_length": 4, "q_length": 1, "q_offset": 6, "kv_offset": 5}, 2),
        ({"kv_length": 9, "cache_position": torch.tensor([3, 4])}, 5),  # before version 5
        ({"kv_length": 4, "cache_position": torch.tensor([8]), "kv_offset": 6}, 3),
    ],
)  # fmt: skip
def test_how_much_of_a_cache_is_filled(given, kept):
    mask = adapter._padding_mask(batch_size=3, **given)
    assert mask is None if kept is None else mask.dtype == torch.bool and mask.tolist() == [[True] * kept] * 3


def test_a_mask_is_of_the_last_keys():
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    find = lambda mask, length: adapter._padding_mask(batch_size=2, kv_length=length, attention_mask=mask)  # noqa: E731
    assert find(mask, 4).tolist() == mask.tolist() == find(mask, 6).tolist()
    assert find(mask, 3) is None and find(torch.ones(2, 4), 4) is None
    assert find(torch.ones(2, 4), 6).tolist() == [[1] * 4] * 2


SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip

CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "a window": ("MistralConfig", {"sliding_window": 5}),
    "a soft cap and windows": (
        "Gemma2Config", {"sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 10},
    ),
    "sinks and windows": (
        "GptOssConfig", {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}  # fmt: skip


def pair(kind: str, device):
    """The same random weights behind eager attention and behind ours."""
    transformers = pytest.importorskip("transformers")
    register()
    models, (config_class, options) = [], CONFIGS[kind]
    for name in ("eager", "eagle_kernels"):
        torch.manual_seed(0)
        config = getattr(transformers, config_class)(**SIZES, **options)
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
