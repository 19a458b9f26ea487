"""The package in every way people get it: out of a checkout, editable, from an archive and its wheel, from a plain
`pip install .`; and what it says about itself.

`eagle_kernels/reference` is a link to `../reference` in a checkout and a folder of real files in a wheel; each case
imports through it, runs an op on the CPU, and finds the embedded model pair. Nothing is downloaded, and the checkout
itself is not touched: builds leave folders behind, so they run in a copy.
"""

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import eagle_kernels

ROOT = Path(__file__).resolve().parent.parent
OURS = ("eagle_kernels", "reference", "op_tests", "bench")

has_tools = all(importlib.util.find_spec(name) for name in ("pip", "setuptools"))
# older ones do not know License-Expression
has_tools = has_tools and int(importlib.metadata.version("setuptools").partition(".")[0]) >= 77
needs_pip = pytest.mark.skipif(not has_tools, reason="needs pip and setuptools 77")

USE = """
import pathlib, sys
import torch, eagle_kernels
from eagle_kernels.engine.models.loading import demo_pair
from eagle_kernels.reference.ops.tree.build_tree import build_tree

one = torch.ones(1)
tokens = eagle_kernels.sample_from_logits(torch.tensor([[0.0, 2.0, 1.0]]), one.long(), one.long(), 0 * one)
assert tokens.tolist() == [1], tokens
target, draft = demo_pair()
assert (target / "config.json").is_file() and (draft / "model.safetensors").is_file()
assert "reference" not in sys.modules, "the references came in under a second name"
print(pathlib.Path(eagle_kernels.__file__).resolve().parent)
print(pathlib.Path(sys.modules[build_tree.__module__].__file__).resolve())
"""


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    """The output of a command that is to succeed in a clean environment."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    result = subprocess.run(
        [str(part) for part in command], cwd=folder, env=clean | environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def use(python: str | Path, folder: Path, checkout: Path | None = None, **environment: str) -> Path:
    """Runs USE in `folder`: the package's place, which holds its references, or links to those of a checkout."""
    package, reference = map(Path, run(python, "-c", USE, folder=folder, **environment).splitlines())
    assert package == (checkout or package.parent) / "eagle_kernels"
    assert reference == (checkout or package) / "reference" / "ops" / "tree" / "build_tree.py"
    return package


