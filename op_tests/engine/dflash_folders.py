"""Folders of DFlash drafts with random weights, and pairs that they make with a `random_llama`."""

import json

import torch
from safetensors.torch import save_file

from eagle_kernels.engine.models.dflash import load_dflash
from op_tests.engine import heads
from op_tests.engine.toys import random_llama

MASK, BLOCK, LAYERS, IDS = 59, 5, 2, [0, 3]
HIDDEN = heads.HIDDEN
CONFIG = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": BLOCK, "num_target_layers": 4,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": IDS}, "num_hidden_layers": LAYERS,
    "vocab_size": heads.TARGET_VOCAB, "hidden_size": HIDDEN, "intermediate_size": 40, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
    "rope_theta": 10000.0, "attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def tensors_of(seed=0, size=HIDDEN, inner=40):
    """By the published names; q and k have norms."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"fc.weight": (size, len(IDS) * size), "hidden_norm.weight": (size,), "norm.weight": (size,)}
    for layer in range(LAYERS):
        name = f"layers.{layer}."
        shapes |= {name + "input_layernorm.weight": (size,), name + "post_attention_layernorm.weight": (size,)}
        shapes |= {name + f"self_attn.{part}_norm.weight": (16,) for part in "qk"}
        shapes |= {name + "self_attn.q_proj.weight": (64, size), name + "self_attn.o_proj.weight": (size, 64)}
        shapes |= {name + f"self_attn.{part}_proj.weight": (32, size) for part in "kv"}
        shapes |= {name + f"mlp.{part}_proj.weight": (inner, size) for part in ("gate", "up")}
        shapes[name + "mlp.down_proj.weight"] = (size, inner)
    return {
        name: torch.rand(shape, generator=generator) + 0.5 if len(shape) == 1
        else torch.randn(shape, generator=generator) * (1.5 / shape[-1] ** 0.5)
        for name, shape in shapes.items()
    }  # fmt: skip


def write(folder, tensors=None, **config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors_of() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def pair(folder, device="cpu"):
    """(target, draft)."""
    target = random_llama(std=0.4, num_layers=4, device=device)
    return target, load_dflash(write(folder), target)
