"""Loading of targets from model folders in the Hugging Face layout: `config.json` next to the tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from ...runtime.placement import read_placement
from ...runtime.values import first_line, is_integer
from .checkpoint import (
    Checkpoint,
    check_layers,
    check_memory,
    check_most_layers,
    check_sizes,
    fill,
    naming,
    read_config,
    read_json,
    refuse_names,
    refuse_not_finite,
)
from .decoder import Decoder
from .decoder_config import FAMILIES, DecoderConfig, read_model_type
from .draft_loading import load_draft
from .head_formats import MODULE_PREFIX
from .protocol import ModelError, TargetModel
from .transformers_target import TransformersTarget

__all__ = ["demo_pair", "load_draft", "load_target", "read_eos_token_ids", "read_json"]

DEMO_PAIR_FOLDER = Path(__file__).resolve().parents[2] / "assets" / "demo_pair"


def load_target(
    folder: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    check_weights: bool = True,
) -> TargetModel:
    """Loads a decoder of one of `decoder_config.FAMILIES`, or another causal language model through transformers
    (`transformers_target.py`); frozen, in eval mode, with its weights converted to `dtype`.

    check_weights  refuses NaN and infinite weights by name, with one pass over them on the device

    On the device `meta` a decoder has names and sizes, and its weights are not read. Models of transformers are loaded
    onto the CPU instead.
    """
    folder, (device, dtype) = Path(folder), read_placement("load_target", device, dtype, "meta")
    with naming(folder):
        content = read_config(folder)
        if read_model_type(content) not in FAMILIES:
            device = torch.device("cpu") if device.type == "meta" else device
            return _load_through_transformers(folder, content, device, dtype, check_weights)
        checkpoint = Checkpoint(folder)
        for name in [name for name in checkpoint.tensors if name.startswith(MODULE_PREFIX)]:
            del checkpoint.tensors[name]  # they are a draft, see `load_draft`
        if "fc.weight" in checkpoint.tensors and "model.embed_tokens.weight" not in checkpoint.tensors:
            raise ModelError("holds fc.weight and no model.embed_tokens.weight: an EAGLE head, a draft and no target")
        check_layers(content, "num_hidden_layers", checkpoint.tensors, "model.layers.")
        config = DecoderConfig.from_dict(content)
        check_sizes(config, config.stored_sizes, checkpoint.tensors)
        with torch.device("meta"):
            target = Decoder(config)
        if config.tie_word_embeddings:
            # allocates it once, and reads it once if the checkpoint holds it twice
            target.lm_head.weight = None
            checkpoint.tensors.pop("lm_head.weight", None)
        fill(target, checkpoint, device, dtype, check_weights)
        target.tie_weights()
        return target


def _load_through_transformers(
    folder: Path, config: dict[str, Any], device: torch.device, dtype: torch.dtype, check_weights: bool
) -> TransformersTarget:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ModelError(
            f"config.json: model_type is none of {', '.join(FAMILIES)}; other models need transformers: "
            "pip install 'eagle_kernels[transformers]'"
        ) from None
    stored = Checkpoint(folder).tensors
    check_most_layers(config, stored)
    needed = sum(math.prod(tensor.shape) for tensor in stored.values()) * dtype.itemsize
    check_memory(needed, device, f"the weights take {{}} as {dtype}")
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # unchecked files can raise anything in transformers
        raise ModelError(f"transformers cannot load it: {type(error).__name__}: {first_line(error)}") from None
    refuse_names("missing", set(report["missing_keys"]))  # transformers fills these with random numbers
    model = model.to(device)
    if check_weights:
        refuse_not_finite(dict(model.named_parameters()), dtype)
    return TransformersTarget(model)


def demo_pair() -> tuple[Path, Path]:
    """Returns the folders (target, draft) of the byte-level pair that comes with the package."""
    target, draft = DEMO_PAIR_FOLDER / "target", DEMO_PAIR_FOLDER / "draft"
    if not (target.is_dir() and draft.is_dir()):
        raise ModelError(
            f"{DEMO_PAIR_FOLDER} is missing; make it with: python -m eagle_kernels.tools.training.demo_pair "
            f"--output {DEMO_PAIR_FOLDER}"
        )
    return target, draft


def read_eos_token_ids(folder: str | Path) -> tuple[int, ...]:
    """Returns the end tokens of a model folder; generation_config.json, which chat models use, has precedence."""
    folder = Path(folder)
    with naming(folder):
        config = read_json(folder / "config.json", is_optional=True)
        eos = read_json(folder / "generation_config.json", is_optional=True).get(
            "eos_token_id", config.get("eos_token_id")
        )
        token_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        if not all(map(is_integer, token_ids)):
            raise ModelError(f"eos_token_id must be a token id or a list of them, got {eos!r}")
    return token_ids
