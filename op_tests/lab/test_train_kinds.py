"""Drafts of several kinds that learn from one pass of states: what they learn is what the engine drafts."""

import json
import re

import pytest
import torch

from bench.lab import train_kinds
from bench.lab.training import comparison, kinds
from bench.lab.training.kind_fitting import accuracy_of, fit_kind, pieces_of
from bench.lab.training.kinds import KINDS, BlockAttend, Plan, last_anchor, layers_of, loss_of, read_target_config
from bench.lab.training.recipe import Stage
from bench.lab.training.states import capture_states, lesson_of
from bench.lab.training.trainer import EXIT_UNFINISHED, Run
from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.loading import demo_pair, load_target, read_kind
from eagle_kernels.engine.models.protocol import FINAL_NORM
from eagle_kernels.reference.causal_attend import causal_attend, positions_of

PROMPT = b"class Walker:\n    def walk(self):\n"
LAYERS = (1, 3, 5)


@pytest.fixture(scope="module")
def target():
    return load_target(demo_pair()[0])


@pytest.fixture(scope="module")
def own_text(target):
    """A text that the target says itself, as a window."""
    engine = EAGLEInference(None, target, EAGLEConfig(method="ngram", eos_token_ids=(), max_length=256))
    ids = [*PROMPT, *engine.generate([list(PROMPT)], 44, speculative=False, progress=False).output_ids[0]]
    return torch.tensor([ids], dtype=torch.int16)


def make(kind, target, levels=4):
    plan = Plan(levels, LAYERS, None, 0xFF, 0)
    return plan, *KINDS[kind].make(target, read_target_config(demo_pair()[0]), plan)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "block")) for kind in KINDS])
def test_a_text_that_is_learnt_by_heart_is_drafted_whole(kind, target, own_text, tmp_path):
    """A draft that learns other rows than it drafts would say all right in training, and nothing in the engine."""
    plan, draft, config = make(kind, target)
    states = capture_states(target, own_text, LAYERS, 1)
    stage = Stage(kind, 120 if kind == "block" else 40, 1, 3e-3, 0.0, 0.5)
    fit_kind(Run(target.device, "{}", None, report_every=1000), kind, draft, target, states, plan, stage)
    assert min(accuracy_of(kind, draft, target, states, plan, 1)) > 0.9
    KINDS[kind].save(draft, config, tmp_path)
    config = EAGLEConfig(topk=1, num_steps=4, num_draft_tokens=5, eos_token_ids=(), max_length=256)
    engine = EAGLEInference(KINDS[kind].load(tmp_path, target), target, config)
    made = comparison.decode_all(engine, [list(PROMPT)], 1, 40)
    assert made.texts[0] == own_text[0, len(PROMPT) :][:40].tolist()
    assert made.tokens / made.steps > 4.2


def test_states_and_lessons_are_the_targets(target):
    windows = torch.randint(256, (5, 24), dtype=torch.int16)
    states = capture_states(target, windows, (3, 1), 2)
    assert states.layers == (1, 3, FINAL_NORM) and len(states) == 5
    places = torch.tensor([4, 0])
    view = states.view(places, (3, FINAL_NORM))
    with torch.no_grad():
        tokens = windows[places].long()
        whole = target(tokens, positions_of(tokens), causal_attend, capture=(3, FINAL_NORM))
        lesson = lesson_of(target, view, torch.tensor([7, 9, 250]))
    torch.testing.assert_close(view.features, whole.features)
    assert torch.equal(lesson.choices, whole.logits.argmax(-1))
    torch.testing.assert_close(lesson.probs, whole.logits[..., [7, 9, 250]].softmax(-1), atol=1e-5, rtol=1e-4)
    assert layers_of("medusa", Plan(2, (1,), None, 0, 0)) == (FINAL_NORM,)


def test_blocks_see_the_text_before_them_and_themselves():
    torch.manual_seed(0)
    batch, window, size, heads, kv_heads, width = 2, 9, 3, 4, 2, 8
    anchors = torch.tensor([0, 3, 5])
    context = [torch.randn(batch, window, kv_heads, width, dtype=torch.float64) for _ in range(2)]
    query = torch.randn(batch * 3, size, heads, width, dtype=torch.float64)
    own = [torch.randn(batch * 3, size, kv_heads, width, dtype=torch.float64) for _ in range(2)]
    attend = BlockAttend(anchors)
    attend.store(1, *context)
    attended = attend(1, query, *own).unflatten(0, (batch, 3))
    for row in range(batch):
        for block, anchor in enumerate(anchors.tolist()):
            place = row * 3 + block
            key, value = (
                torch.cat((seen[row, : anchor + 1], mine[place])).repeat_interleave(2, dim=1)
                for seen, mine in zip(context, own)
            )
            scores = torch.einsum("shd,khd->hsk", query[place], key) * width**-0.5
            expected = torch.einsum("hsk,khd->shd", scores.softmax(-1), value)
            torch.testing.assert_close(attended[row, block], expected, atol=1e-6, rtol=1e-6)


def test_a_mask_token_teaches_nothing():
    """Its logit is -inf, and the loss is finite; so are the gradients."""
    logits = torch.randn(1, 2, 5, requires_grad=True)
    masked = logits.masked_fill(torch.arange(5) == 3, float("-inf"))
    lesson = kinds.Lesson(torch.zeros(1, 4, 1), torch.zeros(1, 4).long(), torch.full((1, 4, 5), 0.2))
    loss = loss_of(iter([kinds.Guess(masked, torch.tensor([1, 2]))]), lesson, torch.ones(1, 4, dtype=torch.bool))
    loss.backward()
    assert loss.isfinite() and logits.grad.isfinite().all() and not logits.grad[..., 3].any()


