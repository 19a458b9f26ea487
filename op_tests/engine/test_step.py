"""The speculative step: paths longer than a mask word, no waiting for the device, time taken on the right device."""

from __future__ import annotations

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine import timing
from eagle_kernels.engine.drafters import model_reader
from eagle_kernels.engine.kv_pool import TreeAttend
from eagle_kernels.engine.step import Stepper
from op_tests.engine.toys import ToyModel, random_llama


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

    monkeypatch.setattr(model_reader, "TreeAttend", Watched)
    toy = ToyModel(device=device)
    EAGLEInference(toy, toy, EAGLEConfig(topk=3, num_steps=4, cuda_graph=False)).generate([[1, 2, 3], [4]], 8)
    assert len(levels) > 3


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02}])
@pytest.mark.parametrize("speculative", [True, False])
def test_a_step_never_waits_for_the_device(monkeypatch, sampling, speculative):
    target = random_llama(device="cuda")
    draft = random_llama(hidden_size=16, num_layers=1, seed=1, device="cuda")
    engine = EAGLEInference(draft, target, EAGLEConfig(topk=4, num_steps=3, **sampling))
    want = engine.generate([[1, 2, 3], [4]], 8, seeds=5, speculative=speculative).output_ids
    unwatched, steps = Stepper.step, []

    def watched(self, *arguments):
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps.append(unwatched(self, *arguments))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return steps[-1]

    monkeypatch.setattr(Stepper, "step", watched)
    options = {"seeds": 5, "speculative": speculative, "cuda_graph": False}
    assert engine.generate([[1, 2, 3], [4]], 8, **options).output_ids == want
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


def test_the_prefill_time_contains_the_drafts_prefill(monkeypatch):
    """The first tokens are on the host before the draft has read the prompt, so the clock must wait for the device."""
    waited = []
    monkeypatch.setattr("eagle_kernels.engine.stream.synchronize", waited.append)
    toy = ToyModel()
    stream = EAGLEInference(toy, toy, EAGLEConfig(topk=1, num_steps=1)).stream([1, 2], 2)
    assert not waited
    next(stream)
    assert waited == [toy.device] and stream.output().stats.prefill_time_s > 0
