"""Quantised checkpoints of every format: their logits are those of the weights they stand for, and the text of
speculation is that of plain decoding."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.engine.models.heads import Eagle1Config, Eagle1Head, EagleConfig, EagleHead
from eagle_kernels.engine.models.layers.quantised import QuantisedLinear, Weights
from eagle_kernels.engine.models.loading import load_draft, load_target
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.engine.models.quantisation import is_quantised
from eagle_kernels.reference.causal_attend import causal_attend
from op_tests.engine.engines import write_with_modules
from op_tests.engine.heads import edit_config, edit_tensors, save
from op_tests.engine.quantised.writers import FORMATS, NOT_CONVERTED, write_quantised
from op_tests.engine.toys import DEVICE

OF_LIBRARY = Path(__file__).parent / "quantised"
SIZES = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
}  # fmt: skip
LISTED = ("layers.1.self_attn.k_proj", "layers.2.mlp")


def randomised(module: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator) * 0.2 + (tensor.dim() == 1 and "norm" in name)
        for name, tensor in module.state_dict().items()
    }


def write_plain(folder: Path, family: str = "llama") -> Path:
    config = SIZES | {"model_type": family, "head_dim": 16}
    return save(folder, config, randomised(Decoder(DecoderConfig.from_dict(config)), 0))


@torch.no_grad()
def logits_of(target) -> torch.Tensor:
    ids = torch.arange(24).view(2, 12) * 7 % 61
    return target(ids, torch.arange(12).expand(2, -1), causal_attend).logits


def linears_of(model) -> dict[str, QuantisedLinear]:
    return {name: each for name, each in model.named_modules() if isinstance(each, QuantisedLinear)}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("listed", [(), LISTED], ids=["all", "some"])
def test_weights_are_those_that_they_stand_for(form, listed, tmp_path):
    plain = write_plain(tmp_path / "plain", "qwen2")
    folder = write_quantised(FORMATS[form], plain, tmp_path / "quantised", listed)
    target = load_target(folder)
    torch.testing.assert_close(logits_of(target), logits_of(load_target(plain)), atol=2e-4, rtol=1e-4)
    linears = linears_of(target)
    assert len(linears) == (10 if listed else 12)
    assert ("model.layers.2.mlp.down_proj" in linears) == (not listed)
    assert all(isinstance(part, Weights) for part in linears["model.layers.0.self_attn.qkv_proj"].parts)
    half = logits_of(load_target(folder, "cpu", torch.bfloat16)).float()
    torch.testing.assert_close(half, logits_of(target), atol=0.25, rtol=0.05)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "mimo", "glm4"])
def test_every_family(family, tmp_path):
    plain = write_plain(tmp_path / "plain", family)
    folder = write_quantised(FORMATS["awq"], plain, tmp_path / "quantised")
    torch.testing.assert_close(logits_of(load_target(folder)), logits_of(load_target(plain)), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "dtype", "logits_in"),
    [
        *((name, torch.bfloat16, name)
          for name in ("w4a16", "w4a16_zeros", "w8a16", "int8", "fp8_tensor", "fp8_channel")),
        *((name, torch.float16, name) for name in ("auto_gptq", "fp8_blocks")),
        ("auto_awq", torch.float16, "auto_gptq"),  # the same numbers
    ],
)  # fmt: skip
def test_files_of_libraries(name, dtype, logits_in):
    """Written and computed by the formats' own libraries: quantised/write_compressed.py and write_auto_round.py."""
    target = load_target(OF_LIBRARY / name, "cpu", dtype)
    with torch.no_grad():
        ids = torch.tensor([[7, 3, 60, 11, 0, 25, 9, 44]])
        logits = target(ids, torch.arange(8)[None], causal_attend).logits.float()
    expected = load_file(OF_LIBRARY / logits_in / "expected.safetensors")["logits"]
    most = 0.02 if dtype == torch.bfloat16 else 0.004
    assert (logits - expected).abs().max() < most * expected.abs().max()
    assert len(linears_of(target)) == 8
    kinds = [type(part).__name__ for part in target.model.layers[1].self_attn.qkv_proj.parts]
    assert kinds == (["Weights", "Linear", "Weights"] if dtype == torch.bfloat16 else ["Weights"])


