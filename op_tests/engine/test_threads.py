"""Steps on the CPU take few threads, and give back what they did not take."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels.engine.serve.threads import few_threads, most_threads


def model(hidden_size: int, device: str = "cpu") -> SimpleNamespace:
    return SimpleNamespace(hidden_size=hidden_size, device=torch.device(device))


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_they_follow_the_models_width():
    assert [most_threads(model(size)) for size in (32, 256, 512, 896, 4096)] == [1, 1, 3, 9, 192]
    with few_threads(model(420)):
        assert torch.get_num_threads() == 2
    with few_threads(model(4096)):
        assert torch.get_num_threads() == 3, "never more than there are"
    with few_threads(model(32, "cuda")):
        assert torch.get_num_threads() == 3


def test_they_come_back_after_an_error_and_one_by_one():
    with pytest.raises(ValueError), few_threads(model(420)):
        with few_threads(model(32)):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        raise ValueError
    assert torch.get_num_threads() == 3


def test_a_thread_that_begins_within_a_step_of_another_gets_all_back():
    """It inherits the limit, as the number of threads that PyTorch had at its first operator."""
    seen = []

    def run():
        with few_threads(model(32)):
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())

    for _ in range(2):
        with few_threads(model(32)):
            other = threading.Thread(target=run)
            other.start()
            other.join()
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    assert seen == [1, 3, 1, 3]
    last = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    last.start()
    last.join()
    assert seen[-1] == 3, "what a new thread begins with"
