"""Drafts by mask tokens, of a language model (PARD) and of an EAGLE-3 head (P-EAGLE): each against the text alone."""

import json
import tempfile
from pathlib import Path

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.drafters.parallel_reader import ParallelReader
from eagle_kernels.engine.drafters.readers import ModelReader
from eagle_kernels.engine.models.causal_draft import CausalDraft
from eagle_kernels.engine.models.loading import load_draft, load_target, read_head
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.reference.causal_attend import causal_attend
from op_tests.engine import drafting, heads
from op_tests.engine.head_folders import HEAD_MASK, write_peagle
from op_tests.engine.toys import random_llama, write_decoder
from op_tests.engine.view import View

MASK = 59


def pard(device, **options):
    """(target, draft), random language models of one vocabulary."""
    target = random_llama(std=0.4, device=device)
    return target, CausalDraft(random_llama(std=0.5, seed=1, device=device), mask_token_id=MASK, **options)


def pard_logits(draft, target, text, count):
    """By one pass over the text and the masks after it, without keys that were kept; [count, V]."""
    tokens = torch.tensor([text + [MASK] * (count - 1)], device=target.device)
    positions = torch.arange(tokens.shape[1], device=target.device)[None]
    return draft.model.forward(tokens, positions, causal_attend).logits[0, len(text) - 1 :]


def peagle(device, num_layers=2):
    """(target, draft), through a folder."""
    target = random_llama(std=0.4, num_layers=8, device=device)
    with tempfile.TemporaryDirectory() as folder:
        return target, load_draft(write_peagle(Path(folder), heads.peagle_tensors(num_layers)), target)


def peagle_logits(draft, target, text, count):
    """By the formula: the target's features of the text but its last token, then those of masks."""
    weights = {name: tensor.cpu() for name, tensor in draft.state_dict().items()}
    features = drafting.features_of(target, text, heads.STREAMS).cpu()
    features = torch.cat([features, weights["mask_hidden"].view(1, -1).expand(count - 1, -1)])
    read = torch.tensor(text[1:] + [HEAD_MASK] * (count - 1))
    embedding = target.get_input_embeddings().weight.cpu()[read]
    return heads.peagle_formula(weights, embedding, features)[len(text) - 2 :]


PAIRS = {"PARD": (pard, pard_logits), "P-EAGLE": (peagle, peagle_logits)}


class OnePass(drafting.Oracle):
    """The best paths of a pass over the whole text."""

    def __init__(self, engine, logits_of, monkeypatch):
        super().__init__(engine, monkeypatch)
        self.logits_of = logits_of

    @torch.inference_mode()
    def drafts(self, text, config):
        draft, target = self.engine.draft, self.engine.target
        logits = self.logits_of(draft, target, text, config.num_steps).cpu().float()
        if draft.masked_id is not None:
            logits[:, draft.masked_id] = -torch.inf
        if draft.draft_to_target is None:
            return drafting.best_paths(logits, config)
        of_target = torch.full((len(logits), target.vocab_size), -torch.inf)
        of_target[:, torch.arange(logits.shape[1]) + draft.draft_to_target.cpu()] = logits
        return drafting.best_paths(of_target, config)


def watched(kind, config, device, monkeypatch):
    """(an engine, its oracle)."""
    pair, logits_of = PAIRS[kind]
    target, draft = pair(device)
    engine = EAGLEInference(draft, target, config)
    return engine, OnePass(engine, logits_of, monkeypatch)


@pytest.mark.parametrize("policy", drafting.POLICIES)
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 3, 2048])
@pytest.mark.parametrize("tree", drafting.TREES)
@pytest.mark.parametrize("kind", PAIRS)
def test_drafts_are_those_of_the_text_alone(kind, tree, chunk, policy, device, monkeypatch):
    """Rows that come and go, prompts in parts, paths of any length."""
    config = EAGLEConfig(**drafting.TREES[tree], **drafting.SMALL, **drafting.POLICIES[policy], prefill_chunk=chunk)
    engine, oracle = watched(kind, config, device, monkeypatch)
    drafting.come_and_go(engine)
    assert oracle.num_checked > 10
    assert isinstance(View(engine).plan.readers[0].reader, ParallelReader)


