"""Tiny random models of DeepSeek-V2 and V3, with and without next-token modules, as transformers makes and saves them.

    python -m op_tests.engine.deepseek FOLDER --modules 1
    python -m eagle_kernels generate --target FOLDER --draft FOLDER --compare "a prompt"

writes one whose tokens are bytes, and compares its text with and without drafts of its own module.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from op_tests.engine.families import GROUPS, LATENT, write_target

# a vocabulary of bytes, and sizes that tiles and graphs of GPUs take
SERVED = {
    "vocab_size": 257, "hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 64,
    "num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 32, "max_position_embeddings": 2048, "bos_token_id": 0,
}  # fmt: skip


def write_with_modules(folder: Path, num_modules: int, family="DeepseekV3", *, wrong_copies=False, **changes):
    """Writes a target with modules beside it in DeepSeek's layout; returns transformers' model and its modules.
    wrong_copies: those of the embedding and the output, which modules come with, are others."""
    from safetensors.torch import load_file, save_file
    from transformers.modeling_layers import MtpModel

    changes = LATENT | GROUPS | {"num_nextn_predict_layers": num_modules} | changes
    model = write_target(family, changes, folder)
    modules = MtpModel(model, num_modules).eval()
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for name, tensor in modules.layers.state_dict().items():
        with torch.no_grad():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.15)
            if "norm" in name:
                tensor.add_(1.0)
        tensors |= _as_published(name, tensor, model.config.num_hidden_layers)
    if model.config.first_k_dense_replace > model.config.num_hidden_layers:  # transformers' modules have experts
        tensors = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name} | _dense(model.config)
    copies = {"embed_tokens": model.get_input_embeddings(), "shared_head.head": model.get_output_embeddings()}
    for module in range(num_modules):
        for name, of in copies.items():
            copy = torch.ones_like(of.weight) if wrong_copies else of.weight.detach().clone()
            tensors[f"model.layers.{model.config.num_hidden_layers + module}.{name}.weight"] = copy
    path = Path(folder) / "model.safetensors"
    save_file({name: each.contiguous() for name, each in (load_file(path) | tensors).items()}, path, {"format": "pt"})
    return model, modules


def _dense(config) -> dict[str, Tensor]:
    """The feed-forwards of modules without experts."""
    sizes = config.hidden_size, config.intermediate_size
    return {
        f"model.layers.{config.num_hidden_layers + module}.mlp.{name}_proj.weight": torch.randn(shape) * 0.15
        for module in range(config.num_nextn_predict_layers)
        for name, shape in {"gate": sizes[::-1], "up": sizes[::-1], "down": sizes}.items()
    }


def _as_published(name: str, tensor: Tensor, num_layers: int) -> dict[str, Tensor]:
    """The tensors that a checkpoint has for one of transformers' modules."""
    module, _, part = name.partition(".")
    start = f"model.layers.{num_layers + int(module)}."
    part = part.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
    if ".experts." not in part:
        return {start + part: tensor}
    around, _, kind = part.rpartition(".")
    halves = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    return {
        f"{start}{around}.{expert}.{half}.weight": piece
        for expert, weight in enumerate(tensor)
        for half, piece in zip(halves, weight.chunk(len(halves)))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a tiny random DeepSeek.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", default="DeepseekV3", choices=["DeepseekV2", "DeepseekV3"])
    parser.add_argument("--modules", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.modules:
        write_with_modules(arguments.folder, arguments.modules, arguments.family, **SERVED)
    else:
        write_target(arguments.family, LATENT | GROUPS | SERVED, arguments.folder)
    written = {"tokenizer_class": "ByteTokenizer", "eos_token": "<|endoftext|>"}
    (arguments.folder / "tokenizer_config.json").write_text(json.dumps(written))


if __name__ == "__main__":
    main()
