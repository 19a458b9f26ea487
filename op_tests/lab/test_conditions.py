"""What an experiment writes down and holds still: configurations, memory, seeds, logs."""

import json
import mmap
import os
import random

import numpy as np
import pytest
import torch

from bench.lab import memory
from bench.lab.config import METHODS, BenchmarkConfig
from bench.lab.log import EventLog, read_events
from bench.lab.memory import MemoryTracker
from bench.lab.reproducibility import deterministic, set_seed
from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.tools.measure import GenerationResult
from op_tests.engine.toys import ToyModel

CELL = {"model_pair_name": "gpt2_dev", "K": 4, "temperature": 0.0, "max_new_tokens": 200, "prompt_domain": "code"}
CELL |= {"seed": 42}
MIB = 1 << 20


def test_labels():
    config = BenchmarkConfig(**CELL)
    assert config.is_speculative and config.decoder_label == "SD-K4"
    assert BenchmarkConfig(**CELL, method="tree").decoder_label == "SD-tree-K4"
    plain = BenchmarkConfig(**CELL | {"K": None})
    assert not plain.is_speculative and plain.decoder_label == "AR"
    shown = f"BenchmarkConfig(gpt2_dev, SD-K4, code, T=0, 200 tokens, seed 42; {config.config_hash()})"
    assert repr(config) == shown
    assert "seed 42, batch 8; " in repr(BenchmarkConfig(**CELL, batch_size=8))


def test_a_hash_outlives_its_process_and_new_fields():
    """The literal is of the six fields alone, so it must hold whatever fields are added."""
    config = BenchmarkConfig(**CELL)
    assert config.config_hash() == "ad73554a29a0"
    assert BenchmarkConfig(**CELL | {"temperature": 0}).config_hash() == config.config_hash()
    others = [{name: value} for name, value in (
        ("model_pair_name", "x"), ("K", 5), ("temperature", 0.5), ("max_new_tokens", 1), ("prompt_domain", "x"),
        ("seed", 43), ("method", "ngram"), ("batch_size", 2),
    )]  # fmt: skip
    hashes = {BenchmarkConfig(**CELL | other).config_hash() for other in others}
    assert len(hashes) == len(others) and config.config_hash() not in hashes
    plain = {BenchmarkConfig(**CELL | {"K": None, "method": method}).config_hash() for method in METHODS}
    assert len(plain) == 1  # who would draft says nothing about plain decoding


def test_a_configuration_there_and_back():
    config = BenchmarkConfig(**CELL, method="tree", batch_size=2)
    values = json.loads(json.dumps(config.to_dict()))
    assert values["decoder_label"] == "SD-tree-K4" and values["config_hash"] == config.config_hash()
    assert BenchmarkConfig.from_dict(values) == config
    with pytest.raises(ValueError, match="^BenchmarkConfig.from_dict: there is no field k$"):
        BenchmarkConfig.from_dict(values | {"k": 4})
    with pytest.raises(ValueError, match="^BenchmarkConfig.from_dict: K is missing$"):
        BenchmarkConfig.from_dict({name: value for name, value in values.items() if name != "K"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"K": 0}, "K must be None or an int of at least 1, got 0"),
        ({"K": True}, "K must be None or an int of at least 1, got True"),
        ({"temperature": -1.0}, "temperature must be a number of at least 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be a number of at least 0, got nan"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an int of at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be an int of at least 1, got 0"),
        ({"seed": None}, "seed must be an int, got None"),
        ({"method": "magic"}, "method must be one of chain, tree, ngram, suffix, got 'magic'"),
    ],
)
def test_a_configuration_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=f"^BenchmarkConfig: {message}$"):
        BenchmarkConfig(**CELL | change)


def test_every_method_runs_on_one_engine(device):
    """As an experiment would: the text is that of plain decoding, the depth is K's."""
    models = EAGLEInference(ToyModel(device=device, seed=1), ToyModel(device=device), EAGLEConfig(num_draft_tokens=9))
    texts = []
    for k, method in ((None, "chain"), *((2, method) for method in METHODS)):
        config = BenchmarkConfig("toys", k, 0.0, 8, "code", 0, method)
        result = GenerationResult.from_stream(models.stream([1, 2, 1, 2, 1], 8, **config.stream_options()))
        texts.append(result.generated_ids)
        assert result.is_speculative == config.is_speculative
        assert k is None or len(result.accepted_per_depth) == k
    assert all(text == texts[0] for text in texts)


class Counter(MemoryTracker):
    """A tracker of an allocator that is a number."""

    held = most = 0

    def allocate(self, num_bytes):
        self.held += num_bytes
        self.most = max(self.most, self.held)

    def _read_peak_bytes(self):
        return self.most

    def _reset_peak(self):
        self.most = self.held


