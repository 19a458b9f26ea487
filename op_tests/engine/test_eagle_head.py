"""`EagleHead` against the published formula written out with matrices, its configuration, and the checks of `bind`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.engine.models.eagle_head import EagleConfig, EagleHead
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.reference.causal_attend import causal_attend

WIDTHS = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,  # deliberately not hidden_size / num_attention_heads
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
HEAD = WIDTHS | {
    "num_hidden_layers": 1,
    "draft_vocab_size": 20,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
}
TARGET_IDS = torch.arange(3, 43, 2)


def make_target(num_layers: int = 6, **changes) -> Decoder:
    torch.manual_seed(1)
    return Decoder(DecoderConfig.from_dict(WIDTHS | {"num_hidden_layers": num_layers} | changes))


def make_head(own_embedding: bool = False, **changes) -> EagleHead:
    torch.manual_seed(2)
    head = EagleHead(EagleConfig.from_dict(HEAD | changes), own_embedding=own_embedding)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.2)
    if head.d2t is not None:
        head.d2t.copy_(TARGET_IDS - torch.arange(20))
        head.t2d[TARGET_IDS] = True
    return head


def published_formula(weights: dict[str, Tensor], embedding: Tensor, hidden: Tensor, first_position: int):
    """(logits, out) of one sequence; embedding, hidden [T, H]. Complex RoPE, so that nothing is shared with ours."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weights[name]

    def turn(x: Tensor) -> Tensor:  # [T, heads, D]
        half = x.shape[-1] // 2
        angles = (first_position + torch.arange(len(x)))[:, None, None] * 10000.0 ** (-torch.arange(half) / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), dim=-1)

    pair = torch.cat(
        (norm(embedding, "midlayer.input_layernorm.weight"), norm(hidden, "midlayer.hidden_norm.weight")), -1
    )
    query, key, value = (
        (pair @ weights[f"midlayer.self_attn.{name}_proj.weight"].T).view(len(pair), heads, 24)
        for name, heads in (("q", 4), ("k", 2), ("v", 2))
    )
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = torch.einsum("thd,shd->hts", turn(query), turn(key)) / 24**0.5
    probs = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1) > 0, float("-inf")).softmax(-1)
    attended = torch.einsum("hts,shd->thd", probs, value).flatten(1)
    u = hidden + attended @ weights["midlayer.self_attn.o_proj.weight"].T
    m = norm(u, "midlayer.post_attention_layernorm.weight")
    gate, up = m @ weights["midlayer.mlp.gate_proj.weight"].T, m @ weights["midlayer.mlp.up_proj.weight"].T
    out = u + (F.silu(gate) * up) @ weights["midlayer.mlp.down_proj.weight"].T
    return norm(out, "norm.weight") @ weights["lm_head.weight"].T, out