def pip_install(environment: Path, *what: str | Path) -> Path:
    """Installs into a fresh virtual environment that sees this Python's packages; returns its interpreter."""
    run(sys.executable, "-m", "venv", "--without-pip", environment, folder=environment.parent)
    python = environment / "bin" / "python"
    site_packages = next(environment.glob("lib/python*/site-packages"))
    # `--system-site-packages` would show those of the base interpreter, not of the environment that runs the tests.
    (site_packages / "outer.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")) + "\n")
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
    run(sys.executable, "-m", "pip", "--python", python, "install", *offline, *what, folder=environment.parent)
    return python


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of this checkout, links kept as links."""
    copy = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "results")
    copy.mkdir()
    for name in OURS:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, copy / name)
    return copy


def test_the_link_is_relative():
    assert os.readlink(ROOT / "eagle_kernels" / "reference") == "../reference"


def test_uninstalled_inside_the_checkout():
    use(sys.executable, ROOT, ROOT)


@pytest.mark.slow
def test_uninstalled_from_elsewhere(elsewhere):
    use(sys.executable, elsewhere, ROOT, PYTHONPATH=str(ROOT))


@pytest.mark.slow
@needs_pip
def test_editable(checkout, elsewhere, tmp_path):
    use(pip_install(tmp_path / "environment", "--editable", checkout), elsewhere, checkout)


@pytest.mark.slow
@needs_pip
def test_plain_install(checkout, elsewhere, tmp_path):
    python = pip_install(tmp_path / "environment", checkout)
    shutil.rmtree(checkout)
    assert tmp_path / "environment" in use(python, elsewhere).parents


@needs_pip
def test_archive_and_its_wheel(checkout, elsewhere, tmp_path):
    """In the archive the references are there once, and the link to them is a link; the wheel holds the real files."""
    build = "from setuptools import build_meta; build_meta.build_sdist(%r)"
    run(sys.executable, "-c", build % str(tmp_path), folder=checkout)
    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        links = {member.name.partition("/")[2]: member.linkname for member in archive.getmembers() if member.issym()}
    assert links == {"eagle_kernels/reference": "../reference"}

    build = ("-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--quiet", source)
    run(sys.executable, *build, "--wheel-dir", tmp_path, folder=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        holds_links = any((entry.external_attr >> 28) == 0o12 for entry in archive.infolist())
        trains = [name for name in names if re.search(rb"torch\.optim|\.backward\(", archive.read(name))]
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    assert not holds_links and not trains
    assert "\nLicense-Expression: MIT\n" in metadata and "\nLicense-File: LICENSE\n" in metadata
    roots = {name.split("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"eagle_kernels"}
    # Followed through the link: every source and every asset, once, and nothing else.
    package = checkout / "eagle_kernels"
    expected = {
        str(Path(folder, name).relative_to(checkout))
        for folder, _, files in os.walk(package, followlinks=True)
        for name in files
        if name.endswith((".py", ".pyi", ".ipynb")) or name == "py.typed" or "assets" in Path(folder).parts
    }
    assert {name for name in names if name.startswith("eagle_kernels/")} == expected
    assert "eagle_kernels/reference/ops/tree/build_tree.py" in expected

    shutil.rmtree(checkout)
    python = pip_install(tmp_path / "environment", wheel)
    package = use(python, elsewhere)
    assert tmp_path / "environment" in package.parents
    command = python.with_name("eagle-kernels")
    assert str(package) in run(command, "env", folder=elsewhere)


@needs_pip
@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="needs a git checkout")
def test_the_archive_holds_the_whole_repository(tmp_path):
    """From it one can test and measure as from a checkout. Files of which git knows nothing stay out."""

    def git(*options: str) -> set[str]:
        return set(run("git", "ls-files", "-z", *options, folder=ROOT).split("\0")) - {""}

    run(sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", tmp_path, folder=ROOT)
    (listed,) = tmp_path.glob("*/SOURCES.txt")
    link = "eagle_kernels/reference"  # which is LinkedSdist's part, and what lies behind it
    listed = {file.removeprefix("./") for file in listed.read_text(encoding="utf-8").splitlines()}
    files = {file for file in listed if not file.startswith(link + "/")}
    assert git() - files == {link}
    assert {file for file in files if ".egg-info/" not in file} <= git("-co", "--exclude-standard")


def setup_arguments() -> dict:
    """Those of setup.py that are plain values."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (call,) = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "setup"]
    plain = (ast.Constant, ast.List, ast.Dict, ast.Load)
    return {
        each.arg: ast.literal_eval(each.value)
        for each in call.keywords
        if all(isinstance(node, plain) for node in ast.walk(each.value))
    }


def test_the_citation_is_of_this_version():
    told = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE))
    assert told["version"] == eagle_kernels.__version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## [{told['version']}] - {told['date-released']}\n" in changes
    given = setup_arguments()
    assert (told["title"], told["abstract"], told["license"]) == (
        given["name"], given["description"], given["license_expression"]
    )  # fmt: skip


def test_the_pythons_are_those_that_were_run():
    """Classifiers are the rows of the table of versions, of which the oldest is required, and README.md says so."""
    given = setup_arguments()
    named = [text.rpartition(" ")[2] for text in given["classifiers"] if re.search(r":: Python :: 3\.\d", text)]
    rows = (ROOT / "op_tests" / "README.md").read_text(encoding="utf-8")
    were_run = sorted(set(re.findall(r"^\| (3\.\d+)\.\d+ \|", rows, re.MULTILINE)), key=lambda each: int(each[2:]))
    assert named == were_run and given["python_requires"] == f">={were_run[0]}"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"Python {were_run[0]} or newer ([tested](op_tests/README.md#versions) up to {were_run[-1]})" in readme


def test_every_extra_is_explained():
    extras = setup_arguments()["extras_require"]
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Extras")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(extras)


def test_tools_have_one_version_each():
    """Which is that of the extra `dev`: CI names torch's alone."""
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"([\w-]+)==", ci) == ["torch"] and re.search(r"\npip install -q -e '\.\[dev[],]", ci)
    pinned = [each.partition("==")[0] for each in setup_arguments()["extras_require"]["dev"] if "==" in each]
    assert pinned == ["ruff", "mypy", "pyright"]
