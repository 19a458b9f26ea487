"""The number of PyTorch's threads that a step takes on the CPU: as many as its model gives work to.

Threads that share an operator wait for each other at its end, and they wait by spinning. Where another program has the
core of one of them, the others spin until it gets its turn, which takes milliseconds, whatever the operator takes. A
step has some hundred operators, so for a small model, whose operators take microseconds, the waiting can be a hundred
times the work, and where no other program runs there is little to gain.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..models.protocol import TargetModel

# of one layer: a millisecond's work for one thread, with the 32 rows of a tree
WEIGHTS_PER_THREAD = 1 << 20

_lock, _of_thread = threading.Lock(), threading.local()
# (limit, number before) of each block that is entered
_limits: list[tuple[int, int]] = []


def most_threads(target: TargetModel) -> int:
    """Returns the most threads worth using on the CPU, from the weights of a decoder's layer (about 12 H^2).

    It must not depend on rows or load: the sums of some operators change with the number of threads.
    """
    return max(1, 12 * target.hidden_size**2 // WEIGHTS_PER_THREAD)


@contextmanager
def few_threads(target: TargetModel) -> Iterator[None]:
    """Limits PyTorch's threads to `most_threads(target)` inside, then restores their number; does nothing on a GPU.

    The limit belongs to the calling thread, but a thread that runs its first operator meanwhile inherits it.
    """
    if target.device.type != "cpu":
        yield
        return
    limit, is_nested = most_threads(target), getattr(_of_thread, "depth", 0) > 0
    with _lock:
        before = torch.get_num_threads()
        if not is_nested:  # a number that is a limit in force was inherited: restore what its owner had
            before = next((had for other, had in _limits if other == before), before)
        entry = (min(limit, before), before)
        _limits.append(entry)
        _of_thread.depth = getattr(_of_thread, "depth", 0) + 1
        torch.set_num_threads(entry[0])
    try:
        yield
    finally:
        with _lock:
            _limits.remove(entry)
            _of_thread.depth -= 1
            torch.set_num_threads(before)


def saving_threads(method: Callable) -> Callable:
    """Wraps a method so that it runs under `few_threads(self.target)`."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        with few_threads(self.target):
            return method(self, *args, **kwargs)

    return run
