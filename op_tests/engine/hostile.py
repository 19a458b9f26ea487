"""Hostile input, and the one line with which it is refused."""

import io
import os

import pytest
import torch

DEEP = "[" * 100_000


def refused(call, *arguments, **keywords) -> str:
    """Returns the one line, short enough to be read, with which a call is refused."""
    with pytest.raises(ValueError) as caught:
        call(*arguments, **keywords)
    told = str(caught.value)
    assert "\n" not in told and len(told) < 450
    return told


class Command:
    """What runs a command where it is unpickled."""

    def __reduce__(self):
        return os.system, ("echo run > /dev/null",)


def write_saved(content) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()
