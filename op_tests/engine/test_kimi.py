"""Kimi-K2 folders as published: a DeepSeek-V3 by another name, with code of their own, experts in 4 bits or blocks of
fp8, and a tokenizer that only its code reads. That the layers are transformers' is in `test_families`."""

import json
import logging
import re

import pytest
import torch

pytest.importorskip("transformers")

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.layers.linear import Linear
from eagle_kernels.engine.models.layers.quantised import QuantisedLinear
from eagle_kernels.engine.models.layers.quantised_mixture import QuantisedMixture
from eagle_kernels.engine.models.loading import load_draft, load_target
from eagle_kernels.engine.models.protocol import LatentShape, ModelError
from eagle_kernels.engine.models.tokenizer import ByteTokenizer, load_tokenizer
from eagle_kernels.reference.causal_attend import causal_attend
from eagle_kernels.tools.cli.main import main
from op_tests.engine import heads
from op_tests.engine.families import KIMI, OF_KIMI, SIZES, write_target
from op_tests.engine.heads import edit_config
from op_tests.engine.quantised import writers

AUTO_MAP = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}
TREE = {"topk": 2, "num_steps": 3, "num_draft_tokens": 6, "min_ngram_size": 1}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3, 5, 8]]


def kimi(folder, **changes):
    """What transformers makes, whose folder then has all that the published one has beside it. The code in it must not
    run."""
    theirs = write_target("DeepseekV3", KIMI | {"written": OF_KIMI | {"auto_map": AUTO_MAP}} | changes, folder)
    edit_config(folder, num_nextn_predict_layers=0, aux_loss_alpha=0.001, seq_aux=True, ep_size=1, pretraining_tp=1)
    for name in ("configuration_deepseek", "modeling_deepseek", "tokenization_kimi"):
        (folder / f"{name}.py").write_text("raise SystemExit('this code was run')\n")
    (folder / "tiktoken.model").write_text("IQ== 0\n")
    told = {"tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikToken", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return theirs


def test_a_published_folder_loads_without_its_code(tmp_path, device, caplog):
    """The end token is that of generation_config.json; text needs a tokenizer, which a caller may pass."""
    theirs = kimi(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 61, "max_length": 90}))
    config = EAGLEConfig(method="ngram", **TREE)
    with caplog.at_level(logging.INFO):
        engine = EAGLEInference.from_pretrained(None, tmp_path, config, device=device, dtype="float32")
    assert f"{tmp_path}: our own decoder reads it, the code that auto_map names is not run" in caplog.messages
    assert engine.target.kv_shape == LatentShape(3, 1, 32, 24) and engine.config.eos_token_ids == (61,)
    prompts = torch.tensor([PROMPTS[0], PROMPTS[1][:8]])
    expected = theirs.generate(prompts, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(prompts))
    assert engine.generate(prompts, 12, eos_token_ids=()).output_ids == expected[:, 8:].tolist()
    told = r"holds no tokenizer.json, and the code that its auto_map names is not run: pass token ids, or as tokenizer "
    with pytest.raises(ValueError, match=f"the tokenizer of the target: {re.escape(str(tmp_path))} {told}"):
        engine.generate("text", 4)
    given = EAGLEInference.from_pretrained(None, tmp_path, config, device=device, tokenizer=ByteTokenizer())
    assert len(given.generate("\x03\x01", 4, eos_token_ids=()).output_ids) == 4


def test_a_folder_without_a_tokenizer_says_so(tmp_path, capsys):
    """In the command line as well; without code of its own, nothing is said of such."""
    kimi(tmp_path)
    command = ["generate", "text", "--target", str(tmp_path), "--draft", str(tmp_path), "--device", "cpu"]
    assert main(command) != 0
    assert "the code that its auto_map names is not run" in capsys.readouterr().err
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="holds no tokenizer.json, and its config names no ByteTokenizer$"):
        load_tokenizer(tmp_path)


