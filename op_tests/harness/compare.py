"""Comparison with a report that says what to look at: op, case, count, first coordinates and values, rerun line."""

import os

import torch

# Absolute and relative error allowed per dtype where a result went through float arithmetic of that dtype.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

# So many times the tolerance a computation in the op's own precision may be off: if it is, it is wrong.
_MOST_ERROR = 16

_SHOWN = 5


def assert_equal(op: str, case: str, name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Same shape, dtype and every element (for floats: every bit pattern up to the sign of zero; NaN equals NaN)."""
    _assert_same_kind(op, case, name, actual, expected)
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    if actual.dtype in (torch.uint16, torch.uint32):
        actual, expected = actual.to(torch.int64), expected.to(torch.int64)
    wrong = actual != expected
    if actual.is_floating_point():
        wrong &= ~(actual.isnan() & expected.isnan())
    _report(op, case, name, wrong, actual, expected)


def assert_close(
    op: str, case: str, name: str, actual: torch.Tensor, expected: torch.Tensor, baseline: torch.Tensor | None = None
) -> None:
    """Floats: |actual - expected| <= 2 |baseline - expected|max + tolerance of the dtype.

    `expected` is float64 where the op can be computed in it; `baseline` is the same computation in the op's own
    precision, which says how much error that precision brings. It has to be near itself, or it would excuse the op.
    """
    if tuple(actual.shape) != tuple(expected.shape):
        raise AssertionError(_head(op, case, name) + f"shape {list(actual.shape)}, expected {list(expected.shape)}")
    tolerance = TOLERANCE[actual.dtype]
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    allowed = tolerance * (1.0 + expected.abs())
    if baseline is not None:
        baseline = baseline.detach().double().cpu()
        error = (baseline - expected).abs().nan_to_num(0.0, 0.0, 0.0)
        _report(op, case, f"{name}, baseline", error > _MOST_ERROR * allowed, baseline, expected)
        allowed = allowed + 2.0 * error.max()
    same_special = (actual.isnan() & expected.isnan()) | (actual == expected)
    wrong = ~((actual - expected).abs() <= allowed) & ~same_special
    _report(op, case, name, wrong, actual, expected)


def _assert_same_kind(op, case, name, actual, expected):
    if actual.dtype != expected.dtype:
        raise AssertionError(_head(op, case, name) + f"dtype {actual.dtype}, expected {expected.dtype}")
    if tuple(actual.shape) != tuple(expected.shape):
        raise AssertionError(_head(op, case, name) + f"shape {list(actual.shape)}, expected {list(expected.shape)}")


def _report(op, case, name, wrong, actual, expected):
    if not wrong.any():
        return
    lines = [_head(op, case, name) + f"{int(wrong.sum())} of {wrong.numel()} elements differ"]
    for where in wrong.nonzero()[:_SHOWN].tolist():
        lines.append(f"  at {where}: got {actual[tuple(where)].item()}, expected {expected[tuple(where)].item()}")
    if actual.is_floating_point():
        lines.append(f"  NaN: got {int(actual.isnan().sum())}, expected {int(expected.isnan().sum())}")
        lines.append(f"  largest error: {(actual - expected).abs().nan_to_num(0.0).max().item():.3e}")
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    lines.append(f"  rerun: python -m pytest '{test}'")
    raise AssertionError("\n".join(lines))


def _head(op, case, name) -> str:
    return f"{op} [{case}] output {name}: "
