"""Every family, rotary scaling, bias and window against transformers' own model of the same folder, in fp32."""

import json

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.loading import load_target
from eagle_kernels.reference.causal_attend import causal_attend
from op_tests.engine.families import CASES, SIZES
from op_tests.engine.families import write_target as make
from op_tests.engine.heads import save_folder
from op_tests.engine.toys import ToyModel


@pytest.fixture(params=CASES.items(), ids=CASES)
def pair(request, tmp_path, device):
    """(transformers' model on the CPU, ours read from its folder on the device under test)."""
    _, (family, changes) = request.param
    theirs = make(family, changes, tmp_path)
    return theirs, load_target(tmp_path, device)


@torch.no_grad()
def test_the_model_is_that_of_transformers(pair):
    theirs, ours = pair
    input_ids = torch.randint(SIZES["vocab_size"], (3, 33))
    positions = torch.arange(33).expand(3, -1)
    expected = theirs(input_ids, output_hidden_states=True)
    capture = tuple(range(ours.config.num_hidden_layers))
    output = ours(input_ids.to(ours.device), positions.to(ours.device), causal_attend, capture=capture)
    logits, features = (tensor.cpu() for tensor in output)
    streams = torch.cat([expected.hidden_states[layer] for layer in capture], dim=-1)
    torch.testing.assert_close(features, streams, atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(logits, expected.logits, atol=3e-5, rtol=1e-5)
    # the tables are theirs to the bit, except for complex ones, whose last bit is torch.polar's
    half, angles = ours.config.rope.size // 2, theirs.model.rotary_emb(logits, positions[:1])
    is_complex = torch.is_tensor(angles)
    angles = (angles.real, angles.imag) if is_complex else angles
    table = torch.cat([part[0, :, :half] for part in angles], dim=-1)
    torch.testing.assert_close(ours.model.rotary.table[:33].cpu(), table, rtol=0, atol=2e-7 if is_complex else 0)


@pytest.mark.cross
def test_greedy_text_is_that_of_transformers(pair):
    """Plain and speculative; the model as its own draft, whose levels and extensions have windows as well."""
    theirs, ours = pair
    prompts = torch.randint(1, SIZES["vocab_size"], (2, 11))
    expected = theirs.generate(prompts, max_new_tokens=16, do_sample=False, attention_mask=torch.ones_like(prompts))
    expected = expected[:, 11:].tolist()
    for tree in {"topk": 2, "num_draft_tokens": 9}, {"topk": 1, "num_draft_tokens": 5}:
        engine = EAGLEInference(ours, ours, EAGLEConfig(**tree, num_steps=4, page_size=4))
        output = engine.generate(prompts, 16)
        assert output.output_ids == expected
    assert output.stats.mean_accept_length == 5  # a chain of the model's own guesses: all are right
    assert engine.generate(prompts, 16, speculative=False).output_ids == expected
    stranger = ToyModel(vocab_size=SIZES["vocab_size"], device=ours.device)
    assert EAGLEInference(stranger, ours, EAGLEConfig(topk=2, num_steps=4)).generate(prompts, 16).output_ids == expected


@torch.no_grad()
def test_transformers_reads_what_is_saved(pair, tmp_path):
    """The way back: `save_folder` writes published names, biases and norms among them (in bf16)."""
    theirs, ours = pair
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": theirs.config.model_type}
    save_folder(ours, config, tmp_path / "again")
    again = type(theirs).from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert again.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name].bfloat16().float()), name


@torch.no_grad()
def test_shards_of_transformers(tmp_path):
    theirs = make("Qwen3", {}, tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    whole, shards = load_target(tmp_path / "whole"), load_target(tmp_path / "shards")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, shards.state_dict()[name]), name
