"""The config.json of a Hugging Face decoder: a table of the families, and one dataclass that describes them all. Keys
that do not change the computation are ignored; values that change it and are not implemented are refused by name. An
absent key has the default that the family has in transformers. A null or empty value counts as absent (`stated`); what
a key would turn on is off where the value is false, 0 or -1 as well (`is_off`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple

from ...primitives.paging import MAX_HEAD_DIM, MIN_HEAD_DIM
from ...runtime.values import is_fp32, is_integer, shown
from .checkpoint import StoredSize, brief
from .protocol import ModelError


class Family(NamedTuple):
    """Tells how the models of one `model_type` differ."""

    qkv_bias: bool | str = False  # whether the projections have a bias, or the key of config.json that says so
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    has_qk_norms: bool = False  # whether each query and key head has an RMS norm, before RoPE
    sliding: str = "none"  # layers with a sliding window: "none", "all" if `sliding_window` is set, or "by layer"
    defaults: dict[str, Any] = {}  # values of absent keys, where they differ from those of `DecoderConfig`


_QWEN = {
    "num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "use_sliding_window": False,
    "max_window_layers": 28,
}  # fmt: skip
_QWEN2 = Family(qkv_bias=True, sliding="by layer", defaults=_QWEN)

FAMILIES = {
    "llama": Family(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(
        sliding="all", defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
    ),
    "qwen2": _QWEN2,
    "qwen3": _QWEN2._replace(
        qkv_bias="attention_bias", o_bias="attention_bias", has_qk_norms=True, defaults=_QWEN | {"head_dim": 128}
    ),
    "mimo": _QWEN2,
}

# Keys of models of other families, which the tensors do not tell. What they turn on or multiply by is not implemented.
OF_OTHER_FAMILIES = {
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb"), 1.0),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv", "attention_chunk_size")),
    **dict.fromkeys(("alibi", "use_alibi", "is_encoder_decoder", "add_cross_attention", "parallel_attn"), False),
    **dict.fromkeys(("use_parallel_residual", "parallel_residual", "use_bidirectional_attention"), False),
}

# Keys that change the computation, with the one value that is implemented.
_IMPLEMENTED = {"hidden_act": "silu", "partial_rotary_factor": 1.0, "rotary_pct": 1.0, "quantization_config": None,
                **OF_OTHER_FAMILIES}  # fmt: skip
_SAME = {"swish": "silu"}  # two names of one activation

# Keys whose null is a value of its own in transformers: no window, a key head for each query head, the usual size.
NULL_IS_A_VALUE = ("sliding_window", "num_key_value_heads", "head_dim")

# Token ids and places in the KV pools are int32. A layer is a Python object: config.json must not ask for millions.
_LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 1000
_MOST = dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers"), MOST_LAYERS)
_NOT_NEGATIVE = {"rms_norm_eps", "mscale", "mscale_all_dim"}

# Scalings of the rotary frequencies, and the keys that each requires.
_ROPE_TYPES = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
               "yarn": ()}  # fmt: skip

_TYPES = {dict: "an object", bool: "true or false", str: "a string"}  # what errors call them


def read_value(config: dict[str, Any], name: str, kind: type, file_name: str = "config.json") -> Any:
    """Returns the value of type `kind` under a key of a JSON file; the type's empty value where that says nothing."""
    value = config.get(name)
    if is_empty(value):
        return kind()
    if not isinstance(value, kind):
        raise ModelError(f"{file_name}: {name} must be {_TYPES[kind]}, got {shown(value)}")
    return value


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
    return read_value(config, "model_type", str) or "llama"


def is_empty(value: Any) -> bool:
    """Returns whether a setting says nothing: it is null, or an empty text or list, or an object of such values."""
    if isinstance(value, dict):
        return all(map(is_empty, value.values()))
    return value is None or (isinstance(value, (str, list)) and not value)


def is_off(value: Any) -> bool:
    """Returns whether a setting that would turn something on leaves it off."""
    return is_empty(value) or not value or (is_integer(value) and value == -1)


def stated(config: dict[str, Any], *kept: str) -> dict[str, Any]:
    """Returns the settings that say something; those named in `kept` also where they are null or empty."""
    return {name: value for name, value in config.items() if name in kept or not is_empty(value)}


