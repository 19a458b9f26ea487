"""ERNIE's next-token module in its published layout: against transformers' decoder layer, and as a drafter."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.layers.gated import GatedFeedForward
from eagle_kernels.engine.models.loading import load_draft, load_target, read_head
from eagle_kernels.engine.models.protocol import FINAL_NORM, ModelError
from eagle_kernels.reference.causal_attend import causal_attend
from op_tests.engine.ernie import write_with_module
from op_tests.engine.families import SIZES

pytest.importorskip("transformers")


@torch.no_grad()
def test_the_module_is_that_of_fastdeploy(tmp_path):
    """The embedding first, a plain layer with interleaved RoPE, and the target's final norm."""
    theirs, layer, others = write_with_module(tmp_path)
    file, target = read_head(tmp_path), load_target(tmp_path)
    assert (file.kind, file.format_name) == ("MTP", "ERNIE (next-token modules)")
    draft = load_draft(tmp_path, target)
    assert draft.num_modules == 1 and draft.aux_layers == (FINAL_NORM,)
    assert isinstance(draft.mtp_layers[0].mlp, GatedFeedForward)
    ids, hidden = torch.randint(SIZES["vocab_size"], (1, 9)), torch.randn(1, 9, SIZES["hidden_size"])
    positions = torch.arange(3, 12)[None]

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + theirs.config.rms_norm_eps) * weight

    embedding = theirs.model.embed_tokens(ids)
    pair = torch.cat((norm(embedding, others["emb_norm"]), norm(hidden, others["hidden_norm"])), dim=-1)
    mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    angles = theirs.model.rotary_emb(hidden, positions)
    layer.self_attn.config._attn_implementation = "eager"
    made = layer(pair @ others["linear_proj"].T, attention_mask=mask, position_embeddings=angles)
    made = made[0] if isinstance(made, tuple) else made
    expected = norm(made, theirs.model.norm.weight)
    output = draft(ids, hidden, positions, causal_attend, from_target=True)
    torch.testing.assert_close(output.hidden, expected, atol=3e-5, rtol=1e-4)
    torch.testing.assert_close(output.logits, theirs.lm_head(expected), atol=3e-5, rtol=1e-4)


def test_text_is_that_of_plain_decoding(tmp_path, device):
    write_with_module(tmp_path)
    target = load_target(tmp_path, device)
    draft = load_draft(tmp_path, target)
    prompts = torch.randint(1, SIZES["vocab_size"], (2, 11))
    for tree in {"topk": 1, "num_draft_tokens": 4}, {"topk": 2, "num_draft_tokens": 7}:
        engine = EAGLEInference(draft, target, EAGLEConfig(**tree, num_steps=3, method="mtp"))
        expected = engine.generate(prompts, 14, speculative=False)
        assert engine.generate(prompts, 14).output_ids == expected.output_ids


def test_what_a_module_lacks_is_named(tmp_path):
    write_with_module(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.mtp_linear_proj.0.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    target = load_target(tmp_path)
    with pytest.raises(ModelError, match=r"missing tensors: mtp_layers.0.input_proj.weight"):
        load_draft(tmp_path, target)
