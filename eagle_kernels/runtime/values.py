"""Questions about values that callers, files and other libraries hand in."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

# of fp32; the command line imports this file, and not torch
_TINY, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127


def is_integer(value: Any) -> bool:
    """Returns whether a value is an int and means a number: Python counts True and False among its ints."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_int64(value: Any) -> bool:
    """Returns whether a value is an int that tensors of 64 bits hold."""
    return is_integer(value) and -(2**63) <= value < 2**63


def are_integers(values: Any) -> bool:
    """Returns whether a value is a list or tuple of ints alone; a long prompt should take no time that one notices."""
    return isinstance(values, (list, tuple)) and {*map(type, values)} <= {int}


def is_fp32(value: float) -> bool:
    """Returns whether fp32 holds a number: it is finite, and not rounded to 0."""
    return value == 0 or _TINY <= abs(value) <= _LARGEST


def plain(value: Any, depth: int = 4) -> Any:
    """Returns nested lists of Python numbers for sequences, tensors and arrays, to some depth.
    Text, and what has no order or is read only once, is left as it is; so is a tensor whose values cannot be read."""
    if are_integers(value):
        return list(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return value
    if hasattr(value, "tolist"):
        try:
            value = value.tolist()
        except Exception:  # each kind of tensor without values raises another one
            return value
        return plain(value, depth) if isinstance(value, list) else value
    if depth == 0 or isinstance(value, (str, Mapping, Set, Iterator)):
        return value
    return [plain(item, depth - 1) for item in value] if isinstance(value, Iterable) else value


def scalar(value: Any) -> Any:
    """Returns the Python number of a scalar of NumPy or torch; anything else as it is."""
    if getattr(value, "shape", None) != () or not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except Exception:  # as above
        return value


def several(value: Any) -> Any:
    """Returns one text or number, or several of them in any collection or array, as a tuple; None as it is."""
    if value is None:
        return None
    if isinstance(value, (set, frozenset)):
        value = list(value)
    items = plain(value)
    return tuple(items) if isinstance(items, list) else (items,)


def is_word(value: Any, word: Any) -> bool:
    """Returns whether a value equals a word that has a meaning; both are truths, or neither is."""
    kinds = (type(None), int, float, str, tuple, list, dict)
    return isinstance(value, kinds) and isinstance(value, bool) == isinstance(word, bool) and value == word


def is_terminal(stream: Any) -> bool:
    """Returns whether a stream is a terminal; a program may have closed it, or have none."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it is closed
        return False


def utf8_fault(text: str) -> str | None:
    """Returns what UTF-8 cannot represent in a text, such as Python makes of damaged command lines and JSON."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"its character {error.start} is {text[error.start]!r}, half of a surrogate pair"
    return None


def read_flag(name: str, value: bool) -> bool:
    """Returns True or False; refuses 0, "no" and None."""
    flag = scalar(value)
    if not isinstance(flag, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}")
    return flag


def shown(value: Any, text_of: Callable[[Any], str] = repr, most: int = 60) -> str:
    """Returns a value as an error shows it: in one line of at most `most` characters, whatever was passed."""
    try:
        text = text_of(value)
    except Exception:  # ints with thousands of digits, tensors without values
        text = f"one that cannot be shown, of type {type(value).__name__}"
    return one_line(text, most)


def type_name(value: Any) -> str:
    """Returns what an error calls the type of a value: an int64 of NumPy would else look like the int it should be."""
    return ("numpy." if type(value).__module__ == "numpy" else "") + type(value).__name__


def shown_name(name: Any) -> str:
    """Returns a name that a caller made up, without quotes: in one line, with escapes for what cannot be printed."""
    return one_line(repr(str(name))[1:-1])


def one_line(text: str, most: int = 60) -> str:
    """Returns a text in one line of at most `most` characters."""
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."


def text_of(error: BaseException) -> str:
    """Returns what an error says; its class where it says nothing, or fails to."""
    try:
        return str(error).strip() or type(error).__name__
    except Exception:  # an error of a caller's own, whose __str__ is at fault
        return type(error).__name__


def first_line(error: Exception) -> str:
    """Returns the first line of an error, and after a colon the next one; its class where it says nothing."""
    first, *rest = text_of(error).splitlines()
    first = first.rstrip()
    return f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text; raises ValueError where it is no JSON, or more than Python can hold.
    So it does where an object names a field twice: Python would keep the last one alone."""
    try:
        return json.loads(text, object_pairs_hook=_as_object)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def _as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {shown_name(twice)} occurs more than once")
    return made


def as_tuples(value: Any) -> Any:
    """Returns lists, sets and arrays as tuples, those inside as well; anything else as it is."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return tuple(map(as_tuples, value))
    listed = plain(value) if hasattr(value, "tolist") else value
    return as_tuples(listed) if isinstance(listed, list) else listed
