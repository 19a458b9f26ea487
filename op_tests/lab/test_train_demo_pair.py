"""The demo trainer on a made-up library: corpus rules, unrolled attention, the whole program, and resuming it."""

import json
import random
import shutil

import pytest
import torch

from bench.lab import train_demo_pair
from bench.lab.training import acceptance, unrolled
from bench.lab.training.corpus import END_OF_TEXT, MAX_FILE_BYTES, held_out_prompts, read_corpus, token_stream
from bench.lab.training.recipe import Stage, make_recipe
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.engine.models.heads import EagleConfig, EagleHead
from eagle_kernels.engine.models.loading import load_draft, load_target
from eagle_kernels.engine.models.tokenizer import ByteTokenizer, load_tokenizer

MODEL_FILES = ("target/model.safetensors", "draft/model.safetensors")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """120 short modules, and files of every kind that must be left out."""
    root = tmp_path_factory.mktemp("library")
    generator = random.Random(0)
    for index in range(120):
        lines = [f"def function_{index}_{line}(x): return x + {generator.randrange(1000)}" for line in range(12)]
        path = root / f"package_{index % 3}" / f"module_{index}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    left_out = {
        "site-packages/other.py": "other = 1\n",
        "package_0/__pycache__/cached.py": "cached = 1\n",
        "lib2to3/tests/data/broken.py": "print 1\n",
        "large.py": "#" * (MAX_FILE_BYTES + 1),
        "empty.py": "",
        "notes.txt": "no code\n",
        "package_9/copy.py": (root / "package_0/module_0.py").read_text(),
    }
    for name, text in left_out.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def run(library, output, *arguments: str) -> int:
    always = ["--tiny", "--stdlib", library, "--stdlib-version", "3.0.0 of the test", "--device", "cpu"]
    return train_demo_pair.main([str(argument) for argument in (*always, "--output", output, *arguments)])


@pytest.fixture(scope="module")
def trained(library, tmp_path_factory):
    output = tmp_path_factory.mktemp("trained")
    assert run(library, output) == 0
    return output


def test_corpus_takes_the_right_files(library):
    corpus = read_corpus(library)
    paths = [file.path for file in (*corpus.train, *corpus.held_out)]
    assert sorted(paths) == sorted(f"package_{index % 3}/module_{index}.py" for index in range(120))
    assert 0 < len(corpus.held_out) < 20
    assert corpus == read_corpus(library)
    stream = token_stream(corpus.held_out)
    first = corpus.held_out[0].contents
    assert bytes(stream[: len(first)].tolist()) == first and stream[len(first)] == END_OF_TEXT
    assert int((stream == END_OF_TEXT).sum()) == len(corpus.held_out)


def test_prompts_start_at_lines_of_different_files(library):
    files = read_corpus(library).held_out
    prompts = held_out_prompts(files, count=3, num_bytes=64)
    assert len(set(prompts)) == 3
    for prompt in prompts:
        assert len(prompt) == 64 and prompt.startswith("def ")
        assert sum(prompt.encode() in file.contents for file in files) == 1


def test_an_empty_library_is_refused(tmp_path):
    with pytest.raises(ValueError, match="0 training and 0 held-out files"):
        read_corpus(tmp_path)


