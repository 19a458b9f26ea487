"""The instructions by which NVIDIA's GPUs unpack weights, step by step in Python: they make what plain operations do.

No GPU is needed: each step is computed here from its definition in the PTX ISA, on all numbers that a word may hold.
"""

import re

import pytest
import torch

from eagle_kernels.primitives import unpacking
from eagle_kernels.reference.ops.linear.shared.packing import decode_e2m1, decode_e4m3

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
MASK = 2**32 - 1


def halves(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Floats of the lower and upper halves, [.., 2]."""
    bits = torch.stack([words & 0xFFFF, (words >> 16) & 0xFFFF], -1)
    return torch.where(bits >= 2**15, bits - 2**16, bits).to(torch.int16).view(dtype)


def words_of(floats: torch.Tensor) -> torch.Tensor:
    bits = floats.contiguous().view(torch.int16).long() & 0xFFFF
    return bits[..., 0] | (bits[..., 1] << 16)


def permuted(left: torch.Tensor, right: torch.Tensor, selector: int) -> torch.Tensor:
    source = [(word >> (8 * place)) & 255 for word in (left, right) for place in range(4)]
    return sum(source[(selector >> (4 * place)) & 7] << (8 * place) for place in range(4))


def looked_up(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: int) -> torch.Tensor:
    result = torch.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            terms = [word if index >> (2 - place) & 1 else ~word for place, word in enumerate((a, b, c))]
            result |= terms[0] & terms[1] & terms[2]
    return result & MASK


def run(program: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The outputs of a program, $0 and up, whose inputs are the registers after them."""
    text = re.sub(r"\{ \.reg \.b32 [^;]*;|\}", "", program)
    lines = [line.split(None, 1) for line in filter(None, map(str.strip, text.split(";")))]
    num_outputs = len({match for match in re.findall(r"(?:lop3|fma)\S* \$(\d+)", program)})
    registers = {f"${num_outputs + place}": word for place, word in enumerate(inputs)}

    def value(name: str) -> torch.Tensor:
        return registers[name] if name in registers else torch.full_like(inputs[0], int(name, 0))

    for name, arguments in lines:
        target, *sources = (each.strip() for each in arguments.split(","))
        operation, kind = name.split(".", 1)
        if operation == "prmt":
            registers[target] = permuted(value(sources[0]), value(sources[1]), int(sources[2], 0))
        elif operation == "lop3":
            registers[target] = looked_up(*map(value, sources[:3]), int(sources[3], 0))
        elif operation == "fma":
            dtype = TYPES[kind.split(".")[1].removesuffix("x2")]
            a, b, c = (halves(value(source), dtype).double() for source in sources)
            registers[target] = words_of((a * b + c).to(dtype))
        elif operation in ("shr", "shl"):
            word, count = value(sources[0]), int(sources[1])
            registers[target] = word >> count if operation == "shr" else (word << count) & MASK
        elif operation == "and":
            registers[target] = value(sources[0]) & value(sources[1])
        else:
            assert operation == "mov", name
            registers[target] = value(sources[0])
    return [registers[f"${place}"] for place in range(num_outputs)]


def programs(name: str) -> dict:
    suffix = name.upper()
    keys = ("NIBBLES", "SIGNED", "FLOATS", "TINY", "ADD", "TIMES")
    return {key: getattr(unpacking, f"_{key}_{suffix}").value for key in keys}


@pytest.mark.parametrize("name", TYPES)
def test_slabs(name):
    """Each place of two words, of which one has all bytes in turn in all places, and the other one others."""
    byte = torch.arange(256)
    first = byte | (byte.roll(1) << 8) | (byte.roll(77) << 16) | (byte.roll(130) << 24)
    second = first.flip(0)
    exchanged = torch.stack([(first & 0xFFFF) | (second & 0xFFFF) << 16, (first >> 16) | (second >> 16 << 16)], -1)
    top = 128 if name == "bf16" else 1024
    for key, bits in (("NIBBLES", 4), ("SIGNED", 8), ("FLOATS", 8), ("TINY", 4)):
        slabs = run(programs(name)[key], first, second)
        assert len(slabs) == 32 // bits
        for place, slab in enumerate(slabs):
            codes = exchanged >> (bits * place) & ((1 << bits) - 1)
            if key == "NIBBLES":
                expected = (codes + top).double()
            elif key == "SIGNED":
                expected = torch.where(codes >= 128, codes - 256, codes).double()
            else:
                expected = decode_e4m3(codes) if key == "FLOATS" else decode_e2m1(codes)
            got = halves(slab, TYPES[name]).double()
            is_number = ~expected.isnan()
            assert torch.equal(got[is_number], expected[is_number]), f"{key} {place}"


@pytest.mark.parametrize("name", TYPES)
def test_sums_and_products(name):
    """Zero points are taken away exactly; a scale is rounded once. Both words may be of other outputs."""
    dtype, top = TYPES[name], 128 if name == "bf16" else 1024
    codes = torch.cartesian_prod(torch.arange(16), torch.arange(17))
    slab = words_of(torch.stack([codes[:, 0] + top, codes[:, 0].flip(0) + top], -1).to(dtype))
    zero = (codes[:, 1] | (0xC300 if name == "bf16" else 0xE400)) * 0x10001
    less = run(programs(name)["ADD"], slab, zero, zero.flip(0))[0]
    expected = torch.stack([codes[:, 0] - codes[:, 1], codes[:, 0].flip(0) - codes[:, 1].flip(0)], -1).double()
    assert torch.equal(halves(less, dtype).double(), expected)
    scale = torch.rand(len(codes), dtype=torch.float64).to(dtype)
    factor = words_of(torch.stack([scale, scale], -1))
    product = run(programs(name)["TIMES"], less, factor, factor.flip(0))[0]
    assert torch.equal(halves(product, dtype), (expected * torch.stack([scale, scale.flip(0)], -1).double()).to(dtype))
