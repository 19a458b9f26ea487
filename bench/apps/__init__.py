"""Benchmarks of the whole engine, by name: `python -m bench.run --app generation`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from . import drafters, experiment, generation, load, prefixes, profiling, requests, server, server_tables, suffix_cache


def _no_tables(file: Path) -> list[str]:
    return []


class App(NamedTuple):
    """A command line, and the sections that the README of a GPU's results has about the file that it writes."""

    main: Callable[..., int]
    tables: Callable[[Path], list[str]] = _no_tables


# in the order of their tables
APPS = {
    "generation": App(generation.main, generation.tables),
    "load": App(load.main, load.tables),
    "prefixes": App(prefixes.main, prefixes.tables),
    "requests": App(requests.main, requests.tables),
    "server": App(server.main, server_tables.tables),
    "drafters": App(drafters.main, drafters.tables),
    "suffix_cache": App(suffix_cache.main, suffix_cache.tables),
    "experiment": App(experiment.main, experiment.tables),
    "profiling": App(profiling.main),
}
