"""A CUDA graph of every op, in each of its modes, replayed with other numbers and dead requests in the same buffers."""

import pytest
import torch

import eagle_kernels

from .harness import assert_equal, replay_in_graph, to_device
from .harness.ahead_of_time import PATHS
from .harness.cases import as_tuple, case_of_each_mode, copied, module_of_op, tensors_of

pytestmark = pytest.mark.gpu


def kill_last_half(values: dict) -> None:
    """Requests of the last half have no length and their numbers are none."""
    for name, tensor in tensors_of(values).items():
        is_bounds = name == "plan" or name.endswith("indptr")  # of all requests together
        if tensor.dtype in (torch.int32, torch.int64) and len(tensor) > 1 and not is_bounds:
            tensor[len(tensor) // 2 :] = 0 if "len" in name or "num" in name else -1


@pytest.mark.parametrize("path", PATHS)
def test_a_graph_serves_other_numbers_and_dead_requests(path, device):
    name = path.rpartition(".")[2]
    launcher = getattr(eagle_kernels.raw, name)
    for number, (values, others) in enumerate(zip(case_of_each_mode(path), case_of_each_mode(path))):
        values, others = to_device(values, device), to_device(others, device)
        for field, tensor in tensors_of(values).items():
            if (tensor.shape, tensor.dtype) != (others[field].shape, others[field].dtype):
                others[field] = tensor.clone()
        kill_last_half(others)
        others = values | tensors_of(others)
        changed = copied(others)
        out = launcher(**copied(values))
        into = {} if out is None else {"out": out}

        def change(values=values, others=others, out=out):
            for field, tensor in tensors_of(values).items():
                tensor.copy_(others[field])
            for tensor in as_tuple(out):
                tensor.zero_()

        replay_in_graph(lambda values=values, into=into: launcher(**values, **into), change=change)
        found = [tensor.clone() for tensor in as_tuple(out)]
        for tensor in as_tuple(out):
            tensor.zero_()
        launcher(**changed, **into)
        for place, (got, want) in enumerate(zip(found, as_tuple(out))):
            assert_equal(name, f"replay {number}", f"{place}", got, want)
        for field in getattr(module_of_op(path), "MUTATES", ()):
            assert_equal(name, f"replay {number}", field, values[field], changed[field])
