"""Checks of config.json's sizes against the headers of the tensors, before a wrong size costs time or memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from ..config.values import is_integer, shown
from .checkpoint import StoredTensor
from .protocol import ModelError

# names that transformers' models have for the number of layers
_LAYER_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


class StoredSize(NamedTuple):
    """A size that both config.json and a tensor tell.

    fields   a field of config.json, or several with * and + between them
    axis     the axis of the tensor
    tensors  names of tensors; the first that exists is compared
    """

    fields: str
    axis: int
    tensors: tuple[str, ...]


def check_sizes(config: Any, sizes: Iterable[StoredSize], tensors: Mapping[str, StoredTensor]) -> None:
    """Refuses sizes that differ from those of the tensors; `config` has the fields as attributes."""
    for fields, axis, names in sizes:
        name = next((name for name in names if name in tensors), None)
        shape = [] if name is None else tensors[name].shape
        if len(shape) <= axis:
            continue  # `fill` refuses these
        numbers = re.sub("[a-z_]+", lambda field: str(getattr(config, field[0])), fields)
        if shape[axis] != sum(math.prod(map(int, term.split("*"))) for term in numbers.split("+")):
            raise ModelError(
                f"config.json: {fields} must be {shape[axis]} as in {name} of shape {shape}, got {numbers}"
            )


def check_layers(config: Mapping[str, Any], field: str, names: Iterable[str], prefix: str) -> None:
    """Refuses a number of layers that differs from that of the tensors `prefix`0, `prefix`1, ..."""
    layers = {name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
    value = config.get(field)
    if layers and is_integer(value) and value != len(layers):  # other types are refused where they are read
        _refuse(field, f"{len(layers)}", prefix, value)


def check_most_layers(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuses more layers than the longest numbered list of tensors has; for transformers' models, which name fields
    and tensors in many ways."""
    lists: dict[str, set[str]] = {}
    for name in names:
        found = re.match(r"(.*?\.)(\d+)\.", name)
        if found:
            lists.setdefault(found[1], set()).add(found[2])
    if not lists:
        return
    prefix = max(lists, key=lambda each: len(lists[each]))
    for section in (config, *(section for section in config.values() if isinstance(section, dict))):
        for field in _LAYER_FIELDS:
            value = section.get(field)
            if is_integer(value) and value > len(lists[prefix]):
                _refuse(field, f"at most {len(lists[prefix])}", prefix, value)


def _refuse(field: str, rule: str, prefix: str, value: int) -> NoReturn:
    raise ModelError(f"config.json: {field} must be {rule} as in the tensors {prefix}*, got {shown(value)}")
