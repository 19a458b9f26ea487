"""What a call costs the host: `python -m bench.launch [--op build_tree] [--peers]`, on the smallest case of every op.

Microseconds of one call with all arguments and `out=` given, nothing before it on the GPU and no wait for its end:
`eagle_kernels.raw.X`, the public `eagle_kernels.X`, and the other providers. Above them, for comparison, an empty
kernel through Triton's own launch and one operator of torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from eagle_kernels.runtime.language import triton

from .harness.declaration import Benchmark, Unavailable, declared
from .harness.timing import host_us


@triton.jit(do_not_specialize=["size"])
def _empty_kernel(tensor_ptr, size):
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.launch", description=__doc__.partition("\n")[0])
    parser.add_argument("--op", action="append", help="name of an op; may be given several times")
    parser.add_argument("--peers", action="store_true", help="run installed packages of other projects as well")
    options = parser.parse_args(arguments)
    benchmarks = [benchmark for benchmark in declared() if not options.op or benchmark.op in options.op]
    if not benchmarks:
        parser.error(f"no benchmark of {', '.join(options.op)}; python -m bench.run --list names all")
    if not torch.cuda.is_available():
        print("timing needs a GPU")
        return 2
    number = torch.zeros(1, device="cuda")
    empty = _host_us(lambda: _empty_kernel[(1,)](number, 1))
    print(f"empty kernel by Triton {empty:.1f}   fill by torch {_host_us(lambda: number.fill_(1.0)):.1f}")
    for benchmark in benchmarks:
        times = "   ".join(f"{name} {time_us:.1f}" for name, time_us in _call_times(benchmark, options.peers).items())
        print(f"{benchmark.op}: {times}", flush=True)
    return 0


def _call_times(benchmark: Benchmark, with_peers: bool) -> dict[str, float]:
    """Host times by provider, a reason printed for each one that cannot run."""
    case = min(benchmark.cases, key=lambda case: benchmark.count_bytes(**case.sizes))
    providers = benchmark.all_providers(with_peers)
    providers = {"raw": providers.pop("eagle_kernels"), "public": benchmark.prepare_public, **providers}
    times = {}
    for name, prepare in providers.items():
        try:
            times[name] = _host_us(prepare(benchmark.inputs(case, torch.device("cuda"))))
        except Unavailable as reason:
            print(f"{name}: {reason}")
    return times


def _host_us(run) -> float:
    run()
    return host_us(run)


if __name__ == "__main__":
    sys.exit(main())
