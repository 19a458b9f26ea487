"""Model folders in the Hugging Face layout: `config.json` next to `model.safetensors` (or its sharded form)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..values import is_integer
from .eagle_head import EagleConfig, EagleHead
from .llama import Llama, LlamaConfig
from .protocol import ModelError, TargetModel

DEMO_PAIR_FOLDER = Path(__file__).resolve().parents[2] / "assets" / "demo_pair"

ModuleType = TypeVar("ModuleType", bound=nn.Module)


def load_target(folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Llama:
    """A Llama target, frozen, in eval mode, its floating-point tensors converted to `dtype`."""
    folder = Path(folder)
    with _naming(folder):
        config = LlamaConfig.from_dict(_read_config(folder))
        tensors = _read_tensors(folder, device, dtype)
        if config.tie_word_embeddings and "model.embed_tokens.weight" in tensors:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        target = _assemble(lambda: Llama(config), tensors, device)
        target.tie_weights()
        return target


def load_draft(
    folder: str | Path,
    target: TargetModel,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> EagleHead:
    """An EAGLE-3 head, frozen, in eval mode, bound to `target` (whose embedding it shares unless it holds its own)."""
    folder = Path(folder)
    with _naming(folder):
        config = EagleConfig.from_dict(_read_config(folder))
        tensors = _read_tensors(folder, device, dtype)
        if config.draft_vocab_size == config.vocab_size:
            # Some trainers write the identity mapping; a head over the whole vocabulary has none.
            tensors.pop("d2t", None)
            tensors.pop("t2d", None)
        for name, kind in (("d2t", torch.int64), ("t2d", torch.bool)):
            if name in tensors:  # published as other integer types, too
                tensors[name] = tensors[name].to(kind)
        own_embedding = "embed_tokens.weight" in tensors
        return _assemble(lambda: EagleHead(config, own_embedding=own_embedding), tensors, device).bind(target)


def demo_pair() -> tuple[Path, Path]:
    """The folders (target, draft) of the byte-level pair that comes with the package."""
    target, draft = DEMO_PAIR_FOLDER / "target", DEMO_PAIR_FOLDER / "draft"
    if not (target.is_dir() and draft.is_dir()):
        raise ModelError(
            f"{DEMO_PAIR_FOLDER} is missing; make it with: python -m eagle_kernels.engine.training.demo_pair "
            f"--output {DEMO_PAIR_FOLDER}"
        )
    return target, draft


def read_eos_token_ids(folder: str | Path) -> tuple[int, ...]:
    """The end tokens that a model folder names; generation_config.json first, where chat models list their own."""
    folder = Path(folder)
    with _naming(folder):
        config = read_json(folder / "config.json", is_optional=True)
        eos = read_json(folder / "generation_config.json", is_optional=True).get(
            "eos_token_id", config.get("eos_token_id")
        )
        token_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        if not all(map(is_integer, token_ids)):
            raise ModelError(f"eos_token_id must be a token id or a list of them, got {eos!r}")
    return token_ids


def save_folder(module: nn.Module, config: dict[str, Any], folder: str | Path) -> None:
    """Write `config` and the module's tensors, floating-point ones as bf16, so that the loaders above read them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in module.state_dict().items()
        if not (name == "lm_head.weight" and config.get("tie_word_embeddings"))
    }
    # Not `save_file`: it leaves the file readable by its owner alone.
    (folder / "model.safetensors").write_bytes(_safetensors().save(tensors, metadata={"format": "pt"}))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Put the folder in front of every complaint about its contents."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None


def _safetensors():
    try:
        import safetensors.torch
    except ImportError:
        raise ModelError("model files need safetensors: pip install 'eagle_kernels[models]'") from None
    return safetensors.torch


def read_json(path: Path, *, is_optional: bool = False) -> dict[str, Any]:
    """The JSON object in a file; {} where an optional one does not exist."""
    if is_optional and not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not even UTF-8
        raise ModelError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path.name} holds no JSON object")
    return content


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ModelError("there is no such folder")
    if not (folder / "config.json").is_file():
        raise ModelError("config.json is missing")
    return read_json(folder / "config.json")


def _read_tensors(folder: Path, device: str | torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of the folder on `device`; floating-point ones as `dtype`, others (d2t, t2d) as they are."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        file_names = ["model.safetensors"]
    elif index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not (isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())):
            raise ModelError(f"{index.name}: weight_map must be an object that names the file of each tensor")
        file_names = sorted(set(weight_map.values()))
    else:
        raise ModelError(
            "neither model.safetensors nor model.safetensors.index.json is there (.bin files are not read)"
        )
    load_file = _safetensors().load_file
    from safetensors import SafetensorError

    tensors: dict[str, Tensor] = {}
    for file_name in file_names:
        if not (folder / file_name).is_file():
            raise ModelError(f"{file_name}, named by {index.name}, is missing")
        try:
            loaded = load_file(folder / file_name, device=str(device))
        except SafetensorError as error:
            raise ModelError(f"{file_name} cannot be read: {error}") from None
        for name, tensor in loaded.items():
            tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    # Old checkpoints carry the RoPE frequencies, which are derived from the config.
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def _assemble(build: Callable[[], ModuleType], tensors: dict[str, Tensor], device: str | torch.device) -> ModuleType:
    """Build on the meta device, so that nothing is allocated twice, then put the tensors in place."""
    with torch.device("meta"):
        module = build()
    expected = module.state_dict()
    _refuse("missing", expected.keys() - tensors.keys())
    _refuse("unexpected", tensors.keys() - expected.keys())
    for name, tensor in tensors.items():
        wanted = expected[name]
        if tensor.shape != wanted.shape:
            raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(wanted.shape)}")
        if tensor.is_floating_point() != wanted.is_floating_point():
            raise ModelError(f"tensor {name} has dtype {tensor.dtype}, {wanted.dtype} was expected")
    module.load_state_dict(tensors, assign=True)
    return module.to(device).requires_grad_(False).eval()


def _refuse(fault: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise ModelError(f"{fault} tensors: {shown}")
