"""`inspect`: what it says of heads of each format, every misfit, and the sweep of layer ids on the embedded pair."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels.engine.models.checkpoint import Checkpoint
from eagle_kernels.engine.models.heads import Eagle1Config, Eagle1Head, EagleConfig, EagleHead
from eagle_kernels.engine.models.loading import demo_pair, load_draft
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.tools import inspection
from eagle_kernels.tools.cli.main import main
from eagle_kernels.tools.inspection import SweepRow, inspect_head, judge, read_prompts_file, sweep_aux_layers
from op_tests.engine import heads
from op_tests.engine.heads import TARGET_VOCAB, WRITERS, save_folder
from op_tests.engine.toys import random_head, random_llama, write_decoder
from op_tests.tools.command import complaint, printed, read_rows

TARGET, DRAFT = demo_pair()
PROMPTS = TARGET.parent / "prompts.json"


def inspect(*arguments) -> int:
    return main(["inspect", "--dtype", "float32", *map(str, arguments)])


def shown(capsys, *arguments) -> str:
    return printed(capsys, "inspect", "--dtype", "float32", *arguments)


@pytest.fixture(scope="module")
def small_target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model = random_llama(num_layers=8, vocab_size=TARGET_VOCAB)
    config = {"model_type": "llama", "vocab_size": TARGET_VOCAB, "hidden_size": 32, "intermediate_size": 48,
              "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
              "max_position_embeddings": 256}  # fmt: skip
    save_folder(model, config, folder)
    return folder


def test_the_embedded_head(capsys):
    assert inspect() == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines() == [
        "format: SpecForge/SGLang",
        "kind: EAGLE-3",
        "parameters: 1,049,600 (BF16)",
        "hidden size: 256, MLP 640",
        "heads: 8 query, 4 key-value, of 32",
        "vocabulary: 128 of 257 tokens (50%)",
        "embedding, lm_head: the target's, its own",
        "max positions: 1024",
        "options: none",
        "reads: hidden_states [1, 3, 5] = outputs of layers [0, 2, 4] (written as layer outputs [0, 2, 4])",
        "fits the target: yes",
    ]


@pytest.mark.slow
def test_the_sweep_finds_the_embedded_head_right(capsys):
    """Off by one costs a head acceptance, and nothing else would show it."""
    arguments = ("--target", TARGET, "--sweep", PROMPTS, "--num-prompts", 6, "--max-new-tokens", 32)
    report = json.loads(shown(capsys, DRAFT, *arguments, "--json"))
    below, right, above = report["sweep"]
    assert [row["shift"] for row in report["sweep"]] == [-1, 0, 1]
    assert (below["aux_layers"], right["aux_layers"], above["aux_layers"]) == ([0, 2, 4], [1, 3, 5], [2, 4, 6])
    assert right["mean_accept_length"] > 1.15 * max(below["mean_accept_length"], above["mean_accept_length"])
    assert report["remarks"] == ["the sweep finds the layer ids right as they are"]


@pytest.mark.slow
def test_the_sweep_names_ids_of_the_other_convention(capsys, tmp_path):
    """The embedded head with its ids beside the sizes, where they number hidden_states."""
    shutil.copytree(DRAFT, tmp_path / "draft")
    heads.edit_config(tmp_path / "draft", eagle_config=None, eagle_aux_hidden_state_layer_ids=[0, 2, 4])
    arguments = ("--target", TARGET, "--sweep", PROMPTS, "--num-prompts", 3, "--max-new-tokens", 32)
    rows = read_rows(shown(capsys, tmp_path / "draft", *arguments))
    better = "the sweep finds the layer ids better when shifted by +1: they may be of the other"
    assert rows["remark"].startswith(better)
    assert "aux_layers=(1, 3, 5)" in rows["remark"]
    assert rows["acceptance, ids -1"] == "not measured, hidden_states [-1, 1, 3]"
    target = random_llama(num_layers=6, hidden_size=256, vocab_size=257)
    head = load_draft(tmp_path / "draft", target, aux_layers=(1, 3, 5))
    assert head.aux_layers == (1, 3, 5)


@pytest.mark.slow
def test_the_sweep_of_a_head_that_is_never_accepted_says_nothing(tmp_path):
    shutil.copytree(DRAFT, tmp_path / "draft")
    noise = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    heads.edit_tensors(tmp_path / "draft", **{"lm_head.weight": noise})
    report = inspect_head(tmp_path / "draft", TARGET, prompts=["import os\n"], max_new_tokens=8, device="cpu")
    assert [row.mean_accept_length < 1.05 for row in report.sweep] == [True] * 3
    assert report.remarks == ["the sweep cannot tell: the head is accepted (almost) never"]


@pytest.mark.parametrize(
    ("lengths", "verdict"),
    [
        ((1.0, 1.04, None), "cannot tell: the head is accepted"),
        ((1.49, 1.50, 1.2), "cannot tell: the lengths are too close"),
        ((None, 1.50, 1.51), "cannot tell: the lengths are too close"),
        ((None, 3.0, None), "cannot tell: no other layer ids fit"),
        ((2.8, 3.0, 2.0), "finds the layer ids right"),
        ((2.8, 2.0, 2.5), "better when shifted by -1"),
    ],
)
def test_the_sweep_judges_with_a_margin(lengths, verdict):
    (remark,) = judge([SweepRow(shift, (shift + 1,), length) for shift, length in zip((-1, 0, 1), lengths)])
    assert verdict in remark


def test_weights_of_the_target_are_read_for_a_sweep_alone(capsys, monkeypatch):
    read, folders = Checkpoint.read, []
    monkeypatch.setattr(Checkpoint, "read", lambda file: [folders.append(file.folder), *read(file)][1:])
    assert read_rows(shown(capsys, DRAFT, "--target", TARGET))["fits the target"] == "yes" and set(folders) == {DRAFT}
    assert inspect_head(DRAFT, TARGET, prompts=["a"], max_new_tokens=2, device="cpu").sweep and TARGET in folders


@pytest.mark.parametrize("form", WRITERS)
def test_heads_of_each_format(tmp_path, small_target, form):
    report = inspect_head(WRITERS[form](tmp_path / "three", heads.eagle3_tensors()), small_target)
    assert (report.format, report.kind, report.fits) == (form, "EAGLE-3", True)
    assert (report.hidden_states, report.layer_outputs) == ([2, 4, 5], [1, 3, 4])
    assert report.dtypes == ["F32"] and not report.has_embedding and report.has_output
    assert report.remarks == ["the head was made for 96 positions, the target for 256: requests end at 96 tokens"]
    head = WRITERS[form](tmp_path / "one", heads.eagle1_tensors())
    report = inspect_head(head, small_target, prompts=["a"], device="cpu")
    assert (report.format, report.kind, report.fits) == (form, "EAGLE-1", True)
    assert report.has_embedding and not report.has_output and report.options == ["fc_bias"]
    rows = dict(report.rows())
    assert rows["reads"] == "the stream after the final norm"
    assert rows["kind"] == "EAGLE-1 (EAGLE-2 is the same network)"
    assert "nothing to sweep: the head reads the target's last feature" in report.remarks


def test_a_language_model_is_a_draft_too(tmp_path, capsys, monkeypatch):
    """By its names and sizes; its tokens must be the target's."""
    monkeypatch.setattr(Checkpoint, "read", None)
    small = random_llama(num_layers=1, vocab_size=321)
    folder = write_decoder(small, tmp_path / "small", tokenizer_class="ByteTokenizer")
    rows = read_rows(shown(capsys, folder, "--target", TARGET))
    assert rows["kind"] == "a language model (Decoder), which drafts as method draft_model"
    assert (rows["parameters"], rows["heads"]) == ("28,320 (BF16)", "2 query, 1 key-value, of 16")
    assert (rows["vocabulary"], rows["embedding, lm_head"]) == ("321 of 321 tokens (100%)", "its own, its own")
    assert (rows["reads"], rows["fits the target"]) == ("nothing of its target but the tokens", "yes")
    assert rows["remark"] == "the model was made for 256 positions, the target for 1024: requests end at 256 tokens"
    heads.edit_config(folder, tokenizer_class=None)
    report = inspect_head(folder, TARGET, prompts=["a"])
    assert not report.fits and "the draft must have the target's 257 tokens, got 321" in report.misfits[0]
    assert report.remarks[-1] == "nothing to sweep: a language model reads no streams of the target"
    assert inspect_head(folder).fits is None and inspect(folder, "--target", TARGET) == 1
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    capsys.readouterr()
    assert inspect(folder, "--target", TARGET) == 1
    assert "only the first has a tokenizer.json" in read_rows(capsys.readouterr().out)["misfit"]


