"""The laws of the house, read off the syntax trees: `python -m op_tests.architecture` prints every violation.

A law is a function of a `House`; it yields one line `file:line what is wrong` for every violation. `LAWS` names all.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOLDERS = ("eagle_kernels", "reference", "bench", "op_tests")
RANKS = {"runtime": 0, "primitives": 1, "ops": 2, "engine": 3, "": 4, "raw": 4, "types": 4, "tools": 5,
         "integrations": 5}  # fmt: skip
# of the engine, from the lowest on; its files outside of them, which are the API, may import all
ENGINE_FOLDERS = ("models", "requests", "config", "batch", "drafters", "step", "serve")
# families of ops whose kernels are those of another: they use what that one shares
BUILT_ON = {"latent": "attention"}
MOST_LINES = 400
MOST_POSITIONAL = 8
NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make", "_field_defaults"}
OF_VLLM = {"_k_scale", "_v_scale"}  # of its attention layers, which it gives to backends
# the backend of CPU tensors
READ_REFERENCES = {"eagle_kernels/ops/operators.py"}
# of torch: what makes tensors where and as the process's default device and dtype say, if a call does not say otherwise
FACTORIES = {
    "arange", "asarray", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
# those whose dtype does not depend on the default, for integers and tensors
OWN_DTYPE = {"arange", "asarray", "as_tensor", "randint", "randperm", "tril_indices", "triu_indices"}
# as transformers has it
ZERO_IS_NONE = {(name, "eagle_kernels/engine/models/layers/rotary.py") for name in (".mscale", ".mscale_all_dim")}
TESTS_OF_BENCH = ("op_tests/test_bench.py", "op_tests/test_bench_peers.py", "op_tests/test_bench_server.py",
                  "op_tests/test_bench_texts.py", "op_tests/test_api.py", "op_tests/test_two_gpus.py",
                  "op_tests/lab/")  # fmt: skip


class Import(NamedTuple):
    """An imported name: `name` of `module`, or the module itself; the file knows it as `bound`."""

    line: int
    module: str
    name: str | None
    bound: str
    is_for_types: bool


class File:
    """One source file: the nodes of its syntax tree, and what it imports."""

    def __init__(self, path: str, text: str):
        self.path, self.text = path, text
        self.nodes = list(ast.walk(ast.parse(text, filename=path)))
        parts = path.removesuffix(".py").split("/")
        self.is_package = parts[-1] == "__init__"
        self.module = ".".join(parts[:-1] if self.is_package else parts)
        for_types = {
            id(node)
            for block in self.nodes
            if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
            for statement in block.body
            for node in ast.walk(statement)
        }
        self.imports = [
            Import(node.lineno, module, name, bound, id(node) in for_types)
            for node in self.nodes
            for module, name, bound in self._imported(node)
        ]

    def _imported(self, node: ast.AST) -> Iterator[tuple[str, str | None, str]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None, alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            package = self.module.split(".") if self.is_package else self.module.split(".")[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield module, alias.name, alias.asname or alias.name


class House:
    """All files by the names of their modules."""

    def __init__(self, texts: dict[str, str]):
        self.files = {file.module: file for file in (File(path, text) for path, text in texts.items())}

    @classmethod
    def of_folder(cls, root: Path) -> House:
        paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
        texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}
        return cls({path: text for path, text in texts.items() if not path.startswith("eagle_kernels/reference/")})

    def under(self, *folders: str) -> Iterator[File]:
        return (file for file in self.files.values() if file.path.split("/")[0] in folders)

    def target(self, imported: Import) -> tuple[str, str | None]:
        """Returns the module that an import leads to, and the name that it takes of it (None: the module itself)."""
        whole, module = _real(f"{imported.module}.{imported.name}"), _real(imported.module)
        return (whole, None) if whole in self.files else (module, imported.name)


def _real(module: str) -> str:
    """Resolves the link `eagle_kernels.reference` to `reference`."""
    return module.removeprefix("eagle_kernels.") if module.startswith("eagle_kernels.reference") else module


def no_import_upward(house: House) -> Iterator[str]:
    """Modules import what is below: runtime <- primitives <- ops <- engine <- public names <- tools, integrations.

    The public names are those of `eagle_kernels` itself and of its modules `raw` and `types`, which import them lazily.
    """

    def place(module: str) -> tuple[str, int]:
        folder = (module.split(".") + [""])[1]
        return folder, RANKS.get(folder, len(RANKS))

    for file in house.under("eagle_kernels"):
        own, rank = place(file.module)
        for imported in file.imports:
            target, _ = house.target(imported)
            if target.split(".")[0] != "eagle_kernels":
                continue
            other, other_rank = place(target)
            if other != own and other_rank >= rank:
                yield f"{file.path}:{imported.line} imports {target}, which is not below {own or 'the public names'}"


def engine_imports_down(house: House) -> Iterator[str]:
    """The engine's folders import those below them, and nothing by a string: a path is read from top to bottom."""

    def place(module: str) -> tuple[str, int]:
        folder = (module.split(".") + [""])[2]
        return folder, ENGINE_FOLDERS.index(folder) if folder in ENGINE_FOLDERS else len(ENGINE_FOLDERS)

    for file in house.under("eagle_kernels"):
        if not file.path.startswith("eagle_kernels/engine/"):
            continue
        own, rank = place(file.module)
        for imported in file.imports:
            target, _ = house.target(imported)
            if target.startswith("eagle_kernels.engine"):
                other, other_rank = place(target)
                if other != own and rank < len(ENGINE_FOLDERS) and other_rank >= rank:
                    yield f"{file.path}:{imported.line} imports {target}, which is not below {own}"
        for node in file.nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
                yield f"{file.path}:{node.lineno} imports by a string: {ast.unparse(node)}"


