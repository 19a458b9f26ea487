"""Type checkers accept what users write, see what is wrong, and know the type of each result, which is the true one."""

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import typing
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import is_typeddict

import eagle_kernels
from eagle_kernels.engine.models.loading import demo_pair
from op_tests import calls_of_the_engine
from op_tests.harness.typed import fields_of, is_of, wrong_fields

ROOT = Path(__file__).parent.parent
README_EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
# the public ones of CONTRIBUTING.md; those of SGLang's plug-in are read by SGLang alone
MODULES = ("", ".ops", ".raw", ".types", ".engine", ".engine.models.loading", ".engine.models.protocol",
           *(f".integrations.{name}" for name in ("aiter", "sgl_kernel", "sglang_cache_locs", "sglang_elementwise",
                                                  "sglang_kv_indices", "transformers")))  # fmt: skip

# types of fields that are the engine's own
ENGINE_OWN = {
    "AuxLayers", "Batch", "Committed", "Features", "HeadConfig", "Proposal", "Scores", "Session", "StopStrings",
}  # fmt: skip

WRONG = """\
import torch

import eagle_kernels as ek

tree = ek.build_tree(1, 2, 3, 4, 5, topk="2", spec_steps=3, num_verify_tokens=5)
print(tree.no_such_field)
ek.rms_norm(torch.ones(1, 4))
"""


def public() -> Iterator[tuple[str, object]]:
    """Yields every public function and class with the path of its name."""
    for suffix in MODULES:
        module = importlib.import_module("eagle_kernels" + suffix)
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        for name in getattr(module, "__all__", own):
            value = getattr(module, name)
            if callable(value) and not name.startswith("_"):
                yield f"{module.__name__}.{name}", value


def calls_of_all_ops() -> str:
    """Returns a program that calls every op with an argument of every kind and reads every field of what it returns."""
    values = {"torch.Tensor": "t", "int": "4", "float": "0.5", "bool": "True", "str": '"text"'}
    lines = ["import torch", "import eagle_kernels as ek", "", "def tensors(t: torch.Tensor) -> list[torch.Tensor]:"]
    lines.append("    found: list[torch.Tensor] = []")
    for name in (*eagle_kernels.ops.OPS, "verify_tree"):
        function = getattr(eagle_kernels, name)
        given = []
        for parameter in inspect.signature(function).parameters.values():
            kind = str(parameter.annotation).removesuffix(" | None")
            if parameter.name != "out":
                by_name = "" if parameter.kind is parameter.POSITIONAL_OR_KEYWORD else f"{parameter.name}="
                given.append(by_name + values[kind])
        call, result = f"ek.{name}({', '.join(given)})", typing.get_type_hints(function)["return"]
        if result is type(None):
            lines.append(f"    {call}")
            continue
        lines.append(f"    {name} = {call}")
        fields = [f"{name}.{field}" for field in getattr(result, "_fields", ())] or [name]
        lines.append(f"    found += [{', '.join(fields)}]")
    return "\n".join([*lines, "    return found", ""])