@pytest.mark.parametrize("kind", PAIRS)
def test_drafts_after_plain_steps(kind, device, monkeypatch):
    """Few and many, so that they are read in between, and by steps of other lengths."""
    engine, oracle = watched(kind, EAGLEConfig(**drafting.OF_LENGTHS), device, monkeypatch)
    drafting.pause_between_drafts(engine, is_long=True)
    assert oracle.num_checked > 20


@pytest.mark.parametrize("options", [{}, {"mean_draft_tokens": 4}, {"adaptive": "auto"}, {"method": "hybrid"}], ids=str)
@pytest.mark.parametrize("kind", PAIRS)
def test_text_is_plain_text(kind, options, device):
    """With rows that share nodes, trees that are chosen by their speed, and n-grams beside."""
    target, draft = PAIRS[kind][0](device)
    tree = {"num_model_steps": 2} if "method" in options else {}
    drafting.assert_plain_text(EAGLEInference(draft, target, EAGLEConfig(topk=2, num_steps=4, **options, **tree)))


@pytest.mark.parametrize("kind", PAIRS)
def test_the_mask_token_is_never_a_draft(kind, device, monkeypatch):
    """However likely the draft finds it; and where every draft is taken, the text has none that it made."""
    target, draft = PAIRS[kind][0](device)
    output = draft.model.lm_head if kind == "PARD" else draft.lm_head
    weight = output.weight.data
    weight[draft.masked_id] = 50 * weight[draft.masked_id - 1]
    seen = drafting.drafted_tokens(monkeypatch)
    config = EAGLEConfig(topk=3, num_steps=4, accept_policy="accept_all", cuda_graph=False)
    EAGLEInference(draft, target, config).generate(drafting.PROMPTS, 12)
    assert seen and draft.mask_token_id not in seen
    engine = EAGLEInference(draft, target, config)
    draft.masked_id = None  # as if nobody had known
    engine.generate(drafting.PROMPTS, 12)
    assert draft.mask_token_id in seen


def test_one_level_needs_no_masks(device):
    target, draft = pard(device)
    engine = EAGLEInference(draft, target, EAGLEConfig.chain(1))
    engine.generate(drafting.PROMPTS[0], 2)
    assert isinstance(View(engine).plan.readers[0].reader, ModelReader)


def test_folders_of_language_models(tmp_path, caplog):
    """The published key is pard_token; without it the same model drafts token by token."""
    caplog.set_level("INFO", "eagle_kernels")
    target, draft = tmp_path / "target", tmp_path / "draft"
    write_decoder(random_llama(std=0.4), target)
    write_decoder(random_llama(std=0.5, seed=1), draft)
    config = EAGLEConfig(topk=2, num_steps=3)
    assert EAGLEInference.from_pretrained(draft, target, config, device="cpu").draft.mask_token_id is None
    told = json.loads((draft / "config.json").read_text())
    cases = {MASK: None, 61: r"the mask token of a draft must lie in 0\.\.60, the draft's own tokens, got 61",
             "x": "pard_token must be a token id, got 'x'", -1: "pard_token must be a token id, got -1"}  # fmt: skip
    for mask, message in cases.items():
        (draft / "config.json").write_text(json.dumps(told | {"pard_token": mask}))
        if message is None:
            engine = EAGLEInference.from_pretrained(draft, target, config, device="cpu")
            assert engine.draft.mask_token_id == mask and f"by mask token {mask}" in caplog.text
            assert engine.generate([5, 6], 9).output_ids == engine.generate([5, 6], 9, speculative=False).output_ids
        else:
            with pytest.raises(ModelError, match=message):
                EAGLEInference.from_pretrained(draft, target, config, device="cpu")
    (draft / "config.json").write_text(json.dumps(told | {"pard_token": 5, "ptd_token_id": 6}))
    with pytest.raises(ModelError, match="pard_token=5 and ptd_token_id=6 contradict each other"):
        EAGLEInference.from_pretrained(draft, target, config, device="cpu")