def check_implemented(config: dict[str, Any], implemented: dict[str, Any], of: str = "") -> None:
    """Refuses values other than the implemented one of each key, which an absent, null or empty one means. Where
    nothing is implemented (None or False), so does any value that is off."""
    for name, only in implemented.items():
        value = config.get(name)
        value = _SAME.get(value, value) if isinstance(value, str) else value
        if not (is_empty(value) or value == only or (not only and is_off(value))):
            raise ModelError(f"config.json: {name}={shown(config[name])} is not implemented{of} (only {only!r})")


def check_fields(config: Any) -> None:
    """Checks the sizes, numbers and flags of a dataclass by the types of its fields; makes floats of its numbers."""
    for name, annotation in ((item.name, item.type) for item in fields(config)):
        value, kind = getattr(config, name), annotation.removesuffix(" | None")
        if value is None and kind != annotation:
            continue
        if kind == "int":
            read_size(vars(config), name)
        if kind == "bool":
            read_value(vars(config), name, bool)
        if kind == "float":
            if not (is_integer(value) or isinstance(value, float)):
                raise ModelError(f"config.json: {name} must be a number, got {shown(value)}")
            if not is_fp32(value):
                raise ModelError(f"config.json: {name} must be a finite number that fp32 holds, got {shown(value)}")
            value = float(value)  # torch takes no ints of more than 64 bits
            if name in _NOT_NEGATIVE and value < 0:
                raise ModelError(f"config.json: {name} must be at least 0, got {shown(value)}")
            object.__setattr__(config, name, value)


