"""Small language models that draft: whose tokenizer they must have, and whose tables may be padded otherwise."""

from __future__ import annotations

import json

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.causal_draft import CausalDraft
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.tools.training.saving import save_folder
from op_tests.engine.toys import random_llama

CONFIG = EAGLEConfig(method="draft_model", topk=2, num_steps=3, num_draft_tokens=8)
PROMPTS = [[3, 1, 4, 1, 5], [9], [60, 60, 2]]
WORDS = {f"w{number}": number for number in range(55)}


def padded(model, vocab_size):
    """The same model with a table of another size; ids that it gains it never says."""
    other = random_llama(vocab_size=vocab_size, device=model.device)
    shared = min(vocab_size, model.vocab_size)
    tensors = model.state_dict()
    for name, tensor in other.state_dict().items():
        tensor.copy_(tensors[name]) if tensor.shape == tensors[name].shape else tensor.zero_()
    for table in ("model.embed_tokens.weight", "lm_head.weight"):
        other.state_dict()[table][:shared] = tensors[table][:shared]
    return other


@pytest.mark.cross
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("vocab_size", [58, 61, 64])
@pytest.mark.parametrize("strategy", ["target_match", "rejection"])
def test_tables_of_other_sizes(device, vocab_size, sampling, strategy):
    """The prompt holds an id that the smaller table lacks."""
    target = random_llama(device=device)
    config = EAGLEConfig(method="draft_model", topk=1, num_steps=3, verify_strategy=strategy, **sampling)
    engine = EAGLEInference(CausalDraft(padded(target, vocab_size), vocab_size=61), target, config)
    text, stats = engine.generate(PROMPTS, 25, seeds=range(3))
    plain = engine.generate(PROMPTS, 25, seeds=range(3), speculative=False).output_ids
    if not sampling or strategy == "target_match":
        assert text == plain
    if not sampling:
        # the target's own drafts are right, but for ids that are not there
        assert stats.mean_accept_length == 4.0 if vocab_size >= 61 else 2.2 < stats.mean_accept_length < 4.0


def test_sizes_that_nobody_has_explained(device):
    target = random_llama(device=device)
    with pytest.raises(ValueError, match=r"target's 61 tokens, got 64; .*CausalDraft\(model, vocab_size=61\)"):
        EAGLEInference(padded(target, 64), target, CONFIG)


def folder_of(model, path, words=None, added=()):
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False} | {
        name: getattr(model.config, name)
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings",
        )
    }  # fmt: skip
    save_folder(model, config, path)
    if words is not None:
        added = [{"content": content, "id": number} for content, number in added]
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": added}))
    return path


def load(tmp_path, draft_words, target_words, vocab_size=64, **added):
    pytest.importorskip("safetensors")
    target = random_llama()
    folders = (
        folder_of(padded(target, vocab_size), tmp_path / "draft", draft_words, **added),
        folder_of(target, tmp_path / "target", target_words),
    )
    return EAGLEInference.from_pretrained(*folders, CONFIG, device="cpu")


def test_folders_of_one_tokenizer(tmp_path):
    """One table has three rows more."""
    engine = load(tmp_path, WORDS, WORDS)
    assert (engine.draft.vocab_size, engine.draft.draft_vocab_size) == (61, 61)
    with torch.inference_mode():
        text, stats = engine.generate(PROMPTS, 25)
    assert text == engine.generate(PROMPTS, 25, speculative=False).output_ids
    assert stats.mean_accept_length > 3


REFUSED = {
    "another id": (WORDS | {"w3": 4, "w4": 3}, WORDS, "must have the same tokenizer, but 'w[34]' is [34] in one and"),
    "a word more": (WORDS | {"more": 55}, WORDS, "must have the same tokenizer, but only one of them has 'more'"),
    "no tokenizer": (None, WORDS, "must have the same tokenizer, but only one of them has a tokenizer.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_folders_of_other_tokenizers(tmp_path, case):
    draft_words, target_words, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        load(tmp_path, draft_words, target_words)
    with pytest.raises(ModelError, match="only one of them has '<think>'"):
        load(tmp_path / "added", WORDS, WORDS, added=[("<think>", 55)])


def test_folders_without_tokenizers(tmp_path):
    """Nobody knows, so the sizes must be the same."""
    load(tmp_path / "same", None, None, vocab_size=61)
    with pytest.raises(ValueError, match="must have the target's 61 tokens, got 64"):
        load(tmp_path / "other", None, None)
