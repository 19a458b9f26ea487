"""The config.json of a Hugging Face decoder: a table of the families, and one dataclass that describes them all.

Keys that do not change the computation are ignored; values that change it and are not implemented are refused by name.
An absent key has the default that the family has in transformers.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from ...primitives.paging import MAX_HEAD_DIM, MIN_HEAD_DIM
from ...runtime.values import is_fp32, is_integer, shown
from .checkpoint import StoredSize
from .protocol import ModelError


@dataclass(frozen=True)
class Family:
    """How the models of one `model_type` differ.

    qkv_bias, o_bias, mlp_bias   whether the projections have a bias, or the key of config.json that says so
    has_qk_norms                 an RMS norm of each query and key head, before RoPE
    sliding                      layers with a sliding window: "none", "all" if `sliding_window` is set, or "by layer"
    defaults                     values of absent keys, where they differ from those of `DecoderConfig`
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    has_qk_norms: bool = False
    sliding: str = "none"
    defaults: dict[str, Any] = field(default_factory=dict)


_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES = {
    "llama": Family(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(
        sliding="all", defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
    ),
    "qwen2": Family(qkv_bias=True, sliding="by layer", defaults=_QWEN),
    "qwen3": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_qk_norms=True,
        sliding="by layer",
        defaults=_QWEN | {"head_dim": 128},
    ),
    "mimo": Family(qkv_bias=True, sliding="by layer", defaults=_QWEN),
}

# Keys that change the computation, with the one value that is implemented.
_IMPLEMENTED = {"hidden_act": "silu", "partial_rotary_factor": 1.0, "quantization_config": None}

# Fields of `DecoderConfig` that config.json expresses in other ways.
_DERIVED = {"qkv_bias", "o_bias", "mlp_bias", "has_qk_norms", "windows", "rope"}

# Token ids and places in the KV pools are int32. A layer is a Python object: config.json must not ask for millions.
_LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 1000
_MOST = dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers"), MOST_LAYERS)
_NOT_NEGATIVE = {"rms_norm_eps", "mscale", "mscale_all_dim"}

# Scalings of the rotary frequencies, and the keys that each requires.
_ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


def read_section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the JSON object under a key of config.json; {} for an absent or null key."""
    section = config.get(name)
    if section is not None and not isinstance(section, dict):
        raise ModelError(f"config.json: {name} must be an object, got {shown(section)}")
    return section or {}


def read_flag(config: dict[str, Any], name: str) -> bool:
    """Returns the boolean under a key of config.json; False for an absent or null key."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"config.json: {name} must be true or false, got {shown(value)}")
    return bool(value)


def read_size(config: dict[str, Any], name: str) -> int:
    """Returns the positive integer under a key of config.json."""
    value, most = config.get(name), _MOST.get(name, _LARGEST_SIZE)
    if not (is_integer(value) and value > 0):
        raise ModelError(f"config.json: {name} must be a positive integer, got {shown(value)}")
    if value > most:
        raise ModelError(f"config.json: {name} must be at most {most}, got {shown(value)}")
    return value


def read_model_type(config: dict[str, Any]) -> str:
    """Returns the family that a config.json names; llama for an absent or null key."""
    model_type = config.get("model_type") or "llama"
    if not isinstance(model_type, str):
        raise ModelError(f"config.json: model_type must be a string, got {shown(model_type)}")
    return model_type


def check_implemented(config: dict[str, Any], implemented: dict[str, Any], of: str = "") -> None:
    """Refuses values other than the implemented one of each key; an absent or null key means the implemented one."""
    for name, only in implemented.items():
        value = config.get(name)
        if value is not None and value != only:
            raise ModelError(f"config.json: {name}={shown(value)} is not implemented{of} (only {only!r})")


