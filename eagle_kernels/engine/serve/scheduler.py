"""Requests and the rows that they step in: which wait, which run, and what the host learns one step late.

A step has three parts. `prepare` gives free rows to waiting requests and reads their prompts, a part at a time;
`_launch` queues one step of all rows, and a copy of its tokens to pinned memory; `_read_back` looks at the tokens of
the step before, while the device works on this one. So the device never waits for the host. The price: a request that
ends is stepped once more, and the tokens of that step are dropped.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch.kv_pool import PageAllocator, PrefillAttend
from ..batch.state import CATCH_UP_EVERY, BatchState
from ..drafters.protocol import PromptPart
from ..models.protocol import TargetModel
from ..requests.request import Request
from ..requests.sampling_params import Features
from ..step.phases import mark
from ..step.plan import StepPlan
from ..step.runner import StepRunner
from ..step.stepper import StepResult
from .launch import Launch
from .threads import saving_threads

# every so many steps the host waits for one, to read the times of its phases
TIMED_STEPS = 32


@dataclass(eq=False)
class _Row:
    """A request's place in the batch. Its prompt is read up to `num_read`; it runs once the whole prompt is read."""

    request: Request
    pages: list[int]
    index: int
    # [1, max_pages]; in the batch only once the prompt is read: rows that do not run must write no key
    block_table: Tensor | None = None
    num_read: int = 0
    is_running: bool = False
    # launches that the host has not read yet; each brings at least one token
    num_pending: int = 0