@pytest.mark.parametrize("name", ["auto_gptq", "auto_awq"])
def test_form_of_auto_round_has_the_tensors_of_others(name, tmp_path):
    kept = {"lm_head": {"bits": 16, "data_type": "float"}, "model.layers.0.mlp.up_proj": {"bits": 4, "sym": True}}
    section = {"quant_method": "auto-round", "packing_format": f"auto_round:{name}", "bits": 4, "group_size": 32,
               "sym": True, "data_type": "int", "autoround_version": "0.14.2", "extra_config": kept}  # fmt: skip
    folder = shutil.copytree(OF_LIBRARY / name, tmp_path / name)
    edit_config(folder, quantization_config=section)
    logits = [logits_of(load_target(each, "cpu", torch.float16)) for each in (folder, OF_LIBRARY / name)]
    assert torch.equal(*logits)


def test_outputs_that_are_skipped_or_not_joined(tmp_path):
    plain = write_plain(tmp_path / "plain", "qwen2")
    write_quantised(FORMATS["awq"], plain, tmp_path / "quantised", LISTED)
    linear = load_target(tmp_path / "quantised").model.layers[1].self_attn.qkv_proj
    x = torch.randn(2, 3, 64)
    whole = linear(x)
    for skipped in (0, 16, 64, 80, 96, 120):
        torch.testing.assert_close(linear(x, skipped=skipped), whole[..., skipped:])
    stored = load_file(plain / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj."
    expected = x @ stored[name + "weight"].T + stored[name + "bias"]
    torch.testing.assert_close(whole[..., 64:96], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["awq", "gptq desc_act", "fp8 channel", "fp8 blocks"])
def test_text_of_speculation_is_that_of_plain_decoding(form, tmp_path, device):
    """With heads of the same format, the target as its own draft, and drafts without a model; on a GPU in graphs."""
    form, is_gpu = FORMATS["fbgemm_fp8" if form == "fp8 channel" else form], device.type != "cpu"
    plain = write_plain(tmp_path / "plain")
    folder = write_quantised(form, plain, tmp_path / "quantised")
    target = load_target(folder, device, torch.bfloat16 if is_gpu else torch.float32)
    drafts = [(target, "draft_model"), (None, "ngram"), (None, "suffix"), (target, "hybrid")]
    config = SIZES | {"num_hidden_layers": 1}
    eagle3 = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 61,
              "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}  # fmt: skip
    for kind, head_config, head_class, more in (
        ("eagle1", Eagle1Config, Eagle1Head, {"bias": True, "architectures": ["LlamaForCausalLMEagle"]}),
        ("eagle3", EagleConfig, EagleHead, eagle3),
    ):
        settings = head_config.from_dict(config | more)
        tensors = randomised(head_class(settings), 1)
        save(tmp_path / kind, config | more, tensors)
        head = load_draft(write_quantised(form, tmp_path / kind, tmp_path / f"{kind} quantised"), target)
        assert {"fc"} < linears_of(head).keys()
        drafts.append((head, "eagle"))
    for draft, method in drafts:
        levels = {"num_model_steps": 1} if method == "hybrid" else {}
        # in 16 bit a row's bits would depend on how many rows there are
        options = {"eos_token_ids": (), "deterministic": is_gpu, **levels}
        config = EAGLEConfig(method=method, topk=2, num_steps=3, num_draft_tokens=6, **options)
        engine = EAGLEInference(draft, target, config)
        prompts = [[3, 1, 4, 1, 5], [9, 2]]
        assert engine.generate(prompts, 10)[0] == engine.generate(prompts, 10, speculative=False)[0]


def test_text_with_modules_of_the_target_s_own_folder(tmp_path):
    """Quantised like the target itself, whose config.json they share."""
    write_with_modules(tmp_path / "plain", 2)
    folder = write_quantised(FORMATS["awq"], tmp_path / "plain", tmp_path / "quantised", ("mtp_layers.1.mlp",))
    config = EAGLEConfig(method="mtp", topk=1, num_steps=2, eos_token_ids=())
    engine = EAGLEInference.from_pretrained(None, folder, config, device="cpu")
    prompts = [[3, 1, 4, 1, 5], [9, 2]]
    assert engine.generate(prompts, 10)[0] == engine.generate(prompts, 10, speculative=False)[0]


def test_head_is_that_of_its_weights(tmp_path):
    target = load_target(write_plain(tmp_path / "target"))
    config = SIZES | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle"], "bias": True}
    plain = save(tmp_path / "plain", config, randomised(Eagle1Head(Eagle1Config.from_dict(config)), 1))
    folder = write_quantised(FORMATS["gptq"], plain, tmp_path / "quantised", ("fc",))
    ids, hidden, positions = torch.arange(5)[None], torch.randn(1, 5, 64), torch.arange(5)[None]
    outputs = []
    for where in (folder, plain):
        with torch.no_grad():
            outputs.append(load_draft(where, target)(ids, hidden, positions, causal_attend, from_target=True).logits)
    torch.testing.assert_close(*outputs, atol=2e-4, rtol=1e-4)
    assert "fc" not in linears_of(load_draft(folder, target))


@pytest.mark.parametrize("form", ["awq", "fp8 blocks"])
def test_output_that_is_the_embedding_stays(form, tmp_path):
    plain = write_plain(tmp_path / "plain", "qwen2")
    edit_config(plain, tie_word_embeddings=True)
    edit_tensors(plain, **{"lm_head.weight": None})
    target = load_target(write_quantised(FORMATS[form], plain, tmp_path / "quantised"))
    torch.testing.assert_close(logits_of(target), logits_of(load_target(plain)), atol=2e-4, rtol=1e-4)
    assert target.lm_head.weight is target.model.embed_tokens.weight


def test_output_may_be_quantised(tmp_path):
    plain = write_plain(tmp_path / "plain")
    tensors = load_file(plain / "model.safetensors")
    wide = torch.cat([tensors["lm_head.weight"], torch.zeros(3, 64)])  # AWQ packs eight outputs
    tensors |= {"lm_head.weight": wide, "model.embed_tokens.weight": torch.cat([wide, wide])[:64]}
    save(plain, SIZES | {"vocab_size": 64}, tensors)
    written, meant = FORMATS["awq"].write(wide)
    folder = write_quantised(FORMATS["awq"], plain, tmp_path / "quantised")
    edit_tensors(folder, **{f"lm_head.{kind}": each.contiguous() for kind, each in written.items()},
                 **{"lm_head.weight": None})  # fmt: skip
    edit_tensors(plain, **{"lm_head.weight": meant})
    torch.testing.assert_close(logits_of(load_target(folder)), logits_of(load_target(plain)), atol=2e-4, rtol=1e-4)
    assert "lm_head" in linears_of(load_target(folder))


@pytest.mark.parametrize(
    ("form", "key", "value"),
    [
        ("awq", NOT_CONVERTED, ["gate"]),  # of AutoAWQ's example for Mixtral, which is copied elsewhere
        ("gptq", NOT_CONVERTED, ["gate"]),
        ("gptq", "dynamic", {"-:.*gate": {}}),
        ("fp8 blocks", NOT_CONVERTED, ["gate_proj"]),
    ],
)
@pytest.mark.parametrize("in_16_bit", [(), ("gate_proj",)], ids=["packed", "plain"])
def test_tensors_outweigh_the_list(form, key, value, in_16_bit, tmp_path):
    """The list tells only which tensors a file should have that has none of a module."""
    plain = write_plain(tmp_path / "plain")
    folder = write_quantised(FORMATS[form], plain, tmp_path / "quantised", in_16_bit)
    edit_config(folder, quantization_config=FORMATS[form].section | {key: value})
    target = load_target(folder)
    torch.testing.assert_close(logits_of(target), logits_of(load_target(plain)), atol=2e-4, rtol=1e-4)
    kinds = {type(part).__name__ for part in target.model.layers[1].mlp.gate_up_proj.parts}
    assert kinds == ({"Linear", "Weights"} if in_16_bit else {"Weights"})
    name = "model.layers.1.mlp.gate_proj."
    lost = {each: None for each in load_file(folder / "model.safetensors") if each.startswith(name)}
    edit_tensors(folder, **lost)
    with pytest.raises(ModelError, match=f"missing tensors: {name}weight$"):
        load_target(folder)


def test_tensors_outweigh_what_compressed_tensors_ignores(tmp_path):
    folder = shutil.copytree(OF_LIBRARY / "w4a16", tmp_path / "w4a16")
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_config(folder, quantization_config=section | {"ignore": [*section["ignore"], "re:.*gate_proj"]})
    assert torch.equal(logits_of(load_target(folder)), logits_of(load_target(OF_LIBRARY / "w4a16")))


def test_file_of_modelopt_beside_config(tmp_path):
    """Older versions write only hf_quant_config.json."""
    plain = write_plain(tmp_path / "plain")
    folder = write_quantised(FORMATS["modelopt"], plain, tmp_path / "quantised", ("layers.2.mlp",))
    edit_config(folder, quantization_config=None)
    section = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.2.mlp*"]}
    beside = {"producer": {"name": "modelopt"}, "quantization": section}
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    scale = {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.0)}
    edit_tensors(folder, **scale)
    torch.testing.assert_close(logits_of(load_target(folder)), logits_of(load_target(plain)), atol=2e-4, rtol=1e-4)


