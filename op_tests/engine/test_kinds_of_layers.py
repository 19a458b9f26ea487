"""A family of new kinds of attention, feed-forward and linear: each is a class or two here, and a row in the table."""

from __future__ import annotations  # settings read the types of fields as text

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models import decoder_config
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig, Family
from eagle_kernels.engine.models.heads import Eagle1Config, Eagle1Head
from eagle_kernels.engine.models.layers.gated import Gated
from eagle_kernels.engine.models.layers.grouped_query import GroupedQuery, GroupedQueryAttention
from eagle_kernels.engine.models.layers.linear import Linear
from eagle_kernels.engine.models.loading import load_target
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.engine.models.settings import field_values
from eagle_kernels.reference.causal_attend import causal_attend
from op_tests.engine.heads import edit_config, edit_tensors, save

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attention_cap": 2.0, "expert_count": 3, "max_position_embeddings": 64,
}  # fmt: skip


class BytesLinear(Linear):
    """Has weights of 8 bits, and a scale of each output."""

    def __init__(self, input_size, outputs, bias=True):
        super().__init__(input_size, outputs, bias)
        self.register_buffer("weight_bytes", torch.zeros_like(self.weight, dtype=torch.int8))
        self.register_buffer("weight_scale", torch.ones(self.out_features, 1))
        del self.weight

    def forward(self, x, deterministic=False, in_parts=False, skipped=0):
        whole = nn.functional.linear(x, self.weight_bytes * self.weight_scale, self.bias)
        return whole[..., skipped:]


@dataclass(kw_only=True)
class CappedQuery(GroupedQuery):
    """Has a setting and a tensor of its own."""

    attention_cap: float

    def make(self, layer=0, input_size=None):
        return CappedAttention(self, layer, self.hidden_size if input_size is None else input_size)


class CappedAttention(GroupedQueryAttention):
    def __init__(self, settings, *args):
        super().__init__(settings, *args)
        self.soft_cap, self.sinks = settings.attention_cap, nn.Parameter(torch.zeros(settings.num_attention_heads))

    def forward(self, x, angles, attend, layer, in_parts=False):
        def capped(*args, **options):
            return attend(*args, **options, soft_cap=self.soft_cap)

        return super().forward(x, angles, capped, layer, in_parts)


@dataclass(kw_only=True)
class Mixed:
    """Has experts in all layers but the first."""

    stored_sizes: ClassVar = {"mlp.gate_proj.weight_scale": "intermediate_size"}
    hidden_size: int
    intermediate_size: int
    expert_count: int
    linear: type[Linear]

    @classmethod
    def read(cls, config):
        return cls(**field_values(cls, config))

    def make(self, layer=0):
        one = Gated(hidden_size=self.hidden_size, intermediate_size=self.intermediate_size, linear=self.linear)
        return Experts(one, self.expert_count) if layer else one.make(layer)


class Experts(nn.Module):
    def __init__(self, each, count):
        super().__init__()
        self.gate = Linear(each.hidden_size, count, bias=False)
        self.experts = nn.ModuleList(each.make() for _ in range(count))

    def forward(self, x, in_parts=False, deterministic=False):
        shares = self.gate(x).softmax(-1).unbind(-1)
        return sum(share[..., None] * expert(x) for share, expert in zip(shares, self.experts))


KINDS = Family(attention=CappedQuery, feed_forward=Mixed, always={"has_qk_norms": True})


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A checkpoint of the family `bytes`; `plain` is the same without quantised weights."""
    monkeypatch.setitem(decoder_config.FAMILIES, "plain", KINDS)
    monkeypatch.setitem(decoder_config.FAMILIES, "bytes", KINDS._replace(always=KINDS.always | {"linear": BytesLinear}))
    torch.manual_seed(0)
    tensors = Decoder(DecoderConfig.from_dict(SIZES | {"model_type": "bytes"})).state_dict()
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            tensors[name] = torch.randint(-127, 128, tensor.shape, dtype=torch.int8)
        else:
            tensors[name] = torch.rand(tensor.shape) * 0.004 if "scale" in name else torch.randn(tensor.shape) * 0.7
    return save(tmp_path, SIZES | {"model_type": "bytes"}, tensors)


@torch.no_grad()
def logits_of(folder) -> torch.Tensor:
    positions = torch.arange(20).expand(2, -1)
    return load_target(folder)(positions * 3 % 61, positions, causal_attend).logits


def test_quantised_weights_are_those_that_they_stand_for(folder):
    logits, target = logits_of(folder), load_target(folder)
    written = {name: tensor for name, tensor in target.state_dict().items() if name.endswith("weight_bytes")}
    assert {"model.layers.0.self_attn.v_proj.weight_bytes", "model.layers.0.mlp.up_proj.weight_bytes",
            "model.layers.2.mlp.experts.1.gate_proj.weight_bytes"} < written.keys()  # fmt: skip
    plain = {}
    for name, tensor in target.state_dict().items():
        if name in written:
            tensor = tensor * target.state_dict()[name.replace("_bytes", "_scale")]
        plain |= {} if name.endswith("_scale") else {name.replace("_bytes", ""): tensor}
    save(folder, SIZES | {"model_type": "plain"}, plain)
    torch.testing.assert_close(logits_of(folder), logits, atol=0, rtol=0)
    edit_tensors(folder, **{"model.layers.1.self_attn.sinks": torch.full((4,), 5.0)})
    assert not torch.allclose(logits_of(folder), logits, atol=1e-3)


def test_text_of_speculation_is_that_of_plain_decoding(folder):
    """With the target as its own draft, and with a head of the same kinds, which also stores keys."""
    target = load_target(folder)
    torch.manual_seed(1)
    head = Eagle1Head(Eagle1Config.from_dict(SIZES | {"model_type": "bytes", "num_hidden_layers": 1}))
    head.layers[0].self_attn.qkv_proj.weight_bytes.random_(-127, 128)
    for draft in (target, head.requires_grad_(False).bind(target)):
        engine = EAGLEInference(draft, target, EAGLEConfig(topk=2, num_steps=3, num_draft_tokens=6, eos_token_ids=()))
        prompts = [[3, 1, 4, 1, 5], [9, 2]]
        assert engine.generate(prompts, 12)[0] == engine.generate(prompts, 12, speculative=False)[0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"attention_cap": None}, "config.json: attention_cap is missing"),
        ({"attention_cap": "2"}, "config.json: attention_cap must be a number, got '2'"),
        ({"expert_count": 4}, "missing tensors: model.layers.1.mlp.experts.3.down_proj.weight_bytes, "),
        ({"model_type": "plain"}, "missing tensors: model.layers.0.mlp.down_proj.weight, "),
        ({"intermediate_size": 20}, "intermediate_size must be 24 to match model.layers.0.mlp.gate_proj.weight_scale "),
    ],
)
def test_what_a_kind_lacks_is_named(folder, change, told):
    edit_config(folder, **change)
    with pytest.raises(ModelError) as caught:
        load_target(folder)
    assert told in str(caught.value)
