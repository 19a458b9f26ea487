"""Who may import whom, and what stays out of the library: the rules of the house, read off the syntax trees."""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from op_tests import architecture
from op_tests.architecture import ROOT, House

PACKAGE = ROOT / "eagle_kernels"
HEAVY = {"transformers", "tokenizers", "safetensors", "matplotlib", "tqdm"}  # extras: imported inside functions only
TOP_LEVEL = {"eagle_kernels", "reference", "op_tests", "bench"}


@functools.cache
def house() -> House:
    return House.of_folder(ROOT)


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "/eagle_kernels/reference/" not in str(path))


KERNEL_FILES = sources(PACKAGE / "ops") + sources(PACKAGE / "primitives")
# of which the caller says by prefetch_* that the kernel before does not write it
READ_EARLY = {"few_rows": "weight", "head_tiles": "weight", "many_rows": "weight", "quantised": "weight"}
# kernels that read before they wait what the kernel directly before them, of the same op, never writes
READ_BEFORE = {"down": {"weight"}, "merge_shares": {"lengths", "qo_indptr"}}


@functools.cache
def files() -> dict[Path, architecture.File]:
    return {ROOT / file.path: file for file in house().files.values()}


def nodes_of(path: Path, *kinds: type) -> list:
    """The nodes of a file's syntax tree that are of these kinds."""
    return [node for node in files()[path].nodes if isinstance(node, kinds)]


def imported_roots(path: Path, *, top_level_only: bool = False) -> set[str]:
    """First components of everything that a file imports."""
    module, *_ = files()[path].nodes
    lines = {node.lineno for node in module.body} if top_level_only else None
    return {i.module.split(".")[0] for i in files()[path].imports if lines is None or i.line in lines}


@pytest.mark.parametrize("law", architecture.LAWS, ids=lambda law: law.__name__)
def test_the_house_obeys(law):
    violations = list(law(house()))
    if violations:
        pytest.fail("\n".join([law.__name__, law.__doc__, *violations]), pytrace=False)


