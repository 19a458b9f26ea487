"""Runs the models of `protocol`, and checks what they return."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ... import ops
from ...ops.tree.select_from_head import is_for
from ...runtime import check
from ...runtime.placement import is_same_device
from .layers.norm import library
from .protocol import Attend, BlockDraft, DraftModel, DraftOutput, ModelError, TargetModel, TargetOutput

_Output = TypeVar("_Output", TargetOutput, DraftOutput)


def run_target(
    target: TargetModel, tokens: Tensor, positions: Tensor, attend: Attend, capture: Sequence[int] = (), **which: Any
) -> TargetOutput:
    """Runs a target and checks what it returns; which: `last_only` or `last_rows`."""
    output = target.forward(tokens, positions, attend, capture=capture, **which)
    size, count = tokens.shape
    if which.get("last_only"):
        count = 1
    elif which.get("last_rows") is not None:
        count = len(which["last_rows"])
    features = (*tokens.shape, len(capture) * target.hidden_size) if capture else None
    return checked(target, TargetOutput, output, (size, count), target.vocab_size, features, target.dtype)


def run_draft(
    model: DraftModel, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, from_target: bool,
    **which: bool,
) -> DraftOutput:  # fmt: skip
    """Runs a draft and checks what it returns; which: `projects`."""
    output = model.forward(tokens, hidden, positions, attend, from_target=from_target, **which)
    width = model.draft_vocab_size if which.get("projects", True) else model.output_weight.shape[1]
    is_free = from_target or getattr(model, "hidden_grows", False)
    second = (*tokens.shape, None if is_free else hidden.shape[-1])
    return checked(model, DraftOutput, output, tokens.shape, width, second, hidden.dtype)


def fused_weight(model: DraftModel, num_rows: int) -> Tensor | None:
    """Returns a draft's `output_weight` if `select_from_head` is faster with it for so many rows, else None."""
    weight = getattr(model, "output_weight", None)
    if weight is None or not is_for(num_rows, weight) or library(weight) is not ops:
        return None
    return weight if "projects" in inspect.signature(model.forward).parameters else None


def run_block(model: BlockDraft, hidden: Tensor, count: int) -> Tensor:
    """Runs a draft of blocks and checks what it returns."""
    logits, wanted = model.draft_block(hidden, count), [len(hidden), count, model.draft_vocab_size]
    name = f"EAGLEInference: draft_block of {type(model).__name__}"
    if not (isinstance(logits, Tensor) and list(logits.shape) == wanted and logits.is_contiguous()):
        raise ModelError(f"{name} must return logits {wanted} without gaps, got {_told(logits)}")
    if logits.dtype not in (hidden.dtype, torch.float32):
        raise ModelError(f"{name} must return logits in {hidden.dtype} or float32, got {_told(logits)}")
    if check.can_read(logits) and logits.isnan().any():
        raise ModelError(f"{name} must return logits without NaN, got {int(logits.isnan().sum())} of them")
    return logits


def checked(
    model: Any, kind: type[_Output], output: Any, rows: Sequence[int], width: int,
    second: tuple[int | None, ...] | None, dtype_of_second: torch.dtype | None = None,
) -> _Output:  # fmt: skip
    """Returns what a model's forward returned; raises ModelError where it is not what the engine asked for.

    rows: the first sizes of its logits, whose last one is `width`. second: the shape of its features or hidden, with
    None for any size; None: nobody reads them. NaN is looked for with EAGLE_KERNELS_DEBUG=1 alone, since that waits for
    the device.
    """
    wanted = f"{kind.__name__}({', '.join(kind._fields)})"

    def refuse(rule: str, got: str) -> ModelError:
        model_class = type(getattr(model, "model", model)).__name__
        return ModelError(f"EAGLEInference: forward of {model_class} must return {wanted} {rule}, got {got}")

    if not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[0], Tensor)):
        raise refuse("with tensors in it", _told(output))
    logits, other = output
    if logits.shape != (*rows, width):
        raise refuse(f"with logits {[*rows, width]}", _told(logits))
    dtype, device = getattr(model, "dtype", None), getattr(model, "device", None)
    if logits.dtype not in (dtype or logits.dtype, torch.float32) or not logits.is_floating_point():
        raise refuse(f"with logits in its dtype, {dtype}, or in float32", _told(logits))
    if device is not None and not is_same_device(logits.device, device):
        raise refuse(f"with logits on its device, {device}", _told(logits))
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        raise refuse("with logits without gaps in their last axis", f"strides {list(logits.stride())}")
    if second is not None:
        name, sizes = kind._fields[1], other.shape if isinstance(other, Tensor) else ()
        if len(sizes) != len(second) or any(size not in (None, got) for size, got in zip(second, sizes)):
            told = str([*second]).replace("None", "H")
            raise refuse(f"with {name} {told}", _told(other))
        if other.dtype != dtype_of_second:
            raise refuse(f"with {name} in {dtype_of_second}", _told(other))
        if not is_same_device(other.device, logits.device):
            raise refuse(f"with {name} on {logits.device}", _told(other))
    if check.can_read(logits) and logits.isnan().any():
        raise refuse("without NaN in its logits", f"{int(logits.isnan().sum())} of them")
    return output if isinstance(output, kind) else kind(logits, other)


def _told(value: Any) -> str:
    """Tells a value that a model returned."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype} on {value.device}"
    if isinstance(value, tuple):
        return f"{type(value).__name__} of {', '.join(map(_told, value)) or 'nothing'}"
    return "None" if value is None else type(value).__name__
