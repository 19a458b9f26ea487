"""Tiny random EAGLE heads and next-token modules: written in each published format, and computed by formulas.

Tensors carry the official names here; each writer says how its format differs. Nothing is imported from the library, so
that a shared mistake cannot hide.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

MODULE_PREFIX = "model.mtp_layers."
HIDDEN, TARGET_VOCAB, DRAFT_VOCAB = 32, 61, 23
IDS = torch.tensor([[7, 3, 60, 11, 0, 25], [9, 9, 1, 44, 2, 18]])
HEADS, KV_HEADS, HEAD_DIM, EPS = 4, 2, 16, 1e-5  # deliberately HEADS * HEAD_DIM != HIDDEN
WIDTHS = {
    "model_type": "llama", "hidden_act": "silu", "vocab_size": TARGET_VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "rms_norm_eps": EPS, "max_position_embeddings": 96, "tie_word_embeddings": False,
    "torch_dtype": "float32",
}  # fmt: skip
STREAMS = (2, 4, 5)  # the official default of a target of 8 layers, as hidden_states indices
TARGET_IDS = torch.arange(4, 4 + 2 * DRAFT_VOCAB, 2)


def _weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(shape, generator=generator) + 0.5
        if len(shape) == 1 and not name.endswith("bias")
        else torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }


def _layer_shapes(prefix: str, input_size: int) -> dict[str, tuple[int, ...]]:
    width = WIDTHS["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, input_size), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, input_size),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, input_size), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (width, HIDDEN), "mlp.up_proj": (width, HIDDEN), "mlp.down_proj": (HIDDEN, width),
        "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def eagle1_tensors(
    *, bias: bool = True, qkv_bias: bool = False, embedding: bool = True, seed: int = 0
) -> dict[str, Tensor]:
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), **_layer_shapes("layers.0", HIDDEN)}
    if bias:
        shapes["fc.bias"] = (HIDDEN,)
    for part in "qkv" if qkv_bias else "":
        name = f"layers.0.self_attn.{part}_proj."
        shapes[name + "bias"] = shapes[name + "weight"][:1]
    if embedding:
        shapes["embed_tokens.weight"] = (TARGET_VOCAB, HIDDEN)
    return _weights(shapes, seed)


def eagle3_tensors(
    *, fc_norm: bool = False, norm_before_fc: bool = False, embedding: bool = False, seed: int = 0, **_
) -> dict[str, Tensor]:
    streams = len(STREAMS) * HIDDEN
    shapes = {
        "fc.weight": (HIDDEN, streams), "norm.weight": (HIDDEN,), "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        "midlayer.input_layernorm.weight": (HIDDEN,), "midlayer.hidden_norm.weight": (HIDDEN,),
        **_layer_shapes("midlayer", 2 * HIDDEN),
    }  # fmt: skip
    if fc_norm:
        shapes |= {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(len(STREAMS))}
    if norm_before_fc:
        shapes["input_norm.weight"] = (streams,)
    if embedding:
        shapes["embed_tokens.weight"] = (TARGET_VOCAB, HIDDEN)
    is_drafted = torch.zeros(TARGET_VOCAB, dtype=torch.bool)
    is_drafted[TARGET_IDS] = True
    return _weights(shapes, seed) | {"d2t": TARGET_IDS - torch.arange(DRAFT_VOCAB), "t2d": is_drafted}


def peagle_tensors(num_layers: int = 2, mask_shape: tuple[int, ...] = (1, 3 * HIDDEN), **options) -> dict[str, Tensor]:
    """EAGLE-3's, more layers with the names that vLLM's class gives them, and the feature of masks."""
    shapes: dict[str, tuple[int, ...]] = {}
    for prefix in (f"layers.{layer}" for layer in range(1, num_layers)):
        shapes |= _layer_shapes(prefix, HIDDEN) | {f"{prefix}.input_layernorm.weight": (HIDDEN,)}
        shapes[f"{prefix}.hidden_norm.weight"] = (HIDDEN,)
    mask = torch.randn(mask_shape, generator=torch.Generator().manual_seed(7))
    return eagle3_tensors(**options) | _weights(shapes, 3) | {"mask_hidden": mask}


def module_tensors(num_modules: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Next-token modules, with MiMo's names."""
    shapes = {}
    for prefix in (f"model.mtp_layers.{module}" for module in range(num_modules)):
        shapes |= _layer_shapes(prefix, HIDDEN) | {f"{prefix}.input_proj.weight": (HIDDEN, 2 * HIDDEN)}
        norms = ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm")
        shapes |= {f"{prefix}.{name}.weight": (HIDDEN,) for name in norms}
        shapes |= {
            f"{prefix}.self_attn.{part}_proj.bias": shapes[f"{prefix}.self_attn.{part}_proj.weight"][:1]
            for part in "qkv"
        }
    return _weights(shapes, seed)