def check_fields(config: Any) -> None:
    """Checks the sizes, numbers and flags of a dataclass by the types of its fields; makes floats of its numbers."""
    for item in fields(config):
        name, value, kind = item.name, getattr(config, item.name), item.type.removesuffix(" | None")
        if value is None and kind != item.type:
            continue
        if kind == "int":
            read_size({name: value}, name)
        if kind == "bool":
            read_flag({name: value}, name)
        if kind == "float":
            if not (is_integer(value) or isinstance(value, float)):
                raise ModelError(f"config.json: {name} must be a number, got {shown(value)}")
            if not is_fp32(value):
                raise ModelError(f"config.json: {name} must be a finite number that fp32 holds, got {shown(value)}")
            value = float(value)  # torch takes no ints of more than 64 bits
            if name in _NOT_NEGATIVE and value < 0:
                raise ModelError(f"config.json: {name} must be at least 0, got {shown(value)}")
            object.__setattr__(config, name, value)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """`rope_scaling`, which transformers 5 calls `rope_parameters`; the names are theirs, and `rotary.py` uses them."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    original_max_position_embeddings: int | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        divisors = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow")
        # yarn divides by the logarithm of rope_theta
        bounds = {"rope_theta": 1 if self.rope_type == "yarn" else 0} | dict.fromkeys(divisors, 0)
        for name, bound in bounds.items():
            value = getattr(self, name)
            if value is not None and not value > bound:
                raise ModelError(
                    f"config.json: {name} must be above {bound} for rope_type={self.rope_type!r}, got {shown(value)}"
                )

    @classmethod
    def from_dict(cls, config: dict[str, Any], max_length: int) -> RopeConfig:
        """Reads a whole config.json; `max_length` is the pretrained length where config.json names no other."""
        name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        section = read_section(config, name)
        rope_type = section.get("rope_type", section.get("type", "default"))
        nested = [key for key, value in section.items() if isinstance(value, dict)]
        if nested:
            raise ModelError(f"config.json: {name} that differ by layer ({', '.join(nested)}) are not implemented")
        if not isinstance(rope_type, str) or rope_type not in _ROPE_TYPES:
            raise ModelError(
                f"config.json: {name} of type {shown(rope_type)} is not implemented (only {', '.join(_ROPE_TYPES)})"
            )
        check_implemented(section, {"partial_rotary_factor": 1.0})
        missing = [key for key in _ROPE_TYPES[rope_type] if section.get(key) is None]
        if missing:
            raise ModelError(f"config.json: {name} of type {rope_type!r} lacks {', '.join(missing)}")
        known = {item.name for item in fields(cls)}
        values = {key: value for key, value in section.items() if key in known and value is not None}
        values["rope_type"] = rope_type
        if config.get("rope_theta") is not None:
            values.setdefault("rope_theta", config["rope_theta"])
        length = "original_max_position_embeddings"
        if config.get(length) is not None:  # has precedence over the section's own
            values[length] = config[length]
        read_size({length: values.setdefault(length, max_length)}, length)
        if rope_type == "yarn":
            values.setdefault("factor", max_length / values[length])
        return cls(**values)


def layer_sizes(prefix: str) -> list[StoredSize]:
    """Returns the sizes that the tensors of one layer tell, whose names begin with `prefix`."""
    names = {
        "hidden_size": "post_attention_layernorm",
        "intermediate_size": "mlp.gate_proj",
        "num_attention_heads * head_dim": "self_attn.q_proj",
        "num_key_value_heads * head_dim": "self_attn.k_proj",
    }
    return [StoredSize(fields, 0, (f"{prefix}{name}.weight",)) for fields, name in names.items()]


@dataclass(kw_only=True)
class DecoderConfig:
    """The keys of a config.json that decide the computation. Names are Hugging Face's, apart from the last five:

    qkv_bias, o_bias   whether the projections into and out of attention have a bias
    has_qk_norms       whether each query and key head has an RMS norm
    windows            for each layer the number of keys that a token sees, itself included; None: all
    rope               the frequencies of the rotary embedding
    """

    stored_sizes = (  # that the tensors tell as well
        StoredSize("vocab_size", 0, ("model.embed_tokens.weight", "lm_head.weight")),
        *layer_sizes("model.layers.0."),
    )

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None  # None: one per query head
    head_dim: int | None = None  # None: hidden_size // num_attention_heads
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    mlp_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    has_qk_norms: bool = False
    windows: tuple[int | None, ...] = ()
    rope: RopeConfig = RopeConfig()

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        check_fields(self)
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        self.windows = self.windows or (None,) * self.num_hidden_layers
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise ModelError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
        if self.head_dim % 2:
            raise ModelError(f"head_dim={self.head_dim} is odd; RoPE rotates pairs")
        if not MIN_HEAD_DIM <= self.head_dim <= MAX_HEAD_DIM:
            raise ModelError(f"head_dim must lie in {MIN_HEAD_DIM}..{MAX_HEAD_DIM}, got {self.head_dim}")

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> DecoderConfig:
        """Reads a parsed config.json; refuses by name what is not implemented and would change the result."""
        return cls(**cls._read(config))

    @classmethod
    def _read(cls, config: dict[str, Any]) -> dict[str, Any]:
        model_type = read_model_type(config)
        if model_type not in FAMILIES:
            raise ModelError(
                f"config.json: model_type={shown(model_type)} is not implemented (only {', '.join(FAMILIES)})"
            )
        check_implemented(config, _IMPLEMENTED)
        family = FAMILIES[model_type]
        config = family.defaults | config
        known = {item.name for item in fields(cls)} - _DERIVED
        values = {name: value for name, value in config.items() if name in known and value is not None}
        for item in fields(cls):
            if item.default is MISSING and item.name not in values:
                raise ModelError(f"config.json: {item.name} is missing")
        for name in ("qkv_bias", "o_bias", "mlp_bias"):
            bias = getattr(family, name)
            values[name] = read_flag(config, bias) if isinstance(bias, str) else bias
        values["has_qk_norms"] = family.has_qk_norms
        values["windows"] = _windows(config, family, read_size(config, "num_hidden_layers"))
        values.setdefault("max_position_embeddings", cls.max_position_embeddings)
        values["rope"] = RopeConfig.from_dict(config, read_size(values, "max_position_embeddings"))
        return values


def _windows(config: dict[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Returns the window of each layer; None for layers that see every token."""
    window, first = config.get("sliding_window"), None
    if family.sliding == "by layer":
        window = window if read_flag(config, "use_sliding_window") else None
        first = config.get("max_window_layers")
        if first is not None and not (is_integer(first) and first >= 0):
            raise ModelError(f"config.json: max_window_layers must be an integer of at least 0, got {shown(first)}")
    if window is not None:
        if family.sliding == "none":
            raise ModelError(f"config.json: sliding_window={shown(window)} is not implemented for this model_type")
        window = read_size(config, "sliding_window")
    num_full = num_layers if window is None else min(first or 0, num_layers)
    computed = ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full)
    layer_types = computed if config.get("layer_types") is None else config["layer_types"]
    if family.sliding != "by layer" and layer_types != computed:
        raise ModelError(f"config.json: layer_types={shown(layer_types)} is not implemented for this model_type")
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ModelError(f"config.json: layer_types must name each of {num_layers} layers, got {shown(layer_types)}")
    for layer_type in layer_types:
        if layer_type not in ("sliding_attention", "full_attention"):
            raise ModelError(f"config.json: layer_types: {shown(layer_type)} is not implemented")
        if layer_type == "sliding_attention" and window is None:
            raise ModelError("config.json: layer_types name sliding_attention, but no sliding window is in use")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)
