"""Writes what follows from the code: `python -m bench.api` writes the API pages and type stubs, `--check` compares.

An API page lists the public functions of a family of ops (`eagle_kernels/ops/<family>/API.md`) or of the engine
(`eagle_kernels/engine/API.md`), from signatures and docstrings. The stubs tell type checkers and editors the names
that `eagle_kernels` and its modules `ops`, `raw` and `types` import when they are first used. `ops/schemas.py` tells
torch the ops, whose files are not imported for that.
"""

import argparse
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import eagle_kernels
from eagle_kernels import engine, ops, raw, types
from eagle_kernels.engine.config import drafting_options
from eagle_kernels.engine.generation import Generation
from eagle_kernels.engine.requests import inputs
from eagle_kernels.ops.registry import FAMILIES, OPS
from eagle_kernels.runtime.library import schemas_of

from .harness.markdown import write_stale

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "eagle_kernels"
_WRITTEN = "Written by `python -m bench.api` from the docstrings; do not edit."
# what Raises says of most functions, said once at the top of a page
_ARGUMENT_RAISES = re.compile(
    r"ValueError, TypeError: an argument breaks a rule above\.|ValueError: An argument breaks its rule\."
)
_WITH_REFERENCE = "from ..runtime.library import with_reference as _with_reference\n"
_STUB_HEAD = "# Written by `python -m bench.api`; do not edit.\n"
# a space at which no line of a signature ends
_WITHIN = "\0"
_LISTS = ("Args", "Returns", "Attributes", "Raises")
_FAMILY_TITLES = {
    "attention": "Attention",
    "draft": "Drafting without a model",
    "experts": "Mixtures of experts",
    "kv": "KV cache",
    "latent": "Latent attention",
    "linear": "Linear layers",
    "nn": "Layers",
    "rejection": "Rejection",
    "sampling": "Sampling",
    "tree": "Token trees",
    "verify": "Verification",
}
# public functions of a family that are no ops
_OTHER_FUNCTIONS = {"kv": ("cache_addresses",), "verify": ("verify_tree",)}
# the parts of the engine's page: where their names are imported from, and the names; (): all public ones
_ENGINE_PARTS = {
    "The engine": ("eagle_kernels.engine", ()),
    "Types": (
        "eagle_kernels.types",
        ("TokenStream", "TextStream", "TextPiece", "BenchmarkResult", "RunStats", "Candidate", "Verified", "Tokenizer",
         "Detokenizer", "Matcher"),
    ),
    "Model folders": ("eagle_kernels.engine.models.loading", ("load_target", "load_draft", "demo_pair")),
    "Tokenizers": ("eagle_kernels.engine.models.tokenizer", ("load_tokenizer",)),
    "Models of your own": (
        "eagle_kernels.engine.models.protocol",
        ("TargetModel", "TargetOutput", "DraftModel", "DraftOutput", "DraftModules", "Attend", "StoringAttend",
         "LatentAttend", "Angles", "KVShape", "LatentShape", "ModelError"),
    ),
}  # fmt: skip
# classes that callers do not make; their pages show no call, like those of protocols
_NOT_CALLED = ("TokenStream", "TextStream", "Verified", "ModelError", "TreeMaskMode")
# classes that callers read and do not make; their pages show no defaults
_RESULTS = ("GenerationOutput", "GenerationStats", "Request", "TokenEvent", "TextPiece", "BenchmarkResult", "RunStats",
            "Candidate")  # fmt: skip