def _is_eagle3(tensors: dict[str, Tensor]) -> bool:
    return "midlayer.hidden_norm.weight" in tensors


def _renamed(tensors: dict[str, Tensor], *pairs: tuple[str, str]) -> dict[str, Tensor]:
    result = {}
    for name, tensor in tensors.items():
        for ours, theirs in pairs:
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
                break
        result[name] = tensor
    return result


def save(folder: Path, config: dict, tensors: dict[str, Tensor], *, as_bin: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if as_bin:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        from safetensors.torch import save_file

        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_folder(module: torch.nn.Module, config: dict, folder: Path) -> Path:
    """Writes the folder of a module, in bf16 as models are published."""
    tensors = {
        name: each.bfloat16() if each.is_floating_point() else each for name, each in module.state_dict().items()
    }
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    return save(folder, config, tensors)


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Other tensors in the same folder; None takes one away."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


def write_official(folder: Path, tensors: dict[str, Tensor], as_bin: bool = False, **options) -> Path:
    """No layer ids; EAGLE-1 says its bias, EAGLE-3 its draft vocabulary."""
    own = {"draft_vocab_size": DRAFT_VOCAB} if _is_eagle3(tensors) else {"bias": "fc.bias" in tensors}
    return save(folder, {"architectures": ["LlamaForCausalLM"], **WIDTHS, **own, **options}, tensors, as_bin=as_bin)


def write_specforge(folder: Path, tensors: dict[str, Tensor], **options) -> Path:
    """Layers whose output is read, one below the hidden_states index; EAGLE-1 with SGLang's prefix."""
    if not _is_eagle3(tensors):
        config = {"architectures": ["LlamaForCausalLMEagle"], **WIDTHS, **options}
        return save(folder, config, _renamed(tensors, ("", "model.")))
    eagle_config = {
        "eagle_aux_hidden_state_layer_ids": [index - 1 for index in STREAMS],
        "use_aux_hidden_state": True,
        "norm_before_fc": options.pop("norm_before_fc", False),
    }
    config = {"architectures": ["LlamaForCausalLMEagle3"], **WIDTHS, "draft_vocab_size": DRAFT_VOCAB}
    config |= {"eagle_config": eagle_config, "use_aux_norm": options.pop("fc_norm", None), **options}
    norms = [(f"fc_norm.{index}.", f"aux_norm_{name}.") for index, name in enumerate(("low", "mid", "high"))]
    return save(folder, config, _renamed(tensors, *norms))


def write_speculators(folder: Path, tensors: dict[str, Tensor], **options) -> Path:
    """The layer's config in an object of its own, hidden_states indices."""
    kind = "eagle3" if _is_eagle3(tensors) else "eagle"
    config = {
        "model_type": "speculator_model", "speculators_model_type": kind, "speculators_version": "0.3.0",
        "transformer_layer_config": WIDTHS,
        "speculators_config": {"algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": []},
    }  # fmt: skip
    if kind == "eagle":
        config |= {"architectures": ["EagleSpeculator"], "fusion_bias": "fc.bias" in tensors, "layernorms": False}
        return save(folder, config | options, _renamed(tensors, ("fc.", "fusion_fc."), ("layers.0.", "transformer.")))
    config |= {
        "architectures": ["Eagle3Speculator"], "draft_vocab_size": DRAFT_VOCAB, "target_hidden_size": None,
        "norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": list(STREAMS),
    }  # fmt: skip
    return save(folder, config | options, _renamed(tensors, ("midlayer.", "layers.0.")))


def write_modelopt(folder: Path, tensors: dict[str, Tensor], **options) -> Path:
    """Layers whose output is read; the trainer's own tensor names; no t2d."""
    is_eagle3 = _is_eagle3(tensors)
    eagle_config = {
        "eagle_aux_hidden_state_layer_ids": [index - 1 for index in STREAMS] if is_eagle3 else None,
        "use_aux_hidden_state": is_eagle3, "use_input_layernorm_in_first_layer": is_eagle3,
        "use_last_layernorm": is_eagle3, "use_mtp_layernorm": False, "next_layer_regular": True,
        "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None, **options,
    }  # fmt: skip
    architecture = "LlamaForCausalLMEagle3" if is_eagle3 else "LlamaForCausalLMEagle"
    config = {"architectures": [architecture], **WIDTHS, "eagle_config": eagle_config}
    if is_eagle3:
        config["draft_vocab_size"] = DRAFT_VOCAB
    names = [
        ("midlayer.hidden_norm.", "hidden_norm."), ("midlayer.input_layernorm.", "input_embeds_norm."),
        ("midlayer.", "layers.0."), ("lm_head.", "eagle_lm_head."),
    ]  # fmt: skip
    return save(folder, config, {name: t for name, t in _renamed(tensors, *names).items() if name != "t2d"})


def write_modules(folder: Path, tensors: dict[str, Tensor], num_modules: int, **options) -> Path:
    """Modules and the target in one folder, whose config.json is the target's."""
    config = {"architectures": ["MiMoForCausalLM"], **WIDTHS, "model_type": "mimo", "num_hidden_layers": 2}
    return save(folder, config | {"num_nextn_predict_layers": num_modules} | options, tensors)


WRITERS = {
    "official (SafeAILab)": write_official,
    "SpecForge/SGLang": write_specforge,
    "vLLM speculators": write_speculators,
    "NVIDIA ModelOpt": write_modelopt,
}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _attention(x: Tensor, weights: dict[str, Tensor], prefix: str, first_position: int, theta: float) -> Tensor:
    """Causal, grouped, of one sequence [T, *]; complex RoPE, so that nothing is shared with the library's."""

    def turn(heads: Tensor) -> Tensor:
        half = HEAD_DIM // 2
        positions = first_position + torch.arange(len(x), dtype=torch.float64)
        angles = positions[:, None, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = torch.complex(heads[..., :half].double(), heads[..., half:].double())
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), dim=-1).float()

    def project(name: str) -> Tensor:
        bias = weights.get(f"{prefix}.self_attn.{name}_proj.bias", 0.0)
        rows = (x @ weights[f"{prefix}.self_attn.{name}_proj.weight"].T + bias).unflatten(-1, (-1, HEAD_DIM))
        scale = weights.get(f"{prefix}.self_attn.{name}_norm.weight")
        return rows if scale is None else norm(rows, scale)

    group = HEADS // KV_HEADS
    key, value = turn(project("k")).repeat_interleave(group, 1), project("v").repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", turn(project("q")), key) / HEAD_DIM**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1) > 0, float("-inf"))
    attended = torch.einsum("hts,shd->thd", scores.softmax(-1), value).flatten(1)
    return attended @ weights[f"{prefix}.self_attn.o_proj.weight"].T


