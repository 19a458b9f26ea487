"""DFlash drafts: the published layout, and every draft against transformers' class of that design, from text alone."""

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.dflash import load_dflash
from eagle_kernels.engine.models.loading import load_draft, load_target, read_kind
from eagle_kernels.engine.models.protocol import ModelError
from op_tests.engine import drafting, heads
from op_tests.engine.dflash_folders import BLOCK, CONFIG, HIDDEN, IDS, LAYERS, MASK, pair, tensors_of, write
from op_tests.engine.quantised.writers import FORMATS, write_quantised
from op_tests.engine.toys import random_llama, write_decoder


def theirs(tensors):
    """transformers' model of this design, with these weights."""
    module = pytest.importorskip("transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant")
    from transformers import MuseGlimmerAssistantConfig

    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "head_dim", "rms_norm_eps", "max_position_embeddings", "block_size")  # fmt: skip
    config = MuseGlimmerAssistantConfig(
        **{name: CONFIG[name] for name in names}, mask_token_id=MASK, target_layer_ids=IDS,
        layer_types=["full_attention"] * LAYERS, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = module.MuseGlimmerAssistantModel(config).eval()
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    model.load_state_dict({renamed.get(name, name): tensor for name, tensor in tensors.items()})
    return model


@torch.inference_mode()
def block_logits(model, target, text, count):
    """What their model says of the block after a text whose last token is the root, in one pass without a cache.

    The rows after the first are the drafts', as in transformers' `DFlashTokenCandidateGenerator.get_candidates`.
    """
    features = drafting.features_of(target, text, [layer + 1 for layer in IDS])[None].cpu()
    embed = target.get_input_embeddings().weight.cpu()
    noise = embed[torch.tensor([[text[-1]] + [MASK] * (BLOCK - 1)])]
    hidden = model(noise_embeds=noise, context_hidden_states=features, attention_mask=None).last_hidden_state
    return hidden[0, 1 : 1 + count] @ target.get_output_embeddings().weight.cpu().T


class OfTransformers(drafting.Oracle):
    """The best paths of their model's block."""

    def __init__(self, engine, monkeypatch):
        super().__init__(engine, monkeypatch)
        self.model = theirs(tensors_of())

    def drafts(self, text, config):
        logits = block_logits(self.model, self.engine.target, text, config.num_steps)
        logits[:, MASK] = -torch.inf
        return drafting.best_paths(logits, config)


@pytest.mark.parametrize("policy", drafting.POLICIES)
@pytest.mark.parametrize("chunk", [3, 2048])
@pytest.mark.parametrize("tree", drafting.TREES)
def test_drafts_are_those_of_transformers(tree, chunk, policy, tmp_path, device, monkeypatch):
    """Of the text alone: rows that come and go, prompts in parts, paths of any length, plain steps in between."""
    config = EAGLEConfig(**drafting.TREES[tree], **drafting.SMALL, **drafting.POLICIES[policy], prefill_chunk=chunk)
    target, draft = pair(tmp_path, device)
    engine = EAGLEInference(draft, target, config)
    oracle = OfTransformers(engine, monkeypatch)
    drafting.come_and_go(engine, has_pauses=True)
    assert oracle.num_checked > 8


@pytest.mark.parametrize("options", [{}, {"mean_draft_tokens": 4}, {"adaptive": "auto"}, {"method": "hybrid"},
                                     {"verify_strategy": "rejection"}], ids=str)  # fmt: skip
def test_text_is_plain_text(options, tmp_path, device):
    target, draft = pair(tmp_path, device)
    tree = {"num_steps": 6, "num_model_steps": 2} if options.get("method") else {"num_steps": 4}
    drafting.assert_plain_text(EAGLEInference(draft, target, EAGLEConfig(topk=2, **options, **tree)))


def test_the_mask_token_is_never_a_draft(tmp_path, device, monkeypatch):
    """Not even where the target says it itself, whose text may hold it."""
    target, draft = pair(tmp_path, device)
    target.lm_head.weight.data[MASK] = 3 * target.lm_head.weight.data[MASK - 1]
    seen = drafting.drafted_tokens(monkeypatch)
    engine = EAGLEInference(draft, target, EAGLEConfig(topk=3, num_steps=4, cuda_graph=False))
    text = engine.generate(drafting.PROMPTS, 12).output_ids
    assert seen and MASK not in seen and MASK in sum(text, [])


REFUSED = {
    "a layer past the target's": ({}, {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 4]}},
                                  "target_layer_ids must lie below 4, the target's layers, got 4"),
    "layers that are none": ({}, {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": "0"}},
                             "target_layer_ids must be a list of the target's layers, got '0'"),
    "another number of layers": ({}, {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0]}},
                                 "fc.weight must have 32 columns for 1 target_layer_ids, got 64"),
    "block length": ({}, {"block_size": 65}, r"block_size must lie in 2\.\.64, got 65"),
    "no block length": ({}, {"block_size": None}, "block_size must be a positive integer, got None"),
    "mask token": ({}, {"dflash_config": {"mask_token_id": 61, "target_layer_ids": IDS}},
                   r"mask_token_id must lie in 0\.\.60, the target's tokens, got 61"),
    "layers of its own": ({}, {"num_hidden_layers": 3}, "num_hidden_layers must be 2 to match the tensors layers"),
    "a tensor is missing": ({"hidden_norm.weight": None}, {}, "missing tensors: hidden_norm.weight"),
    "NaN": ({"norm.weight": torch.full((HIDDEN,), float("nan"))}, {}, "tensors with NaN or infinite values"),
    "vocabulary": ({}, {"vocab_size": 70}, "the draft's vocab_size 70 is not the target's 61"),
    "not DFlash": ({}, {"dflash_config": None, "architectures": []}, "holds no DFlash draft"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_folders_that_are_refused(case, tmp_path):
    changes, config, message = REFUSED[case]
    tensors = {name: tensor for name, tensor in (tensors_of() | changes).items() if tensor is not None}
    with pytest.raises(ModelError, match=message):
        load_dflash(write(tmp_path, tensors, **config), random_llama(num_layers=4))


def test_what_a_draft_is_not(tmp_path):
    target, draft = pair(tmp_path)
    assert read_kind(tmp_path) == "DFlash" and draft.aux_layers == (1, 4)
    with pytest.raises(ModelError, match="holds a DFlash draft: a draft, not a target"):
        load_target(tmp_path)
    with pytest.raises(ModelError, match="holds a DFlash draft, which load_dflash loads"):
        load_draft(tmp_path, target)
    with pytest.raises(ValueError, match="num_steps must be at most 4, the levels that DFlashDraft drafts, got 5"):
        EAGLEInference(draft, target, EAGLEConfig.chain(5))


def test_folders_make_an_engine(tmp_path):
    target = write_decoder(random_llama(std=0.4, num_layers=4), tmp_path / "target")
    config = EAGLEConfig(method="dflash", topk=2, num_steps=3)
    engine = EAGLEInference.from_pretrained(write(tmp_path / "draft"), target, config, device="cpu")
    assert type(engine.draft).__name__ == "DFlashDraft"
    assert engine.generate([[5, 6]], 9).output_ids == engine.generate([[5, 6]], 9, speculative=False).output_ids


@pytest.mark.parametrize("form", ["awq", "fp8 blocks"])
@pytest.mark.parametrize("listed", [(), ("fc",)], ids=["all", "all but fc"])
def test_quantised_folders(form, listed, tmp_path):
    """A draft whose weights are quantised drafts as one with the weights that they stand for."""
    plain = write(tmp_path / "plain", tensors_of(size=64, inner=96), hidden_size=64, intermediate_size=96)
    folder = write_quantised(FORMATS[form], plain, tmp_path / "quantised", listed)
    target = random_llama(std=0.4, num_layers=4, hidden_size=64)
    drafts = [load_dflash(each, target) for each in (plain, folder)]
    texts = [
        EAGLEInference(draft, target, EAGLEConfig(topk=2, num_steps=3)).generate([[5, 6, 7]], 16) for draft in drafts
    ]
    assert texts[0].output_ids == texts[1].output_ids and texts[0].stats.steps == texts[1].stats.steps
    heads.edit_config(folder, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    with pytest.raises(ModelError, match="quant_algo='NVFP4' is not implemented"):
        load_dflash(folder, target)