def test_peaks_are_those_of_phases():
    tracker = Counter("cpu")
    tracker.allocate(100 * MIB)
    tracker.allocate(-90 * MIB)  # before any phase
    with tracker.phase("load"):
        tracker.allocate(20 * MIB)
    with tracker.phase("decode"):
        tracker.allocate(5 * MIB)
        with tracker.phase("draft"):
            tracker.allocate(30 * MIB)
            tracker.allocate(-30 * MIB)
        tracker.allocate(1 * MIB)
        with tracker.phase("verify"):
            tracker.allocate(2 * MIB)
    with tracker.phase("load"):  # again: the larger one counts
        tracker.allocate(50 * MIB)
        tracker.allocate(-50 * MIB)
        with tracker.phase("verify"):  # whose beginning must not forget what its outer one has reached
            pass
    assert tracker.summary() == {"load": 88.0, "decode": 65.0, "draft": 65.0, "verify": 38.0}
    assert tracker.peak_mib("draft") == 65.0


def test_phases_that_cannot_be():
    tracker = Counter("cpu")
    with pytest.raises(KeyError, match="no phase 'load'; there are: none"):
        tracker.peak_mib("load")
    with tracker.phase("load"), pytest.raises(RuntimeError, match="'load' must not lie in a phase of the same name"):
        tracker.phase("load").__enter__()
    assert tracker.summary() == {"load": 0.0}


def test_the_memory_of_the_process():
    data = os.urandom(MIB) * 96  # mapped below, since malloc may hand out pages that were freed before
    tracker = MemoryTracker("cpu")
    with tracker.phase("small"):
        pass
    if tracker.peak_mib("small") is None:
        pytest.skip("the peak of resident memory cannot be reset here")
    with tracker.phase("large"), mmap.mmap(-1, len(data)) as pages:
        pages.write(data)
    with tracker.phase("small again"):
        pass
    small, large, again = tracker.summary().values()
    assert large > small + 90 and again < large - 40


def test_no_memory_to_be_read(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_PROC", tmp_path / "nowhere")
    tracker = MemoryTracker("cpu")
    with tracker.phase("load"):
        pass
    assert tracker.summary() == {"load": None}


@pytest.mark.gpu
def test_the_memory_of_a_gpu():
    tracker = MemoryTracker()
    with tracker.phase("decode"):
        with tracker.phase("draft"):
            torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        with tracker.phase("verify"):
            torch.empty(MIB, dtype=torch.uint8, device="cuda")
    peaks = tracker.summary()
    assert peaks["decode"] == peaks["draft"] == pytest.approx(peaks["verify"] + 63, abs=2)


def test_seeds_are_of_all_generators():
    def draws():
        return random.random(), np.random.rand(), torch.rand(1).item()

    set_seed(7)
    first = draws()
    assert draws() != first
    set_seed(7)
    assert draws() == first
    for seed in (-1, 2**32, True, 1.0):
        with pytest.raises(ValueError, match="^set_seed: seed must be an int in 0..2.32 - 1, .*got"):
            set_seed(seed)


def state():
    backends = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    fill = torch.utils.deterministic.fill_uninitialized_memory
    modes = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return (*modes, *backends, fill, torch.get_float32_matmul_precision(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"))


@pytest.mark.parametrize("workspace", [None, ":16:8"])
def test_torch_is_held_still_and_let_go(monkeypatch, workspace):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if workspace:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    before = state()
    with pytest.raises(RuntimeError, match="^leave$"), deterministic(seed=3):
        drawn = torch.rand(1)
        assert state() == (True, False, True, False, False, "highest", workspace or ":4096:8")
        raise RuntimeError("leave")
    assert state() == before
    with pytest.raises(ValueError, match="^set_seed: seed must be"), deterministic(seed=-1):
        pass
    assert state() == before
    with deterministic(seed=3, warn_only=True):
        assert torch.equal(torch.rand(1), drawn) and state()[:2] == (True, True)
        with deterministic():
            assert state()[:2] == (True, False)
        assert state()[:2] == (True, True)
    assert state() == before


def test_a_log_is_lines_of_json(tmp_path):
    path = tmp_path / "new" / "log.jsonl"
    with EventLog(path) as log:
        written = log.write("cell_done", k=4, speed=float("nan"), times={"p50": [0.5, float("inf")]})
        log.write("cell_done", k=None, text="Größe\n")
    first, second = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert first == written and first["event"] == "cell_done" and first["time"] > 1e9
    assert first.items() >= {"k": 4, "speed": None, "times": {"p50": [0.5, None]}}.items()
    assert second["k"] is None and second["text"] == "Größe\n"
    assert read_events(path) == [first, second] and read_events(path, "other") == []
    assert read_events(tmp_path / "none.jsonl") == []


def test_a_log_goes_on_after_a_torn_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "a"}\n[1]\n{"event": "b", "k')
    with EventLog(str(path)) as log:
        log.write("c")
    assert [event["event"] for event in read_events(path)] == ["a", "c"]
    assert len(path.read_text().splitlines()) == 4


def test_a_log_reads_back_what_it_wrote(tmp_path):
    """Whatever `str.splitlines` takes for the end of a line."""
    path, texts = tmp_path / "log.jsonl", ["a\u2028b", "a\u2029b", "a\x85b", "a\rb", "a\x1cb"]
    with EventLog(path) as log:
        written = [log.write("prompt", text=text) for text in texts]
    assert read_events(path) == written and [event["text"] for event in written] == texts