def test_each_pass_has_every_window_once(target, own_text):
    states = capture_states(target, own_text.repeat(8, 1), LAYERS, 4)
    pieces = pieces_of(states, Stage("block", 8, 2, 1.0, 0.0, 1.0), 4, seed=3)
    seen = [pieces(step)[0] for step in range(8)]
    for start in (0, 4):
        assert sorted(torch.cat([piece.places for piece in seen[start : start + 4]]).tolist()) == list(range(8))
    most = last_anchor(own_text.shape[1], 4)
    assert all(int(piece.anchors.min()) >= 0 and int(piece.anchors.max()) < most for piece in seen)
    assert [*map(str, seen)] == [str(pieces(step)[0]) for step in range(8)]  # of a step alone
    with pytest.raises(ValueError, match="windows must have more than 13 tokens for 10 levels, got 12"):
        pieces_of(capture_states(target, own_text[:, :12], LAYERS, 2), Stage("x", 1, 1, 1.0, 0.0, 1.0), 10, 0)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("library")
    for index in range(60):
        lines = [f"def function_{index}_{line}(x): return x + {line * index}" for line in range(12)]
        (root / f"module_{index}.py").write_text("\n".join(lines) + "\n")
    return root


def run(library, output, *arguments):
    always = ["--tiny", "--stdlib", library, "--device", "cpu", "--prompts", 1, "--new-tokens", 4, "--output", output]
    return train_kinds.main([*map(str, (*always, *arguments))])


def test_the_whole_command(library, tmp_path, capsys, monkeypatch):
    """A folder of each kind, which loads as that kind, and one card."""
    monkeypatch.setattr(comparison, "BATCH_SIZES", (1, 2))
    assert run(library, tmp_path, "--kind", "medusa", "block") == 0
    monkeypatch.setattr(comparison, "BATCH_SIZES", (1,))
    assert run(library, tmp_path, "--kind", "parallel", "eagle3", "--steps", "2") == 0
    told = capsys.readouterr().out
    found = {kind: read_kind(tmp_path / kind) for kind in KINDS}
    assert found == {"eagle3": "EAGLE-3", "medusa": "Medusa", "parallel": "P-EAGLE", "block": "DFlash"}
    record, card = json.loads((tmp_path / "training.json").read_text()), (tmp_path / "README.md").read_text()
    assert record["kinds"].keys() == KINDS.keys() and record["kinds"]["eagle3"]["steps"] == 2
    rows = record["comparison"]
    assert len(rows) == 2 * 2 * 3 + 2 * 3 and all(row["same_as_plain"] == 1 for row in rows)
    equal = {row["nodes"] for row in rows if row["drafts"] != "tree of 32 nodes"}
    assert equal == {4}  # a chain, and a tree of as many nodes
    assert "Most tokens a second for one request: " in card and "| block | chain of 3 | 2 |" in card + told
    config = EAGLEConfig(topk=2, num_steps=3, adaptive="auto")  # which chooses among the folders
    engine = EAGLEInference.from_pretrained(tmp_path, demo_pair()[0], config, device="cpu")
    texts = [engine.generate(PROMPT.decode(), 8, progress=False, speculative=kind).output_ids for kind in (True, False)]
    assert sorted(engine.session.draft_names) == sorted(KINDS) and texts[0] == texts[1]


def test_a_run_goes_on_where_its_time_ended(library, tmp_path):
    options = ("--kind", "medusa", "--checkpoint-dir", tmp_path / "checkpoints")
    assert run(library, tmp_path / "one", *options, "--time-budget-s", "0.01") == EXIT_UNFINISHED
    assert not (tmp_path / "one" / "medusa").exists()
    assert run(library, tmp_path / "one", *options) == 0
    assert run(library, tmp_path / "two", "--kind", "medusa") == 0
    one, two = ((tmp_path / name / "medusa" / "medusa_lm_head.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--steps", "0"], "--steps: must be an int of at least 1, got '0'"),
        (["--kind", "hydra"], "invalid choice: 'hydra'"),
        (["--time-budget-s", "3"], "--time-budget-s needs --checkpoint-dir"),
        (["--window", "5"], "windows must have more than 6 tokens for 3 levels, got 5"),
        (["--device", "cuda:9"], "--device cuda:9"),
        (["--target", "nowhere"], "there is no such folder"),
    ],
)
def test_what_cannot_be_is_named(library, tmp_path, capsys, arguments, told):
    try:
        status = run(library, tmp_path / "output", *arguments)
    except SystemExit as exit:
        status = exit.code
    assert status in (1, 2) and told in capsys.readouterr().err


def test_a_target_of_other_tokens_and_a_short_text_are_refused(library, tmp_path, capsys):
    from op_tests.engine.toys import random_llama, write_decoder

    folder = write_decoder(random_llama(), tmp_path / "target")
    assert run(library, tmp_path / "output", "--target", folder) == 1
    assert "--target must have 257 tokens, the bytes and the end of text, got 61" in capsys.readouterr().err
    assert run(library, tmp_path / "output", "--window", "2000") == 1
    assert "--window must be at most the 1024 positions of the target, got 2000" in capsys.readouterr().err
    small = tmp_path / "small"
    small.mkdir()
    for index in range(60):
        (small / f"module_{index}.py").write_text(f"{index}\n")
    assert run(small, tmp_path / "output", "--window", "1000") == 1
    assert re.search("the text has [0-9]{3} tokens, and a window has 1000", capsys.readouterr().err)
