"""Folders of Medusa, Hydra and P-EAGLE heads with random weights, as published, for targets of
`heads.WIDTHS`."""

import json

import torch
from safetensors.torch import save_file

from op_tests.engine import heads
from op_tests.engine.heads import HIDDEN, TARGET_VOCAB
from op_tests.engine.toys import random_llama

NUM_HEADS = 4
HEAD_MASK = 44  # one of the tokens that the P-EAGLE head drafts


def medusa_tensors(num_heads=NUM_HEADS, num_layers=1, *, rows=TARGET_VOCAB, bias=True, seed=0):
    """By the official names: head, place in its nn.Sequential, parameter."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
            if bias:
                tensors[f"{head}.{layer}.linear.bias"] = torch.randn(HIDDEN, generator=generator) / 4
        tensors[f"{head}.{num_layers}.weight"] = torch.randn(rows, HIDDEN, generator=generator)
    return tensors


def write_medusa(folder, tensors, pickled=False, **config):
    base = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1, "base_model_name_or_path": "a/b", "version": "2"}
    return _write_heads(folder, "medusa_lm_head", tensors, pickled, base | config)


def hydra_tensors(architecture="mlp", num_layers=1, *, num_heads=NUM_HEADS, seed=0):
    """By the official names. "prefix-mlp" counts the dropouts before each block and before the outputs."""
    generator, tensors = torch.Generator().manual_seed(seed), {}

    def linear(name, rows, columns):
        tensors[name + ".weight"] = torch.randn(rows, columns, generator=generator) / columns**0.5
        tensors[name + ".bias"] = torch.randn(rows, generator=generator) / 4

    has_prefix = architecture == "prefix-mlp"
    for head in range(num_heads):
        for layer in range(num_layers):
            name = f"hydra_mlp.{head}.{1 + 2 * layer if has_prefix else layer}"
            linear(name + ".linear", HIDDEN, HIDDEN * (1 if layer else head + 2))
            if layer == 0:
                linear(name + ".res_connection", HIDDEN, HIDDEN * (head + 2))
        linear(f"hydra_lm_head.{head}" + (".1" if has_prefix else ""), TARGET_VOCAB, HIDDEN)
    if has_prefix:
        layer = random_llama(num_layers=1, seed=9).state_dict()
        for name, tensor in layer.items():
            if name.startswith("model."):  # with the embedding that the class has and never reads
                if "norm" in name:
                    tensor = torch.rand(tensor.shape, generator=generator) + 0.5
                tensors["prefix_embeding_layer." + name.removeprefix("model.")] = tensor.contiguous()
    return tensors


def write_hydra(folder, tensors, pickled=True, **config):
    base = {
        "hydra_num_heads": NUM_HEADS, "hydra_num_layers": 1, "hydra_head_arch": "mlp", "grounded_heads": True,
        "hidden_state_offset": 0, "base_model_name_or_path": "a/b",
    }  # fmt: skip
    return _write_heads(folder, "hydra_lm_head", tensors, pickled, base | config)


def _write_heads(folder, name, tensors, pickled, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / f"{name}.pt")
    else:
        save_file(tensors, folder / f"{name}.safetensors")
    return folder


def write_peagle(folder, tensors=None, **config):
    """As vLLM's users publish it; a speculators folder differs in the names of the settings."""
    tensors = heads.peagle_tensors() if tensors is None else tensors
    num_layers = 1 + sum(name.endswith("input_layernorm.weight") and name.startswith("layers.") for name in tensors)
    named = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": num_layers, "ptd_token_id": HEAD_MASK}
    return heads.write_official(folder, tensors, **named | config)
