"""Loading heads: layer ids of both conventions, what is refused and how, and what a head says of itself."""

import logging

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.loading import load_draft, read_head
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.reference.causal_attend import causal_attend
from op_tests.engine import heads
from op_tests.engine.heads import DRAFT_VOCAB, HIDDEN, STREAMS, TARGET_IDS, TARGET_VOCAB, WRITERS
from op_tests.engine.hostile import refused
from op_tests.engine.toys import random_llama

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target():
    return random_llama(num_layers=8, vocab_size=TARGET_VOCAB)


@pytest.fixture
def eagle3(tmp_path):
    return heads.write_specforge(tmp_path / "head", heads.eagle3_tensors())


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ("official (SafeAILab)", "EAGLE-3, default aux layers = hidden_states [2, 4, 5]"),
        ("SpecForge/SGLang", "EAGLE-3, aux layers [1, 3, 4] (layer outputs) = hidden_states [2, 4, 5]"),
        ("vLLM speculators", "EAGLE-3, aux layers [2, 4, 5] (hidden_states) = hidden_states [2, 4, 5]"),
        ("NVIDIA ModelOpt", "EAGLE-3, aux layers [1, 3, 4] (layer outputs) = hidden_states [2, 4, 5]"),
    ],
)
def test_layer_ids_are_converted_and_logged(tmp_path, target, caplog, form, told):
    folder = WRITERS[form](tmp_path / "head", heads.eagle3_tensors())
    with caplog.at_level(logging.INFO):
        assert load_draft(folder, target).aux_layers == STREAMS
    assert [record.message for record in caplog.records] == [f"{folder}: {form} format, {told}"]


def test_eagle1_says_what_it_reads(tmp_path, target, caplog):
    folder = heads.write_official(tmp_path, heads.eagle1_tensors())
    with caplog.at_level(logging.INFO):
        load_draft(folder, target)
    assert caplog.messages[0].endswith("EAGLE-1, the target's last feature = the stream after the final norm")


def test_ids_beside_the_sizes_are_indices(tmp_path, target):
    """As vLLM reads them, whatever the architecture is called."""
    folder = heads.write_official(tmp_path, heads.eagle3_tensors(), **{LAYER_IDS: [1, 4, 6]})
    assert load_draft(folder, target).aux_layers == (1, 4, 6)


def test_layer_ids_can_be_overridden(eagle3, target, caplog):
    with caplog.at_level(logging.INFO):
        assert load_draft(eagle3, target, aux_layers=(1, 3, 4)).aux_layers == (1, 3, 4)
    assert "aux layers given by the caller = hidden_states [1, 3, 4]" in caplog.text
    with pytest.raises(ModelError, match="aux_layers must be 3 indices, got"):
        load_draft(eagle3, target, aux_layers=(1, 3))
    with pytest.raises(ModelError, match="must lie in 0..8 for this target"):
        load_draft(eagle3, target, aux_layers=(1, 3, 9))


def test_what_config_leaves_open_is_told(tmp_path, target, caplog):
    folder = heads.write_speculators(tmp_path / "a", heads.eagle3_tensors(), norm_before_residual=None)
    assert load_draft(folder, target).config.norm_before_residual is False
    assert "config.json does not say norm_before_residual: False is taken" in caplog.text
    load_draft(heads.write_specforge(tmp_path / "b", heads.eagle3_tensors(), norm_output=True), target)
    assert "norm_output=True is read as SGLang does" in caplog.text


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d2t: d2t.index_fill(0, torch.tensor([7]), 60), "d2t: draft id 7 maps to target id 67, outside the 61"),
        (lambda d2t: d2t.index_fill(0, torch.tensor([0]), -1), "d2t: draft id 0 maps to target id -1, outside the 61"),
        (lambda d2t: d2t.index_fill(0, torch.tensor([5]), 0), "draft id 5 maps to target id 5, not above its predeces"),
        (lambda d2t: d2t[:-1], r"tensor d2t has shape \[22\], but config.json says \[23\]"),
        (lambda d2t: d2t.float(), "tensor d2t must have dtype torch.int64, got F32"),
    ],
)
def test_faults_of_the_draft_vocabulary(tmp_path, target, form, change, message):
    tensors = heads.eagle3_tensors()
    folder = WRITERS[form](tmp_path / "head", tensors)
    heads.edit_tensors(folder, d2t=change(tensors["d2t"]).contiguous())
    with pytest.raises(ModelError, match=message):
        load_draft(folder, target)


