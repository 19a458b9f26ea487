"""Runs steps launch by launch, or as CUDA graphs: one graph per number of rows, configuration and set of features, and
another one for each number of prompt tokens that a step reads."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch.state import BatchState
from ..batch.transfer import to_host
from ..models.protocol import ModelError
from ..requests.sampling_params import Features
from .packed_rows import PromptRows
from .phases import Mark, PhaseTimer, elapsed_ms, mark, synchronize
from .stepper import Stepped, Stepper, StepResult


def buckets(most: int) -> list[int]:
    """Returns the numbers of rows that graphs are captured for."""
    return sorted({bucket_of(num_rows, most) for num_rows in range(1, most + 1)})


def bucket_of(num_rows: int, most: int) -> int:
    """Returns the number of rows of the graph for `num_rows`: the next power of two, but at most `most`."""
    return min(most, 1 << (num_rows - 1).bit_length())


class StepKind(NamedTuple):
    """Says what a graph is captured for; prompt_tokens: rows of prompts, 0 without any."""

    num_rows: int
    features: Features
    prompt_tokens: int


class StepGraph(NamedTuple):
    """Holds a captured step, and what a replay overwrites."""

    graph: torch.cuda.CUDAGraph
    result: Stepped
    timer: PhaseTimer


class StepRunner:
    """Runs the steps of one configuration on one batch.

    use_graphs  True: a step is captured once, after a first run in which all rows are dead (and which compiles the
                kernels), and replayed from then on. False: the same steps run launch by launch
    """

    def __init__(self, stepper: Stepper, state: BatchState, use_graphs: bool):
        self.stepper, self._state, self.uses_graphs = stepper, state, use_graphs
        self._graphs: dict[StepKind, StepGraph] = {}
        self._catch_ups: dict[tuple[int, bool, int], torch.cuda.CUDAGraph] = {}
        self._have_run: set[StepKind] = set()
        self._timer: PhaseTimer | None = None
        for each in stepper.resting:
            each.make_room(state)
        self._renew_memory()

    def _renew_memory(self) -> None:
        """Makes the memory that graphs captured from now on share, and the stream that they are captured on."""
        self._memory = torch.cuda.graph_pool_handle() if self.uses_graphs else None
        self._stream = torch.cuda.Stream(self.stepper.target.device) if self.uses_graphs else None

    def _kind(self, num_rows: int, features: Features, prompts: PromptRows | None) -> StepKind:
        # without graphs any number of them is as good as another
        prompt_tokens = 0 if prompts is None else prompts.num_tokens if self.uses_graphs else 1
        return StepKind(bucket_of(num_rows, self._state.num_rows), features, prompt_tokens)

    def has_run(self, num_rows: int, features: Features, prompts: PromptRows | None = None) -> bool:
        """Returns whether `run` has nothing left to compile or to capture."""
        kind = self._kind(num_rows, features, prompts)
        return kind in self._graphs or kind in self._have_run

    def run(self, num_rows: int, features: Features, prompts: PromptRows | None = None) -> Stepped:
        """Steps at least the first `num_rows` rows, and reads prompts; the next run overwrites the results."""
        kind = self._kind(num_rows, features, prompts)
        if not self.uses_graphs:
            result = self._step(kind._replace(num_rows=num_rows), prompts)
            self._have_run.add(kind)
            return result
        graph, result, self._timer = self._captured(kind, prompts)
        graph.replay()
        return result

    def catch_up(self, num_rows: int, is_wanted: bool, place: int = 0) -> None:
        """Lets the draft at a place among those that rest read what it missed of at least the first `num_rows` rows;
        see `Reader.catch_up`."""
        resting = self.stepper.resting[place]
        if not self.uses_graphs:
            resting.catch_up(self._state, num_rows, is_wanted)
            return
        key = (bucket_of(num_rows, self._state.num_rows), is_wanted, place)
        if key not in self._catch_ups:
            self._catch_ups[key], _ = self._record(
                lambda _: resting.catch_up(self._state, *key[:2]), None, "a catch-up"
            )
        self._catch_ups[key].replay()

    def warm_up(
        self, num_rows: int, features: Features, prompts: PromptRows | None = None, places: Iterable[int] = ()
    ) -> float | None:
        """Compiles and captures whatever the first call of `run`, or of `catch_up` at these places, would. Returns the
        milliseconds of a step without any request, which one with requests takes at least; None without graphs, where
        the host takes most of them."""
        self._state.sampling.make_room(features)
        if self.uses_graphs:
            self._captured(self._kind(num_rows, features, prompts), prompts)
        with _all_dead(self._state, prompts):
            if not self.uses_graphs:
                self.run(num_rows, features, prompts)
            for place, is_wanted in product(places, (True, False)):
                self.catch_up(num_rows, is_wanted, place)
            return min(self._replay_ms(num_rows, features, prompts) for _ in range(3)) if self.uses_graphs else None

    def free(self, drafts: Collection[int]) -> None:
        """Frees the graphs of steps with these drafts and of their catch-ups, once the device is done with them."""
        synchronize(self.stepper.target.device)
        if self.stepper.own is None:
            self._catch_ups = {key: graph for key, graph in self._catch_ups.items() if key[2] not in drafts}
        elif self.stepper.own.number in drafts:
            self._graphs.clear()
            self._have_run.clear()
            self._renew_memory()  # as memory that all graphs have left takes no new ones

    def time_ms(self, num_rows: int, features: Features, lengths: Tensor, block_table: Tensor) -> float:
        """Returns the milliseconds of a step of rows with these lengths and pages, of which nothing is kept."""
        state, row = self._state, torch.arange(len(lengths), device=lengths.device)
        with _restored(state):
            state.is_live.zero_()
            state.lengths.copy_(lengths)
            state.block_table.copy_(block_table)
            state.block_table[row, lengths // state.target_pool.page_size] = -1  # so that no key is written
            self.run(num_rows, features)  # which may compile or capture
            return fmean(self._replay_ms(num_rows, features, None) for _ in range(2))

    def _replay_ms(self, num_rows: int, features: Features, prompts: PromptRows | None) -> float:
        """Waits for a step; returns its time."""
        device = self.stepper.target.device
        start = mark(device)
        self.run(num_rows, features, prompts)
        end = mark(device)
        synchronize(device)
        return elapsed_ms(start, end)

    def phases_ms(self) -> dict[str, float]:
        """Returns the times of the phases of the last step, which the device must have finished."""
        return self._timer.read_ms()

    def _step(self, kind: StepKind, prompts: PromptRows | None, is_captured: bool = False) -> Stepped:
        self._timer = PhaseTimer(self.stepper.target.device, is_captured, is_on=self.stepper.config.phase_times)
        return self.stepper.step(self._state, kind.num_rows, kind.features, self._timer, prompts)

    def _captured(self, kind: StepKind, prompts: PromptRows | None) -> StepGraph:
        if kind not in self._graphs:
            graph, result = self._record(lambda is_captured: self._step(kind, prompts, is_captured), prompts, "a step")
            self._graphs[kind] = StepGraph(graph, result, self._timer)
        return self._graphs[kind]

    def _record(
        self, run: Callable[[bool], Any], prompts: PromptRows | None, what: str
    ) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Captures what `run(True)` launches, after a first `run(False)`; `what` names it in an error."""
        # The first run compiles kernels and lets libraries allocate; live rows would be changed by it.
        with _all_dead(self._state, prompts):
            run(False)
        device, graph = self.stepper.target.device, torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        # on this device, whichever is current; other threads may go on meanwhile
        capture = {"pool": self._memory, "stream": self._stream, "capture_error_mode": "thread_local"}
        try:
            # the stream before is restored even if the end of a broken capture fails
            before = torch.cuda.stream(torch.cuda.current_stream(device))
            with torch.cuda.device(device), before, torch.cuda.graph(graph, **capture):
                result = run(True)
        except Exception as error:
            self._renew_memory()  # a broken capture leaves it in an unknown state
            if isinstance(error, torch.OutOfMemoryError):  # its own message says what would help
                raise
            raise ModelError(
                f"EAGLEInference: {what} cannot be captured as a CUDA graph, which happens when a model waits for the "
                f"device ({error}); cuda_graph=False runs steps without graphs"
            ) from error
        return graph, result


