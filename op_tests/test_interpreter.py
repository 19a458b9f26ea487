"""The interpreter as runtime/interpreter.py leaves it: patched in a launch, restored after it, also after errors.

And what it shows of addresses."""

import pytest
import torch

from eagle_kernels.runtime.language import tl, triton
from op_tests.harness import assert_in_bounds

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


@triton.jit
def _shapes_kernel(out_ptr):
    x = tl.arange(0, 8)[:, None] * tl.full([1, 4], 3, tl.int32)
    y = tl.trans(x.to(tl.float32)).to(tl.int64)
    tl.static_assert(x.shape[0] == 8 and x.shape[1] == 4 and x.numel == 32 and x.dtype == tl.int32)
    tl.static_assert(y.shape[0] == 4 and y.shape[1] == 8 and y.dtype == tl.int64 and y.type != x.type)
    tl.static_assert(tl.sum(y).dtype == tl.int64 and len(tl.sum(y).shape) == 0)
    tl.store(out_ptr + tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :], y)


def test_types_and_shapes_are_those_of_each_value():
    """Though they are described once, and shared from then on."""
    out = torch.zeros(4, 8, dtype=torch.int64)
    for _ in range(2):
        _shapes_kernel[(1,)](out)
    assert torch.equal(out, 3 * torch.arange(8).expand(4, -1))


@triton.jit
def _truth_kernel(out_ptr, limit):
    lane = tl.arange(0, 4)
    is_wanted = (lane < 3) & (tl.load(out_ptr) < limit)  # a truth of one lane each, and one of all
    tl.store(out_ptr + lane, lane + 1, mask=is_wanted)


def test_a_scalar_truth_is_a_mask():
    """In triton 3.9 it was whole numbers by then, which it refuses."""
    out = torch.zeros(4, dtype=torch.int32)
    _truth_kernel[(1,)](out, 0)
    assert out.tolist() == [0, 0, 0, 0]
    _truth_kernel[(1,)](out, 1)
    assert out.tolist() == [1, 2, 3, 0]


@triton.jit
def _numbers_kernel(out_ptr, x_ptr):
    lane = tl.arange(0, 4)
    x = tl.load(x_ptr + lane)
    few, one = tl.load(x_ptr + tl.arange(0, 2)), tl.load(x_ptr)
    tl.static_assert((x + 100).dtype == tl.int8 and (x.to(tl.int64) + 100).dtype == tl.int64)
    tl.static_assert((few + 100).shape[0] == 2 and len((one + 100).shape) == 0)
    tl.static_assert((x + 1).dtype == tl.int8 and (x + 1.0).dtype == tl.float32 and ((x > 0) + 1).dtype == tl.int32)
    tl.static_assert((x.to(tl.float16) + x.to(tl.float16)).dtype == tl.float16)
    tl.static_assert((x.to(tl.float16) / x.to(tl.float16)).dtype == tl.float32)
    tl.store(out_ptr + lane, x + 100)  # beyond 127
    tl.store(out_ptr + 4 + lane, x.to(tl.int64) + 100)
    tl.store(out_ptr + 8 + lane, x.to(tl.float32) / 8 + 100)
    tl.store(out_ptr + 12 + tl.arange(0, 2), few + 100)
    tl.store(out_ptr + 14, (one + 100) // 100)
    tl.store(out_ptr + 15, one + (one == 100))
    tl.store(out_ptr + 16 + lane, (x > 0) + 1)
    tl.store(out_ptr + 20 + lane, x.to(tl.int64) + 2049)
    tl.store(out_ptr + 24 + lane, x.to(tl.float16) + 2049)  # which is 2048 there


def test_a_number_has_the_type_and_the_shape_of_what_it_meets():
    """Though it is made once."""
    out, x = torch.empty(28), torch.tensor([100, 0, -1, 50], dtype=torch.int8)
    for _ in range(2):
        _numbers_kernel[(1,)](out.fill_(-1), x)
        assert out[:12].tolist() == [-56, 100, 99, -106, 200, 100, 99, 150, 112.5, 100, 99.875, 106.25]
        assert out[12:].tolist() == [-56, 100, 0, 101, 2, 1, 1, 2, 2149, 2049, 2048, 2099, 2148, 2048, 2047, 2098]


@triton.jit
def _read_kernel(out_ptr, x_ptr, y_ptr, place):
    tl.store(out_ptr, tl.load(x_ptr + place) + tl.load(y_ptr))


def test_addresses_outside_all_tensors_are_seen():
    """The second tensor lies within the first, which goes on behind it."""
    out, whole = torch.empty(1), torch.arange(16.0)
    x, y = whole[2:14], whole[4:5]
    for place in (0, 3, 11):
        with assert_in_bounds():
            _read_kernel[(1,)](out_ptr=out, x_ptr=x, y_ptr=y, place=place)
        assert out.item() == 2 + place + 4
    for place in (-1, 12):
        with pytest.raises(AssertionError, match="1 addresses lie in no tensor"), assert_in_bounds():
            _read_kernel[(1,)](out_ptr=out, x_ptr=x, y_ptr=y, place=place)