def test_options_and_defaults_without_a_target(tmp_path):
    options = {"norm_output": True, "norm_before_fc": True}
    report = inspect_head(heads.write_official(tmp_path, heads.eagle3_tensors(**options), **options))
    assert report.options == ["norm_output", "norm_before_fc"] and report.fits is None
    assert dict(report.rows())["reads"].startswith("the default streams of its target")


def test_every_reason_is_named(capsys, tmp_path):
    """A head of another vocabulary and width, whose own d2t is broken as well."""
    folder = heads.write_specforge(tmp_path / "head", heads.eagle3_tensors())
    heads.edit_tensors(folder, d2t=torch.full((heads.DRAFT_VOCAB,), 60))
    assert inspect(folder) == 1
    misfits = [line for line in capsys.readouterr().out.splitlines() if line.startswith("misfit: ")]
    assert misfits == ["misfit: d2t: draft id 1 maps to target id 61, outside the 61 there are"]
    assert inspect(folder, "--target", TARGET, "--sweep", PROMPTS) == 1
    lines = capsys.readouterr().out.splitlines()
    misfits = "\n".join(line for line in lines if line.startswith("misfit: "))
    assert "fits the target: no" in lines and not any("acceptance" in line for line in lines)
    reasons = ("vocab_size 61 is not the target's 257", "features of width 32", "draft id 1", "must hold embed_tokens")
    assert all(reason in misfits for reason in reasons)


