"""`train-head` on a tiny target: what is read and learnt, what is written, and that it speeds the engine up."""

import contextlib
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.lab import train_head as train_module
from bench.lab.train_head import main, new_head, settle, train_head
from bench.lab.training import chat, head_data, unrolled
from bench.lab.training.answers import answer_prompts
from bench.lab.training.head_fitting import Accuracy, Piece, piece_loss, shuffled_pieces
from bench.lab.training.head_recipe import HeadOptions, default_aux_layers, head_config
from bench.lab.training.trainer import EXIT_UNFINISHED, tell_changes
from eagle_kernels.engine.config.eagle_config import EAGLEConfig
from eagle_kernels.engine.inference import EAGLEInference
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import FAMILIES, DecoderConfig
from eagle_kernels.engine.models.head_formats import recognise
from eagle_kernels.engine.models.heads import EagleConfig
from eagle_kernels.engine.models.loading import load_draft, load_target, read_head
from eagle_kernels.engine.models.tokenizer import ByteTokenizer
from eagle_kernels.runtime.interrupts import EXIT_INTERRUPTED
from op_tests.engine.heads import save_folder

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}
TARGET_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tokenizer_class": "ByteTokenizer",
    "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 5e5, "max_position_embeddings": 128, "eos_token_id": 256,
}  # fmt: skip
SMALL = {
    "window": 32, "depths": 3, "batch_size": 8, "accumulate": 1, "draft_vocab_size": 48, "learning_rate": 1e-2,
    "validation_prompts": 3, "validation_tokens": 16, "report_every": 1,
}  # fmt: skip
FEW = SMALL | {"validation_prompts": 1, "validation_tokens": 2}
# in the order of their letters: the most frequent bytes are few
TEXT = "".join(f"the {first}{second} of the {second}{first}\n" for first in "abcdefgh" for second in "abcdefgh")


def arguments_of(target: Path, data: Path, output: Path, **options) -> list[str]:
    command = ["--target", str(target), "--data", str(data), "--output", str(output), "--device", "cpu"]
    for name, value in options.items():
        command += ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])
    return command


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    target = Decoder(DecoderConfig.from_dict(TARGET_CONFIG))
    for name, parameter in target.named_parameters():
        if parameter.ndim == 2:  # what follows a token depends on it more than on those before: soon learnt
            is_outer = name.endswith(("embed_tokens.weight", "lm_head.weight"))
            torch.nn.init.normal_(parameter, std=1.0 if is_outer else 0.05)
    save_folder(target, TARGET_CONFIG, folder)
    return folder


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT)
    return path


def examples_of(file: Path, needs_answers: bool) -> list[head_data.Example]:
    return head_data.read_examples([file], ByteTokenizer(), chat.PlainFormat(), 32, needs_answers=needs_answers)


def target_and_head(folder: Path, examples: list[head_data.Example]):
    """The target, the options and a head that has learnt nothing."""
    target = load_target(folder)
    options, aux_layers = settle(HeadOptions(**SMALL), target)
    return target, options, new_head(folder, target, examples, options, aux_layers)[0]


@pytest.fixture(scope="module")
def trained(target_folder, text_file, tmp_path_factory):
    """(folder, record, lines of progress) of a run on the target's own answers, through the command line."""
    output = tmp_path_factory.mktemp("trained") / "head"
    options = SMALL | {"steps": 60, "regenerate": True, "answer_tokens": 24, "json": True, "validate_every": 40}
    report, progress = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(report), contextlib.redirect_stderr(progress):
        assert main(arguments_of(target_folder, text_file, output, **options)) == 0
    return output, json.loads(report.getvalue()), progress.getvalue().splitlines()


@pytest.mark.slow
def test_the_loss_falls_and_progress_says_so(trained):
    _, record, lines = trained
    steps = [line for line in lines if line.startswith("head ")]
    losses = [float(line.split("loss ")[1].split()[0]) for line in steps]
    assert len(losses) == 60 and losses[-1] < 0.6 * losses[0]
    assert all("accuracy 0." in line or "accuracy 1." in line for line in steps)
    assert steps[-1].endswith(" 0 s left") and "tok/s" in steps[-1]
    assert list(record["validations"]) == ["40", "60"]
    assert record["final_loss"] == pytest.approx(losses[-1], abs=1e-3)


