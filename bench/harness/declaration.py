"""What the `bench_X.py` of an op declares, by these names:

    name(**sizes)         of a case; results refer to it
    CASES, SMALL_CASES    dicts of sizes, see `Benchmark`; `grid` makes them
    SWEEP                 likewise
    ROTATED_BYTES         inputs of so many bytes take turns, see `Benchmark`
    draw(random)          sizes of a case that nobody chose, see `Benchmark.drawn`
    DEFAULTS              sizes that a case has where it names no others
    HEADLINES             names of the few cases at the head of `results/<gpu>/README.md`
    make(device, **sizes), count_bytes(**sizes), count_flops(**sizes), PEERS, FLOOR    see `Benchmark`
    is_checked(**sizes)   False where the reference is too slow or too large, or where providers draw other tokens
    prepare_Y(values)     the provider Y

Only `name`, the cases, `make` and `count_bytes` must be there.
"""

import importlib
import inspect
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

OPS = Path(__file__).parent.parent / "ops"

# Does the work once and returns what it made: the op's outputs, or a dict with some of them.
Run = Callable[[], object]
# Gets the op's arguments, does once what a user would do once (allocate, lay out, plan), and returns the timed call.
Prepare = Callable[[dict], Run]


class Unavailable(Exception):
    """Raised by a provider that cannot run here or not on this case; the message says why."""


class Floor(NamedTuple):
    """What a case's time is measured by: its bytes at a bandwidth that was measured, and a time for the launches.

    bandwidth: "copy", "read" or "write".
    """

    bandwidth: str
    fixed_us: float


@dataclass(frozen=True)
class Case:
    """One set of sizes."""

    name: str
    sizes: dict
    is_checked: bool = True  # as declared by `is_checked`
    is_headline: bool = False  # and by HEADLINES


def grid(**sizes) -> list[dict]:
    """Returns every combination of sizes, the last one changing fastest; what is no list is the same in all."""
    axes = [value if isinstance(value, list) else [value] for value in sizes.values()]
    return [dict(zip(sizes, values)) for values in itertools.product(*axes)]


@dataclass(frozen=True)
class Benchmark:
    """One op's cases and the providers that compute them on the same inputs."""

    path: str  # of the op, `"tree.build_tree"`
    cases: Sequence[Case]  # that are timed
    small_cases: Sequence[Case]  # every provider is checked on them before any is timed; the only ones without a GPU
    make: Callable[..., dict]  # make(device, **sizes), the arguments of the op
    count_bytes: Callable[..., int]  # count_bytes(**sizes), the bytes that have to move at least
    providers: dict[str, Prepare] = field(default_factory=dict)  # beside the op's own launcher, which is the first
    peers: dict[str, Prepare] = field(default_factory=dict)  # which other projects' packages compute, run on request
    floor: Floor | None = None  # what the times are measured by, where the op has a goal of that kind
    # count_flops(**sizes), the operations of matrix products, where they may take longer than the bytes
    count_flops: Callable[..., int] | None = None
    sweep: Sequence[Case] = ()  # further sizes, for plots (`bench.plot`); timed on request, in no table
    # the inputs of the declared cases change from call to call too, and are this many bytes together; 0: they do not
    rotated_bytes: int = 0
    # drawn(seed, count) gives cases as servers have them, from which no setting was chosen; None: there are none
    drawn: Callable[[int, int], list[Case]] | None = None

    @property
    def op(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def mutates(self) -> tuple[str, ...]:
        """The arguments that the op works on in place; empty for one that only returns outputs."""
        return getattr(self._module, "MUTATES", ())

    @property
    def reference(self) -> Callable:
        return getattr(importlib.import_module("eagle_kernels.reference.ops." + self.path), self.op)

    @property
    def tuning(self) -> dict:
        """The op's rows by architecture."""
        return self._module.TUNING

    @property
    def unplanned(self) -> Callable:
        """The launcher without its plans: it looks for its tuning row in every call."""
        return getattr(self._module, self.op).__wrapped__

    @property
    def _module(self):
        return importlib.import_module("eagle_kernels.ops." + self.path)

    def inputs(self, case: Case, device: torch.device) -> dict:
        """The case's arguments, the same ones at every call."""
        torch.manual_seed(0)
        return self.make(device, **case.sizes)

    def all_providers(self, with_peers: bool) -> dict[str, Prepare]:
        return {"eagle_kernels": self._prepare_launcher, **self.providers, **(self.peers if with_peers else {})}

    def prepare_public(self, values: dict) -> Run:
        """The op through `eagle_kernels.<op>`, the dispatcher in between; all arguments given, `out` among them."""
        return self._prepare_call(getattr(importlib.import_module("eagle_kernels"), self.op), values)

    def _prepare_launcher(self, values: dict) -> Run:
        return self._prepare_call(getattr(self._module, self.op), values)

    def _prepare_call(self, function: Callable, values: dict) -> Run:
        if "out" not in inspect.signature(function).parameters:
            return lambda: function(**values)
        values = {**values, "out": function(**values)}
        return lambda: function(**values)


def declared() -> list[Benchmark]:
    """Returns the benchmark of every file `bench/ops/A/bench_X.py`."""
    return [_read(file.parent.name, file.stem) for file in sorted(OPS.glob("*/bench_*.py"))]


def _read(family: str, stem: str) -> Benchmark:
    module = importlib.import_module(f"bench.ops.{family}.{stem}")
    names = vars(module)
    headlines, is_checked = names.get("HEADLINES", ()), names.get("is_checked", lambda **sizes: True)

    def cases(sets: Sequence[dict]) -> list[Case]:
        sets = [names.get("DEFAULTS", {}) | sizes for sizes in sets]
        named = [(module.name(**sizes), sizes) for sizes in sets]
        return [Case(name, sizes, is_checked(**sizes), name in headlines) for name, sizes in named]

    def drawn(seed: int, count: int) -> list[Case]:
        coin, sets = random.Random(f"{stem} {seed}"), {}
        while len(sets) < count:
            sizes = module.draw(coin)
            sets.setdefault(module.name(**names.get("DEFAULTS", {}) | sizes), sizes)
        return cases([*sets.values()])

    return Benchmark(
        path=f"{family}.{stem.removeprefix('bench_')}",
        cases=cases(module.CASES),
        small_cases=cases(module.SMALL_CASES),
        make=module.make,
        count_bytes=module.count_bytes,
        providers={
            name.removeprefix("prepare_"): value
            for name, value in names.items()
            if name.startswith("prepare_") and value.__module__ == module.__name__
        },
        peers=names.get("PEERS", {}),
        floor=names.get("FLOOR"),
        count_flops=names.get("count_flops"),
        sweep=cases(names.get("SWEEP", ())),
        rotated_bytes=names.get("ROTATED_BYTES", 0),
        drawn=drawn if "draw" in names else None,
    )
