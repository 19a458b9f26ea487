"""What an op takes: each argument of a sound call is changed by one step, and its contract takes that or refuses it.

Steps are another dtype, a row more or less along an axis, a gap between rows, an axis more, nothing at all; for numbers
those around limits. Prints the table that `test_takes.py` holds ops to: `python -m op_tests.harness.taken`.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from eagle_kernels.runtime import check
from op_tests.random_calls import CALLS, drawn_call

from .ahead_of_time import PATHS
from .cases import cases_of, contracted, num_elements, signature_of, tensors_of

TABLE = Path(__file__).parents[1] / "takes.txt"
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64, torch.float8_e4m3fn, torch.uint32)  # fmt: skip
NUMBERS = (-1, 0, 1, 2, 3, 16, 17, 32, 64, 65, 256, 257, 1024, 1025, 2**20, 2**20 + 1, 2**31 - 1, 2**31)
SIZES = (0, 1, 16, 17, 64, 65, 256, 257, 320, 321, 1024, 1025, 4096, 4097, 65536, 65537, 2**31 - 1024, 2**31 - 1023)
LARGEST = 2**20
DRAWS = 5


def spaced(tensor: torch.Tensor, axis: int, gap: int) -> torch.Tensor:
    """The same shape; what the axis counts lies `gap` elements further apart than it must."""
    strides, extent = [], 1
    for place in range(tensor.dim() - 1, -1, -1):
        strides.insert(0, extent + gap * (place == axis))
        extent = strides[0] * tensor.shape[place]
    return tensor.new_empty(extent).as_strided(tensor.shape, strides)


def steps_of_tensor(tensor: torch.Tensor) -> Iterator[tuple[str, object]]:
    for dtype in DTYPES:
        if dtype != tensor.dtype:
            yield str(dtype).removeprefix("torch."), tensor.new_empty(tensor.shape, dtype=dtype)
    for axis, size in enumerate(tensor.shape):
        for change in (1, -1):
            if size + change >= 0:
                shape = [*tensor.shape[:axis], size + change, *tensor.shape[axis + 1 :]]
                yield f"axis {axis} {change:+}", tensor.new_empty(shape)
        if size > 1:
            yield f"axis {axis} apart", spaced(tensor, axis, 2 * tensor.shape[-1])
            yield f"axis {axis} odd", spaced(tensor, axis, 1)
    yield "axis more", tensor[None]
    if tensor.dim():
        yield "axis less", tensor.new_empty(tensor.shape[1:])
    yield "nothing", None


def steps_of_size(values: dict) -> Iterator[tuple[str, str, dict]]:
    """Every axis and number of one size has another one, in tensors without data; called by its first axis."""
    sizes: dict = {}
    for name, tensor in tensors_of(values).items():
        for axis, size in enumerate(tensor.shape):
            if size > 1:
                sizes.setdefault(size, (name, axis))
    for size, (name, axis) in sizes.items():
        for number in SIZES:
            changed = {key: number if type(each) is int and each == size else each for key, each in values.items()}
            with contextlib.suppress(RuntimeError):  # more bytes than 64 bits can count
                for key, tensor in tensors_of(values).items():
                    shape = [number if each == size else each for each in tensor.shape]
                    changed[key] = torch.empty(shape, dtype=tensor.dtype, device="meta")
                yield name, f"axis {axis} of {number}", changed


def steps_of_call(path: str, values: dict, given: dict) -> Iterator[tuple[str, str, dict]]:
    """(argument, step, the arguments after it); given: a tensor for each argument, of other calls."""
    yield from steps_of_size(values)
    options = {"tree_mask_mode": ("packed", "full_mask", "qlen_only", "qlen_only_bitpacking")}
    for name, parameter in signature_of(path).items():
        value = values.get(name, parameter.default)
        kind = str(parameter.annotation).removesuffix(" | None")
        if isinstance(value, torch.Tensor):
            for step, changed in steps_of_tensor(value):
                yield name, step, values | {name: changed}
        elif name in given:
            yield name, "given", values | {name: given[name]}
        elif kind in ("int", "float"):
            numbers = NUMBERS if kind == "int" else (*NUMBERS[:4], 0.5, -0.5, float("nan"), float("inf"))
            for number in numbers:
                yield name, str(number), values | {name: number}
        elif kind == "bool":
            yield name, str(not value), values | {name: not value}
        elif name in options:
            for option in options[name]:
                yield name, option, values | {name: option}


def takes(path: str, values: dict) -> bool:
    """Tells whether an op takes these arguments, `out` among them; an error in other words is no refusal."""
    op = path.rpartition(".")[2]
    defaults = {name: parameter.default for name, parameter in signature_of(path).items()}
    try:
        contract = contracted(path, values)
        if values.get("out") is not None:
            check.allocate(op, contract, values["out"])
    except (ValueError, TypeError) as error:
        text = str(error)
        if not text.startswith(f"eagle_kernels.{op}: ") or "\n" in text:
            raise
        assert is_true(text.partition(": ")[2], {**defaults, **values}), text
        return False
    return True


# what a refusal may have got besides its argument: counts made of sizes, and that there is something, or nothing
COUNTED = re.compile(
    r"\d+( rows| words| cells)?|a tensor|both|neither|none( of them)?|(no|only) \w+.*|torch\.b?float\d+"
)


def is_true(text: str, values: dict) -> bool:
    """Tells whether the argument that a refusal is about is what the refusal says that it got."""
    rule, _, got = text.rpartition(", got ")
    names = re.sub(r"^(exactly|at least) one of ", "", rule).partition(" must ")[0]
    if "one of" in rule:
        given = [name for name in re.findall(r"\w+", names) if values.get(name) is not None]
        return got == (" and ".join(given) or "none of them") or "=True" in names
    place, _, field = names.partition(",")[0].partition(".")
    value = getattr(values[place], field) if field else values[place]
    if not isinstance(value, torch.Tensor):
        is_derived = value is None or rule.endswith("in all")
        return is_derived or got in (repr(value), str(value), type(value).__name__)
    told = (str(list(value.shape)), str(list(value.stride())))
    return got in (str(value.dtype), str(value.dtype)[6:]) or any(map(got.count, told)) or bool(COUNTED.fullmatch(got))


def modes_of(path: str) -> list[dict]:
    """The first case of each mode (what is given, and what words say), and a few calls that are drawn."""
    modes: dict = {}
    for values in (values for values in cases_of(path) if num_elements(values) < LARGEST):
        modes.setdefault(
            tuple((k, v is None, v if isinstance(v, str | bool) else "") for k, v in values.items()), values
        )
    drawn = [drawn_call(path, number)[0] | {"keep_unused": False} for number in range(DRAWS)] if path in CALLS else []
    known = signature_of(path)
    return [*modes.values(), *({k: v for k, v in values.items() if k in known} for values in drawn)]


def with_buffers(path: str, values: dict) -> dict:
    """The call with buffers for all outputs."""
    contract = contracted(path, values)
    return {} if contract is None else {"out": check.allocate(path.rpartition(".")[2], contract)}


def taken(path: str) -> list[str]:
    """Returns lines `argument: steps that are taken`, those that depend on the mode with a question mark."""
    found: dict[str, dict[str, list[bool]]] = {}
    torch.manual_seed(0)
    modes = modes_of(path)
    given = {name: tensor for values in modes for name, tensor in tensors_of(values).items()}
    for values in modes:
        for name, step, changed in steps_of_call(path, values, given):
            found.setdefault(name, {}).setdefault(step, []).append(takes(path, changed))
        out = with_buffers(path, values).get("out")
        if out is None:
            continue
        fields = {"out": out} if isinstance(out, torch.Tensor) else out._asdict()
        for field, buffer in fields.items():
            for step, changed in steps_of_tensor(buffer):
                buffers = changed if field == "out" else out._replace(**{field: changed})
                name = field if field == "out" else f"out.{field}"
                if buffers is not None:
                    found.setdefault(name, {}).setdefault(step, []).append(takes(path, values | {"out": buffers}))
    lines = []
    for name, steps in found.items():
        words = {
            step: "" if all(each) else f" ({sum(each)} of {len(each)})" for step, each in steps.items() if any(each)
        }
        lines.append(f"{path} {name}: " + ", ".join(in_runs(words)))
    return lines


def in_runs(words: dict[str, str]) -> Iterator[str]:
    """Each step with how often it is taken; numbers that follow each other as one range."""
    words = dict(words)
    for step in list(words):
        if step not in words:
            continue
        often, (head, _, last) = words.pop(step), step.rpartition(" ")
        row = [str(number) for number in (SIZES if head else NUMBERS)]
        while last in row[:-1] and words.get(f"{head} {row[row.index(last) + 1]}".lstrip()) == often:
            last = row[row.index(last) + 1]
            words.pop(f"{head} {last}".lstrip())
        yield (step if step.endswith(last) else f"{step}..{last}") + often


if __name__ == "__main__":
    TABLE.write_text("".join(line + "\n" for path in PATHS for line in taken(path)), encoding="utf-8")