AUTO_AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
AUTO_GPTQ = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "sym": False,
             "true_sequential": True, "quant_method": None, "model_name_or_path": None}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "name", "section"),
    [
        ("gptq", "quantize_config.json", AUTO_GPTQ),
        ("gptq v2", "quantize_config.json", AUTO_GPTQ | {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}),
        ("awq", "quant_config.json", AUTO_AWQ),
        ("awq", "quantize_config.json", AUTO_AWQ),  # some were renamed for other readers
        ("awq", "config.json", AUTO_AWQ | {"quant_method": "awq", "bits": None}),
    ],
)
def test_files_of_auto_gptq_and_auto_awq_beside_config(form, name, section, tmp_path):
    """Their older versions write only these, or AutoAWQ's own names into config.json."""
    plain = write_plain(tmp_path / "plain")
    folder = write_quantised(FORMATS[form], plain, tmp_path / "quantised")
    edit_config(folder, quantization_config=None)
    assert not is_quantised(folder)

    def tell(**changes):
        if name == "config.json":
            return edit_config(folder, quantization_config=section | changes)
        (folder / name).write_text(json.dumps(section | changes))

    tell()
    assert is_quantised(folder)
    torch.testing.assert_close(logits_of(load_target(folder)), logits_of(load_target(plain)), atol=2e-4, rtol=1e-4)
    where = "config.json: quantization_config." if name == "config.json" else f"{name}: "
    bits, group_size = ("w_bit", "q_group_size") if form == "awq" else ("bits", "group_size")
    for setting, value in ((bits, 3), (group_size, 48)):
        tell(**{setting: value})
        with pytest.raises(ModelError, match=re.escape(f"{where}{setting}={value} is not implemented (only ")):
            load_target(folder)


