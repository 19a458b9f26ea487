"""Files of a model folder: config.json, the tensors beside it, and the modules that are filled from them. The files'
headers tell all shapes before anything is allocated. Tensors are then read one by one and copied into place in their
final dtype, so loading takes the memory of the weights, and of one tensor more where it changes on the device."""

import math
import os
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...runtime.placement import free_memory_bytes
from ...runtime.values import first_line, is_integer, is_terminal, parse_json, shown
from .protocol import ModelError
from .quantised_linears import Places

_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # the first that exists is read, itself or its shards
_LFS_POINTER = b"version https://git-lfs"
_PIECE = 2**24  # elements
_LAYER_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # names in models of transformers
_MIB = 2**20
# JSON files that may be large, since they list all tokens or tensors; the others are settings
_MOST_BYTES = {"tokenizer.json": 512 * _MIB, **{f"{name}.index.json": 512 * _MIB for name in _WEIGHT_FILES}}

# Files of folders that hold no model, or one in another layout: what they tell, and what would work.
_OTHER_FILES = {
    "adapter_*": "a LoRA adapter: merge it into its base model (merge_and_unload of peft), and save that",
    "*.gguf": "GGUF files, which are not read: take the model's safetensors",
    "medusa_lm_head.*": "tensors of Medusa heads",
    "hydra_lm_head.*": "tensors of Hydra heads",
    "snapshots/*/config.json": "a cache of the hub: give the folder in snapshots",
    "*/config.json": "folders of models: give one of them",
    "model_index.json": "a pipeline of diffusers, not a language model",
    "consolidated*": "weights in their maker's own layout: take the layout of Hugging Face",
    "params.json": "weights in their maker's own layout: take the layout of Hugging Face",
    "*.onnx": "ONNX files, which are not read: take the model's safetensors",
    "tf_model.h5": "weights of TensorFlow, which are not read: take the model's safetensors",
    "flax_model.msgpack": "weights of Flax, which are not read: take the model's safetensors",
    "tokenizer*": "a tokenizer and no model",
}


class StoredTensor(NamedTuple):
    """Holds the header of a tensor in a file."""

    file_name: str
    name: str  # the name in the file
    shape: list[int]
    dtype: str  # the word of safetensors, such as BF16

    @property
    def is_floating_point(self) -> bool:
        return self.dtype.startswith(("F", "BF"))


class StoredSize(NamedTuple):
    """Names a size that both config.json and a tensor tell."""

    fields: str  # a field of config.json, or several with * and + between them
    axis: int  # the tensor's axis that has this size
    tensors: tuple[str, ...]  # names; the first that exists is compared


