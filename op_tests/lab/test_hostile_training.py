"""Hostile files of a training run, and progress where nobody watches."""

import io
import sys
import time

import pytest
import torch

from bench.lab.training import answers, chat, head_data, trainer
from bench.lab.training.recipe import Stage
from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.tokenizer import ByteTokenizer
from op_tests.engine.hostile import DEEP, Command, refused, write_saved
from op_tests.engine.toys import random_llama


def test_a_line_of_training_data_that_is_nested(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "fine"}\n' + DEEP + "\n")
    told = refused(
        head_data.read_examples, [tmp_path / "data.jsonl"], ByteTokenizer(), chat.PlainFormat(), 9, needs_answers=True
    )
    assert told == f"{tmp_path / 'data.jsonl'}:2: not JSON: its values are nested too deeply"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{}", "[1, 2]", "[1, x]"], ":3: must be the ids of an answer, got '[1, x]'"),
        (["{}", '{"a": 1}'], """:2: must be the ids of an answer, got '{"a": 1}'"""),
        (["{}", DEEP], ":2: must be the ids of an answer, got '[[[["),
        (["text"], " was made with other settings (by another program); start in another folder"),
        (["[1]"], " was made with other settings (by another program); start in another folder"),
    ],
    ids=["words", "object", "deep", "text", "list"],
)
def test_answers_that_are_none(tmp_path, lines, message):
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    assert refused(answers.read_answers, path, "{}").startswith(f"{path}{message}")
    assert path.read_text().splitlines() == lines, "left as it was"


def test_a_checkpoint_of_training_that_holds_code(tmp_path):
    path = tmp_path / "head.pt"
    run = trainer.Run(torch.device("cpu"), "{}", tmp_path)
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters())
    for content in (write_saved({"step": Command()}), b"\x80\x02nonsense", write_saved([1]), write_saved({"step": 1})):
        path.write_bytes(content)
        told = refused(run._restore, Stage("head", 1, 1, 1.0, 0.0, 1.0), module, optimizer)
        assert told.startswith(f"{tmp_path}: head.pt cannot be ") and "weights_only" not in told


class Pipe(io.StringIO):
    """No terminal."""


def test_progress_in_a_pipe_is_told_by_the_clock(monkeypatch):
    """However long a step takes, and without a change of what is trained or recorded."""
    clock, told = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    pipe, stage = Pipe(), Stage("head", 100, 1, 1.0, 0.0, 1.0)
    progress = trainer.Progress(stage, 0, 10.0, 50, pipe, lambda: told.append(1) or "accuracy")
    for step in range(1, 50):
        clock[0] += 4.0
        progress.update(step, torch.tensor(1.0))
    lines = pipe.getvalue().splitlines()
    assert len(lines) == 16 and lines[0].startswith("head 3/100  loss 1.0000  ") and lines[0].endswith(" s left")
    assert not told, "what is told at every so many steps, and recorded, does not depend on the clock"
    progress.update(50, torch.tensor(1.0))
    assert pipe.getvalue().splitlines()[-1].startswith("head 50/100  loss 1.0000  accuracy") and told == [1]


def test_decoding_in_a_pipe_is_told_by_the_clock(monkeypatch):
    engine = EAGLEInference(random_llama(), random_llama(), EAGLEConfig(topk=1, num_steps=2))
    want = engine.generate([[1], [2]], 3, seeds=0).output_ids
    for seconds, lines in ((0.0, [f"{count} of 6 tokens" for count in range(1, 7)]), (60.0, [])):
        told = []
        monkeypatch.setattr(trainer, "REPORT_SECONDS", seconds)
        assert trainer.decode(engine, [[1], [2]], 3, told.append, seeds=0).output_ids == want and told == lines
    assert trainer.decode(engine, [[1], [2]], 3, None, seeds=0).output_ids == want


def test_a_terminal_with_a_bar_gets_no_lines(monkeypatch, capsys):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    pipe, stage = Pipe(), Stage("head", 2, 1, 1.0, 0.0, 1.0)
    progress = trainer.Progress(stage, 0, 10.0, 1, pipe, None)
    for step in (1, 2):
        progress.update(step, torch.tensor(1.0))
    assert pipe.getvalue() == "" and "head" in capsys.readouterr().err
