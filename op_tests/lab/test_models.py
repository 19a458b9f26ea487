"""Pairs by name, the rule that they keep, and loading: what is made, and what is said where it cannot be."""

import importlib.util
import json
import sys

import pytest
import torch

from bench.lab import loader, registry
from bench.lab.loader import load_model, load_pair, load_tokenizer, resolve
from bench.lab.registry import REGISTRY, ModelPair, get_pair, list_pairs
from eagle_kernels.engine.models.loading import demo_pair
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.engine.models.tokenizer import ByteTokenizer

from .stock import PROMPT, PROMPT_IDS, VOCAB, refused, stock


def test_pairs_are_found_by_name():
    names = list_pairs()
    assert names[:4] == ["gpt2_dev", "tinyllama_llama3", "phi3_llama3", "llama3_self"]
    assert sum(name.endswith("_eagle3") for name in names) >= 3 and "embedded" in names
    for name in names:
        pair = get_pair(name)
        assert pair.pair_name == name and REGISTRY[name] is pair
        assert {pair.draft_dtype, pair.target_dtype} <= set(loader.DTYPES)
    pair = get_pair("gpt2_dev")
    assert (pair.draft_model_id, pair.target_model_id, pair.draft_dtype) == ("gpt2", "gpt2-xl", "float16")
    pair = get_pair("llama3_self")
    assert pair.draft_model_id == pair.target_model_id and pair.draft_dtype == "int4"
    with pytest.raises(KeyError, match="name must be one of gpt2_dev, .*, embedded, got 'gpt3'"):
        get_pair("gpt3")
    with pytest.raises(AttributeError):
        pair.draft_model_id = "gpt2"


def test_the_pairs_that_break_the_vocabulary_rule_are_marked():
    broken = {name for name in list_pairs() if get_pair(name).vocabulary_fault}
    assert broken == {"tinyllama_llama3", "phi3_llama3"}
    said = refused(lambda: load_pair("tinyllama_llama3"))
    assert said.startswith("tinyllama_llama3: the draft must have the target's tokens, ") and "32000 of Llama-2" in said
    said = refused(get_pair("phi3_llama3").check, ValueError)
    assert " has 32064 of " in said and "128256 of Llama-3; pairs that fit: gpt2_dev, llama3_self, " in said
    # of models that nobody has listed, files decide; heads have the target's tokens
    assert ModelPair("new", "a/b", "gpt2").vocabulary_fault is None
    assert ModelPair("new", "gpt2", "meta-llama/Meta-Llama-3-8B-Instruct", method="eagle").vocabulary_fault is None


def test_the_list_is_printed(capsys):
    registry.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list_pairs()) + 2 and sum("CANNOT BE RUN" in line for line in lines) == 2


def test_the_embedded_pair_is_an_engine(device):
    engine = load_pair("embedded", device, topk=1, num_steps=2)
    assert engine.target.dtype == torch.float32 and engine.config.eos_token_ids == (256,)
    text, stats = engine.generate(list(b"import os\n"), 4)
    assert len(text) == 4 and stats.accepted > 0


def save_words(words: dict, folder, **sizes):
    """A folder as `folder`'s, of another model and vocabulary."""
    stock("llama", num_key_value_heads=2, **sizes).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))


def test_a_pair_of_language_models(folder, device, tmp_path, monkeypatch):
    """Also with an int4 draft, whose loading is not ours; one with other tokens is refused by its files."""
    pair = ModelPair("own", str(folder), str(folder), "float32", "float32")
    prompt = PROMPT_IDS
    engine = load_pair(pair, device, topk=2, num_steps=2)
    text, stats = engine.generate(prompt, 9)
    assert stats.mean_accept_length > 2 and text == engine.generate(prompt, 9, speculative=False).output_ids

    def load_in_4_bits(*arguments):
        assert arguments == (folder, "int4", device, torch.float32)
        return stock("llama", num_key_value_heads=2, eos_token_id=VOCAB - 1).to(device), None

    monkeypatch.setattr(loader, "load_model", load_in_4_bits)
    monkeypatch.setattr(loader, "_check_int4", lambda device: None)
    pair = ModelPair("own", str(folder), str(folder), "int4", "float32")
    engine = load_pair(pair, device, topk=2, num_steps=2)
    assert engine.generate(prompt, 9).output_ids == text and engine.config.eos_token_ids == (VOCAB - 1,)
    save_words({"w5": 6}, tmp_path)
    with pytest.raises(ModelError, match="must have the same tokenizer, but 'w5' is"):
        load_pair(ModelPair("own", str(tmp_path), str(folder), "float32", "float32"), device)
    with pytest.raises(ValueError, match="dtype must not be int4 but of a draft"):
        load_pair(ModelPair("own", str(folder), str(folder), "int4", "int4"), device)