def no_circle(house: House) -> Iterator[str]:
    """Imports form no circle; one under TYPE_CHECKING counts if what it names is called, or an attribute of it read."""
    edges: dict[str, dict[str, int]] = {}
    for file in house.under("eagle_kernels", "reference"):
        used = names_used_through_types(file)
        edges[file.module] = {
            target: imported.line
            for imported in file.imports
            if (target := house.target(imported)[0]) in house.files
            and (not imported.is_for_types or imported.bound in used)
        }
    for module, targets in edges.items():
        for target, line in targets.items():
            way = _shortest_way(edges, target, module)
            if way:
                yield f"{house.files[module].path}:{line} imports {target}, which leads back: {' -> '.join(way)}"


def _shortest_way(edges: dict[str, dict[str, int]], start: str, end: str) -> list[str]:
    ways, seen = [[start]], {start}
    for way in ways:
        if way[-1] == end:
            return way
        for target in edges.get(way[-1], ()):
            if target not in seen:
                seen.add(target)
                ways.append([*way, target])
    return []


def names_used_through_types(file: File) -> set[str]:
    """Names imported for types that the file calls or reads attributes of, or of what it annotates with them."""
    typed = {imported.bound for imported in file.imports if imported.is_for_types}
    if not typed:
        return set()
    annotations = [node.annotation for node in file.nodes if isinstance(node, (ast.arg, ast.AnnAssign))]
    annotations += [node.returns for node in file.nodes if isinstance(node, ast.FunctionDef)]
    in_annotations = {id(node) for annotation in annotations if annotation for node in ast.walk(annotation)}
    used = {name for node in file.nodes if id(node) not in in_annotations and (name := _touched(node)) in typed}
    fields, functions = {}, []  # attributes by name, of whatever object; variables count in their function alone
    for node in file.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions.append(node)
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and (names := _named(item.annotation) & typed):
                    fields["." + item.target.id] = names
                decorators = map(ast.unparse, getattr(item, "decorator_list", ()))
                is_property = any(decorator.endswith("property") for decorator in decorators)
                if is_property and (names := _named(item.returns) & typed):
                    fields["." + item.name] = names
    scopes = []
    for function in functions:
        known = {}
        for node in ast.walk(function):
            if isinstance(node, ast.arg) and (names := _named(node.annotation) & typed):
                known[node.arg] = names
            elif isinstance(node, ast.AnnAssign) and (names := _named(node.annotation) & typed):
                (known if isinstance(node.target, ast.Name) else fields)[_key(node.target)] = names
        for node in ast.walk(function):  # self.x = x, or y = x
            if isinstance(node, ast.Assign):
                targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets[:1]
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                for target, value in zip(targets, values):
                    if _key(value) in known:
                        (fields if isinstance(target, ast.Attribute) else known)[_key(target)] = known[_key(value)]
        scopes.append((function, known))
    for function, known in scopes:
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                used |= (known | fields).get(_key(node.func), set())
            elif isinstance(node, ast.Attribute):
                used |= (known | fields).get(_key(node.value), set())
    return used


