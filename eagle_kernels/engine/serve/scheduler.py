"""Requests and the rows of the batch that they step in: which wait, which run, and what each step brought them.
`Scheduler.step` is the loop of the engine: admit, read prompts, launch, read back. The host reads the tokens of the
step before while the device works on this one, so the device never waits for the host. The price is that a request that
ends is stepped once more, and the tokens of that step are dropped."""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch

from ..batch.prefix_cache import PrefixCache
from ..batch.state import BatchState
from ..batch.transfer import to_device
from ..requests.request import Request, twin
from ..requests.sampling_params import Features
from ..step.packed_rows import PromptRows
from ..step.phases import PhaseTimes, mark
from ..step.plan import StepPlan
from ..step.runner import Launch, StepRunner
from ..step.stepper import Stepper, StepResult
from .prompts import ReadPart, Row, hand_scores, take_parts, take_rows
from .reading import Reading
from .threads import running


class Scheduler:
    """Schedules the rows, pages and requests of one batch. `plan` may change while no request runs.

    num_steps       steps so far
    num_cold_steps  steps that compiled or captured something
    last_runner     the runner of the last step
    phase_times     of the steps since a stream began
    reading         of the prompts
    lag             how many steps the host is behind the device
    """

    def __init__(self, state: BatchState):
        self.state = state
        self.pages = PrefixCache(state.target_pool.k_cache.shape[1], state.target_pool.page_size)
        self.plan: StepPlan | None = None
        self.max_step_ms: float | None = None
        self.reading: Reading | None = None
        self._prompt_rows: dict[int, PromptRows] = {}
        self.last_runner: StepRunner | None = None
        self.phase_times = PhaseTimes()
        self.num_steps, self.num_cold_steps = 0, 0
        # of each draft model: the most tokens of a row since it last caught up
        self._num_missed: list[int] = []
        self._waiting: deque[Request] = deque()
        self._rows: list[Row | None] = [None] * state.num_rows
        self._num_admitted = 0
        self._unread: deque[Launch] = deque()
        self.lag = host_lag(state.lengths.device)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._unread or any(self._rows))

    @property
    def _running(self) -> list[Row]:
        return [row for row in self._rows if row is not None and row.is_running]

    @property
    def stepping(self) -> list[Row]:
        """The rows that a step is for."""
        return [row for row in self._running if row.needs_step]

    @property
    def is_reading(self) -> bool:
        """Returns whether a step has a prompt to read now; requests that wait for a row or for pages do not count."""
        return any(row is not None and not row.is_running for row in self._rows) or self._can_admit()

    def runs_beside(self, requests: Sequence[Request]) -> bool:
        """Returns whether requests other than these run, which should step between the parts of a prompt."""
        return any(row.request not in requests for row in self._running)

    def use(self, plan: StepPlan, max_step_ms: float | None = None) -> None:
        """Switches to the steps of `plan` and to a limit of their time, while there is no work."""
        self.plan, self.max_step_ms, self.last_runner = plan, max_step_ms, None
        self._num_missed = [0] * len(plan.plain.resting)
        self.reading = Reading(plan, self.state, max_step_ms, self._prompt_rows)

    def _pages_for(self, request: Request) -> int:
        """Returns the pages that a request needs, including those that its steps write past its last token."""
        num_tokens = len(request.prompt) + request.params.max_new_tokens + self.plan.overshoot
        return -(-num_tokens // self.state.target_pool.page_size)

    def most_tokens(self) -> int:
        """Returns the most tokens, prompt included, of a request that has the pool to itself."""
        return self.pages.num_pages * self.state.target_pool.page_size - self.plan.overshoot

    def _can_admit(self) -> bool:
        if not self._waiting or None not in self._rows:
            return False
        return self.pages.has_room(self.reading.prefix(self._waiting[0]), self._pages_for(self._waiting[0]))

    def submit(self, request: Request) -> None:
        """Queues a request for a row and pages, unless it was aborted before its stream began."""
        if not request.is_finished:
            self._waiting.append(request)

    def why_never(self, request: Request) -> str | None:
        """Returns why a request could never run; None if it can."""
        needed, page_size = self._pages_for(request), self.state.target_pool.page_size
        if needed <= self.pages.num_pages:
            return None
        return (
            f"{len(request.prompt)} tokens + max_new_tokens={request.params.max_new_tokens} need {needed} pages of "
            f"{page_size} tokens, but the pool has {self.pages.num_pages}; kv_cache_bytes makes it larger"
        )

    def holds(self, requests: list[Request]) -> bool:
        """Returns whether an empty batch has rows and pages for all of the requests at once."""
        return len(requests) <= len(self._rows) and sum(map(self._pages_for, requests)) <= self.pages.num_pages

    def drop(self, requests: Iterable[Request]) -> None:
        """Ends requests that have not ended, and frees their places in the line, their rows and their pages."""
        for request in requests:
            request.end("abort")
            if request in self._waiting:
                self._waiting.remove(request)
        for row in [row for row in self._rows if row is not None and row.request in requests]:
            self._release(row)

    def step(self, is_speculating: bool = True, reads_for: Sequence[Request] | None = None) -> None:
        """Advances all requests by one step, without drafts if `is_speculating` is off, and hands out their tokens.
        reads_for: requests of a stream that waits for their prompts. Others step beside; without any, none does."""
        with running(self.plan.plain.target):
            is_beside = bool(self.stepping) if reads_for is None else self.runs_beside(reads_for)
            while self._can_admit():
                self._admit(self._waiting.popleft())
            if self._waiting and not any(self._rows):
                self._fail_first_waiting()

            # parts of prompts are read by this step, in the same pass of the target, or by themselves before it
            parts, of_step = self._next_parts(is_beside)
            if parts:
                self._read_prompts(parts, is_beside)
            self._compact()
            if reads_for is not None and not (is_beside and self.is_reading):
                return

            rows, num_launched = self.stepping, self.num_steps
            if rows:
                with self._failing_alone(*rows):
                    self._launch_rows(rows, is_speculating, of_step)
            elif of_step:
                self._read_prompts(of_step, False)

            # the device works on this step, and the host reads those before it; first tokens are read at once
            has_launched = self.num_steps > num_launched
            is_timed = has_launched and self.plan.plain.config.phase_times and self.phase_times.is_due(self.lag)
            lag = self.lag if has_launched and not is_timed else 0
            while self._unread and (self._unread[0].number is None or self._num_unread_steps > lag):
                self._read_back()
            if self.plan.feed is not None:
                self.plan.feed.think(row.request for row in self._running)
            if is_timed:
                self.phase_times.held_ms.append(self.last_runner.phases_ms())

    def _next_parts(self, is_beside: bool) -> tuple[list[tuple[Row, int]], list[tuple[Row, int]]]:
        """Returns parts of prompts that are read next by themselves, and parts that the step reads; one is empty.
        is_beside: whether others wait for their next step meanwhile."""
        unread = [row for row in self._rows if row is not None and not row.is_running and self._may_read(row)]
        num_rows = len(self._running) * (self.last_runner or self.plan.runners[-1]).stepper.mean_nodes
        is_in_step = is_beside and self.reading.is_in_step(unread, num_rows)
        parts = self.reading.next_parts(unread, is_beside, is_in_step)
        return ([], parts) if is_in_step else (parts, [])

    def _may_read(self, row: Row) -> bool:
        """Returns whether a prompt is to be read on: not while another row reads what is next for both."""
        start = self.pages.start(row.pages)
        if start is not None and row.num_read == row.num_shared:  # it has read nothing itself
            row.num_read = row.num_shared = row.request.shared_tokens = start
        return start is not None

    def _admit(self, request: Request) -> None:
        """Gives a request a row and pages."""
        pages = self.pages.take(self.reading.prefix(request), self._pages_for(request))
        index = self._rows.index(None)
        row = self._rows[index] = Row(request, pages, index, self._num_admitted)
        row.drafts.update(each.number for each in self.plan.readers)
        self._num_admitted += 1
        with self._failing_alone(row):
            device, padding = self.state.lengths.device, [-1] * (self.state.block_table.shape[1] - len(pages.ids))
            row.block_table = to_device([pages.ids + padding], device, torch.int32)
            self.state.sampling.set_row(index, request.params, request.seed, request.prompt, request.end_token_ids)
            if self.plan.plain.keeps_history:
                self.state.history[index, : len(request.prompt)] = to_device(request.prompt, device)
            method = request.params.drafter
            self.state.methods[index] = 0 if method is None else self.plan.methods.index(method)
            if self.plan.feed is not None:
                self.plan.feed.start(request)

    def _fail_first_waiting(self) -> None:
        """Ends a request that an empty batch cannot hold; it passed `why_never`, so pages must have been lost."""
        request = self._waiting.popleft()
        needed, num_free, num_pages = self._pages_for(request), self.pages.num_free, self.pages.num_pages
        state = f"a request needs {needed} pages, and of {num_pages} only {num_free} are free"
        cause = "although no other request runs: pages have been lost, which is a bug in eagle_kernels"
        request.fail(RuntimeError(f"EAGLEInference: {state} {cause}"))

    def _read_prompts(self, parts: list[tuple[Row, int]], is_timed: bool) -> None:
        """Reads these parts of prompts by themselves, all at once where that is possible."""
        start = self.reading.pace.begin() if is_timed else None
        read = None if len(parts) == 1 else self.reading.read(parts)
        num_read = [self._read_alone(part) for part in parts] if read is None else self._take_parts(read)
        if read is None and len(parts) > 1:
            self.reading.note_failure(num_read, "target")
        self.reading.pace.end(start, sum(num_read))

    def _read_alone(self, part: tuple[Row, int]) -> int:
        """Reads one part; returns its size, or 0 if that failed."""
        with self._failing_alone(part[0]):
            return self._take_parts(self.reading.read([part]))[0]
        return 0

    def _take_parts(self, parts: list[ReadPart]) -> list[int]:
        """Lets the rest of the engine know what the target made of parts; returns their sizes, 0 where that failed."""
        if len(parts) == 1:
            with self._failing_alone(parts[0].row):
                return self._begin(parts)
            return [0]
        if self.reading.takes_several:
            try:
                return self._begin(parts)
            except Exception as error:  # one of them may be to blame
                self.reading.warn(parts, "by the draft at once", error)
        num_read = [self._take_parts([part])[0] for part in parts]
        self.reading.note_failure(num_read, "draft")
        return num_read

    def _begin(self, parts: list[ReadPart]) -> list[int]:
        """Notes that parts are read, after the last of which a row runs; returns their sizes."""
        launch = take_parts(self.plan.plain, self.state, parts)
        if launch is not None:
            self._push(launch)
            for _, row in launch.rows:
                row.is_running = True
        for part in parts:
            part.row.num_read += part.size
            self.pages.note_read(part.row.pages, part.row.num_read)
        return [part.size for part in parts]

    def _compact(self) -> None:
        """Moves the last rows to free places before them, if that makes the batch smaller."""
        while True:
            used = [row for row in self._rows if row is not None]
            if not used or used[-1].index < len(used):
                return
            row, to = used[-1], self._rows.index(None)
            self.state.move(row.index, to)
            self._rows[row.index], self._rows[to], row.index = None, row, to

    def _launch_rows(self, rows: list[Row], is_speculating: bool, parts: list[tuple[Row, int]]) -> None:
        """Queues a step of these rows, which reads these parts of prompts as well.
        If it fails, another one is queued: with another tree where memory does not suffice for this one, else without
        the prompts, which may be to blame."""
        num_rows, reading, failed = 1 + max(row.index for row in rows), self.reading, []
        features = Features.of([row.request.params for row in rows])
        if self.plan.feed is not None:
            self.plan.feed.send([(row.index, row.request) for row in rows])
        if self.plan.roster.is_due():
            self._review_drafts()
        while True:
            prompt_tokens = reading.joint_size(parts)
            number = self.plan.choice_beside(prompt_tokens).choose(num_rows) if is_speculating else 0
            runner = self.last_runner = self.plan.runners[number]
            self._catch_up(num_rows, runner.stepper)
            try:
                prompts = reading.rows_for(parts)
                is_known, start = runner.has_run(num_rows, features, prompts), mark(self.state.lengths.device)
                result, prompt_output = runner.run(num_rows, features, prompts)
                break
            except Exception as error:
                is_given_up = isinstance(error, torch.OutOfMemoryError) and self.plan.give_up(
                    prompt_tokens, number, num_rows
                )
                if not parts and not is_given_up:
                    raise
                if not is_given_up:
                    reading.warn(parts, "in a step", error)
                    failed, parts = parts, []
        start = start if is_known else None  # the time of a step that compiles means nothing
        self._push(Launch(result, [(row.index, row) for row in rows], number, start, prompt_tokens))
        for each in runner.stepper.resting:
            self._num_missed[each.number] += runner.stepper.num_steps + 1
        self.num_steps += 1
        self.num_cold_steps += not is_known
        if parts:
            with self._failing_alone(*(row for row, _ in parts)):  # the step is done, whatever becomes of the prompts
                num_read = self._take_parts(take_rows(prompts, prompt_output, parts))
                reading.pace.end(start, sum(num_read), is_joint=True)
        if failed:  # one of them, or all of them together, may be to blame
            reading.note_failure([self._read_alone(part) for part in failed], "step")

    def _catch_up(self, num_rows: int, stepper: Stepper) -> None:
        """Lets draft models read what they missed while they paused: the one whose drafts are wanted, and those for
        which what the step may bring could not be kept."""
        for each in self.plan.readers:
            is_wanted, missed = each is stepper.own, self._num_missed[each.number]
            if missed and (is_wanted or missed + stepper.num_steps + 1 > each.room):
                self.plan.runners[0].catch_up(num_rows, is_wanted, each.number)
                self._num_missed[each.number] = 0

    def _review_drafts(self) -> None:
        """Lets some drafts rest for long, and others read again: requests that join later, as they missed these."""
        rows = [row for row in self._rows if row is not None]
        for number in self.plan.review(set.intersection(*(row.drafts for row in rows))):
            self._num_missed[number] = 0
            for row in rows:
                if row.is_running:
                    row.drafts.discard(number)
                    self.state.drafts[number].num_behind[row.index] = 0

    def drain(self) -> None:
        """Reads the launches that are left once all requests have ended."""
        while self._unread and not self._running:
            self._read_back()

    def read_what_is_done(self) -> None:
        """Reads the launches that the device has finished, without waiting for others."""
        while self._unread and self._unread[0].is_done:
            self._read_back()

    @contextlib.contextmanager
    def _failing_alone(self, *rows: Row) -> Iterator[None]:
        """Ends the requests of these rows, and no others, if anything fails in the block, such as an allocation.
        All of a step's rows must be named, since a step that breaks off may have changed any of them."""
        try:
            yield
        except Exception as error:
            for row in rows:
                self._release(row)
                row.request.fail(error if row is rows[0] else twin(error))

    @property
    def _num_unread_steps(self) -> int:
        return sum(launch.number is not None for launch in self._unread)

    def _push(self, launch: Launch) -> None:
        for _, row in launch.rows:
            row.num_pending += 1
        self._unread.append(launch)

    def _read_back(self) -> None:
        """Hands out the tokens of the oldest launch and frees the rows of requests that have ended."""
        launch = self._unread[0]
        brought = launch.read()
        self._unread.popleft()
        if launch.number is not None:
            num_tokens = sum(len(result.tokens) for _, result in brought)
            most_rows = 1 + max(index for index, _ in launch.rows)
            choice = self.plan.choice_beside(launch.prompt_tokens)
            choice.note(launch.number, most_rows, launch.step_ms, num_tokens / len(brought))
            self.reading.pace.note_step(None if launch.prompt_tokens else launch.step_ms)
        for row, result in brought:
            row.num_pending -= 1
            request = row.request
            if not request.is_finished:
                self._hand_out(launch.number, row, result)
            # another engine may have aborted the request without knowing of its row, which is noticed only here
            if request.is_finished and row in self._rows:
                self._release(row)

    def _hand_out(self, number: int | None, row: Row, brought: StepResult) -> None:
        """Gives a running request what a launch of this number brought."""
        request = row.request
        if number is not None:
            stepper = self.plan.runners[number].stepper
            levels, drafted = min(stepper.num_steps, stepper.num_nodes - 1), stepper.mean_nodes - 1
            request.count_step(len(brought.tokens) - 1, levels, drafted)
        with self._failing_alone(row):
            num_known = len(request.output_ids)
            if number is None:
                hand_scores(row)
            request.push(*brought)
            if self.plan.feed is not None:
                self.plan.feed.extend(request, request.output_ids[num_known:])

    def _release(self, row: Row) -> None:
        self.pages.give_back(row.pages)
        self._rows[row.index] = None
        if self.plan.feed is not None:
            self.plan.feed.stop(row.request)
        with torch.inference_mode():
            self.state.clear(row.index)


def host_lag(device: torch.device) -> int:
    """Returns how many steps the host is behind the device; on the CPU a step is done once it is launched."""
    return 1 if device.type == "cuda" else 0
