"""Tiny random models with ERNIE's next-token module, in its published layout."""

from pathlib import Path

import torch
from torch import Tensor, nn

from op_tests.engine.families import ERNIE_EXPERTS, write_target


def write_with_module(folder: Path, **changes) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """Writes a target with a module beside it; returns transformers' model, the module's layer in its class, and the
    module's other tensors."""
    from safetensors.torch import load_file, save_file
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeDecoderLayer

    theirs = write_target(
        "Ernie4_5_Moe", ERNIE_EXPERTS | {"written": {"num_nextn_predict_layers": 1}} | changes, folder
    )
    layer, width = Ernie4_5_MoeDecoderLayer(theirs.config, 0).eval(), theirs.config.hidden_size
    others = {
        "emb_norm": torch.rand(width) + 0.5, "hidden_norm": torch.rand(width) + 0.5,
        "linear_proj": torch.randn(width, 2 * width) / width**0.5,
    }  # fmt: skip
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.mtp_{name}.0.weight": tensor for name, tensor in others.items()}
    tensors |= {f"model.mtp_block.0.{name}": tensor for name, tensor in layer.state_dict().items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return theirs, layer, others
