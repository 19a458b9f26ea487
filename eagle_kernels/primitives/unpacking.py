"""Words of quantised weights become tiles for the tensor cores, in registers.

Two words side by side hold weights of two columns side by side, and those W columns apart from them
(reference/ops/linear/shared/packing.py), so what is in one place of all their halves is a slab of W neighbouring
columns, and slabs side by side are the tile. A thread that loads the words of its own columns of a slab, as the tensor
cores deal them out, holds its share of every slab: nothing moves between threads.

The halves of a word are of the two columns, as the tensor cores want them in a register, so integer steps on both at
once take a word apart, about one for each weight of 4 bits. (Hopper has half as many of these a clock as of others,
which limits 4 bits as much as memory does.) A whole number q of 7 (bf16) or 10 (fp16) bits becomes a float when it is
put below the exponent of 128 or 1,024, which is taken away with the zero point in one addition. The sign of 8 bits
chooses between 128 and 256 to be taken away. A float of 8 or 4 bits has its exponent and fraction moved into place, and
is multiplied by what the exponents' offsets differ by.

The instructions are NVIDIA's (PTX, from sm_80 on); elsewhere the same numbers come from plain operations in fp32.
"""

from typing import Any, NamedTuple

from ..runtime.language import tl, triton

# what a pair of halves is combined with, by dtype: exponent of the smallest float with room for q, one, minus zero
_PAIRS = {"bf16": {"base": 0x43004300, "one": 0x3F803F80}, "f16": {"base": 0x64006400, "one": 0x3C003C00}}
_AND_OR, _AND_XOR = "0xEA", "0x6A"  # (a & b) | c and (a & b) ^ c


def _program(*lines: str, registers: str = "first, second, part, other") -> tl.constexpr:
    return tl.constexpr("{ .reg .b32 " + registers + "; " + " ".join(f"{line};" for line in lines) + " }")


def _copies(places: int) -> list[str]:
    """Copies of two words, before anything is written."""
    return [f"mov.b32 first, ${places}", f"mov.b32 second, ${places + 1}"]


