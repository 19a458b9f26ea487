"""Whether values are what annotations say."""

import collections.abc
import types
import typing

from typing_extensions import is_protocol, is_typeddict


def is_of(value: object, kind: object) -> bool:
    """Tells whether a value is of a type; elements and arguments count as well, and the fields of named tuples."""
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (object, typing.Any) or isinstance(origin, typing.TypeVar):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(is_of(value, each) for each in arguments)
    if is_typeddict(origin):
        hints = fields_of(origin)
        return type(value) is dict and hints.keys() == value.keys() and not wrong(hints, value.get)
    if origin is collections.abc.Callable:
        return callable(value)
    if is_protocol(origin):
        return all(hasattr(value, name) for name in vars(origin) if not name.startswith("_"))
    if origin is float:
        return type(value) in (int, float)
    if not isinstance(value, types.NoneType if origin is None else origin):
        return False
    if origin is tuple and arguments[-1] is not Ellipsis:
        return len(value) == len(arguments) and all(map(is_of, value, arguments))
    if origin in (list, tuple, set, frozenset, collections.abc.Sequence):
        return all(is_of(each, arguments[0]) for each in value)
    if origin is dict:
        return all(is_of(name, arguments[0]) and is_of(each, arguments[1]) for name, each in value.items())
    hints = fields_of(origin)
    return not wrong({name: hints[name] for name in getattr(origin, "_fields", ())}, lambda name: getattr(value, name))


def wrong_fields(value: object) -> list[str]:
    """Returns the public fields and properties of an object that are not what their annotations say."""
    cls = type(value)
    hints = fields_of(cls)
    for name in dir(cls):
        function = getattr(getattr(cls, name), "fget", None)
        if isinstance(function, types.FunctionType):
            hints[name] = typing.get_type_hints(function)["return"]
    return wrong(hints, lambda name: getattr(value, name))


def fields_of(cls: type) -> dict[str, object]:
    """Returns the types of the public fields of a class."""
    hints = typing.get_type_hints(cls, localns={"KW_ONLY": object})  # no type, which Python 3.10 refuses
    return {name: kind for name, kind in hints.items() if not name.startswith("_")}


def wrong(hints: dict[str, object], read) -> list[str]:
    return [f"{name}: {read(name)!r} is no {kind}" for name, kind in hints.items() if not is_of(read(name), kind)]