@contextlib.contextmanager
def _all_dead(state: BatchState, prompts: PromptRows | None) -> Iterator[None]:
    """Makes all rows dead inside the block, then restores them."""
    with _restored(state, *(() if prompts is None else (prompts.held,))):
        for tensor in (state.is_live, state.lengths, *(each.num_behind for each in state.drafts)):
            tensor.zero_()
        state.block_table.fill_(-1)
        if prompts is not None:
            prompts.held.zero_()  # no part
        yield


@contextlib.contextmanager
def _restored(state: BatchState, *others: Tensor) -> Iterator[None]:
    """Restores all rows, and other tensors, after the block."""
    kept = [(tensor, tensor.clone()) for tensor in (*state.tensors(), *others)]
    try:
        yield
    finally:
        for tensor, values in kept:
            tensor.copy_(values)


class Launch:
    """Holds the result of a step on its way to the host, which reads it later, on a GPU while the next step runs.

    rows    [(index, row)]: the rows that stepped, each with its index in the result's tensors
    number  the number of the runner that stepped; None: the result is the first token after a prompt
    start   the mark at which the step began; None: it is not timed
    prompt_tokens   rows of prompts that the step had beside its own
    """

    def __init__(
        self, result: StepResult, rows: list[tuple[int, Any]], number: int | None = None, start: Mark | None = None,
        prompt_tokens: int = 0,
    ):  # fmt: skip
        device = result.tokens.device
        self._is_gpu, self._result = device.type == "cuda", [part if part is None else to_host(part) for part in result]
        self.rows, self.number, self.prompt_tokens = rows, number, prompt_tokens
        self._start, self._end = start, mark(device)

    @property
    def is_done(self) -> bool:
        """Returns whether `read` would return without waiting."""
        return not self._is_gpu or self._end.query()

    @property
    def step_ms(self) -> float | None:
        """Returns the time that the step took, once it has been read; None if it is not timed."""
        return None if self._start is None else elapsed_ms(self._start, self._end)

    def read(self) -> list[tuple[Any, StepResult]]:
        """Waits for the step; returns each of `rows` with what it brought, as lists that begin with its tokens'."""
        if self._is_gpu:
            self._end.synchronize()
        tokens, *scores = (None if part is None else part.tolist() for part in self._result)
        brought = [[token for token in tokens[index] if token >= 0] for index, _ in self.rows]
        return [
            (row, StepResult(own, *(part and part[index] for part in scores)))
            for own, (index, row) in zip(brought, self.rows)
        ]
