"""A small target, and how far the host is behind, for all tests of the engine."""

import pytest

from op_tests.engine.toys import DEVICE, random_llama


@pytest.fixture(scope="module")
def target():
    return random_llama(device=DEVICE)


@pytest.fixture(params=[0, 1], ids=["at once", "a step late"])
def lag(request, monkeypatch):
    """The number of steps that the host is behind; without this it is never behind on a CPU."""
    monkeypatch.setattr("eagle_kernels.engine.serve.scheduler.host_lag", lambda device: request.param)
    return request.param
