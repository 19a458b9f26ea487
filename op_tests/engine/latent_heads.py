"""Tiny random EAGLE-3 heads with latent attention: as TorchSpec writes them, and computed by the formulas of vLLM's
deepseek_eagle3.py and deepseek_v2.py, in float64 and with keys of all heads. Nothing is imported from the library, so
that a shared mistake cannot hide."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from op_tests.engine import heads
from op_tests.engine.heads import HIDDEN, STREAMS

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LAYERS = [layer - 1 for layer in STREAMS]  # whose outputs these streams are
QUERY, LATENT, STAYING, TURNING, VALUE = 20, 24, 14, 8, 10
EPS = 0.05  # so large that a norm with another one is seen
WIDTHS = {name: size for name, size in heads.WIDTHS.items() if name != "head_dim"} | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "draft_vocab_size": heads.DRAFT_VOCAB,
    "num_key_value_heads": heads.HEADS, "q_lora_rank": QUERY, "kv_lora_rank": LATENT, "qk_nope_head_dim": STAYING,
    "qk_rope_head_dim": TURNING, "v_head_dim": VALUE, "rms_norm_eps": EPS, "rope_theta": 300.0,
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "beta_fast": 8.0, "beta_slow": 1.0,
    "mscale": 0.7, "mscale_all_dim": 1.3,
}  # fmt: skip


def tensors(*, has_rank: bool = True, **options) -> dict[str, Tensor]:
    """Those of `heads.eagle3_tensors` with another attention, which reads (embedding, hidden) pairs.

    has_rank: queries are projected down and up.
    """
    of_query = heads.HEADS * (STAYING + TURNING)
    shapes = {
        "kv_a_proj_with_mqa": (LATENT + TURNING, 2 * HIDDEN), "kv_a_layernorm": (LATENT,),
        "kv_b_proj": (heads.HEADS * (STAYING + VALUE), LATENT), "o_proj": (HIDDEN, heads.HEADS * VALUE),
    }  # fmt: skip
    if has_rank:
        shapes |= {"q_a_proj": (QUERY, 2 * HIDDEN), "q_a_layernorm": (QUERY,), "q_b_proj": (of_query, QUERY)}
    else:
        shapes["q_proj"] = (of_query, 2 * HIDDEN)
    generator = torch.Generator().manual_seed(4)
    made = {name: each for name, each in heads.eagle3_tensors(**options).items() if ".self_attn." not in name}
    for name, shape in shapes.items():
        weight = torch.randn(shape, generator=generator) * 2 / shape[-1] ** 0.5
        made[f"midlayer.self_attn.{name}.weight"] = weight if len(shape) == 2 else weight.abs() + 0.5
    return made


def write(folder: Path, stored: dict[str, Tensor] | None = None, **config) -> Path:
    """The layers whose output is read, and options of ModelOpt's, which TorchSpec has as well."""
    of_eagle = {
        LAYER_IDS: LAYERS, "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True, "use_mtp_layernorm": False,
    }  # fmt: skip
    stored = tensors() if stored is None else stored
    return heads.save(folder, WIDTHS | {"eagle_config": of_eagle} | config, stored)


def for_vllm(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names that TorchSpec exports for vLLM."""
    return {name.replace("midlayer.", "layers.0."): each for name, each in stored.items()}


def formula(
    stored: dict[str, Tensor], embedding: Tensor, hidden: Tensor, first_position: int, config: dict, *,
    from_target: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(logits, what is fed back) of the rows [T, *] of one sequence."""
    weights = {name: each.double() for name, each in stored.items() if each.is_floating_point()}
    embedding, hidden = embedding.double(), hidden.double()

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weights[name + ".weight"]

    def project(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"midlayer.{name}.weight"].T

    def attention(x: Tensor) -> Tensor:
        if config.get("q_lora_rank", QUERY) is None:
            query = project(x, "self_attn.q_proj")
        else:
            narrow = norm(project(x, "self_attn.q_a_proj"), "midlayer.self_attn.q_a_layernorm")
            query = project(narrow, "self_attn.q_b_proj")
        staying, turning = query.unflatten(-1, (heads.HEADS, -1)).split([STAYING, TURNING], -1)
        latent, rope_key = project(x, "self_attn.kv_a_proj_with_mqa").split([LATENT, TURNING], -1)
        both = project(norm(latent, "midlayer.self_attn.kv_a_layernorm"), "self_attn.kv_b_proj")
        key, value = both.unflatten(-1, (heads.HEADS, -1)).split([STAYING, VALUE], -1)
        turns, growth = _turns(len(x), first_position, config)
        query = torch.cat((staying, _turned(turning, turns)), -1)
        key = torch.cat((key, _turned(rope_key[:, None], turns).expand(-1, heads.HEADS, -1)), -1)
        scores = torch.einsum("thd,shd->hts", query, key) * growth**2 / (STAYING + TURNING) ** 0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1) > 0, float("-inf"))
        return project(torch.einsum("hts,shd->thd", scores.softmax(-1), value).flatten(1), "self_attn.o_proj")

    if from_target:
        if config.get("fc_norm"):
            streams = hidden.unflatten(-1, (len(STREAMS), HIDDEN)).unbind(1)
            hidden = torch.cat([norm(stream, f"fc_norm.{place}") for place, stream in enumerate(streams)], -1)
        hidden = hidden @ weights["fc.weight"].T
    normed = norm(hidden, "midlayer.hidden_norm")
    pair = torch.cat((norm(embedding, "midlayer.input_layernorm"), normed), -1)
    out = (normed if config.get("norm_before_residual") else hidden) + attention(pair)
    x = norm(out, "midlayer.post_attention_layernorm")
    out = out + project(F.silu(project(x, "mlp.gate_proj")) * project(x, "mlp.up_proj"), "mlp.down_proj")
    last = norm(out, "norm")
    return last @ weights["lm_head.weight"].T, last if config.get("norm_output") else out


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Turns neighbours of x [T, heads, R] by complex numbers [T, R / 2]."""
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns[:, None]).flatten(-2)


def _turns(count: int, first_position: int, config: dict) -> tuple[Tensor, float]:
    """The complex numbers of consecutive positions, and by what yarn makes scores grow, once for each factor."""
    theta, yarn = config.get("rope_theta", WIDTHS["rope_theta"]), config.get("rope_scaling")
    frequencies = theta ** -(torch.arange(0, TURNING, 2, dtype=torch.float64) / TURNING)
    size, growth = 1.0, 1.0
    if yarn is not None:

        def place(turns: float) -> float:
            length = yarn["original_max_position_embeddings"]
            return TURNING * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(place(yarn["beta_fast"])), 0), min(math.ceil(place(yarn["beta_slow"])), TURNING - 1)
        ramp = ((torch.arange(TURNING // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies / yarn["factor"] * ramp + frequencies * (1 - ramp)
        growth = 0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1
        size = (0.1 * yarn["mscale"] * math.log(yarn["factor"]) + 1) / growth
    angles = (first_position + torch.arange(count, dtype=torch.float64))[:, None] * frequencies
    return torch.polar(torch.full_like(angles, size), angles), growth
