"""Benchmarks of the whole engine, by name: `python -m bench.run --app generation`."""

from __future__ import annotations

from collections.abc import Callable

from . import drafters, experiment, generation, profiling, suffix_cache

APPS: dict[str, Callable] = {
    "drafters": drafters.main,
    "experiment": experiment.main,
    "generation": generation.main,
    "profiling": profiling.main,
    "suffix_cache": suffix_cache.main,
}