@pytest.mark.parametrize("dtype", ["float32", "fp16", "bf16"])
def test_a_model_and_its_tokenizer_are_loaded(folder, dtype):
    model, tokenizer = load_model(folder, dtype, "cpu")
    assert model.dtype == loader.TORCH_DTYPES[loader.read_dtype("", dtype)] and not model.training
    assert tokenizer.encode(PROMPT) == PROMPT_IDS and tokenizer.pad_token == "<end>"


def test_what_cannot_be_loaded_is_said_in_one_line(folder, tmp_path, monkeypatch):
    said = refused(lambda: load_model(folder, "int8"))
    assert said.startswith("load_model: dtype must be one of float16, ") and said.endswith(", fp32, got 'int8'")
    assert "transformers cannot load it: " in refused(lambda: load_model(tmp_path, "fp32"), ModelError)
    assert "transformers finds no tokenizer: " in refused(lambda: load_tokenizer(tmp_path))
    said = refused(lambda: resolve("embedded/x"))
    assert said == "resolve: model_id must be embedded/target or embedded/draft, got 'embedded/x'"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    said = refused(lambda: resolve("gpt2"))
    assert said.startswith("resolve: 'gpt2' is no folder, and fetching it needs transformers: pip install")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refused(lambda: load_model(folder, "fp32")).startswith("load_model: transformers is missing: pip install")


def test_4_bits_need_a_gpu_and_a_package(folder, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for call in (lambda: load_model(folder, "int4"), lambda: load_pair("llama3_self")):
        said = refused(call)
        assert said.startswith("load_model: dtype='int4' needs bitsandbytes and accelerate, not installed: pip install")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    said = refused(lambda: load_model(folder, "int4", "cpu"))
    assert said == "load_model: dtype='int4' must be on a GPU, got device cpu"


def test_models_are_fetched(monkeypatch, tmp_path):
    """Weights of the old format only where there are no others; a failure is one line, whatever is raised."""
    hub, calls = pytest.importorskip("huggingface_hub"), []

    def fetch(model_id, allow_patterns):
        calls.append((model_id, "pytorch_model*.bin*" in allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    assert resolve("some/model") == tmp_path
    (tmp_path / "model.safetensors").touch()
    assert resolve("some/model") == tmp_path
    assert calls == [("some/model", False), ("some/model", True), ("some/model", False)]

    def refuse(*_, **__):
        raise KeyError("no route\nto host")

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    said = refused(lambda: resolve("some/model"), ModelError)
    assert said.startswith("resolve: 'some/model' is no folder and could not be fetched ") and "no route" in said


def test_embedded_models_by_name():
    assert (resolve("embedded/target"), resolve("embedded/draft")) == demo_pair()
    assert isinstance(load_tokenizer("embedded/target"), ByteTokenizer)


def test_the_loader_s_command(folder, capsys):
    assert loader.main(["--model", str(folder), "--dtype", "float32", "--n-tokens", "3", "--prompt", PROMPT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{folder} as float32 on ") and lines[1].startswith("  parameters  0.1 M")
    assert "MB" in lines[2] and lines[3].startswith(f"  3 tokens: '{PROMPT} w")
    assert loader.main(["--model", "embedded/nothing"]) == 1
    said = capsys.readouterr().err
    assert said == "error: resolve: model_id must be embedded/target or embedded/draft, got 'embedded/nothing'\n"
