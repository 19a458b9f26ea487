"""Writing of model folders in the Hugging Face layout: `config.json` next to `model.safetensors`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle_kernels.engine.models.checkpoint import safetensors


def save_folder(module: nn.Module, config: dict[str, Any], folder: str | Path) -> None:
    """Writes `config` and the module's tensors, floating-point ones as bf16, as our loaders and Hugging Face's read
    them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = module.state_dict()
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    _save_tensors(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", config)


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file under another name and renames it, so that an interrupted write leaves the old file whole."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes one safetensors file; floating-point tensors are rounded to bf16."""
    stored = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in tensors.items()
    }
    # `save_file` would make the file readable by its owner alone.
    path.write_bytes(safetensors().torch.save(stored, metadata={"format": "pt"}))
