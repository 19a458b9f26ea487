"""`Decoder` against Hugging Face's Llama with the same weights, in fp32: prefill, decode, tree, configuration."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle_kernels.engine.models.causal_draft import CausalDraft
from eagle_kernels.engine.models.decoder import Decoder, Rotary
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.reference.causal_attend import rotate
from op_tests.engine.toys import DECODER_CONFIG as SIZES

CONFIG = SIZES | {
    "head_dim": 16,  # deliberately not hidden_size / num_attention_heads
    "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "rope_theta": 5000.0,
}  # fmt: skip
TOLERANCE = {"atol": 2e-5, "rtol": 1e-5}


class DenseAttend:
    """A KV cache as plain tensors. `visible` [T, past + T] says what each new row sees; default: causal."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.visible: Tensor | None = None

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None, angles=None
    ) -> Tensor:
        query, key = rotate(query, key, angles)
        if layer in self.cache:
            key, value = (torch.cat(pair, dim=1) for pair in zip(self.cache[layer], (key, value), strict=True))
        self.cache[layer] = (key, value)
        rows, keys = query.shape[1], key.shape[1]
        visible = self.visible
        if visible is None:
            visible = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        group = query.shape[2] // key.shape[2]
        key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
        scores = torch.einsum("bthd,bshd->bhts", query, key) * query.shape[-1] ** -0.5
        probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return torch.einsum("bhts,bshd->bthd", probs, value)


def positions(start: int, end: int, batch: int) -> Tensor:
    return torch.arange(start, end).expand(batch, -1)


@pytest.fixture(scope="module")
def pair():
    """(Hugging Face model, ours) with the same weights, at a scale that makes attention far from uniform."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**CONFIG, initializer_range=0.1, attn_implementation="eager")
    ).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    # The config goes through transformers' own serialisation, which moves rope_theta into rope_parameters.
    ours = Decoder(DecoderConfig.from_dict(theirs.config.to_dict()))
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@torch.no_grad()
def test_prefill_logits_and_features(pair):
    theirs, ours = pair
    input_ids = torch.randint(CONFIG["vocab_size"], (3, 21))
    expected = theirs(input_ids, output_hidden_states=True)
    # hidden_states[-1] is taken after the final norm, so the last comparable entry is the one before it.
    capture = (0, 1, 3)
    logits, features = ours(input_ids, positions(0, 21, 3), DenseAttend(), capture=capture)
    torch.testing.assert_close(logits, expected.logits, **TOLERANCE)
    assert torch.equal(logits.argmax(-1), expected.logits.argmax(-1))
    torch.testing.assert_close(features, torch.cat([expected.hidden_states[i] for i in capture], dim=-1), **TOLERANCE)


@torch.no_grad()
def test_last_stream_is_captured_before_the_final_norm(pair):
    theirs, ours = pair
    input_ids = torch.randint(CONFIG["vocab_size"], (2, 9))
    features = ours(input_ids, positions(0, 9, 2), DenseAttend(), capture=(4,)).features
    expected = theirs(input_ids, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(ours.model.norm(features), expected, **TOLERANCE)


@torch.no_grad()
def test_last_only_returns_the_last_row(pair):
    _, ours = pair
    input_ids = torch.randint(CONFIG["vocab_size"], (2, 9))
    whole = ours(input_ids, positions(0, 9, 2), DenseAttend())
    last = ours(input_ids, positions(0, 9, 2), DenseAttend(), last_only=True)
    assert whole.features is None and last.logits.shape == (2, 1, CONFIG["vocab_size"])
    torch.testing.assert_close(last.logits, whole.logits[:, -1:], **TOLERANCE)


@torch.no_grad()
def test_decode_step(pair):
    theirs, ours = pair
    input_ids = torch.randint(CONFIG["vocab_size"], (2, 14))
    expected = theirs(input_ids).logits
    attend = DenseAttend()
    ours(input_ids[:, :13], positions(0, 13, 2), attend)
    logits = ours(input_ids[:, 13:], positions(13, 14, 2), attend).logits
    torch.testing.assert_close(logits, expected[:, 13:], **TOLERANCE)


@torch.no_grad()
def test_tree_verification(pair):
    theirs, ours = pair
    prefix_length = 11
    parents = torch.tensor([-1, 0, 0, 1, 1, 2, 3])
    nodes = len(parents)
    ancestors = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        ancestors[node] |= ancestors[parents[node]]
    depths = ancestors.sum(-1) - 1
    prefix = torch.randint(CONFIG["vocab_size"], (1, prefix_length))
    tree = torch.randint(CONFIG["vocab_size"], (1, nodes))
    tree_positions = (prefix_length + depths)[None]

    attend = DenseAttend()
    ours(prefix, positions(0, prefix_length, 1), attend)
    attend.visible = torch.cat((torch.ones(nodes, prefix_length, dtype=torch.bool), ancestors), dim=1)
    logits = ours(tree, tree_positions, attend).logits

    whole_visible = torch.ones(prefix_length + nodes, prefix_length + nodes, dtype=torch.bool).tril()
    whole_visible[prefix_length:] = attend.visible
    expected = theirs(
        torch.cat((prefix, tree), dim=1),
        attention_mask=torch.zeros(whole_visible.shape).masked_fill(~whole_visible, float("-inf"))[None, None],
        position_ids=torch.cat((positions(0, prefix_length, 1), tree_positions), dim=1),
    ).logits[:, prefix_length:]
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@torch.no_grad()
def test_causal_draft_is_the_model_itself(pair):
    _, ours = pair
    draft = CausalDraft(ours)
    assert (draft.token_shift, draft.aux_layers, draft.draft_to_target) == (0, (), None)
    assert draft.draft_vocab_size == ours.vocab_size and draft.kv_shape == ours.kv_shape == (4, 2, 16)
    input_ids = torch.randint(CONFIG["vocab_size"], (2, 5))
    hidden = torch.empty(2, 5, 0)
    output = draft.forward(input_ids, hidden, positions(0, 5, 2), DenseAttend(), from_target=True)
    assert torch.equal(output.logits, ours(input_ids, positions(0, 5, 2), DenseAttend()).logits)
    assert output.hidden is hidden


def test_tied_embeddings_are_one_parameter():
    model = Decoder(DecoderConfig.from_dict(CONFIG | {"tie_word_embeddings": True}))
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_rotary_keeps_its_fp32_table_in_a_bf16_model():
    rotary = Rotary(DecoderConfig.from_dict(CONFIG))
    expected = rotary.table.clone()
    assert expected.shape == (128, 16) and torch.equal(rotary.bfloat16().table, expected)
    with torch.device("meta"):
        unmaterialised = Rotary(DecoderConfig.from_dict(CONFIG))
    assert torch.equal(unmaterialised.to_empty(device="cpu").table, expected)
