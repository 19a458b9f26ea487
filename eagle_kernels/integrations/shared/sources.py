"""The sources of a package, read without importing them: what a module or class defines, and what a function takes."""

from __future__ import annotations

import ast
import functools
import importlib.util
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Sources:
    """The sources of a package. read: gives the text of `package/file.py`, None where there is no such file."""

    def __init__(self, read: Callable[[str], str | None]):
        self.read = functools.cache(read)
        self.definitions = functools.cache(self._definitions)

    @classmethod
    def of_folder(cls, folder: Path) -> Sources:
        """Reads from the folder in which the package lies."""

        def read(path: str) -> str | None:
            file = folder / path
            return file.read_text(encoding="utf-8") if file.is_file() else None

        return cls(read)

    @classmethod
    def of_wheel(cls, wheel: Path | BinaryIO) -> Sources:
        """Reads single files out of a wheel, and unpacks nothing."""
        archive = zipfile.ZipFile(wheel)
        names = set(archive.namelist())
        return cls(lambda path: archive.read(path).decode("utf-8") if path in names else None)

    @classmethod
    def installed(cls, package: str) -> Sources | None:
        """Reads the package that Python would import; None where there is none."""
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            return None
        return cls.of_folder(Path(next(iter(found.submodule_search_locations))).parent)

    def _path(self, module: str) -> str | None:
        base = module.replace(".", "/")
        return next((path for path in (f"{base}.py", f"{base}/__init__.py") if self.read(path) is not None), None)

    def _definitions(self, module: str) -> dict[str, ast.AST | str]:
        """Returns what a module defines at its top level: nodes, and for what it imports, where that is from."""
        path = self._path(module)
        found: dict[str, ast.AST | str] = {}
        package = module.split(".") if path.endswith("/__init__.py") else module.split(".")[:-1]
        for node in _statements(ast.parse(self.read(path)).body):
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*base, *([node.module] if node.module else [])])
                found |= {alias.asname or alias.name: f"{source}.{alias.name}" for alias in node.names}
            else:  # a class that is made anew from itself (`X = defstruct("X", ...)`) stays what it was written as
                written = {name for name, known in found.items() if isinstance(known, (ast.ClassDef, *_FUNCTIONS))}
                found |= {name: node for name in _bound(node) - written}
        return found

    def find(self, target: str) -> ast.AST | None:
        """Returns what defines a dotted path, through imports and base classes; None where nothing does."""
        found = self._locate(target)
        return found[1] if found else None

    def _locate(self, target: str) -> tuple[str, ast.AST] | None:
        """Returns the module in which a dotted path is defined, and the node."""
        names = target.split(".")
        size = next((size for size in range(len(names), 0, -1) if self._path(".".join(names[:size]))), 0)
        if not size:
            return None
        module = ".".join(names[:size])
        if size == len(names):
            return module, ast.parse(self.read(self._path(module)))
        node = self.definitions(module).get(names[size])
        rest = names[size + 1 :]
        if isinstance(node, str):
            return self._locate(".".join([node, *rest]))
        if node is None or not rest:
            return None if node is None else (module, node)
        return self._member(module, node, rest[0]) if len(rest) == 1 else None

    def _member(self, module: str, owner: ast.AST, name: str) -> tuple[str, ast.AST] | None:
        if not isinstance(owner, ast.ClassDef):
            return None
        for node in owner.body:
            if name in _bound(node) or (isinstance(node, _FUNCTIONS) and name in _fields(node)):
                return module, node
        for base in owner.bases:
            found = self._locate(f"{module}.{base.id}") if isinstance(base, ast.Name) else None
            if found and (member := self._member(*found, name)):
                return member
        return None

    def parameters(self, target: str) -> tuple[str, ...] | None:
        """Returns the names of a function's parameters; of a class, those of its constructor without `self`."""
        found = self._locate(target)
        if found is None:
            return None
        module, node = found
        if isinstance(node, ast.ClassDef):
            made = self._member(module, node, "__init__")
            if made is None:  # a dataclass or another record
                return tuple(name for item in node.body if isinstance(item, ast.AnnAssign) for name in _bound(item))
            return _parameters(made[1])[1:]
        if not isinstance(node, _FUNCTIONS) or node.name != target.rpartition(".")[2]:
            return None
        return _parameters(node)

    def constant(self, target: str) -> object:
        """Returns the value of a constant, and the choices of a Literal; None where there is none."""
        value = getattr(self.find(target), "value", None)
        if isinstance(value, ast.Subscript) and ast.unparse(value.value) == "Literal":
            value = value.slice
        try:
            return ast.literal_eval(value)
        except ValueError:
            return None

    def listed(self, target: str) -> list[str]:
        """Returns the paths of the classes that a list names."""
        found = self._locate(target)
        value = getattr(found[1], "value", None) if found else None
        items = value.elts if isinstance(value, (ast.List, ast.Tuple)) else []
        return [f"{found[0]}.{item.id}" for item in items if isinstance(item, ast.Name)]

    def names_in_lists(self, function: str) -> set[str]:
        """Returns the names that stand in lists and tuples of a function."""
        found = self.find(function)
        lists = [node for node in ast.walk(found) if isinstance(node, (ast.List, ast.Tuple))] if found else []
        return {item.id for node in lists for item in node.elts if isinstance(item, ast.Name)}

    def code(self, function: str) -> str:
        """Returns a function as `ast` writes it; empty where there is none."""
        found = self.find(function)
        return ast.unparse(found) if found else ""

    def last_refusal(self, function: str) -> tuple[str, str]:
        """Returns condition and text of the ValueError with which a function ends; empty where it ends otherwise."""
        body = getattr(self.find(function), "body", None) or [ast.Pass()]
        test, raised = body[-1], None
        if isinstance(test, ast.If) and not test.orelse and isinstance(test.body[-1], ast.Raise):
            raised = test.body[-1].exc
        if not isinstance(raised, ast.Call) or ast.unparse(raised.func) != "ValueError":
            return "", ""
        text = raised.args[0]
        parts = text.values if isinstance(text, ast.JoinedStr) else [text]
        return ast.unparse(test.test), "".join(map(_text, parts))


def _text(part: ast.AST) -> str:
    """Returns a part of an f-string as it is written."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    if isinstance(part, ast.FormattedValue):
        conversion = f"!{chr(part.conversion)}" if part.conversion >= 0 else ""
        return f"{{{ast.unparse(part.value)}{conversion}}}"
    return ""


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields statements, and for conditional ones what is in them."""
    for node in body:
        inner = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
        inner += [handler.body for handler in getattr(node, "handlers", ())]
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for block in inner:
                yield from _statements(block or [])
        else:
            yield node


def _bound(node: ast.AST) -> set[str]:
    """Returns the names that a statement of a module or class defines."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {item.id for target in targets if target for item in ast.walk(target) if isinstance(item, ast.Name)}


@functools.cache
def _fields(method: ast.AST) -> frozenset[str]:
    """Returns the attributes that a method gives to its first argument."""
    first = next(iter(_parameters(method)), None)
    return frozenset(
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == first
    )


def _parameters(function: ast.AST) -> tuple[str, ...]:
    arguments = function.args
    return tuple(item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
