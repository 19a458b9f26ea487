"""What every op test needs: comparison, poison, launch rules, CUDA graphs, random trees, ahead-of-time compilation."""

from .compare import TOLERANCE, assert_close, assert_equal
from .device import to_device
from .dispatch import assert_only_launches
from .graphs import replay_in_graph
from .operation import check_operation
from .poison import Guarded
from .registration import check_registration

__all__ = [
    "TOLERANCE",
    "Guarded",
    "assert_close",
    "assert_equal",
    "assert_only_launches",
    "check_operation",
    "check_registration",
    "replay_in_graph",
    "to_device",
]