class Checkpoint:
    """Reads the tensors of a folder: of `model.safetensors` or `pytorch_model.bin`, or of its shards, or of the first
    of `others` that exists. `tensors` maps the name that the module has for a tensor to its header. Only these are
    read: callers delete those that the module lacks, and `rename` those whose names in the file differ."""

    def __init__(self, folder: Path, others: Sequence[str] = ()) -> None:
        self.folder = folder
        own = next((name for name in others if (folder / name).is_file()), None)
        self.index, self.file_names = _file_names(folder) if own is None else ("", [own])
        self.tensors: dict[str, StoredTensor] = {}
        for file_name in self.file_names:
            with self._open(file_name) as file:
                for name in file.keys():  # noqa: SIM118 (an open safetensors file is no mapping)
                    # Old checkpoints hold the RoPE frequencies, which follow from the config.
                    if not name.endswith("rotary_emb.inv_freq"):
                        header = file.get_slice(name)
                        self.tensors[name] = StoredTensor(file_name, name, header.get_shape(), header.get_dtype())

    def rename(self, new_name: Callable[[str], str | None]) -> None:
        """Gives each tensor the module's name for it; drops those that have none."""
        renamed: dict[str, StoredTensor] = {}
        for name, stored in self.tensors.items():
            ours = new_name(name)
            if ours in renamed:
                raise ModelError(f"tensor {brief(name)}: another tensor stands for {brief(ours)} already")
            if ours is not None:
                renamed[ours] = stored
        self.tensors = renamed

    def check_layers(self, config: dict[str, Any], field: str, prefix: str) -> None:
        """Refuses a number of layers that differs from that of the tensors `prefix`0, `prefix`1, ..."""
        count, value = self._layer_counts()[prefix], config.get(field)
        if count and is_integer(value) and value != count:  # other types are refused where they are read
            rule = f"must be {count} to match the tensors {brief(prefix)}*"
            raise ModelError(f"config.json: {field} {rule}, got {shown(value)}")

    def check_most_layers(self, config: dict[str, Any]) -> None:
        """Refuses more layers than the longest numbered list of tensors, as transformers' models name both freely."""
        sections = [config, *(section for section in config.values() if isinstance(section, dict))]
        for prefix, most in self._layer_counts().most_common(1):
            for field, value in ((field, section.get(field)) for section in sections for field in _LAYER_FIELDS):
                if is_integer(value) and value > most:
                    rule = f"must be at most {most} to match the tensors {brief(prefix)}*"
                    raise ModelError(f"config.json: {field} {rule}, got {shown(value)}")

    def _layer_counts(self) -> Counter[str]:
        """Returns how many numbers follow each beginning of the tensors' names, such as `model.layers.`."""
        found = re.findall(r"^(.*?\.)(\d+)\.", "\n".join(self.tensors), re.MULTILINE)
        return Counter(prefix for prefix, _ in dict.fromkeys(found))

    def check_sizes(self, config: Any) -> None:
        """Refuses a `DecoderConfig` whose `stored_sizes` differ from those of the tensors."""
        for fields, axis, names in config.stored_sizes:
            name = next((name for name in names if name in self.tensors), None)
            shape = [] if name is None else self.tensors[name].shape
            if len(shape) <= axis:
                continue  # `fill` refuses these
            numbers = re.sub("[a-z_]+", lambda field: str(getattr(config, field[0])), fields)
            if shape[axis] != sum(math.prod(map(int, term.split("*"))) for term in numbers.split("+")):
                rule = f"must be {shape[axis]} to match {name} of shape {shown(shape)}"
                raise ModelError(f"config.json: {fields} {rule}, got {numbers}")

    def fill(self, module: nn.Module, device: torch.device, dtype: torch.dtype, check_weights: bool) -> None:
        """Moves a module built on the meta device to `device` and fills it with the tensors, floating-point ones as
        `dtype`, those of quantised linears as these take them; leaves it frozen and in eval mode. Names, shapes and
        memory are checked before anything is allocated, and then whether all weights are finite."""
        module.to(dtype)
        expected, quantised = module.state_dict(), Places(module, self.tensors)
        refuse_names("missing tensors", sorted((expected.keys() | quantised.required) - self.tensors.keys()))
        refuse_names("unexpected tensors", sorted(self.tensors.keys() - expected.keys() - quantised.stored.keys()))
        if quantised.linears and dtype == torch.float32 and device.type not in ("cpu", "meta"):
            raise ModelError(f"quantised weights need dtype float16 or bfloat16 on {device}, got {dtype}")
        for name, stored in self.tensors.items():
            if name in quantised.stored:
                quantised.check(name, stored)
                continue
            wanted = expected[name]
            if stored.dtype.startswith(("F4", "F6_")):
                raise ModelError(f"tensor {name} has dtype {stored.dtype}, which is not implemented")
            if stored.shape != list(wanted.shape):
                shapes = f"shape {shown(stored.shape)}, but config.json says {list(wanted.shape)}"
                raise ModelError(f"tensor {name} has {shapes}")
            if stored.is_floating_point != wanted.is_floating_point():
                raise ModelError(f"tensor {name} must have dtype {wanted.dtype}, got {stored.dtype}")
        needed = quantised.expected_bytes + sum(tensor.nbytes for tensor in expected.values())
        check_memory(needed, device, f"the weights take {{}} as {dtype}")
        places = module.to_empty(device=device).requires_grad_(False).eval().state_dict()
        if device.type == "meta":
            return
        for name, tensor in self.read():
            if name in quantised.stored:
                quantised.take(name, tensor.to(device), dtype)
            else:
                places[name].copy_(tensor)
        if check_weights:  # quantised linears have checked theirs
            refuse_not_finite({name: places[name] for name in self.tensors if name in places}, dtype)

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names and tensors, of mapped files and on the CPU, shard by shard; shows its progress on a terminal.

        What is only copied, such as an output of a gigabyte, is then never on the device twice.
        """
        for number, file_name in enumerate(self.file_names, start=1):
            _show(f"loading {number}/{len(self.file_names)} {brief(file_name)}")
            with self._open(file_name) as file:
                for name, stored in self.tensors.items():
                    if stored.file_name == file_name:
                        yield name, file.get_tensor(stored.name)
        _show("")

    def check_index(self) -> None:
        """Refuses an index of shards without `metadata`, which transformers needs."""
        if "metadata" not in (read_json(self.folder / self.index, is_optional=True) or {"metadata": {}}):
            raise ModelError(f'{self.index}: metadata is missing, which transformers needs: add "metadata": {{}}')

    def get(self, name: str) -> Tensor:
        """Returns one tensor, on the CPU."""
        stored = self.tensors[name]
        with self._open(stored.file_name) as file:
            return file.get_tensor(stored.name)

    @contextmanager
    def _open(self, file_name: str) -> Iterator[Any]:
        path = self.folder / file_name
        if not path.is_file():
            raise ModelError(f"{brief(file_name)}, named by {self.index}, is missing")
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise ModelError(f"{brief(file_name)} is only a Git LFS pointer: git lfs pull fetches the file itself")
        if file_name.endswith((".bin", ".pt")):
            yield _PickledFile(path)
            return
        package = safetensors()
        try:
            with package.safe_open(path, framework="pt") as file:
                yield file
        except package.SafetensorError as error:
            raise ModelError(f"{brief(file_name)} cannot be read: {brief(first_line(error), 200)}") from None


def _show(line: str) -> None:
    """Replaces the line that a terminal shows."""
    if is_terminal(sys.stderr):
        print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)


class _PickledFile(dict[str, Tensor]):
    """Holds the tensors of a file of torch.save, with the methods of an open safetensors file. The file is mapped, so
    that each tensor is read on demand; one from before torch 1.6, no zip archive, is read whole."""

    get_tensor = dict.__getitem__

    def __init__(self, path: Path) -> None:
        tensors = load_pickled(path, map_location="cpu", mmap=zipfile.is_zipfile(path))
        is_table = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
        if not (is_table and all(isinstance(tensor, Tensor) for tensor in tensors.values())):
            raise ModelError(f"{path.name} holds no dictionary of tensors")
        super().__init__(tensors)

    def get_slice(self, name: str) -> SimpleNamespace:
        shape, dtype = list(self[name].shape), str(self[name].dtype).removeprefix("torch.").upper()
        dtype = dtype.replace("FLOAT", "F").replace("UINT", "U").replace("INT", "I").removesuffix("FN")
        return SimpleNamespace(get_shape=lambda: shape, get_dtype=lambda: dtype)


def load_pickled(path: Path, **options: Any) -> Any:
    """Returns what torch.save wrote, through torch.load with these options; no code of the file is run."""
    try:
        return torch.load(path, weights_only=True, **options)
    except (MemoryError, PermissionError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a damaged file raises errors of any class
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it names {named[1]}, but code in files is not run" if named else "it is no complete torch.save file"
        if type(error) in (RuntimeError, OSError):
            reason += f" ({first_line(error)})"
        raise ModelError(f"{path.name} cannot be read: {reason}") from None


def refuse_not_finite(tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Refuses NaN and infinite weights, which make a model repeat one token for ever."""
    advice = "; check_weights=False (--no-check-weights) loads them"
    refuse_names(f"tensors with NaN or infinite values as {dtype}", not_finite(tensors), advice)


