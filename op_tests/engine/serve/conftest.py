"""Drafts for the tests of serving."""

import pytest

from op_tests.engine.toys import DEVICE, random_llama


@pytest.fixture(scope="module", params=["stranger", "itself"])
def draft(request, target):
    if request.param == "itself":
        return target
    return random_llama(hidden_size=16, num_layers=1, seed=1, device=DEVICE)


def pytest_collection_modifyitems(items):
    """Both drafts and both lags run everywhere, all four pairs of them on a GPU."""
    for item in items:
        given = getattr(item, "callspec", None) and item.callspec.params
        if given and {"draft", "lag"} <= set(given) and (given["draft"] == "stranger") == (given["lag"] == 0):
            item.add_marker(pytest.mark.full)
