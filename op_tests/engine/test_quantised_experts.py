"""Checkpoints whose experts are quantised: their logits are those of the weights that they stand for."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.checkpoint import Checkpoint
from eagle_kernels.engine.models.layers.mixture import MixtureOfExperts
from eagle_kernels.engine.models.layers.quantised_mixture import QuantisedMixture
from eagle_kernels.engine.models.loading import load_draft, load_target
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.reference.causal_attend import causal_attend
from op_tests.engine.deepseek import write_with_modules
from op_tests.engine.families import CASES, write_target
from op_tests.engine.heads import edit_config, edit_tensors
from op_tests.engine.quantised import writers

pytest.importorskip("transformers")

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}
INNER = dict.fromkeys(("qwen3 moe", "ernie moe", "glm moe"), "moe_intermediate_size") | {"mixtral": "intermediate_size"}
FORMATS = ("awq", "gptq", "gptq 8", "fp8 blocks", "fp8 tensor", "fbgemm_fp8", "modelopt blocks")


def write_plain(case: str, folder: Path) -> Path:
    family, changes = CASES[case]
    sizes = SIZES | ({INNER[case]: 128} if case in INNER else {"intermediate_size": 96})
    write_target(family, changes | sizes, folder)
    return folder


@torch.no_grad()
def logits_of(target) -> torch.Tensor:
    ids = torch.arange(24).view(2, 12) * 7 % 61
    return target(ids, torch.arange(12).expand(2, -1), causal_attend).logits.float()


def mixtures(model) -> list[MixtureOfExperts]:
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def check(plain: Path, quantised: Path) -> None:
    """In fp32 and in 16 bit, which the kernels read."""
    expected, target = logits_of(load_target(plain)), load_target(quantised)
    assert mixtures(target) and all(isinstance(each, QuantisedMixture) for each in mixtures(target))
    torch.testing.assert_close(logits_of(target), expected, atol=5e-4, rtol=1e-3)
    half = logits_of(load_target(quantised, "cpu", torch.bfloat16))
    assert (half - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_those_that_they_stand_for(form, tmp_path):
    plain = write_plain("qwen3 moe", tmp_path / "plain")
    check(plain, writers.write_quantised(writers.FORMATS[form], plain, tmp_path / "quantised"))


@pytest.mark.parametrize("case", ["ernie moe", "glm moe", "mixtral"])
def test_every_family(case, tmp_path, monkeypatch):
    """With shared experts, which are quantised too, and by Mixtral's names."""
    monkeypatch.setattr(writers, "LINEAR", re.compile(r"(_proj|\.w[123])\.weight$"))
    plain = write_plain(case, tmp_path / "plain")
    check(plain, writers.write_quantised(writers.FORMATS["gptq"], plain, tmp_path / "quantised"))


def test_tensors_outweigh_the_list(tmp_path):
    """AutoAWQ's "gate" is part of the name of the router, and of `gate_proj`."""
    plain, form = write_plain("qwen3 moe", tmp_path / "plain"), writers.FORMATS["awq"]
    packed = writers.write_quantised(form, plain, tmp_path / "packed")
    edit_config(packed, quantization_config=form.section | {form.listed: ["gate"]})
    check(plain, packed)
    half = writers.write_quantised(form, plain, tmp_path / "half", ("gate_proj",))
    edit_config(half, quantization_config=form.section | {form.listed: ["gate"]})
    with pytest.raises(ModelError, match=r"experts of several formats in one layer \(linear_decode, linear_w4a16\)"):
        load_target(half)