MASK_SHAPES = [(1, 96), (1, 1, 96), (96,)]


@pytest.mark.parametrize("mask_shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_heads_equal_the_formula(num_layers, mask_shape, tmp_path):
    tensors = heads.peagle_tensors(num_layers, mask_shape)
    target, folder = random_llama(num_layers=8), write_peagle(tmp_path, tensors)
    draft, file = load_draft(folder, target), read_head(folder)
    assert (file.kind, draft.mask_token_id, draft.masked_id) == ("P-EAGLE", HEAD_MASK, 20)
    assert draft.kv_shape.num_layers == num_layers and hasattr(draft, "store") == (num_layers == 1)
    ids, features = heads.IDS[:1], torch.randn(1, 6, 96, generator=torch.Generator().manual_seed(5))
    features[0, -2:] = draft.mask_features
    positions = torch.arange(4, 10)[None]
    with torch.inference_mode():
        made = draft(ids, features, positions, causal_attend, from_target=True).logits[0]
    wanted = heads.peagle_formula(tensors, target.get_input_embeddings()(ids)[0], features[0], 4)
    torch.testing.assert_close(made, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["ptd_token_id", "pard_token", "mask_token_id"])
def test_names_of_the_mask_token(name, tmp_path):
    config = {"ptd_token_id": None, name: HEAD_MASK}
    assert load_draft(write_peagle(tmp_path, **config), random_llama(num_layers=8)).mask_token_id == HEAD_MASK


def test_speculators_folders(tmp_path):
    folder = heads.write_speculators(
        tmp_path, heads.peagle_tensors(), speculators_model_type="peagle", mask_token_id=HEAD_MASK,
        architectures=["PeagleDraftModel"], transformer_layer_config=heads.WIDTHS | {"num_hidden_layers": 2},
    )  # fmt: skip
    file = read_head(folder)
    assert (file.kind, file.format_name) == ("P-EAGLE", "vLLM speculators")
    assert load_draft(folder, random_llama(num_layers=8)).mask_token_id == HEAD_MASK


REFUSED = {
    "no token": ({}, {"ptd_token_id": None}, "ptd_token_id, pard_token, mask_token_id are missing; one must name"),
    "a token past the vocabulary": ({}, {"ptd_token_id": 61}, r"mask token must lie in 0\.\.60, the target's"),
    "two tokens": ({}, {"pard_token": 3}, "ptd_token_id=44 and pard_token=3 contradict each other"),
    "layers": ({}, {"num_hidden_layers": 3}, r"missing tensors: layers\.2\."),
    "fewer layers": ({}, {"num_hidden_layers": 1}, r"unexpected tensors: layers\.1\."),
    "the mask's width": ({"mask_hidden": torch.zeros(1, 32)}, {}, r"must have 96 elements, got shape \[1, 32\]"),
    "NaN": ({"mask_hidden": torch.full((1, 96), float("nan"))}, {}, "tensors with NaN or infinite values"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_folders_that_are_refused(case, tmp_path):
    changes, config, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        load_draft(write_peagle(tmp_path, heads.peagle_tensors() | changes, **config), random_llama(num_layers=8))


def test_a_head_is_no_target_and_has_a_fit(tmp_path):
    write_peagle(tmp_path)
    with pytest.raises(ModelError, match="holds a P-EAGLE head: a draft, not a target"):
        load_target(tmp_path)
    with pytest.raises(ModelError, match="vocab_size 61 is not the target's 70"):
        load_draft(tmp_path, random_llama(num_layers=8, vocab_size=70))
