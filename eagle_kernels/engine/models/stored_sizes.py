"""Checks of config.json's sizes against the headers of the tensors, before a wrong size costs hours or memory."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from ..config.values import is_integer, shown
from .checkpoint import StoredTensor
from .protocol import ModelError

_OPERATORS = {"*": operator.mul, "+": operator.add}
# what config.json of models of transformers calls the number of layers
_LAYER_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


class StoredSize(NamedTuple):
    """A size that is in config.json and in a tensor: a field, or two with * or + between them.

    tensors  its names, the first that is there tells
    """

    fields: str
    axis: int
    tensors: tuple[str, ...]


def check_sizes(config: Any, sizes: Iterable[StoredSize], tensors: Mapping[str, StoredTensor]) -> None:
    """Refuses a field that is not what the tensors have; `config` holds the fields."""
    for fields, axis, names in sizes:
        stored = next((tensors[name] for name in names if name in tensors), None)
        if stored is None or len(stored.shape) <= axis:
            continue  # of which `fill` complains
        words = [str(getattr(config, word)) if word.isidentifier() else word for word in fields.split()]
        size = int(words[0]) if len(words) == 1 else _OPERATORS[words[1]](int(words[0]), int(words[2]))
        if size != stored.shape[axis]:
            name = next(name for name in names if name in tensors)
            raise ModelError(
                f"config.json: {fields} must be {stored.shape[axis]} as in {name} of shape {stored.shape}, got "
                f"{' '.join(words)}"
            )


def check_layers(config: Mapping[str, Any], field: str, names: Iterable[str], prefix: str) -> None:
    """Refuses a number of layers that is not that of the tensors `prefix`0, `prefix`1, ..."""
    layers = {name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
    value = config.get(field)
    if layers and is_integer(value) and value != len(layers):  # what is no integer is named where it is read
        _refuse(field, f"{len(layers)}", prefix, value)


def check_most_layers(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuses more layers than the longest numbered list of tensors has; for models of transformers, whose names of
    fields and tensors differ."""
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