@pytest.mark.parametrize("depths", [1, 4])
def test_unrolled_attend_equals_the_dense_mask(depths):
    torch.manual_seed(0)
    batch, rows, heads, kv_heads, head_dim = 2, 9, 4, 2, 8
    attend = unrolled.UnrolledAttend()
    keys, values, visible = [], [], []
    for depth in range(depths):
        query = torch.randn(batch, rows, heads, head_dim, dtype=torch.float64, requires_grad=True)
        key, value = (
            torch.randn(batch, rows, kv_heads, head_dim, dtype=torch.float64, requires_grad=True) for _ in range(2)
        )
        attended = attend(0, query, key, value)
        keys.append(key)
        values.append(value)
        visible.append(torch.eye(rows) if depth else torch.ones(rows, rows).tril())
    dense_key, dense_value = (torch.cat(x, dim=1).repeat_interleave(2, dim=2) for x in (keys, values))
    scores = torch.einsum("bthd,bshd->bhts", query, dense_key) * head_dim**-0.5
    probs = scores.masked_fill(torch.cat(visible, dim=1) == 0, float("-inf")).softmax(-1)
    expected = torch.einsum("bhts,bshd->bthd", probs, dense_value)
    # The closure takes its softmax in fp32.
    torch.testing.assert_close(attended, expected, atol=1e-6, rtol=1e-6)
    leaves = [query, *keys, *values]
    weight = torch.randn_like(expected)
    gradients = (torch.autograd.grad((output * weight).sum(), leaves) for output in (attended, expected))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_unrolled_rows_line_up_with_the_target(trained):
    """Depth 0 of the unrolled head is a plain forward, and each later depth loses one row at the end."""
    target = load_target(trained / "target")
    head = load_draft(trained / "draft", target)
    tokens = torch.randint(257, (2, 12))
    target_logits, features = unrolled.observe(target, head, tokens)
    with torch.no_grad():
        logits = list(unrolled.unroll(head, tokens, features, depths=3))
        positions = unrolled.positions_of(tokens[:, 1:])
        plain = head(tokens[:, 1:], features[:, :-1], positions, unrolled.causal_attend, from_target=True)
    assert torch.equal(logits[0], plain.logits)
    assert [x.shape[1] for x in logits] == [target_logits[:, 1 + depth :].shape[1] for depth in range(3)]
    # What the kept rows see ends inside the window: other padding, same logits.
    longer = torch.cat((tokens, torch.randint(257, (2, 4))), dim=1)
    with torch.no_grad():
        longer_logits = list(unrolled.unroll(head, longer, unrolled.observe(target, head, longer)[1], depths=3))
    for short, long in zip(logits, longer_logits, strict=True):
        torch.testing.assert_close(short, long[:, : short.shape[1]])


def test_learning_rate_rises_then_falls_to_zero():
    stage = Stage("target", 1000, 1, learning_rate=2.0, weight_decay=0.0, clip_norm=1.0)
    rates = [stage.learning_rate_at(step) for step in range(1000)]
    assert rates[0] == 2.0 / 100 and rates[99] == rates[100] == 2.0
    assert rates[100:] == sorted(rates[100:], reverse=True) and 0 < rates[-1] < 1e-4


def test_draft_vocabulary_is_frequent_and_ascending():
    stream = torch.tensor([7, 7, 7, 3, 3, 9, 9, 1, END_OF_TEXT], dtype=torch.int16)
    assert train_demo_pair.choose_draft_vocabulary(stream, 3).tolist() == [3, 7, END_OF_TEXT]
    assert train_demo_pair.choose_draft_vocabulary(stream, 5).tolist() == [1, 3, 7, 9, END_OF_TEXT]


def test_the_whole_program(trained):
    record = json.loads((trained / "training.json").read_text())
    assert record["steps"] == {"target": 10, "head": 10}
    assert record["stdlib_version"] == "3.0.0 of the test"
    assert 0 < record["held_out_loss"] < 6 and len(record["head_accuracy_by_depth"]) == 3
    prompts = json.loads((trained / "prompts.json").read_text())
    assert len(prompts) == record["prompts"] and all(len(prompt) == 64 for prompt in prompts)

    target = load_target(trained / "target")
    draft = load_draft(trained / "draft", target)
    assert isinstance(load_tokenizer(trained / "target"), ByteTokenizer)
    assert (target.max_length, target.kv_shape, draft.aux_layers) == (64, (3, 1, 16), (1, 2, 3))
    assert record["parameters"]["target"] == train_demo_pair.count_parameters(target)
    draft_ids = unrolled.draft_vocabulary_of(draft)
    assert len(draft_ids) == 64 and END_OF_TEXT in draft_ids


