"""The public functions of all ops, each made from its file and its reference when it is first asked for.

Importing this module defines the ops for torch, by their schemas: a program that was exported finds them by name.
"""

from __future__ import annotations

from collections.abc import Callable

from ..runtime.lazy import import_in_order
from ..runtime.library import Op, register, schemas_of
from .registry import OPS
from .schemas import SCHEMAS

made: dict[str, Op] = {}


def find(name: str) -> Op:
    """Returns an op; threads that ask for it at once get the same one."""
    if name not in made:
        module = import_in_order(f".{OPS[name]}", __package__)
        if not set(schemas_of(module)) <= set(SCHEMAS):
            raise RuntimeError(f"ops/schemas.py does not have {name} as it is: run python -m bench.api")
        made.setdefault(name, Op(module, reference_of(OPS[name])))
    return made[name]


def reference_of(path: str) -> Callable:
    """Returns the reference of an op, or of a front door."""
    return getattr(import_in_order(f"..reference.ops.{path}", __package__), path.rpartition(".")[2])


def __getattr__(name: str) -> Callable:
    if name not in OPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return find(name).function


for schema in SCHEMAS:
    register(schema, find)