def _nibbles(name: str) -> tl.constexpr:
    """Eight pairs of floats `base + q`."""
    lines = _copies(8)
    for place in range(8):
        word, shift = ("first", "second")[place // 4], 4 * (place % 4)
        if shift:
            lines.append(f"shr.u32 part, {word}, {shift}")
        source, base = "part" if shift else word, _PAIRS[name]["base"]
        lines.append(f"lop3.b32 ${place}, {source}, 0x000F000F, {base:#x}, {_AND_OR}")
    return _program(*lines)


def _signed_bytes(name: str) -> tl.constexpr:
    """Four pairs of floats q, of bytes in two's complement."""
    lines = _copies(4)
    for place in range(4):
        word, source = ("first", "second")[place // 2], "part" if place % 2 else ("first", "second")[place // 2]
        if place % 2:
            lines.append(f"shr.u32 part, {word}, 8")
        if name == "bf16":
            lines += [
                f"lop3.b32 other, {source}, 0x00800080, 0x43004300, {_AND_OR}",
                f"lop3.b32 part, {source}, 0x007F007F, 0x43004300, {_AND_OR}",
                f"fma.rn.bf16x2 ${place}, other, minus, part",
            ]
        else:
            lines += [
                f"lop3.b32 part, {source}, 0x00FF00FF, 0x64806480, {_AND_XOR}",
                f"fma.rn.f16x2 ${place}, part, one, minus",
            ]
    constants = ["mov.b32 minus, 0xBF80BF80"] if name == "bf16" else ["mov.b32 one, 0x3C003C00",
                                                                      "mov.b32 minus, 0xE480E480"]  # fmt: skip
    return _program(*constants, *lines, registers="first, second, part, other, one, minus")


def _float_bytes(name: str) -> tl.constexpr:
    """Four pairs of floats, of float8_e4m3fn: their bits are moved, then the exponent's offset is made good."""
    right, mask, factor = (4, "0x07F007F0", "0x7B807B80") if name == "bf16" else (1, "0x3F803F80", "0x5C005C00")
    lines = [f"mov.b32 factor, {factor}", "mov.b32 zero, 0x80008000", *_copies(4)]
    for place in range(4):
        word = ("first", "second")[place // 2]
        if place % 2:
            lines += [f"shr.b32 part, {word}, {right}", f"mov.b32 other, {word}"]
        else:
            lines += [f"shl.b32 part, {word}, {8 - right}", f"shl.b32 other, {word}, 8"]
        lines += [
            f"and.b32 part, part, {mask}",
            f"lop3.b32 part, other, 0x80008000, part, {_AND_OR}",
            f"fma.rn.{name}x2 ${place}, part, factor, zero",
        ]
    return _program(*lines, registers="first, second, part, other, factor, zero")


def _float_nibbles(name: str) -> tl.constexpr:
    """Eight pairs of floats, of e2m1: as those of `_float_bytes`. In bf16 they are in the right place at a shift by 6,
    in fp16 by 9."""
    shift, mask, factor = (6, "0x01C001C0", "0x7E807E80") if name == "bf16" else (9, "0x0E000E00", "0x74007400")
    lines = [f"mov.b32 factor, {factor}", "mov.b32 zero, 0x80008000", *_copies(8)]
    for place in range(8):
        word, moved = ("first", "second")[place // 4], shift - 4 * (place % 4)
        direction = f"shl.b32 part, {word}, {moved}" if moved >= 0 else f"shr.b32 part, {word}, {-moved}"
        lines += [
            direction,
            f"shl.b32 other, {word}, {12 - 4 * (place % 4)}",
            f"and.b32 part, part, {mask}",
            f"lop3.b32 part, other, 0x80008000, part, {_AND_OR}",
            f"fma.rn.{name}x2 ${place}, part, factor, zero",
        ]
    return _program(*lines, registers="first, second, part, other, factor, zero")


# a number for each half, which may be of two outputs
_BOTH = "prmt.b32 both, $2, $3, 0x7610"


def _addition(name: str) -> tl.constexpr:
    one = f"mov.b32 one, {_PAIRS[name]['one']:#x}"
    return _program(_BOTH, one, f"fma.rn.{name}x2 $0, $1, one, both", registers="one, both")


def _product(name: str) -> tl.constexpr:
    zero = "mov.b32 zero, 0x80008000"
    return _program(_BOTH, zero, f"fma.rn.{name}x2 $0, $1, both, zero", registers="zero, both")


_NIBBLES_BF16, _NIBBLES_F16 = _nibbles("bf16"), _nibbles("f16")
_SIGNED_BF16, _SIGNED_F16 = _signed_bytes("bf16"), _signed_bytes("f16")
_FLOATS_BF16, _FLOATS_F16 = _float_bytes("bf16"), _float_bytes("f16")
_TINY_BF16, _TINY_F16 = _float_nibbles("bf16"), _float_nibbles("f16")
_ADD_BF16, _ADD_F16 = _addition("bf16"), _addition("f16")
_TIMES_BF16, _TIMES_F16 = _product("bf16"), _product("f16")


class Numbers(NamedTuple):
    """Scales and zero points for a block of columns."""

    scales: Any
    zeros: Any


@triton.jit
def _assembled(words, DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    """Returns the slabs in DTYPE; of whole numbers of 4 bits with 128 (bf16) or 1,024 (fp16) to take away."""
    if FORMAT.BITS == 4:
        OUT: tl.constexpr = "=r,=r,=r,=r,=r,=r,=r,=r,r,r"
        if DTYPE.is_bf16():
            PROGRAM: tl.constexpr = _TINY_BF16 if FORMAT.IS_FLOAT else _NIBBLES_BF16
            return tl.inline_asm_elementwise(PROGRAM, OUT, [words], (tl.bfloat16,) * 8, is_pure=True, pack=2)
        else:
            PROGRAM: tl.constexpr = _TINY_F16 if FORMAT.IS_FLOAT else _NIBBLES_F16
            return tl.inline_asm_elementwise(PROGRAM, OUT, [words], (tl.float16,) * 8, is_pure=True, pack=2)
    else:
        OUT: tl.constexpr = "=r,=r,=r,=r,r,r"
        if DTYPE.is_bf16():
            PROGRAM: tl.constexpr = _FLOATS_BF16 if FORMAT.IS_FLOAT else _SIGNED_BF16
            return tl.inline_asm_elementwise(PROGRAM, OUT, [words], (tl.bfloat16,) * 4, is_pure=True, pack=2)
        else:
            PROGRAM: tl.constexpr = _FLOATS_F16 if FORMAT.IS_FLOAT else _SIGNED_F16
            return tl.inline_asm_elementwise(PROGRAM, OUT, [words], (tl.float16,) * 4, is_pure=True, pack=2)


@triton.jit
def _computed(words, FORMAT: tl.constexpr):
    """Returns the slabs in fp32."""
    # each column's weights in a word of its own
    left, right = tl.split(tl.reshape(words, (words.numel // 2, 2)))
    words = tl.join((left & 0xFFFF) | (right << 16), ((left >> 16) & 0xFFFF) | (right & -65536)).reshape(words.shape)
    slabs = ()
    for place in tl.static_range(32 // FORMAT.BITS):
        if FORMAT.BITS == 4 and FORMAT.IS_FLOAT:
            code = (words >> (4 * place)) & 15
            bits = ((code & 7) << 22) | ((code & 8) << 28)
            slabs += (bits.to(tl.float32, bitcast=True) * 2.0**126,)
        elif FORMAT.BITS == 4:
            slabs += (((words >> (4 * place)) & 15).to(tl.float32),)
        elif FORMAT.IS_FLOAT:
            code = (words >> (8 * place)) & 255
            bits = ((code & 127) << 20) | ((code & 128) << 24)
            slabs += (bits.to(tl.float32, bitcast=True) * 2.0**120,)
        else:
            slabs += (((words << (24 - 8 * place)) >> 24).to(tl.float32),)
    return slabs


@triton.jit
def _half_of(words, place: tl.constexpr):
    """Returns the 16 bits of a block's group `place` in the lower halves of words. words: see `unpack`."""
    return words[place // 2] >> (place % 2 * 16)


@triton.jit
def scale_of(numbers, place: tl.constexpr, FORMAT: tl.constexpr):
    """Returns the scales in fp32 of a block's group `place`. numbers: see `unpack`."""
    if FORMAT.IS_FLOAT and FORMAT.BITS == 8:
        return numbers.scales[0]
    elif FORMAT.IS_SCALE_BF16:
        return (_half_of(numbers.scales, place) << 16).to(tl.float32, bitcast=True)
    else:
        half = _half_of(numbers.scales, place).to(tl.int16)
        return half.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _zero_of(numbers, place: tl.constexpr, FORMAT: tl.constexpr):
    """Returns the zero points int32 of a block's group `place`."""
    if FORMAT.GROUP == 0:
        return numbers.zeros[0].to(tl.int32)
    else:
        return (_half_of(numbers.zeros, place) << 16) >> 16


@triton.jit
def _twice(half):
    """Returns what the lower halves hold in both halves of words, which spares a step for each pair of weights."""
    return (half & 0xFFFF) | (half << 16)


@triton.jit
def _as_added(zero, DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    """Returns minus zero, and minus what `_assembled` put on top, as `_combine` takes it."""
    if not FORMAT.IS_ASSEMBLED:
        return -zero.to(tl.float32)
    elif FORMAT.BITS == 4:  # the float -(128 + zero), or -(1,024 + zero)
        return _twice(zero | (0xC300 if DTYPE.is_bf16() else 0xE400))
    else:
        return _twice((-zero).to(tl.float32).to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32))


@triton.jit
def _as_factor(numbers, place: tl.constexpr, DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    """Returns the scales of a block's group `place`, rounded to DTYPE, as `_combine` takes them."""
    IS_BF16: tl.constexpr = DTYPE.is_bf16()
    if FORMAT.IS_ASSEMBLED and (FORMAT.BITS == 4 or not FORMAT.IS_FLOAT) and FORMAT.IS_SCALE_BF16 == IS_BF16:
        return _twice(_half_of(numbers.scales, place))
    scale = scale_of(numbers, place, FORMAT).to(DTYPE)
    if FORMAT.IS_ASSEMBLED:
        return _twice(scale.to(tl.int16, bitcast=True).to(tl.int32))
    else:
        return scale.to(tl.float32)


@triton.jit
def _combine(slab, numbers, IS_PRODUCT: tl.constexpr, FORMAT: tl.constexpr):
    """Returns slab plus, or times, a number for each of its outputs, or for all."""
    if not FORMAT.IS_ASSEMBLED:
        return slab * numbers if IS_PRODUCT else slab + numbers
    if slab.dtype == tl.bfloat16:
        PROGRAM: tl.constexpr = _TIMES_BF16 if IS_PRODUCT else _ADD_BF16
    else:
        PROGRAM: tl.constexpr = _TIMES_F16 if IS_PRODUCT else _ADD_F16
    numbers = tl.broadcast_to(numbers, slab.shape)
    return tl.inline_asm_elementwise(PROGRAM, "=r,r,r,r", [slab, numbers], dtype=slab.dtype, is_pure=True, pack=2)


@triton.jit
def await_products(total, FORMAT: tl.constexpr):
    """Returns total [.., ROW, COLUMN], once Hopper's tensor cores have read the weights whose products they add to it.
    They read them from registers while the program goes on. Where the next turn of a loop only adds to total, triton
    3.6 lets that turn begin and unpack weights into registers that are still being read: with 16 warps, sums were
    wrong. A use of total in each turn, which becomes no instruction in the end, makes Triton wait."""
    if not FORMAT.IS_AWAITED:
        return total
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _side_by_side(slabs):
    """Returns [.., OUTPUT, 128] of slabs [.., OUTPUT, W]."""
    if len(slabs) == 8:
        even = tl.join(tl.join(slabs[0], slabs[4]), tl.join(slabs[2], slabs[6]))
        odd = tl.join(tl.join(slabs[1], slabs[5]), tl.join(slabs[3], slabs[7]))
        tile = tl.join(even, odd)
        if len(tile.shape) == 5:
            return tl.reshape(tl.permute(tile, (0, 2, 3, 4, 1)), (tile.shape[0], 128))
        else:
            return tl.reshape(tl.permute(tile, (0, 1, 3, 4, 5, 2)), (tile.shape[0], tile.shape[1], 128))
    else:
        tile = tl.join(tl.join(slabs[0], slabs[2]), tl.join(slabs[1], slabs[3]))
        if len(tile.shape) == 4:
            return tl.reshape(tl.permute(tile, (0, 2, 3, 1)), (tile.shape[0], 128))
        else:
            return tl.reshape(tl.permute(tile, (0, 1, 3, 4, 2)), (tile.shape[0], tile.shape[1], 128))


@triton.jit
def unpack(words, numbers, DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    """Returns a tile of weights [.., OUTPUT, 128] in DTYPE of words int32 [.., OUTPUT, W].
    numbers: scales and zeros of the outputs, each a tuple of words of two groups: for groups of 32 columns two words,
    else one, for 128 with the block's group in the lower half. Of fp8, scales in fp32; of whole rows, zeros. Scales
    count where IS_EARLY, zeros with HAS_ZEROS."""
    slabs = _assembled(words, DTYPE, FORMAT) if FORMAT.IS_ASSEMBLED else _computed(words, FORMAT)
    GROUPS: tl.constexpr = 128 // FORMAT.GROUP if FORMAT.GROUP > 0 else 1
    SLABS: tl.constexpr = len(slabs) // GROUPS  # of a group
    done = ()
    for place in tl.static_range(len(slabs)):
        slab = slabs[place]
        if FORMAT.HAS_ZEROS:
            zero = tl.expand_dims(_zero_of(numbers, place // SLABS, FORMAT), -1)
            slab = _combine(slab, _as_added(zero, DTYPE, FORMAT), False, FORMAT)
        elif FORMAT.BITS == 4 and not FORMAT.IS_FLOAT:
            slab = _combine(slab, _as_added(tl.full(slab.shape, 8, tl.int32), DTYPE, FORMAT), False, FORMAT)
        if FORMAT.IS_EARLY:
            factor = tl.expand_dims(_as_factor(numbers, place // SLABS, DTYPE, FORMAT), -1)
            slab = _combine(slab, factor, True, FORMAT)
        done += (slab.to(DTYPE),)
    return _side_by_side(done)
