"""How sources are read and held against a contract, on small ones of our own; and what `env` prints of SGLang."""

import importlib
import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from eagle_kernels.integrations.sglang import hooks, report
from eagle_kernels.integrations.sglang.contract import CONTRACT, GROUP
from eagle_kernels.integrations.shared import contract
from eagle_kernels.integrations.shared.sources import Sources
from eagle_kernels.integrations.vllm import contract as vllm_contract
from eagle_kernels.integrations.vllm import report as vllm_report
from eagle_kernels.tools.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "p/__init__.py": "",
    "p/base.py": """
class Base:
    flag: bool = False
    def __init__(self, one, *, two=2):
        self.inherited, self.x = one, 1
""",
    "p/a.py": """
import p.base
from p.base import Base as Parent
from .more import helper, LIMIT
if LIMIT:
    def chosen(first, second=None): ...
else:
    chosen = None
GROUP = "a.group"
FIELDS = [Parent, Other]
Method = Literal["one", "two"]
class Other(Parent, p.base.Base):
    def method(this, value):
        this.own = value
        value.foreign = 1
        def inner(): this.deep = 1
    plain: int
    @property
    def shown(self): return self.read_only
class Record:
    loc: int
    extra: int = 0
class Made:
    def kept(self): ...
Made = make("Made", vars(Made))
def lists():
    types = [Other]
    types.append(Record)
def refuses(args):
    ALLOWED = ("x",)
    if args.name not in ALLOWED and args.size > 1:
        raise ValueError(f"only on {ALLOWED}; " f"got {args.name!r}.")
def goes_on(args):
    if args:
        raise ValueError("text")
    return args, 1
""",
    "p/more/__init__.py": "from ..base import Base\nfrom .deep import helper\nLIMIT = 7\n",
    "p/more/deep.py": "def helper(a, /, b, *rest, c, **others): ...\n",
}


@pytest.fixture(params=["folder", "wheel", "installed"])
def sources(request, tmp_path, monkeypatch) -> Sources:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    if request.param == "installed":
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        return Sources.installed("p")
    if request.param == "folder":
        return Sources.of_folder(tmp_path)
    with zipfile.ZipFile(tmp_path / "p.whl", "w") as wheel:
        for path, text in FILES.items():
            wheel.writestr(path, text)
    return Sources.of_wheel(tmp_path / "p.whl")


def test_names_are_found(sources):
    """Through imports, conditions, base classes and methods; nothing is imported."""
    there = """p p.a p.more p.a.chosen p.a.GROUP p.a.helper p.a.LIMIT p.a.Parent p.more.Base p.a.Parent.flag
        p.a.Other.own p.a.Other.deep p.a.Other.inherited p.a.Other.x p.a.Other.flag p.a.Other.method p.a.Other.plain
        p.a.Other.shown p.a.Made.kept p.a.Record.extra p.more.deep.helper"""
    gone = """q p.b p.a.gone p.a.Other.foreign p.a.Other.read_only p.a.Other.value p.a.lists.types p.a.GROUP.x
        p.more.deep.Base p.a.Record.own p.base.Base.own p.a.Parent.flag.x"""
    assert [name for name in there.split() if sources.find(name) is None] == []
    assert [name for name in gone.split() if sources.find(name) is not None] == []
    assert "p" not in sys.modules


def test_parameters_are_read(sources):
    assert sources.parameters("p.a.helper") == ("a", "b", "c")
    assert sources.parameters("p.a.chosen") == ("first", "second")
    assert sources.parameters("p.a.Other.method") == ("this", "value")
    assert sources.parameters("p.a.Other") == ("one", "two")
    assert sources.parameters("p.a.Record") == ("loc", "extra")
    for target in ("p.a.GROUP", "p.a.gone", "p.a.Other.own", "p.a.Other.plain"):
        assert sources.parameters(target) is None


