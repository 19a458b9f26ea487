"""A folder of several drafts, of which `adaptive="auto"` takes the fastest; texts do not depend on the choice."""

import json
import logging
import types
from pathlib import Path

import pytest

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.config import several_drafts
from eagle_kernels.engine.models.protocol import ModelError
from op_tests.engine.toys import random_llama, write_decoder

PROMPTS = [[5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(drafts, target): the target itself, another model, and one of other sizes that does not fit."""
    around = tmp_path_factory.mktemp("several")
    target = write_decoder(random_llama(std=0.4), around / "target")
    for name, model in (("its own", random_llama(std=0.4)), ("other", random_llama(seed=3)),
                        ("a wider", random_llama(vocab_size=70))):  # fmt: skip
        write_decoder(model, around / "drafts" / name)
    (around / "drafts" / "prompts.json").write_text(json.dumps(PROMPTS))
    return around / "drafts", target


def load(folders, **options):
    config = EAGLEConfig(**{"adaptive": "auto", "topk": 2, "num_steps": 3} | options)
    return EAGLEInference.from_pretrained(*folders, config, device="cpu", allow_larger_draft=True)


def test_one_of_them_is_taken(folders, caplog, monkeypatch):
    """Those that do not fit are left out by name, and speeds of the others are told."""
    monkeypatch.setattr(several_drafts, "_NEW_TOKENS", 8)
    caplog.set_level(logging.INFO)
    engine = load(folders)
    assert type(engine.draft).__name__ == "CausalDraft" and engine.config.adaptive == "auto"
    assert (
        "a wider is left out: " in caplog.text and "the draft must have the target's 61 tokens, got 70" in caplog.text
    )
    (told,) = [record.getMessage() for record in caplog.records if "tokens a second: " in record.getMessage()]
    assert "its own " in told and "other " in told and "a wider" not in told
    plain = engine.generate(PROMPTS, 12, speculative=False, progress=False).output_ids
    assert engine.generate(PROMPTS, 12, progress=False).output_ids == plain


def test_the_fastest_counts(tmp_path):
    """By the tokens a second of the second time; the prompts are those of the folder, cut from the left."""
    (tmp_path / "prompts.json").write_text(json.dumps([[1] * 90, [2, 3], [4]]))
    seconds, asked = {"a": [0.1, 9.0], "b": [7.0, 2.0], "c": [5.0, 3.0]}, []

    def engine_of(name):
        def generate(prompts, count, **options):
            asked.append((prompts, count, options["adaptive"], options["temperature"]))
            return types.SimpleNamespace(
                stats=types.SimpleNamespace(generated_tokens=100, decode_time_s=seconds[name].pop(0))
            )

        return types.SimpleNamespace(generate=generate)

    target = types.SimpleNamespace(max_length=100, vocab_size=9)
    config = EAGLEConfig(max_batch=2)
    found = several_drafts.fastest(
        [tmp_path / name for name in "abc"], lambda path: path.name, engine_of, target, config
    )
    assert found == "b" and len(asked) == 6
    assert set(map(str, asked)) == {str(([[1] * 36, [2, 3]], 64, None, 0.0))}


def test_without_prompts_some_tokens_are_drawn(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(several_drafts, "_NEW_TOKENS", 8)
    drafts = tmp_path / "drafts"
    for name in ("its own", "other"):
        write_decoder(random_llama(std=0.4), drafts / name)
    engine = load((drafts, folders[1]))
    assert engine.draft is not None


def test_what_cannot_be_is_named(folders, tmp_path):
    drafts, target = folders
    rule = r"holds several drafts \(a wider, its own, other\): name one of them, or adaptive='auto' takes the fastest"
    with pytest.raises(ModelError, match=rule):
        load(folders, adaptive=None)
    with pytest.raises(
        ValueError, match="method must be 'draft_model' or None for a draft of CausalDraft, got 'medusa'"
    ):
        load(folders, method="medusa")
    with pytest.raises(ValueError, match="max_length must be above 64 to choose among several drafts, .* got 64"):
        load(folders, max_length=64)
    for content, got in (("{", "None"), ("[]", r"\[\]"), ("[[1, 61]]", r"\[1, 61\]"), ('["text"]', "'text'")):
        broken = tmp_path / "broken"
        for name in ("one", "two"):
            write_decoder(random_llama(std=0.4), broken / name)
        (broken / "prompts.json").write_text(content)
        with pytest.raises(ModelError, match=f"prompts.json must be a list of prompts, .* got {got}"):
            load((broken, target))


def test_other_folders_are_read_as_before(tmp_path):
    """One folder inside, a draft's own, or none: what was said of them is still said."""
    assert several_drafts.folders_of_drafts(None, EAGLEConfig(), "cpu") == []
    assert several_drafts.folders_of_drafts(tmp_path / "none", EAGLEConfig(), "cpu") == []
    write_decoder(random_llama(), tmp_path / "inside" / "one")
    assert several_drafts.folders_of_drafts(tmp_path / "inside", EAGLEConfig(), "cpu") == []
    write_decoder(random_llama(), tmp_path / "inside" / "two")
    write_decoder(random_llama(), tmp_path / "inside")
    assert several_drafts.folders_of_drafts(Path(tmp_path / "inside"), EAGLEConfig(), "cpu") == []
