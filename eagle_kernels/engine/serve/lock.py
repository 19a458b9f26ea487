"""The lock of an engine, which knows whether its thread is in the middle of a step."""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from ...runtime.values import first_line

_logger = logging.getLogger(__name__)


class Unique:
    """Refuses to be copied and pickled: models, pools, threads and locks belong to one object in one process."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        rule = "must not be copied, pickled or sent to another process"
        advice = "make an EAGLEInference in each process, and send token ids and results"
        raise TypeError(f"{type(self).__name__}: {rule}; {advice}")


class EngineLock(Unique):
    """Locks like `threading.RLock`, and marks steps, the blocks in which the batch is half changed. Code that a step's
    own thread runs inside it (`on_tree`, a model, a signal handler, what the garbage collector calls) must not step the
    batch again: `refuse` keeps it out, and `later` defers what must be done to the batch. A forked process cannot use
    the engine: torch's threads and the thread that held the lock are not in it."""

    def __init__(self) -> None:
        self._lock, self._process, self._is_marked = threading.RLock(), os.getpid(), False
        self._put_off: deque[Callable[[], None]] = deque()
        # what `threading.Condition` asks of a lock
        self._is_owned = self._lock._is_owned
        self._acquire_restore = self._lock._acquire_restore

    @property
    def is_in_step(self) -> bool:
        """Whether the calling thread is inside a step."""
        return self._is_marked and self._is_owned()

    @property
    def is_foreign(self) -> bool:
        """Whether this process was forked from the engine's."""
        return self._process != os.getpid()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquires, as `threading.RLock` does; raises RuntimeError in a forked process, where it would never return."""
        if self.is_foreign:
            rule = f"an engine belongs to the process that made it, {self._process}, and this one was forked from it"
            advice = "make an engine here, in a process started by 'spawn' (multiprocessing.get_context)"
            raise RuntimeError(f"EAGLEInference: {rule}; {advice}")
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        """Releases, as `threading.RLock` does."""
        self._lock.release()
        if self._put_off:
            self.settle()

    def _release_save(self) -> Any:
        saved = self._lock._release_save()
        self.settle()
        return saved

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_) -> None:
        self.release()

    def refuse(self, caller: str) -> None:
        """Raises RuntimeError inside a step, in a process that was forked, and inside a transform of torch.func."""
        if self.is_foreign:
            self.acquire()
        if self.is_in_step:
            rule = "must not be called inside a step of the same engine (from on_tree, a model, a signal handler, ...)"
            raise RuntimeError(f"{caller}: {rule}, and a step of this engine is running; submit and abort are allowed")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(f"{caller}: must not run inside a transform of torch.func, such as vmap, grad or jvp")

    @contextmanager
    def step(self, caller: str) -> Iterator[None]:
        """Holds the lock for a block that changes the batch; refuses `caller` inside another one."""
        self.refuse(caller)
        self._lock.acquire()
        try:
            self._is_marked = True
            yield
        finally:
            self._is_marked = False
            self.release()

    def later(self, function: Callable[[], None]) -> None:
        """Runs a function as its own step: now if possible, otherwise when the current step ends or the lock is free.
        It never blocks, so the garbage collector may call it."""
        if not self.is_foreign:
            self._put_off.append(function)
            self.settle()

    def settle(self) -> None:
        """Runs the put-off functions, unless another thread holds the lock and will run them on release."""
        while self._put_off and not self.is_in_step and self._lock.acquire(blocking=False):
            try:
                self._is_marked = True
                self._put_off.popleft()()
            except Exception as error:  # its caller has gone on long ago
                _logger.warning("EAGLEInference: work put off during a step failed: %s", first_line(error))
            finally:
                self._is_marked = False
                self._lock.release()