# a law, a house that breaks it, and where
BROKEN = {
    "numbers": (architecture.numbers_are_no_truths, {
        "eagle_kernels/a.py": (
            "class Options:\n"
            "    limit: int | None = None\n"
            "    name: str | None = None\n"
            "def run(options, top_p: float | None, flag: bool | None, top_k: int = 0):\n"
            "    use(top_p or None, flag or top_p, top_k or None, options.name or 'a')\n"
            "    if flag and not options.limit: return [each for each in range(9) if top_p]\n"
            "    count: int | None = None\n"
            "    while flag and (top_k or count): pass\n"
            "    return top_p if top_p is not None and options.limit is None else flag and count\n"
        ),
    }, [f"eagle_kernels/a.py:{line}" for line in (5, 6, 6, 8)]),
    "tensors": (architecture.tensors_name_their_kind, {
        "eagle_kernels/engine/step.py": (
            "torch.empty(2, device=device)\n"
            "torch.tensor([1], dtype=torch.int64)\n"
            "torch.arange(3)\n"
            "torch.full((2,), 0.5, device=device)\n"
            "torch.full((2,), -1, device=device), torch.arange(3, device=device)\n"
            "def make(**more):\n"
            "    options = {'device': device, 'dtype': dtype}\n"
            "    return torch.zeros(3, **options)\n"
            "torch.zeros(3, dtype=dtype, **more)\n"
            "self.weight = nn.Parameter(torch.ones(3))\n"
            "tensor.new_zeros(3), torch.zeros_like(tensor), numpy.zeros(3)"
        ),
        "eagle_kernels/examples/chat.py": "torch.zeros(3)",
        "op_tests/toys.py": "torch.zeros(3)",
        "reference/a.py": "torch.as_tensor(3)",
    }, [*(f"eagle_kernels/engine/step.py:{line}" for line in (1, 2, 3, 4, 9)), "reference/a.py:1"]),
    "upward": (architecture.no_import_upward, {
        "eagle_kernels/__init__.py": "from . import engine, tools",
        "eagle_kernels/raw.py": "from .engine import step",
        "eagle_kernels/__main__.py": "from .tools import view",
        "eagle_kernels/tools/__init__.py": "",
        "eagle_kernels/runtime/check.py": "from ..ops import build_tree",
        "eagle_kernels/ops/__init__.py": "from ..runtime import check",
        "eagle_kernels/engine/step.py": "def run():\n    import eagle_kernels.tools.view\n    from .. import raw",
        "eagle_kernels/tools/view.py": "from ..engine import step\nfrom ..integrations import aiter",
        "eagle_kernels/integrations/aiter.py": "import torch\nimport eagle_kernels",
    }, [
        "eagle_kernels/runtime/check.py:1", "eagle_kernels/__init__.py:1", "eagle_kernels/engine/step.py:2",
        "eagle_kernels/engine/step.py:3", "eagle_kernels/tools/view.py:2",
    ]),
    "engine": (architecture.engine_imports_down, {
        "eagle_kernels/engine/__init__.py": "from .serve.stream import Stream",
        "eagle_kernels/engine/inference.py": "from .config.options import Options\nfrom .generation import run",
        "eagle_kernels/engine/generation.py": "from importlib import import_module\nimport_module('.' + name)",
        "eagle_kernels/engine/serve/stream.py": "from ..step import plan\nfrom .. import inference",
        "eagle_kernels/engine/step/plan.py": "def run():\n    from ..serve import stream\n    __import__(name)",
        "eagle_kernels/engine/config/options.py": "from ..step.plan import Plan\nfrom . import given",
        "eagle_kernels/tools/view.py": "from ..engine.step import plan\nimport_module(name)",
    }, [
        "eagle_kernels/engine/generation.py:2", "eagle_kernels/engine/serve/stream.py:2",
        "eagle_kernels/engine/step/plan.py:2", "eagle_kernels/engine/step/plan.py:3",
        "eagle_kernels/engine/config/options.py:1",
    ]),
    "circle": (architecture.no_circle, {
        "eagle_kernels/a.py": "from .b import run",
        "eagle_kernels/b.py": "def run():\n    from .c import go",
        "eagle_kernels/c.py": "from . import a",
        "eagle_kernels/d.py": "from . import a",
    }, ["eagle_kernels/a.py:1", "eagle_kernels/b.py:2", "eagle_kernels/c.py:1"]),
    "families": (architecture.families_apart, {
        "eagle_kernels/ops/__init__.py": "from .tree.shared.masks import Mode",
        "eagle_kernels/ops/tree/shared/masks.py": "MODE = 1",
        "eagle_kernels/ops/tree/build.py": "from .shared.masks import MODE\nfrom ..verify.walk import Walk",
        "eagle_kernels/ops/verify/walk.py": "from .. import build\nfrom ..tree.shared import masks",
        "eagle_kernels/engine/step.py": (
            "from ..ops.tree.build import Output\n"
            "from ..ops.tree.shared.masks import MODE\n"
            "from ..ops.tree.shared.masks import pack"
        ),
    }, [
        "eagle_kernels/ops/tree/build.py:2", "eagle_kernels/ops/verify/walk.py:1",
        "eagle_kernels/ops/verify/walk.py:2", "eagle_kernels/engine/step.py:3",
    ]),
    "primitives": (architecture.primitives_are_shared, {
        "eagle_kernels/primitives/paging.py": "from .strides import offset",
        "eagle_kernels/primitives/strides.py": "",
        "eagle_kernels/primitives/unused.py": "",
        "eagle_kernels/ops/kv/write.py": "from ...primitives.paging import page",
        "eagle_kernels/ops/kv/move.py": "from ...primitives import paging",
        "eagle_kernels/ops/nn/norm.py": "from ...primitives.strides import offset",
    }, ["eagle_kernels/primitives/paging.py:1", "eagle_kernels/primitives/unused.py:1"]),
    "private": (architecture.no_private_name_of_others, {
        "eagle_kernels/a.py": "import torch\nfrom .b import _run, Row\nfrom . import b\ntorch._C.call()\nb._run()",
        "eagle_kernels/b.py": "class Row:\n    def __init__(self, other):\n        self._x = other._x",
        "reference/c.py": "def f(self, row):\n    self._y\n    row._replace(a=1)\n    row.__class__\n    row._y",
        "bench/d.py": "def f(engine, _):\n    engine._scheduler.step()\n    getattr(engine, '_lock')",
        "op_tests/e.py": "from eagle_kernels.b import _run",
    }, ["eagle_kernels/a.py:2", "eagle_kernels/a.py:5", "reference/c.py:5", "bench/d.py:2", "bench/d.py:3"]),
    "device calls": (architecture.device_calls_are_short, {
        "eagle_kernels/primitives/tree.py": (
            "@triton.jit\ndef walk(a): pass\n@triton.jit(noinline=True)\ndef go(a): pass"
        ),
        "eagle_kernels/ops/a.py": (
            "from ..primitives import tree\nfrom ..primitives.tree import walk as stroll, go\n"
            "def host(*a): pass\nhost(1, 2, 3, 4, 5, 6, 7, 8, 9)\n"
            "stroll(1, 2, 3, 4, 5, 6, 7, 8, nine=9)\nstroll(1, 2, 3, 4, 5, 6, 7, 8, 9)\n"
            "go(1, 2, 3, 4, 5, 6, 7, 8, 9)\ntree.walk(1, 2, 3, 4, 5, 6, 7, 8, 9)\ngo(1, *a)"
        ),
    }, [f"eagle_kernels/ops/a.py:{line}" for line in (6, 7, 8, 9)]),
    "long files": (architecture.files_are_short, {
        "reference/a.py": "\n" * 400, "reference/b.py": "\n" * 401, "bench/c.py": "\n" * 401,
    }, ["reference/b.py:401"]),
    "references": (architecture.references_are_backends_only, {
        "eagle_kernels/ops/operators.py": "import_module('..reference.ops.' + path)\nimport reference.tree",
        "eagle_kernels/engine/step.py": "from ..reference.tree import depth\nimport_module('..reference.tree')",
        "reference/tree.py": "",
        "reference/__init__.py": "",
    }, ["eagle_kernels/ops/operators.py:2", "eagle_kernels/engine/step.py:1", "eagle_kernels/engine/step.py:2"]),
    "bench and tests": (architecture.product_knows_no_tests, {
        "eagle_kernels/a.py": "import bench.run",
        "reference/b.py": "from op_tests import harness",
        "bench/run.py": "def main():\n    from op_tests.harness import interpreter",
        "op_tests/test_bench.py": "from bench import run",
        "op_tests/lab/test_page.py": "from bench.lab import page",
        "op_tests/conftest.py": "from bench.harness import timing",
    }, ["eagle_kernels/a.py:1", "reference/b.py:1", "bench/run.py:2", "op_tests/conftest.py:1"]),
    "test modules": (architecture.tests_stand_alone, {
        "op_tests/engine/test_a.py": "from .toys import make\nfrom op_tests.engine import test_b",
        "op_tests/engine/test_b.py": "from .test_a import one",
        "op_tests/engine/toys.py": "from .test_a import one",
    }, ["op_tests/engine/test_a.py:2", "op_tests/engine/test_b.py:1", "op_tests/engine/toys.py:1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_law_sees_who_breaks_it(name):
    law, texts, expected = BROKEN[name]
    assert sorted(violation.partition(" ")[0] for violation in law(House(texts))) == sorted(expected)


def test_every_law_is_seen_broken():
    assert {law for law, _, _ in BROKEN.values()} == set(architecture.LAWS)


USES_OF_A_TYPE = {
    "called": ("def f():\n    return Engine()", True),
    "read": ("def f():\n    return Engine.limit", True),
    "annotates": ("def f(engine: Engine, others: list[Engine]) -> Engine | None:\n    return engine", False),
    "parameter": ("def f(engine: Engine | None):\n    engine.step()", True),
    "parameter in quotes": ("def f(engine: 'Engine'):\n    return engine.limit", True),
    "parameter of another": ("def f(engine: Engine):\n    pass\ndef g(engine):\n    engine.step()", False),
    "variable": ("def f(x):\n    engine: Engine = x\n    engine.step()", True),
    "attribute": ("class A:\n    def __init__(self, engine: Engine):\n        self.engine = engine\n"
                  "    def f(self):\n        self.engine.step()", True),
    "field": ("class A:\n    engine: Engine\ndef f(a):\n    a.engine.step()", True),
    "property": ("class A:\n    @property\n    def engine(self) -> Engine:\n        pass\n"
                 "    def f(self):\n        self.engine.step()", True),
    "field that is handed on": ("class A:\n    engine: Engine\ndef f(a):\n    return a.engine", False),
}  # fmt: skip


@pytest.mark.parametrize("name", USES_OF_A_TYPE)
def test_an_import_for_types_counts_if_it_is_used(name):
    text, counts = USES_OF_A_TYPE[name]
    head = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .engine import Engine\n"
    texts = {"eagle_kernels/stream.py": head + text, "eagle_kernels/engine.py": "from .stream import f"}
    assert bool(list(architecture.no_circle(House(texts)))) == counts


def test_references_stand_alone():
    """torch and the standard library: a mistake shared with the kernels could not show."""
    for path in sources(ROOT / "reference"):
        foreign = imported_roots(path) - {"torch", "reference", "__future__"} - set(sys.stdlib_module_names)
        assert not foreign, f"{path} imports {foreign}"


def test_extras_are_imported_lazily():
    for path in sources(PACKAGE):
        roots = imported_roots(path, top_level_only=True)
        if path.parent != PACKAGE / "examples":  # an example imports what it shows, and nothing imports an example
            assert not roots & HEAVY, f"{path} imports {roots & HEAVY} at the top"
        if path != PACKAGE / "runtime" / "language.py":
            assert "triton" not in roots, f"{path}: triton comes from runtime/language.py, which can do without it"


def test_adapters_import_nothing_of_the_project_they_imitate():
    for path in sources(PACKAGE / "integrations"):
        allowed = {"eagle_kernels", "torch", "__future__"} | set(sys.stdlib_module_names)
        if path.stem == "transformers":  # imitates nothing: it tells transformers of our attention
            allowed.add("transformers")
        if path.parent.name in ("sglang", "vllm"):  # a plug-in, which the server imports
            allowed.add(path.parent.name)
        assert imported_roots(path) <= allowed, path


# refuses tensors that are not on the CPU, where grammars live
HOST_FUNCTIONS = {PACKAGE / "ops" / "token_bitmask.py"}


def test_ops_do_not_wait_for_the_device():
    for path in set(sources(PACKAGE / "ops")) - HOST_FUNCTIONS:
        for node in nodes_of(path, ast.Attribute):
            assert node.attr not in ("item", "tolist", "cpu", "synchronize"), f"{path}:{node.lineno} .{node.attr}"


def test_kernels_live_below_the_engine():
    for path in sources(PACKAGE / "engine") + sources(PACKAGE / "integrations"):
        assert "jit" not in {node.attr for node in nodes_of(path, ast.Attribute)}, f"{path} holds a kernel"


# instructions of NVIDIA's beside plain operations that make the same bits
HAS_ASSEMBLY = {PACKAGE / "primitives" / "unpacking.py"}


# collectives, edits of the environment, runtime autotuning, inline assembly, the network
SIDE_EFFECTS = ("torch.distributed", "os.environ[", "putenv", "autotune(", "inline_asm", "do_bench", "urllib",
                "http.client", "import socket", "import requests", "huggingface_hub")  # fmt: skip


def test_no_side_effects_of_the_library():
    for path in sources(PACKAGE):
        text = files()[path].text
        if path in HAS_ASSEMBLY:
            assert "IS_ASSEMBLED" in text
            text = text.replace("inline_asm_elementwise", "")
        for banned in SIDE_EFFECTS:
            assert banned not in text, f"{path} contains {banned}"


RUNS_CODE = ("weights_only", "trust_remote_code")
SUSPECTS = r"\b(eval|exec|compile|system|load)\(|pickle|marshal|dill|joblib|trust_remote_code|AutoModel|AutoConfig"


def test_no_code_of_a_file_is_run():
    """What SECURITY.md says: pickles are read as weights alone, and a model's own Python is not trusted."""
    seen = 0
    for path in sources(PACKAGE) + sources(ROOT / "bench"):
        for node in nodes_of(path, ast.Call) if re.search(SUSPECTS, files()[path].text) else ():
            name, place = ast.unparse(node.func), f"{path}:{node.lineno}"
            told = {each.arg: ast.unparse(each.value) for each in node.keywords if each.arg in RUNS_CODE}
            is_ours = path.name == "recorded.py" and name == "eval"  # of places of arguments, integers alone
            assert is_ours or name not in ("eval", "exec", "compile", "os.system", "yaml.load"), place
            assert name.partition(".")[0] not in ("pickle", "marshal", "dill", "joblib"), place
            if name == "torch.load":
                assert told == {"weights_only": "True"}, place
            elif name.startswith(("AutoModel", "AutoConfig")):
                assert told == {"trust_remote_code": "False"}, place
            else:  # the plug-in hands on what SGLang was told
                assert told in ({}, {"trust_remote_code": "trust_remote_code"}), place
                continue
            seen += 1
    assert seen >= 4, "the rules above look for names that are not there"


def test_dots_name_their_precision():
    for path in KERNEL_FILES:
        for node in nodes_of(path, ast.Call):
            if getattr(node.func, "attr", None) == "dot":
                assert "input_precision" in {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno}"


def test_launches_are_by_keyword():
    """`launch(op, kernel, grid, name=value, ...)`: an argument list of twenty is not to be counted."""
    for path in KERNEL_FILES:
        for node in nodes_of(path, ast.Call):
            if getattr(node.func, "id", None) == "launch":
                assert len(node.args) == 3, f"{path}:{node.lineno}"


def named_pointers(kernel: ast.FunctionDef, statements: list[ast.stmt]) -> set[str]:
    """Pointers, fields of bundles, and bundles handed on: parameters without a type, of which fields are read."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    untyped = {parameter.arg for parameter in kernel.args.args if parameter.annotation is None}
    methods = {id(node.func) for node in ast.walk(kernel) if isinstance(node, ast.Call)}
    fields = [
        node
        for node in ast.walk(kernel)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in untyped and id(node) not in methods
    ]
    bundles, read = {node.value.id for node in fields}, {id(node.value) for node in fields}
    named = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in read}
    pointers = {name for name in named if name.endswith("_ptr") or name in bundles}
    return pointers | {node.attr for node in nodes if node in fields}


def stores(statements: list[ast.stmt]) -> set[str]:
    """Names of the methods called that write memory."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    called = {node.func.attr for node in nodes if isinstance(node, ast.Call) and hasattr(node.func, "attr")}
    return {name for name in called if "store" in name or "atomic" in name}


def kernels() -> Iterator[tuple[str, str, ast.FunctionDef]]:
    """(the name of its file, its place, its definition) of each kernel."""
    for path in KERNEL_FILES:
        for function in nodes_of(path, ast.FunctionDef):
            if function.name.endswith("_kernel"):
                yield path.stem, f"{path}:{function.lineno}", function


def test_kernels_first_wait_for_the_kernel_before():
    """They may start while it runs (primitives/dependent_launch.py), and read early what they are told to prefetch."""
    for stem, place, function in kernels():
        body = function.body[1:] if ast.get_docstring(function) else function.body
        first, *others = [ast.unparse(statement) for statement in body]
        if stem in READ_BEFORE:
            until = 1 + others.index("await_predecessor(ENABLE_PDL)")
            assert named_pointers(function, body[:until]) == READ_BEFORE[stem], place
            assert not stores(body[:until]), place
            continue
        if stem not in READ_EARLY:
            assert first == "await_predecessor(ENABLE_PDL)", place
            continue
        told = f"PREFETCH_{READ_EARLY[stem].upper()}"
        assert first == f"await_predecessor(ENABLE_PDL and (not {told}))", place
        until = 1 + others.index(f"await_predecessor(ENABLE_PDL and {told})")
        pointers = named_pointers(function, body[1:until])
        named = {pointer.split("_")[0] for pointer in pointers}
        assert named == {READ_EARLY[stem]}, f"{place} reads {pointers} early"
        assert not stores(body[1:until]), place


def test_top_level_holds_nothing_else():
    folders = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")}
    made = ("build", "dist", "data", "__pycache__")
    generated = {name for name in folders if name.endswith(".egg-info") or name in made}
    assert folders - generated == TOP_LEVEL