def test_t2d_must_agree_and_may_be_absent(eagle3, target):
    stored = load_draft(eagle3, target).t2d
    heads.edit_tensors(eagle3, t2d=None)
    assert torch.equal(load_draft(eagle3, target).t2d, stored)
    wrong = stored.clone()
    wrong[int(TARGET_IDS[2])] = False
    heads.edit_tensors(eagle3, t2d=wrong)
    with pytest.raises(ModelError, match=f"t2d: target id {int(TARGET_IDS[2])} is False, but d2t makes it True"):
        load_draft(eagle3, target)


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"midlayer.mlp.up_proj.weight": None}, {}, "head: missing tensors: midlayer.mlp.up_proj.weight"),
        ({"extra": torch.zeros(1)}, {}, "head: unexpected tensors: extra"),
        ({"fc.weight": torch.zeros(32, 64)}, {},
         r"target_hidden_size must be 64 to match fc.weight of shape \[32, 64\], got 3 \* 32"),
        ({"norm.weight": torch.zeros(32, dtype=torch.int8)}, {},
         "tensor norm.weight must have dtype torch.float32, got I8"),
        ({"lm_head.weight": None}, {}, "a head over 23 of 61 tokens cannot share the target's output"),
        ({"layers.0.hidden_norm.weight": torch.ones(32)}, {},
         "another tensor stands for midlayer.hidden_norm.weight already"),
        ({"fc_norm.0.weight": torch.ones(32)}, {}, "unexpected tensors: fc_norm.0.weight"),
        ({}, {"speculators_model_type": "dflash"}, "speculators_model_type='dflash' is not an EAGLE head"),
        ({}, {"num_hidden_layers": 2}, "num_hidden_layers=2 is not implemented for EAGLE-3"),
        ({}, {LAYER_IDS: [5, 6, 7]}, r"\[5, 6, 7\] contradicts \[1, 3, 4\] of eagle_config"),
        ({}, {"target_hidden_size": 48}, "target_hidden_size must be 96 to match fc.weight"),
        ({}, {"qkv_bias": True}, "missing tensors: midlayer.self_attn.k_proj.bias"),
        ({}, {"logit_scale": 0.5}, "logit_scale=0.5"),
        ({}, {"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step=4"),
        ({}, {"eagle_config": {"use_last_layernorm": False}},
         "use_last_layernorm=False is not implemented for EAGLE-3"),
        ({}, {"truncated_vocab_size": 30}, "truncated_vocab_size=30 contradicts draft_vocab_size=23"),
        ({}, {"fc_norm": True, "eagle_config": {"use_aux_hidden_state": False}}, "need use_aux_hidden_state=True"),
        ({}, {"eagle_config": {LAYER_IDS: [-2, 1, 3]}}, "names no stream of the target"),
        ({}, {"draft_vocab_size": 62}, "draft_vocab_size=62 exceeds"),
        ({}, {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
         "sliding_window=64 is not implemented for heads"),
    ],
)  # fmt: skip
def test_refusals_name_what_is_wrong(eagle3, target, tensors, config, message):
    heads.edit_tensors(eagle3, **tensors)
    heads.edit_config(eagle3, **config)
    with pytest.raises(ModelError, match=message) as caught:
        load_draft(eagle3, target)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(str(eagle3))


def test_an_unbound_head_says_so(tmp_path):
    """The official layers, of a head that names none, follow from the target's number of layers."""
    head = read_head(heads.write_official(tmp_path, heads.eagle3_tensors())).head
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ModelError, match="call bind"):
        head(tokens, torch.zeros(1, 1, 3 * HIDDEN), tokens, causal_attend, from_target=True)
    with pytest.raises(ModelError, match="bind"):
        _ = head.aux_layers
    assert head.bind(random_llama(num_layers=12, vocab_size=TARGET_VOCAB)).aux_layers == (2, 6, 9)


def test_a_hint_is_for_layers_that_nobody_chose(tmp_path):
    """Those that a head names itself are wrong for another reason than that they are missing."""
    target = random_llama(num_layers=6, vocab_size=TARGET_VOCAB)
    for name, (chosen, is_hinted) in {"none": ({}, True), "own": ({LAYER_IDS: [3, 2, 1]}, False)}.items():
        told = refused(load_draft, heads.write_official(tmp_path / name, heads.eagle3_tensors(), **chosen), target)
        assert "do not ascend" in told and ("need explicit" in told) == is_hinted


