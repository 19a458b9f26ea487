"""DeepSeek's models: what their cache holds, next-token modules (GLM's have the same layout), and what is refused.

That they are transformers' models is in `test_families`, their texts with heads of all formats in `test_identity`, and
those with all drafters in `test_drafters_of_families`.
"""

import pytest
import torch

pytest.importorskip("transformers")

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.batch.kv_pool import KVPool
from eagle_kernels.engine.models.loading import load_draft, load_target, read_head
from eagle_kernels.engine.models.protocol import FINAL_NORM, KVShape, LatentShape, ModelError
from eagle_kernels.reference.causal_attend import causal_attend
from op_tests.engine import heads
from op_tests.engine.deepseek import write_with_modules
from op_tests.engine.drafting import PROMPTS, ModelOracle, pause_between_drafts
from op_tests.engine.expert_models import OF_FAMILY
from op_tests.engine.families import GROUPS, LATENT, SIZES, write_target
from op_tests.engine.heads import edit_config, edit_tensors


def deepseek(folder, device="cpu", family="DeepseekV3", **changes):
    write_target(family, LATENT | GROUPS | changes, folder)
    return load_target(folder, device)


def test_a_token_takes_one_row_of_the_cache_in_each_layer(tmp_path, device):
    target = deepseek(tmp_path, device)
    assert target.kv_shape == LatentShape(3, 1, 32, 24)
    pool = KVPool(target.kv_shape, 5, 4, target.dtype, target.device)
    assert pool.latent_cache.shape == (3, 5, 4, 32)
    pool.latent_cache.copy_(torch.randn(3, 5, 4, 32))
    halves = torch.cat([pool.k_cache, pool.v_cache], dim=-2)  # by which rows move
    assert torch.equal(halves.flatten(-2), pool.latent_cache)
    config = EAGLEConfig(method="naive", page_size=4, max_batch=2, kv_cache_bytes=10 * 4 * 3 * 32 * 4 + 1)
    assert EAGLEInference(None, target, config).workspace_bytes()["kv_cache"] == 10 * 4 * 3 * 32 * 4


SHAPES = {"DeepseekV3": LatentShape(1, 1, 32, 24), "Glm4Moe": KVShape(1, 2, 24),
          "Glm4MoeLite": LatentShape(1, 1, 32, 24)}  # fmt: skip  # of one module


@torch.no_grad()
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("num_modules", [1, 2])
def test_modules_are_those_of_transformers(tmp_path, num_modules, family):
    """Their layers have experts, although the target's first ones have none. Copies of the target's parts are not
    read."""
    theirs, modules = write_with_modules(tmp_path, num_modules, family, wrong_copies=True)
    target, file = load_target(tmp_path), read_head(tmp_path)
    assert (file.kind, file.format_name) == ("MTP", "DeepSeek (next-token modules)")
    draft = load_draft(tmp_path, target)
    assert draft.num_modules == num_modules and draft.kv_shape == SHAPES[family]._replace(num_layers=num_modules)
    assert draft.aux_layers == (FINAL_NORM,)
    tokens, positions = torch.randint(SIZES["vocab_size"], (2, 12)), torch.arange(12).expand(2, -1)
    hidden = torch.randn(2, 12, SIZES["hidden_size"])
    for module in range(num_modules):
        expected = modules.forward_layer(module, hidden, positions, None, input_ids=tokens)
        made = draft.advance(tokens, hidden, positions, causal_attend, module=module)
        torch.testing.assert_close(made, expected, atol=3e-5, rtol=1e-5)
        torch.testing.assert_close(draft.project(made), theirs.lm_head(expected), atol=3e-5, rtol=1e-5)
        hidden = expected


class Oracle(ModelOracle):
    """Computes all rows anew with the modules themselves, which another test compares with transformers'."""

    @torch.inference_mode()
    def drafts(self, text, config):
        target, draft, text = self.engine.target, self.engine.draft, list(text)
        count = len(text) - 1
        tokens = torch.tensor([text[:-1]], device=target.device)
        positions = torch.arange(count, device=target.device)[None]
        hidden = target.forward(tokens, positions, causal_attend, capture=(FINAL_NORM,)).features
        for module in range(config.num_steps):
            shifted = torch.tensor([text[1 + module : 1 + module + count]], device=target.device)
            hidden = draft.advance(shifted, hidden, positions, causal_attend, module=module)
            text.append(int(draft.project(hidden)[0, -1].argmax()))
        return text[count + 1 :]


