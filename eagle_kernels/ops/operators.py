"""The public functions of all ops, made from their files and their references."""

from __future__ import annotations

from importlib import import_module

from ..runtime.library import operator
from .registry import OPS

PUBLIC = {
    name: operator(import_module(f".{path}", __package__), import_module(f"..reference.ops.{path}", __package__))
    for name, path in OPS.items()
}
VERIFY_TREE_REFERENCE = import_module("..reference.ops.verify_tree", __package__).verify_tree
