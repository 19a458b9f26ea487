"""What `help(eagle_kernels.<op>)` and an IDE show: shapes of arguments and results, errors, the source, an example."""

import doctest
import importlib
import inspect
import re
import typing

import pytest
import torch

import eagle_kernels
from op_tests.harness.typed import is_of

SECTIONS = ("Args", "Returns", "Raises", "Source", "Example")
# `[B, N] int64.`, also after other words: "None or [B] fp32.", "one of: [B * N, V] fp32, fp16 or bf16.", or as another
# argument: "[B, V], dtype of `logits`."
SHAPE = r"\[[^\]]*\]((, [^.]*)? (int|fp|bf|fp8|bool|uint|any)|, dtype of `)"
PUBLIC = [*eagle_kernels.ops.OPS, "verify_tree"]


def section(function, name: str) -> str:
    """Returns the text of one section, indented by four spaces less than in the docstring."""
    text = inspect.getdoc(function)
    body = re.search(rf"^{name}:\n((?:    .*\n|\n)*)", text + "\n", re.MULTILINE)
    assert body, f"{function.__name__} has no section {name}"
    return inspect.cleandoc(body.group(1))


def entries(text: str) -> dict[str, str]:
    """Returns the entries `name, name: text` of a section by name."""
    found = {}
    for head, body in re.findall(r"^([a-z_0-9, ]+): ((?:.*\n?)(?:    .*\n?|\n)*)", text, re.MULTILINE):
        found |= {name.strip(): body for name in head.split(",")}
    return found


def result_fields(name: str) -> tuple[str, ...]:
    if name == "verify_tree":
        return eagle_kernels.ops.VerifyOutput._fields
    module = importlib.import_module("eagle_kernels.ops." + eagle_kernels.ops.OPS[name])
    return getattr(getattr(module, "Output", None), "_fields", ())


@pytest.mark.parametrize("name", PUBLIC)
def test_sections_stand_in_one_order(name):
    text = inspect.getdoc(getattr(eagle_kernels, name))
    first = text.removeprefix("LOSSY").lstrip(": ").split()[0]
    assert re.fullmatch(r"[A-Z][a-z-]+s", first), f"{name} begins with {first!r}, not with a verb"
    found = [head for head in re.findall(r"^([A-Z][a-z]+):$", text, re.MULTILINE) if head in SECTIONS]
    assert found == list(SECTIONS)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_is_told_and_every_tensor_has_its_shape(name):
    function = getattr(eagle_kernels, name)
    told = entries(section(function, "Args"))
    parameters = inspect.signature(function).parameters
    assert list(told) == list(parameters)
    for parameter in parameters.values():
        if "Tensor" in str(parameter.annotation) and parameter.name != "out":
            assert re.search(SHAPE, told[parameter.name]), f"{name}: {parameter.name} has no shape and dtype"


@pytest.mark.parametrize("name", PUBLIC)
def test_every_result_is_told_with_its_shape(name):
    text = section(getattr(eagle_kernels, name), "Returns")
    fields = result_fields(name)
    told = entries(text)
    assert [field for field in told if field in fields] == list(fields)
    for field in fields:
        assert re.search(SHAPE, told[field]), f"{name}: {field} has no shape and dtype"
    if not fields and inspect.signature(getattr(eagle_kernels, name)).parameters.get("out"):
        assert re.search(SHAPE, text), f"{name}: its result has no shape and dtype"


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_runs_and_prints_what_it_shows(name, monkeypatch):
    """With results of the types that are declared."""
    function = getattr(eagle_kernels, name)
    kind = typing.get_type_hints(function)["return"]
    example = section(function, "Example")

    def checked(*args, **kwargs):
        result = function(*args, **kwargs)
        assert is_of(result, kind)
        return result

    monkeypatch.setattr(eagle_kernels, name, checked)
    test = doctest.DocTestParser().get_doctest(
        example, {"torch": torch, "eagle_kernels": eagle_kernels}, name, None, None
    )
    assert f"eagle_kernels.{name}(" in example
    assert any(step.want for step in test.examples), f"{name}: the example shows no result"
    failures = []
    doctest.DocTestRunner(verbose=False).run(test, out=failures.append)
    assert not failures, "".join(failures)