def _mlp(x: Tensor, weights: dict[str, Tensor], prefix: str) -> Tensor:
    gate, up, down = (weights[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def eagle1_formula(
    weights: dict[str, Tensor], embedding: Tensor, feature: Tensor, output: Tensor, first_position: int
) -> tuple[Tensor, Tensor]:
    """(logits, out) of rows [T, H]; `output` is the target's lm_head [V, H]."""
    x = torch.cat((embedding, feature), dim=-1) @ weights["fc.weight"].T + weights.get("fc.bias", 0.0)
    u = x + _attention(x, weights, "layers.0", first_position, 10000.0)
    out = u + _mlp(norm(u, weights["layers.0.post_attention_layernorm.weight"]), weights, "layers.0")
    return out @ output.T, out


def eagle3_formula(
    weights: dict[str, Tensor],
    embedding: Tensor,
    hidden: Tensor,
    first_position: int,
    *,
    from_target: bool,
    theta: float = 10000.0,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    norm_before_residual: bool = False,
    norm_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """(logits, what is fed back) of rows; hidden [T, 3H] from the target, [T, H] fed back."""
    if from_target:
        if fc_norm:
            streams = hidden.unflatten(-1, (len(STREAMS), HIDDEN)).unbind(1)
            hidden = torch.cat([norm(stream, weights[f"fc_norm.{i}.weight"]) for i, stream in enumerate(streams)], -1)
        if norm_before_fc:
            hidden = norm(hidden, weights["input_norm.weight"])
        hidden = hidden @ weights["fc.weight"].T
    normed = norm(hidden, weights["midlayer.hidden_norm.weight"])
    z = torch.cat((norm(embedding, weights["midlayer.input_layernorm.weight"]), normed), dim=-1)
    u = (normed if norm_before_residual else hidden) + _attention(z, weights, "midlayer", first_position, theta)
    out = u + _mlp(norm(u, weights["midlayer.post_attention_layernorm.weight"]), weights, "midlayer")
    last = norm(out, weights["norm.weight"])
    return last @ weights["lm_head.weight"].T, last if norm_output else out


def peagle_formula(weights: dict[str, Tensor], embedding: Tensor, features: Tensor, first_position: int = 0) -> Tensor:
    """Logits of rows; features [T, 3H], those of masks `mask_hidden`."""
    alone = weights | {"norm.weight": torch.ones(HIDDEN), "lm_head.weight": torch.eye(HIDDEN)}
    _, out = eagle3_formula(alone, embedding, features, first_position, from_target=True)
    layer = 1
    while f"layers.{layer}.input_layernorm.weight" in weights:
        prefix, layer = f"layers.{layer}", layer + 1
        x = norm(out, weights[f"{prefix}.input_layernorm.weight"])
        u = out + _attention(x, weights, prefix, first_position, 10000.0)
        out = u + _mlp(norm(u, weights[f"{prefix}.post_attention_layernorm.weight"]), weights, prefix)
    return norm(out, weights["norm.weight"]) @ weights["lm_head.weight"].T


def module_formula(
    weights: dict[str, Tensor], module: int, embedding: Tensor, hidden: Tensor, output: Tensor, first_position: int = 0
) -> tuple[Tensor, Tensor]:
    """(logits, what the next module reads) of rows [T, H]; `output` is the target's lm_head [V, H]."""
    prefix = f"model.mtp_layers.{module}"

    def scaled(name: str, x: Tensor) -> Tensor:
        return norm(x, weights[f"{prefix}.{name}.weight"])

    pair = torch.cat((scaled("hidden_layernorm", hidden), scaled("token_layernorm", embedding)), dim=-1)
    x = pair @ weights[f"{prefix}.input_proj.weight"].T
    u = x + _attention(scaled("input_layernorm", x), weights, prefix, first_position, 10000.0)
    out = scaled("final_layernorm", u + _mlp(scaled("post_attention_layernorm", u), weights, prefix))
    return out @ output.T, out
