"""The state of PyTorch in which steps run, whatever the caller's is: modes, and threads for which there is work.

Threads that share an operator wait for each other at its end, and they wait by spinning. If another program occupies
the core of one of them, the others spin until that thread gets its turn, which takes milliseconds, however short the
operator is. A step has about a hundred operators. For a small model, whose operators take microseconds, the waiting can
take a hundred times as long as the work, and even on an idle machine more threads gain little.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..models.protocol import TargetModel

# weights of a layer that give one thread a millisecond's work, with the 32 rows of a tree
WEIGHTS_PER_THREAD = 1 << 20

# reentrant, since a signal handler may run another engine
_lock = threading.RLock()
# (calling thread, limit, number of threads before) for each `few_threads` block that is running
_limits: list[tuple[int, int, int]] = []


def most_threads(target: TargetModel) -> int:
    """Returns the most threads worth using on the CPU, from the weights of a decoder layer (about 12 H^2).
    The number must not depend on rows or load, since the sums of some operators change with the number of threads."""
    return max(1, 12 * target.hidden_size**2 // WEIGHTS_PER_THREAD)


@contextmanager
def running(target: TargetModel) -> Iterator[None]:
    """Runs a block as steps run: in inference mode, in the dtypes of the models, with `few_threads`."""
    with few_threads(target), torch.inference_mode(), torch._C._DisableAutocast():
        yield


@contextmanager
def few_threads(target: TargetModel) -> Iterator[None]:
    """Limits PyTorch to `most_threads(target)` threads in the block, then restores the number; does nothing on a GPU.
    The limit belongs to the calling thread, but a thread that runs its first operator meanwhile inherits it."""
    if target.device.type != "cpu":
        yield
        return
    caller = threading.get_ident()
    with _lock:
        before = torch.get_num_threads()
        if all(owner != caller for owner, *_ in _limits):
            # a number equal to a limit in force was inherited: restore what the limit's owner had
            before = next((had for _, limit, had in _limits if limit == before), before)
        entry = (caller, min(most_threads(target), before), before)
        _limits.append(entry)
        torch.set_num_threads(entry[1])
    try:
        yield
    finally:
        with _lock:
            _limits.remove(entry)
            torch.set_num_threads(before)
