"""The pages: the README is short, examples run, commands are those that CI runs, and links lead somewhere."""

import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_kernels.ops.registry import FAMILIES
from eagle_kernels.runtime import variables

ROOT = Path(__file__).resolve().parent.parent
OPS = ROOT / "eagle_kernels" / "ops"
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```bash\n(.*?)\n```", README, re.DOTALL)
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
# what a checkout has beside its own folders, such as virtual environments, is left alone
FOLDERS = [ROOT / name for name in ("bench", "eagle_kernels", "op_tests", "reference")]
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))])
# API pages hold excerpts of docstrings, and some pages of results are generated: neither has examples
EXAMPLES = {
    f"{page.relative_to(ROOT)}:{number}": example
    for page in PAGES
    if page.name != "API.md"
    for number, example in enumerate(re.findall(r"(?sm)^```python\n(.*?)^```", page.read_text(encoding="utf-8")))
}
LINK = re.compile(r"\]\(([^()\s]+)\)")

# runs each example with names of its own, and writes what it printed, or its traceback, as a line of JSON
RUN = """
import contextlib, io, json, sys, traceback
for name, example in json.load(sys.stdin).items():
    printed, error = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(example, name, "exec"), {"__name__": "__main__"})
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps([name, printed.getvalue(), error]), flush=True)
"""


@functools.cache
def run_all() -> dict[str, tuple[str, str | None]]:
    """What each example printed, and its traceback; one process, since most of the time goes into the import."""
    result = subprocess.run(
        [sys.executable, "-c", RUN], cwd=ROOT, input=json.dumps(EXAMPLES), capture_output=True, text=True
    )
    ran = {name: (printed, error) for name, printed, error in map(json.loads, result.stdout.splitlines())}
    assert list(ran) == list(EXAMPLES), result.stderr
    return ran


def text_of(page: Path) -> str:
    """The page without fenced blocks and code spans."""
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(`+)[^`]+?\1", lambda span: re.sub(r"[\[\]()]", "", span[0]), text)


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *#*$", text_of(page), re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = "".join(c for c in heading if c.isalnum() or c in " _-").replace(" ", "-")
        count = 0
        while (name := f"{anchor}-{count}" if count else anchor) in found:
            count += 1
        found.add(name)
    return found


def faults(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    wrong = []
    for target in LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and (file.suffix != ".md" or anchor not in anchors(file))):
            wrong.append(target)
    return wrong


def test_it_is_short():
    assert len(README.splitlines()) <= 120
    assert len(README.encode("utf-8")) <= 9_000


def test_examples_run():
    """Each of them, on the CPU, without a package that is not named beside it."""
    failed = {name: error for name, (_, error) in run_all().items() if error}
    assert not failed, "\n\n".join(f"{name}\n{error}" for name, error in failed.items())
    assert not [name for name, (printed, _) in run_all().items() if not printed], "an example shows what it makes"


def test_pages_have_examples():
    """The README for its users, and each family of ops."""
    pages = [name.rpartition(":")[0] for name in EXAMPLES]
    assert pages.count("README.md") >= 2
    for folder in (*(f"ops/{family}" for family in FAMILIES), "ops", "engine", "tools", "integrations"):
        assert f"eagle_kernels/{folder}/README.md" in pages


def test_the_ops_example_prints_what_its_comments_say():
    printed, _ = run_all()["README.md:0"]
    assert "[ 1,  3,  5, 11, 21]" in printed
    assert "[[ 0,  1,  3, -1]]" in printed and "[2]" in printed


def test_the_adapters_example_prints_what_its_comment_says():
    assert run_all()["eagle_kernels/integrations/README.md:1"][0] == "[[0, 1, 3, -1, -1]] [2]\n"


def test_the_family_examples_print_what_their_comments_say():
    """Where the comment of a line that prints names a list of numbers."""
    compared = 0
    for name, example in EXAMPLES.items():
        if "/ops/" not in name:
            continue
        printed = run_all()[name][0]
        for line in re.findall(r"^print\(.*?\) +# (.+)$", example, re.MULTILINE):
            for value in re.findall(r"\[[-\d\[\], ]+\]", line):
                assert value in printed.replace(".", ""), f"{name}: {value}"
                compared += 1
    assert compared >= 8


def test_the_loop_around_a_model_writes_what_the_model_writes_alone():
    """And leaves a cache that holds all of the text but the next root."""
    pytest.importorskip("transformers")
    (name,) = (name for name, example in EXAMPLES.items() if "DynamicCache" in example)
    assert run_all()[name][0] == "True True\n"


def test_ci_runs_the_two_commands_as_they_stand_here():
    assert "generate" in COMMANDS[0] and "pytest" in COMMANDS[1]
    reader = next(line for line in CI.splitlines() if line.startswith("mapfile"))
    script = reader + "\nprintf '%s\\n' \"${commands[@]}\""
    read = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert read.stdout.splitlines() == COMMANDS[:2]
    before, loop, _ = CI.partition('for command in "${commands[@]}"; do\n')
    assert loop and 'eval "$command"' in CI
    assert re.findall(r"pip install -q (\S+)", before) == ["torch==2.13.0"], "versions that the README does not name"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert faults(page) == []


