"""Keys and values of a target in 8 bits: their scales, their memory, and texts that drafts do not change."""

import math
from pathlib import Path

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.batch.kv_pool import KVPool, PrefillAttend
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.engine.models.loading import demo_pair, load_target
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.runtime import target as architectures
from op_tests.engine.heads import edit_config, edit_tensors, save

EIGHT_BITS = ("fp8", "int8")
SIZES = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 96,
}  # fmt: skip
TEXT = "def quicksort(items):\n    if len(items) <= 1:\n        return items\n"


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    tensors = Decoder(DecoderConfig.from_dict(SIZES)).state_dict()
    return save(tmp_path_factory.mktemp("plain"), SIZES, tensors)


def engine_of(name: str, **options) -> EAGLEInference:
    target, draft = demo_pair()
    config = EAGLEConfig(kv_cache_dtype=name, cuda_graph=False, max_length=512, **options)
    return EAGLEInference.from_pretrained(draft, target, config, device="cpu", dtype="float16")


def scale_names(layer: int) -> list[str]:
    return [f"model.layers.{layer}.self_attn.{kind}_scale" for kind in "kv"]


def with_scales(folder: Path, to: Path, scales: torch.Tensor, **config) -> Path:
    """The same checkpoint, with scales [L, 2, ...] of keys and values."""
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    names = [name for layer in range(len(scales)) for name in scale_names(layer)]
    edit_tensors(to, **{name: scale.clone() for name, scale in zip(names, scales.flatten(0, 1), strict=True)})
    if config:
        edit_config(to, **config)
    return to


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_drafts_do_not_change_the_text(name):
    """Chains, trees and a plain step read the same 8-bit numbers."""
    engine = engine_of(name)
    prompts = [TEXT, "class Stack:\n"]
    plain_ids = engine.generate(prompts, 12, speculative=False, progress=False).output_ids
    for tree in (
        {"topk": 4, "num_steps": 3, "num_draft_tokens": 12},
        {"topk": 1, "num_steps": 3, "num_draft_tokens": 4},
    ):
        result = engine.generate(prompts, 12, progress=False, **tree)
        assert result.output_ids == plain_ids
        assert result.stats.mean_accept_length > 1.3


@pytest.mark.parametrize(("name", "distance"), [("fp8", 0.05), ("int8", 0.05)])
def test_8_bits_are_near_16_bits(name, distance):
    """Logits move by little, and they do move."""
    logits = engine_of("auto").next_token_logits(TEXT)
    moved = engine_of(name).next_token_logits(TEXT)
    error = (logits.softmax(-1) - moved.softmax(-1)).abs().sum().item() / 2
    assert 0 < error < distance


def test_a_pool_takes_half_the_bytes():
    engine = engine_of("int8")
    bytes_of = {name: engine.workspace_bytes(EAGLEConfig(kv_cache_dtype=name, max_length=512))["kv_cache"]
                for name in ("auto", *EIGHT_BITS)}  # fmt: skip
    shape, own = engine.target.kv_shape, engine.draft.kv_shape
    whole, of_draft = 2 * math.prod(shape), 2 * math.prod(own)
    assert bytes_of["fp8"] == bytes_of["int8"]
    assert bytes_of["int8"] * (2 * whole + 2 * of_draft) == bytes_of["auto"] * (whole + 2 * of_draft)
    for fields, dtype in (({}, torch.int8), ({"kv_cache_dtype": "auto"}, torch.float16), ({}, torch.int8)):
        engine.generate([TEXT], 2, progress=False, **fields)
        state = engine.session.scheduler.state
        assert state.target_pool.k_cache.dtype == dtype and state.draft_pool.k_cache.dtype == torch.float16


def test_int8_measures_every_head():
    """Without limits of a checkpoint, those of random tokens and a fifth more: of each head, of keys and values."""
    engine = engine_of("int8")
    engine.generate([TEXT], 2, progress=False)
    pool, shape = engine.session.scheduler.state.target_pool, engine.target.kv_shape
    scales = pool.scales(shape.num_layers - 1)
    assert all(scale.shape == (shape.num_kv_heads,) and scale.unique().numel() > 1 for scale in scales.values())
    assert not torch.equal(scales["k_scale"], scales["v_scale"])
    tokens = torch.randint(engine.target.vocab_size, (1, 256), generator=torch.Generator().manual_seed(0))
    whole = KVPool(shape, 16, 16, torch.float16, torch.device("cpu"))
    attend = PrefillAttend(whole, torch.arange(16, dtype=torch.int32)[None], [(0, 256)])
    with torch.inference_mode():
        engine.target.forward(tokens, torch.arange(256)[None], attend)
    largest = whole.v_cache[-1].abs().amax((0, 1, 3)).double() * 1.2 / 127
    torch.testing.assert_close(scales["v_scale"].double(), largest)


@pytest.mark.parametrize("form", ["tensor", "head", "attn_head"])
def test_scales_of_a_checkpoint(form, plain, tmp_path):
    """fp8 has the numbers of the file; int8 the same largest ones, in its own steps. One scale is one for all heads."""
    sizes = {"tensor": (), "head": (2,), "attn_head": (2, 1, 1)}
    scales = 0.01 + torch.rand((2, 2, *sizes[form]), generator=torch.Generator().manual_seed(1)) / 10
    folder = with_scales(plain, tmp_path / form, scales)
    target = load_target(folder, dtype=torch.float16)
    engine = EAGLEInference(None, target, EAGLEConfig(method="ngram", kv_cache_dtype="fp8"))
    for name, most in (("fp8", 448), ("int8", 127)):
        engine.generate([[1, 2, 3]], 2, progress=False, kv_cache_dtype=name)
        pool = engine.session.scheduler.state.target_pool
        for layer in range(2):
            got = torch.stack([*pool.scales(layer).values()])
            wanted = scales[layer].reshape(2, -1)
            if name == "fp8":
                assert torch.equal(got, wanted)
            else:
                torch.testing.assert_close(got, wanted * 448 / most)
    folder = with_scales(plain, tmp_path / "int", scales, quantization_config={
        "quant_method": "compressed-tensors", "config_groups": {}, "format": "int-quantized",
        "kv_cache_scheme": {"type": "int", "num_bits": 8, "strategy": "tensor"}})  # fmt: skip
    limits = load_target(folder, dtype=torch.float16).kv_limits
    torch.testing.assert_close(limits, scales.double().reshape(2, 2, -1).expand(2, 2, 2).transpose(0, 1) * 127)


