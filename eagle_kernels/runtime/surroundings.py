"""Shields references from the caller's torch settings, such as autocast, which kernels never see."""

import contextlib
import threading
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Runs a block without gradients, autocast, torch-function modes or reduced fp32 precision."""
    with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunction(), _whole_products:
        yield


class _WholeProducts:
    """Keeps torch from rounding the inputs of fp32 products while one thread or more are within.
    The settings are those of the process: the last thread to leave restores what the first one found."""

    def __init__(self):
        # reentrant, since a signal handler may call an op
        self.lock, self.within, self.found = threading.RLock(), 0, {}

    def __enter__(self):
        with self.lock:
            self.within += 1
            if self.within == 1:
                self.found = {place: value for place in _PLACES if (value := _get(place)) not in _WHOLE}
                for place in self.found:
                    _set(place, _WHOLE[0])

    def __exit__(self, *_):
        with self.lock:
            if self.within == 1:
                for place, value in self.found.items():
                    _set(place, "none")
                    if _get(place) != value:  # else it is what torch.backends.fp32_precision says
                        _set(place, value)
            self.within -= 1


if hasattr(torch._C, "_get_fp32_precision_getter"):
    _PLACES, _WHOLE = ("mkldnn", "cuda"), ("ieee", "none")

    def _get(place: str) -> str:
        return torch._C._get_fp32_precision_getter(place, "matmul")

    def _set(place: str, value: str) -> None:
        torch._C._set_fp32_precision_setter(place, "matmul", value)

else:  # torch 2.8, which has one setting
    _PLACES, _WHOLE = ("",), ("highest",)

    def _get(place: str) -> str:
        return torch.get_float32_matmul_precision()

    def _set(place: str, value: str) -> None:
        torch.set_float32_matmul_precision("highest" if value == "none" else value)


_whole_products = _WholeProducts()
