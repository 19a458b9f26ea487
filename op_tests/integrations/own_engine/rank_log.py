"""Writes what each rank of an engine draws, before SGLang sends rank 0's tokens to the others: a plug-in beside ours.

RANK_LOGS names a folder; without it nothing is changed. Each call of an op that draws becomes a line of `rank<N>.txt`:
the op, the number of requests, a hash of all arguments and one of the result.
"""

import functools
import hashlib
import importlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

OPS = {"verification": ("verify_tree_sampled", "verify_tree_coins"), "sampling": ("sample_from_logits",)}


def register() -> None:
    """Puts the log around the ops that the plug-in calls; SGLang calls this in every process."""
    folder = os.environ.get("RANK_LOGS")
    if not folder:
        return
    for name, ops in OPS.items():
        module = importlib.import_module(f"eagle_kernels.integrations.sglang.{name}")
        for op in ops:
            setattr(module, op, logged(getattr(module, op), op, Path(folder)))


def logged(function: Callable, op: str, folder: Path) -> Callable:
    """Returns the op that also writes a line."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        # hashed before, since logits may be worked on in place; what `out` holds before is no argument
        given = digest([*args, *(value for name, value in kwargs.items() if name != "out")])
        result = function(*args, **kwargs)
        outputs = result if isinstance(result, tuple) else (result,)
        with open(folder / f"rank{torch.distributed.get_rank()}.txt", "a", encoding="utf-8") as log:
            log.write(f"{op} {len(args[0])} {given} {digest(outputs)}\n")
        return result

    return call


def digest(values: Iterable) -> str:
    """Returns a hash of the bits of all tensors among some values."""
    state = hashlib.blake2b(digest_size=8)
    for value in values:
        if isinstance(value, torch.Tensor):
            state.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return state.hexdigest()
