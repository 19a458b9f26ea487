"""Decoders as their papers and config.json say, in float64 and plain PyTorch: every family, scaling, bias and window.

Nothing is imported from the library, and nothing of transformers is needed, so that a shared mistake cannot hide.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SIZES = {
    "vocab_size": 83, "hidden_size": 60, "intermediate_size": 76, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 96, "rms_norm_eps": 1e-5,
}  # fmt: skip
_LENGTH = "original_max_position_embeddings"
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, _LENGTH: 24}
_SLIDING = {"use_sliding_window": True, "sliding_window": 5}
# what config.json says beside SIZES
CASES = {
    "llama": {"model_type": "llama"},
    "llama, usual epsilon": {"rms_norm_eps": None},
    "llama, large epsilon": {"rms_norm_eps": 0.3},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, biases of attention": {"attention_bias": True},
    "llama, biases of the MLP": {"mlp_bias": True},
    "llama, a key head for each": {"num_key_value_heads": None},
    "llama, one key head": {"num_key_value_heads": 1},
    "llama, the usual heads": {"head_dim": None},
    "llama, heads of 4": {"head_dim": 4},
    "llama, theta": {"rope_theta": 300.0},
    "llama, linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama, llama3": {"rope_scaling": _LLAMA3 | {_LENGTH: 40}, "rope_theta": 300.0},
    "llama, llama3 of the whole length": {"rope_scaling": _LLAMA3},
    "llama, llama3 of other bounds": {"rope_scaling": _LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 7.0}},
    "llama, yarn": {"rope_parameters": _YARN | {"rope_theta": 3000.0}},
    "llama, yarn by the lengths": {"rope_scaling": {"rope_type": "yarn", _LENGTH: 12}},
    "llama, yarn not truncated": {"rope_scaling": _YARN | {"truncate": False, "beta_fast": 8.0, "beta_slow": 0.5}},
    "llama, yarn and its factor": {"rope_scaling": _YARN | {"attention_factor": 0.7}},
    "llama, yarn and mscale": {"rope_scaling": _YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "llama, yarn and half of mscale": {"rope_scaling": _YARN | {"mscale": 0.7}},
    "llama, yarn of a shorter text": {"rope_scaling": _YARN | {"factor": 0.25}},
    "llama, yarn of one ramp": {"rope_scaling": _YARN | {"beta_fast": 1.5, "beta_slow": 1.4}},
    "llama, yarn of a long ramp": {"rope_scaling": _YARN | {"beta_fast": 4000.0, "beta_slow": 1e-9}},
    "mistral": {"model_type": "mistral"},
    "mistral, no window": {"model_type": "mistral", "sliding_window": None},
    "mistral, windows": {"model_type": "mistral", "sliding_window": 5},
    "mistral, windows of 1": {"model_type": "mistral", "sliding_window": 1},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, windows": {"model_type": "qwen2", **_SLIDING, "max_window_layers": 1},
    "qwen2, windows by layer": {
        "model_type": "qwen2", **_SLIDING, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3": {"model_type": "qwen3"},
    "qwen3, biases": {"model_type": "qwen3", "attention_bias": True},
    "qwen3, the family's heads": {"model_type": "qwen3", "head_dim": None, "num_attention_heads": 2},
    "mimo": {"model_type": "mimo", "tie_word_embeddings": True, "rope_theta": 640.0},
}  # fmt: skip


def config_of(changes: dict) -> dict:
    """A whole config.json; None leaves a key out."""
    kept = ("sliding_window", "num_key_value_heads")  # whose null is a value
    config = {"model_type": "llama"} | SIZES | changes
    return {name: value for name, value in config.items() if value is not None or name in kept}


def head_dim_of(config: dict) -> int:
    of_family = 128 if config["model_type"] == "qwen3" else config["hidden_size"] // config["num_attention_heads"]
    return config.get("head_dim", of_family)


def weights_of(config: dict, seed: int = 0) -> dict[str, Tensor]:
    """Random weights by their published names, at scales that make attention far from uniform and every bias felt."""
    family, width, size = config["model_type"], config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    rows, head_dim = heads * head_dim_of(config), head_dim_of(config)
    keys = (config.get("num_key_value_heads") or heads) * head_dim
    of_attention, of_mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    has_bias = dict.fromkeys("qkv", family in ("qwen2", "mimo") or of_attention) | {"o": of_attention}
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    for layer in (f"model.layers.{index}." for index in range(config["num_hidden_layers"])):
        shapes |= {f"{layer}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        for name, shape in {"q": (rows, width), "k": (keys, width), "v": (keys, width), "o": (width, rows)}.items():
            shapes[f"{layer}self_attn.{name}_proj.weight"] = shape
            shapes |= {f"{layer}self_attn.{name}_proj.bias": shape[:1]} if has_bias[name] else {}
        for name, shape in {"gate": (size, width), "up": (size, width), "down": (width, size)}.items():
            shapes[f"{layer}mlp.{name}_proj.weight"] = shape
            shapes |= {f"{layer}mlp.{name}_proj.bias": shape[:1]} if of_mlp else {}
        if family == "qwen3":
            shapes |= {f"{layer}self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    generator, made = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        is_norm, noise = "norm" in name, torch.randn(shape, generator=generator)
        made[name] = 1 + 0.2 * noise if is_norm else noise * (0.5 if name.endswith("bias") else 0.15)
    output = 0.15 * torch.randn(shapes["model.embed_tokens.weight"], generator=generator)
    made["lm_head.weight"] = made["model.embed_tokens.weight"] if config.get("tie_word_embeddings") else output
    return made


def frequencies_of(config: dict, head_dim: int) -> tuple[Tensor, float]:
    """The angle of each pair at position 1, and the factor of cos and sin."""
    section = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = section.get("rope_theta", config.get("rope_theta", 10000.0))
    plain = [theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
    kind, longest = section.get("rope_type", section.get("type", "default")), config["max_position_embeddings"]
    length = section.get(_LENGTH, longest)
    factor = section.get("factor", longest / length)
    if kind == "default":
        return torch.tensor(plain).double(), 1.0
    if kind == "linear":
        return torch.tensor([each / factor for each in plain]).double(), 1.0
    if kind == "llama3":
        low, high, found = section["low_freq_factor"], section["high_freq_factor"], []
        for each in plain:
            turns = length * each / (2 * math.pi)  # in the original length
            kept = min(max((turns - low) / (high - low), 0.0), 1.0)
            found.append(each * (kept + (1 - kept) / factor))
        return torch.tensor(found).double(), 1.0
    assert kind == "yarn"

    def pair_of(turns: float) -> float:
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(section.get("beta_fast", 32.0)), pair_of(section.get("beta_slow", 1.0))
    if section.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    last += 0.001 * (first == last)
    found = []
    for pair, each in enumerate(plain):
        stretched = min(max((pair - first) / (last - first), 0.0), 1.0)
        found.append(each * (1 - stretched) + each / factor * stretched)
    growth = lambda scale: 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0  # noqa: E731
    warmth = growth(1.0)
    if "mscale" in section and "mscale_all_dim" in section:
        warmth = growth(section["mscale"]) / growth(section["mscale_all_dim"])
    return torch.tensor(found).double(), section.get("attention_factor", warmth)


def windows_of(config: dict) -> list[int | None]:
    """The keys that a token sees in each layer, itself included; None: all."""
    family, num_layers, window = config["model_type"], config["num_hidden_layers"], config.get("sliding_window", 4096)
    if family == "mistral":
        return [window] * num_layers
    if family not in ("qwen2", "qwen3", "mimo") or not config.get("use_sliding_window", False):
        return [None] * num_layers
    first = config.get("max_window_layers", 28)
    kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
    return [window if kind == "sliding_attention" else None for kind in config.get("layer_types", kinds)]


def _norm(x: Tensor, weights: dict[str, Tensor], name: str, epsilon: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * weights[name]


def _turn(heads: Tensor, positions: Tensor, config: dict) -> Tensor:
    """Turns coordinates c and c + D / 2 of heads [T, heads, D] together."""
    half = heads.shape[-1] // 2
    frequencies, factor = frequencies_of(config, heads.shape[-1])
    angles = (positions[:, None] * frequencies)[:, None]
    turned = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return factor * torch.cat([turned.real, turned.imag], dim=-1)


def decoder_formula(
    config: dict, weights: dict[str, Tensor], tokens: Tensor, positions: Tensor | None = None,
    visible: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Logits [T, V] and the streams before each layer and after the last, of tokens [T], in float64.

    visible [T, T] bool: what each token sees of the others where no window hides it; None: those before it.
    """
    weights = {name: tensor.double() for name, tensor in weights.items()}
    positions = torch.arange(len(tokens)) if positions is None else positions
    epsilon, num_heads = config.get("rms_norm_eps", 1e-6), config["num_attention_heads"]
    head_dim = head_dim_of(config)
    distance = positions[:, None] - positions
    stream = weights["model.embed_tokens.weight"][tokens]
    streams = [stream]
    for layer, window in enumerate(windows_of(config)):
        prefix = f"model.layers.{layer}."

        def project(x: Tensor, name: str, prefix=prefix) -> Tensor:
            return x @ weights[f"{prefix}{name}.weight"].T + weights.get(f"{prefix}{name}.bias", 0.0)

        x = _norm(stream, weights, prefix + "input_layernorm.weight", epsilon)
        query, key, value = (project(x, f"self_attn.{name}_proj").unflatten(-1, (-1, head_dim)) for name in "qkv")
        if config["model_type"] == "qwen3":
            query = _norm(query, weights, prefix + "self_attn.q_norm.weight", epsilon)
            key = _norm(key, weights, prefix + "self_attn.k_norm.weight", epsilon)
        query, key = _turn(query, positions, config), _turn(key, positions, config)
        key, value = (each.repeat_interleave(num_heads // each.shape[1], 1) for each in (key, value))
        scores = torch.einsum("thd,shd->hts", query, key) / math.sqrt(head_dim)
        is_seen = distance >= 0 if visible is None else visible
        scores = scores.masked_fill(~(is_seen if window is None else is_seen & (distance < window)), -math.inf)
        attended = torch.einsum("hts,shd->thd", scores.softmax(-1), value).flatten(1)
        stream = stream + project(attended, "self_attn.o_proj")
        x = _norm(stream, weights, prefix + "post_attention_layernorm.weight", epsilon)
        stream = stream + project(F.silu(project(x, "mlp.gate_proj")) * project(x, "mlp.up_proj"), "mlp.down_proj")
        streams.append(stream)
    normed = _norm(stream, weights, "model.norm.weight", epsilon)
    return normed @ weights["lm_head.weight"].T, [*streams, normed]
