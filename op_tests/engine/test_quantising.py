"""Quantising at loading: what the weights become, which of them, and how much memory that takes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.config import pairing
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.engine.models.heads import Eagle1Config, Eagle1Head
from eagle_kernels.engine.models.layers.quantised import QuantisedLinear
from eagle_kernels.engine.models.loading import demo_pair, load_draft, load_target
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.engine.models.quantised_linears import Places
from eagle_kernels.reference.causal_attend import causal_attend
from eagle_kernels.tools.cli.main import main
from op_tests.engine.heads import edit_config, edit_tensors, save

METHODS = ("wint4", "wint8", "block_wise_fp8", "fp8")
SIZES = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 160, "intermediate_size": 560, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 96,
}  # fmt: skip


def rounded(weight: torch.Tensor, method: str) -> torch.Tensor:
    """What a weight stands for afterwards, one output, group or block at a time."""
    result = weight.clone()
    rows = 128 if method == "block_wise_fp8" else 1
    columns = 128 if method in ("wint4", "block_wise_fp8") else weight.shape[1]
    for row in range(0, weight.shape[0], rows):
        for column in range(0, weight.shape[1], columns):
            part = result[row : row + rows, column : column + columns]
            scale = part.abs().max() / {"wint4": 7, "wint8": 127}.get(method, 448)
            if method == "wint4":
                part.copy_((part / scale.half().float()).round().clamp(-7, 7) * scale.half().float())
            elif method == "wint8":
                part.copy_((part / scale).round() * scale)
            else:
                part.copy_((part / scale).to(torch.float8_e4m3fn).float() * scale)
    return result


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) * 0.2 + (tensor.dim() == 1)
        for name, tensor in Decoder(DecoderConfig.from_dict(SIZES)).state_dict().items()
    }
    tensors["model.layers.0.mlp.down_proj.weight"][3] = 0  # a row without a scale
    return save(tmp_path_factory.mktemp("plain"), SIZES, tensors)


@torch.no_grad()
def logits_of(target) -> torch.Tensor:
    return target(torch.arange(12)[None] * 7 % 61, torch.arange(12)[None], causal_attend).logits


def expected_of(plain: Path, folder: Path, methods: dict[str, str]) -> torch.Tensor:
    """The logits of weights that are rounded one by one."""
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        part = "lm_head" if name.startswith("lm_head") else "dense" if "_proj." in name else ""
        if part in methods:
            tensors[name] = rounded(tensor, methods[part]).nan_to_num()
    return logits_of(load_target(save(folder, SIZES, tensors)))


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_rounded(plain, method, tmp_path):
    target = load_target(plain, quantize=method)
    expected = expected_of(plain, tmp_path, {"dense": method})
    torch.testing.assert_close(logits_of(target), expected, atol=2e-3, rtol=1e-3)
    assert {type(layer.mlp.down_proj) for layer in target.model.layers} == {QuantisedLinear}
    assert not isinstance(target.lm_head, QuantisedLinear)


@pytest.mark.parametrize("is_tied", [False, True])
def test_output_is_quantised_if_asked_for(plain, is_tied, tmp_path):
    chosen = {"dense": "WINT8", "lm_head": "wint8"}
    folder = save(tmp_path / "own", SIZES, load_file(plain / "model.safetensors"))
    if is_tied:
        own = load_file(folder / "model.safetensors")
        edit_tensors(folder, **{"lm_head.weight": None})
        edit_config(folder, tie_word_embeddings=True)
        plain = save(tmp_path / "apart", SIZES, own | {"lm_head.weight": own["model.embed_tokens.weight"].clone()})
    target = load_target(folder, quantize=chosen)
    expected = expected_of(plain, tmp_path / "expected", {"dense": "wint8", "lm_head": "wint8"})
    torch.testing.assert_close(logits_of(target), expected, atol=2e-3, rtol=1e-3)
    assert isinstance(target.lm_head, QuantisedLinear)


def test_head_is_quantised_by_itself(plain, tmp_path):
    config = SIZES | {"num_hidden_layers": 1, "bias": True}
    folder = save(tmp_path, config, Eagle1Head(Eagle1Config.from_dict(config)).state_dict())
    head = load_draft(folder, load_target(plain), quantize="wint4")
    assert isinstance(head.fc, QuantisedLinear) and isinstance(head.layers[0].mlp.down_proj, QuantisedLinear)


@pytest.mark.parametrize("method", METHODS)
def test_memory_while_loading(plain, method, monkeypatch):
    """What is held at any time: the quantised weights, those of one linear that come in, and their copy."""
    most, take = 0, Places.take

    def counted(self, name, tensor, dtype):
        nonlocal most
        held = take(self, name, tensor, dtype)
        tensors = [each for linear in self.linears for taken in linear._taken.values() for each in taken.values()]
        tensors += [each for linear in self.linears for packed in linear._packed.values()
                    for each in packed if isinstance(each, torch.Tensor)]  # fmt: skip
        tensors += [buffer for linear in self.linears for buffer in linear.parts.buffers()]
        most = max(most, sum(each.nbytes for each in tensors))
        return held

    monkeypatch.setattr(Places, "take", counted)
    target = load_target(plain, "cpu", torch.bfloat16, quantize=method)
    monkeypatch.undo()
    whole = sum(
        buffer.nbytes
        for each in target.modules()
        if isinstance(each, QuantisedLinear)
        for buffer in each.parts.buffers()
    )
    layer = sum(parameter.numel() for parameter in Decoder(DecoderConfig.from_dict(SIZES)).model.layers[0].parameters())
    assert whole <= most <= 1.1 * whole + 2 * layer


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        (
            "w3",
            "load_target: quantize must be None, one of wint4, wint8, block_wise_fp8, fp8, w4a16, w8a16, or a dict ",
        ),
        ("", "quantize must be None, one of"),
        (4, "got 4"),
        ({}, "got {}"),
        ({"moe": "wint4"}, "under dense, experts, lm_head, got {'moe': 'wint4'}"),
        ({"dense": 4}, "got {'dense': 4}"),
    ],
)
def test_other_names_are_refused(plain, chosen, told):
    with pytest.raises(ValueError) as caught:
        load_target(plain, quantize=chosen)
    assert told in str(caught.value)


def test_parts_that_the_folder_lacks_are_refused(plain):
    with pytest.raises(ModelError, match="quantize must name a part that the folder holds, and it holds none of those"):
        load_target(plain, quantize={"experts": "wint8"})
    load_target(plain, quantize={"experts": "wint8", "dense": "wint8"})  # as the name alone


def test_weights_that_cannot_be_quantised_are_named(plain, tmp_path):
    folder = save(tmp_path, SIZES, load_file(plain / "model.safetensors"))
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(folder, **{name: torch.full((560, 160), float("nan"))})
    with pytest.raises(ModelError, match=f"{name}: weights that are quantised must be finite"):
        load_target(folder, quantize="wint4")
    quantised = Path(__file__).parent / "quantised" / "auto_awq"
    for chosen, told in (
        ({"dense": "wint4"}, r"proj: quantize must not name weights that are quantised already \(awq\): a name "),
        ("wint4", r"or name a part that is in 16 bit: dense layers and experts are quantised already \(awq\)"),
    ):
        with pytest.raises(ModelError, match=told):
            load_target(quantised, "cpu", torch.float16, quantize=chosen)


@pytest.mark.parametrize("method", METHODS)
def test_embedded_pair_quantised(method):
    """Speculation says what plain decoding with the same weights says."""
    target, draft = demo_pair()
    output = "fp8" if method == "block_wise_fp8" else method  # whose blocks are not for 257 outputs
    config = EAGLEConfig(topk=2, num_steps=3, quantize={"dense": method, "lm_head": output}, draft_quantize=method)
    engine = EAGLEInference.from_pretrained(draft, target, config, device="cpu")
    assert isinstance(engine.target.model.layers[0].mlp.down_proj, QuantisedLinear)
    prompt = "import os\n\ndef walk("
    results = [engine.generate(engine.tokenizer.encode(prompt), 12, speculative=kind) for kind in (True, False)]
    assert results[0].output_ids == results[1].output_ids
    assert results[0].stats.mean_accept_length > 1.5
    with pytest.raises(ValueError, match="quantize must be None, or that of the loaded model"):
        engine.generate([1, 2], 2, quantize="fp8" if method == "wint8" else "wint8")


PROMPTS = ("import os\n\ndef walk(", "class Node:\n    def __init__(self", "def f(x):\n    return ",
           "for name in sorted(", "if __name__ == ", "    def test_")  # fmt: skip


def accept_length(quantize: str | None, draft_quantize: str | None) -> float:
    """The mean number of tokens of a step of the embedded pair, over more than 250 tokens."""
    config = EAGLEConfig(topk=2, num_steps=3, quantize=quantize, draft_quantize=draft_quantize)
    target, draft = demo_pair()
    engine = EAGLEInference.from_pretrained(draft, target, config, device="cpu")
    return engine.generate([engine.tokenizer.encode(prompt) for prompt in PROMPTS], 48).stats.mean_accept_length


@pytest.fixture(scope="module")
def plain_length() -> float:
    return accept_length(None, None)


@pytest.mark.parametrize("method", METHODS)
def test_acceptance_of_the_embedded_pair_is_that_of_16_bit(method, plain_length):
    """With the output in 16 bit. Measured of 3.54: drafts 0.988 to 1.000, pairs, whose texts are others, 1.005 to
    1.051; with negative weights lost 0.28 and 1.13, in three levels 0.42 and 0.36, at half their size 0.55 and 0.91."""
    assert accept_length(None, method) == pytest.approx(plain_length, rel=0.03)
    assert accept_length(method, method) == pytest.approx(plain_length, rel=0.08)


def test_config_says_how_models_are_loaded():
    target, draft = demo_pair()
    loaded = load_target(target)
    for name in ("quantize", "draft_quantize"):
        with pytest.raises(ValueError, match=f"EAGLEInference: {name} must be None, or that of the loaded model"):
            EAGLEInference(load_draft(draft, loaded), loaded, EAGLEConfig(**{name: "wint8"}))
        with pytest.raises(ValueError, match=f"EAGLEConfig: {name} must be None, one of wint4, "):
            EAGLEConfig(**{name: "int4"})
    with pytest.raises(ValueError, match="draft_quantize must be None for method='ngram', which loads no draft"):
        EAGLEInference.from_pretrained(None, target, EAGLEConfig(method="ngram", draft_quantize="fp8"))
    assert hash(EAGLEConfig(quantize={"dense": "fp8"})) == hash(EAGLEConfig(quantize={"dense": "FP8"}))
    own = EAGLEInference(
        load_draft(draft, loaded), load_target(target, quantize="wint8"), EAGLEConfig(quantize="wint8")
    )
    assert own.config.quantize == "wint8"
    same = own.generate([1, 2], 2, quantize="W8A16").output_ids  # another name of it
    assert same == own.generate([1, 2], 2).output_ids


def test_command_line(capsys, tmp_path):
    (tmp_path / "prompts.txt").write_text("def f(\n")
    prompt = ["generate", "--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "4", "--device", "cpu"]
    for name, parts in (("wint8", "dense=wint4,lm_head=wint8"), ("w4a16", "dense=w4a16,lm_head=w8a16")):
        assert main([*prompt, "--quantize", name, "--draft-quantize", parts]) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*prompt, "--quantize", "moe=wint4"])
    assert "--quantize: must be one of wint4, wint8, block_wise_fp8, fp8, w4a16, " in capsys.readouterr().err


def test_dtype_where_none_is_named(plain, tmp_path, monkeypatch):
    """float32; bfloat16 where kernels with fewer bits need it. A named one counts."""
    seen = []

    def noted(folder, device, dtype, **options):
        seen.append(dtype)
        raise ModelError("noted")

    quantised = tmp_path / "quantised"
    quantised.mkdir()
    for path in plain.iterdir():
        (quantised / path.name).write_bytes(path.read_bytes())
    edit_config(quantised, quantization_config={"quant_method": "awq"})
    monkeypatch.setattr(pairing, "load_target", noted)
    cuda = torch.device("cuda")
    monkeypatch.setattr(pairing, "read_placement", lambda caller, device, dtype: (cuda, dtype or torch.float32))
    for folder, options, dtype, wanted in (
        (plain, {}, None, torch.float32), (plain, {"quantize": "wint4"}, None, torch.bfloat16),
        (plain, {"kv_cache_dtype": "int8"}, None, torch.bfloat16), (quantised, {}, None, torch.bfloat16),
        (quantised, {}, torch.float16, torch.float16), (plain, {"quantize": "fp8"}, torch.float32, torch.float32),
    ):  # fmt: skip
        with pytest.raises(ModelError, match="noted"):
            EAGLEInference.from_pretrained(None, folder, EAGLEConfig(method="ngram", **options), dtype=dtype)
        assert seen.pop() == wanted
    monkeypatch.undo()
    engine = EAGLEInference.from_pretrained(None, plain, EAGLEConfig(method="ngram", quantize="wint4"), device="cpu")
    assert engine.target.dtype == torch.float32  # a CPU computes with the exact weights
    config = EAGLEConfig(method="ngram", kv_cache_dtype="int8")
    assert EAGLEInference.from_pretrained(None, plain, config, device="cpu").target.dtype == torch.bfloat16
