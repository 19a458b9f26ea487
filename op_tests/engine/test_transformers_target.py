"""Stock models of transformers behind the adapter, in fp32: their text, their hidden states, and what is refused."""

from __future__ import annotations

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.causal_attend import causal_attend
from eagle_kernels.engine.models.loading import load_target
from eagle_kernels.engine.models.protocol import FINAL_NORM, KVShape
from eagle_kernels.engine.models.transformers_target import TransformersTarget
from op_tests.engine.toys import ToyModel

transformers = pytest.importorskip("transformers", reason="the models are those of transformers")

VOCAB, WIDTH = 83, 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # attention far from uniform
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}

# family of transformers, what its config says beside SIZES
CASES = {
    "gpt2": ("GPT2", {"scale_attn_by_inverse_layer_idx": True}),
    "gemma2": ("Gemma2", CAPS | {"sliding_window": 4, "query_pre_attn_scalar": 9, "num_hidden_layers": 4}),
    "qwen3 moe": ("Qwen3Moe", EXPERTS | {"num_experts": 4, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
    "gpt oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}),  # sinks
    "opt": ("OPT", {"ffn_dim": 40, "word_embed_proj_dim": WIDTH}),
    "gpt neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "granite": ("Granite", {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 3.0}),
}
CASES["granite"][1].update(residual_multiplier=0.7)
MOE = {"qwen3 moe", "mixtral", "gpt oss"}


def make(family: str, changes: dict) -> torch.nn.Module:
    """A random model of transformers with its own eager attention."""
    torch.manual_seed(0)
    config = getattr(transformers, family + "Config")(**SIZES | changes)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.3)
            elif "norm" in name or "ln_" in name:
                parameter.uniform_(0.5, 1.5)
            elif "emb" not in name and "wte" not in name:
                parameter.mul_(2)  # a layer changes more than the embedding, which is often the output too, repeats
    return model


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """(name, the stock model on the CPU, the adapter read from its folder on the device under test)."""
    theirs, folder = make(*CASES[request.param]), tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    return request.param, theirs, load_target(folder, "cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def test_logits_and_hidden_states_are_those_of_transformers(pair):
    name, theirs, ours = pair
    assert isinstance(ours, TransformersTarget) and type(ours.model) is type(theirs)
    tokens = torch.randint(VOCAB, (2, 19))
    expected = theirs(tokens, output_hidden_states=True)
    num_layers = theirs.config.num_hidden_layers
    # theirs end with the normed stream, so the one before the norm is compared by way of the norm
    capture = (1, FINAL_NORM, *range(num_layers), num_layers)
    rows = tokens.to(ours.device), torch.arange(19, device=ours.device).expand(2, -1)
    logits, features = (tensor.cpu() for tensor in ours.forward(*rows, causal_attend, capture=capture))
    torch.testing.assert_close(logits, expected.logits, atol=3e-5, rtol=1e-4)
    streams = dict(zip(capture, features.split(WIDTH, dim=-1)))
    for layer in range(num_layers):
        torch.testing.assert_close(streams[layer], expected.hidden_states[layer], atol=3e-5, rtol=1e-4)
    torch.testing.assert_close(features[..., :WIDTH], expected.hidden_states[1], atol=3e-5, rtol=1e-4)
    torch.testing.assert_close(streams[FINAL_NORM], expected.hidden_states[-1], atol=3e-5, rtol=1e-4)
    (norm,) = [part for path, part in theirs.base_model.named_modules() if path in FINAL_NORMS]
    torch.testing.assert_close(norm(streams[num_layers]), streams[FINAL_NORM], atol=3e-5, rtol=1e-4)
    last = ours.forward(*rows, causal_attend, last_only=True)
    assert last.features is None
    torch.testing.assert_close(last.logits.cpu(), logits[:, -1:], atol=1e-5, rtol=1e-5)


FINAL_NORMS = ("ln_f", "norm", "decoder.final_layer_norm", "final_layer_norm")


def test_greedy_text_is_that_of_transformers(pair):
    """Plain and speculative, trees and chains; the model as its own draft, and drafts of a stranger."""
    _, theirs, ours = pair
    prompts = torch.randint(1, VOCAB, (2, 9))
    expected = theirs.generate(prompts, max_new_tokens=14, do_sample=False, attention_mask=torch.ones_like(prompts))
    expected = expected[:, 9:].tolist()
    assert len(set(expected[0] + expected[1])) > 5, "a text of few tokens proves little"
    stranger = ToyModel(vocab_size=VOCAB, device=ours.device)
    tree, chain = EAGLEConfig(topk=2, num_steps=3, num_draft_tokens=8, page_size=4), EAGLEConfig.chain(4)
    for config in tree, chain:
        for draft in stranger, ours:
            assert EAGLEInference(draft, ours, config).generate(prompts, 14).output_ids == expected
    engine = EAGLEInference(ours, ours, chain)
    assert engine.generate(prompts, 11).stats.mean_accept_length == 5  # all of its own guesses are right
    assert engine.generate(prompts, 14, speculative=False).output_ids == expected


def test_sampled_text_is_that_of_plain_decoding(pair):
    _, _, ours = pair
    engine = EAGLEInference(ours, ours, EAGLEConfig(topk=3, num_steps=2, temperature=0.9, top_p=0.95, prefill_chunk=4))
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9]]
    text = engine.generate(prompts, 10, seeds=[3, 4]).output_ids
    assert text == engine.generate(prompts, 10, seeds=[3, 4], speculative=False).output_ids
    stranger = EAGLEInference(ToyModel(vocab_size=VOCAB, device=ours.device), ours, engine.config)
    assert text == stranger.generate(prompts, 10, seeds=[3, 4]).output_ids


def test_what_the_engine_is_told(pair):
    name, theirs, ours = pair
    assert (ours.vocab_size, ours.hidden_size, ours.max_length) == (VOCAB, WIDTH, 64)
    heads = (4, 16) if name in ("gpt2", "opt", "gpt neox") else (2, 16)  # those have no key-value heads of their own
    assert ours.kv_shape == KVShape(theirs.config.num_hidden_layers, *heads)
    assert ours.get_input_embeddings() is ours.model.get_input_embeddings()
    assert ours.get_output_embeddings() is ours.model.get_output_embeddings()
    assert not any(parameter.requires_grad for parameter in ours.model.parameters())
    assert ours.can_be_captured == (name not in MOE)