@pytest.mark.slow
def test_the_trained_head_is_accepted_more_often(trained, target_folder, text_file):
    folder, record, _ = trained
    examples = examples_of(text_file, needs_answers=True)
    target, _, untrained = target_and_head(target_folder, examples)
    prompts = [example.tokens[:10].tolist() for example in examples[:4]]

    def accepted(head) -> float:
        engine = EAGLEInference(head, target, EAGLEConfig.chain(3))
        output = engine.generate(prompts, 24, seeds=0)
        assert output.output_ids == engine.generate(prompts, 24, seeds=0, speculative=False).output_ids
        return output.stats.mean_accept_length

    before, after = accepted(untrained.requires_grad_(False)), accepted(load_draft(folder, target))
    assert after > before + 0.5
    assert [row["tree"] for row in record["acceptance"]] == ["top 8, 5 levels, 32 nodes", "chain of 5"]
    assert all(row["identical_to_plain"] and row["mean_accept_length"] > 1.3 for row in record["acceptance"])


def test_the_folder_is_one_of_specforge(trained, target_folder):
    folder, record, _ = trained
    config = json.loads((folder / "config.json").read_text())
    assert recognise(config).name == "SpecForge/SGLang"
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]  # outputs of layers
    assert config["rope_theta"] == 5e5 and config["norm_before_residual"] is False
    file = read_head(folder)
    assert (file.kind, file.head.aux_layers, file.remarks) == ("EAGLE-3", (1, 2, 3), [])
    assert file.head.vocabulary_faults() == []
    assert record["aux_layers"] is None and record["steps"] == 60

    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()[1:]]
    counts = torch.bincount(torch.tensor(sum(answers, [])), minlength=257).tolist()
    expected = sorted(sorted(range(257), key=lambda token: (-counts[token], token))[:48])
    assert (file.head.d2t + torch.arange(48)).tolist() == expected
    assert file.head.t2d.nonzero().flatten().tolist() == expected
    assert record["vocabulary_coverage"] == pytest.approx(sum(counts[token] for token in expected) / sum(counts))


