"""torch.library: schemas, fake implementations and both overloads of every op, in each of its modes."""

import pytest
import torch

from .harness import check_registration, to_device
from .harness.ahead_of_time import PATHS
from .harness.cases import case_of_each_mode, num_elements, tensors_of

MOST_ELEMENTS = 400_000
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def cases(path: str) -> list[dict]:
    """Without NaN, which opcheck takes for a change, and floats of 8 bits, which it cannot multiply."""
    return [
        values | {name: tensor.nan_to_num() for name, tensor in tensors_of(values).items() if tensor.dtype in FLOATS}
        for values in case_of_each_mode(path)
        if num_elements(values) < MOST_ELEMENTS
        and not any("float8" in str(tensor.dtype) for tensor in tensors_of(values).values())
    ]


@pytest.mark.smoke
@pytest.mark.parametrize("path", PATHS)
def test_registration(path, device):
    for values in cases(path):
        check_registration(path.rpartition(".")[2], to_device(values, device))
