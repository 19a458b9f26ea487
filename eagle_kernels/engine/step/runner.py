"""Runs steps as they are, or captures them as CUDA graphs: one per number of rows, configuration and features."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..batch.state import BatchState
from ..models.protocol import ModelError
from ..requests.sampling_params import Features
from .phases import PhaseTimer
from .stepper import Stepper, StepResult


def buckets(most: int) -> list[int]:
    """Returns the numbers of rows that graphs are captured for."""
    return sorted({bucket_of(num_rows, most) for num_rows in range(1, most + 1)})


def bucket_of(num_rows: int, most: int) -> int:
    """Returns the number of rows of the graph for `num_rows`: the next power of two, or `most`."""
    return min(most, 1 << (num_rows - 1).bit_length())


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    result: StepResult
    timer: PhaseTimer


class StepRunner:
    """The steps of one configuration on one batch.

    use_graphs  capture a step once, after a first run on rows that are nobody's (which compiles the kernels), and
                replay it from then on; False: the same steps run one launch after another
    """

    def __init__(self, stepper: Stepper, state: BatchState, use_graphs: bool):
        self.stepper, self._state, self._use_graphs = stepper, state, use_graphs
        self._graphs: dict[tuple[int, Features], _Captured] = {}
        self._catch_ups: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._have_run: set[tuple[int, Features]] = set()
        self._timer: PhaseTimer | None = None
        if stepper.resting:
            state.make_room(stepper.resting.num_kept, len(stepper.aux_layers) * stepper.target.hidden_size)
        # all graphs share memory, and the stream that they are captured on
        self._memory = torch.cuda.graph_pool_handle() if use_graphs else None
        self._stream = torch.cuda.Stream(stepper.target.device) if use_graphs else None

    def has_run(self, num_rows: int, features: Features) -> bool:
        """Returns whether `run` has nothing left to compile or to capture."""
        key = bucket_of(num_rows, self._state.num_rows), features
        return key in self._graphs or key in self._have_run

    def run(self, num_rows: int, features: Features) -> StepResult:
        """Steps the first `num_rows` rows or more; the result is overwritten by the next run."""
        if not self._use_graphs:
            return self._run_eagerly(num_rows, features)
        captured = self._captured(bucket_of(num_rows, self._state.num_rows), features)
        captured.graph.replay()
        self._timer = captured.timer
        return captured.result

    def catch_up(self, num_rows: int, is_wanted: bool) -> None:
        """Lets the draft read what it missed of the first `num_rows` rows or more; see `Reader.catch_up`."""
        if not self._use_graphs:
            self.stepper.resting.catch_up(self._state, num_rows, is_wanted)
            return
        num_rows = bucket_of(num_rows, self._state.num_rows)
        key = (num_rows, is_wanted)
        if key not in self._catch_ups:
            resting = self.stepper.resting
            self._catch_ups[key], _ = self._record(lambda: resting.catch_up(self._state, *key), "a catch-up")
        self._catch_ups[key].replay()

    def warm_up(self, num_rows: int, features: Features) -> None:
        """Compiles and captures what the first call of `run` would."""
        if features.penalties:
            self._state.sampling.add_penalties()
        if self._use_graphs:
            self._captured(bucket_of(num_rows, self._state.num_rows), features)
        with _nobody(self._state):
            if not self._use_graphs:
                self._run_eagerly(num_rows, features)
            for is_wanted in (True, False) if self.stepper.resting else ():
                self.catch_up(num_rows, is_wanted)

    def phases_ms(self) -> dict[str, float]:
        """Returns the phases of the last step, which the device must have finished."""
        return self._timer.read_ms()

    def _run_eagerly(self, num_rows: int, features: Features) -> StepResult:
        self._timer = self._new_timer()
        result = self.stepper.step(self._state, num_rows, features, self._timer)
        self._have_run.add((bucket_of(num_rows, self._state.num_rows), features))
        return result

    def _new_timer(self, is_captured: bool = False) -> PhaseTimer:
        return PhaseTimer(self.stepper.target.device, is_captured, is_on=self.stepper.config.phase_times)

    def _captured(self, num_rows: int, features: Features) -> _Captured:
        key = (num_rows, features)
        if key not in self._graphs:
            self._graphs[key] = self._capture(num_rows, features)
        return self._graphs[key]

    def _capture(self, num_rows: int, features: Features) -> _Captured:
        timers = [self._new_timer(), self._new_timer(is_captured=True)]
        timer = timers[1]
        graph, result = self._record(
            lambda: self.stepper.step(self._state, num_rows, features, timers.pop(0)), "a step"
        )
        return _Captured(graph, result, timer)

    def _record(
        self, run: Callable[[], StepResult | None], what: str
    ) -> tuple[torch.cuda.CUDAGraph, StepResult | None]:
        """Captures what `run` launches as a graph; what: its name in an error."""
        # compile, and let libraries allocate, while all rows are dead: a step changes those that are not
        with _nobody(self._state):
            run()
        device, graph = self.stepper.target.device, torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        # on this device, whichever is current; other threads may go on meanwhile
        capture = {"pool": self._memory, "stream": self._stream, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.device(device), torch.cuda.graph(graph, **capture):
                result = run()
        except torch.OutOfMemoryError:  # says by itself what would help
            raise
        except Exception as error:
            raise ModelError(
                f"EAGLEInference: {what} cannot be captured as a CUDA graph, as when a model waits for the device "
                f"({error}); cuda_graph=False runs it one launch after another"
            ) from error
        return graph, result


class _nobody:
    """A context in which all rows are dead; afterwards they are what they were."""

    def __init__(self, state: BatchState):
        self._state = state

    def __enter__(self) -> None:
        self._kept: list[tuple[Tensor, Tensor]] = [(tensor, tensor.clone()) for tensor in self._state.tensors()]
        state = self._state
        for tensor in (state.is_live, state.lengths, state.num_behind):
            tensor.zero_()
        state.block_table.fill_(-1)

    def __exit__(self, *_) -> None:
        for tensor, kept in self._kept:
            tensor.copy_(kept)
