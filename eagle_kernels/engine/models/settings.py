"""Settings in config.json and other JSON files: what they say, and whether that is of the right type and size.

A null or empty value counts as absent (`stated`); what a key would turn on is off where the value is false, 0 or -1 as
well (`is_off`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from ...runtime.values import is_fp32, is_integer, shown
from .protocol import ModelError

# Keys whose null is a value of its own in transformers: no window, a key head for each query head, the usual size,
# queries that are projected at once.
NULL_IS_A_VALUE = ("sliding_window", "num_key_value_heads", "head_dim", "q_lora_rank")

# Token ids and places in the KV pools are int32. A layer is a Python object: config.json must not ask for millions.
_LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 1000
_MOST = dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers"), MOST_LAYERS)
_NOT_NEGATIVE = {"rms_norm_eps", "mscale", "mscale_all_dim"}
_SAME = {"swish": "silu"}  # two names of one activation
_TYPES = {dict: "an object", bool: "true or false", str: "a string"}  # what errors call them


def read_value(config: dict[str, Any], name: str, kind: type, file_name: str = "config.json") -> Any:
    """Returns the value of type `kind` under a key of a JSON file; the type's empty value where that says nothing."""
    value = config.get(name)
    if is_empty(value):
        return kind()
    if not isinstance(value, kind):
        raise ModelError(f"{file_name}: {name} must be {_TYPES[kind]}, got {shown(value)}")
    return value


def read_size(config: dict[str, Any], name: str) -> int:
    """Returns the positive integer under a key of config.json."""
    value, most = config.get(name), _MOST.get(name, _LARGEST_SIZE)
    if not (is_integer(value) and value > 0):
        raise ModelError(f"config.json: {name} must be a positive integer, got {shown(value)}")
    if value > most:
        raise ModelError(f"config.json: {name} must be at most {most}, got {shown(value)}")
    return value


def is_empty(value: Any) -> bool:
    """Returns whether a setting says nothing: it is null, or an empty text or list, or an object of such values."""
    if isinstance(value, dict):
        return all(map(is_empty, value.values()))
    return value is None or (isinstance(value, (str, list)) and not value)


def is_off(value: Any) -> bool:
    """Returns whether a setting that would turn something on leaves it off."""
    return is_empty(value) or not value or (is_integer(value) and value == -1)


def stated(config: dict[str, Any], *kept: str) -> dict[str, Any]:
    """Returns the settings that say something; those named in `kept` also where they are null or empty."""
    return {name: value for name, value in config.items() if name in kept or not is_empty(value)}


def check_implemented(config: dict[str, Any], implemented: dict[str, Any], of: str = "") -> None:
    """Refuses values other than the implemented one of each key, which an absent, null or empty one means. Where
    nothing is implemented (None or False), so does any value that is off."""
    for name, only in implemented.items():
        value = config.get(name)
        value = _SAME.get(value, value) if isinstance(value, str) else value
        if not (is_empty(value) or value == only or (not only and is_off(value))):
            raise ModelError(f"config.json: {name}={shown(config[name])} is not implemented{of} (only {only!r})")


def check_fields(config: Any) -> None:
    """Checks the sizes, numbers and flags of a dataclass by the types of its fields; makes floats of its numbers."""
    for name, annotation in ((item.name, item.type) for item in fields(config)):
        value, kind = getattr(config, name), annotation.removesuffix(" | None")
        if value is None and kind != annotation:
            continue
        if kind == "int":
            read_size(vars(config), name)
        if kind == "bool":
            read_value(vars(config), name, bool)
        if kind == "float":
            if not (is_integer(value) or isinstance(value, float)):
                raise ModelError(f"config.json: {name} must be a number, got {shown(value)}")
            if not is_fp32(value):
                raise ModelError(f"config.json: {name} must be a finite number that fp32 holds, got {shown(value)}")
            value = float(value)  # torch takes no ints of more than 64 bits
            if name in _NOT_NEGATIVE and value < 0:
                raise ModelError(f"config.json: {name} must be at least 0, got {shown(value)}")
            object.__setattr__(config, name, value)


def present(config: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns the values of those keys that say something."""
    return stated({name: config.get(name) for name in names})


def field_values(kind: type, config: dict[str, Any], **known: Any) -> dict[str, Any]:
    """Returns the values of a dataclass's fields under their names in config.json, and those that are known."""
    values = present(config, (item.name for item in fields(kind))) | known
    for item in fields(kind):
        if item.default is MISSING and item.name not in values:
            raise ModelError(f"config.json: {item.name} is missing")
    return values