def _touched(node: ast.AST) -> str | None:
    """Returns the plain name that a call calls, or of which an attribute is read."""
    base = node.func if isinstance(node, ast.Call) else node.value if isinstance(node, ast.Attribute) else None
    return base.id if isinstance(base, ast.Name) else None


def _key(node: ast.AST) -> str | None:
    """Returns `x` for a variable, `.x` for an attribute."""
    return node.id if isinstance(node, ast.Name) else f".{node.attr}" if isinstance(node, ast.Attribute) else None


def _named(annotation: ast.AST | None) -> set[str]:
    """Returns the types that a value itself may have, not those of what it contains."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _named(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.BinOp):
        return _named(annotation.left) | _named(annotation.right)
    if isinstance(annotation, ast.Subscript):
        is_optional = ast.unparse(annotation.value).endswith(("Optional", "Generic"))
        return _named(annotation.slice) if is_optional else _named(annotation.value)
    while isinstance(annotation, ast.Attribute):
        annotation = annotation.value
    return {annotation.id} if isinstance(annotation, ast.Name) else set()


_REPACK = "eagle_kernels.ops.linear.shared.repack"


def families_apart(house: House) -> Iterator[str]:
    """Op files import no other family; `ops/A/shared` is for A alone and what is built on it, but for constants, and
    what repacks weights."""
    for file in house.under("eagle_kernels"):
        own = family(file.module)
        for imported in file.imports:
            target, name = house.target(imported)
            other = family(target)
            where = f"{file.path}:{imported.line}"
            if own and target in ("eagle_kernels.ops", "eagle_kernels.ops.operators"):
                yield f"{where} imports the public functions, of which an op file must not know"
            elif own and other and other != own and not (BUILT_ON.get(own) == other and ".shared" in target):
                yield f"{where} imports {target}, which belongs to the family {other}"
            elif not own and other and ".shared" in target and not (name and name.isupper() or target == _REPACK):
                if file.module != "eagle_kernels.ops":
                    yield f"{where} imports {name or 'all'} of {target}, which only the family {other} may"


def primitives_are_shared(house: House) -> Iterator[str]:
    """A primitive serves at least two families of ops, directly or through other primitives."""
    users: dict[str, set[str]] = {}
    edges = {
        file.module: {house.target(imported)[0] for imported in file.imports}
        for file in house.under("eagle_kernels")
        if file.module.startswith(("eagle_kernels.ops.", "eagle_kernels.primitives."))
    }
    for module in edges:
        if family(module):
            reached = [module]
            for step in reached:
                reached += [target for target in edges.get(step, ()) if target in edges and target not in reached]
            for target in reached:
                users.setdefault(target, set()).add(family(module))
    for file in house.under("eagle_kernels"):
        if file.module.startswith("eagle_kernels.primitives.") and len(users.get(file.module, ())) < 2:
            served = ", ".join(sorted(users.get(file.module, ()))) or "none"
            yield f"{file.path}:1 serves fewer than two families of ops: {served}"


def family(module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if parts[:2] == ["eagle_kernels", "ops"] and len(parts) > 3 else None


def no_private_name_of_others(house: House) -> Iterator[str]:
    """The product and bench use no private name of another file: no `from x import _y`, no `x._y`."""
    for file in house.under("eagle_kernels", "reference", "bench"):
        foreign = {imported.bound for imported in file.imports if imported.module.split(".")[0] not in FOLDERS}
        for imported in file.imports:
            names = [*imported.module.split("."), imported.name or ""]
            if imported.module.split(".")[0] in FOLDERS and any(map(is_private, names)):
                yield f"{file.path}:{imported.line} imports {imported.module}.{imported.name or ''}"
        own = names_of(file.nodes)
        for node in file.nodes:
            if isinstance(node, ast.Attribute):
                base, name = node.value, node.attr
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
                base, name = node.args[0], getattr(node.args[1], "value", "")
            else:
                continue
            if not is_private(str(name)) or name in own or name in NAMED_TUPLE | OF_VLLM:
                continue
            is_self = isinstance(base, ast.Name) and base.id in ("self", "cls")
            if not is_self and root_of(base) not in foreign:
                yield f"{file.path}:{node.lineno} {ast.unparse(base)}.{name}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def names_of(nodes: list[ast.AST]) -> set[str]:
    """Names that a file defines: functions, classes, variables, fields and attributes of `self`."""
    names = set()
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _touched(node) in ("self", "cls"):
            names.add(node.attr)
    return names


def root_of(node: ast.AST) -> str | None:
    """Returns `a` of `a.b.c`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def device_calls_are_short(house: House) -> Iterator[str]:
    """Calls of @triton.jit functions pass at most eight arguments by position."""
    jitted = {
        (file.module, node.name)
        for file in house.under("eagle_kernels")
        for node in file.nodes
        if isinstance(node, ast.FunctionDef)
        and any(getattr(getattr(d, "func", d), "attr", "") == "jit" for d in node.decorator_list)
    }
    for file in house.under("eagle_kernels"):
        known = {name: (file.module, name) for module, name in jitted if module == file.module}
        known |= {imported.bound: house.target(imported) for imported in file.imports}
        for node in file.nodes:
            if not isinstance(node, ast.Call):
                continue
            called = known.get(_touched(node))
            if isinstance(node.func, ast.Attribute):  # a function of an imported module
                called = (known.get(_touched(node.func), ("",))[0], node.func.attr)
            has_star = any(isinstance(argument, ast.Starred) for argument in node.args)
            if called in jitted and (has_star or len(node.args) > MOST_POSITIONAL):
                number = "starred" if has_star else len(node.args)
                yield f"{file.path}:{node.lineno} {called[1]} with {number} positional arguments"