def test_rules_of_gptq_for_modules(tmp_path):
    """Those with "-:" exclude modules, in either file, if they fit the beginning of a name, as in GPTQModel."""
    plain = write_plain(tmp_path / "plain")
    folder = write_quantised(FORMATS["gptq"], plain, tmp_path / "quantised", ("layers.2.mlp", "layers.1.mlp.down_proj"))
    edit_tensors(folder, **{"model.layers.1.mlp.down_proj.weight": None, "model.layers.2.mlp.up_proj.weight": None})
    for name, where in (("config.json", "config.json: quantization_config."), ("quantize_config.json", "g.json: ")):
        for rules, told in (
            ({r"-:model\.layers\.\d\.mlp": {}}, "1.mlp.down_proj.weight, model.layers.2.mlp.up_proj.weight"),
            ({r"-:.*\.1\..*down": {}, "-:mlp": {}}, "1.mlp.down_proj.weight, model.layers.2.mlp.up_proj.qweight, "),
            ({"-:.*": {}, "+:.*up": {"bits": 8}}, "dynamic: '+:.*up': {'bits': 8} is not implemented (only -:NAME)"),
        ):
            section = AUTO_GPTQ | {"quant_method": "gptq", "dynamic": rules}
            edit_config(folder, quantization_config=section if name == "config.json" else None)
            (folder / "quantize_config.json").write_text(json.dumps({} if name == "config.json" else section))
            with pytest.raises(ModelError) as caught:
                load_target(folder)
            assert told in str(caught.value) and ("dynamic" not in told or where in str(caught.value))


