"""The two façades over the engine: the same text and cache as transformers' own."""

import ast
import inspect

import pytest
import torch

from bench.lab import autoregressive, wrapper
from bench.lab.autoregressive import AutoregressiveDecoder
from bench.lab.loader import load_model
from bench.lab.wrapper import ModelWrapper
from eagle_kernels.engine.models.tokenizer import ByteTokenizer
from eagle_kernels.engine.models.transformers_target import TransformersTarget
from op_tests.engine.toys import ToyModel, random_llama

from .stock import PROMPT, PROMPT_IDS, VOCAB, refused, stock


@pytest.mark.parametrize("module", [wrapper, autoregressive], ids=lambda module: module.__name__)
def test_facades_are_short(module):
    """Past that they would be a second engine."""
    classes = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)]
    assert all(node.end_lineno - node.lineno < 40 for node in classes)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_baseline_is_greedy_decoding_of_transformers(family, device):
    theirs = stock(family).to(device)
    prompt = torch.randint(VOCAB, (1, 7), device=device)
    with torch.no_grad():
        options = {"do_sample": False, "max_new_tokens": 24, "attention_mask": torch.ones_like(prompt)}
        expected = theirs.generate(prompt, **options)[0, 7:].tolist()
    decoder = AutoregressiveDecoder(ModelWrapper(theirs))
    result = decoder.generate(prompt, max_new_tokens=24, temperature=0.0)
    assert result.generated_ids == expected and len(set(expected)) > 3
    assert not result.is_speculative and len(result.per_token_latencies) == 24
    assert result.time_to_first_token == result.per_token_latencies[0] > 0
    assert decoder.generate(prompt[0], 5, temperature=0.0).generated_ids == expected[:5]


def test_the_baseline_samples_and_ends(device):
    model = random_llama(device=device)
    decoder = AutoregressiveDecoder(model)
    draws = [decoder.generate([1, 2, 3], 12, seed=seed).generated_ids for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    greedy = decoder.generate([1, 2, 3], 12, temperature=0.0).generated_ids
    end = greedy[4]
    until = greedy[: greedy.index(end) + 1]
    assert AutoregressiveDecoder(model, eos_token_ids=(end,)).generate([1, 2, 3], 12, 0.0).generated_ids == until
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        decoder.generate([1, 2, 3], 0)
    with pytest.raises(ValueError, match="stream must have 1 request, got 2"):
        decoder.generate([[1], [2]], 3)


def test_the_baseline_writes_text(folder, device):
    decoder = AutoregressiveDecoder(ModelWrapper(*load_model(folder, "fp32", device)))
    ids = decoder.generate(PROMPT_IDS, 6, temperature=0.0).generated_ids
    assert decoder.generate_text(PROMPT, 6, temperature=0.0) == " ".join([PROMPT, *(f"w{token}" for token in ids)])
    decoder.model.eos_token_ids = (ids[-1],)
    assert decoder.generate_text(PROMPT, 6, temperature=0.0).endswith(f" w{ids[-2]}")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@torch.no_grad()
def test_forward_after_a_cache(family, device):
    """Logits are those of transformers without a cache, also after a cut."""
    theirs = stock(family).to(device)
    tokens = torch.randint(VOCAB, (1, 40), device=device)
    whole = theirs(tokens).logits
    other = theirs(torch.cat([tokens[:, :18], tokens[:, 30:]], dim=1)).logits
    model = ModelWrapper(theirs)
    logits, cache = model.forward(tokens[:, :20])
    torch.testing.assert_close(logits, whole[:, :20], rtol=1e-4, atol=1e-4)
    assert logits.shape == (1, 20, VOCAB) and model.get_cache_length(cache) == 20
    for at in range(20, 40):
        logits, cache = model.forward(tokens[:, at : at + 1], past_key_values=cache)
        torch.testing.assert_close(logits[:, 0], whole[:, at], rtol=1e-4, atol=1e-4)
    cut, before = model.truncate_cache(cache, keep_length=18), [tensor.clone() for layer in cache for tensor in layer]
    assert model.get_cache_length(cache) == 40 and model.get_cache_length(cut) == 18
    logits, longer = model.forward(tokens[:, 30:], cut)
    torch.testing.assert_close(logits, other[:, 18:], rtol=1e-4, atol=1e-4)
    assert model.get_cache_length(longer) == 28 and model.get_cache_length(cut) == 18
    # whatever came after the cut, the cache that was cut is as it was, and goes on as before
    held = [tensor for layer in cache for tensor in layer]
    assert len(cache) == theirs.config.num_hidden_layers and len(held) == len(before) == 2 * len(cache)
    assert all(map(torch.equal, held, before)) and held[0].shape[2] == 40 and cut[0][0].shape[2] == 18
    again = model.forward(tokens[:, 30:], model.truncate_cache(cache, 18))[0]
    torch.testing.assert_close(again, logits)
    beginnings = [[tensor[:, :, :18] for layer in each for tensor in layer] for each in (cache, longer)]
    assert all(map(torch.equal, *beginnings))
    cut = longer
    assert model.forward(tokens, use_cache=False)[1] is model.reset_cache() is None
    assert model.get_cache_length(model.reset_cache()) == 0
    assert model.get_cache_length(model.truncate_cache(cut, 0)) == 0


def test_a_cut_of_a_cache_is_checked(device):
    model = ModelWrapper(ToyModel(device=device), max_length=20)
    _, cache = model.forward(torch.ones(1, 18, dtype=torch.int64))
    for keep_length in (-1, 19):
        said = refused(lambda length=keep_length: model.truncate_cache(cache, length))
        rule = "keep_length must lie in 0..18, the length of the cache"
        assert said == f"ModelWrapper.truncate_cache: {rule}, got {keep_length}"
    for shape in ((1, 3), (2, 1), (4,), (1, 0)):
        said = refused(lambda shape=shape: model.forward(torch.ones(shape, dtype=torch.int64), cache))
        assert said.startswith("ModelWrapper.forward: input_ids must be [1, S] with S in 1..2, ")
        assert said.endswith(f"got shape {list(shape)}")
    for token in (-1, model.vocab_size):
        said = refused(lambda token=token: model.forward(torch.tensor([[token]]), cache))
        assert said == f"ModelWrapper.forward: input_ids must lie in 0..{model.vocab_size - 1}, got {token}"
    model.forward(torch.ones(1, 2, dtype=torch.int64), cache)


def test_what_a_wrapper_says(folder, device):
    model, tokenizer = load_model(folder, "fp16", device)
    count = sum(parameter.numel() for parameter in model.parameters())
    wrapped = ModelWrapper(model, tokenizer, device)
    assert wrapped.model is model and wrapped.tokenizer is tokenizer and wrapped.device == model.device
    assert (wrapped.vocab_size, wrapped.param_count, wrapped.eos_token_id) == (VOCAB, count, VOCAB - 1)
    held = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    assert wrapped.memory_footprint_mb == held / 1e6 >= 2 * count / 1e6
    shown = f"ModelWrapper(LlamaForCausalLM, {count / 1e6:.1f}M parameters, 0 MB, vocabulary {VOCAB}, {model.device})"
    assert repr(wrapped) == shown
    again = ModelWrapper(wrapped.target, ByteTokenizer())
    assert isinstance(wrapped.target, TransformersTarget) and again.model is wrapped.target.model
    plain = ModelWrapper(random_llama(), ByteTokenizer())
    assert plain.eos_token_id == 256 and plain.param_count > 1000
    assert ModelWrapper(ToyModel()).eos_token_id is None
