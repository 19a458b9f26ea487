"""The speculative step: paths longer than a mask word, no waiting for the device, time taken on the right device."""

import contextlib
import weakref

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.batch.kv_pool import TreeAttend
from eagle_kernels.engine.drafters import readers
from eagle_kernels.engine.step import phases as timing
from eagle_kernels.engine.step.stepper import Stepper
from op_tests.engine.toys import ToyModel, random_llama, random_modules


def test_a_chain_longer_than_a_mask_word(device):
    """The target as its own draft: all 70 drafts of a step are accepted, so 71 rows are reread causally."""
    toy = ToyModel(max_length=256, device=device)
    engine = EAGLEInference(toy, toy, EAGLEConfig(topk=1, num_steps=70, num_draft_tokens=71))
    text, stats = engine.generate([1, 2, 3], 1 + 2 * 71)
    assert text == engine.generate([1, 2, 3], 1 + 2 * 71, speculative=False)[0]
    assert stats.steps == 2 and stats.mean_accept_length == 71


def test_draft_slots_have_the_positions_of_the_rows_that_wrote_them(monkeypatch, device):
    """A window on a draft's levels reads them: own slots as the rows say, earlier ones as they were."""
    levels = [torch.empty(2, 0, dtype=torch.int64, device=device)]

    class Watched(TreeAttend):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            positions, key_positions = self._positions, self._key_positions
            if key_positions is not None:
                key_positions = key_positions.flatten(1)
                before = levels[-1] if key_positions.shape[1] > positions.shape[1] else levels[0]
                assert torch.equal(key_positions, torch.cat([before, positions], dim=1))
                levels.append(key_positions)

    monkeypatch.setattr(readers, "TreeAttend", Watched)
    toy = ToyModel(device=device)
    EAGLEInference(toy, toy, EAGLEConfig(topk=3, num_steps=4, cuda_graph=False)).generate([[1, 2, 3], [4]], 8)
    assert len(levels) > 3


STEPS = {
    "plain": {"method": "naive"},
    "model": {"topk": 4, "num_steps": 3},
    "modules": {"method": "mtp", "topk": 1, "num_steps": 3},
    "ngram": {"method": "ngram", "topk": 2, "num_steps": 3, "min_ngram_size": 1},
    "suffix": {"method": "suffix", "topk": 2, "num_steps": 3},
    "hybrid": {"method": "hybrid", "topk": 2, "num_steps": 4, "num_model_steps": 2, "num_draft_tokens": 8},
    "several": {"method": ("draft_model", "ngram"), "topk": 2, "num_steps": 3},
    "rejection": {"topk": 2, "num_steps": 3, "verify_strategy": "rejection"},
    "topp": {"topk": 2, "num_steps": 3, "verify_strategy": "topp"},
    "typical": {"topk": 2, "num_steps": 3, "verify_strategy": "typical"},
}


@pytest.mark.cross
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02}])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_never_waits_for_the_device(monkeypatch, device, sampling, name):
    """Whoever drafts, and by whatever rule drafts are kept; the CPU only sees that steps are the same uncaptured."""
    if name == "typical":  # which knows no filters
        sampling = {key: value for key, value in sampling.items() if key == "temperature"}
    target = random_llama(device=device)
    draft = random_llama(hidden_size=16, num_layers=1, seed=1, device=device)
    draft = random_modules(target, 3) if name == "modules" else draft
    engine = EAGLEInference(draft, target, EAGLEConfig(**STEPS[name], **sampling))
    want = engine.generate([[1, 2, 3], [4]], 8, seeds=5).output_ids
    plain, steps = Stepper.step, []

    def watched(self, *arguments):
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            steps.append(plain(self, *arguments))
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        return steps[-1]

    monkeypatch.setattr(Stepper, "step", watched)
    got = engine.generate([[1, 2, 3], [4]], 8, seeds=5, cuda_graph=False, suffix_decoding_max_cached_requests=0)
    assert got.output_ids == want
    assert steps


class FakeEvent:
    """A device event of a machine that has none: remembers its stream, lies 2 ms behind the event before it."""

    streams: list[tuple[str, torch.device]] = []

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.streams.append(stream)
        self.time_ms = 2.0 * len(self.streams)

    def elapsed_time(self, end):
        return end.time_ms - self.time_ms


def test_phases_are_timed_on_the_given_device(monkeypatch):
    device = torch.device("cuda", 3)
    monkeypatch.setattr(FakeEvent, "streams", [])
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    timer = timing.PhaseTimer(device)
    for _ in range(2):
        with timer.phase("draft"):
            pass
    with timer.phase("verify"):
        pass
    assert timer.read_ms() == timer.read_ms() == {"draft": 4.0, "verify": 2.0}
    assert FakeEvent.streams == 4 * [("stream of", device)]


def test_events_of_a_broken_phase_are_kept(monkeypatch):
    """CUDA crashes where a capture ends after an event that it has recorded."""
    events = []

    def mark(*_):
        event = FakeEvent(enable_timing=True)
        events.append(weakref.ref(event))
        return event

    monkeypatch.setattr(timing, "mark", mark)
    timer = timing.PhaseTimer(torch.device("cuda"), is_captured=True)
    with contextlib.suppress(KeyError), timer.phase("draft"):
        raise KeyError
    (event,) = events
    assert event() is not None
    timer = None
    assert event() is None


def test_the_prefill_time_contains_the_drafts_prefill(monkeypatch):
    """The first tokens are on the host before the draft has read the prompt, so the clock must wait for the device."""
    waited = []
    monkeypatch.setattr("eagle_kernels.engine.serve.stream.synchronize", waited.append)
    toy = ToyModel()
    stream = EAGLEInference(toy, toy, EAGLEConfig(topk=1, num_steps=1)).stream([1, 2], 2)
    assert not waited
    next(stream)
    assert waited == [toy.device] and stream.output().stats.prefill_time_s > 0
