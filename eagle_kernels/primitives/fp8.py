"""Keys and values in 8 bits: floats with four exponent bits, encoded by the same integer steps on every target, and
whole numbers.

    float8_e4m3fn    exponent counted from 7, largest value 448, NaN s.1111.111      NVIDIA, AMD from gfx950 on
    float8_e4m3fnuz  exponent counted from 8, largest value 240, NaN 1.0000.000      AMD gfx942; there is no -0

GPUs differ in what their instructions make of too large values (some saturate, others give NaN), and Triton's
interpreter does not round. A store of a few KiB has the time to encode by hand, and then all write the same bytes.
"""

import torch

from ..runtime import check, target
from ..runtime.language import tl, triton

BIAS = {torch.float8_e4m3fn: 7, torch.float8_e4m3fnuz: 8}
FP8 = tuple(BIAS)
CODES = (*FP8, torch.int8)  # the types of 8 bits that caches may have


@triton.jit
def encode_e4m3(value, BIAS: tl.constexpr):
    """Returns fp32 values as bytes uint8: to nearest, ties to even, at most the largest finite value; NaN stays NaN."""
    IS_FNUZ: tl.constexpr = BIAS == 8
    LARGEST: tl.constexpr = 240.0 if IS_FNUZ else 448.0
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    STEPS_OF_ONE: tl.constexpr = 2.0 ** (2 + BIAS)  # subnormal numbers are equally far apart
    magnitude = tl.minimum(tl.abs(value), LARGEST)
    bits = magnitude.to(tl.int32, bitcast=True)
    # 3 of the 23 bits of the fraction stay; a carry of the rounding goes into the exponent, as it should
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - BIAS) << 3)
    # from 2^23 on fp32 holds whole numbers only: the addition rounds
    subnormal = (magnitude * STEPS_OF_ONE + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
    if IS_FNUZ:
        code = tl.where(code == 0, 0, code | sign)
        code = tl.where(value != value, 0x80, code)
    else:
        code = tl.where(value != value, 0x7F, code) | sign
    return code.to(tl.uint8)


@triton.jit
def encode_int8(value):
    """Returns fp32 values as int8: to nearest, ties to even, within -127..127; NaN becomes 0."""
    limited = tl.minimum(tl.maximum(tl.where(value != value, 0.0, value), -127.0), 127.0)
    # from 2^23 on fp32 holds whole numbers only: the addition rounds, and the low bits are a two's complement
    return (limited + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


def check_target(op: str, name: str, value: torch.Tensor) -> None:
    """Refuses an fp8 tensor on a GPU without that type: no kernel there could compute with it."""
    if value.dtype in FP8 and not target.has_fp8(value.device, value.dtype):
        known = "; ".join(f"{str(dtype).removeprefix('torch.')}: {names}" for dtype, names in target.FP8_ON.items())
        architecture = target.architecture(value.device)
        args = check.Arguments(op, {})
        rule = f"have a dtype that {architecture} has ({known}; references know both)"
        args.fail(name, rule, value.dtype, target.NotSupported)