@pytest.mark.parametrize(
    ("family", "num_modules", "chunk"),
    [("DeepseekV3", 1, 2048), ("DeepseekV3", 1, 3), ("DeepseekV3", 2, 3), ("DeepseekV3", 2, 2048), ("Glm4Moe", 1, 3)],
)
def test_drafts_of_modules_are_those_of_all_rows_computed_anew(
    tmp_path, device, monkeypatch, family, num_modules, chunk
):  # fmt: skip
    """Prompts in parts, plain steps in between, where a single module writes rows and attends to nothing."""
    write_with_modules(tmp_path, num_modules, family)
    target = load_target(tmp_path, device)
    config = EAGLEConfig.chain(
        num_modules, method="mtp", page_size=4, prefill_chunk=chunk, max_batch=4, cuda_graph=False
    )
    engine = EAGLEInference(load_draft(tmp_path, target), target, config)
    oracle = Oracle(engine, monkeypatch)
    pause_between_drafts(engine)
    assert oracle.num_checked > 15


@pytest.mark.parametrize("family", SHAPES)
def test_text_with_a_module_is_that_of_transformers(tmp_path, device, family):
    """One module drafts trees as well; `from_pretrained` takes it from the target's folder."""
    theirs, _ = write_with_modules(tmp_path, 1, family)
    prompts = torch.randint(1, SIZES["vocab_size"], (3, 9))
    expected = theirs.generate(prompts, max_new_tokens=14, do_sample=False, attention_mask=torch.ones_like(prompts))
    for options in {"topk": 3, "num_steps": 3, "num_draft_tokens": 9}, {"topk": 1, "num_steps": 3}:
        config = EAGLEConfig(method="mtp", page_size=4, eos_token_ids=(), **options)
        engine = EAGLEInference.from_pretrained(None, tmp_path, config, device=device, dtype="float32")
        assert engine.generate(prompts, 14).output_ids == expected[:, 9:].tolist()


def test_heads_of_the_same_attention(tmp_path, device):
    """An EAGLE-1 head whose layer has latent attention; after plain steps it writes rows alone."""
    from eagle_kernels.engine.models.heads import Eagle1Config, Eagle1Head

    target = deepseek(tmp_path, device, eos_token_id=None)
    sizes = SIZES | LATENT | GROUPS | {"model_type": "deepseek_v3", "num_hidden_layers": 1}
    torch.manual_seed(3)
    head = Eagle1Head(Eagle1Config.from_dict(sizes)).to(device).eval().requires_grad_(False).bind(target)
    assert head.kv_shape == LatentShape(1, 1, 32, 24)
    config = EAGLEConfig(topk=2, num_steps=3, num_draft_tokens=6, max_batch=4, cuda_graph=False, eos_token_ids=())
    engine = EAGLEInference(head, target, config)
    requests = pause_between_drafts(engine)
    engine.is_speculating = False
    for request in requests:
        plain = engine.submit(request.prompt, SamplingParams(max_new_tokens=len(request.output_ids)))
        engine.collect()
        assert request.error is None and request.output_ids == plain.output_ids


def test_heads_of_keys_and_values_whose_file_has_the_target_s_settings(tmp_path):
    """A head by Llama's layers for a DeepSeek often keeps keys of the target's config.json, which it does not read."""
    sizes = {name: heads.WIDTHS[name] for name in ("vocab_size", "hidden_size")}
    target = deepseek(tmp_path / "target", **sizes, num_hidden_layers=8, num_attention_heads=4)
    folder = heads.write_specforge(tmp_path / "head", heads.eagle3_tensors())
    edit_config(folder, model_type="deepseek_v3", n_routed_experts=256, n_group=8)
    head = load_draft(folder, target)
    assert type(head.kv_shape) is KVShape
    engine = EAGLEInference(head, target, EAGLEConfig(topk=2, num_steps=3, num_draft_tokens=6, eos_token_ids=()))
    assert engine.generate(PROMPTS, 9).output_ids == engine.generate(PROMPTS, 9, speculative=False).output_ids


