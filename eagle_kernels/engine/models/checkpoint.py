"""Tensors in files: the safetensors of a model folder, and the modules that are filled from them.

Shapes are known from the files' headers before anything is allocated. Tensors then go one by one from the file to the
device and into their place, in their final dtype, so a load needs the weights' memory and that of one tensor.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .protocol import ModelError

INDEX = "model.safetensors.index.json"


class StoredTensor(NamedTuple):
    """What a file's header says of a tensor; `dtype` is a name of safetensors, as BF16."""

    file_name: str
    shape: list[int]
    dtype: str

    @property
    def is_floating_point(self) -> bool:
        return self.dtype.startswith(("F", "BF"))


class Checkpoint:
    """`model.safetensors` of a folder, or its shards. `tensors` are what will be read; drop from it what is not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_names = _file_names(folder)
        self.tensors: dict[str, StoredTensor] = {}
        for file_name in self.file_names:
            with self._open(file_name, "cpu") as file:
                names = file.keys()  # no mapping: cannot be iterated over
                for name in names:
                    # Old checkpoints carry the RoPE frequencies, which are derived from the config.
                    if not name.endswith("rotary_emb.inv_freq"):
                        header = file.get_slice(name)
                        self.tensors[name] = StoredTensor(file_name, header.get_shape(), header.get_dtype())

    def read(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its name, on the device, shard by shard; says on a terminal which one it is at."""
        is_watched = sys.stderr.isatty()
        for number, file_name in enumerate(self.file_names, start=1):
            if is_watched:
                line = f"\rloading {number}/{len(self.file_names)} {file_name}\033[K"
                print(line, end="", file=sys.stderr, flush=True)
            with self._open(file_name, str(device)) as file:
                names = [name for name in self.tensors if self.tensors[name].file_name == file_name]
                for name in names:
                    yield name, file.get_tensor(name)
        if is_watched:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _open(self, file_name: str, device: str):
        safe_open = safetensors().safe_open
        from safetensors import SafetensorError

        if not (self.folder / file_name).is_file():
            raise ModelError(f"{file_name}, named by {INDEX}, is missing")
        try:
            return safe_open(self.folder / file_name, framework="pt", device=device)
        except SafetensorError as error:
            raise ModelError(f"{file_name} cannot be read: {error}") from None


def fill(module: nn.Module, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
    """Moves a module built on the meta device to `device` and gives it the checkpoint's tensors, floating-point ones
    as `dtype`; leaves it frozen, in eval mode. Names, shapes and memory are checked before anything is allocated."""
    module.to(dtype)
    expected = module.state_dict()
    _refuse("missing", expected.keys() - checkpoint.tensors.keys())
    _refuse("unexpected", checkpoint.tensors.keys() - expected.keys())
    for name, stored in checkpoint.tensors.items():
        wanted = expected[name]
        if stored.shape != list(wanted.shape):
            raise ModelError(f"tensor {name} has shape {stored.shape}, config.json asks for {list(wanted.shape)}")
        if stored.is_floating_point != wanted.is_floating_point():
            raise ModelError(f"tensor {name} has dtype {stored.dtype}, {wanted.dtype} was expected")
    needed = sum(tensor.nbytes for tensor in expected.values())
    free = free_memory_bytes(device)
    if free is not None and needed > free:
        raise ModelError(
            f"the weights take {needed / 2**30:.2f} GiB as {dtype}, but {device} has {free / 2**30:.2f} GiB free"
        )
    places = module.to_empty(device=device).requires_grad_(False).eval().state_dict()
    for name, tensor in checkpoint.read(device):
        places[name].copy_(tensor)


def free_memory_bytes(device: torch.device) -> int | None:
    """Memory that can be had on the device now; None where nobody says."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    table = Path("/proc/meminfo")
    if device.type == "cpu" and table.is_file():
        for line in table.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


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


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """One safetensors file; floating-point tensors are rounded to bf16."""
    stored = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in tensors.items()
    }
    # Not `save_file`: it leaves the file readable by its owner alone.
    path.write_bytes(safetensors().torch.save(stored, metadata={"format": "pt"}))


def safetensors() -> Any:
    """The package, with its part for torch."""
    try:
        import safetensors.torch
    except ImportError:
        raise ModelError("model files need safetensors: pip install 'eagle_kernels[models]'") from None
    return safetensors


def _file_names(folder: Path) -> list[str]:
    index = folder / INDEX
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    if not index.is_file():
        raise ModelError(f"neither model.safetensors nor {INDEX} is there (.bin files are not read)")
    weight_map = read_json(index).get("weight_map")
    if not (isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())):
        raise ModelError(f"{INDEX}: weight_map must be an object that names the file of each tensor")
    return sorted(set(weight_map.values()))


def _refuse(fault: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise ModelError(f"{fault} tensors: {shown}")
