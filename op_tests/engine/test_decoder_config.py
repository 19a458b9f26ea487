"""config.json of a decoder: what is read, what is ignored, and one line by name for what is not implemented."""

import copy

import pytest

from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.engine.models.protocol import ModelError

CONFIG = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2,
}  # fmt: skip
GLM = {"model_type": "glm4_moe"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read(**changes) -> DecoderConfig:
    """What a file says, which stays as it was."""
    given = copy.deepcopy(CONFIG | changes)
    config = DecoderConfig.from_dict(given)
    assert given == CONFIG | changes
    return config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gemma"},
            r"model_type='gemma' is not implemented \(only llama, mistral, qwen2, qwen3, mimo, ",
        ),
        ({"model_type": ["llama"]}, r"model_type must be a string, got \['llama'\]"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false, got 'yes'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"hidden_size": True}, "hidden_size must be a positive integer, got True"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number, got '1e-5'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        ({"num_key_value_heads": 4}, "must be a multiple of num_key_value_heads = "),
        ({"head_dim": 15}, "head_dim must be even, .* got 15"),
        ({"head_dim": 2}, "head_dim must lie in 4..512, got 2"),
        ({"head_dim": 514}, "head_dim must lie in 4..512, got 514"),
        ({"hidden_size": 12}, "head_dim must lie in 4..512, got 2"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling of type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters of type 'longrope'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling of type 'linear' lacks factor"),
        ({"rope_scaling": LLAMA3 | {"factor": "8"}}, "factor must be a number, got '8'"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, r"rope_scaling of type \['linear'\] is not implemented"),
        ({"rope_theta": 0}, "rope_theta must be above 0 for rope_type='default', got 0"),
        ({"rope_theta": float("nan")}, "rope_theta must be a finite number that fp32 holds, got nan"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be above 0 for rope_type='linear', got 0"),
        ({"rope_scaling": {"type": "yarn"}, "rope_theta": 1}, "rope_theta must be above 1 for rope_type='yarn', got 1"),
        ({"rope_scaling": {"type": "yarn", "beta_slow": 0}}, "beta_slow must be above 0 for rope_type='yarn', got 0"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 0}}, "low_freq_factor must be above 0 for rope_type='llama3'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"differs by layer \(full_attention\)"),
        ({"sliding_window": 2047}, "sliding_window=2047 is not implemented for this model_type"),
        ({"sliding_window": 64, "use_sliding_window": "no"}, "use_sliding_window must be true or false, got 'no'"),
        ({"model_type": "mistral", "sliding_window": -7}, "sliding_window must be a positive integer, got -7"),
        ({"attention_multiplier": 0.5}, r"attention_multiplier=0.5 is not implemented \(only 0.25\)"),
        ({"query_pre_attn_scalar": 256}, r"query_pre_attn_scalar=256 is not implemented \(only 16\)"),
        ({"logit_scale": 2}, r"logit_scale=2 is not implemented \(only 1.0\)"),
        ({"logit_scale": 0}, r"logit_scale=0 is not implemented \(only 1.0\)"),
        ({"residual_multiplier": 0.22}, "residual_multiplier=0.22 is not implemented"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30.0 is not implemented \(only None\)"),
        ({"num_experts": 8}, r"num_experts=8 is not implemented \(only None\)"),
        ({"alibi": True}, r"alibi=True is not implemented \(only False\)"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor=0 is not implemented"),
        (GLM | {"partial_rotary_factor": 0}, "partial_rotary_factor must turn pairs of the 16 coordinates .* got 0"),
        (GLM | {"partial_rotary_factor": 1.5}, "partial_rotary_factor must turn pairs .* got 1.5"),
        (
            GLM | {"rope_parameters": {"partial_rotary_factor": 0.45}},
            "partial_rotary_factor must turn pairs .* got 0.45",
        ),
        (GLM | {"partial_rotary_factor": "half"}, "partial_rotary_factor must be a number, got 'half'"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 4}, "layer_types=.* is not implemented"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types must name each of 4 layers"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 4}, "'chunked_attention' is not implemented"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 4}, "no sliding window is in use"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change, message):
    with pytest.raises(ModelError, match=message) as caught:
        read(**change)
    assert "\n" not in str(caught.value)


def test_what_changes_nothing_is_ignored():
    ignored = {"attention_dropout": 0.1, "pretraining_tp": 2, "use_cache": False, "initializer_range": 0.1, "x": {}}
    ignored |= {"qkv_bias": True, "windows": [1], "rope": 3, "has_qk_norms": True}  # our own words, not Hugging Face's
    assert read(**ignored) == read()


# Settings that are off, null, empty or say what is so anyway.
OFF = [
    *({"sliding_window": window} for window in (None, 0, -1, False, [], 2048, 131072)),
    {"sliding_window": 9, "use_sliding_window": False, "max_window_layers": 28},
    {"sliding_window": 9, "layer_types": ["full_attention"] * 4},
    {"sliding_window": 9, "max_window_layers": 4},
    *({"rope_scaling": section} for section in ({}, None, [], "", False, {"rope_type": None}, {"type": "default"})),
    {"rope_parameters": {}, "rope_theta": None},
    *({name: None} for name in ("attention_bias", "tie_word_embeddings", "rms_norm_eps", "partial_rotary_factor")),
    *({"quantization_config": section} for section in ({}, None, False, {"bits": None})),
    *({"layer_types": types} for types in ([], None)),
    *({"hidden_act": name} for name in ("swish", "silu", None, "")),
    *({"num_experts": count, "mlp_only_layers": []} for count in (0, None, False)),
    {"attention_multiplier": 0.25, "query_pre_attn_scalar": 16, "logits_scaling": 1, "embedding_multiplier": 1.0},
    {"final_logit_softcapping": None, "attn_logit_softcapping": 0.0, "alibi": False, "is_encoder_decoder": None},
    *({"model_type": name} for name in (None, "", [])),
    {"architectures": [], "pretraining_tp": 1, "max_window_layers": None, "num_nextn_predict_layers": 0},
]


@pytest.mark.parametrize("change", OFF, ids=str)
def test_what_is_off_counts_as_absent(change):
    assert read(**change) == read()


def test_defaults_agree_with_transformers():
    transformers = pytest.importorskip("transformers")
    for model_type in ("llama", "mistral", "qwen2", "qwen3"):
        theirs = transformers.AutoConfig.for_model(model_type).to_dict()
        required = ("model_type", "vocab_size", "hidden_size", "intermediate_size")
        required += ("num_hidden_layers", "num_attention_heads")
        absent = DecoderConfig.from_dict({name: theirs[name] for name in required})
        assert absent == DecoderConfig.from_dict(theirs), model_type


MOVED = {"rope_type": "default", "rope_theta": 7000}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LENGTH = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5000.0}, {"rope_theta": 5000.0}),
        ({"rope_theta": None, "rope_parameters": MOVED}, {"rope_theta": 7000}),
        ({"rope_theta": 5.0, "rope_parameters": MOVED}, {"rope_theta": 7000}),
        ({"rope_theta": 5.0, "rope_scaling": LINEAR | {"rope_theta": 6.0}}, {"rope_theta": 6.0}),
        ({"rope_theta": 5.0, "rope_parameters": MOVED | {"rope_theta": None}}, {"rope_theta": 5.0}),
        ({"rope_theta": 5000.0, "rope_scaling": LLAMA3, "max_position_embeddings": 64, "rope_parameters": MOVED},
         {"rope_type": "llama3", "rope_theta": 5000.0, LENGTH: 64}),
        ({"rope_scaling": {}, "rope_parameters": LINEAR}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": LINEAR, "rope_parameters": LLAMA3}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": LINEAR, "factor": 9.0}, {"factor": 2.0}),
        ({"rope_scaling": LINEAR | {"type": "yarn"}}, {"rope_type": "linear"}),
        ({"rope_scaling": {"type": "linear", "factor": 3.0}}, {"rope_type": "linear", "factor": 3.0}),
        ({"rope_scaling": LLAMA3 | {LENGTH: 16}}, {LENGTH: 16}),
        ({"rope_scaling": LLAMA3, LENGTH: 32}, {LENGTH: 32}),
        ({"rope_scaling": LLAMA3 | {LENGTH: 16}, LENGTH: 32}, {LENGTH: 32}),
        ({"rope_scaling": LLAMA3 | {LENGTH: 16}, LENGTH: None}, {LENGTH: 16}),
        ({"rope_scaling": {"type": "yarn", LENGTH: 512}}, {"factor": 2048 / 512}),
        ({"rope_scaling": {"type": "yarn", LENGTH: 512}, LENGTH: 256}, {"factor": 2048 / 256}),
        ({"rope_scaling": {"type": "yarn", LENGTH: 512, "factor": 3.0}}, {"factor": 3.0}),
    ],
    ids=str,
)  # fmt: skip
def test_of_both_places_of_a_rotary_parameter_one_counts(changes, expected):
    rope = read(**changes).rope
    assert {name: getattr(rope, name) for name in expected} == expected


