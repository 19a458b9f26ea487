"""How many of PyTorch's threads a step takes on the CPU: as many as its model gives work to.

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

from .models.protocol import TargetModel

# of one layer: a millisecond's work for one thread, with the 32 rows of a tree
WEIGHTS_PER_THREAD = 1 << 20

_lock, _of_thread = threading.Lock(), threading.local()
# limits in force, with what their threads had before
_limits: list[tuple[int, int]] = []


def most_threads(target: TargetModel) -> int:
    """Of a model on the CPU, by the weights of a decoder's layer, 12 H^2 or so. It depends on nothing else, the number
    of rows or the time of day say: the sums of some operators do depend on how many threads share them."""
    return max(1, 12 * target.hidden_size**2 // WEIGHTS_PER_THREAD)


@contextmanager
def few_threads(target: TargetModel) -> Iterator[None]:
    """Inside, PyTorch has no more threads than the model is worth; afterwards as many as before. GPUs change nothing.

    The number belongs to the calling thread. One that runs its first operator meanwhile starts with the same.
    """
    if target.device.type != "cpu":
        yield
        return
    limit, is_nested = most_threads(target), getattr(_of_thread, "depth", 0) > 0
    with _lock:
        before = torch.get_num_threads()
        if not is_nested:  # a thread that has inherited another one's limit
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
    """A method that runs with the few threads that `self.target` is worth."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        with few_threads(self.target):
            return method(self, *args, **kwargs)

    return run