@torch.no_grad()
@pytest.mark.parametrize("listed", [(), ("eh_proj",)])
def test_modules_have_quantised_experts(listed, tmp_path):
    """Also where the projection in front of them is quantised, by whose name they are recognised."""
    sizes = SIZES | {"moe_intermediate_size": 128, "num_hidden_layers": 1}
    write_with_modules(tmp_path / "plain", 1, "Glm4Moe", **sizes)
    folder = writers.write_quantised(writers.FORMATS["awq"], tmp_path / "plain", tmp_path / "quantised", listed)
    ids, hidden, positions = torch.arange(12)[None] * 5 % 61, torch.randn(1, 12, 128), torch.arange(12)[None]
    drafts = [load_draft(each, load_target(each)) for each in (tmp_path / "plain", folder)]
    assert isinstance(drafts[1].mtp_layers[0].mlp, QuantisedMixture)
    expected, logits = (draft(ids, hidden, positions, causal_attend, from_target=True).logits for draft in drafts)
    torch.testing.assert_close(logits, expected, atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("changes", [{"static_groups": True}, {"group_size": -1}], ids=str)
def test_orders_of_activations_that_leave_groups_of_neighbours(changes, tmp_path, monkeypatch):
    """Quantising went by an order, and the file has none, in which experts are read."""
    plain = write_plain("qwen3 moe", tmp_path / "plain")
    monkeypatch.setattr(writers, "GROUP", 256 if "group_size" in changes else writers.GROUP)
    folder = writers.write_quantised(writers.FORMATS["gptq"], plain, tmp_path / "quantised")
    edit_config(folder, quantization_config=writers.FORMATS["gptq"].section | {"desc_act": True} | changes)
    check(plain, folder)


def write_mxfp4(plain: Path, folder: Path) -> Path:
    """Rounds the experts of gpt-oss, whose plain tensors become what transformers makes of the rounded ones."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, quantised = load_file(plain / "model.safetensors"), {}
    for name in list(tensors):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            quantised[name] = tensors[name]
            continue
        weight = tensors[name].transpose(1, 2).unflatten(2, (-1, 32))
        exponent = (weight.abs().amax(-1) / 6.0).log2().ceil().clamp(-127, 127)
        values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        scaled = weight / exponent.exp2()[..., None]
        codes = (scaled.abs()[..., None] - values).abs().argmin(-1) | ((scaled < 0).long() << 3)
        blocks, scales = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponent + 127).to(torch.uint8)
        quantised |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    folder.mkdir()
    for where, which in ((plain, tensors), (folder, quantised)):
        save_file({name: tensor.contiguous() for name, tensor in which.items()}, where / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    listed = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    section = {"quant_method": "mxfp4", "modules_to_not_convert": listed}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return folder


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path):
    plain = write_plain("gpt oss", tmp_path / "plain")
    check(plain, write_mxfp4(plain, tmp_path / "quantised"))


@pytest.mark.parametrize("method", ["wint4", "wint8", "fp8", "block_wise_fp8"])
def test_experts_are_quantised_at_loading(method, tmp_path):
    """And alone, where they alone are named."""
    plain = write_plain("qwen3 moe", tmp_path)
    expected = logits_of(load_target(plain))
    target = load_target(plain, quantize={"experts": method})
    assert all(isinstance(each, QuantisedMixture) for each in mixtures(target))
    assert type(target.model.layers[0].self_attn.o_proj).__name__ == "Linear"
    most = 0.3 if method == "wint4" else 0.1
    assert 0 < (logits_of(target) - expected).norm() < most * expected.norm()
    dense = load_target(plain, quantize={"dense": method})
    assert not any(isinstance(each, QuantisedMixture) for each in mixtures(dense))


def test_what_a_file_has_in_16_bit_is_quantised_beside_its_experts(tmp_path):
    """Those of gpt-oss are in MXFP4; what chooses experts keeps its bits."""
    plain = write_plain("gpt oss", tmp_path / "plain")
    folder = write_mxfp4(plain, tmp_path / "quantised")
    expected, target = logits_of(load_target(folder)), load_target(folder, quantize={"dense": "wint8"})
    attention, feed_forward = target.model.layers[0].self_attn, target.model.layers[0].mlp
    assert type(attention.o_proj).__name__ == "QuantisedLinear" and isinstance(feed_forward, QuantisedMixture)
    assert not any("router" in name for name, each in target.named_modules() if "Quantised" in type(each).__name__)
    assert 0 < (logits_of(target) - expected).norm() < 0.1 * expected.norm()
    assert torch.equal(logits_of(load_target(folder, quantize="wint8")), logits_of(target))  # a name alone is the rest
    told = r"experts: quantize must not name weights that are quantised already \(mxfp4\): dense=wint4, for one, "
    with pytest.raises(ModelError, match=told):
        load_target(folder, quantize={"dense": "wint8", "experts": "wint8"})
    assert not mixtures(load_target(plain, quantize={"dense": "wint8"}))[0].__class__.__name__.startswith("Quantised")


def test_text_of_speculation_is_that_of_plain_decoding(tmp_path):
    plain = write_plain("gpt oss", tmp_path / "plain")
    target = load_target(write_mxfp4(plain, tmp_path / "quantised"))
    engine = EAGLEInference(target, target, EAGLEConfig(topk=2, num_steps=3, num_draft_tokens=6, eos_token_ids=()))
    prompts = [[3, 1, 4, 1, 5], [9, 2]]
    assert engine.generate(prompts, 12)[0] == engine.generate(prompts, 12, speculative=False)[0]


def test_what_does_not_fit_is_named(tmp_path, monkeypatch):
    plain = write_plain("qwen3 moe", tmp_path / "plain")
    form = writers.FORMATS["gptq"]
    mixed = writers.write_quantised(form, plain, tmp_path / "mixed", ("experts.0.up_proj",))
    with pytest.raises(ModelError, match=r"experts of several formats in one layer \(linear_decode, linear_w4a16\)"):
        load_target(mixed)
    form = writers.FORMATS["gptq desc_act"]
    order = writers.write_quantised(form, plain, tmp_path / "order")
    monkeypatch.setattr(Checkpoint, "get", lambda *_: pytest.fail("a weight was read"))
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("a weight was read"))
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "group"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    for section, told in ((form.section, "desc_act=True"), (packed, "config_groups.group_0.weights.actorder='group'")):
        edit_config(order, quantization_config=section)
        told = re.escape(f"mlp: config.json: quantization_config.{told} is not implemented for experts (only groups ")
        with pytest.raises(ModelError, match=told):
            load_target(order)
    weights["actorder"] = "static"  # changes no layout
    edit_config(order, quantization_config=packed)
    with pytest.raises(ModelError, match="missing tensors: .*weight_packed"):
        load_target(order)
    monkeypatch.undo()
    edit_config(order, quantization_config=form.section | {"desc_act": False})  # against what the tensors hold
    with pytest.raises(ModelError, match=r"an order of activations \(g_idx\) is not implemented for experts"):
        load_target(order)
    oss = write_plain("gpt oss", tmp_path / "oss")
    with pytest.raises(ModelError, match="quantising experts whose tensors hold all of them is not implemented"):
        load_target(oss, quantize="wint4")
    lost, name = write_mxfp4(oss, tmp_path / "lost"), "model.layers.1.mlp.experts.down_proj_scales"
    scales = load_file(lost / "model.safetensors")[name]
    scales[2, 5, 1] = 255
    for tensor, told in ((scales, f"tensor {name}: scales in e8m0 must be finite, got 255, which stands for NaN"),
                         (None, f"missing tensors: {name}")):  # fmt: skip
        edit_tensors(lost, **{name: tensor})
        with pytest.raises(ModelError, match=told):
            load_target(lost)