# Settings that trainers write although they are off or empty.
OFF = {
    "window": {"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28},
    "no window": {"sliding_window": 0, "use_sliding_window": None, "layer_types": ["full_attention"] * 36},
    "wide window": {"sliding_window": 96},
    "empty": {LAYER_IDS: [], "rope_scaling": {}, "quantization_config": {}, "layer_types": [], "hidden_act": "swish"},
    "null": dict.fromkeys(("attention_bias", "qkv_bias", "norm_output", "use_aux_norm", "tie_word_embeddings", "d2t")),
    "nothing": {"num_experts": 0, "num_nextn_predict_layers": 0, "logit_scale": 1, "final_logit_softcapping": None},
}


@pytest.mark.parametrize("settings", OFF.values(), ids=OFF)
@pytest.mark.parametrize("form", WRITERS)
def test_settings_that_are_off(tmp_path, target, form, settings):
    """They change nothing, beside the sizes or among them; null leaves it to the tensors whether there are biases."""
    for number, tensors in enumerate((heads.eagle1_tensors(qkv_bias=True), heads.eagle3_tensors())):
        plain = load_draft(WRITERS[form](tmp_path / f"{number} plain", tensors), target)
        folder = WRITERS[form](tmp_path / f"{number}", tensors)
        if form == "vLLM speculators":
            heads.edit_config(folder, transformer_layer_config=heads.WIDTHS | settings)
        else:
            heads.edit_config(folder, **settings)
        head = load_draft(folder, target)
        assert head.config == plain.config and head.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("inside", [{}, {LAYER_IDS: []}, {LAYER_IDS: None, "use_aux_hidden_state": None}], ids=str)
def test_layer_ids_that_name_nothing(eagle3, target, inside):
    heads.edit_config(eagle3, eagle_config=inside, **{LAYER_IDS: []})
    assert read_head(eagle3).written_aux.written is None and load_draft(eagle3, target).aux_layers == STREAMS


def test_a_mapping_without_entries_counts_as_absent(eagle3, tmp_path, target):
    nothing = {"d2t": torch.zeros(0, dtype=torch.int64), "t2d": torch.zeros(0, dtype=torch.bool)}
    heads.edit_tensors(eagle3, t2d=nothing["t2d"])
    assert load_draft(eagle3, target).t2d.sum() == DRAFT_VOCAB
    heads.edit_tensors(eagle3, **nothing)
    with pytest.raises(ModelError, match="missing tensors: d2t"):
        load_draft(eagle3, target)
    whole = heads.write_official(tmp_path / "whole", heads.eagle1_tensors(embedding=False) | nothing)
    assert load_draft(whole, target).draft_to_target is None


FAMILIES = [  # (what the file says, the refusal)
    ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "phi3", "sliding_window": 47}, None),
    ({"architectures": ["Eagle3LlamaForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, None),
    ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "qwen3_moe", "num_experts": 128}, None),
    ({"architectures": ["Qwen3ForCausalLMEagle3"], "model_type": "deepseek_v3"}, None),
    ({"architectures": ["Eagle3DraftModel"], "model_type": "speculator_model"}, None),
    ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "glm4"}, None),
    ({"architectures": [], "model_type": "glm4"}, "model_type='glm4' is not implemented for heads"),
    ({"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}, "model_type='phi3' is not implemented"),
    ({"architectures": ["Qwen3MoEForCausalLMEagle3"], "model_type": "qwen3_moe"}, "model_type='qwen3_moe' is not"),
    ({"architectures": [], "model_type": "mistral", "max_position_embeddings": 8192}, None),
    ({"architectures": [], "model_type": "mistral", "sliding_window": 47}, "sliding_window=47 is not implemented for"),
    ({"model_type": "llama", "sliding_window": 47}, "sliding_window=47 is not implemented for heads"),
    ({"model_type": "llama", "num_experts": 8}, "num_experts=8 is not implemented"),
    ({"model_type": "llama", "attention_multiplier": 0.5}, "attention_multiplier=0.5 is not implemented"),
    ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "phi3", "hidden_act": "gelu"}, "hidden_act='gelu'"),
]


@pytest.mark.parametrize(("settings", "message"), FAMILIES)
def test_the_architecture_decides_the_family(eagle3, target, settings, message):
    heads.edit_config(eagle3, **settings)
    if message is None:
        assert load_draft(eagle3, target).config.windows == (None,)
    else:
        with pytest.raises(ModelError, match=message):
            load_draft(eagle3, target)


def test_rope_theta_is_the_heads_own(tmp_path, target):
    """10000 unless said, in either place, whatever the target has."""
    tensors = heads.eagle3_tensors()
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(7, 3 * HIDDEN, generator=generator)
    embedding = target.get_input_embeddings()(torch.arange(7))
    for index, (config, theta) in enumerate(
        [({}, 1e4), ({"rope_theta": 5e5}, 5e5), ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6)]
    ):
        head = load_draft(heads.write_official(tmp_path / str(index), tensors, **config), target)
        engine = EAGLEInference(head, target, EAGLEConfig(topk=1, num_steps=1))
        with torch.inference_mode():
            logits = _one_pass(engine, torch.arange(7), features)
        want, _ = heads.eagle3_formula(tensors, embedding, features, 0, from_target=True, theta=theta)
        torch.testing.assert_close(logits, want, atol=2e-4, rtol=2e-4)


def _one_pass(engine, ids, features):
    positions = torch.arange(len(ids))[None]
    return engine.draft(ids[None], features[None], positions, causal_attend, from_target=True).logits[0]


def test_the_heads_own_positions_are_a_limit(eagle3, target):
    head = load_draft(eagle3, target)
    assert head.max_length == 96 < target.max_length
    with pytest.raises(ValueError, match="exceed the 96 tokens"):
        EAGLEInference(head, target, EAGLEConfig(topk=2, num_steps=2)).generate([1] * 90, 7)
    assert head.draft_vocab_size == DRAFT_VOCAB
