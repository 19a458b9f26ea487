"""Runs steps: as they are, or as CUDA graphs, one for each number of rows, configuration and set of features."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .batch_state import BatchState
from .sampling import Features
from .step import Stepper, StepResult
from .timing import PhaseTimer


def buckets(most: int) -> list[int]:
    """The numbers of rows that graphs are captured for."""
    return sorted({bucket_of(num_rows, most) for num_rows in range(1, most + 1)})


def bucket_of(num_rows: int, most: int) -> int:
    """The number of rows that a graph is captured for: the next power of two, or `most`."""
    return min(most, 1 << (num_rows - 1).bit_length())


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    result: StepResult
    timer: PhaseTimer


class StepRunner:
    """One configuration's steps on one batch.

    use_graphs: capture a step once, after a first run on rows that are nobody's (which compiles the kernels), and
    replay it from then on. Else the same steps run one launch after another.
    """

    def __init__(self, stepper: Stepper, state: BatchState, use_graphs: bool):
        self.stepper, self._state, self._use_graphs = stepper, state, use_graphs
        self._graphs: dict[tuple[int, Features], _Captured] = {}
        self._timer: PhaseTimer | None = None
        self._memory = torch.cuda.graph_pool_handle() if use_graphs else None

    def run(self, num_rows: int, features: Features) -> StepResult:
        """Steps the first `num_rows` rows or more; the result is overwritten by the next run."""
        if not self._use_graphs:
            self._timer = PhaseTimer(self.stepper.target.device)
            return self.stepper.step(self._state, num_rows, features, self._timer)
        captured = self._captured(bucket_of(num_rows, self._state.num_rows), features)
        captured.graph.replay()
        self._timer = captured.timer
        return captured.result

    def warm_up(self, num_rows: int, features: Features) -> None:
        """What `run` would compile and capture on its first call."""
        if features.penalties:
            self._state.sampling.add_penalties()
        if self._use_graphs:
            self._captured(bucket_of(num_rows, self._state.num_rows), features)
        else:
            with _nobody(self._state):
                self.stepper.step(self._state, num_rows, features, PhaseTimer(self.stepper.target.device))

    def phases_ms(self) -> dict[str, float]:
        """Of the last step, which the device must have finished."""
        return self._timer.read_ms()

    def _captured(self, num_rows: int, features: Features) -> _Captured:
        key = (num_rows, features)
        if key not in self._graphs:
            self._graphs[key] = self._capture(num_rows, features)
        return self._graphs[key]

    def _capture(self, num_rows: int, features: Features) -> _Captured:
        device = self.stepper.target.device
        # compile, and let libraries allocate, on rows that are nobody's: a step changes those that are somebody's
        with _nobody(self._state):
            self.stepper.step(self._state, num_rows, features, PhaseTimer(device))
        timer = PhaseTimer(device, is_captured=True)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, pool=self._memory):
            result = self.stepper.step(self._state, num_rows, features, timer)
        return _Captured(graph, result, timer)


class _nobody:
    """Inside, all rows are dead; afterwards they are what they were."""

    def __init__(self, state: BatchState):
        self._state = state

    def __enter__(self) -> None:
        self._kept: list[tuple[Tensor, Tensor]] = [(tensor, tensor.clone()) for tensor in self._state.tensors()]
        for row_tensor, value in ((self._state.is_live, 0), (self._state.lengths, 0), (self._state.block_table, -1)):
            row_tensor.fill_(value)

    def __exit__(self, *_) -> None:
        for tensor, kept in self._kept:
            tensor.copy_(kept)