@pytest.mark.parametrize(("quantize", "share"), [("wint8", 0.1), ("block_wise_fp8", 0.5)])
def test_quantised_weights(tmp_path, device, quantize, share):
    """Also of the linear whose halves are multiplied by head: they are widened once."""
    sizes = {**LATENT, **GROUPS, **OF_FAMILY["deepseek_v3"], "num_attention_heads": 8, "moe_intermediate_size": 128}
    write_target("DeepseekV3", sizes | {"intermediate_size": 256, "q_lora_rank": 128, "kv_lora_rank": 128}, tmp_path)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    target = load_target(tmp_path, device, dtype, quantize=quantize)
    layer = target.model.layers[1]
    assert hasattr(layer.self_attn.a_proj, "parts") and hasattr(layer.self_attn.kv_b_proj, "parts")
    assert not layer.mlp.gate_up.is_floating_point()
    config = EAGLEConfig(method="ngram", topk=2, num_steps=3, min_ngram_size=1, eos_token_ids=())
    engine = EAGLEInference(None, target, config)
    assert engine.generate(PROMPTS, 9).output_ids == engine.generate(PROMPTS, 9, speculative=False).output_ids
    whole = load_target(tmp_path, device, dtype)
    positions = torch.arange(20, device=device)[None]
    with torch.no_grad():
        logits, expected = (model(positions * 3, positions, causal_attend).logits.float() for model in (target, whole))
    assert (logits - expected).norm() < share * expected.norm()


REFUSED = [
    ({"kv_lora_rank": 520}, "kv_lora_rank must be even and lie in 4..512, got 520"),
    ({"qk_rope_head_dim": 130}, "qk_rope_head_dim must be at most 128, got 130"),
    ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, since RoPE rotates pairs, got 7"),
    ({"kv_lora_rank": 22}, "kv_lora_rank + qk_rope_head_dim must be 32 to match model.layers.0.self_attn.kv_a_proj_"),
    ({"v_head_dim": 12}, "must be 144 to match model.layers.0.self_attn.kv_b_proj.weight of shape [144, 24], got"),
    ({"q_lora_rank": None}, "missing tensors: model.layers.0.self_attn.q_proj.weight"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3 is not implemented (only 6)"),
    ({"num_experts_per_tok": 5}, "topk_group must leave num_experts_per_tok experts, got 2"),
    ({"n_group": 4}, "n_group must divide 6 experts in pairs, got 4"),
    ({"topk_group": 4}, "topk_group must leave num_experts_per_tok experts, got 4"),
    ({"first_k_dense_replace": "1"}, "first_k_dense_replace must be an integer, got '1'"),
    ({"first_k_dense_replace": 2}, "missing tensors: model.layers.1.mlp.down_proj.weight"),
    ({"moe_intermediate_size": 30}, "experts.0.down_proj.weight has shape [60, 28], but config.json says [60, 30]"),
    ({"scoring_func": "softmax"}, "scoring_func='softmax' is not implemented (only 'sigmoid')"),
    ({"moe_layer_freq": 2}, "moe_layer_freq=2 is not implemented (only 1)"),
    ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types must name each layer, got ['dense', 'sparse']"),
    ({"mlp_layer_types": ["dense", "sparse", "x"]}, "mlp_layer_types with 'x' is not implemented"),
    ({"mlp_layer_types": ["dense", "dense", "sparse"]}, "missing tensors: model.layers.1.mlp.down_proj.weight"),
    ({"num_experts": 6, "model_type": "llama"}, "num_experts=6 is not implemented (only None)"),
]


@pytest.mark.parametrize(("change", "told"), REFUSED, ids=str)
def test_what_does_not_fit_is_named(tmp_path, change, told):
    write_target("DeepseekV3", LATENT | GROUPS, tmp_path)
    edit_config(tmp_path, **change)
    with pytest.raises(ModelError) as caught:
        load_target(tmp_path)
    assert told in str(caught.value)


def test_folders_of_modules_that_are_refused(tmp_path):
    write_with_modules(tmp_path, 2)
    target = load_target(tmp_path)
    edit_config(tmp_path, num_nextn_predict_layers=3)
    with pytest.raises(ModelError, match=r"num_nextn_predict_layers must be 2 to match the tensors mtp_layers"):
        load_draft(tmp_path, target)
    edit_config(tmp_path, num_nextn_predict_layers=2)
    edit_tensors(tmp_path, **{"model.layers.4.hnorm.weight": None})
    with pytest.raises(ModelError, match="missing tensors: mtp_layers.1.hidden_layernorm.weight"):
        load_draft(tmp_path, target)