def test_regenerated_answers_are_the_targets_own(trained, target_folder, text_file, tmp_path, capsys):
    folder, _, _ = trained
    target = load_target(target_folder)
    train, _ = head_data.split_held_out(examples_of(text_file, needs_answers=False), 0.05)
    prompts = [head_data.prompts_of(example, ByteTokenizer(), chat.PlainFormat(), 8)[0] for example in train]
    lines = (folder / "answers.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines[1:]]
    assert len(answers) == len(prompts) > 0
    for prompt, answer in list(zip(prompts, answers))[:2]:
        tokens = list(prompt)
        for token in answer:
            logits = target(torch.tensor([tokens]), torch.arange(len(tokens))[None], unrolled.causal_attend).logits
            assert token == int(logits[0, -1].argmax())
            tokens.append(token)

    # A file that was cut off in a line goes on where it was whole, and other settings are refused by name.
    (tmp_path / "answers.jsonl").write_text("\n".join(lines[:3]) + "\n[1, 2")
    options = SMALL | {"steps": 60, "regenerate": True, "answer_tokens": 24}
    assert main(arguments_of(target_folder, text_file, tmp_path, **options, time_budget=0)) == EXIT_UNFINISHED
    assert "answers: 2 of" in capsys.readouterr().err
    assert (tmp_path / "answers.jsonl").read_text() == "\n".join(lines[:3]) + "\n"
    assert main(arguments_of(target_folder, text_file, tmp_path, **options | {"answer_tokens": 20})) == 1
    assert "other settings (answer_tokens 24, now 20)" in capsys.readouterr().err


def test_sampled_answers_do_not_depend_on_the_batch(target_folder, tmp_path):
    """Nor on where the run was cut off: every prompt has a seed of its own."""
    target = load_target(target_folder)
    config = EagleConfig.from_dict(head_config(target_folder, target, HeadOptions(), (1, 2, 3), 257))
    prompts = [[1, 2, 3], [7], [7], [9, 8]]
    options, path = HeadOptions(answer_tokens=6, answer_temperature=1.0, seed=5), tmp_path / "answers.jsonl"

    def answered(batch_size, deadline=math.inf):
        wanted = replace(options, batch_size=batch_size)
        return answer_prompts(target, config, prompts, path, "{}", wanted, end_token_ids=(256,), deadline=deadline)

    answers = answered(4)
    assert len({*map(tuple, answers)}) == 4
    path.write_text("\n".join(path.read_text().splitlines()[:2]) + "\n")
    assert answered(2) == answers and answered(1, deadline=0) == answers


def test_an_interrupted_run_ends_with_the_same_weights(target_folder, text_file, tmp_path, capsys):
    options = FEW | {"steps": 4}
    assert main(arguments_of(target_folder, text_file, tmp_path / "whole", **options)) == 0
    command = arguments_of(target_folder, text_file, tmp_path / "cut", **options)
    statuses = [main([*command, "--time-budget", "0"])]
    while statuses[-1] == EXIT_UNFINISHED:
        statuses.append(main([*command, "--time-budget", "0"]))
    assert statuses == [EXIT_UNFINISHED] * 3 + [0]
    whole, cut = (tmp_path / name / "model.safetensors" for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()
    states = [torch.load(tmp_path / name / "checkpoint/head.pt")["module"] for name in ("whole", "cut")]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())

    capsys.readouterr()
    assert main([*command, "--learning-rate", "0.5", "--steps", "5"]) == 1
    error = capsys.readouterr().err
    assert "learning_rate 0.01, now 0.5" in error and "steps 4, now 5" in error and "depths" not in error


def test_a_finished_run_that_is_given_again_keeps_what_it_said(target_folder, text_file, tmp_path):
    """The second time nothing is trained: accuracy and earlier validations are those of the record. A record that is
    not this run's says nothing of it."""
    options = FEW | {"steps": 2, "validate_every": 1}
    command, path = arguments_of(target_folder, text_file, tmp_path, **options), tmp_path / "training.json"
    assert main(command) == 0
    record = json.loads(path.read_text())
    assert list(record["validations"]) == ["1", "2"] and len(record["accuracy_by_depth"]) == 3
    assert main(command) == 0
    assert json.loads(path.read_text()) == record
    path.write_text(json.dumps(record | {"seed": 9}))
    assert main(command) == 0
    again = json.loads(path.read_text())
    assert list(again["validations"]) == ["2"] and again["accuracy_by_depth"] == []


@pytest.mark.slow
def test_a_run_that_is_cut_keeps_what_it_said(target_folder, text_file, tmp_path):
    """Every validation is there at the end, also of steps after which the time was up, and none is made twice."""
    options = FEW | {"steps": 4, "validate_every": 1}
    assert main(arguments_of(target_folder, text_file, tmp_path / "whole", **options)) == 0
    command, seen = arguments_of(target_folder, text_file, tmp_path / "cut", **options, time_budget=0), []
    path = tmp_path / "cut/training.json"
    while main(command) == EXIT_UNFINISHED:
        seen.append(list(json.loads(path.read_text())["validations"]) if path.exists() else [])
    assert seen == [[], ["1"], ["1", "2"]]
    records = [json.loads((tmp_path / name / "training.json").read_text()) for name in ("whole", "cut")]
    assert list(records[0]["validations"]) == ["1", "2", "3", "4"]
    assert records[0]["validations"] == records[1]["validations"]
    assert not path.with_suffix(".tmp").exists()


@pytest.mark.slow
def test_validations_of_one_record_are_alike(target_folder, text_file, tmp_path):
    """Those by other prompts are left out, and those of steps that were lost after the checkpoint are made again."""
    options = FEW | {"steps": 4, "validate_every": 1}
    command = arguments_of(target_folder, text_file, tmp_path, **options, time_budget=0)
    path = tmp_path / "training.json"
    for _ in range(3):
        assert main(command) == EXIT_UNFINISHED
    record = json.loads(path.read_text())
    rows = record["validations"]["2"]
    path.write_text(json.dumps(record | {"validations": {"1": rows, "2": "kept", "3": "lost"}}))
    checkpoint = torch.load(tmp_path / "checkpoint/head.pt")
    assert checkpoint["step"] == 3
    torch.save(checkpoint | {"step": 2}, tmp_path / "checkpoint/head.pt")
    assert main(command) == EXIT_UNFINISHED
    assert json.loads(path.read_text())["validations"] == {"1": rows, "2": "kept"}
    assert main(command) == 0
    found = json.loads(path.read_text())["validations"]
    assert found["2"] == "kept" and found["3"] != "lost" and list(found) == ["1", "2", "3", "4"]
    assert main([*command, "--validation-tokens", "3"]) == 0
    assert list(json.loads(path.read_text())["validations"]) == ["4"]


@pytest.mark.slow
def test_training_in_bf16(target_folder, text_file, tmp_path, capsys):
    """Matrix products in bf16, weights in fp32; the file is bf16, and the head that was measured is it."""
    options = SMALL | {"steps": 30, "validation_prompts": 1, "validation_tokens": 4, "dtype": "bfloat16", "json": True}
    assert main(arguments_of(target_folder, text_file, tmp_path, **options)) == 0
    captured = capsys.readouterr()
    losses = [float(line.split("loss ")[1].split()[0]) for line in captured.err.splitlines() if "loss " in line]
    assert len(losses) == 30 and all(map(math.isfinite, losses)) and losses[-1] < 0.8 * losses[0]
    assert json.loads(captured.out)["dtype"] == "torch.bfloat16"
    trained = torch.load(tmp_path / "checkpoint/head.pt")["module"]
    assert {tensor.dtype for tensor in trained.values() if tensor.is_floating_point()} == {torch.float32}
    assert read_head(tmp_path).dtypes == ["BF16"]


def test_pieces_add_up_to_the_whole_batch(target_folder):
    """Gradients of 2 batches of 2 are those of 1 batch of 4: lengths, masks and padding differ between them."""
    examples = [
        head_data.Example(torch.randint(257, (length,), dtype=torch.int32), torch.rand(length) < 0.6)
        for length in (3, 17, 9, 30)
    ]
    target, options, head = target_and_head(target_folder, examples)

    def loss_and_gradients(batch_size: int, accumulate: int):
        chosen = replace(options, batch_size=batch_size, accumulate=accumulate)
        pieces = shuffled_pieces(examples, chosen)(0)
        assert len(pieces) == accumulate
        losses = [piece_loss(head, target, Accuracy(3, target.device), piece) for piece in pieces]
        return sum(losses), torch.autograd.grad(sum(losses), list(head.parameters()))

    torch.testing.assert_close(loss_and_gradients(2, 2), loss_and_gradients(4, 1), atol=1e-6, rtol=1e-4)


def test_only_answers_are_learnt(target_folder):
    """What does not lead to an answer's token has no say in the loss; what does has."""
    tokens = torch.randint(257, (1, 12), generator=torch.Generator().manual_seed(1))
    is_answer = [False] * 5 + [True] * 4 + [False] * 3
    example = head_data.learn_answer(tokens[0, :5].tolist(), tokens[0, 5:9].tolist())
    assert example.is_learnt.tolist() == [*is_answer[1:9], False]
    target, _, head = target_and_head(target_folder, [example])
    batch = head_data.collate([example], shortest=12)
    counts = torch.tensor([4.0, 4.0, 4.0])
    loss = piece_loss(head, target, Accuracy(3, target.device), Piece(batch, counts))

    lesson = unrolled.study(target, head, batch.tokens)
    expected = 0.0
    for depth, logits in enumerate(unrolled.unroll(head, batch.tokens, lesson.features, 3)):
        for row in range(logits.shape[1]):
            predicted = row + depth + 2  # token index
            if predicted < 9 and is_answer[predicted] and head.t2d[lesson.choices[0, predicted - 1]]:
                terms = lesson.probs[0, predicted - 1] * logits[0, row].log_softmax(-1)
                expected += 0.8**depth * -terms.sum().item() / 4
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_study_is_observe_in_rows(target_folder, monkeypatch):
    target, _, head = target_and_head(target_folder, [head_data.learn_answer([1], [2, 3, 3])])
    tokens = torch.randint(257, (3, 7))
    monkeypatch.setattr(unrolled, "LOGIT_ROWS", 4)
    lesson = unrolled.study(target, head, tokens)
    logits, features = unrolled.observe(target, head, tokens)
    torch.testing.assert_close(lesson.features, features)
    assert torch.equal(lesson.choices, logits.argmax(-1))
    torch.testing.assert_close(lesson.probs, logits[..., unrolled.draft_vocabulary_of(head)].softmax(-1))


def test_frequencies_tie_to_the_lowest_id():
    frequency = torch.tensor([0, 2, 5, 2, 0, 2])
    for size, expected in ((2, [1, 2]), (3, [1, 2, 3]), (5, [0, 1, 2, 3, 5])):
        assert unrolled.most_frequent(frequency, size).tolist() == expected
    example = head_data.Example(torch.tensor([4, 1, 1, 3], dtype=torch.int32), torch.tensor([True, False, True, True]))
    assert head_data.count_tokens([example], 5).tolist() == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(32, (2, 16, 29)), (7, (2, 3, 4)), (6, (1, 3, 5)), (4, (1, 2, 3)), (3, (1, 2, 3)), (2, (0, 1, 2)), (1, (0, 1))],
)
def test_default_aux_layers(num_layers, expected):
    assert default_aux_layers(num_layers) == (expected, num_layers > 6)