def not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """Returns the names of the floating-point tensors that hold NaN or infinite values. Each tensor is read once, on
    its device and without a copy of its size; the host waits once, for all of them."""
    names, extremes = [], []
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel() > 0:
            # torch cannot compare numbers of one byte, so they are widened, piece by piece
            is_wide = tensor.dtype.itemsize > 1
            for piece in (tensor,) if is_wide else map(Tensor.float, tensor.flatten().split(_PIECE)):
                names.append(name)
                extremes.append(torch.stack(torch.aminmax(piece)).double())
    if not names:
        return []
    is_finite = torch.stack(extremes).isfinite().all(-1).tolist()
    return list(dict.fromkeys(name for name, holds in zip(names, is_finite) if not holds))


def check_memory(needed_bytes: int, device: torch.device, need: str) -> None:
    """Refuses more bytes than the device has free; `need` begins the error, with {} for the amount."""
    free = free_memory_bytes(device)
    if free is not None and needed_bytes > free:
        amount = f"{needed_bytes / 2**30:.2f} GiB"
        raise ModelError(f"{need.format(amount)}, but {device} has {free / 2**30:.2f} GiB free")


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Puts the folder's name before the text of every ModelError about its contents."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{brief(str(folder), 250)}: {error}") from None


def brief(name: str, most: int = 80) -> str:
    """Returns the name of a tensor, file or folder as an error shows it: in one line, and cut where it is long."""
    text = name if name.isprintable() else repr(name)[1:-1]
    return text if len(text) <= most else text[: most - 3] + "..."


