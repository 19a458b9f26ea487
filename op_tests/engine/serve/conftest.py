"""Models, and how far the host is behind, for the tests of serving."""

from __future__ import annotations

import pytest
import torch

from op_tests.engine.toys import random_llama

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def target():
    return random_llama(device=DEVICE)


@pytest.fixture(scope="module", params=["stranger", "itself"])
def draft(request, target):
    if request.param == "itself":
        return target
    return random_llama(hidden_size=16, num_layers=1, seed=1, device=DEVICE)


@pytest.fixture(params=[0, 1], ids=["at once", "a step late"])
def lag(request, monkeypatch):
    """The number of steps that the host is behind; without this it is never behind on a CPU."""
    monkeypatch.setattr("eagle_kernels.engine.serve.scheduler.host_lag", lambda device: request.param)
    return request.param


def pytest_collection_modifyitems(items):
    """Both drafts and both lags run everywhere, all four pairs of them on a GPU."""
    for item in items:
        given = getattr(item, "callspec", None) and item.callspec.params
        if given and {"draft", "lag"} <= set(given) and (given["draft"] == "stranger") == (given["lag"] == 0):
            item.add_marker(pytest.mark.full)
