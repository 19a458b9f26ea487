"""EAGLE-3 heads whose layer has latent attention: what they compute, what their folders say, and what is refused.

Their texts over targets of other families are in `test_drafters_of_families`.
"""

import logging
import re

import pytest
import torch

pytest.importorskip("transformers")

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.loading import load_draft, load_target
from eagle_kernels.engine.models.protocol import LatentShape
from eagle_kernels.reference.causal_attend import causal_attend, positions_of
from op_tests.engine import families, heads, latent_heads
from op_tests.engine.drafting import TREES, ModelOracle, assert_plain_text, features_of, pause_between_drafts
from op_tests.engine.heads import HIDDEN, IDS, STREAMS, TARGET_IDS, edit_config, edit_tensors
from op_tests.engine.hostile import refused
from op_tests.engine.latent_heads import LATENT, LAYER_IDS, LAYERS, TURNING
from op_tests.engine.toys import random_llama, write_decoder

# (what config.json says, options of the tensors)
CASES = {
    "plain": ({}, {}),
    "queries projected at once": ({"q_lora_rank": None}, {"has_rank": False}),
    "yarn": ({"rope_scaling": latent_heads.YARN}, {}),
    "3.1": ({"fc_norm": True, "norm_output": True}, {"fc_norm": True}),
    "norm before the residual": ({"norm_before_residual": True, "rope_theta": 10000.0}, {}),
    "of another model type": ({"model_type": "llama", "architectures": ["Eagle3DeepseekV3ForCausalLM"]}, {}),
    "experts of its target": ({"n_routed_experts": 384, "n_group": 8, "first_k_dense_replace": 0}, {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return random_llama(num_layers=8, vocab_size=heads.TARGET_VOCAB)


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES)
def test_a_head_equals_the_formula(tmp_path, target, case):
    """In the first level, which reads the target's streams, and in the next, which reads the head's own."""
    config, options = CASES[case]
    stored = latent_heads.tensors(**options)
    head = load_draft(latent_heads.write(tmp_path, stored, **config), target)
    assert (head.aux_layers, head.kv_shape) == (STREAMS, LatentShape(1, 1, LATENT + TURNING, LATENT))
    assert (head.draft_to_target + torch.arange(len(TARGET_IDS))).tolist() == TARGET_IDS.tolist()
    embedding, positions = target.get_input_embeddings()(IDS), torch.arange(4, 10).expand(2, -1)
    hidden = torch.randn(2, 6, 3 * HIDDEN, generator=torch.Generator().manual_seed(5))
    for from_target in (True, False):
        output = head(IDS, hidden, positions, causal_attend, from_target=from_target)
        for row in range(2):
            wanted = latent_heads.formula(stored, embedding[row], hidden[row], 4, config, from_target=from_target)
            for got, want in zip(output, wanted, strict=True):
                torch.testing.assert_close(got[row].double(), want, atol=2e-4, rtol=2e-4)
        hidden = output.hidden


@pytest.mark.parametrize(
    ("ids", "beside", "streams", "meaning"),
    [
        (LAYERS, None, STREAMS, "layer outputs"),  # of the trainer
        ([2, 4, 5], None, STREAMS, "hidden_states"),  # exported for vLLM
        (None, [1, 4, 5], (1, 4, 5), "hidden_states"),
        (LAYERS, [2, 4, 5], STREAMS, "layer outputs"),
    ],
)
def test_layer_ids_that_begin_with_one_are_layers(tmp_path, target, caplog, ids, beside, streams, meaning):
    stored = latent_heads.for_vllm(latent_heads.tensors())
    folder = latent_heads.write(tmp_path, stored, eagle_config={LAYER_IDS: ids}, **{LAYER_IDS: beside})
    with caplog.at_level(logging.INFO):
        assert load_draft(folder, target).aux_layers == streams
    assert f"EAGLE-3, aux layers {ids or beside} ({meaning}) = hidden_states" in caplog.text
    assert "rope_theta=300.0 is taken as written" in caplog.text
    edit_config(folder, rope_theta=10000)
    caplog.clear()
    load_draft(folder, target)
    assert "rope_theta" not in caplog.text


EXPERT = {"midlayer.mlp.experts.0.up_proj.weight": torch.zeros(8, HIDDEN)}
# of an older TorchSpec, which turns halves
OLDER = {"midlayer.self_attn.kv_a_proj_with_mqa.weight": None,
         "midlayer.self_attn.kv_a_proj.weight": torch.zeros(LATENT + TURNING, 2 * HIDDEN)}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({"use_moe": True}, {}, "use_moe=True is not implemented for EAGLE-3"),
        ({"mla_use_nope": True}, {}, "mla_use_nope=True is not implemented"),
        ({"num_hidden_layers": 2}, {}, "num_hidden_layers=2 is not implemented for EAGLE-3"),
        ({"kv_lora_rank": 26}, {}, r"kv_lora_rank \+ qk_rope_head_dim must be 32 to match midlayer.self_attn.kv_"),
        ({"q_lora_rank": None}, {}, "missing tensors: midlayer.self_attn.q_proj.weight"),
        ({"num_key_value_heads": 2}, {}, "num_key_value_heads=2 is not implemented"),
        ({"eagle_config": {LAYER_IDS: [1, 3, 8]}}, {}, r"aux layers \(2, 4, 9\) .* must lie in 0..8"),
        ({"eagle_config": {LAYER_IDS: LAYERS}, LAYER_IDS: [3, 5, 6]}, {}, "contradicts"),
        ({}, EXPERT, "unexpected tensors: midlayer.mlp.experts.0.up_proj.weight"),
        ({}, OLDER, "missing tensors: midlayer.self_attn.kv_a_proj_with_mqa.weight"),
        ({}, {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}, "target_hidden_size must be 64 to match fc.weight"),
        ({}, {"midlayer.self_attn.q_a_proj.weight": torch.zeros(latent_heads.QUERY, HIDDEN)}, "q_a_proj.weight has sh"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(tmp_path, target, config, changes, message):
    folder = latent_heads.write(tmp_path / "head", **config)
    edit_tensors(folder, **changes)
    told = refused(load_draft, folder, target)
    assert re.search(message, told), told


class Oracle(ModelOracle):
    """Computes all rows anew, with the head itself, which another test compares with the formula."""

    @torch.inference_mode()
    def drafts(self, text, config):
        target, head, text = self.engine.target, self.engine.draft, list(text)
        hidden, num_rows = head.fc(features_of(target, text, head.aux_layers))[None], len(text) - 1
        for _ in range(config.num_steps):
            tokens = torch.tensor([text[1:]], device=target.device)
            output = head(tokens, hidden, positions_of(tokens), causal_attend, from_target=False)
            hidden = torch.cat((hidden, output.hidden[:, -1:]), 1)
            best = int(output.logits[0, -1].argmax())
            text.append(best + int(head.draft_to_target[best]))
        return text[num_rows + 1 :]


def write_pair(layers, folder):
    """(the target's folder, the head's)."""
    head = latent_heads.write(folder / "head")
    if layers == "keys and values":
        return write_decoder(random_llama(num_layers=5), folder / "target"), head
    sizes = {name: heads.WIDTHS[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    sizes |= families.LATENT | families.GROUPS
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 5}
    sizes |= {"first_k_dense_replace": 5} if layers == "latents" else {}
    families.write_target("DeepseekV3", sizes, folder / "target")
    return folder / "target", head


TARGETS = ("keys and values", "latents", "latents and experts")


@pytest.mark.parametrize("layers", TARGETS)
@pytest.mark.parametrize("chunk", [3, 2048])
def test_drafts_are_those_of_all_rows_computed_anew(tmp_path, device, monkeypatch, layers, chunk):
    """Prompts in parts, plain steps in between, after which the head writes rows and attends to nothing."""
    folder, head = write_pair(layers, tmp_path)
    target = load_target(folder, device)
    config = EAGLEConfig.chain(
        3, page_size=4, prefill_chunk=chunk, max_batch=4, cuda_graph=False, eos_token_ids=()
    )  # fmt: skip
    engine = EAGLEInference(load_draft(head, target), target, config)
    oracle = Oracle(engine, monkeypatch)
    pause_between_drafts(engine)
    assert oracle.num_checked > 15


@pytest.mark.parametrize("layers", TARGETS)
@pytest.mark.parametrize("shape", TREES)
def test_text_is_that_of_plain_decoding(tmp_path, device, layers, shape):
    folder, head = write_pair(layers, tmp_path)
    config = EAGLEConfig(**TREES[shape], method="eagle", page_size=4, max_batch=3, eos_token_ids=())
    assert_plain_text(EAGLEInference.from_pretrained(head, folder, config, device=device, dtype="float32"))