def test_of_a_family_s_default_and_the_file_the_file_counts():
    assert repr(read(rope_theta=10**30).rope.rope_theta) == "1e+30"  # torch takes no int of that size
    required = {name: CONFIG[name] for name in CONFIG if name not in ("model_type", "num_key_value_heads")}
    config = DecoderConfig.from_dict(required)
    assert (config.num_key_value_heads, config.head_dim, config.rope.rope_theta) == (6, 16, 10000.0)
    mistral = read(model_type="mistral", head_dim=16)
    assert (mistral.windows, mistral.max_position_embeddings) == ((4096,) * 4, 131072)
    own = {"head_dim": 16, "sliding_window": 5, "max_position_embeddings": 64}
    assert read(model_type="mistral", **own).windows == (5,) * 4
    assert read(model_type="mistral", **own).max_position_embeddings == 64
    assert read(model_type="mistral", sliding_window=None).windows == (None,) * 4
    assert (read(model_type="qwen3").head_dim, read(model_type="qwen3", head_dim=8).head_dim) == (128, 8)


def test_kinds_of_layers_count_before_the_first_layers_with_a_window():
    sliding = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7}
    assert read(**sliding, max_window_layers=3).windows == (None, None, None, 7)
    assert read(**sliding).windows == (None,) * 4  # transformers' default: from layer 28 on
    kinds = ["sliding_attention", "full_attention"] * 2
    assert read(**sliding, max_window_layers=3, layer_types=kinds).windows == (7, None, 7, None)
    assert read(**sliding | {"use_sliding_window": False}, max_window_layers=0).windows == (None,) * 4
