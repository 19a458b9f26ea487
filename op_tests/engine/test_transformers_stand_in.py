"""`TransformersTarget` with a stand-in for transformers, where that is not installed: streams, text, and refusals."""

import copy
import math
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.protocol import FINAL_NORM, KVShape, ModelError
from eagle_kernels.engine.models.transformers_target import TransformersTarget
from eagle_kernels.reference.causal_attend import causal_attend
from op_tests.engine.toys import ToyModel

VOCAB, WIDTH, HEADS, KV_HEADS, LENGTH = 37, 32, 4, 2, 48
ATTENTION = {}  # what AttentionInterface knows


class PreTrainedModel(nn.Module):
    def set_attn_implementation(self, name):
        self.config._attn_implementation = name


class AttentionInterface:
    register = staticmethod(ATTENTION.__setitem__)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    module = types.ModuleType("transformers")
    module.PreTrainedModel, module.AttentionInterface = PreTrainedModel, AttentionInterface
    monkeypatch.setitem(sys.modules, "transformers", module)


class Config(SimpleNamespace):
    """The fields that the adapter reads, and what layers ask of their attention."""

    def get_text_config(self, decoder):
        assert decoder
        return self


def eager(module, query, key, value, mask, *, scaling, sliding_window=None, softcap=None, s_aux=None, **_):
    """Attention of [B, heads, T, D] as transformers does it: causal, with all that a layer asks for."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    place = torch.arange(query.shape[2], device=query.device)
    distance = place[:, None] - place
    hidden = (distance < 0) | (distance >= (sliding_window or len(place)))
    scores = scores.masked_fill(hidden, -math.inf)
    sinks = scores[..., :0] if s_aux is None else s_aux[:, None, None].expand(*scores.shape[:3], 1)
    probs = torch.cat([scores, sinks], -1).softmax(-1)[..., : len(place)]
    return (probs @ value).transpose(1, 2), None


class Attention(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.layer_idx, self.config, size = index, config, WIDTH // HEADS
        self.query, self.output = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, KV_HEADS * size), nn.Linear(WIDTH, KV_HEADS * size)
        self.options = config.options[index]

    def forward(self, x):
        heads = [
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.query, self.key, self.value)
        ]
        attend = ATTENTION.get(self.config._attn_implementation, eager)
        return self.output(attend(self, *heads, self.config.mask, **{"scaling": 0.3} | self.options)[0].flatten(2))


class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.attention, self.mlp, self.is_tuple = Attention(config, index), nn.Linear(WIDTH, WIDTH), index % 2

    def forward(self, hidden_states):
        x = hidden_states + self.attention(nn.functional.layer_norm(hidden_states, (WIDTH,)))
        x = x + torch.tanh(self.mlp(x))
        return (x, "more") if self.is_tuple else x


class Backbone(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm, self.by_name = nn.LayerNorm(WIDTH), config.by_name

    def forward(self, input_ids, position_ids):
        x = self.tokens(input_ids) + self.places(position_ids)
        for layer in self.layers:
            out = layer(hidden_states=x) if self.by_name else layer(x)
            x = out[0] if isinstance(out, tuple) else out
        return (self.norm(x),)


class Model(PreTrainedModel):
    def __init__(self, config):
        super().__init__()
        self.config, self.model, self.head = config, Backbone(config), nn.Linear(WIDTH, VOCAB)

    def get_input_embeddings(self):
        return self.model.tokens

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, position_ids, use_cache, return_dict):
        assert not use_cache and return_dict
        return SimpleNamespace(logits=self.head(self.model(input_ids, position_ids)[0]))


class ModelOfLastRows(Model):
    def forward(self, input_ids, position_ids, use_cache, return_dict, logits_to_keep=0):
        assert not use_cache and return_dict
        logits = self.head(self.model(input_ids, position_ids)[0][:, -logits_to_keep:])
        return SimpleNamespace(logits=logits.double())  # as some models make them wider than their weights


OPTIONS = {
    "plain": [{}] * 3,
    "windows": [{"sliding_window": 3}, {}, {"sliding_window": 1}],
    "all": [
        {"scaling": 0.9, "softcap": 1.5}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"sliding_window": 4, "softcap": 2.0, "s_aux": torch.tensor([0.0, 1.0, -0.5, 3.0])},
    ],
}  # fmt: skip


def make(options=OPTIONS["plain"], kind=Model, **changes) -> Model:
    torch.manual_seed(0)
    fields = {
        "num_hidden_layers": len(options), "hidden_size": WIDTH, "max_position_embeddings": LENGTH, "mask": None,
        "is_encoder_decoder": False, "options": options, "_attn_implementation": "eager", "by_name": False,
    }  # fmt: skip
    model = kind(Config(**fields | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2) if parameter.dim() > 1 else parameter.normal_()
    return model


@torch.no_grad()
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", [Model, ModelOfLastRows])
@pytest.mark.parametrize("name", OPTIONS)
def test_logits_and_streams_are_the_model_s_own(name, kind, by_name):
    theirs = make(OPTIONS[name], kind, by_name=by_name)
    ours, tokens = TransformersTarget(theirs), torch.randint(VOCAB, (2, 11))
    places = torch.arange(11).expand(2, -1) + torch.tensor([[0], [LENGTH - 11]])
    streams, hooks = {}, []
    for index, part in enumerate([*theirs.model.layers, theirs.model.norm], start=1):
        keep = lambda _, given, out, index=index: streams.update(  # noqa: E731
            {index: out[0] if isinstance(out, tuple) else out}
        )
        hooks.append(part.register_forward_hook(keep))
    streams[0] = theirs.model.tokens(tokens) + theirs.model.places(places)
    wanted = theirs(tokens, places, False, True).logits.float()
    streams[FINAL_NORM] = streams.pop(4)
    for hook in hooks:
        hook.remove()
    capture = (2, FINAL_NORM, 0, 3, 1)
    logits, features = ours.forward(tokens, places, causal_attend, capture=capture)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(features, torch.cat([streams[index] for index in capture], -1), atol=1e-4, rtol=1e-5)
    last = ours.forward(tokens, places, causal_attend, last_only=True)
    assert last.features is None and last.logits.shape == (2, 1, VOCAB)
    torch.testing.assert_close(last.logits, wanted[:, -1:], atol=1e-4, rtol=1e-5)
    sizes = (ours.vocab_size, ours.hidden_size, ours.max_length, ours.kv_shape, ours.can_be_captured)
    assert sizes == (VOCAB, WIDTH, LENGTH, KVShape(3, KV_HEADS, WIDTH // HEADS), True)
    for mine, its in zip(ours.model.parameters(), theirs.parameters()):
        assert mine.data_ptr() == its.data_ptr() and its.requires_grad and not mine.requires_grad
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in theirs.modules())
    assert theirs.config._attn_implementation == "eager" and ours.get_output_embeddings() is ours.model.head
    with pytest.raises(ModelError, match="call forward of its TransformersTarget instead"):
        ours.model(tokens, places, False, True)


@torch.no_grad()
@pytest.mark.parametrize("name", ["windows", "all"])
def test_text_is_the_model_s_own(name):
    """Plain and with trees, of itself and of a stranger."""
    theirs, texts, prompts = make(OPTIONS[name], ModelOfLastRows), [], [[7, 3, 30, 11, 1, 25], [5]]
    for prompt in prompts:
        text = list(prompt)
        for _ in range(8):
            tokens = torch.tensor([text])
            text.append(int(theirs(tokens, torch.arange(len(text))[None], False, True).logits[0, -1].argmax()))
        texts.append(text[len(prompt) :])
    target, stranger = TransformersTarget(theirs), ToyModel(vocab_size=VOCAB)
    for draft, tree in ((target, {"topk": 1}), (stranger, {"topk": 2, "num_draft_tokens": 7})):
        engine = EAGLEInference(draft, target, EAGLEConfig(**tree, num_steps=3, page_size=4, eos_token_ids=()))
        assert engine.generate(prompts, 8).output_ids == texts
    assert engine.generate(prompts, 8, speculative=False).output_ids == texts


LONG, SHORT = {"rope_type": "longrope"}, {"original_max_position_embeddings": 9}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@pytest.mark.parametrize(
    ("changes", "length", "is_captured"),
    [
        ({"rope_scaling": LONG | {"original_max_position_embeddings": 20}}, 20, False),
        ({"rope_parameters": LONG}, LENGTH, False),
        ({"rope_parameters": {"rope_type": "dynamic"}}, LENGTH, False),
        ({"rope_scaling": {"type": "dynamic"}}, LENGTH, False),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 20}}, LENGTH, True),
        ({"rope_parameters": {"a": {"rope_type": "default"}, "b": LONG | SHORT}}, 9, False),
        ({"rope_parameters": {"a": {"rope_type": "dynamic"}, "b": {"rope_type": "default"}}}, LENGTH, False),
        *(({name: 4}, LENGTH, False) for name in EXPERTS),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, LENGTH, True),  # more than there are
        ({"num_experts": 0, "ffn_config": None}, LENGTH, True),
    ],
)  # fmt: skip
def test_where_texts_end_and_what_graphs_can_hold(changes, length, is_captured):
    target = TransformersTarget(make(**changes))
    assert (target.max_length, target.can_be_captured) == (length, is_captured)


class Twice(Attention):
    def forward(self, x):
        return super().forward(super().forward(x))


class OfItsOwn(Attention):
    def forward(self, x):
        return x


class Wide(Attention):
    def forward(self, x):
        return super().forward(x) if self.layer_idx else torch.cat([x, x], -1)


MIXED = ["full_attention", "full_attention", "sliding_attention"]


def at(layer, name, value):
    """Returns a change of one layer's attention."""
    return lambda model: setattr(model.model.layers[layer].attention, name, value)