def test_the_sweep_leaves_the_head_as_it_was():
    target = random_llama(num_layers=8, vocab_size=TARGET_VOCAB)
    head = EagleHead(EagleConfig.from_dict(heads.WIDTHS)).bind(target)
    rows = sweep_aux_layers(head, target, [[1, 2, 3]], 4)
    assert head.aux_layers == (2, 4, 5) and [row.aux_layers[0] for row in rows] == [1, 2, 3]
    with pytest.raises(ModelError, match="there are no layer ids to sweep"):
        sweep_aux_layers(Eagle1Head(Eagle1Config.from_dict(heads.WIDTHS)), target, [[1]], 4)


@pytest.mark.parametrize("aux_layers", [(0, 2, 4), (1, 3, 5), (0, 3, 5), (2, 3, 4)])
def test_a_sweep_measures_what_fits_and_changes_nothing(aux_layers, monkeypatch):
    """Layers 0 to 5 are there; what a call brings is what the head reads in it, and a call that fails mends it too."""
    target, asked = random_llama(num_layers=5, vocab_size=TARGET_VOCAB), []
    head = random_head(target, aux_layers=aux_layers)

    def generate(prompts, max_new_tokens, progress):
        assert (prompts, progress) == ([[1, 2, 3], [4]], False)
        if max_new_tokens == 9:
            raise RuntimeError("no more memory")
        return None, SimpleNamespace(mean_accept_length=float(sum(head.aux_layers)))

    def make(draft, verifier, config):
        assert draft is head and verifier is target
        asked.append((config.topk, config.num_steps, config.eos_token_ids))
        return SimpleNamespace(generate=generate)

    monkeypatch.setattr(inspection, "EAGLEInference", make)
    rows = sweep_aux_layers(head, target, [[1, 2, 3], [4]], 7)
    shifted = [tuple(layer + shift for layer in aux_layers) for shift in (-1, 0, 1)]
    lengths = [float(sum(layers)) if min(layers) >= 0 and max(layers) <= 5 else None for layers in shifted]
    assert rows == [SweepRow(*each) for each in zip((-1, 0, 1), shifted, lengths)] and head.aux_layers == aux_layers
    assert asked == [(1, inspection.SWEEP_STEPS, ())] * (3 - lengths.count(None))
    with pytest.raises(RuntimeError, match="no more memory"):
        sweep_aux_layers(head, target, [[1, 2, 3], [4]], 9)
    assert head.aux_layers == aux_layers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: there is no such folder"),
        (["--target", TARGET], "--target must come with the folder of a head"),
        ([DRAFT, "--sweep", PROMPTS], "--sweep needs the target as well: --target"),
        ([DRAFT, "--target", TARGET, "--sweep", "nowhere.txt"], "nowhere.txt: there is no such file of prompts"),
        ([TARGET, "--target", DRAFT], f"{DRAFT}: holds an EAGLE-3 head: a draft, not a target; are draft and target"),
        ([TARGET, "--sweep", PROMPTS], "--sweep needs the target as well: --target"),
    ],
)
def test_bad_input_gets_one_line(capsys, arguments, message):
    assert complaint(capsys, "inspect", *arguments).startswith(message)


def test_prompt_files(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n two\n")
    assert read_prompts_file(tmp_path / "a.txt") == ["one", " two"]
    (tmp_path / "c.txt").write_bytes("\ufeffone\u2028still\r\ntwo".encode())
    assert read_prompts_file(tmp_path / "c.txt") == ["one\u2028still", "two"]
    (tmp_path / "b.json").write_text('["x\\ny", "z"]')
    assert read_prompts_file(tmp_path / "b.json") == ["x\ny", "z"]
    for text, message in (
        ("[1]", "must hold a JSON list of texts"),
        ("[]", "holds no prompt"),
        ("{", "must be a JSON list of texts, or UTF-8 text"),
    ):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_prompts_file(tmp_path / "b.json")