def test_values_are_read(sources):
    assert sources.constant("p.a.GROUP") == "a.group" and sources.constant("p.a.LIMIT") == 7
    assert sources.constant("p.a.Method") == ("one", "two")
    assert "\n    return (args, 1)" in sources.code("p.a.goes_on") and sources.code("p.a.gone") == ""
    assert sources.constant("p.a.FIELDS") is None and sources.constant("p.a.gone") is None
    assert sources.listed("p.a.FIELDS") == ["p.a.Parent", "p.a.Other"] and sources.listed("p.a.GROUP") == []
    assert sources.names_in_lists("p.a.lists") == {"Other"} and sources.names_in_lists("p.a.gone") == set()
    assert sources.last_refusal("p.a.refuses") == (
        "args.name not in ALLOWED and args.size > 1", "only on {ALLOWED}; got {args.name!r}."
    )  # fmt: skip
    assert sources.last_refusal("p.a.goes_on") == sources.last_refusal("p.a.gone") == ("", "")


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        (contract.names("p.a.Other", ("own", "flag")), None),
        (contract.names("p.a.Other", ("own", "lost")), "p.a.Other has no lost"),
        (contract.names("p.a.Gone", ("own",)), "p.a.Gone does not exist"),
        (contract.names("p.a.Record", ("loc", "own"), members="p.a.FIELDS"), None),
        (contract.names("p.a.Record", ("lost",), members="p.a.FIELDS"), "p.a.Record has no lost"),
        (contract.call("p.a.Other", ("one",), ("two",)), None),
        (contract.call("p.a.Other", ("two",)), "p.a.Other takes one, two; expected first two"),
        (contract.call("p.a.helper", ("a",), ("c", "d")), "p.a.helper takes no d"),
        (contract.call("p.a.gone", ("a",)), "p.a.gone is not a function"),
        (contract.takes("p.a.helper", ("a", "b", "c")), None),
        (contract.takes("p.a.helper", ("a", "b")), "p.a.helper takes a, b, c; expected a, b"),
        (contract.takes("p.a.gone", ()), "p.a.gone is not a function"),
        (contract.contains("p.a.goes_on", "return (args, 1)"), None),
        (contract.contains("p.a.goes_on", "return args"), "p.a.goes_on does not contain return args"),
        (contract.contains("p.a.gone", "x"), "p.a.gone does not contain x"),
        (contract.either("p.a.gone", "p.a.GROUP"), None),
        (contract.either("p.a.gone", "p.a.lost"), "there is neither p.a.gone nor p.a.lost"),
        (contract.value("p.a.GROUP", "a.group"), None),
        (contract.value("p.a.GROUP", "b"), "p.a.GROUP is 'a.group'; expected 'b'"),
        (contract.listed("p.a.lists", "Other"), None),
        (contract.listed("p.a.lists", "Record"), "p.a.lists has no list with Record"),
        (contract.last_refusal("p.a.refuses", ("only on", "{args.name!r}"), "args.name not in ALLOWED"), None),
        (contract.last_refusal("p.a.refuses", ("not on",), "args.name not in ALLOWED"),
         "the last statement of p.a.refuses is no ValueError with ['not on']"),
        (contract.last_refusal("p.a.refuses", ("only on",), "args.other not in ALLOWED"),
         "the last statement of p.a.refuses is no ValueError with ['args.other not in ALLOWED']"),
    ],
    ids=lambda given: given[0][0] if isinstance(given, list) else str(given),
)  # fmt: skip
def test_an_entry_holds_or_says_why_not(tmp_path, entry, fault):
    faults = contract.differences(Sources(FILES.get), (entry,))
    assert faults == ([fault] if fault else [])


@pytest.mark.parametrize(("server", "group"), [("sglang", GROUP), ("vllm", vllm_contract.GROUP)])
def test_the_entry_point_is_in_the_group_of_the_contract(server, group):
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert f'"{group}": ["eagle_kernels = eagle_kernels.integrations.{server}:register"]' in text
    assert (
        f'"{server} = eagle_kernels.integrations.{server}.report:lines",' in text.partition("eagle_kernels.reports")[2]
    )


# `python -m eagle_kernels env`