def test_layers_are_read_as_a_list(capsys):
    with pytest.raises(SystemExit):
        main(["--target", "a", "--data", "b", "--output", "c", "--aux-layers", "1,x"])
    assert "--aux-layers: must be layer ids with commas between them, got '1,x'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"batch_size": 0}, "--batch-size must be at least 1, got 0"),
        ({"steps": 2.5}, "--steps must be of type int"),
        ({"learning_rate": float("nan")}, "--learning-rate must be at least 0, got nan"),
        ({"held_out": 1.0}, "--held-out must be below 1"),
        ({"draft_vocab_size": 8}, "--draft-vocab-size must be at least 9"),
    ],
)
def test_bad_options_are_named(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        HeadOptions(**options)


def test_a_run_killed_after_a_validation_goes_on(target_folder, text_file, tmp_path, monkeypatch):
    """Before its first checkpoint the folder holds a head already, known as the run's own. Two streams are read."""
    options = FEW | {"steps": 3, "aux_layers": "1,3", "validate_every": 1}
    command = arguments_of(target_folder, text_file, tmp_path, **options)
    measure = train_module.measure_head

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_module, "measure_head", killed)
    assert main(command) == EXIT_INTERRUPTED
    assert (tmp_path / "config.json").is_file() and not (tmp_path / "checkpoint/head.pt").exists()
    monkeypatch.setattr(train_module, "measure_head", measure)
    assert main(command) == 0
    assert read_head(tmp_path).head.aux_layers == (1, 3)


def test_misfits_are_refused(target_folder, text_file, tmp_path):
    half = {"device": CPU["device"], "dtype": torch.float16}
    for output, options, places, message in (
        (target_folder, {}, CPU, "holds another model"),
        (tmp_path, {"window": 256}, CPU, "--window must be at most the 128 positions"),
        (tmp_path, {}, half, "--dtype must be bfloat16 or float32, got float16"),
        (tmp_path, {"window": 32, "draft_vocab_size": 258}, CPU,
         "--draft-vocab-size must be at most the 257 tokens of the target, got 258"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            train_head(target_folder, [text_file], output, HeadOptions(**options), **places)
    assert tell_changes('{"a": 1, "b": {}}', '{"a": 2, "b": {"c": 1}}') == "a 1, now 2, b"


def test_a_target_behind_transformers_is_refused_first(text_file, tmp_path, capsys):
    """Before its weights are loaded, and before there is an output folder."""
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    assert main(arguments_of(tmp_path / "gpt2", text_file, tmp_path / "head")) == 1
    rule = f"--target must have a model_type of {', '.join(FAMILIES)}, got 'gpt2'"
    assert capsys.readouterr().err == f"error: train-head: {rule}\n"
    assert not (tmp_path / "head").exists()
