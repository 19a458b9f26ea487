"""Every example runs as a program, and its text is that of plain decoding."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("safetensors")

from eagle_kernels import EAGLEInference
from eagle_kernels.engine.models.loading import demo_pair
from eagle_kernels.examples import chat

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.stem for path in (ROOT / "eagle_kernels" / "examples").glob("*.py") if path.stem != "__init__")


def run(name: str) -> str:
    # on a machine that other tests keep busy, threads of one product wait for each other
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", f"eagle_kernels.examples.{name}"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.cross
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "chat"])
def test_an_example_runs(name):
    """All but the conversation, which wants models with a chat template."""
    if name == "own_server":
        pytest.importorskip("transformers")
    told = run(name)
    assert "tokens a step" in told and "the text of plain decoding" in told
    assert "ANOTHER TEXT" not in told


def test_an_example_for_each_kind_of_user():
    assert EXAMPLES == ["chat", "own_drafter", "own_server", "paged_server", "seeds"]


def test_a_conversation_holds_what_was_said(tmp_path, monkeypatch):
    """Each question comes with all that was said before, the streamed answers included."""
    target, draft = demo_pair()
    shutil.copytree(target, tmp_path / "target")
    template = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}"
    (tmp_path / "target" / "chat_template.jinja").write_text(template)
    said, encode_chat = [], EAGLEInference.encode_chat
    monkeypatch.setattr(EAGLEInference, "encode_chat", lambda *given: said.append(encode_chat(*given)) or said[-1])
    engine = EAGLEInference.from_pretrained(draft, tmp_path / "target", device="cpu")
    answers = "".join(chat.converse(engine, ["import os", "def f("], 12))
    first, second = (bytes(ids).decode() for ids in said)
    assert first == "u: import os\n" and second.startswith(f"{first}a: ") and second.endswith("\nu: def f(\n")
    assert answers.startswith(second.removeprefix(f"{first}a: ").removesuffix("u: def f(\n"))
    monkeypatch.setattr("sys.argv", ["chat"])
    with pytest.raises(SystemExit, match="usage: python -m eagle_kernels.examples.chat TARGET DRAFT"):
        chat.main()


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_holds():
    """Texts are the stored ones; of pictures, whose speeds differ, the kind is."""
    pytest.importorskip("matplotlib")
    from op_tests.harness import notebook

    stored = json.loads((ROOT / "eagle_kernels" / "examples" / "tour.ipynb").read_text(encoding="utf-8"))
    seen = notebook.run(stored)
    held = [cell["outputs"] for cell in notebook.code_cells(stored)]
    assert any("image/svg+xml" in output.get("data", {}) for outputs in held for output in outputs)
    assert sum("image/png" in output.get("data", {}) for outputs in held for output in outputs) >= 2
    for now, before in zip(seen, held, strict=True):
        assert [output["output_type"] for output in now] == [output["output_type"] for output in before]
        for output, other in zip(now, before):
            assert output.get("text") == other.get("text")
            assert output.get("data", {}).keys() == other.get("data", {}).keys()
            assert output.get("data", {}).get("image/svg+xml") == other.get("data", {}).get("image/svg+xml")


def test_a_notebook_s_cells_share_names_and_name_what_fails():
    from op_tests.harness import notebook

    def cells(*sources: str) -> dict:
        return {"cells": [{"cell_type": "code", "source": [source]} for source in sources]}

    printed, value = notebook.run(cells("x = 2\nprint(x)", "x + 1"))
    assert printed == [{"output_type": "stream", "name": "stdout", "text": ["2\n"]}]
    assert value[0]["data"] == {"text/plain": ["3"]}
    with pytest.raises(notebook.CellError, match="cell 2: ZeroDivisionError"):
        notebook.run(cells("x = 0", "1 / x"))
    with pytest.raises(notebook.CellError, match="cell 1: SyntaxError"):
        notebook.run(cells("%matplotlib inline"))