@torch.no_grad()
def test_transformers_reads_the_target_alike(trained):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained / "target", dtype=torch.float32)
    tokens = torch.randint(257, (2, 20))
    target = load_target(trained / "target")
    logits = target(tokens, unrolled.positions_of(tokens), unrolled.causal_attend).logits
    torch.testing.assert_close(logits, theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_the_real_sizes_fit_the_repository():
    recipe = make_recipe()
    with torch.device("meta"):
        target = Decoder(DecoderConfig.from_dict(recipe.target_config))
        head = EagleHead(EagleConfig.from_dict(recipe.head_config))
    parameters = train_demo_pair.count_parameters(target), train_demo_pair.count_parameters(head)
    assert parameters == (4_263_680, 1_049_600)
    assert sum(parameters) <= train_demo_pair.MAX_PARAMETERS
    assert head.config.aux_layers == (1, 3, 5)


def test_the_files_may_be_read_by_whoever_the_umask_admits(trained):
    """A plain file beside them shows who that is."""
    usual = (trained / "training.json").stat().st_mode
    assert [(trained / name).stat().st_mode for name in MODEL_FILES] == [usual, usual]


@pytest.mark.slow
def test_acceptance_goes_into_the_record_and_the_card(trained, tmp_path, capsys):
    """Short prompts and few tokens: the tiny pair has 64 positions."""
    pair = tmp_path / "pair"
    shutil.copytree(trained, pair)
    assert "Not measured yet." in (pair / "README.md").read_text()
    prompts = [prompt[:20] for prompt in json.loads((pair / "prompts.json").read_text())][:3]
    (pair / "prompts.json").write_text(json.dumps(prompts))

    measure = ["--output", str(pair), "--device", "cpu", "--measure-acceptance", "--new-tokens", "6"]
    assert train_demo_pair.main(measure) == 0
    record = json.loads((pair / "training.json").read_text())
    trees = [(name, heat) for heat in (0.0, 1.0) for name in ("top 8, 5 levels, 32 nodes", "chain of 5")]
    assert [(row["tree"], row["temperature"]) for row in record["acceptance"]] == trees
    for row in record["acceptance"]:
        assert (row["prompts"], row["new_tokens"], row["identical_to_plain"]) == (3, 3 * 6, True)
        assert row["device"].startswith("CPU")
        # The prefill brings the first token of each prompt.
        assert 3 <= row["steps"] <= 3 * 5
        assert row["mean_accept_length"] == pytest.approx(1 + sum(row["accepted_per_depth"]), abs=1e-3)
    assert capsys.readouterr().out.count("tokens a step") == 4

    card = (pair / "README.md").read_text()
    assert "Not measured yet." not in card and "| chain of 5 | 1 | 18 |" in card
    (pair / "README.md").unlink()
    assert train_demo_pair.main(["--output", str(pair), "--card-only"]) == 0
    assert (pair / "README.md").read_text() == card
    assert train_demo_pair.main(measure) == 0
    assert json.loads((pair / "training.json").read_text()) == record, "measured again, the same"


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 8])
def test_acceptance_does_not_depend_on_the_batch(trained, tmp_path, monkeypatch, batch_size):
    pair = tmp_path / "pair"
    shutil.copytree(trained, pair)
    (pair / "prompts.json").write_text(json.dumps(["def f(x):", "import os\n", "class A"]))
    monkeypatch.setattr(acceptance, "BATCH_SIZE", batch_size)
    monkeypatch.setattr(acceptance, "TREES", acceptance.TREES[1:])
    rows = acceptance.measure_acceptance(pair, torch.device("cpu"), new_tokens=4)
    monkeypatch.setattr(acceptance, "BATCH_SIZE", 2)
    assert rows == acceptance.measure_acceptance(pair, torch.device("cpu"), new_tokens=4)


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_weights(trained, library, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    # No time at all: every call trains one step, saves, and asks to be called again.
    interrupted = ["--checkpoint-dir", checkpoints, "--time-budget-s", "0"]
    statuses = [run(library, tmp_path / "output", *interrupted)]
    while statuses[-1] == train_demo_pair.EXIT_UNFINISHED:
        statuses.append(run(library, tmp_path / "output", *interrupted))
    assert statuses[-1] == 0 and len(statuses) > 15
    for name in MODEL_FILES:
        assert (tmp_path / "output" / name).read_bytes() == (trained / name).read_bytes()
    with pytest.raises(ValueError, match="other settings"):
        run(library, tmp_path / "output", "--checkpoint-dir", checkpoints, "--seed", "1")


def test_a_time_budget_needs_somewhere_to_save(library, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(library, tmp_path, "--time-budget-s", "5")
    assert "needs --checkpoint-dir" in capsys.readouterr().err