def test_fnuz_holds_what_e4m3fn_would():
    """The pool of a gfx942 has its own type, whose largest number is smaller."""
    engine = engine_of("fp8")
    engine.session.target.kv_limits = torch.full((2, *engine.target.kv_shape[:2]), 448.0)
    with architectures.assume("gfx942"):
        pool = engine.session._target_pool(engine.config, 2)
    assert pool.k_cache.dtype == torch.float8_e4m3fnuz
    assert pool.scales(0)["k_scale"].tolist() == [pytest.approx(448 / 240)]


def test_names_of_scales(plain, tmp_path):
    """ModelOpt's beside the projections, one for both, and those of projections' outputs mean the same."""
    loaded = []
    for number, forms in enumerate((
        ["{a}.k_scale", "{a}.v_scale"], ["{a}.k_proj.k_scale", "{a}.v_proj.v_scale"],
        ["{a}.k_proj.output_scale", "{a}.v_proj.output_scale"], ["{a}.attn.k_scale", "{a}.attn.v_scale"],
        ["{a}.kv_scale"],
    )):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        for path in plain.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        names = [form.format(a=f"model.layers.{layer}.self_attn") for layer in range(2) for form in forms]
        edit_tensors(folder, **{name: torch.tensor([0.5]) for name in names})
        loaded.append(load_target(folder, dtype=torch.float16).kv_limits)
    assert all(torch.equal(limits, torch.full((2, 2, 2), 224.0).double()) for limits in loaded)


def test_layers_without_scales_have_the_scale_1(plain, tmp_path):
    folder = with_scales(plain, tmp_path / "some", torch.full((2, 2), 0.5))
    edit_tensors(folder, **{"model.layers.1.self_attn.v_scale": None})
    limits = load_target(folder, dtype=torch.float16).kv_limits / 448
    assert limits[..., 0].tolist() == [[0.5, 0.5], [0.5, 1.0]]


BAD_SCALES = [
    ({"model.layers.1.self_attn.k_scale": torch.ones(3)}, "1 or num_key_value_heads = 2 elements, got shape"),
    ({"model.layers.1.self_attn.k_scale": torch.tensor(0.0)}, "k_scale must be finite and above 0, got 0.0"),
    ({"model.layers.0.self_attn.v_scale": torch.tensor([1.0, math.nan])}, "v_scale must be finite and .* got nan"),
    ({"model.layers.0.self_attn.v_scale": torch.tensor(-1.0)}, "v_scale must be finite and above 0, got -1.0"),
    ({"model.layers.0.self_attn.k_zero_point": torch.tensor([3])}, "k_zero_point must be 0, since .* got 3"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error"), BAD_SCALES, ids=[error[:24] for _, error in BAD_SCALES])
def test_scales_that_cannot_be_are_named(changes, error, plain, tmp_path):
    folder = with_scales(plain, tmp_path / "bad", torch.ones(2, 2))
    edit_tensors(folder, **changes)
    with pytest.raises(ModelError, match=error):
        load_target(folder, dtype=torch.float16)


def test_other_schemes_are_not_used(plain, tmp_path, caplog):
    """A warning names the scheme; keys and values stay as they are."""
    scheme = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "int-quantized",
              "kv_cache_scheme": {"type": "float", "num_bits": 4}}  # fmt: skip
    folder = with_scales(plain, tmp_path / "four", torch.ones(2, 2), quantization_config=scheme)
    assert load_target(folder, dtype=torch.float16).kv_limits is None
    assert "kv_cache_scheme with type='float' and num_bits=4 is not implemented (only 8 bits)" in caplog.text


def test_what_cannot_be_is_named():
    with pytest.raises(ValueError, match=r"EAGLEConfig: kv_cache_dtype must be one of \['auto', .* got 'int4'"):
        EAGLEConfig(kv_cache_dtype="int4")
    target = load_target(demo_pair()[0])
    for name in EIGHT_BITS:
        rule = f"kv_cache_dtype must be 'auto' for a target in torch.float32 .* got '{name}'"
        with pytest.raises(ValueError, match=rule):
            EAGLEInference(None, target, EAGLEConfig(method="ngram", kv_cache_dtype=name))
    half = load_target(demo_pair()[0], dtype=torch.float16)
    with architectures.assume("sm_80"):
        with pytest.raises(
            ValueError, match="kv_cache_dtype must be 'auto' or 'int8' on sm_80, without fp8, got 'fp8'"
        ):
            EAGLEInference(None, half, EAGLEConfig(method="ngram", kv_cache_dtype="fp8"))
        EAGLEInference(None, half, EAGLEConfig(method="ngram", kv_cache_dtype="int8"))
    half.kv_limits = torch.zeros(2, 3)
    engine = EAGLEInference(None, half, EAGLEConfig(method="ngram", kv_cache_dtype="int8"))
    with pytest.raises(ModelError, match=r"kv_limits of Decoder must be \(2, .* numbers above 0, got \(2, 3\)"):
        engine.generate([[1, 2]], 1, progress=False)