# members that only the engine and its tools call
_OWN = {
    "EAGLEConfig": ("on", "trees_for", "most_beams", "sampling", "keeps_text", "may_speculate", "simulated_rates"),
    "BenchmarkResult": ("rows",),
    "GenerationOutput": ("with_scores",),
    "GenerationStats": ("measured_by",),
    "Request": ("has_news", "end", "count_step", "fail", "raise_error", "push", "score_prompt", "stop_strings",
                "outbox", "exception"),
    "SamplingParams": ("has_filters", "has_penalties", "scores"),
    "TokenStream": ("device", "is_single"),
}  # fmt: skip
# names of types that only abbreviate, which the engine's page explains
_ALIASES = {
    name: re.sub(r"[a-z_]+(\.[a-z_]+)*\.(?=[A-Z])", "", str(getattr(inputs, name)))
    for name in ("Asked", "Params", "Prompts", "Seeds")
}
# the same, written out where they stand
_SHORT_ALIASES = {"Tree": str(drafting_options.Tree), "Ids": "list[int] | list[list[int]]"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit status: 1 from `--check` if a file is not up to date."""
    parser = argparse.ArgumentParser(prog="python -m bench.api", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not up to date")
    options = parser.parse_args(arguments)
    return write_stale(generate(), "bench.api", options.check)


def generate() -> dict[Path, str]:
    """Returns the whole text of every file."""
    pages = {PACKAGE / "ops" / family / "API.md": _family_page(family) for family in FAMILIES}
    pages[PACKAGE / "engine" / "API.md"] = _engine_page()
    return pages | _stubs() | {PACKAGE / "ops" / "schemas.py": _schemas()}


def module_of(stub: Path) -> str:
    """Returns the name of the module that a stub describes."""
    return ".".join(stub.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _family_page(family: str) -> str:
    names = sorted((*FAMILIES[family], *_OTHER_FUNCTIONS.get(family, ())))
    names += ["TreeMaskMode"] if family == "tree" else []
    entries = []
    for name in names:
        value = _documented(name)
        entries.append(f"## {name}\n\n{_signature('eagle_kernels.' + name, value)}\n\n{_markdown(value)}")
    if outputs := _outputs(family):
        names, entries = [*names, "Output"], [*entries, outputs]
    links = " · ".join(f"[{name}](#{name.lower()})" for name in names)
    rules = "[What holds for all ops](../README.md#what-holds-for-all-ops) is not repeated here.\n"
    rules += "The top of an op's file explains how it works; [README.md](README.md) links to the files."
    return _page(f"{_FAMILY_TITLES[family]}: API", [rules, links, *entries])


def _documented(name: str) -> Callable:
    """Returns what bears the docstring of a public name: of ops the launchers, which need no schemas."""
    home = raw if name in raw.__all__ else ops if name == "verify_tree" else eagle_kernels
    return getattr(home, name)


def _outputs(family: str) -> str:
    """Returns the section about the named tuples that the ops of a family return; "" if there are none."""
    public = {getattr(types, name): name for name in types.__all__}
    makers: dict[str, list[str]] = {}
    modules = {name: importlib.import_module(f"eagle_kernels.ops.{family}.{name}") for name in FAMILIES[family]}
    if family == "verify":
        modules["verify_tree"] = modules["verify_tree_greedy"]  # the same results
    for name, module in sorted(modules.items()):
        output = getattr(module, "Output", None)
        if output is not None:
            call = f"`eagle_kernels.types.{public[output]}({', '.join(output._fields)})`"
            makers.setdefault(call, []).append(f"`{name}`")
    if not makers:
        return ""
    listed = "\n".join(f"- {call}: {', '.join(names)}" for call, names in makers.items())
    return "## Output\n\nThe named tuples that the ops return.\n\n" + listed


def _engine_page() -> str:
    links, entries = [], []
    for title, (module, names) in _ENGINE_PARTS.items():
        names = names or engine.__all__
        links.append(f"{title} (`{module}`): " + " · ".join(f"[{name}](#{name.lower()})" for name in names))
        home = importlib.import_module(module)
        for name in names:
            value = getattr(home, name)
            call = _signature(name, value)
            entries += [f"## {name}", *([call] if call.startswith("```") else []), _markdown(value)]
            if inspect.isclass(value):
                entries += _members(name, value)
    told = (
        "An argument that breaks its rule raises ValueError, whose message names it. In signatures, "
        + ", ".join(f"`{name}` is `{kind}`" for name, kind in _ALIASES.items())
        + "."
    )
    return _page("The engine: API", [*links, textwrap.fill(told, 120, break_on_hyphens=False), *entries])


def _members(name: str, cls: type) -> list[str]:
    """Returns the section of each method that has sections of its own; before them one list of the other members."""
    items, entries = [], []
    for member, value in _public_methods(cls):
        text = _markdown(value)
        if member in _OWN.get(name, ()):
            continue
        if re.search(r"^\*\*[A-Z]", text, re.MULTILINE):
            entries.append(f"### {name}.{member}\n\n{_signature(member, value)}\n\n{text}")
        else:
            text = text.replace("\n\n", "\n").replace("\n", "\n  ")
            items.append(f"- `{_call(member, value).replace(_WITHIN, ' ')}`: {text}")
    return ["**Members**\n\n" + "\n".join(items), *entries] if items else entries


def _page(title: str, parts: Iterable[str]) -> str:
    return "\n\n".join([f"# {title}", _WRITTEN, *parts]) + "\n"


def _public_methods(cls: type) -> list[tuple[str, Callable]]:
    """Returns the methods and properties that a class of ours defines, in the order of its source."""
    found = []
    for name, value in {**(vars(Generation) if Generation in cls.__mro__ else {}), **vars(cls)}.items():
        function = value.fget if isinstance(value, property) else getattr(cls, name)
        if not name.startswith("_") and inspect.isroutine(function) and function.__doc__:
            found.append((name, value if isinstance(value, property) else function))
    return found


def _signature(name: str, value: Callable) -> str:
    """Returns a call as code, in lines of 120 characters that end between arguments."""
    call = _call(name, value)
    if call.startswith("class "):
        return f"`{call}`"
    lines = textwrap.fill(call, 120, subsequent_indent=" " * 4, break_on_hyphens=False)
    return f"```python\n{lines.replace(_WITHIN, ' ')}\n```"


def _call(name: str, value: Callable) -> str:
    """Returns how something is called, on one line, with _WITHIN for the spaces within an argument."""
    if isinstance(value, property):
        return f"{name}: {_spelled(value.fget.__annotations__.get('return', 'Any'))}"
    if inspect.isclass(value):
        if "__call__" in vars(value):
            value = value.__call__
        elif Protocol in value.__bases__ or value.__name__ in _NOT_CALLED or _fields(value):
            return f"class {name}"
    signature = inspect.signature(value)
    if name.startswith("eagle_kernels.") and inspect.isfunction(value):  # its list of arguments tells the types
        return _untyped(name, signature)
    parameters, is_keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.name.startswith("_") or parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            parameters.append("*")
        is_keyword_only |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        parameters.append(_parameter(parameter).replace(" ", _WITHIN))
    returned = signature.return_annotation
    has_result = returned not in (inspect.Signature.empty, None, "None")
    arrow = f" -> {_spelled(str(returned))}".replace(" ", _WITHIN) if has_result else ""
    return f"{name}({', '.join(parameters)}){arrow}"


def _fields(value: Callable) -> dict[str, str]:
    """Returns the fields of a class by name, with type and default, if its docstring has an entry for each."""
    if value.__name__ in _NOT_CALLED or not (dataclasses.is_dataclass(value) or hasattr(value, "_fields")):
        return {}
    parameters = [each for name, each in inspect.signature(value).parameters.items() if not name.startswith("_")]
    has_default = value.__name__ not in _RESULTS
    told = inspect.getdoc(value)
    is_told = all(re.search(rf"^    ([\w, ]+, )?{each.name}(, [\w, ]+)?: ", told, re.MULTILINE) for each in parameters)
    return {each.name: _parameter(each, has_default) for each in parameters} if is_told else {}


def _untyped(name: str, signature: inspect.Signature) -> str:
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    call = name + str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r"<\w+\.\w+: ([^>]*)>", r"\1", call)  # members of an Enum, for which their value serves


def _parameter(parameter: inspect.Parameter, has_default: bool = True) -> str:
    """Returns a parameter as it stands in a signature, its default as Python writes it."""
    kind, default = parameter.annotation, parameter.default
    text = str(parameter.replace(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty))
    if kind is not inspect.Parameter.empty:
        kind = kind if isinstance(kind, str) else inspect.formatannotation(kind)
        text += ": " + _spelled(kind)
    if default is inspect.Parameter.empty or not has_default:
        return text
    shown = re.sub(r"<(\w+\.\w+): [^>]*>", r"\1", repr(default))
    return f"{text} = {shown}"


def _spelled(kind: str) -> str:
    """Returns an annotation without abbreviations, quotes and parameters of types."""
    kind = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", kind).replace("'", "").replace("[Ids]", "")
    for name, meaning in _SHORT_ALIASES.items():
        kind = re.sub(rf"\b{name}\b", meaning, kind)
    return kind


def _markdown(value) -> str:
    """Returns a docstring with its sections as lists, and its example as code."""
    text = inspect.getdoc(value) or ""
    shown = _fields(value) if inspect.isclass(value) else {}
    own = _OWN.get(value.__name__, ()) if inspect.isclass(value) else ()
    parts = re.split(r"^([A-Z][a-z]+):\n(?=    )", text, flags=re.MULTILINE)
    written = [_prose(parts[0])]
    for head, body in zip(parts[1::2], parts[2::2]):
        first, _, rest = _ARGUMENT_RAISES.sub("", textwrap.dedent(body)).strip().partition("\n")
        if not first:
            continue
        is_cut = _ARGUMENT_RAISES.search(body) is not None  # so the next lines hang from nothing
        body = f"{first}\n{textwrap.dedent(rest) if is_cut else rest}".strip()
        if head == "Example":
            written.append(f"**Example**\n\n```python\n{body}\n```")
        elif head in _LISTS:
            written.append(f"**{head}**\n\n{_entries(body, shown, own)}")
        else:
            written.append(f"**{head}**\n\n{_prose(body)}")
    return "\n\n".join(part for part in written if part)


def _entries(body: str, shown: dict[str, str], own: Sequence[str]) -> str:
    """Returns the entries `name: text` as list items; what else stands there stays as it is.

    shown: what a name is replaced by. own: names whose entries are left out.
    """
    name = r'[*"`]*[\w.]+["`]*'
    # an indented name is in quotes; without them it would be a sentence with a colon in it
    item = re.compile(rf'^(    (?=")|(?=[\w"*`]))({name}(?:, {name})*): ')
    lines, is_left_out = [], False
    for line in body.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2  # half of that of the docstring
        match = item.match(line)
        if match:
            names = match[2].replace("`", "").split(", ")
            is_left_out = names[0] in own
            line = f"- {', '.join(f'`{shown.get(name, name)}`' for name in names)}: {line[match.end() :]}"
        elif line[:1].strip() and lines and lines[-1].startswith(("- `", " ")):
            lines.append("")  # a paragraph after a list, not part of its last item
        if not is_left_out:
            lines.append(" " * depth + line.strip())
    return "\n".join(lines)


def _prose(text: str) -> str:
    """Returns paragraphs; a block whose columns are aligned by spaces stays as it is."""
    blocks = text.strip().split("\n\n")
    return "\n\n".join(f"```text\n{block}\n```" if re.search(r"\S {2,}\S", block) else block for block in blocks)


def _schemas() -> str:
    lines = [
        schema for path in OPS.values() for schema in schemas_of(importlib.import_module(f"eagle_kernels.ops.{path}"))
    ]
    head = '"""The schemas of all ops. Written by `python -m bench.api` from their signatures; do not edit."""'
    return f'{head}\n\nSCHEMAS = """\\\n' + "".join(line + "\n" for line in lines) + '""".splitlines()\n'


def _stubs() -> dict[Path, str]:
    """Returns the stubs of the modules that import names when they are first used."""
    places = {name: f"{family}.{name}" for family, names in FAMILIES.items() for name in names}
    launchers = {name: f"from .ops.{place} import {name} as {name}\n" for name, place in places.items()}
    places["verify_tree"] = "front_door"
    of_ops = [f"from .{place} import {name} as _{name}\n" for name, place in places.items()]
    of_ops += [f"from ..reference.ops.{OPS.get(name, name)} import {name} as _{name}_reference\n" for name in places]
    functions = [
        f'{name} = _with_reference(_{name}, _{name}_reference)\n"""{_summary(name)}"""\n' for name in sorted(places)
    ]
    others = [name for name in ops.__all__ if name not in places]
    public = {"engine", "ops", "types", *eagle_kernels.__all__} - {"__version__"}
    files = {
        "ops/__init__": (ops, [*of_ops, *(_reexport(ops, name) for name in others), _WITH_REFERENCE], functions),
        "raw": (raw, launchers.values(), ()),
        "types": (types, [_reexport(types, name) for name in types.__all__], ()),
        "__init__": (eagle_kernels, [_reexport(eagle_kernels, name) for name in public], ["__version__: str\n"]),
    }
    stubs = {}
    for file, (module, imports, names) in files.items():
        listed = "".join(f'    "{name}",\n' for name in sorted(module.__all__))
        text = "".join([_STUB_HEAD, *sorted(imports), *(["\n"] if names else []), *names])
        stubs[PACKAGE / f"{file}.pyi"] = f"{text}\n__all__ = [\n{listed}]\n"
    return stubs


def _summary(name: str) -> str:
    return inspect.getdoc(_documented(name)).partition("\n")[0]


def _reexport(module, name: str) -> str:
    """Returns the import that brings a name from its file to where it is public."""
    if module is eagle_kernels and name in ops.__all__:
        return f"from .ops import {name} as {name}\n"
    value = getattr(module, name)
    if inspect.ismodule(value):
        return f"from . import {name} as {name}\n"
    home = value.__module__.removeprefix(module.__spec__.parent)
    return f"from {home} import {value.__name__} as {name}\n"


if __name__ == "__main__":
    sys.exit(main())
