"""A call of an op in a form that is drawn: dtypes and strides of what it is given and of its buffers, small tiles.

Nothing of this may change a result. What an op does not take in such a form its contract refuses, and it is then given
as it was.
"""

import importlib
import inspect
import random
import sys
from typing import Any

import torch

from eagle_kernels.runtime import check

from .bounds import assert_in_bounds
from .cases import as_tuple, contracted, module_of_op, refusal, signature_of, tensors_of
from .compare import assert_close, assert_equal
from .retune import retune

INTEGERS = (torch.int32, torch.int64)
GAP = 0x5A
# ops whose buffers are strided by whole rows of their last axis
IN_ROWS = ("kv.write_kv",)


def spread(tensor: torch.Tensor, coin: random.Random, unit: int = 1) -> torch.Tensor:
    """The same numbers, with gaps of some units between what its leading axes count."""
    strides, extent = [1], tensor.shape[-1]
    for axis in range(tensor.dim() - 2, -1, -1):
        strides.insert(0, extent + unit * coin.choice((0, 1, 3, 16)))
        extent = max(extent, strides[0] * tensor.shape[axis])
    memory = torch.full((max(extent, 1) * tensor.element_size(),), GAP, dtype=torch.uint8, device=tensor.device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor)


def in_another_form(path: str, values: dict, coin: random.Random) -> dict:
    """The same arguments, integers of either width and rows that lie apart where the op takes them so."""
    for name, value in list(values.items()):
        if not isinstance(value, torch.Tensor):
            continue
        forms = []
        if value.dtype in INTEGERS and value.numel() and int(value.abs().max()) < 2**31:
            forms.append(lambda tensor: tensor.to(coin.choice(INTEGERS)))
        if value.dim() > 1 and value.numel():
            forms.append(lambda tensor: spread(tensor, coin))
        for form in forms:
            changed = values | {name: form(values[name])}
            values = changed if takes(path, changed) else values
    return values


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage, those between its rows included."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def in_place(tensor: torch.Tensor, memories: dict[int, torch.Tensor] | None = None) -> torch.Tensor:
    """A copy that lies in memory as the tensor does; memories: those that copies of other tensors may share with it."""
    memories = {} if memories is None else memories
    memory = memory_of(tensor)
    copy = memories.setdefault(memory.data_ptr(), memory.clone()).view(tensor.dtype)
    return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def takes(path: str, values: dict) -> bool:
    """Tells whether an op's contract accepts these arguments."""
    return not refusal(contracted, path, values)


def with_small_tiles(path: str, coin: random.Random, monkeypatch: Any, sizes: tuple[int, ...] = (2, 4, 8)) -> None:
    """Blocks of a few elements, so that a small call takes many of them and ends in one that is not full."""
    family = path.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name == "eagle_kernels.ops." + path or name.startswith(f"eagle_kernels.ops.{family}.shared."):
            for table in [table for key, table in vars(module).items() if key.endswith("TUNING")]:
                rows = [row for rows in table.values() for row in ((rows,) if isinstance(rows, dict) else rows)]
                blocks = sorted({key for row in rows for key in row if key.startswith("BLOCK_")})
                numbers = {key: coin.choice(sizes) for key in blocks if key != "BLOCK_CHUNK"}
                if any("max_chunks" in row for row in rows):
                    numbers["max_chunks"] = coin.choice((1, 2, 3))
                retune(monkeypatch, table, **numbers)


class Buffer:
    """A tensor of a spec to write into, and all memory around it and between its rows."""

    def __init__(self, spec: check.Spec, coin: random.Random, in_rows: bool):
        self.tensor = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        memory_of(self.tensor).copy_(torch.randint(0, 2 if spec.dtype == torch.bool else 256, [self.tensor.nbytes]))
        if spec.contiguous is not None and self.tensor.dim() > spec.contiguous and self.tensor.numel():
            self.tensor = spread(self.tensor, coin, spec.shape[-1] if in_rows else 1)
        self.before = in_place(self.tensor)

    def check(self, op: str, name: str) -> None:
        """Nothing but the tensor itself may have changed."""
        self.before.copy_(self.tensor)
        assert torch.equal(memory_of(self.before), memory_of(self.tensor)), f"{op}: memory beside {name} was written"


def buffers_of(path: str, values: dict, coin: random.Random) -> list[Buffer]:
    """Buffers for all outputs, integers of either width where the op takes both."""
    specs = as_specs(contracted(path, values | {"out": None}))
    wanted = [coin.choice(INTEGERS) if spec.dtype in INTEGERS else spec.dtype for spec in specs]
    empty = [torch.empty(spec.shape, dtype=dtype, device=spec.device) for spec, dtype in zip(specs, wanted)]
    if len(specs) > 1:
        specs = as_specs(contracted(path, values | {"out": tuple(empty)}))
    return [Buffer(spec, coin, path in IN_ROWS) for spec in specs]


def as_specs(specs: Any) -> list[check.Spec]:
    return [specs] if isinstance(specs, check.Spec) else list(specs)


def check_drawn(path: str, values: dict, coin: random.Random, case: str, close: tuple[str, ...] = ()) -> None:
    """Runs launcher and reference on copies in one form, the launcher into buffers; what either changes is the same.

    Outputs named in `close` are compared as floats. Of an op that works in place the whole memory is compared.
    """
    op = path.rpartition(".")[2]
    module = module_of_op(path)
    reference = getattr(importlib.import_module("eagle_kernels.reference.ops." + path), op)
    keeps = {name: True for name in ("keep_unused", "keep_unvisited") if values.get(name)}
    values = in_another_form(path, values | dict.fromkeys(keeps, False), coin)
    buffers, result_type = [], getattr(module, "Output", None)
    if "out" in signature_of(path):
        buffers = buffers_of(path, values, coin)
        tensors = [buffer.tensor for buffer in buffers]
        given = {"out": result_type(*tensors) if result_type else tensors[0]}
        values |= given | keeps
    mutated = [name for name in getattr(module, "MUTATES", ()) if values[name] is not None]
    memories: dict[int, torch.Tensor] = {}
    before = {name: in_place(tensor, memories) for name, tensor in tensors_of(values).items()}
    expected_values = values | before
    names = inspect.signature(reference).parameters
    known = {name: value for name, value in expected_values.items() if name in names}
    if keeps:
        known["out"] = result_type(*(tensor.clone() for tensor in tensors))
    else:
        known.pop("out", None)
    expected = reference(**known)
    with assert_in_bounds():
        actual = getattr(module, op)(**values)
    for name, tensor in before.items():
        if name != "out":
            assert_equal(op, case, f"(argument) {name}", memory_of(values[name]), memory_of(tensor))
    assert mutated or buffers
    for field, buffer, got, want in zip(
        getattr(result_type, "_fields", ("output",)), buffers, as_tuple(actual), as_tuple(expected)
    ):
        assert got is buffer.tensor
        buffer.check(op, field)
        if field in close:
            assert_close(op, case, field, got, want)
        else:
            assert_equal(op, case, field, got, want.to(got.dtype))
