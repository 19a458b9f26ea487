"""Benchmarks of the whole engine, by name: `python -m bench.run --app generation`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from . import drafters, experiment, generation, profiling, suffix_cache


def _no_tables(file: Path) -> list[str]:
    return []


class App(NamedTuple):
    """A command line, and the tables of the file of results that it writes."""

    main: Callable[..., int]
    headlines: Callable[[Path], list[str]] = _no_tables  # of the README
    details: Callable[[Path], list[str]] = _no_tables  # of the README of one GPU's results


# in the order of their tables
APPS = {
    "generation": App(generation.main, headlines=generation.headlines),
    "drafters": App(drafters.main, headlines=drafters.headlines, details=drafters.details),
    "suffix_cache": App(suffix_cache.main, details=suffix_cache.details),
    "experiment": App(experiment.main, headlines=experiment.headlines),
    "profiling": App(profiling.main),
}