def files_are_short(house: House) -> Iterator[str]:
    """A file of the product or of the references has at most 400 lines."""
    for file in house.under("eagle_kernels", "reference"):
        lines = file.text.count("\n")
        if lines > MOST_LINES:
            yield f"{file.path}:{lines} has {lines} lines, {MOST_LINES} at most"


def references_are_backends_only(house: House) -> Iterator[str]:
    """Product code takes no value of a reference, else a mistake could hide in both."""
    for file in house.under("eagle_kernels"):
        for imported in file.imports:
            target, _ = house.target(imported)
            if target.split(".")[0] == "reference":
                if imported.module.split(".")[0] == "reference":
                    yield f"{file.path}:{imported.line} imports {target}, not through the package"
                elif file.path not in READ_REFERENCES:
                    yield f"{file.path}:{imported.line} imports {target}"
        for node in file.nodes:
            is_import = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")
            if is_import and "reference" in ast.unparse(node) and file.path not in READ_REFERENCES:
                yield f"{file.path}:{node.lineno} {ast.unparse(node)}"


def product_knows_no_tests(house: House) -> Iterator[str]:
    """The product imports neither op_tests nor bench, nor these each other; only tests of bench import bench."""
    for file in house.files.values():
        folder = file.path.split("/")[0]
        banned = {"bench": {"op_tests"}, "op_tests": {"bench"}}.get(folder, {"bench", "op_tests"})
        if file.path.startswith(TESTS_OF_BENCH):
            continue
        for imported in file.imports:
            if imported.module.split(".")[0] in banned:
                yield f"{file.path}:{imported.line} imports {imported.module}"


def tests_stand_alone(house: House) -> Iterator[str]:
    """No file imports a test module: what two need is in a helper module."""
    for file in house.under("op_tests"):
        for imported in file.imports:
            target, _ = house.target(imported)
            if target in house.files and target.rpartition(".")[2].startswith("test_"):
                yield f"{file.path}:{imported.line} imports {target}"