def read_folder(argument: str, folder: Any) -> Path:
    """Returns the path of a folder that a caller gives; refuses what is no path, and "", which would be any folder."""
    text = os.fspath(folder) if isinstance(folder, (str, os.PathLike)) else None
    if not (isinstance(text, str) and text.strip()):
        raise ValueError(f"{argument} must be the path of a model's folder, got {shown(folder)}")
    return Path(text)


def read_config(folder: Path, *, is_optional: bool = False) -> dict[str, Any]:
    """Returns the parsed config.json of a folder; a ModelError says what else is there, or how to download a model."""
    try:
        is_folder, exists = folder.is_dir(), folder.exists()
    except OSError:  # a name that is too long, for one
        is_folder, exists = False, False
    if exists and not is_folder:
        what = " of GGUF, which is not read: take the folder with the model's safetensors"
        rule = what if folder.suffix == ".gguf" else f", not a folder; name the model's folder, such as {folder.parent}"
        raise ModelError(f"is a file{rule}")
    if not is_folder:
        name = folder.as_posix()
        is_of_hub = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) and len(name) <= 200
        advice = f": hf download {name} --local-dir FOLDER makes one" if is_of_hub else ""
        raise ModelError(f"there is no such folder, and nothing is downloaded{advice}")
    if not is_optional and not (folder / "config.json").is_file():
        raise ModelError(f"config.json is missing{_what_is_in(folder)}")
    return read_json(folder / "config.json", is_optional=is_optional)


def _what_is_in(folder: Path) -> str:
    """Returns what a folder without a model holds, as the end of an error."""
    links = [path.name for path in sorted(folder.iterdir()) if path.is_symlink() and not path.exists()]
    if links:
        return f"; the folder holds links to files that are missing ({brief(links[0])}): copy it with cp -L"
    for pattern, told in _OTHER_FILES.items():
        found = next(iter(sorted(folder.glob(pattern))), None)
        if found is not None:
            return f"; the folder holds {told} ({brief(str(found.relative_to(folder)))})"
    names = sorted(path.name for path in folder.iterdir())
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"; the folder holds {', '.join(brief(name, 40) for name in names[:3])}{more}" if names else "; it is empty"


def read_json(path: Path, *, is_optional: bool = False) -> dict[str, Any]:
    """Returns the JSON object in a file; {} for an optional file that does not exist."""
    if not path.is_file():
        if is_optional:
            return {}
        raise ModelError(f"{path.name} is missing")
    check_file_size(path)
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not even UTF-8
        raise ModelError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path.name} holds no JSON object")
    return content


def check_file_size(path: Path) -> None:
    """Refuses a JSON file that is larger than any model's, before it is read."""
    size, most = path.stat().st_size, _MOST_BYTES.get(path.name, 64 * _MIB)
    if size > most:
        raise ModelError(f"{path.name} must have at most {most // _MIB} MiB, got {size // _MIB} MiB")


def safetensors() -> Any:
    """Returns the package safetensors, with its module for torch."""
    try:
        import safetensors.torch
    except ImportError:
        raise ModelError("model files need safetensors: pip install 'eagle_kernels[models]'") from None
    return safetensors


def _file_names(folder: Path) -> tuple[str, list[str]]:
    """Returns the name of the index, which may not exist, and the names of the files that hold tensors."""
    for name in _WEIGHT_FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return index.name, [name]
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not (isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())):
                raise ModelError(f"{index.name}: weight_map must be an object that names the file of each tensor")
            for tensor, file in weight_map.items():
                path = PureWindowsPath(file)  # this class knows the separators and roots of all systems
                # Links may leave the folder: the files of a hub's cache are links.
                is_inside = len(path.parts) > 0 and not path.anchor and ".." not in path.parts and "\0" not in file
                if not is_inside or max(map(len, path.parts)) > 255:
                    fault = f"weight_map must name files inside the folder, got {shown(file)} for {brief(tensor)}"
                    raise ModelError(f"{index.name}: {fault}")
            return index.name, sorted(set(weight_map.values()))
    wanted = "there is no model.safetensors, model.safetensors.index.json or pytorch_model.bin"
    raise ModelError(f"{wanted}{_what_is_in(folder)}")


def refuse_names(fault: str, names: Sequence[str], advice: str = "") -> None:
    """Raises ModelError when there are tensors with a fault; names the first four."""
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise ModelError(f"{fault}: {', '.join(map(brief, names[:4]))}{more}{advice}")
