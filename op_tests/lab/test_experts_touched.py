"""Experts touched by the rows of steps: counted as they are, next to what even routing gives."""

import json

import pytest
import torch

from bench.lab import experts_touched
from bench.lab.training.corpus import Corpus, SourceFile
from eagle_kernels.engine.models.layers.mixture import count_touched
from eagle_kernels.engine.models.loading import load_target

pytest.importorskip("transformers")


def test_counts_by_hand():
    experts = torch.tensor([[0, 1], [1, 2], [3, 4], [3, 4], [9, 9]])
    assert count_touched(experts, 1) == pytest.approx(9 / 5)
    assert count_touched(experts, 2) == pytest.approx((3 + 2) / 2)
    assert count_touched(experts, 4) == 5
    assert count_touched(torch.stack((experts, experts + 1)), 4) == 5


@pytest.mark.parametrize("case", ["qwen3 moe", "ernie moe"])
def test_a_model_is_measured(case, tmp_path, monkeypatch):
    from op_tests.engine.families import CASES, SIZES, write_target

    write_target(*CASES[case], tmp_path)
    target, draft = load_target(tmp_path), load_target(tmp_path)
    monkeypatch.setattr(experts_touched, "TREES", {2: (1, 1), 8: (3, 2)})
    monkeypatch.setattr(experts_touched, "ROWS", (1, 2, 8, 16))
    prompts = torch.randint(1, SIZES["vocab_size"], (3, 40)).tolist()
    lines = experts_touched.measure(target, draft, prompts)
    assert lines[0] == {"rows": 1, "even": 3, "text": 3, "requests": 3}
    assert [sorted(line.keys() - {"rows", "even"}) for line in lines[1:]] == [
        ["one tree", "requests", "text"], ["one tree", "text", "trees of 8"], ["text", "trees of 8"]
    ]  # fmt: skip
    assert all(3 <= count <= 7 for line in lines for name, count in line.items() if name != "rows")
    assert lines[-1]["text"] > 6 and not any(module._forward_hooks for module in target.modules())


def test_the_rows_of_a_tree_are_its_nodes(tmp_path):
    """Each step's, of each prompt, and no rows of prompts."""
    from op_tests.engine.families import CASES, SIZES, write_target

    write_target(*CASES["qwen3 moe"], tmp_path)
    target, draft = load_target(tmp_path), load_target(tmp_path)
    prompts = torch.randint(1, SIZES["vocab_size"], (2, 13)).tolist()
    routed = experts_touched.route_trees(target, draft, prompts, 8, num_steps=3)
    assert routed.shape == (2, 2, 3, 8, 3)  # layers with experts, prompts, steps, nodes, experts


@pytest.mark.slow
def test_the_command_trains_and_writes(tmp_path, monkeypatch, capsys):
    text = b"".join(b"def f%d(x):\n    return x + %d\n" % (i, i) for i in range(99))
    files = [SourceFile(f"{number}.py", text[number:]) for number in range(2)]
    monkeypatch.setattr(experts_touched, "read_corpus", lambda root: Corpus(files, files, ""))
    output = tmp_path / "lines.jsonl"
    command = ["--target", str(tmp_path / "target"), "--train", "2", "--prompts", "2", "--output", str(output)]
    assert experts_touched.main(command) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["rows"] for line in lines] == [1, 2, 4, 8, 16, 32, 64] and lines[0]["train_steps"] == 2
    assert "| rows | nodes of one tree |" in capsys.readouterr().out
