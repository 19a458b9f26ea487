"""Who may import whom, and what stays out of the library: the rules of the house, read off the syntax trees."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "eagle_kernels"
LAYERS = (
    "runtime",
    "primitives",
    "ops",
    "engine",
    "tools",
    "integrations",
)  # each may import itself and those before it
HEAVY = {"transformers", "tokenizers", "safetensors", "matplotlib", "tqdm"}  # extras: imported inside functions only
TOP_LEVEL = {"eagle_kernels", "reference", "op_tests", "bench"}


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "/eagle_kernels/reference/" not in str(path))


KERNEL_FILES = sources(PACKAGE / "ops") + sources(PACKAGE / "primitives")
READ_EARLY = {
    "linear_decode": "weight"
}  # of which the caller says by prefetch_* that the kernel before does not write it


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(path: Path, package_root: Path = ROOT, *, top_level_only: bool = False) -> set[str]:
    """Absolute names of everything a file imports, relative imports resolved."""
    package = list(path.relative_to(package_root).with_suffix("").parts)[:-1]
    tree = parse(path)
    nodes = tree.body if top_level_only else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            found.add(module)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "eagle_kernels" and len(parts) > 1 and parts[1] in LAYERS else None


def calls_and_attributes(tree: ast.Module):
    return (node for node in ast.walk(tree) if isinstance(node, (ast.Call, ast.Attribute)))


@pytest.mark.parametrize("path", sources(PACKAGE), ids=lambda p: str(p.relative_to(ROOT)))
def test_layers_import_downwards_only(path):
    own = layer_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    for module in imported_modules(path):
        assert module.split(".")[0] not in ("op_tests", "bench"), f"{path} imports {module}"
        assert module.split(".")[0] != "reference", f"{path} imports {module}, not through the package"
        other = layer_of(module)
        if own and other:
            assert LAYERS.index(other) <= LAYERS.index(own), f"{own} imports {module}"


@pytest.mark.parametrize("path", sources(ROOT / "reference"), ids=lambda p: str(p.relative_to(ROOT)))
def test_references_stand_alone(path):
    """torch and the standard library: a mistake shared with the kernels could not show."""
    for module in imported_modules(path):
        allowed = {"torch", "reference", "__future__"} | set(sys.stdlib_module_names)
        assert module.split(".")[0] in allowed, f"{path} imports {module}"


@pytest.mark.parametrize("path", sources(PACKAGE), ids=lambda p: str(p.relative_to(ROOT)))
def test_extras_are_imported_lazily(path):
    roots = {module.split(".")[0] for module in imported_modules(path, top_level_only=True)}
    assert not roots & HEAVY, f"{path} imports {roots & HEAVY} at the top"
    if path != PACKAGE / "runtime" / "language.py":
        assert "triton" not in roots, f"{path}: triton comes from runtime/language.py, which can do without it"


@pytest.mark.parametrize("path", sources(PACKAGE / "integrations"), ids=lambda p: p.stem)
def test_adapters_import_nothing_of_the_project_they_imitate(path):
    allowed = {"eagle_kernels", "torch", "__future__"} | set(sys.stdlib_module_names)
    if path.stem == "transformers":  # imitates nothing: it tells transformers of our attention
        allowed.add("transformers")
    for module in imported_modules(path):
        assert module.split(".")[0] in allowed


@pytest.mark.parametrize("path", sources(PACKAGE / "ops"), ids=lambda p: str(p.relative_to(ROOT)))
def test_ops_do_not_wait_for_the_device(path):
    for node in calls_and_attributes(parse(path)):
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("item", "tolist", "cpu", "synchronize"), f"{path}:{node.lineno} .{node.attr}"


def test_kernels_live_below_the_engine():
    for path in sources(PACKAGE / "engine") + sources(PACKAGE / "integrations"):
        attributes = {node.attr for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute)}
        assert "jit" not in attributes, f"{path} holds a kernel"


@pytest.mark.parametrize("path", sources(PACKAGE), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_side_effects_of_the_library(path):
    """No collectives, no edits of the environment, no runtime autotuning, no inline assembly."""
    text = path.read_text(encoding="utf-8")
    for banned in ("torch.distributed", "os.environ[", "putenv", "autotune(", "inline_asm", "do_bench"):
        assert banned not in text, f"{path} contains {banned}"


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda p: p.stem)
def test_dots_name_their_precision(path):
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "dot":
            assert "input_precision" in {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_launches_are_by_keyword(path):
    """`launch(op, kernel, grid, name=value, ...)`: an argument list of twenty is not to be counted."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "launch":
            assert len(node.args) == 3, f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_kernels_first_wait_for_the_kernel_before(path):
    """They may start while it runs (primitives/dependent_launch.py), and read early what they are told to prefetch."""
    for function in ast.walk(parse(path)):
        if not isinstance(function, ast.FunctionDef) or not function.name.endswith("_kernel"):
            continue
        body = function.body[1:] if ast.get_docstring(function) else function.body
        first, *others = [ast.unparse(statement) for statement in body]
        if path.stem not in READ_EARLY:
            assert first == "await_predecessor(ENABLE_PDL)", f"{path}:{function.lineno}"
            continue
        told = f"PREFETCH_{READ_EARLY[path.stem].upper()}"
        assert first == f"await_predecessor(ENABLE_PDL and (not {told}))", f"{path}:{function.lineno}"
        until = 1 + others.index(f"await_predecessor(ENABLE_PDL and {told})")
        early = [node for statement in body[1:until] for node in ast.walk(statement)]
        pointers = {node.id for node in early if isinstance(node, ast.Name) and node.id.endswith("_ptr")}
        named = {pointer.split("_")[0] for pointer in pointers}
        assert named == {READ_EARLY[path.stem]}, f"{path}:{function.lineno} reads {pointers} early"
        called = {node.func.attr for node in early if isinstance(node, ast.Call) and hasattr(node.func, "attr")}
        assert not {name for name in called if "store" in name or "atomic" in name}, f"{path}:{function.lineno}"