@torch.no_grad()
def test_forward_equals_the_published_formula():
    target, head = make_target(), make_head()
    head.bind(target)
    weights = head.state_dict()
    input_ids = torch.randint(50, (2, 7))
    positions = torch.arange(5, 12).expand(2, -1)
    features = torch.randn(2, 7, 96)
    first = head(input_ids, features, positions, causal_attend, from_target=True)
    fed_back = head(input_ids, first.hidden, positions, causal_attend, from_target=False)
    for row in range(2):
        embedding = target.get_input_embeddings()(input_ids[row])
        logits, out = published_formula(weights, embedding, features[row] @ weights["fc.weight"].T, 5)
        torch.testing.assert_close(first.logits[row], logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(first.hidden[row], out, atol=1e-4, rtol=1e-4)
        logits, _ = published_formula(weights, embedding, out, 5)
        torch.testing.assert_close(fed_back.logits[row], logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_options_change_only_what_they_name():
    target = make_target()
    input_ids = torch.randint(50, (1, 6))
    features = torch.randn(1, 6, 96)
    positions = torch.arange(6)[None]

    def run(**changes):
        head = make_head(**changes).bind(target)
        return head, head(input_ids, features, positions, causal_attend, from_target=True)

    head, plain = run()
    _, post_norm = run(norm_output=True)
    assert torch.equal(post_norm.logits, plain.logits)
    assert torch.equal(post_norm.hidden, head.norm(plain.hidden))
    _, normed_residual = run(norm_before_residual=True)
    hidden = head.fc(features)
    assert not torch.allclose(normed_residual.hidden, plain.hidden)
    # With attention and MLP silenced, what is left is the residual.
    head.midlayer.norm_before_residual = True
    for projection in (head.midlayer.self_attn.o_proj, head.midlayer.mlp.down_proj):
        projection.weight.zero_()
    bare = head(input_ids, features, positions, causal_attend, from_target=True)
    torch.testing.assert_close(bare.hidden, head.midlayer.hidden_norm(hidden))


def test_an_unbound_head_says_so():
    with pytest.raises(ModelError, match="call bind"):
        make_head()(
            torch.zeros(1, 1, dtype=torch.int64),
            torch.zeros(1, 1, 96),
            torch.zeros(1, 1),
            causal_attend,
            from_target=True,
        )


def test_published_parameter_names():
    layer = "midlayer."
    assert set(make_head().state_dict()) == {
        "fc.weight",
        *(f"{layer}{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
        *(f"{layer}self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
    }


def test_layer_ids_become_hidden_states_indices():
    head = make_head().bind(make_target())
    assert head.aux_layers == (1, 3, 5)
    assert head.fc.weight.shape == (32, 96)


def test_default_aux_layers_are_the_official_ones():
    head = make_head(eagle_config=None)
    with pytest.raises(ModelError, match="bind"):
        _ = head.aux_layers
    assert head.bind(make_target(num_layers=12)).aux_layers == (2, 6, 9)


def test_whole_vocabulary_has_no_mapping():
    head = make_head(draft_vocab_size=None).bind(make_target())
    assert head.draft_to_target is None and head.draft_vocab_size == 50
    assert not {"d2t", "t2d"} & set(head.state_dict())


def test_shared_embedding_is_not_part_of_the_head():
    target, head = make_target(), make_head()
    head.bind(target)
    assert all(parameter is not target.get_input_embeddings().weight for parameter in head.parameters())
    own = make_head(own_embedding=True, target_hidden_size=48).bind(make_target(hidden_size=48))
    assert own.embed_tokens.weight.shape == (50, 32) and own.fc.weight.shape == (32, 3 * 48)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step=4"),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm=False is not implemented for EAGLE-3"),
        ({"truncated_vocab_size": 30}, "truncated_vocab_size=30 contradicts draft_vocab_size=20"),
        ({"fc_norm": True, "eagle_config": {"use_aux_hidden_state": False}}, "need use_aux_hidden_state=True"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-2, 1, 3]}}, "names no stream of the target"),
        ({"draft_vocab_size": 51}, "draft_vocab_size=51 exceeds"),
    ],
)
def test_config_refuses_what_is_not_implemented(change, message):
    with pytest.raises(ModelError, match=message):
        EagleConfig.from_dict(HEAD | change)


@pytest.mark.parametrize(
    ("target_change", "head_change", "message"),
    [
        ({"vocab_size": 51}, {}, "vocab_size 50 is not the target's 51"),
        ({"hidden_size": 48}, {}, "features of width 32, the target's are 48"),
        ({"hidden_size": 48}, {"target_hidden_size": 48}, "must hold embed_tokens"),
        ({"num_layers": 4}, {}, "must lie in 0..4 for this target"),
        ({}, {"eagle_config": None}, "do not ascend"),
    ],
)
def test_bind_refuses_a_target_that_does_not_fit(target_change, head_change, message):
    with pytest.raises(ModelError, match=message):
        make_head(**head_change).bind(make_target(**target_change))


def test_a_hint_is_for_layers_that_nobody_chose():
    """Those that a head names itself are wrong for another reason than that they are missing."""
    for chosen, is_hinted in ((None, True), ({"eagle_aux_hidden_state_layer_ids": [3, 2, 1]}, False)):
        with pytest.raises(ModelError) as error:
            make_head(eagle_config=chosen).bind(make_target())
        assert "do not ascend" in str(error.value) and ("need explicit" in str(error.value)) == is_hinted


@pytest.mark.parametrize(
    ("buffer", "index", "value", "message"),
    [
        ("d2t", 4, 60, "draft id 4 maps to target id 64, outside"),
        ("d2t", 0, -1, "draft id 0 maps to target id -1, outside"),
        ("d2t", 6, 0, "draft id 6 maps to target id 6, not above its predecessor's 13"),
        ("t2d", 3, False, "target id 3 is False, but d2t makes it True"),
        ("t2d", 4, True, "target id 4 is True, but d2t makes it False"),
    ],
)
def test_bind_names_the_first_bad_id_of_the_draft_vocabulary(buffer, index, value, message):
    head = make_head()
    getattr(head, buffer)[index] = value
    with pytest.raises(ModelError, match=message):
        head.bind(make_target())
