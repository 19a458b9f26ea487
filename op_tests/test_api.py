"""The API pages and type stubs follow from the code: `python -m bench.api` has been run."""

import ast
import re

import pytest

import eagle_kernels
from bench import api

STUBS = {path: text for path, text in api.generate().items() if path.suffix == ".pyi"}
PAGES = {path: text for path, text in api.generate().items() if path.suffix == ".md"}


def test_pages_and_stubs_are_up_to_date(capsys):
    assert api.main(["--check"]) == 0, capsys.readouterr().out


def test_check_goes_red_when_a_page_is_edited(tmp_path, monkeypatch, capsys):
    page = tmp_path / "API.md"
    monkeypatch.setattr(api, "generate", lambda: {page: "text\n"})
    assert api.main(["--check"]) == 1 and not page.exists()
    assert api.main([]) == 0 and api.main(["--check"]) == 0
    page.write_text("other\n")
    assert api.main(["--check"]) == 1
    assert "is not up to date: run python -m bench.api" in capsys.readouterr().out


STUBBED = (eagle_kernels, eagle_kernels.ops, eagle_kernels.raw, eagle_kernels.types)


@pytest.mark.parametrize("module", STUBBED, ids=lambda m: m.__name__)
def test_a_stub_names_what_its_module_has(module):
    (text,) = (text for path, text in STUBS.items() if api.module_of(path) == module.__name__)
    tree = ast.parse(text)
    bound = {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    bound |= {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}
    bound |= {node.targets[0].id for node in tree.body if isinstance(node, ast.Assign)} - {"__all__"}
    names = ast.literal_eval(tree.body[-1].value)
    assert sorted(names) == sorted(module.__all__)
    assert set(names) <= bound and all(hasattr(module, name) for name in bound if not name.startswith("_"))


def test_a_page_has_a_heading_for_every_op():
    for name, path in eagle_kernels.ops.OPS.items():
        (page,) = (text for file, text in PAGES.items() if file.parent.name == path.partition(".")[0])
        assert f"\n## {name}\n" in page and f"](#{name})" in page


def test_a_page_has_a_heading_for_every_public_name():
    """Of modules and the version there is nothing to tell."""
    headings = set(re.findall(r"^## (\w+)$", "".join(PAGES.values()), re.MULTILINE))
    assert set(eagle_kernels.__all__) - headings == {"__version__", "raw", "reference"}
    assert {"Output", "TreeMaskMode"} <= headings


def test_pages_have_a_heading_for_every_type_in_a_signature():
    text = "".join(PAGES.values())
    headings = set(re.findall(r"^## (\w+)$", text, re.MULTILINE))
    signatures = re.findall(r"^```python\n(?!>>>)(.*?)^```", text, re.DOTALL | re.MULTILINE)
    signatures += re.findall(r"^- (`.+?`(?:, `.+?`)*): ", text, re.MULTILINE)
    named = set(re.findall(r"(?:: |-> |\| |\[)([A-Z]\w+)", "\n".join(signatures)))
    known = set(
        re.findall(r"\w+", "Any Callable Exception False Iterable Iterator Mapping None Path RLock Sequence Tensor")
    )
    # the engine makes the first two; the third is under Output; the page explains the others
    explained = set(re.findall(r"`([A-Z]\w+)` is\s`", text))
    assert named - known - headings - explained <= {"DraftHead", "EngineLock", "VerifyOutput"}


def test_outputs_are_told_with_their_fields():
    (page,) = (text for file, text in PAGES.items() if file.parent.name == "verify")
    assert "`eagle_kernels.types.VerifyOutput(predicts, accept_index, accept_token_num)`" in page


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.parent.name)
def test_pages_are_sound_markdown(path):
    """Fences are closed, and no section of a docstring was left as it was written."""
    text = PAGES[path]
    assert text.count("```") % 2 == 0
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert not re.search(r"^(Args|Returns|Raises|Attributes|Example|Source):$", prose, re.MULTILINE)
