"""Tiny random models with next-token modules in DeepSeek's layout, which GLM's have too: as transformers makes and
saves the models, and would read the modules."""

from pathlib import Path

import torch
from torch import Tensor

from op_tests.engine.families import GLM_EXPERTS, GROUPS, LATENT, LITE, write_target


def write_with_modules(folder: Path, num_modules: int, family="DeepseekV3", *, wrong_copies=False, **changes):
    """Writes a target with modules beside it; returns transformers' model and its modules.
    wrong_copies: those of the embedding and the output, which modules come with, are others."""
    from safetensors.torch import load_file, save_file
    from transformers.modeling_layers import MtpModel

    layers = {"Glm4Moe": GLM_EXPERTS, "Glm4MoeLite": LITE}.get(family, LATENT | GROUPS)
    changes = layers | {"num_nextn_predict_layers": num_modules} | changes
    if family == "Glm4MoeLite":  # whose config does not tell transformers that there are modules
        changes |= {"num_mtp_layers": num_modules, "mtp_mlp_layer_types": ["sparse"] * num_modules}
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
    # of a target without experts; transformers' modules have them
    if getattr(model.config, "first_k_dense_replace", 0) > model.config.num_hidden_layers:
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
