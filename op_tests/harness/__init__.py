"""What every op test needs: comparison, poison, bounds, launches, graphs, tuning, trees, ahead-of-time compilation."""

from .bounds import assert_in_bounds
from .cases import sweep
from .compare import TOLERANCE, assert_close, assert_equal
from .device import to_device
from .dispatch import assert_only_launches
from .graphs import replay_in_graph
from .operation import check_close, check_operation
from .poison import Guarded
from .registration import check_registration
from .retune import assume_multiprocessors, retune

__all__ = [
    "TOLERANCE", "Guarded", "assert_close", "assert_equal", "assert_in_bounds", "assert_only_launches", "check_close",
    "check_operation", "check_registration", "replay_in_graph", "assume_multiprocessors", "retune", "sweep",
    "to_device",
]  # fmt: skip