def test_a_link_that_leads_nowhere_is_seen(tmp_path):
    (tmp_path / "there.md").write_text("# One `name`, and [a link](there.md)\n## Twice\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md#one-name-and-a-link) [b](there.md#twice-1) [c](#here) [d](https://example.org/x)\n# Here\n"
        "```python\nvalues[0](gone.md)\n```\nand `f[0](gone.md)`\n"
        "[e](gone.md) [f](there.md#gone) [g](#gone) ![h](gone.svg)\n"
    )
    assert faults(page) == ["gone.md", "there.md#gone", "#gone", "gone.svg"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_op_is_listed_by_its_family(family):
    """With its reference page, and the four files that an op is."""
    page = (OPS / family / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[`(\w+)`\]\(API\.md#(\w+)\) \| \S.*\[kernel\]\((\S+?)\.py\) · \[reference\]\((\S+?)\) · "
                        r"\[test\]\((\S+?)\) · \[benchmark\]\((\S+?)\) \|$", page, re.MULTILINE)  # fmt: skip
    assert sorted(row[0] for row in listed) == sorted(FAMILIES[family])
    for op, *links in listed:
        files = [Path(link).stem for link in links]
        assert files == [op, op, op, f"test_{op}", f"bench_{op}"]


# what every program has, and what tests and benchmarks tell the programs that they start
NOBODY_SETS = {"PATH", "PYTHONPATH", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER_COUNT"}
NOBODY_SETS |= {"RANK_LOGS", "SGLANG_IS_FLASHINFER_AVAILABLE"}
READS = ("os.getenv", "os.environ.get", "os.environ.pop", "os.environ.setdefault")
TROUBLESHOOTING = ROOT / "eagle_kernels" / "TROUBLESHOOTING.md"


def section_of(page: Path, heading: str) -> str:
    """The text below a heading, to the next one of its level."""
    return re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[1]


def sources_with(pattern: str, *folders: str) -> dict[Path, list[ast.AST]]:
    """The syntax nodes of each source that holds what the pattern says."""
    files = {file: file.read_text(encoding="utf-8") for name in folders for file in sorted((ROOT / name).rglob("*.py"))}
    return {file: list(ast.walk(ast.parse(text))) for file, text in files.items() if re.search(pattern, text)}


def variables_read(nodes: list[ast.AST]) -> set[str]:
    """The names, as regular expressions, of the environment variables that a source reads or sets."""
    constants = {
        node.targets[0].id: node.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found = set()
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in READS:
            key = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            key = node.slice
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
            key = node.left
        else:
            continue
        key = constants.get(key.id, key) if isinstance(key, ast.Name) else key
        if isinstance(key, ast.JoinedStr):
            found.add("".join(part.value if isinstance(part, ast.Constant) else "[A-Z]+" for part in key.values))
        else:
            assert isinstance(key, ast.Constant), f"which variable is {ast.unparse(node)}?"
            found.add(key.value)
    return found


def test_every_environment_variable_is_on_the_page():
    """Each one that a source reads has a row, and a row that no source needs says who else reads it."""
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", section_of(TROUBLESHOOTING, "Environment variables"), re.MULTILINE)
    told = {name: by for names, by in rows for name in re.findall(r"`(\w+)`", names)}
    sources = sources_with(r"os\.(environ|getenv)", "eagle_kernels", "bench", "op_tests")
    read = set().union(*map(variables_read, sources.values())) - NOBODY_SETS
    assert not [name for name in sorted(read) if not any(re.fullmatch(name, each) for each in told)]
    strange = [name for name in told if not any(re.fullmatch(each, name) for each in read)]
    assert all(re.match("by [A-Z]", told[name]) for name in strange), strange


def test_a_variable_that_nothing_reads_is_told(monkeypatch):
    """Those that the library knows are those of the page."""
    page = set(re.findall(r"EAGLE_KERNELS_\w+", section_of(TROUBLESHOOTING, "Environment variables")))
    assert page == variables.KNOWN
    for name in (*page, "EAGLE_KERNELS_FOO", "EAGLE_KERNELS_SGLANG_VERFIY", "EAGLE_KERNEL_BACKEND", "EAGLES"):
        monkeypatch.setenv(name, "1")
    with pytest.warns(UserWarning, match="is set, but nothing reads it") as told:
        variables.warn_of_unknown()
    meant = [f"did you mean EAGLE_KERNELS_{name}?" for name in ("SGLANG_VERIFY", "BACKEND")]
    assert [str(each.message).rpartition("; ")[2] for each in told] == ["TROUBLESHOOTING.md lists all", *meant]


def test_every_logger_is_on_the_page():
    """All but one are below `eagle_kernels`; the library leaves handlers and levels alone, the command sets its own."""
    told = re.findall(r"^\| `(.*?)` \|", section_of(TROUBLESHOOTING, "Logs"), re.MULTILINE)
    names, setting = [], set()
    for file, nodes in sources_with("logging", "eagle_kernels", "bench").items():
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in nodes:
            called = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            if called in ("addHandler", "setLevel", "basicConfig", "dictConfig"):
                setting.add(module)
            elif called == "getLogger" and module != "eagle_kernels.tools.cli.shared":
                name = ast.unparse(node.args[0])
                if module == "eagle_kernels.integrations.vllm.parts":  # vLLM shows those below its own
                    assert name == "'vllm.eagle_kernels'"
                    module = "vllm.eagle_kernels"
                else:
                    assert name == "__name__", f"{module} logs as {ast.unparse(node)}"
                names.append(module)
    assert sorted(names) == told
    assert setting == {"eagle_kernels.tools.cli.shared"}


def test_every_folder_with_users_is_on_the_map():
    """From the package's page a reader comes to each README within it."""
    page = ROOT / "eagle_kernels" / "README.md"
    linked = {(page.parent / target.partition("#")[0]).resolve() for target in LINK.findall(text_of(page))}
    for readme in (ROOT / "eagle_kernels").glob("*/README.md"):
        assert readme in linked
    for family in FAMILIES:
        assert OPS / family / "README.md" in linked
