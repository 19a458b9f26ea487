"""Next-token modules: the network against formulas, their folders, and every draft against all rows computed anew."""

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.drafters.readers import ModuleReader
from eagle_kernels.engine.models.loading import load_draft, load_target, read_head
from eagle_kernels.engine.models.protocol import FINAL_NORM, ModelError
from eagle_kernels.reference.causal_attend import causal_attend
from op_tests.engine import heads
from op_tests.engine.drafting import PROMPTS, ModelOracle, come_and_go, features_of, pause_between_drafts
from op_tests.engine.engines import write_with_modules
from op_tests.engine.heads import HIDDEN, IDS, edit_config, edit_tensors
from op_tests.engine.view import View


def load(folder, num_modules, device="cpu", **options):
    """(target, draft)."""
    folder = write_with_modules(folder, num_modules, **options)
    target = load_target(folder, device)
    return target, load_draft(folder, target)


def test_modules_equal_the_formula(tmp_path):
    target, draft = load(tmp_path, 3)
    file = read_head(tmp_path)
    assert (file.kind, file.format_name) == ("MTP", "MiMo (next-token modules)")
    assert draft.num_modules == 3 and draft.kv_shape.num_layers == 3 and draft.aux_layers == (FINAL_NORM,)
    weights, output = heads.module_tensors(3), target.lm_head.weight
    embedding = target.get_input_embeddings()(IDS)
    hidden = torch.randn(2, 6, HIDDEN, generator=torch.Generator().manual_seed(5))
    positions = torch.arange(4, 10).expand(2, -1)
    with torch.inference_mode():
        for module in range(3):
            made = draft.advance(IDS, hidden, positions, causal_attend, module=module)
            for row in range(2):
                logits, out = heads.module_formula(weights, module, embedding[row], hidden[row], output, 4)
                torch.testing.assert_close(made[row], out, atol=2e-4, rtol=2e-4)
                torch.testing.assert_close(draft.project(made)[row], logits, atol=2e-4, rtol=2e-4)
            if module == 0:
                whole = draft(IDS, hidden, positions, causal_attend, from_target=False)
                assert torch.equal(whole.hidden, made) and torch.equal(whole.logits, draft.project(made))
            hidden = made


