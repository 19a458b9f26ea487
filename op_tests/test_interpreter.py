"""The interpreter as harness/interpreter.py leaves it: patched in a launch, restored behind it, also after errors."""

from __future__ import annotations

import pytest
import torch

from eagle_kernels.runtime.language import tl, triton

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is no interpreter on a GPU")


@triton.jit
def _double(x):
    return 2 * tl.max(x, 0)  # a device function of Triton's own


@triton.jit
def _kernel(out_ptr, is_broken: tl.constexpr):
    x = tl.arange(0, 4)
    tl.store(out_ptr, _double(x) + _double(tl.cumsum(x, 0)))
    if is_broken:
        tl.load(None)


def test_the_language_is_restored_after_each_launch():
    names = ("load", "arange", "range", "static_range", "multiple_of")
    before = [getattr(tl, name) for name in names] + [tl.tensor.__dict__.get("T"), tl.tensor.__dict__["__add__"]]
    out = torch.zeros(1, dtype=torch.int32)
    for is_broken in (False, True, False):
        out.zero_()
        if is_broken:
            with pytest.raises(Exception, match="."):
                _kernel[(1,)](out, True)
        else:
            _kernel[(1,)](out, False)
        assert out.item() == 2 * 3 + 2 * 6
        after = [getattr(tl, name) for name in names] + [tl.tensor.__dict__.get("T"), tl.tensor.__dict__["__add__"]]
        assert all(a is b for a, b in zip(after, before))


def test_a_launch_patches_once_a_module(monkeypatch):
    from triton.runtime import interpreter

    calls = []
    tensor = interpreter._patch_lang_tensor
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", lambda *args: (calls.append(args), tensor(*args)))
    out = torch.zeros(1, dtype=torch.int32)
    _kernel[(1,)](out, False)
    once = len(calls)
    _kernel[(5,)](out, False)
    assert 1 <= once <= 3 and len(calls) == 2 * once, "as many for five programs as for one"
