"""The embedded pair: its texts stay what they are, and so does acceptance, which every silent fault lowers.

Faults of the draft path leave the text correct and only cost acceptance (a few per cent up to most of it), so each is
planted here and must leave the band around the measured length.
"""

import json

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, ops
from eagle_kernels.engine.batch.kv_pool import TreeAttend
from eagle_kernels.engine.drafters.readers import ModelReader
from eagle_kernels.engine.models.loading import demo_pair
from op_tests.engine.toys import plain_logits

ON_GPU = torch.cuda.is_available()
PROMPT_COUNT, NEW_TOKENS = (32, 128) if ON_GPU else (8, 48)
# A fault costs as much in half of the text; what the sound pair reaches there is measured beside it.
FAULT_TOKENS = 96 if ON_GPU else 48

# Mean acceptance length of the default tree, greedy, fp32, on the first 8 held-out prompts x 96 tokens.
MEASURED_ACCEPT_LENGTH = 5.529
BAND = 0.02


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    texts = json.loads((demo_pair()[0].parent / "prompts.json").read_text(encoding="utf-8"))
    return [list(text.encode()) for text in texts[:PROMPT_COUNT]]


def load(dtype=torch.float32) -> EAGLEInference:
    """The pair with one tree, of the default size: by itself a GPU would choose among trees as it goes."""
    device = "cuda" if ON_GPU else "cpu"
    config = EAGLEConfig(num_draft_tokens=32)
    return EAGLEInference.from_pretrained(*reversed(demo_pair()), config, device=device, dtype=dtype)


@pytest.fixture(scope="module")
def pair() -> EAGLEInference:
    return load()


def accept_length(engine: EAGLEInference, prompts: list[list[int]], num_tokens: int = 96) -> float:
    return engine.generate(prompts[:8], num_tokens)[1].mean_accept_length


def is_in_band(length: float, measured: float) -> bool:
    return abs(length / measured - 1) <= BAND


DRAWN = {"topk": 2, "num_steps": 3, "num_draft_tokens": 7, "verify_strategy": "rejection"}
# how it is decoded, and what follows "def main(" with two seeds
GOLDEN = {
    "plain": ({"speculative": False}, [b"):\n        r, M, _ = _ma", b"):\n            with self"]),
    "tree": ({}, [b"):\n        r, M, _ = _ma", b"):\n            with self"]),
    "drawn drafts": (DRAWN, [b"):\n            return\n  ", b"):\n    '''Wrap user mars"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_texts_stay_what_they_are(pair, name):
    """From release to release (test_golden.py) and on every machine: also at temperatures so far from the first one
    that logits differ by far more than by rounding."""
    options, texts = GOLDEN[name]
    for temperature in (0.9, 0.903, 0.897):
        prompts = [list(b"def main(")] * 2
        found = pair.generate(prompts, 24, seeds=[1, 2**40], temperature=temperature, **options).output_ids
        assert [bytes(tokens) for tokens in found] == texts


@pytest.fixture(scope="module")
def sound_length(pair, prompts) -> float:
    """What every fault is held against."""
    return accept_length(pair, prompts, FAULT_TOKENS)


def test_acceptance_is_what_was_measured(pair, prompts, sound_length):
    for length in (accept_length(pair, prompts), sound_length):
        assert is_in_band(length, MEASURED_ACCEPT_LENGTH), f"{length:.3f}, measured {MEASURED_ACCEPT_LENGTH}"


def swap_concatenation(engine, monkeypatch):
    """Hidden state before embedding."""
    projection = engine.draft.midlayer.self_attn.qkv_proj
    first, second = projection.weight.chunk(2, dim=1)
    projection.weight.data = torch.cat([second, first], dim=1)


def shift_features(engine, monkeypatch):
    """f_{j-1} beside t_{j+1}."""
    forward = engine.draft.forward

    def shifted(input_ids, hidden, positions, attend, *, from_target):
        if from_target:
            hidden = torch.cat([hidden[:, :1], hidden[:, :-1]], dim=1)
        return forward(input_ids, hidden, positions, attend, from_target=from_target)

    monkeypatch.setattr(engine.draft, "forward", shifted)


def shift_aux_layers(engine, monkeypatch):
    """Layer ids of the other convention, off by one."""
    engine.draft.config.aux_layers = tuple(layer - 1 for layer in engine.draft.config.aux_layers)


def norm_the_residual(engine, monkeypatch):
    engine.draft.midlayer.norm_before_residual = True


def feed_back_normed(engine, monkeypatch):
    engine.draft.config.norm_output = True


def skip_draft_extend(engine, monkeypatch):
    """Accepted rows keep the draft's own guess of the hidden state instead of the target's true feature."""

    def extend_from_guesses(self, batch, committed, features):
        tokens, features = committed.tokens, features.flatten(0, 1)[committed.hidden_rows]
        outputs, hidden = [], features[:, :1]
        for row in range(tokens.shape[1]):
            mask = torch.full((len(tokens), 1, 1), (1 << (row + 1)) - 1, device=tokens.device)
            positions = batch.positions[:, row : row + 1]
            pages = batch.state.target_pool.page_size
            slots = ops.find_slots(batch.block_table, batch.lengths + row, count=1, page_size=pages).slots
            output = self.model.forward(
                tokens[:, row : row + 1].clamp(min=0), hidden, positions,
                TreeAttend(batch.state.draft_pool, batch.block_table, batch.lengths, slots, row + 1, mask, positions),
                from_target=row == 0,
            )  # fmt: skip
            outputs.append(output)
            hidden = output.hidden
        request = torch.arange(len(tokens), device=tokens.device)
        last = committed.accept_token_num.to(torch.int64)
        batch.state.draft_logits[batch.rows].copy_(
            torch.cat([output.logits for output in outputs], dim=1)[request, last]
        )
        batch.state.draft_hidden[batch.rows].copy_(
            torch.cat([output.hidden for output in outputs], dim=1)[request, last]
        )

    monkeypatch.setattr(ModelReader, "observe", extend_from_guesses)


FAULTS = [swap_concatenation, shift_features, shift_aux_layers, norm_the_residual, feed_back_normed, skip_draft_extend]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_silent_faults_leave_the_band(fault, prompts, sound_length, monkeypatch, note):
    engine = load()
    fault(engine, monkeypatch)
    length = accept_length(engine, prompts, FAULT_TOKENS)
    note(f"mean acceptance length {length:.3f} instead of {sound_length:.3f}")
    for measured in (sound_length, MEASURED_ACCEPT_LENGTH):
        assert not is_in_band(length, measured), f"{fault.__name__} costs nothing that the band shows: {length:.3f}"


@pytest.mark.gpu
def test_bf16_text_is_greedy_up_to_named_ties(prompts, note):
    """Teacher-forced: every token is the argmax of a plain pass over the text, or within a bf16 rounding of it."""
    engine = load(torch.bfloat16)
    text, _ = engine.generate(prompts, NEW_TOKENS)
    ties = checked = 0
    for prompt, continuation in zip(prompts, text):
        logits = plain_logits(engine, prompt + continuation)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(continuation, device=logits.device)[:, None])[:, 0]
        gap = logits.max(dim=1).values - chosen
        named_gap = 4 * torch.finfo(torch.bfloat16).eps * logits.abs().max(dim=1).values
        assert (gap <= named_gap).all(), f"a token lies {gap.max().item():.3f} below the argmax"
        ties += int((gap > 0).sum())
        checked += len(continuation)
    note(f"{ties} of {checked} tokens are not the plain argmax, all within 4 roundings of it")
    assert ties < 0.05 * checked