def members(cls: type) -> list[str]:
    """Returns the public names that a class of ours defines, and its special methods that return what callers see."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("eagle_kernels") and not is_typeddict(base)]
    names = {name for base in ours for name in (*vars(base), *inspect.get_annotations(base))}
    special = {"__next__", "__anext__", "__getitem__", "__call__"} & names
    return sorted(special | {name for name in names if not name.startswith("_")})


def revealed() -> str:
    """Returns a program in which a checker tells the types of all public functions, attributes and methods."""
    lines = [f"import eagle_kernels{suffix}" for suffix in MODULES]
    for number, (path, value) in enumerate(public()):
        if value is eagle_kernels.types.Operator:  # each op tells its own
            continue
        if inspect.isclass(value):
            told = [f"    reveal_type(x.{name})" for name in members(value)] or ["    pass"]
            lines += [f"def f{number}(x: {path}) -> None:", *told]
        else:
            lines.append(f"reveal_type({path})")
    return "\n".join(lines) + "\n"


def result_of(kind: str) -> str:
    """Returns a type as checkers write it, without the parameters of functions, which may be of any type."""
    kind = re.sub(r"(CoroutineType|typing\.Coroutine)\[Any, Any, ", "[", kind)
    parameters = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
    return re.sub(rf"def {parameters}|{parameters}(?= -> )", "", kind)


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The interpreter of an environment with an editable install of this checkout, as pip makes it, and our packages.

    What is installed are links to this checkout, since a build may leave folders behind.
    """
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    packages = next(folder.glob("venv/lib/python*/site-packages"))
    (packages / "outer.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")) + "\n")
    if not importlib.util.find_spec("setuptools"):  # then the checkout itself is on the path
        (packages / "checkout.pth").write_text(f"{ROOT}\n")
        return folder / "venv" / "bin" / "python"
    (folder / "checkout").mkdir()
    for name in ("eagle_kernels", "reference", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        (folder / "checkout" / name).symlink_to(ROOT / name)
    build = f"from setuptools import build_meta; build_meta.build_editable({str(folder)!r})"
    command = [sys.executable, "-c", build]
    built = subprocess.run(command, cwd=folder / "checkout", capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(packages)
    return folder / "venv" / "bin" / "python"


def check(checker: str, python: Path, folder: Path) -> subprocess.CompletedProcess:
    """Runs a checker where a user would, outside the checkout."""
    if not importlib.util.find_spec(checker):
        pytest.skip(f"needs {checker}")
    mypy = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]
    # pyright is no Python program, and looks for packages where it is told to
    options = mypy if checker == "mypy" else ["--pythonpath", python]
    files = sorted(folder.glob("*.py"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, "-m", checker, *options, *files], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_checkers_accept_what_is_right_and_see_what_is_wrong(checker, python, tmp_path):
    """One run, since reading torch takes most of it: no error but in a file of wrong calls, and all of its own.

    Wrong are five arguments that are no tensors, a text for a number, a field that is not there, a missing weight. No
    result of a public function is Any, nor a part of it.
    """
    pytest.importorskip("transformers")  # whose types an example uses
    texts = {f"readme_{index}": example for index, example in enumerate(README_EXAMPLES)}
    for file in (Path(calls_of_the_engine.__file__), *(ROOT / "eagle_kernels" / "examples").glob("[!_]*.py")):
        texts[file.stem] = file.read_text(encoding="utf-8")
    texts |= {"wrong": WRONG, "calls": calls_of_all_ops(), "revealed": revealed()}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    result = check(checker, python, tmp_path)
    errors = [line for line in result.stdout.splitlines() if re.search(r":\d+(:\d+)?( -|:) error: ", line)]
    others = [line for line in errors if "wrong.py" not in line]
    assert not others, "\n".join(others)
    assert result.returncode == 1 and len(errors) >= 8, result.stdout + result.stderr
    told = re.findall(r"revealed\.py:(\d+).* (?:is|type is) \"(.*)\"$", result.stdout, re.MULTILINE)
    lines = texts["revealed"].splitlines()
    assert len(told) == sum("reveal_type" in line for line in lines) > 400, result.stdout
    unknown = {
        lines[int(line) - 1].strip(): kind for line, kind in told if re.search(r"\b(Any|Unknown)\b", result_of(kind))
    }
    assert not unknown, "\n".join(f"{line}: {kind}" for line, kind in unknown.items())


def test_results_have_public_names():
    """What a public function returns, and what its fields are, is importable from a public module."""
    names = {value for _, value in public() if inspect.isclass(value)}
    for path, value in public():
        told = fields_of(value) if inspect.isclass(value) else {}
        for name in members(value) if inspect.isclass(value) else [value.__name__]:
            function = getattr(value, name, None) if inspect.isclass(value) else value
            function = getattr(function, "fget", None) or function
            if inspect.isroutine(function):
                told[name] = typing.get_type_hints(function)["return"]
        for name, kind in told.items():
            ours = {each for each in classes_in(kind) if each.__module__.startswith("eagle_kernels")} - names
            assert {each.__name__ for each in ours} <= ENGINE_OWN, f"{path}: {name} is {ours}"


def classes_in(kind: object) -> set[type]:
    parts = {each for argument in typing.get_args(kind) for each in classes_in(argument)}
    kind = typing.get_origin(kind) or kind
    return parts | ({kind} if inspect.isclass(kind) else set())


def test_results_are_of_the_types_that_checkers_know(monkeypatch):
    def assert_type(value: object, kind: object) -> None:
        assert is_of(value, kind), f"{value!r} is no {kind}"

    monkeypatch.setattr(calls_of_the_engine, "assert_type", assert_type)
    target, draft = demo_pair()
    config = eagle_kernels.EAGLEConfig(topk=2, num_steps=2)
    engine = eagle_kernels.EAGLEInference.from_pretrained(draft, target, config, device="cpu")
    calls = [value for value in vars(calls_of_the_engine).values() if inspect.isfunction(value)]
    for call in calls:
        if [*inspect.signature(call).parameters] == ["engine"] and call.__name__ != "conversations":  # needs a template
            call(engine)
    request = engine.submit("ab", eagle_kernels.SamplingParams(max_new_tokens=2, logprobs=True, top_logprobs=1))
    engine.collect()
    verified = []
    engine.on_tree = verified.append
    stream = engine.stream("ab", 4)
    events = list(stream)
    for value in (engine, config, request, request.params, stream, events[0], stream.output().stats, verified[0]):
        assert not wrong_fields(value), wrong_fields(value)
