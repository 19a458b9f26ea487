"""Timers: who waits for what, and what is said to those who ask too early; on a GPU also against known work."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from eagle_kernels.engine import benchmark
from eagle_kernels.tools import measure
from eagle_kernels.tools.measure import CUDATimer, CUDATimerCollection, cuda_sync_time

CPU = torch.device("cpu")


class Event:
    """A CUDA event whose stream is a list of what was recorded; its time is the place in there."""

    stream: list[Event] = []
    waits: list[Event] = []

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self, stream):
        assert stream == "current stream of cuda"
        self.stream.append(self)

    def synchronize(self):
        self.waits.append(self)

    def elapsed_time(self, end):
        assert end in self.waits, "read before it was waited for"
        return float(self.stream.index(end) - self.stream.index(self))


@pytest.fixture
def events(monkeypatch):
    """A GPU that is not there: events alone, and nothing that waits for all of it."""

    def wait_for_everything(*_):
        raise AssertionError("the whole device was waited for")

    monkeypatch.setattr(Event, "stream", [])
    monkeypatch.setattr(Event, "waits", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", wait_for_everything)
    return Event


def test_a_timer_waits_for_its_own_end_and_nothing_else(events):
    with CUDATimer("cuda") as timer:
        pass
    assert len(events.stream) == 2 and not events.waits
    assert timer.elapsed_ms == 1.0 and events.waits == [events.stream[1]]
    assert repr(timer) == "CUDATimer(1.000 ms)"


def test_a_timer_that_is_used_again_is_as_new():
    """Whatever it timed before, and however that ended."""
    timer, timers = CUDATimer(CPU), CUDATimerCollection(CPU)
    for is_failing in (False, True, False):
        timers.start("verify")
        with contextlib.suppress(KeyError), timer:
            assert repr(timer) == "CUDATimer(not finished)"
            with pytest.raises(RuntimeError, match="this one is still running$"):
                timer.elapsed_ms  # noqa: B018
            if is_failing:
                raise KeyError
        assert timer.elapsed_ms >= 0
        with pytest.raises(KeyError, match="no finished interval of 'verify'; there are: none"):
            timers.elapsed_ms("verify")
        with pytest.raises(RuntimeError, match="^CUDATimerCollection.start: 'verify' is running; stop it first$"):
            timers.start("verify")
        assert timers.stop("verify") == timers.elapsed_ms("verify") >= 0
        with pytest.raises(RuntimeError, match="^CUDATimerCollection.stop: 'verify' is not running; start it first$"):
            timers.stop("verify")
        with pytest.raises(KeyError, match="no finished interval of 'draft'; there are: 'verify'"):
            timers.elapsed_ms("draft")
        timers.start("draft")
        timers.reset()
        assert timers.names == [] and timers.summary() == {}
        with pytest.raises(RuntimeError, match="'draft' is not running; start it first"):
            timers.stop("draft")


def test_a_timer_on_the_wall():
    timer = CUDATimer(CPU)
    rule = "^CUDATimer: elapsed_ms can be read only after .* this one was never entered$"
    for _ in range(2):
        assert repr(timer) == "CUDATimer(not finished)"
        with pytest.raises(RuntimeError, match=rule):
            timer.elapsed_ms  # noqa: B018
        timer.__exit__(None, None, None)
    with timer:
        time.sleep(0.003)
    first_ms = timer.elapsed_ms
    assert 3 <= first_ms < 1000 and timer.elapsed_ms == first_ms
    with timer:
        pass
    assert timer.elapsed_ms < first_ms


def test_a_timer_without_a_device_takes_what_there_is(monkeypatch):
    for is_there, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=is_there: there)
        assert CUDATimer()._device.type == CUDATimerCollection()._device.type == kind


def test_intervals_add_up_by_name(events):
    timers = CUDATimerCollection("cuda")
    with timers.phase("draft"):
        pass
    timers.start("verify")
    with timers.phase("draft"):  # while another one runs
        pass
    assert not events.waits
    assert timers.stop("verify") == 3.0 and len(events.waits) == 1
    assert timers.names == ["draft", "verify"] and timers.elapsed_ms("draft") == 2.0
    with timers.phase("draft"):
        pass
    assert timers.summary() == {"draft": 3.0, "verify": 3.0}
    assert repr(timers) == "CUDATimerCollection:\n  draft  :    3.000 ms\n  verify :    3.000 ms"
    timers.reset()
    assert timers.names == [] and timers.summary() == {}


def test_old_intervals_are_not_kept(events, monkeypatch):
    monkeypatch.setattr(measure, "_MOST_UNREAD", 2)
    timers = CUDATimerCollection("cuda")
    for _ in range(5):
        with timers.phase("verify"):
            pass
    assert len(timers._unread["verify"]) == 2 and len(events.waits) == 3
    assert timers.elapsed_ms("verify") == 5.0


def test_a_collection_on_the_wall():
    timers = CUDATimerCollection(CPU)
    assert repr(timers) == "CUDATimerCollection:\n  nothing timed"
    timers.start("sample")
    time.sleep(0.002)
    elapsed_ms = timers.stop("sample")
    assert 2 <= elapsed_ms < 1000 and timers.elapsed_ms("sample") == elapsed_ms
    with pytest.raises(ValueError), timers.phase("sample"):
        raise ValueError
    assert timers.elapsed_ms("sample") > elapsed_ms


def test_a_phase_may_be_forgotten_while_it_runs():
    timers = CUDATimerCollection(CPU)
    with pytest.raises(ValueError, match="^mine$"), timers.phase("draft"):
        timers.reset()
        raise ValueError("mine")
    assert timers.names == []
    with timers.phase("draft"):
        timers.reset()
        timers.start("draft")
    assert timers.names == [] and timers.stop("draft") >= 0  # the end of the phase was not that of the other one
    with pytest.raises(RuntimeError, match="'draft' is not running; start it first$"), timers.phase("draft"):
        timers.stop("draft")


def test_the_time_of_the_host_is_after_the_device_s(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    before = time.perf_counter()
    assert before <= cuda_sync_time(CPU) <= time.perf_counter() and not waited
    cuda_sync_time("cuda:1")
    assert waited == [torch.device("cuda:1")]


def test_percentiles_are_numpys():
    numpy = pytest.importorskip("numpy")
    samples = [0.08, 0.09, 0.08, 0.10, 0.09]
    for percent in (0, 50, 95, 99, 100):
        assert benchmark.percentile(samples, percent) == pytest.approx(numpy.percentile(samples, percent))
    assert benchmark.percentile([], 50) is None


def test_rounds_end_with_the_target_s_token_or_the_text():
    arrivals = [(1.0, True), (1.5, False), (2.5, False), (4.0, True), (4.0, True)]
    assert benchmark.round_times_s(0.5, arrivals) == [(1.0, 2), (1.0, 1), (1.5, 2)]
    assert benchmark.round_times_s(0.5, []) == []


@pytest.mark.gpu
def test_device_time_is_that_of_the_work():
    """Work of a known number of cycles: twice of it takes twice as long, and the host has gone on meanwhile."""
    timers = CUDATimerCollection()
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    with timers.phase("one"):
        torch.cuda._sleep(50_000_000)
    with timers.phase("two"):
        torch.cuda._sleep(100_000_000)
    host_ms = 1e3 * (time.perf_counter() - start_s)
    one_ms, two_ms = timers.elapsed_ms("one"), timers.elapsed_ms("two")
    assert host_ms < one_ms / 2 and two_ms == pytest.approx(2 * one_ms, rel=0.1)


@pytest.mark.gpu
def test_a_timer_does_not_wait_for_other_streams():
    with CUDATimer() as timer:
        torch.cuda._sleep(1000)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(500_000_000)
    assert timer.elapsed_ms < 50 and not other.query()
    other.synchronize()