REFUSED = [
    ({"is_encoder_decoder": True}, None, "an encoder is not supported"),
    ({"add_cross_attention": True}, None, "cross attention is not supported"),
    ({"alibi": True}, None, "alibi is not supported"),
    ({"use_alibi": True}, None, "alibi is not supported"),
    ({"is_causal": False}, None, "attention to later tokens is not supported"),
    ({"use_bidirectional_attention": True}, None, "attention to later tokens is not supported"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, None, "a layer of type chunked_attention is not"),
    ({"max_position_embeddings": 0}, None, "config.json has no max_position_embeddings"),
    ({"num_hidden_layers": 0}, None, "num_hidden_layers must be above 0, got 0"),
    ({"sliding_window": 4}, None, "layer 0 does not pass its sliding window to the attention"),
    ({"sliding_window": 4, "layer_types": MIXED}, None, "layer 2 does not pass its sliding window"),
    ({"sliding_window": 4}, at(0, "options", {"sliding_window": 4}), "layer 1 does not pass its sliding window"),
    ({"hidden_size": 16}, None, "its hidden states do not have the width hidden_size=16"),
    ({"mask": torch.zeros(1)}, None, "Attention: a mask or a bias of its own is not supported"),
    ({}, at(1, "is_causal", False), "attention to later tokens is not"),
    ({}, at(2, "layer_idx", 7), "its layers, or their layer_idx, were"),
    ({}, at(1, "conv", nn.Conv1d(4, 4, 2)), "layers with convolutions over time"),
    ({}, at(1, "__class__", Twice), "layer 1 attends more than once"),
    ({}, at(2, "__class__", OfItsOwn), "layer 2 of 3 does not attend"),
    ({}, at(0, "__class__", Wide), "Model: its forward does not run with"),
    ({}, at(0, "key", nn.Linear(WIDTH, 8)), r"got \[\(1, 8\), \(2, 8\)\]"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_the_pool_cannot_do_is_refused(number):
    changes, change, message = REFUSED[number]
    model = make()
    vars(model.config).update(copy.deepcopy(changes))
    if change is not None:
        change(model)
    with pytest.raises(ModelError, match=message):
        TransformersTarget(model)
