"""Layers of a decoder: the ops and the code for training agree, and fused projections keep their published names."""

import pytest
import torch

from eagle_kernels import ops
from eagle_kernels.engine.models import heads
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.engine.models.layers.linear import Linear
from eagle_kernels.engine.models.layers.norm import library
from eagle_kernels.engine.models.layers.rotary import Rotary
from eagle_kernels.reference.causal_attend import causal_attend

CONFIG = {
    "model_type": "qwen3", "vocab_size": 61, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20, "attention_bias": True,
    "max_position_embeddings": 32,
}  # fmt: skip


def make(device="cpu") -> Decoder:
    torch.manual_seed(0)
    return with_random_numbers(Decoder(DecoderConfig.from_dict(CONFIG))).to(device)


def with_random_numbers(model: torch.nn.Module) -> torch.nn.Module:
    """None of which is one that a layer could do without."""
    for name, parameter in model.named_parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5) if "norm" in name else torch.nn.init.normal_(parameter, std=0.3)
    return model


def logits_of(model: Decoder) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(CONFIG["vocab_size"], (2, 9), generator=generator).to(model.device)
    positions = torch.arange(9, device=model.device).expand(2, -1)
    return model(input_ids, positions, causal_attend).logits


def test_kernels_and_training_agree(device, monkeypatch):
    """The kernels, interpreted where there is no GPU; training differentiates every parameter."""
    model = make(device)
    trained = logits_of(model)
    trained.square().sum().backward()
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in model.parameters())
    monkeypatch.setenv("EAGLE_KERNELS_BACKEND", "triton")
    with torch.no_grad():
        torch.testing.assert_close(logits_of(model), trained, atol=2e-5, rtol=1e-5)


def test_what_chooses_between_them(device):
    weight = torch.nn.Parameter(torch.ones(2, device=device))
    assert library(weight) is not ops
    assert library(weight.detach()) is ops
    with torch.no_grad():
        assert library(weight) is ops
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            assert library(weight) is not ops
            assert logits_of(make(device)).isfinite().all()


def rows_of_linear_decode(monkeypatch, device) -> list[int]:
    """Rows of the products that go through it, of seven; all are those of PyTorch, and trained by it."""
    linear = Linear(24, 40).to(device)
    taken = []
    decode = ops.linear_decode
    monkeypatch.setattr(
        ops, "linear_decode", lambda x, *others, **options: taken.append(len(x)) or decode(x, *others, **options)
    )
    for shape in ((1, 1), (2, 8), (4, 4), (1, 17), (8, 8), (5, 13), (1, 200)):
        x = torch.randn(*shape, 24, device=device)
        with torch.no_grad():
            result = linear(x)
        torch.testing.assert_close(result, torch.nn.functional.linear(x, linear.weight, linear.bias))
        assert linear(x).requires_grad
    return taken


HEADS = {
    "EAGLE-3": (heads.EagleHead, heads.EagleConfig, {"fc_norm": True, "norm_before_fc": True}),
    "EAGLE-1": (heads.Eagle1Head, heads.Eagle1Config, {}),
    "next-token modules": (heads.NextTokenModules, heads.NextTokenConfig, {"num_nextn_predict_layers": 2}),
}
BIASES = ("attention_bias", "qkv_bias", "bias")  # by the names of all kinds of heads


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_stores_the_keys_and_values_that_it_attends_to(name, model_type, has_bias):
    """With every part that a family may have or not: biases, and norms of keys."""
    kind, config, options = HEADS[name]
    sizes = CONFIG | options | {"model_type": model_type} | dict.fromkeys(BIASES, has_bias)
    sizes |= {"num_hidden_layers": 1, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}
    head = with_random_numbers(kind(config.from_dict(sizes)).requires_grad_(False)).bind(make())
    width = head.config.hidden_size * len(head.aux_layers)
    input_ids, positions = torch.arange(10).view(2, 5), torch.arange(5).expand(2, -1)
    hidden, kept = torch.randn(2, 5, width), []

    class Pool:
        """Keeps the keys and values, and all that is beside them."""

        deterministic = False

        def __call__(self, layer, query, key, value, *, window=None, angles=None):
            kept.append((layer, key, value, angles))
            return query

        def store(self, layer, key, value, *, angles=None):
            kept.append((layer, key, value, angles))

    head(input_ids, hidden, positions, Pool(), from_target=True)
    head.store(input_ids, hidden, positions, Pool())
    (layer, *attended), (same_layer, *stored) = kept
    assert layer == same_layer == 0
    torch.testing.assert_close(stored, attended, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_few_rows_go_through_linear_decode(monkeypatch):
    """Up to 64 of them in fp32; with more, and in training, PyTorch multiplies."""
    assert rows_of_linear_decode(monkeypatch, "cuda") == [1, 16, 16, 17, 64]


def test_pytorch_multiplies_on_a_cpu(monkeypatch):
    assert rows_of_linear_decode(monkeypatch, "cpu") == []


def test_state_dicts_have_the_published_names():
    model = make()
    state = model.state_dict()
    attention = "model.layers.0.self_attn."
    published = {f"{attention}{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")}
    published |= {f"{attention}{part}_norm.weight" for part in "qk"}
    assert {name for name in state if name.startswith(attention)} == published
    assert not any("qkv" in name or "gate_up" in name for name in state)
    fused = model.model.layers[0].self_attn.qkv_proj
    assert state[attention + "k_proj.weight"].data_ptr() == fused.weight[80:].data_ptr()
    assert model.model.layers[0].self_attn.state_dict().keys() == {name.removeprefix(attention) for name in published}


def test_rotary_keeps_its_fp32_table_in_a_bf16_model():
    rotary = Rotary(DecoderConfig.from_dict(CONFIG).rope)
    expected = rotary.table.clone()
    assert expected.shape == (32, 20) and torch.equal(rotary.bfloat16().table, expected)
    with torch.device("meta"):
        unmaterialised = Rotary(DecoderConfig.from_dict(CONFIG).rope)
    assert torch.equal(unmaterialised.to_empty(device="cpu").table, expected)


@pytest.mark.gpu
def test_a_forward_pass_is_captured_in_a_graph():
    model = make("cuda").bfloat16()
    with torch.no_grad():
        expected = logits_of(model)
        input_ids = torch.randint(CONFIG["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(1)).cuda()
        positions = torch.arange(9, device="cuda").expand(2, -1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(input_ids, positions, causal_attend).logits
        graph.replay()
        torch.testing.assert_close(logits, expected)
