"""A published model of one megabyte, stories260K of llama2.c, with heads of 8: `EAGLE_KERNELS_STORIES=FOLDER`.

The folder holds `stories260K.bin` and `tok512.bin` as they were published (MIT licence).
"""

import json
import math
import os
import struct
from pathlib import Path

import pytest
import torch

from eagle_kernels import EAGLEInference
from eagle_kernels.tools.cli.main import main

safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("tokenizers")

FOLDER = os.environ.get("EAGLE_KERNELS_STORIES")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="EAGLE_KERNELS_STORIES names no folder with stories260K")
BEGIN, END = 1, 2
TEXT = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was too high."
)


@pytest.fixture(scope="module")
def stories(tmp_path_factory) -> Path:
    """The model and its tokenizer in Hugging Face layout."""
    folder = tmp_path_factory.mktemp("stories260K")
    _write_model(Path(FOLDER, "stories260K.bin").read_bytes(), folder)
    _write_tokenizer(Path(FOLDER, "tok512.bin").read_bytes(), folder)
    return folder


def _write_model(content: bytes, folder: Path) -> None:
    dim, hidden, layers, heads, kv_heads, vocabulary, positions = struct.unpack("7i", content[:28])
    numbers = torch.frombuffer(bytearray(content[28:]), dtype=torch.float32)
    head_dim, kv_dim, begin = dim // heads, dim // heads * kv_heads, 0

    def take(*shape):
        nonlocal begin
        begin += math.prod(shape)
        return numbers[begin - math.prod(shape) : begin].view(shape)

    def halves(weights, count):
        """Rotary embedding turns neighbouring pairs there, and halves of a head in Hugging Face's layout."""
        return weights.view(layers, count, head_dim // 2, 2, dim).transpose(2, 3).reshape(layers, count * head_dim, dim)

    embedding, input_norms = take(vocabulary, dim), take(layers, dim)
    query, key = halves(take(layers, dim, dim), heads), halves(take(layers, kv_dim, dim), kv_heads)
    parts = {
        "input_layernorm": input_norms, "self_attn.q_proj": query, "self_attn.k_proj": key,
        "self_attn.v_proj": take(layers, kv_dim, dim), "self_attn.o_proj": take(layers, dim, dim),
        "post_attention_layernorm": take(layers, dim), "mlp.gate_proj": take(layers, hidden, dim),
        "mlp.down_proj": take(layers, dim, hidden), "mlp.up_proj": take(layers, hidden, dim),
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": take(dim)}
    for name, part in parts.items():
        tensors |= {f"model.layers.{layer}.{name}.weight": weight for layer, weight in enumerate(part)}
    safetensors.save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocabulary, "hidden_size": dim,
        "intermediate_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": positions, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": BEGIN, "eos_token_id": END,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def _write_tokenizer(content: bytes, folder: Path) -> None:
    """Merges are the pairs of tokens that make another one, those with the best score first."""
    place, tokens, scores = 4, [], []
    while place < len(content):
        score, length = struct.unpack("fi", content[place : place + 8])
        place += 8 + length
        tokens.append(content[place - length : place].decode().replace(" ", "▁"))
        scores.append(score)
    tokens[:3] = ["<unk>", "<s>", "</s>"]
    ids = {token: index for index, token in enumerate(tokens)}
    pairs = [(token[:cut], token[cut:]) for token in tokens for cut in range(1, len(token))]
    pairs = [pair for pair in pairs if pair[0] in ids and pair[1] in ids and len(ids) > ids["".join(pair)] > 258]
    merges = sorted(pairs, key=lambda pair: -scores[ids["".join(pair)]])
    special = [{"id": index, "content": tokens[index], "special": True, "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False} for index in range(3)]  # fmt: skip
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    made = {
        "version": "1.0", "added_tokens": special, "pre_tokenizer": None, "truncation": None, "padding": None,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "post_processor": {"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BEGIN], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"},
                                                     {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "vocab": ids, "merges": merges, "byte_fallback": True, "unk_token": "<unk>",
                  "fuse_unk": True},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(made))


@pytest.mark.parametrize("method", ["naive", "ngram", "suffix", "draft_model"])
def test_the_published_text(stories, method, device):
    draft = stories if method == "draft_model" else None
    engine = EAGLEInference.from_pretrained(
        draft, stories, {"method": method, "num_speculative_tokens": 4}, device=device
    )
    prompts = [[BEGIN], engine.tokenizer.encode("Once upon a time")]
    (alone, continued), stats = engine.generate(prompts, 120)
    text = engine.tokenizer.decode(alone)
    assert text.startswith(TEXT)
    assert engine.tokenizer.decode(prompts[1] + continued).startswith(TEXT)
    assert engine.generate(prompts, 120, speculative=False).output_ids == [alone, continued]
    assert "".join(engine.stream_text("Once upon a time", 60)) == engine.tokenizer.decode(
        continued[:60],
    )
    if method == "draft_model":
        assert stats.mean_accept_length > 4.5  # its own guesses are right
    if method in ("ngram", "suffix"):
        assert stats.accepted > 0


def test_the_text_is_that_of_transformers(stories, device):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaForCausalLM.from_pretrained(stories).eval()
    expected = theirs.generate(torch.tensor([[BEGIN]]), max_new_tokens=120, do_sample=False)[0, 1:].tolist()
    engine = EAGLEInference.from_pretrained(None, stories, {"method": "ngram"}, device=device)
    assert engine.generate([BEGIN], 120).output_ids == expected
    assert engine.tokenizer.decode(expected).startswith(TEXT)


def test_the_command_line_continues_it(stories, capsys):
    models = ["--target", str(stories), "--draft", str(stories), "--speculative-config", '{"method": "draft_model"}']
    assert main(["generate", "Once upon a time", *models, "--max-new-tokens", "40"]) == 0
    assert TEXT[len("Once upon a time") :][:60] in capsys.readouterr().out