def tensors_name_their_kind(house: House) -> Iterator[str]:
    """Tensors are made on a device and of a dtype that the call names, whatever the process's defaults are.

    A module's own weights are made where its caller wants them, and examples are programs of their own.
    """
    for file in house.under("eagle_kernels", "reference"):
        if file.path.startswith("eagle_kernels/examples/"):
            continue
        weights = {
            id(inner)
            for node in file.nodes
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".Parameter", ".register_buffer"))
            for inner in ast.walk(node)
        }
        for node in file.nodes:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or id(node) in weights:
                continue
            name, given = node.func.attr, {keyword.arg for keyword in node.keywords}
            if _touched(node.func) != "torch" or name not in FACTORIES:
                continue
            if None in given:  # `**options`, which may hold what a dictionary of the function around it has
                functions = [scope for scope in file.nodes if isinstance(scope, ast.FunctionDef)]
                around = [scope for scope in functions if scope.lineno <= node.lineno <= scope.end_lineno]
                nodes = (inner for scope in around for inner in ast.walk(scope))
                given |= {each.value for each in nodes if isinstance(each, ast.Constant)}
            is_counting = name == "full" and ast.unparse(node.args[1]).lstrip("-").isdigit()  # of int64, always
            missing = {"device"} | ({"dtype"} if name not in OWN_DTYPE and not is_counting else set())
            if not missing <= given:
                yield f"{file.path}:{node.lineno} torch.{name} names no {' and no '.join(sorted(missing - given))}"


def numbers_are_no_truths(house: House) -> Iterator[str]:
    """A number that may be None is compared with None, and never taken as a truth: 0 is a number.

    These are the arguments, variables and fields that are annotated so.
    """
    files, annotations = [*house.under("eagle_kernels")], {}
    classes = (node for file in files for node in file.nodes if isinstance(node, ast.ClassDef))
    for item in (item for each in classes for item in each.body):
        if isinstance(item, (ast.AnnAssign, ast.FunctionDef)):
            name = item.name if isinstance(item, ast.FunctionDef) else _key(item.target)
            annotations.setdefault(f".{name}", []).append(getattr(item, "annotation", getattr(item, "returns", None)))
    fields = {name for name, kinds in annotations.items() if all(map(is_optional_number, kinds))}
    for file in files:
        for function in (node for node in file.nodes if isinstance(node, ast.FunctionDef)):
            nodes, known = [*ast.walk(function)], {*fields}
            for node in nodes:
                if isinstance(node, (ast.arg, ast.AnnAssign)) and is_optional_number(node.annotation):
                    known.add(node.arg if isinstance(node, ast.arg) else _key(node.target))
            for tested in (tested for node in nodes for tested in truths(node)):
                if _key(tested) in known and (_key(tested), file.path) not in ZERO_IS_NONE:
                    yield f"{file.path}:{tested.lineno} {ast.unparse(tested)} is None or a number, and 0 is one"


def is_optional_number(annotation: ast.AST | None) -> bool:
    if not isinstance(annotation, ast.BinOp):
        return False
    kinds = set(ast.unparse(annotation).split(" | "))
    return "None" in kinds and bool(kinds & {"int", "float"}) and kinds <= {"int", "float", "None"}


def truths(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what a node takes as truths."""
    conditions = [node.test] if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)) else []
    conditions += node.ifs if isinstance(node, ast.comprehension) else []
    conditions += node.values[:-1] if isinstance(node, ast.BoolOp) else []
    conditions += [node.operand] if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else []
    for each in conditions:  # the parts of a chain are nodes of their own, but for the last one
        while isinstance(each, ast.BoolOp):
            each = each.values[-1]
        yield each


LAWS = (
    tensors_name_their_kind, no_import_upward, engine_imports_down, no_circle, families_apart, primitives_are_shared,
    no_private_name_of_others, device_calls_are_short, files_are_short, references_are_backends_only,
    product_knows_no_tests, tests_stand_alone, numbers_are_no_truths,
)  # fmt: skip


def main() -> int:
    house = House.of_folder(ROOT)
    violations = [f"{law.__name__}: {violation}" for law in LAWS for violation in law(house)]
    print("\n".join(violations))
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main())
