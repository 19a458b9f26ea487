"""What every benchmark needs: its declaration, the check that comes before any number, timing, and results."""

from .declaration import Benchmark, Case, Floor, Unavailable, grid

__all__ = ["Benchmark", "Case", "Floor", "Unavailable", "grid"]