def _present(config: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns the values of those keys that say something."""
    return stated({name: config.get(name) for name in names})


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Holds `rope_scaling`, which transformers 5 calls `rope_parameters`, with the names of transformers."""

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
                rule = f"must be above {bound} for rope_type={self.rope_type!r}"
                raise ModelError(f"config.json: {name} {rule}, got {shown(value)}")

    @classmethod
    def from_dict(cls, config: dict[str, Any], max_length: int) -> RopeConfig:
        """Reads a whole config.json; `max_length` is the pretrained length where config.json names no other."""
        name = "rope_parameters" if is_off(config.get("rope_scaling")) else "rope_scaling"
        section = {} if is_off(config.get(name)) else stated(read_value(config, name, dict))
        rope_type = section.get("rope_type", section.get("type", "default"))
        nested = [key for key, value in section.items() if isinstance(value, dict)]
        if nested:
            told = ", ".join(brief(key) for key in nested[:4])
            raise ModelError(f"config.json: {name} that differs by layer ({told}) is not implemented")
        if not isinstance(rope_type, str) or rope_type not in _ROPE_TYPES:
            fault = f"of type {shown(rope_type)} is not implemented (only {', '.join(_ROPE_TYPES)})"
            raise ModelError(f"config.json: {name} {fault}")
        check_implemented(section, {"partial_rotary_factor": 1.0})
        missing = [key for key in _ROPE_TYPES[rope_type] if key not in section]
        if missing:
            raise ModelError(f"config.json: {name} of type {rope_type!r} lacks {', '.join(missing)}")
        length = "original_max_position_embeddings"  # one beside the section has precedence over one inside
        values = {length: max_length} | _present(config, ["rope_theta"])
        values |= _present(section, [item.name for item in fields(cls)]) | _present(config, [length])
        if rope_type == "yarn":
            values.setdefault("factor", max_length / read_size(values, length))
        return cls(**values | {"rope_type": rope_type})


def layer_sizes(prefix: str) -> list[StoredSize]:
    """Returns the sizes that the tensors of one layer tell, whose names begin with `prefix`."""
    return [
        StoredSize("hidden_size", 0, (f"{prefix}post_attention_layernorm.weight",)),
        StoredSize("intermediate_size", 0, (f"{prefix}mlp.gate_proj.weight",)),
        StoredSize("num_attention_heads * head_dim", 0, (f"{prefix}self_attn.q_proj.weight",)),
        StoredSize("num_key_value_heads * head_dim", 0, (f"{prefix}self_attn.k_proj.weight",)),
    ]


@dataclass(kw_only=True)
class DecoderConfig:
    """Holds the keys of a config.json that decide the computation, by Hugging Face's names apart from the last five."""

    stored_sizes = (  # those that the tensors tell as well
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
    qkv_bias: bool = False  # whether the projections into attention have a bias
    o_bias: bool = False  # whether the projection out of attention has a bias
    has_qk_norms: bool = False  # whether each query and key head has an RMS norm
    windows: tuple[int | None, ...] = ()  # the keys that a token sees in each layer, itself included; None: all
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
            raise ModelError(f"num_attention_heads must be a multiple of num_key_value_heads = {kv_heads}, got {heads}")
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even, since RoPE rotates pairs, got {self.head_dim}")
        if not MIN_HEAD_DIM <= self.head_dim <= MAX_HEAD_DIM:
            raise ModelError(f"head_dim must lie in {MIN_HEAD_DIM}..{MAX_HEAD_DIM}, got {self.head_dim}")

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> DecoderConfig:
        """Reads a parsed config.json; refuses by name what is not implemented and would change the result."""
        return cls(**cls._read(config))

    @classmethod
    def _read(cls, config: dict[str, Any], *, of_head: bool = False) -> dict[str, Any]:
        """Returns the fields; of_head: whether they are a head's, whose only window is one that its file states."""
        model_type = read_model_type(config)
        if model_type not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ModelError(f"config.json: model_type={shown(model_type)} is not implemented (only {known})")
        check_implemented(config, _IMPLEMENTED)
        family = FAMILIES[model_type]
        defaults = family.defaults | ({"sliding_window": None} if of_head else {})
        config = defaults | stated(config, *NULL_IS_A_VALUE)
        values = _present(config, [item.name for item in fields(cls)])
        for item in fields(cls):
            if item.default is MISSING and item.name not in values:
                raise ModelError(f"config.json: {item.name} is missing")
        for name in ("qkv_bias", "o_bias", "mlp_bias"):
            bias = getattr(family, name)
            values[name] = read_value(config, bias, bool) if isinstance(bias, str) else bias
        values["has_qk_norms"] = family.has_qk_norms
        values.setdefault("max_position_embeddings", cls.max_position_embeddings)
        max_length = read_size(values, "max_position_embeddings")
        num_layers = read_size(config, "num_hidden_layers")
        values["windows"] = _windows(config, family, num_layers, max_length, of_head)
        values["rope"] = RopeConfig.from_dict(config, max_length)
        # scales of the scores other than the usual one
        size = values.get("head_dim") or read_size(values, "hidden_size") // read_size(values, "num_attention_heads")
        if is_integer(size) and size > 0:  # another is refused by its own name
            check_implemented(config, {"attention_multiplier": size**-0.5, "query_pre_attn_scalar": size})
        return values


def _windows(
    config: dict[str, Any], family: Family, num_layers: int, max_length: int, of_head: bool
) -> tuple[int | None, ...]:
    """Returns the window of each layer; None for layers that see every token."""
    use, window = config.get("use_sliding_window", True), config.get("sliding_window")
    is_on = not is_off(use) and read_value(config | {"use_sliding_window": use}, "use_sliding_window", bool)
    window = read_size(config, "sliding_window") if is_on and not is_off(window) else None
    layer_types = config.get("layer_types")
    if of_head and isinstance(layer_types, list) and set(map(str, layer_types)) == {"full_attention"}:
        layer_types = ["full_attention"] * num_layers  # a file may list the target's
    first = config.get("max_window_layers", 0) if family.sliding != "all" else 0
    if not (is_integer(first) and first >= 0):
        raise ModelError(f"config.json: max_window_layers must be an integer of at least 0, got {shown(first)}")
    if family.sliding == "none" and window is not None:
        is_seen = window < max_length and first < num_layers
        if is_seen and layer_types != ["full_attention"] * num_layers:
            reader = "heads" if of_head else "this model_type"
            raise ModelError(f"config.json: sliding_window={shown(window)} is not implemented for {reader}")
        window = None
    num_full = num_layers if window is None else min(first, num_layers)
    computed = ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full)
    layer_types = computed if is_off(layer_types) else layer_types
    if family.sliding != "by layer" and layer_types != computed:
        raise ModelError(f"config.json: layer_types={shown(layer_types)} is not implemented for this model_type")
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ModelError(f"config.json: layer_types must name each of {num_layers} layers, got {shown(layer_types)}")
    for layer_type in layer_types:
        if layer_type not in ("sliding_attention", "full_attention"):
            raise ModelError(f"config.json: layer_types with {shown(layer_type)} is not implemented")
        if layer_type == "sliding_attention" and window is None:
            raise ModelError("config.json: layer_types names sliding_attention, but no sliding window is in use")
    if window is not None and window >= max_length:
        window = None  # no position is so far from another
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)