def test_top_level_holds_nothing_else():
    folders = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")}
    generated = {name for name in folders if name.endswith(".egg-info") or name in ("build", "dist", "__pycache__")}
    assert folders - generated == TOP_LEVEL


def run_python(code: str, **environment) -> subprocess.CompletedProcess:
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**clean, **environment}, capture_output=True, text=True
    )


def test_importing_touches_no_device():
    code = "import torch, eagle_kernels; assert not torch.cuda.is_initialized()"
    assert run_python(code).returncode == 0


EVERY_OP_WITHOUT_TRITON = """
import importlib, sys
sys.modules["triton"] = None
from op_tests.harness.ahead_of_time import PATHS
for path in PATHS:
    category, _, name = path.rpartition(".")
    launcher = getattr(importlib.import_module("eagle_kernels.ops." + path), name)
    _, values = next(importlib.import_module(f"op_tests.ops.{category}.test_{name}").ahead_of_time_cases())
    try:
        launcher(**values)
    except RuntimeError as error:
        assert str(error).endswith(f"{name}: the triton backend needs the package triton, which is not installed")
        print(name)
"""


def test_every_launcher_says_that_triton_is_missing():
    result = run_python(EVERY_OP_WITHOUT_TRITON)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) == len(list((PACKAGE / "ops").glob("*/[!_]*.py")))


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it now fails, as on a machine without it
import torch, eagle_kernels
logits = torch.tensor([[0.0, 2.0, 1.0]])
one = torch.ones(1)
values = (logits, one.long(), one.long(), 0 * one)
print(eagle_kernels.sample_from_logits(*values).tolist())
try:
    eagle_kernels.raw.sample_from_logits(*values)
except RuntimeError as error:
    print(error)
"""


def test_works_without_triton():
    """References run; a kernel launch says in one line what is missing."""
    result = run_python(WITHOUT_TRITON)
    assert result.returncode == 0, result.stderr
    tokens, message = result.stdout.splitlines()
    assert tokens == "[1]"
    assert message == (
        "eagle_kernels.sample_from_logits: the triton backend needs the package triton, which is not installed"
    )


def test_a_forced_backend_is_obeyed_or_refused():
    code = (
        "import torch, eagle_kernels as ek; node = torch.zeros(1, 1, dtype=torch.int64)\n"
        "ek.verify_tree_greedy(node, node, node - 1, node - 1, node, spec_steps=0)"
    )
    refused = run_python(code, EAGLE_KERNELS_BACKEND="triton")
    assert "verify_tree_greedy: the triton backend cannot run on cpu tensors" in refused.stderr
    assert "must be 'reference' or 'triton', got 'cuda'" in run_python(code, EAGLE_KERNELS_BACKEND="cuda").stderr
    assert run_python(code, EAGLE_KERNELS_BACKEND="reference").returncode == 0
    assert run_python(code, EAGLE_KERNELS_BACKEND="triton", TRITON_INTERPRET="1").returncode == 0
