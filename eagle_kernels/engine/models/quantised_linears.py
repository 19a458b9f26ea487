"""Quantised linears in a model: which of its linears they replace, and where the tensors of a file go.

The tensors in a file tell whether a weight is quantised, and the list of modules that are not converted does so only
where the file has none of it: AutoAWQ matches parts of names, so that "gate", meant for routers, fits `gate_proj` too.
Scales of inputs are not read, as these stay in 16 bit; those of a target's keys and values are (`kv_limits.py`).
Headers are those of `checkpoint`, which imports this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...runtime.values import shown
from .layers.linear import Linear
from .layers.quantised import PLAIN, Layout, QuantisedLinear, Stored
from .layers.quantised_mixture import QuantisedMixture, is_plain_mixture
from .protocol import ModelError

_FLOATS = ("F16", "BF16", "F32")
# Ends of names of tensors that are not read: scales of inputs, outputs and the KV cache, and what shapes tell as well.
_NOT_READ = {"input_scale", "input_zero_point", "input_scale_ub", "output_scale", "output_zero_point", "k_scale",
             "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point", "weight_shape"}  # fmt: skip


class Quantisation(NamedTuple):
    """Tells how the weights of a folder are quantised."""

    name: str  # in errors
    layout_of: Callable[[str], Layout | None]  # by a module's name in the file; None: it stays in 16 bit
    plain: Layout  # of those
    is_listed: Callable[[str], bool] = lambda name: False  # whether a module is named as one that stays in 16 bit
    at_load: Callable[[str], Layout | None] | None = None  # how weights in 16 bit are quantised; None: they stay
    leaves_others: bool = False  # whether weights that are quantised already stay where at_load names them, too


def quantise_linears(
    module: nn.Module, tensors: dict[str, Any], read: Callable[[str], Tensor], quantisation: Quantisation | None
) -> None:  # fmt: skip
    """Replaces the linears of a module, still on the meta device, whose weights are quantised. Tensors that are not
    read are dropped, also biases of zeros that GPTQ writes for layers without a bias.
    tensors, read: headers of the file by our names, and what reads a tensor of such a name."""
    if quantisation is None:
        return
    held: dict[str, dict[str, Any]] = {}
    for name in list(tensors):
        around, _, kind = name.rpartition(".")
        if kind in _NOT_READ:
            del tensors[name]
        else:
            held.setdefault(around, {})[kind] = tensors[name]
    if quantisation.at_load is not None and all(quantisation.at_load(name) is None for name in held):
        raise ModelError("quantize must name a part that the folder holds, and it holds none of those named")
    is_any_new = False
    for path, linear in list(module.named_modules()):
        if is_plain_mixture(linear):
            is_any_new |= _quantise_experts(module, path, held, quantisation)
        is_tied = getattr(linear, "weight", None) is None and path not in held
        if type(linear) is not Linear or not path or is_tied:
            continue
        layouts = {}
        for projection, ours in _names_of(linear, path):
            stored = held.get(ours, {})
            layouts[projection], is_new = _layout_of(ours, stored, quantisation)
            is_any_new |= is_new
            if linear.bias is None and "bias" in stored and "qweight" in stored:
                if not read(f"{ours}.bias").any():
                    del tensors[f"{ours}.bias"]
        if all(layout.op == PLAIN for layout in layouts.values()):
            continue
        outputs = linear.projections or linear.out_features
        with torch.device("meta"):
            made = QuantisedLinear(linear.in_features, outputs, linear.bias is not None, layouts)
        module.get_submodule(path.rpartition(".")[0]).add_module(path.rpartition(".")[2], made)
    if quantisation.leaves_others and not is_any_new:
        told = f"dense layers and experts are quantised already ({quantisation.name})"
        raise ModelError(f"quantize must be None, or name a part that is in 16 bit: {told}")


def _layout_of(ours: str, stored: dict[str, Any], quantisation: Quantisation) -> tuple[Layout, bool]:
    """Returns the layout of a weight of this name, and whether it is quantised at loading; stored: headers of its
    tensors."""
    theirs = next((each.name.rpartition(".")[0] for each in stored.values()), ours)
    is_plain = "weight" in stored and stored["weight"].dtype in _FLOATS
    is_packed = bool(stored.keys() & {"weight", "qweight", "weight_packed"})
    stays = is_plain or (quantisation.is_listed(theirs) and not is_packed)
    layout = None if stays else quantisation.layout_of(theirs)
    chosen = None if quantisation.at_load is None else quantisation.at_load(theirs)
    if layout is not None and chosen is not None and not quantisation.leaves_others:
        way = "dense=wint4, for one," if ".experts" in theirs else "a name without a part"
        rule = f"must not name weights that are quantised already ({quantisation.name}): {way} leaves them as they are"
        raise ModelError(f"{ours}: quantize {rule}")
    return layout or chosen or quantisation.plain, layout is None and chosen is not None


def _quantise_experts(
    module: nn.Module, path: str, held: dict[str, dict[str, Any]], quantisation: Quantisation
) -> bool:  # fmt: skip
    """Replaces a layer of experts whose weights are quantised, all in one format; returns whether at loading."""
    mixture = module.get_submodule(path)
    names = [*mixture.names_of_weights(path).values()]
    found = [_layout_of(name, held.get(name, {}), quantisation) for name in names]
    if len({(layout.op, is_new) for layout, is_new in found}) > 1:
        told = ", ".join(sorted({layout.op + " at loading" * is_new for layout, is_new in found}))
        raise ModelError(f"{path}: experts of several formats in one layer ({told}) are not implemented")
    name, (layout, is_new) = names[0], found[0]
    if layout.ordered_by:
        raise ModelError(f"{path}: {layout.ordered_by} is not implemented for experts (only groups of neighbours)")
    if is_new and not mixture.settings.projections:
        raise ModelError(f"{path}: quantising experts whose tensors hold all of them is not implemented")
    if layout.op == PLAIN or not (mixture.settings.projections or held.get(name, {}).keys() & {"gate_up_proj_blocks"}):
        return is_new
    with torch.device("meta"):
        made = QuantisedMixture(mixture, layout, path)
    module.get_submodule(path.rpartition(".")[0]).add_module(path.rpartition(".")[2], made)
    return is_new


def _names_of(linear: Linear, path: str) -> Iterator[tuple[str, str]]:
    """Yields each projection of a linear and its published name, "" and its own for the only one."""
    around = path.rpartition(".")[0]
    for projection in linear.projections or ("",):
        yield projection, f"{around}.{projection}".removeprefix(".") if projection else path


class Places:
    """Finds the quantised linears of a module by the names of the tensors that they take."""

    def __init__(self, module: nn.Module, tensors: dict[str, Any]) -> None:
        self.stored: dict[str, Stored] = {}
        self.linears: list[QuantisedLinear | QuantisedMixture] = []
        self._owners: dict[str, tuple[QuantisedLinear | QuantisedMixture, str, str]] = {}
        self._left: dict[tuple[int, str], int] = {}
        for path, linear in module.named_modules():
            if not isinstance(linear, (QuantisedLinear, QuantisedMixture)):
                continue
            self.linears.append(linear)
            is_linear = isinstance(linear, QuantisedLinear)
            names = dict(_names_of(linear, path)) if is_linear else linear.names_of_weights(path)
            for (projection, kind), stored in linear.stored().items():
                name = f"{names[projection]}.{kind}"
                self.stored[name], self._owners[name] = stored, (linear, projection, kind)
                key = id(linear), projection
                self._left[key] = self._left.get(key, 0) + (name in tensors)

    @property
    def required(self) -> set[str]:
        return {name for name, stored in self.stored.items() if not stored.is_optional}

    @property
    def expected_bytes(self) -> int:
        return sum(linear.expected_bytes for linear in self.linears)

    def check(self, name: str, tensor: Any) -> None:
        """Refuses a tensor of another shape or type than its linear takes."""
        shapes, dtypes, _ = self.stored[name]
        if tuple(tensor.shape) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ModelError(f"tensor {name} has shape {shown(tensor.shape)}, but config.json says {wanted}")
        if tensor.dtype not in dtypes.split():
            raise ModelError(f"tensor {name} must have dtype {dtypes.replace(' ', ' or ')}, got {tensor.dtype}")

    def take(self, name: str, tensor: Tensor, dtype: torch.dtype) -> bool:
        """Gives a tensor to its linear; returns False if it belongs to none."""
        if name not in self._owners:
            return False
        linear, projection, kind = self._owners[name]
        key = id(linear), projection
        self._left[key] -= 1
        try:
            linear.take(projection, kind, tensor, self._left[key] == 0, dtype)
        except ModelError as error:
            raise ModelError(f"tensor {name}: {error}") from None
        return True