def test_folders_that_are_refused(tmp_path):
    target, _ = load(tmp_path, 2)
    edit_config(tmp_path, num_nextn_predict_layers=3)
    told = r"num_nextn_predict_layers must be 2 to match the tensors mtp_layers\.\*, got 3"
    with pytest.raises(ModelError, match=told):
        load_draft(tmp_path, target)
    edit_config(tmp_path, num_nextn_predict_layers=None)
    with pytest.raises(ModelError, match="num_nextn_predict_layers must be a positive integer, got None"):
        load_draft(tmp_path, target)
    edit_config(tmp_path, num_nextn_predict_layers=2, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(ModelError, match="sliding_window=8 is not implemented for next-token modules"):
        load_draft(tmp_path, target)
    edit_config(tmp_path, use_sliding_window=False)
    edit_tensors(tmp_path, **dict.fromkeys(heads.module_tensors(2)))
    with pytest.raises(ModelError, match=r"num_nextn_predict_layers is set, but no tensor is named model.mtp_layers"):
        load_draft(tmp_path, target)


class Oracle(ModelOracle):
    """All modules over all rows by formulas, from the text alone, without keys that were kept."""

    def __init__(self, engine, monkeypatch):
        super().__init__(engine, monkeypatch)
        self.weights = heads.module_tensors(engine.draft.num_modules)

    @torch.inference_mode()
    def drafts(self, text, config):
        """The first choice of each module, the modules before having chosen."""
        target, text = self.engine.target, list(text)
        hidden = features_of(target, text, (FINAL_NORM,)).cpu()
        embedding, output = target.get_input_embeddings().weight.cpu(), target.lm_head.weight.cpu()
        count = len(text) - 1
        for module in range(config.num_steps):
            shifted = embedding[torch.tensor(text[1 + module : 1 + module + count])]
            logits, hidden = heads.module_formula(self.weights, module, shifted, hidden, output)
            text.append(int(logits[-1].argmax()))
        return text[count + 1 :]


@pytest.fixture
def watched(tmp_path, device, monkeypatch):
    """`watched(num_modules, config)`: an engine and its oracle."""

    def make(num_modules: int, config: EAGLEConfig) -> tuple[EAGLEInference, Oracle]:
        target, draft = load(tmp_path, num_modules, device)
        engine = EAGLEInference(draft, target, config)
        return engine, Oracle(engine, monkeypatch)

    return make


CHUNKS = (1, 3, 2048)
POLICIES = {
    "what the target takes": {},
    "whole chains": {"accept_policy": "accept_all"},
    "some": {"simulated_accept_length": 1.6},
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("num_modules", [2, 3, 5])
def test_drafts_are_those_of_all_rows_computed_anew(watched, num_modules, chunk, policy):
    """Rows that come and go, prompts in parts, accepted chains of any length."""
    config = EAGLEConfig.chain(
        num_modules, method="mtp", page_size=(1, 4, 16)[num_modules % 3], prefill_chunk=chunk, max_batch=3,
        cuda_graph=False, **POLICIES[policy],
    )  # fmt: skip
    engine, oracle = watched(num_modules, config)
    come_and_go(engine, least=12, more=8)
    assert oracle.num_checked > 10


@pytest.mark.slow
def test_drafts_after_plain_steps(watched):
    """Few and many, so that they are read in between, and by steps of other lengths."""
    table = ((1, (1, 3, 4)), (2, None), (3, (1, 1, 2)), (4, (1, 4, 5)))
    config = EAGLEConfig.chain(4, method="mtp", adaptive=table, max_batch=4, cuda_graph=False)
    engine, oracle = watched(4, config)
    pause_between_drafts(engine)
    assert oracle.num_checked > 15


@pytest.mark.slow
def test_drafts_after_shorter_chains(watched):
    """The modules that these do not need read the text all the same."""
    config = EAGLEConfig.chain(3, adaptive=((1, (1, 1, 2)), (2, (1, 3, 4))), max_batch=2, cuda_graph=False)
    engine, oracle = watched(3, config)
    requests = [engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=40))]
    for _ in range(12):
        engine.step()
    requests.append(engine.submit(PROMPTS[1], SamplingParams(max_new_tokens=20)))
    engine.collect()
    assert [request.error for request in requests] == [None] * 2 and oracle.num_checked > 20


def test_hybrid_takes_the_modules_drafts_first(watched):
    config = EAGLEConfig(
        method="hybrid", topk=1, num_steps=8, num_model_steps=3, min_ngram_size=1, accept_policy="accept_all",
        cuda_graph=False,
    )  # fmt: skip
    engine, oracle = watched(3, config)
    engine.generate(PROMPTS, 30)
    assert oracle.num_checked > 10


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 3])
def test_one_module_drafts_on(tmp_path, device, num_steps):
    """Trees as well; of several modules too the first one alone."""
    target, draft = load(tmp_path, 1, device)
    engine = EAGLEInference(draft, target, EAGLEConfig(method="mtp", topk=2, num_steps=3))
    assert engine.generate(PROMPTS, 20).output_ids == engine.generate(PROMPTS, 20, speculative=False).output_ids
    target, several = load(tmp_path / "several", 3, device)
    engine = EAGLEInference(several, target, EAGLEConfig.chain(num_steps, method="mtp"))
    engine.generate(PROMPTS[0], 2)
    assert isinstance(View(engine).plan.readers[0].reader, ModuleReader) == (num_steps > 1)


def test_chains_that_modules_cannot_draft(tmp_path):
    target, draft = load(tmp_path, 2)
    refused = [
        (EAGLEConfig(topk=2, num_steps=2), "topk must be 1 for a draft of 2 next-token modules, whose drafts are a ch"),
        (EAGLEConfig.chain(3),
         "num_steps must be at most the 2 next-token modules of the draft, one for each level, got 3"),
        (EAGLEConfig(method="hybrid", topk=1, num_steps=6, num_model_steps=3),
         "num_model_steps must be at most the 2 next-token modules of the draft, one for each level, got 3"),
    ]  # fmt: skip
    for config, message in refused:
        with pytest.raises(ValueError, match=message):
            EAGLEInference(draft, target, config)
    engine = EAGLEInference(draft, target)  # nobody asked for a tree
    plain = engine.generate(PROMPTS, 12, speculative=False).output_ids
    assert engine.generate(PROMPTS, 12).output_ids == plain
    assert {(each.topk, each.num_steps) for each in engine.candidates if each.draft} == {(1, 2)}