def test_a_smaller_model_with_the_same_tokenizer_drafts(tmp_path, device):
    """Its embedding has another size, and the files of both tell that the tokens are the same."""
    kimi(tmp_path / "target")
    kimi(tmp_path / "draft", vocab_size=SIZES["vocab_size"] + 5, num_hidden_layers=2)
    config = EAGLEConfig(topk=2, num_steps=3, num_draft_tokens=6, eos_token_ids=())
    engine = EAGLEInference.from_pretrained(tmp_path / "draft", tmp_path / "target", config, device=device)
    assert engine.generate(PROMPTS, 9).output_ids == engine.generate(PROMPTS, 9, speculative=False).output_ids
    (tmp_path / "draft" / "tiktoken.model").write_text("IQ== 1\n")
    with pytest.raises(ModelError, match="the draft must have the target's 83 tokens, got 88"):
        EAGLEInference.from_pretrained(tmp_path / "draft", tmp_path / "target", config, device=device)


OF_TARGET = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "kimi_k2", "n_routed_experts": 384}


@pytest.mark.parametrize("written", [{}, OF_TARGET], ids=("of its own", "of the target"))
def test_an_eagle3_head_drafts(tmp_path, device, written):
    """Also one whose file has keys of the target's."""
    sizes = {name: heads.WIDTHS[name] for name in ("vocab_size", "hidden_size")}
    kimi(tmp_path / "target", **sizes, num_hidden_layers=8, num_attention_heads=4)
    target = load_target(tmp_path / "target", device)
    folder = heads.write_specforge(tmp_path / "head", heads.eagle3_tensors())
    edit_config(folder, **written)
    engine = EAGLEInference(load_draft(folder, target), target, EAGLEConfig(topk=2, num_steps=3, eos_token_ids=()))
    assert engine.generate(PROMPTS, 9).output_ids == engine.generate(PROMPTS, 9, speculative=False).output_ids


# of sizes that groups and blocks divide
WIDE = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 4,
        "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "head_dim": 16,
        "v_head_dim": 32}  # fmt: skip


def pack(weight: torch.Tensor) -> writers.Written:
    """compressed-tensors, pack-quantized: columns by fours of bits, 8 stands for 0, a scale for 32 columns."""
    groups = weight.unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1) / 7).bfloat16()
    value = (groups / scale.float()[..., None]).round().clamp(-8, 7)
    tensors = {"weight_packed": writers.words(value.flatten(1) + 8, 4), "weight_scale": scale,
               "weight_shape": torch.tensor(weight.shape)}  # fmt: skip
    return tensors, (value * scale.float()[..., None]).flatten(1)


# Kimi-K2-Thinking: experts alone in 4 bits
INT4 = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True, "type": "int", "dynamic": False}
GROUP = {"targets": ["Linear"], "input_activations": None, "output_activations": None, "weights": INT4}
THINKING = writers.Format({
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "kv_cache_scheme": None, "config_groups": {"group_0": GROUP},
}, "unused", pack)  # fmt: skip
IGNORED = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]


@torch.no_grad()
@pytest.mark.parametrize("form", ["Instruct", "Thinking"])
def test_published_quantisation(tmp_path, form):
    """All linears in blocks of fp8, those of latents among them; or the experts in 4 bits, all else in 16."""
    kimi(tmp_path / "plain", **WIDE)
    is_thinking = form == "Thinking"
    layout = THINKING if is_thinking else writers.FORMATS["fp8 blocks"]
    plain = ("self_attn", "shared_experts", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj") if is_thinking else ()
    folder = writers.write_quantised(layout, tmp_path / "plain", tmp_path / "quantised", plain)
    if is_thinking:
        section = json.loads((folder / "config.json").read_text())["quantization_config"]
        edit_config(folder, quantization_config=section | {"ignore": IGNORED})
    target, expected = load_target(folder), load_target(tmp_path / "plain")
    layers = target.model.layers
    assert isinstance(layers[1].mlp, QuantisedMixture)
    others = [layers[0].mlp.down_proj, layers[1].self_attn.kv_b_proj, layers[1].mlp.shared_experts.down_proj]
    assert {type(each) for each in others} == {Linear if is_thinking else QuantisedLinear}
    ids, positions = torch.arange(24).view(2, 12) * 7 % 61, torch.arange(12).expand(2, -1)
    logits, whole = (model(ids, positions, causal_attend).logits for model in (target, expected))
    torch.testing.assert_close(logits, whole, atol=5e-4, rtol=1e-3)
    engine = EAGLEInference(None, target, EAGLEConfig(method="ngram", **TREE, eos_token_ids=()))
    assert engine.generate(PROMPTS, 9).output_ids == engine.generate(PROMPTS, 9, speculative=False).output_ids
