"""The config.json of a Hugging Face decoder: a table of the families, and one dataclass that describes them all. Keys
that do not change the computation are ignored; values that change it and are not implemented are refused by name. An
absent key has the default that the family has in transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ...runtime.values import shown
from .checkpoint import StoredSize
from .layers.experts import (
    DeepseekExperts,
    DeepseekV2Experts,
    ErnieExperts,
    Experts,
    MixtralExperts,
    OssExperts,
    QwenExperts,
)
from .layers.gated import Gated
from .layers.grouped_query import GroupedQuery
from .layers.latent import LatentQuery
from .layers.linear import Linear
from .layers.rotary import RopeConfig, rope_section
from .protocol import ModelError
from .settings import NULL_IS_A_VALUE, check_fields, check_implemented, field_values, present, read_value, stated


class Family(NamedTuple):
    """Tells what the layers of the models of one `model_type` are made of: kinds (see `layers`), and their settings."""

    attention: type[GroupedQuery | LatentQuery] = GroupedQuery
    feed_forward: type[Gated] | type[Experts] = Gated
    keys: dict[str, str] = {}  # options that config.json has, and its keys for them
    always: dict[str, Any] = {}  # settings that config.json does not have
    defaults: dict[str, Any] = {}  # values of absent keys, where they differ from those of `DecoderConfig`


# Options of layers and, in heads, the end of the name of a tensor that the file then holds.
OPTIONS_IN_FILE = {"qkv_bias": "q_proj.bias", "o_bias": "o_proj.bias", "mlp_bias": "gate_proj.bias",
                   "has_qk_norms": "q_norm.weight"}  # fmt: skip
# What a family has that does not say so. sliding: the layers with a window, "none", "all" if `sliding_window` is set,
# or "by layer". linear: the kind.
_PLAIN = dict.fromkeys(OPTIONS_IN_FILE, False) | {
    "sliding": "none", "linear": Linear, "has_sinks": False, "turns_neighbours": False, "is_joined": False,
    "has_post_norms": False,
}  # fmt: skip
_BIASES = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_QWEN = {
    "num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "use_sliding_window": False,
    "max_window_layers": 28,
}  # fmt: skip
_QWEN2 = Family(always={"qkv_bias": True, "sliding": "by layer"}, defaults=_QWEN)
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
_MIXTRAL = {"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2}

_DEEPSEEK = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
             "v_head_dim": 128}  # fmt: skip
_DEEPSEEK_V2 = _DEEPSEEK | {
    "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "first_k_dense_replace": 0,
}  # fmt: skip
_DEEPSEEK_V3 = _DEEPSEEK | {
    "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "max_position_embeddings": 4096,
}  # fmt: skip

_GLM = {"max_position_embeddings": 131072, "partial_rotary_factor": 0.5}
_GLM_DENSE = Family(
    keys={"qkv_bias": "attention_bias"}, always={"turns_neighbours": True, "is_joined": True},
    defaults=_GLM | {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True},
)  # fmt: skip
_GLM_MOE = _GLM | {
    "n_routed_experts": 128, "n_shared_experts": 1, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
    "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}  # fmt: skip

_GLM_LITE = {
    "n_routed_experts": 64, "n_shared_experts": 1, "moe_intermediate_size": 1536, "first_k_dense_replace": 1,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8,
    "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 202752,
}  # fmt: skip
_ERNIE = Family(
    keys=dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), "use_bias"), always={"turns_neighbours": True},
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
              "rope_theta": 500000.0, "tie_word_embeddings": True},
)  # fmt: skip
_ERNIE_MOE = {
    "num_key_value_heads": 4, "head_dim": None, "moe_k": 6, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
    "moe_layer_end_index": -1, "moe_layer_interval": 1,
}  # fmt: skip

FAMILIES = {
    "llama": Family(keys=_BIASES | {"mlp_bias": "mlp_bias"}),
    "mistral": Family(always={"sliding": "all"}, defaults=_MISTRAL),
    "qwen2": _QWEN2,
    "qwen3": Family(
        keys=_BIASES, always={"has_qk_norms": True, "sliding": "by layer"}, defaults=_QWEN | {"head_dim": 128}
    ),
    "mimo": _QWEN2,
    "qwen3_moe": Family(
        feed_forward=QwenExperts, keys=_BIASES, always={"has_qk_norms": True, "sliding": "all"},
        defaults=_QWEN | {"num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "mixtral": Family(feed_forward=MixtralExperts, always={"sliding": "all"}, defaults=_MISTRAL | _MIXTRAL),
    "gpt_oss": Family(
        feed_forward=OssExperts, keys=_BIASES, always={"has_sinks": True, "sliding": "by layer"},
        defaults={"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5,
                  "max_position_embeddings": 131072, "rope_theta": 150000.0, "attention_bias": True,
                  "num_experts_per_tok": 4},
    ),
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": _ERNIE._replace(feed_forward=ErnieExperts, defaults=_ERNIE.defaults | _ERNIE_MOE),
    "glm": _GLM_DENSE,
    "glm4": _GLM_DENSE._replace(always=_GLM_DENSE.always | {"has_post_norms": True}),
    "glm4_moe": Family(
        feed_forward=DeepseekExperts, keys={"qkv_bias": "attention_bias", "has_qk_norms": "use_qk_norm"},
        defaults=_GLM_MOE,
    ),
    "glm4_moe_lite": Family(LatentQuery, DeepseekExperts, defaults=_GLM_LITE),
    "deepseek_v2": Family(LatentQuery, DeepseekV2Experts, {"mlp_bias": "mlp_bias"}, defaults=_DEEPSEEK_V2),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), Family(LatentQuery, DeepseekExperts, defaults=_DEEPSEEK_V3)),
}  # fmt: skip

# Keys of models of other families, which the tensors do not tell. What they turn on or multiply by is not implemented.
OF_OTHER_FAMILIES = {
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb"), 1.0),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv", "attention_chunk_size")),
    **dict.fromkeys(("alibi", "use_alibi", "is_encoder_decoder", "add_cross_attention", "parallel_attn"), False),
    **dict.fromkeys(("use_parallel_residual", "parallel_residual", "use_bidirectional_attention"), False),
}

# Keys that change the computation, with the one value that is implemented.
_IMPLEMENTED = {"partial_rotary_factor": 1.0, "rotary_pct": 1.0, "quantization_config": None, **OF_OTHER_FAMILIES}


def read_model_type(config: dict[str, Any]) -> str:
    """Returns the family that a config.json names; llama for an absent or null key."""
    return read_value(config, "model_type", str) or "llama"


def has_plain_layers(model_type: str) -> bool:
    """Returns whether heads may have layers of this family: a known one, without experts or joined projections."""
    family = FAMILIES.get(model_type)
    return family is not None and not (issubclass(family.feed_forward, Experts) or "is_joined" in family.always)


@dataclass(kw_only=True)
class DecoderConfig:
    """Holds the keys of a config.json that decide the computation, by Hugging Face's names; those of one kind of layer
    are in `attention` and `feed_forward`, and are attributes here as well."""

    layer_prefix: ClassVar[str] = "model.layers.0."  # begins the names of the first layer's tensors
    own_sizes: ClassVar[tuple[StoredSize, ...]] = (
        StoredSize("vocab_size", 0, ("model.embed_tokens.weight", "lm_head.weight")),
    )

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    has_post_norms: bool = False  # whether what attention and feed-forward add to the stream has a norm of its own
    attention: GroupedQuery | LatentQuery
    feed_forward: Gated | Experts
    rope: RopeConfig

    def __post_init__(self) -> None:
        check_fields(self)

    def __getattr__(self, name: str) -> Any:
        """Returns a setting of a kind of layer."""
        for kind in map(vars(self).get, ("attention", "feed_forward")):
            if kind is not None and name in vars(kind):
                return getattr(kind, name)
        raise AttributeError(f"{type(self).__name__} has no {name}")

    @property
    def stored_sizes(self) -> list[StoredSize]:
        """Returns the sizes that the tensors tell as well."""
        own = {"post_attention_layernorm.weight": "hidden_size"}
        of_layer = own | self.feed_forward.stored_sizes | self.attention.stored_sizes
        return [StoredSize(size, 0, (self.layer_prefix + name,)) for name, size in of_layer.items()] + [*self.own_sizes]

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> DecoderConfig:
        """Reads a parsed config.json; refuses by name what is not implemented and would change the result."""
        return cls(**cls._read(config))

    @classmethod
    def _read(cls, config: dict[str, Any], reader: str = "", **options: bool) -> dict[str, Any]:
        """Returns the fields. reader: what reads a file that is not a target's, in errors. options: in place of the
        family's."""
        model_type = read_model_type(config)
        if model_type not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ModelError(f"config.json: model_type={shown(model_type)} is not implemented (only {known})")
        family = FAMILIES[model_type]
        is_head = reader == "heads"
        if is_head and not (has_plain_layers(model_type) or issubclass(family.attention, LatentQuery)):
            raise ModelError(f"config.json: model_type={shown(model_type)} is not implemented for {reader}")
        feed_forward_kind = Gated if is_head else family.feed_forward  # a head's layer never has experts
        own = (*family.defaults, *getattr(feed_forward_kind, "count_keys", ()))
        config = config | present(rope_section(config)[1], ["partial_rotary_factor"])
        check_implemented(config, {name: only for name, only in _IMPLEMENTED.items() if name not in own})
        defaults = {name: getattr(cls, name) for name in ("rms_norm_eps", "max_position_embeddings")} | family.defaults
        config = defaults | stated(config, *NULL_IS_A_VALUE)
        stated_options = {name: read_value(config, key, bool) for name, key in family.keys.items()}
        config |= _PLAIN | stated_options | family.always | options
        kinds = dict.fromkeys(("attention", "feed_forward", "rope"))
        values = field_values(cls, config, **kinds)  # first of all, what is missing is named
        attention, feed_forward = family.attention.read(config, reader), feed_forward_kind.read(config)
        rope = RopeConfig.from_dict(config, attention.rotary_size)
        return values | {"attention": attention, "feed_forward": feed_forward, "rope": rope}
