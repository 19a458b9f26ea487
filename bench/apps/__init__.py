"""Benchmarks of the whole engine, by name: `python -m bench.run --app generation`."""

from __future__ import annotations

from collections.abc import Callable

from . import generation

APPS: dict[str, Callable] = {"generation": generation.main}
