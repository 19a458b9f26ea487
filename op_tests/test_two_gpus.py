"""Every op with tensors of the second GPU while the first is current: the same bits, on the device of its inputs."""

from threading import Thread

import pytest
import torch

import eagle_kernels
from bench.harness.declaration import Benchmark, declared
from op_tests.harness import assert_equal, to_device

BENCHMARKS = {benchmark.op: benchmark for benchmark in declared()}
DEVICES = ("cuda:0", "cuda:1")
CALLS = 3  # a first one, one that is planned, and one like the one before

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def outputs(benchmark: Benchmark, values: dict) -> dict[str, torch.Tensor]:
    """What the op returns, and what it works on in place, by name."""
    result = getattr(eagle_kernels, benchmark.op)(**values)
    found = {} if result is None else {"output": result} if isinstance(result, torch.Tensor) else result._asdict()
    return {name: value for name, value in found.items() if value is not None} | {
        name: values[name] for name in benchmark.mutates
    }


@pytest.mark.parametrize("op", sorted(BENCHMARKS))
def test_the_other_device_gives_the_same(op):
    """In turn with the current device, whose plans must not serve the other's tensors."""
    benchmark = BENCHMARKS[op]
    for case in benchmark.small_cases:
        values = benchmark.inputs(case, torch.device(DEVICES[0]))
        expected = outputs(benchmark, to_device(values, DEVICES[0]))
        for call in range(CALLS):
            for device in DEVICES:
                found = outputs(benchmark, to_device(values, device))
                for name, tensor in found.items():
                    assert tensor.device == torch.device(device)
                    assert_equal(op, f"{case.name}, {device}, call {call}", name, tensor, expected[name])
    assert torch.cuda.current_device() == 0


def test_threads_with_a_device_each():
    """Both call one op at the same time, each with tensors of its own device."""
    benchmark, failures = BENCHMARKS["verify_tree_sampled"], []
    case = benchmark.small_cases[0]
    values = benchmark.inputs(case, torch.device(DEVICES[0]))
    expected = outputs(benchmark, to_device(values, DEVICES[0]))

    def run(device: str) -> None:
        try:
            for call in range(300):
                for name, tensor in outputs(benchmark, to_device(values, device)).items():
                    assert_equal(benchmark.op, f"{case.name}, {device}, call {call}", name, tensor, expected[name])
        except BaseException as failure:
            failures.append(failure)

    threads = [Thread(target=run, args=(device,)) for device in DEVICES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
