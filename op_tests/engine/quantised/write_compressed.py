"""Writes the checkpoints of compressed-tensors that the tests read, with the library itself, on a CPU:

    python op_tests/engine/quantised/write_compressed.py

with torch, transformers 5.24 and compressed-tensors 0.20.1. Each folder has the logits for `IDS` in
expected.safetensors, of the weights as the library itself makes them out of its file.
"""

from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

IDS = torch.tensor([[7, 3, 60, 11, 0, 25, 9, 44]])
_SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
WEIGHTS = {
    "w4a16": ("pack-quantized", _INT4),
    "w4a16_zeros": ("pack-quantized", _INT4 | {"symmetric": False}),
    "w8a16": ("pack-quantized", _INT4 | {"num_bits": 8, "strategy": "channel", "group_size": None}),
    "int8": ("int-quantized", _INT4 | {"num_bits": 8, "strategy": "channel", "group_size": None}),
    "fp8_tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}),
    "fp8_channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}),
}


def _range(weight: torch.Tensor, args) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the least and the most of what shares a scale."""
    if args.strategy == "tensor":
        return weight.min()[None], weight.max()[None]
    size = args.group_size if args.strategy == "group" else weight.shape[1]
    groups = weight.unflatten(1, (-1, size))
    return groups.amin(-1), groups.amax(-1)


@torch.no_grad()
def write(folder: Path, form: str, weights: dict) -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**_SIZES)).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.15)
    group = {"targets": ["Linear"], "weights": weights, "format": form}
    ignored = ["lm_head", "re:.*layers.1.self_attn.k_proj"]
    settings = {"config_groups": {"group_0": group}, "format": form, "ignore": ignored}
    config = QuantizationConfig(**settings, quantization_status="frozen")
    apply_quantization_config(model, config)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None and scheme.weights is not None:
            scale, zero = calculate_qparams(*_range(module.weight, scheme.weights), scheme.weights)
            module.weight_scale.copy_(scale.reshape(module.weight_scale.shape))
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.copy_(zero.reshape(module.weight_zero_point.shape))
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)  # which transformers cannot do with zero points, in version 5.24
    save_file({"logits": model(IDS).logits.float().contiguous()}, folder / "expected.safetensors")
    (folder / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    for name, (form, weights) in WEIGHTS.items():
        write(Path(__file__).parent / name, form, weights)
