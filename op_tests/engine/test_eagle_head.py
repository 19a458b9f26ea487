"""`EagleHead`: its names, its configuration, and the checks of `bind`; test_head_formats.py has the formula."""

from __future__ import annotations

import pytest
import torch

from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.engine.models.heads import EagleConfig, EagleHead
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.reference.causal_attend import causal_attend

WIDTHS = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 24,  # deliberately not hidden_size / num_attention_heads
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
}  # fmt: skip
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


def test_an_unbound_head_says_so():
    with pytest.raises(ModelError, match="call bind"):
        make_head()(
            torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, 96), torch.zeros(1, 1), causal_attend,
            from_target=True,
        )  # fmt: skip


def test_default_aux_layers_are_the_official_ones():
    head = make_head(eagle_config=None)
    with pytest.raises(ModelError, match="bind"):
        _ = head.aux_layers
    assert head.bind(make_target(num_layers=12)).aux_layers == (2, 6, 9)


def test_whole_vocabulary_has_no_mapping():
    head = make_head(draft_vocab_size=None).bind(make_target())
    assert head.draft_to_target is None and head.draft_vocab_size == 50
    assert not {"d2t", "t2d"} & set(head.state_dict())


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


def test_a_hint_is_for_layers_that_nobody_chose():
    """Those that a head names itself are wrong for another reason than that they are missing."""
    for chosen, is_hinted in ((None, True), ({"eagle_aux_hidden_state_layer_ids": [3, 2, 1]}, False)):
        with pytest.raises(ModelError) as error:
            make_head(eagle_config=chosen).bind(make_target())
        assert "do not ascend" in str(error.value) and ("need explicit" in str(error.value)) == is_hinted