OURS = "[eagle_kernels.reports]\nsglang = eagle_kernels.integrations.sglang.report:lines\n"


@pytest.fixture
def no_sglang(monkeypatch):
    """Whatever this machine has, SGLang is not installed."""
    real = importlib.metadata.version

    def version(name):
        if name == "sglang":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def printed(capsys) -> list[str]:
    assert main(["env"]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("sglang")]


def test_env_says_that_sglang_is_not_installed(install, no_sglang, capsys):
    install("eagle_kernels", "9.9", OURS)
    assert printed(capsys) == ["sglang: not installed"]


def test_env_says_nothing_where_nothing_reports(install, no_sglang, capsys):
    """As where ours is not installed, or an older version is."""
    install("eagle_kernels", "0.1")
    assert printed(capsys) == []


def test_env_lists_hooks_and_what_differs(install, capsys, monkeypatch):
    """Of an SGLang that would not import."""
    install("eagle_kernels", "9.9", OURS)
    source = "import gone\nclass Scheduler:\n    def __init__(self, server_args, port_args): ...\n"
    files = {"sglang/__init__.py": "raise RuntimeError", "sglang/srt/managers/scheduler.py": source}
    install("sglang", hooks.TESTED[-1], files=files)
    monkeypatch.setenv("SGLANG_PLUGINS", "other, another")
    lines = printed(capsys)
    newest = hooks.TESTED[-1]
    assert lines[:2] == [
        f"sglang: {newest} (checked, not run), within {hooks.TESTED[0]}..{newest}, which the plug-in was checked with",
        "sglang plug-in: SGLANG_PLUGINS leaves eagle_kernels out",
    ]
    told = [line for line in lines if line.startswith("sglang hook ")]
    assert len(told) == len(hooks.GUARDS) + len(hooks.HOOKS)
    assert "sglang hook Scheduler.__init__: found (guard)" in told
    missing = "sglang.srt.speculative.eagle_utils.eagle_sample is not a function"
    assert f"sglang hook eagle_utils.eagle_sample: {missing}" in told
    differs = [line for line in lines if line.startswith("sglang differs: ")]
    assert len(differs) == sum(map(len, CONTRACT))
    assert "sglang" not in sys.modules
    monkeypatch.setenv("SGLANG_PLUGINS", "other,eagle_kernels")
    assert not any("SGLANG_PLUGINS" in line for line in printed(capsys))


@pytest.mark.parametrize("version", ["0.5.16", "0.6.0"])
def test_env_says_that_a_version_is_outside_of_the_range(install, capsys, monkeypatch, version):
    monkeypatch.setattr(Sources, "installed", lambda package: None)
    install("eagle_kernels", "9.9", OURS)
    install("sglang", version)
    first, last = printed(capsys)
    assert first.startswith(f"sglang: {version}, outside of {hooks.TESTED[0]}..")
    assert last == "sglang hooks: Python finds no package sglang"


def test_a_report_that_fails_is_a_line(install, capsys):
    install("eagle_kernels", "9.9", "[eagle_kernels.reports]\nsglang = eagle_kernels.gone:lines\n")
    assert printed(capsys) == ["sglang: no report: ModuleNotFoundError: No module named 'eagle_kernels.gone'"]


@pytest.mark.parametrize(("server", "report"), [("sglang", report), ("vllm", vllm_report)])
def test_a_report_imports_nothing_of_a_server_and_is_quick(note, server, report):
    """Measured in a process of its own, after what every command imports."""
    program = (
        "import eagle_kernels.tools.cli.main, sys, time\nbefore, start = set(sys.modules), time.perf_counter()\n"
        f"from eagle_kernels.integrations.{server}.report import lines\nlines()\n"
        "print(time.perf_counter() - start, *{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, *imported = result.stdout.split()
    note(f"{float(seconds):.3f} s")
    assert server not in imported
    assert set(imported) <= {"eagle_kernels", "zipfile", "bz2", "_bz2", "lzma", "_lzma", "_compression"}
    assert float(seconds) < 1 or report.lines()[0][1] != "not installed"