class Scheduler:
    """The rows, pages and requests of one batch. `plan` may change while no request runs."""

    def __init__(self, state: BatchState, prefill_chunk: int):
        self.state, self._prefill_chunk = state, prefill_chunk
        self.pages = PageAllocator(state.target_pool.k_cache.shape[1])
        self.plan: StepPlan | None = None
        self.last_runner: StepRunner | None = None
        # plain steps since the draft has read what it missed
        self._num_missed = 0
        # steps until the next one is waited for, to read the times of its phases
        self._until_timed = 0
        self.num_steps = 0
        # steps that compiled or captured something
        self.num_cold_steps = 0
        self._phases_ms: deque[dict[str, float]] = deque(maxlen=256)
        self._waiting: deque[Request] = deque()
        self._rows: list[_Row | None] = [None] * state.num_rows
        self._unread: deque[Launch] = deque()
        self.lag = host_lag(state.lengths.device)

    @property
    def target(self) -> TargetModel:
        return self.plan.plain.target

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._unread or any(self._rows))

    @property
    def is_reading(self) -> bool:
        """Whether `prepare` has a prompt to read now; requests that wait for a row or for pages do not count."""
        return any(row is not None and not row.is_running for row in self._rows) or self._can_admit()

    def runs_beside(self, requests: list[Request]) -> bool:
        """Returns whether other requests than these run, which should step between the parts of a prompt."""
        return any(row is not None and row.is_running and row.request not in requests for row in self._rows)

    def use(self, plan: StepPlan) -> None:
        """Takes the steps of `plan` from now on; raises RuntimeError while requests run by another one."""
        if plan is self.plan:
            return
        if self.has_work:
            raise RuntimeError(
                "EAGLEInference: requests that run were submitted with another configuration; collect or abort them "
                "before this one is used"
            )
        self.plan, self._num_missed = plan, 0

    def _pages_for(self, request: Request) -> int:
        """Returns the pages that a request takes, with what its steps write after its last token."""
        num_tokens = len(request.prompt) + request.params.max_new_tokens + self.plan.overshoot
        return -(-num_tokens // self.state.target_pool.page_size)

    def most_tokens(self) -> int:
        """Returns the most tokens of a request that has the pool for itself, its prompt included."""
        return self.pages.num_pages * self.state.target_pool.page_size - self.plan.overshoot

    def _can_admit(self) -> bool:
        if not self._waiting or None not in self._rows:
            return False
        return self._pages_for(self._waiting[0]) <= self.pages.num_free

    def submit(self, request: Request) -> None:
        """Queues a request for a row and pages, unless it was aborted before its stream began."""
        if not request.is_finished:
            self._waiting.append(request)

    def why_never(self, request: Request) -> str | None:
        """Returns why a request would wait for ever; None if it would not."""
        needed, page_size = self._pages_for(request), self.state.target_pool.page_size
        if needed <= min(self.pages.num_pages, self.state.block_table.shape[1]):
            return None
        return (
            f"{len(request.prompt)} tokens + max_new_tokens={request.params.max_new_tokens} need {needed} pages of "
            f"{page_size} tokens, the pool has {self.pages.num_pages}; kv_cache_bytes makes it larger"
        )

    def holds(self, requests: list[Request]) -> bool:
        """Returns whether an empty batch has rows and pages for all of them at once."""
        return len(requests) <= len(self._rows) and sum(map(self._pages_for, requests)) <= self.pages.num_pages

    def abort(self, request: Request) -> None:
        """Ends a request wherever it is; its tokens so far stay."""
        if request.is_finished:
            return
        request.finish_reason = "abort"
        if request in self._waiting:
            self._waiting.remove(request)
        for row in self._rows:
            if row is not None and row.request is request:
                self._release(row)

    def step(self, is_speculating: bool = True) -> None:
        """Advances all requests by one step, without drafts if `is_speculating` is off, and hands out their tokens."""
        self.prepare()
        self.advance(is_speculating)

    @saving_threads
    @torch.inference_mode()
    def advance(self, is_speculating: bool = True) -> None:
        """Does the rest of a step after `prepare`."""
        has_launched = self._launch(is_speculating)
        # times must be read before the next step overwrites them, so this step is waited for, and the device with it
        is_timed = has_launched and self.plan.plain.config.phase_times and (self.lag == 0 or self._until_timed == 0)
        self._until_timed = TIMED_STEPS if is_timed else self._until_timed - has_launched
        lag = self.lag if has_launched and not is_timed else 0
        while len(self._unread) > lag:
            self._read_back()
        if self.plan.feed is not None:  # while the device runs this step
            self.plan.feed.think(row.request for row in self._rows if row is not None and row.is_running)
        if is_timed:
            self._phases_ms.append(self.last_runner.phases_ms())

    @saving_threads
    @torch.inference_mode()
    def prepare(self) -> None:
        """Admits waiting requests, first come, first served; reads at most `prefill_chunk` tokens of all prompts."""
        while self._can_admit():
            request = self._waiting.popleft()
            pages = self.pages.allocate(self._pages_for(request))
            index = self._rows.index(None)
            row = self._rows[index] = _Row(request, pages, index)
            with self._failing_alone(row):
                table = torch.full((1, self.state.block_table.shape[1]), -1, dtype=torch.int32)
                table[0, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
                row.block_table = table.to(self.state.block_table.device)
                self.state.sampling.set_row(index, request.params, request.seed, request.prompt)
                method = request.params.drafter
                self.state.methods[index] = 0 if method is None else self.plan.methods.index(method)
                if self.plan.feed is not None:
                    self.plan.feed.start(request)
        if self._waiting and not any(self._rows):
            self._fail_who_would_wait_for_ever()
        budget = self._prefill_chunk
        for row in list(self._rows):
            if row is not None and not row.is_running and budget > 0:
                with self._failing_alone(row):
                    budget -= self._read_prompt(row, budget)
        self._compact()

    def _fail_who_would_wait_for_ever(self) -> None:
        """Ends a request that an empty batch cannot hold: `submit` takes none of these, so pages have been lost."""
        request = self._waiting.popleft()
        needed, num_free, num_pages = self._pages_for(request), self.pages.num_free, self.pages.num_pages
        request.fail(
            RuntimeError(
                f"EAGLEInference: a request needs {needed} pages, and of {num_pages} only {num_free} are free while "
                "no other runs: pages have been lost, which is a bug in eagle_kernels"
            )
        )

    def _read_prompt(self, row: _Row, most: int) -> int:
        """Reads the next part of a prompt in both models; after the last part draws the row's first token."""
        prompt, start, stepper = row.request.prompt, row.num_read, self.plan.plain
        stop = min(len(prompt), start + most)
        is_last = stop == len(prompt)
        # with the token after this part, which a draft reads beside the part's last feature
        tokens = torch.tensor(prompt[start : stop + 1], device=self.state.roots.device)
        output = stepper.target.forward(
            tokens[None, : stop - start],
            torch.arange(start, stop, device=tokens.device)[None],
            PrefillAttend(self.state.target_pool, row.block_table, start, stop - start),
            capture=stepper.aux_layers,
            last_only=True,
        )
        if is_last:
            features = Features.of([row.request.params])
            first = stepper.draw_first(output.logits[:, -1], self.state, row.index, len(prompt), features)
            tokens = torch.cat([tokens, self.state.roots[row.index, None]])
        if stepper.keeps_history:
            self.state.history[row.index, start : stop + 1] = tokens
        if stepper.resting is not None:
            part = PromptPart(row.index, row.block_table, tokens, output.features, start, is_last)
            stepper.resting.read_prompt(self.state, part)
        if is_last:
            self.state.block_table[row.index] = row.block_table[0]
            self.state.lengths[row.index] = len(prompt)
            self.state.is_live[row.index] = 1
            self._push(first, [(0, row)])
            row.is_running = True
        row.num_read = stop
        return stop - start

    def _compact(self) -> None:
        """Moves the last rows to free ones before them, where that makes the batch smaller."""
        while True:
            used = [row for row in self._rows if row is not None]
            if not used or used[-1].index < len(used):
                return
            row, to = used[-1], self._rows.index(None)
            self.state.move(row.index, to)
            self._rows[row.index], self._rows[to], row.index = None, row, to

    def _launch(self, is_speculating: bool) -> bool:
        """Queues a step of all rows that run, unless none needs one; returns whether it did."""
        running = [row for row in self._rows if row is not None and row.is_running and self._needs_step(row)]
        if not running:
            return False
        num_launched = self.num_steps
        with self._failing_alone(*running):
            self._launch_rows(running, is_speculating)
        return self.num_steps > num_launched

    def _launch_rows(self, running: list[_Row], is_speculating: bool) -> None:
        num_rows = 1 + max(row.index for row in running)
        number = self.plan.choice.choose(num_rows) if is_speculating else 0
        runner = self.last_runner = self.plan.runners[number]
        is_wanted = runner.stepper.drafter.reader is not None
        if self._num_missed and (is_wanted or self._num_missed == CATCH_UP_EVERY):
            self.plan.runners[0].catch_up(num_rows, is_wanted)
            self._num_missed = 0
        features = Features.of([row.request.params for row in running])
        if self.plan.feed is not None:
            self.plan.feed.send([(row.index, row.request) for row in running])
        is_known = runner.has_run(num_rows, features)  # else it compiles, which is no step's time
        start = mark(self.state.lengths.device) if self.state.lengths.device.type == "cuda" else None
        start_s = time.perf_counter()
        result = runner.run(num_rows, features)
        end_s = time.perf_counter()
        launch = self._push(result, [(row.index, row) for row in running], number)
        self._num_missed += runner.stepper.resting is not None
        self.num_steps += 1
        self.num_cold_steps += not is_known
        if is_known:
            launch.timed_from(start, start_s, end_s)

    def drain(self) -> None:
        """Reads what is left of steps whose requests have ended."""
        while self._unread and not any(row is not None and row.is_running for row in self._rows):
            self._read_back()

    def read_what_is_done(self) -> None:
        """Reads what the device has finished, without waiting for more."""
        while self._unread and self._unread[0].is_done:
            self._read_back()

    @contextlib.contextmanager
    def _failing_alone(self, *rows: _Row) -> Iterator[None]:
        """Ends these requests, and no other, if anything fails inside, such as an allocation.

        A step that broke off may have changed any of its rows.
        """
        try:
            yield
        except Exception as error:
            for row in rows:
                row.request.fail(error if row is rows[0] else _twin(error))
                self._release(row)

    def start_timing(self) -> None:
        """Forgets the phases of steps so far; the next step is timed."""
        self._phases_ms.clear()
        self._until_timed = 0

    def take_phase_times_ms(self, num_steps: int) -> dict[str, float]:
        """Returns the device time of each phase over `num_steps` steps, by those timed since the last call."""
        timed = list(self._phases_ms)
        self._phases_ms.clear()
        names = timed[0] if timed else ()
        return {name: sum(phases[name] for phases in timed) / len(timed) * num_steps for name in names}

    def _needs_step(self, row: _Row) -> bool:
        """Returns False if pending launches already cover the request's limit."""
        return len(row.request.output_ids) + row.num_pending < row.request.params.max_new_tokens

    def _push(self, result: StepResult, rows: list[tuple[int, _Row]], number: int | None = None) -> Launch:
        """Queues the copy of a result to the host; number: of its runner, None for the first token of a prompt."""
        for _, row in rows:
            row.num_pending += 1
        self._unread.append(Launch(result, rows, number))
        return self._unread[-1]

    def _read_back(self) -> None:
        """Hands out the tokens of the oldest launch and frees the rows of requests that have ended."""
        launch = self._unread[0]
        brought = launch.read()
        self._unread.popleft()
        if launch.number is not None:
            num_tokens = sum(len(tokens) for _, tokens, *_ in brought)
            most_rows = 1 + max(index for index, _ in launch.rows)
            self.plan.choice.note(launch.number, most_rows, launch.step_ms, num_tokens / len(brought))
        for row, tokens, logprobs, raw_logprobs in brought:
            row.num_pending -= 1
            request = row.request
            if not request.is_finished:
                kind = raw_logprobs if request.params.logprobs == "raw" else logprobs
                self._hand_out(launch.number, row, tokens, kind)
            # a request that another engine aborted, which knows nothing of the row, is found to have ended only here
            if request.is_finished and row in self._rows:
                self._release(row)

    def _hand_out(self, number: int | None, row: _Row, brought: list[int], logprobs: list[float] | None) -> None:
        """Gives a running request the tokens of a launch of this number."""
        request, accepted = row.request, len(brought) - 1
        if number is not None:
            request.accepted.append(accepted)
            stepper = self.plan.runners[number].stepper
            request.levels += min(stepper.num_steps, stepper.num_nodes - 1)
            request.drafted += stepper.num_nodes - 1
        with self._failing_alone(row):
            num_known = len(request.output_ids)
            request.push(brought, accepted, logprobs)
            if self.plan.feed is not None:
                self.plan.feed.extend(request, request.output_ids[num_known:])

    def _release(self, row: _Row) -> None:
        self.pages.free(row.pages)
        self._rows[row.index] = None
        if self.plan.feed is not None:
            self.plan.feed.stop(row.request)
        with torch.inference_mode():
            self.state.clear(row.index)


def _twin(error: Exception) -> Exception:
    """Returns a copy of an error for another request, since a raised error holds the frames that it passes."""
    try:
        twin = copy.copy(error)
    except Exception:  # its class takes other arguments than it keeps
        twin = RuntimeError(f"{type(error).__name__}: {error}")
    twin.__cause__ = error.__cause__  # where, in words
    return twin


def host_lag(device: torch.device) -> int:
    """Returns how many steps the host is behind; on the CPU a step is done when it is launched."""
    return 1 if device.type == "cuda" else 0
