"""Every example runs as a program, and its text is that of plain decoding; the small engine's is the engine's."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.models.loading import demo_pair, load_draft, load_target
from eagle_kernels.examples import chat, mini_engine, own_drafter, seeds
from eagle_kernels.examples.mini_engine import MiniEngine, Request, TreeShape
from op_tests.engine.toys import random_head, random_llama, write_decoder

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
    same = "the text of EAGLEInference" if name == "mini_engine" else "the text of plain decoding"
    assert "tokens a step" in told and same in told
    assert "ANOTHER TEXT" not in told


@pytest.mark.parametrize("example", [own_drafter, seeds], ids=lambda each: each.__name__)
def test_an_example_holds_what_it_says(example, tmp_path, monkeypatch, capsys):
    """They compare texts themselves; here ten tokens of a small model, which may be its own draft."""
    folder = write_decoder(random_llama(vocab_size=257, num_layers=1), tmp_path, tokenizer_class="ByteTokenizer")
    monkeypatch.setattr(example, "demo_pair", lambda: (folder, folder))
    generate, params = EAGLEInference.generate, SamplingParams
    monkeypatch.setattr(EAGLEInference, "generate", lambda engine, ids, _, **more: generate(engine, ids, 10, **more))
    monkeypatch.setattr(seeds, "SamplingParams", lambda **given: params(**given | {"max_new_tokens": 10}))
    example.main()
    (rate,) = re.findall(r"^([\d.]+) tokens a step, and the text of plain decoding$", capsys.readouterr().out, re.M)
    assert float(rate) > (1.4 if example is seeds else 0.9)


def test_a_bigram_is_drafted_as_often_as_it_was_there():
    text = bytes([3, 1, 3, 1, 3, 2, 3, 1, 0])
    draft = own_drafter.BigramDraft(text, 5, torch.device("cpu"))
    hidden = torch.randn(1, 5, 2)
    logits, after = draft.forward(torch.arange(5)[None], hidden, None, None, from_target=True)
    counts = torch.tensor([[sum(pair == (a, b) for pair in zip(text, text[1:])) for b in range(5)] for a in range(5)])
    expected = (counts + 0.1) / (counts.sum(1, keepdim=True) + 0.5)
    torch.testing.assert_close(logits[0].exp(), expected)
    assert after is hidden and draft.vocab_size == draft.draft_vocab_size == 5


def test_an_example_for_each_kind_of_user():
    assert EXAMPLES == ["chat", "mini_engine", "own_drafter", "own_server", "seeds"]


# some end with a newline, one with the token after its prompt
TEXTS = {
    "import os\n\ndef walk(": 24,
    "class Stack:\n": 1,
    "x": 17,
    "for i in range(9):\n    print(i)\n\nfor j": 40,
    "def a(": 9,
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request):
    """A small engine whose requests wait for rows and pages."""
    target_folder, draft_folder = demo_pair()
    target = load_target(target_folder, request.param)
    draft, ends = load_draft(draft_folder, target), tuple(b"\n")
    return MiniEngine(target, draft, TreeShape(3, 4, 10), num_rows=3, num_pages=8, end_token_ids=ends)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_small_engine_writes_what_the_engine_writes(engine, temperature, monkeypatch):
    """In the same steps; again in rows and pages that were used, with prompts in parts, steps launched otherwise."""
    requests = [Request([*text.encode()], size, temperature, seed=size) for text, size in TEXTS.items()]
    config = EAGLEConfig(3, 4, 10, eos_token_ids=tuple(b"\n"), max_batch=2)
    expected, stats = mini_engine.generate(EAGLEInference(engine.draft, engine.target, config), requests)
    assert (engine.launch != engine.step) == engine.on_gpu, "on a GPU a step is captured"
    for rows_at_once, lag in ((256, engine.lag), (5, 1 - engine.lag)):
        monkeypatch.setattr(mini_engine, "PROMPT_ROWS", rows_at_once)
        engine.lag = lag
        engine.run(requests)
        assert [request.tokens for request in requests] == expected
        assert sum(request.num_steps for request in requests) == stats.steps
        assert sorted(engine.free_rows) == [0, 1, 2] and sorted(engine.free_pages) == [*range(8)]
        assert (engine.batch.block_table == -1).all(), "rows that are nobody's write nothing"
        engine.launch = engine.step


def test_the_small_engine_refuses_what_could_never_begin(engine):
    most = 8 * 16 - 1 - engine.shape.num_slots
    for refused in (Request([], 1), Request([1], 0), Request([1], most + 1)):
        with pytest.raises(ValueError, match="a request must have a prompt, new tokens and at most 8 pages, got"):
            engine.submit(refused)
    engine.submit(Request([1], most))


class Watched(MiniEngine):
    """Checks before every step who holds which row and pages, and that nobody waits without need."""

    num_most = 0

    def advance(self):
        super().advance()
        self.admit()
        held = [page for request in self.running.values() for page in request.pages]
        num_pages = self.target_pool.k_cache.shape[1]
        assert sorted([*held, *self.free_pages]) == [*range(num_pages)]
        assert sorted([*self.running, *self.free_rows]) == [*range(len(self.batch.lengths))]
        for index, table in enumerate(self.batch.block_table.tolist()):
            pages = self.running[index].pages if index in self.running else []
            assert table == pages + [-1] * (len(table) - len(pages))
        for request in self.running.values():
            num_tokens = len(request.prompt) + request.max_new_tokens + self.shape.num_slots
            assert (len(request.pages) - 1) * 16 < num_tokens <= len(request.pages) * 16
        begun = [request in self.running.values() or bool(request.tokens) for request in self.asked]
        assert begun == sorted(begun, reverse=True), "requests begin in their order"
        if self.waiting:
            (first, _), needed = self.waiting[0], self.waiting[0][1]
            assert first is self.asked[begun.index(False)] and (not self.free_rows or needed > len(self.free_pages))
        self.num_most = max(self.num_most, len(self.running))


@pytest.mark.parametrize(("num_rows", "num_pages"), [(2, None), (3, 9)])
def test_the_small_engine_keeps_account(num_rows, num_pages, monkeypatch):
    """For requests of random lengths; without a number of pages there are enough for the longest in all rows."""
    monkeypatch.setattr(mini_engine, "PROMPT_ROWS", 7)
    target, rng = random_llama(num_layers=6, max_length=96).requires_grad_(False), random.Random(num_rows)
    draft = random_head(target, aux_layers=(1, 3, 5))
    engine = Watched(target, draft, TreeShape(2, 2, 5), num_rows=num_rows, num_pages=num_pages)
    if num_pages is None:
        assert engine.most_pages == 96 // 16 and len(engine.free_pages) == 6 * num_rows
    engine.asked = []
    for number in range(6):
        size = rng.choice([1, 2, 9])
        length = rng.choice([1, 11 - size % 11, 30, 91 - size])
        prompt = [rng.randrange(61) for _ in range(length)]
        engine.asked.append(Request(prompt, size, temperature=number % 2, seed=number))
    engine.run(engine.asked)
    assert engine.num_most == num_rows or num_pages is not None
    assert all(len(request.tokens) == request.max_new_tokens for request in engine.asked)
    config = EAGLEConfig(2, 2, 5, eos_token_ids=())
    expected = mini_engine.generate(EAGLEInference(draft, target, config), engine.asked).output_ids
    assert [request.tokens for request in engine.asked] == expected


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
