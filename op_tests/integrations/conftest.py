"""What the tests of all adapters share."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["reference", "triton"])
def backend(request, monkeypatch):
    """Both backends on every device: CPU tensors run the kernels through the interpreter too."""
    monkeypatch.setenv("EAGLE_KERNELS_BACKEND", request.param)