def test_file_of_modelopt_that_names_no_format(tmp_path):
    plain = write_plain(tmp_path)
    logits, section = logits_of(load_target(plain)), {"quant_algo": None, "exclude_modules": ["lm_head"]}
    (plain / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    assert torch.equal(logits_of(load_target(plain)), logits)


@pytest.fixture(scope="module")
def awq(tmp_path_factory):
    around = tmp_path_factory.mktemp("awq")
    return write_quantised(FORMATS["awq"], write_plain(around / "plain"), around / "quantised", ("layers.2.mlp",))


def compressed(**weights):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True} | weights
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


AWQ, GPTQ, FP8 = (FORMATS[name].section for name in ("awq", "gptq", "fp8 blocks"))
AUTO = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32}
REFUSED = [
    ("awq", "quantization_config must be an object, got 'awq'"),
    ({"bits": 4}, "quantization_config.quant_method=None is not implemented (only awq, gptq, "),
    ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' is not implemented (only awq, gptq, "),
    ({"quant_method": ["awq"]}, "quant_method=['awq'] is not implemented"),
    (AWQ | {"bits": 3}, "quantization_config.bits=3 is not implemented (only 4)"),
    (AWQ | {"bits": True}, "quantization_config.bits=True is not implemented (only 4)"),
    (AWQ | {"group_size": 48}, "group_size=48 is not implemented (only -1, 32, 64, 128)"),
    (AWQ | {"group_size": "32"}, "group_size='32' is not implemented"),
    (AWQ | {"version": "gemv"}, "version='gemv' is not implemented (only 'gemm')"),
    (AWQ | {NOT_CONVERTED: "lm_head"}, "modules_to_not_convert must be a list of names, got 'lm_head'"),
    (AWQ | {"group_size": 64}, "qzeros has shape [5, 8], but config.json says [3, 8]"),
    (GPTQ, "down_proj.qweight has shape [160, 8], but config.json says [20, 64]"),
    (GPTQ | {"bits": 2}, "quantization_config.bits=2 is not implemented (only 4, 8)"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not implemented"),
    (GPTQ | {"is_marlin_format": True}, "is_marlin_format=True is not implemented"),
    (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic: '+:.*down.*': {'bits': 8} is not implemented"),
    (GPTQ | {"dynamic": {"-:(": {}}}, "dynamic: '(' is no regular expression: "),
    (AUTO, "down_proj.qweight has shape [160, 8], but config.json says [20, 64]"),
    (AUTO | {"packing_format": "auto_round:llm_compressor"}, "packing_format='auto_round:llm_compressor' is not impl"),
    (AUTO | {"packing_format": None}, "packing_format=None is not implemented (only auto_round:auto_gptq, auto_round:"),
    (AUTO | {"data_type": "mx_fp"}, "quantization_config.data_type='mx_fp' is not implemented (only 'int')"),
    (AUTO | {"extra_config": {"a.b": {"bits": 8}}}, "extra_config.a.b.bits=8 is not implemented (only 4, or bits=16)"),
    (FP8, "missing tensors: model.layers.0.mlp.down_proj.weight, "),
    (FP8 | {"weight_block_size": [64, 64]}, "weight_block_size=[64, 64] is not implemented (only [128, 128])"),
    (FP8 | {"fmt": "e5m2"}, "fmt='e5m2' is not implemented"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4' is not implemented (only 'fp8', "),
    ({"quant_method": "modelopt"}, "quant_algo=None is not implemented (only FP8, "),
    (compressed(num_bits=3), "config_groups.group_0.weights.num_bits=3 is not implemented"),
    (compressed(type="float"), "weights.num_bits=4 is not implemented"),
    (compressed(strategy="token"), "weights.strategy='token' is not implemented"),
    (compressed(group_size=16), "weights.group_size=16 is not implemented"),
    (compressed() | {"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized' is not implemented"),
    (compressed() | {"format": "int-quantized"}, "weights.num_bits=4 is not implemented (only 8)"),
    (compressed(num_bits=8, symmetric=False) | {"format": "int-quantized"}, "symmetric=False is not implemented"),
    (compressed() | {"ignore": ["re:("]}, "ignore: '(' is no regular expression: "),
    (compressed() | {"config_groups": {}}, "config_groups={} is not implemented"),
    (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config={'format': 'sparse-24-"),
    (compressed() | {"quantization_status": "calibration"}, "quantization_status='calibration' is not implemented"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "told"), REFUSED, ids=str)
def test_what_is_not_implemented_is_named(awq, section, told, tmp_path):
    folder = save(tmp_path, SIZES, load_file(awq / "model.safetensors"))
    edit_config(folder, quantization_config=section)
    with pytest.raises(ModelError) as caught:
        load_target(folder)
    assert told in str(caught.value) and "\n" not in str(caught.value)


NAME = "model.layers.1.mlp.down_proj."


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        ("qweight", None, f"missing tensors: {NAME}qweight"),
        ("extra", torch.zeros(3), f"unexpected tensors: {NAME}extra"),
        ("scales", torch.zeros(5, 63).half(), "has shape [5, 63], but config.json says [5, 64]"),
        ("scales", torch.zeros(5, 64), "must have dtype F16 or BF16, got F32"),
        ("qzeros", torch.zeros(5, 8).half(), "must have dtype I32, got F16"),
        ("scales", torch.full((5, 64), float("nan")).half(), f"{NAME}"),
    ],
)
def test_what_is_wrong_with_a_tensor_is_named(awq, name, tensor, told, tmp_path):
    folder = save(tmp_path, json.loads((awq / "config.json").read_text()), load_file(awq / "model.safetensors"))
    edit_tensors(folder, **{NAME + name: tensor})
    with pytest.raises(ModelError) as caught:
        load_target(folder)
    assert told in str(caught.value)


def test_biases_of_zeros_of_gptq_are_left_out(tmp_path):
    plain = write_plain(tmp_path / "plain")
    folder = write_quantised(FORMATS["gptq"], plain, tmp_path / "quantised")
    edit_tensors(folder, **{NAME + "bias": torch.zeros(64).half()})
    torch.testing.assert_close(logits_of(load_target(folder)), logits_of(load_target(plain)), atol=2e-4, rtol=1e-4)
    edit_tensors(folder, **{NAME + "bias": torch.ones(64).half()})
    with pytest.raises(ModelError, match=f"unexpected tensors: {NAME}bias"):
        load_target(folder)


@pytest.mark.parametrize("form", ["awq", "gptq desc_act", "gptq 8", "fp8 blocks", "fbgemm_fp8"])
def test_kernels_take_what_loading_makes(form, monkeypatch, tmp_path):
    """In bf16, of joined and of single projections, with a bias and without."""
    plain = write_plain(tmp_path / "plain", "qwen2")
    target = load_target(write_quantised(FORMATS[form], plain, tmp_path / "quantised"), DEVICE, torch.bfloat16)
    layer = target.model.layers[0]
    for linear in (layer.self_attn.qkv_proj, layer.mlp.down_proj):
        x, results = torch.randn(1, 3, linear.in_features, device=DEVICE).bfloat16(), []
        for backend in ("triton", "reference"):
            monkeypatch.setenv("EAGLE_KERNELS_BACKEND", backend)
            results += [linear(x).float(), linear(x, deterministic=True).float()]
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], atol=0.03, rtol=0.03)
