"""The formats of experts' weights: what `fused_experts` takes for each, and the constants of its kernels."""

import torch

from ....primitives.quantised import Format, of_device, of_whole_numbers
from ....runtime import check

# bits, whether they are floats, and the zeros of groups and of whole rows
_FORMATS = {"16bit": (16, False), "w4": (4, False), "w8": (8, False), "fp8": (8, True), "mxfp4": (4, True)}
FORMATS = tuple(_FORMATS)
_GROUPS = (32, 64, 128)
_BLOCK = 128


def check_weights(args: check.Arguments) -> int:
    """Checks the weights of both products, their scales and zero points, for x of [T, H]. Returns I."""
    form, x = args.choice("weight_format", FORMATS), args.values["x"]
    hidden = args.size("H")
    if form == "16bit":
        args.tensor("gate_up", ("E", "2 * I", "H"), (x.dtype,))
        rows = args.size("2 * I")
        if rows % 2 or rows < 2:
            args.fail("gate_up", "have an even number of rows for an expert, gate and up", rows)
        args.bind("I", rows // 2, "gate_up")
        args.tensor("down", ("E", "H", "I"), (x.dtype,))
        for name in ("gate_up_scales", "down_scales", "gate_up_zeros", "down_zeros", "group_size"):
            if args.values[name] is not None:
                args.fail(name, "be None for weights in 16 bit", _told(args.values[name]))
        return rows // 2
    if x.dtype == torch.float32:
        args.fail("x", "have dtype float16 or bfloat16 for quantised weights", "float32")
    bits, is_float = _FORMATS[form]
    words = _BLOCK * bits // 32
    args.tensor("gate_up", ("E", "S", -(-hidden // _BLOCK), 16, words), (torch.int32,))
    inner = 8 * args.size("S")
    if hidden % 16 or not inner:
        args.fail(
            "x", "have H of a multiple of 16, and experts at least 8 inner columns, for quantised weights", hidden
        )
    args.tensor("down", ("E", hidden // 16, -(-inner // _BLOCK), 16, words), (torch.int32,))
    _check_group(args, form)
    for name, num_rows, num_columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        _check_numbers(args, name, form, num_rows, num_columns)
    return inner


def _check_group(args: check.Arguments, form: str) -> None:
    group_size = args.values["group_size"]
    if form == "mxfp4":
        if group_size not in (None, 32):
            args.fail("group_size", "be 32 or None for mxfp4, whose groups have 32 columns", group_size)
    elif form == "fp8":
        if group_size not in (None, _BLOCK):
            args.fail("group_size", "be None, or 128 for blocks of 128 x 128, for fp8", group_size)
    elif group_size is not None and group_size not in _GROUPS:
        args.fail("group_size", "be None, 32, 64 or 128", group_size)


def _check_numbers(args: check.Arguments, name: str, form: str, num_rows: int, num_columns: int) -> None:
    """Checks the scales and zero points of a product."""
    group_size, blocks = group_of(form, args.values["group_size"]), -(-num_columns // _BLOCK)
    scales, zeros = f"{name}_scales", f"{name}_zeros"
    if args.values[zeros] is not None and _FORMATS[form][1]:
        args.fail(zeros, f"be None for {form}", _told(args.values[zeros]))
    if form == "fp8" and group_size is not None:
        if num_rows % _BLOCK:
            args.fail(name, f"have a multiple of 128 rows for an expert, for blocks of fp8, of {name}", num_rows)
        found = args.tensor(scales, (blocks, "E", num_rows // _BLOCK), (torch.float32,))
    elif form == "fp8":
        found = args.tensor(scales, ("E", num_rows), (torch.float32,))
    elif group_size is None:
        found = args.tensor(scales, ("E", num_rows), check.FLOAT)
        args.tensor(zeros, ("E", num_rows), (torch.uint8 if form == "w4" else torch.int8,), optional=True)
    else:
        pairs = -(-(blocks * _BLOCK // group_size) // 2)
        dtypes = (torch.bfloat16,) if form == "mxfp4" else (torch.float16, torch.bfloat16)
        found = args.tensor(scales, (pairs, "E", num_rows, 2), dtypes)
        args.tensor(zeros, (pairs, "E", num_rows, 2), (torch.int16,), optional=True)
    args.debug(scales, "be finite", found.isfinite)


def group_of(form: str, group_size: int | None) -> int | None:
    """Returns the columns of a group, None for whole rows."""
    return 32 if form == "mxfp4" else group_size


def format_of(
    form: str, group_size: int | None, scales: torch.Tensor | None, zeros: torch.Tensor | None, is_late: bool,
    device: torch.device,
) -> tuple[Format, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Returns the constants of a product's kernel, and scales and zero points as it reads them."""
    bits, is_float = _FORMATS[form]
    if scales is None:
        return Format(bits, False, False, 0, False, False, False, False, 0), None, None
    group_size = group_of(form, group_size)
    if form == "fp8":
        constants = {
            "BITS": 8, "IS_FLOAT": True, "HAS_ZEROS": False, "GROUP": 0 if group_size is None else group_size,
            "IS_SCALE_BF16": False, "X_SCALES": 0,
        }  # fmt: skip
    else:
        constants, scales, zeros = of_whole_numbers(bits, scales, zeros, group_size)
        constants["IS_FLOAT"] = is_float
    is_early = 0 < constants["GROUP"] < _BLOCK or constants["GROUP"] == _BLOCK and not is_late
    return Format(IS_EARLY=is_early, **of_device(device), **constants), scales, zeros


def _told(value) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else value
