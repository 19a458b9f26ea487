"""What `help()` and an IDE show of the engine: every parameter and field, and examples that run."""

import dataclasses
import doctest
import inspect
import re
import textwrap

import pytest
import torch

import eagle_kernels
from eagle_kernels import engine
from eagle_kernels.engine.benchmark import BenchmarkResult, RunStats
from eagle_kernels.engine.models import protocol
from eagle_kernels.engine.models.loading import demo_pair, load_draft, load_target
from eagle_kernels.engine.models.tokenizer import load_tokenizer
from eagle_kernels.engine.serve.stream import TextStream, TokenStream

PROTOCOLS = ("Angles", "Attend", "StoringAttend", "LatentAttend", "KVShape", "LatentShape", "TargetOutput",
             "DraftOutput", "TargetModel", "DraftModel", "DraftModules")  # fmt: skip
CLASSES = [
    *filter(inspect.isclass, (getattr(engine, name) for name in engine.__all__)),
    *(TokenStream, TextStream, BenchmarkResult, RunStats),
    *(getattr(protocol, name) for name in PROTOCOLS),
]
FUNCTIONS = [load_target, load_draft, demo_pair, load_tokenizer, eagle_kernels.generate_token_bitmask]
HAVE_EXAMPLES = ("EAGLEInference", "generate", "stream", "submit")
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example")


def sections(value) -> dict[str, str]:
    """Returns the text of each section of a docstring; what is before them is under ""."""
    parts = re.split(r"^([A-Z][a-z]+):\n(?=    )", inspect.getdoc(value), flags=re.MULTILINE)
    found = dict(zip(parts[1::2], (textwrap.dedent(body).strip() for body in parts[2::2])))
    assert list(found) == [name for name in SECTIONS if name in found], f"sections of {value}: {list(found)}"
    return {"": parts[0]} | found


def told(text: str) -> set[str]:
    """Returns the names of the entries `name, name: text` of a section."""
    return {name for head in re.findall(r"^([A-Za-z_0-9, ]+): ", text, re.MULTILINE) for name in head.split(", ")}


def missing(value, names, *places: str) -> list[str]:
    """Returns the names that neither the given sections nor, in backticks, the text before them tells."""
    found = sections(value)
    known = set().union(*(told(found.get(place, "")) for place in places)) | set(re.findall(r"`(\w+)`", found[""]))
    return [name for name in names if name not in known]


def parameters_of(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def fields_of(cls) -> list[str]:
    """Returns the public fields of a dataclass, a named tuple or a protocol."""
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
    else:
        own = [name for name, value in vars(cls).items() if isinstance(value, property) and not value.__doc__]
        names = [*getattr(cls, "_fields", ()), *inspect.get_annotations(cls), *own]
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]


def public_members(cls) -> dict[str, object]:
    """Returns the public methods and the properties that a class of ours defines or inherits from another of ours."""
    members = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("eagle_kernels"):
            members |= {name: value for name, value in vars(base).items() if not name.startswith("_")}
    fields = {name for base in cls.__mro__ for name in fields_of(base)}
    return {
        name: value
        for name, value in members.items()
        if name not in fields and (isinstance(value, property) or inspect.isroutine(getattr(cls, name)))
    }


MEMBERS = {
    f"{cls.__name__}.{name}": value if isinstance(value, property) else getattr(cls, name)
    for cls in CLASSES
    for name, value in public_members(cls).items()
}
PROPERTIES = [pytest.param(value, id=name) for name, value in MEMBERS.items() if isinstance(value, property)]
METHODS = [pytest.param(value, id=name) for name, value in MEMBERS.items() if not isinstance(value, property)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_of_a_class_is_told(cls):
    assert re.match(r"[A-Z][a-z]+s ", inspect.getdoc(cls)), f"{cls.__name__} does not begin with a verb"
    assert missing(cls, fields_of(cls), "Args", "Attributes") == []


def test_every_parameter_of_the_engine_is_told():
    assert missing(engine.EAGLEInference, parameters_of(engine.EAGLEInference), "Args") == []


def test_every_parameter_of_attend_is_told():
    names = [name for name in inspect.signature(protocol.Attend.__call__).parameters if name != "self"]
    assert missing(protocol.Attend, names, "Args") == []


@pytest.mark.parametrize("function", [*FUNCTIONS, *METHODS], ids=lambda function: function.__name__)
def test_every_parameter_of_a_function_is_told(function):
    assert inspect.getdoc(function), f"{function.__qualname__} has no docstring"
    if "Args" in sections(function):
        assert sorted(told(sections(function)["Args"])) == sorted(parameters_of(function))
    if len(parameters_of(function)) > 1:
        assert missing(function, parameters_of(function), "Args") == []


@pytest.mark.parametrize("value", PROPERTIES)
def test_every_property_is_told(value):
    assert (value.__doc__ or "").rstrip().endswith("."), value.fget.__qualname__


def test_no_table_is_left():
    """Columns aligned by spaces are shown as one paragraph by an IDE."""
    for value in (*CLASSES, *FUNCTIONS, *(parameter.values[0] for parameter in METHODS)):
        text = re.sub(r"^ *(>>>|\.\.\.).*$", "", inspect.getdoc(value), flags=re.MULTILINE)
        assert not re.search(r"\S {2,}\S", text), value


def test_examples_run_one_after_the_other():
    cls = engine.EAGLEInference
    values = {"torch": torch, "eagle_kernels": eagle_kernels}
    for name in HAVE_EXAMPLES:
        example = sections(cls if name == "EAGLEInference" else getattr(cls, name))["Example"]
        run_example(example, name, values)
        assert "engine" in values and not values["engine"].has_work


def test_the_example_of_the_bitmask_runs():
    example = sections(eagle_kernels.generate_token_bitmask)["Example"]
    run_example(example, "generate_token_bitmask", {"torch": torch, "eagle_kernels": eagle_kernels})


def run_example(example: str, name: str, values: dict) -> None:
    """Runs an example with some values, to which it adds its own."""
    test = doctest.DocTestParser().get_doctest(example, values, name, None, None)
    assert any(step.want for step in test.examples), f"{name}: the example shows no result"
    test.globs, failures = values, []
    doctest.DocTestRunner(verbose=False).run(test, out=failures.append, clear_globs=False)
    assert not failures, "".join(failures)
