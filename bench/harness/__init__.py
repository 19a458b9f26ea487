"""What every benchmark needs: its declaration, the check that comes before any number, timing, and results."""

from .declaration import Benchmark, Case, Unavailable

__all__ = ["Benchmark", "Case", "Unavailable"]
