"""What `quantization_config` of config.json, or a file beside it, says of a quantised checkpoint.

Rows stay in 16 bit, whatever a format does with activations.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ...runtime.values import is_integer, shown
from .checkpoint import Checkpoint, read_json
from .layers.quantised import Layout
from .layers.quantised_mixture import MXFP4
from .protocol import ModelError
from .quantised_layouts import LAYOUTS
from .quantised_linears import Quantisation
from .settings import is_empty, is_off, read_value

_GROUPS = (-1, 32, 64, 128)


def read_quantisation(folder: Path, config: dict[str, Any]) -> Quantisation | None:
    """Returns how config.json, or a file beside it, says that weights are quantised; None: they are not."""
    section, where = _find_section(folder, config)
    if is_off(section):
        return None
    if not isinstance(section, dict):
        raise ModelError(f"{where} must be an object, got {shown(section)}")
    told = _Section(section, where)
    method = section.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        told.refuse("quant_method", ", ".join(_READERS))
    return _READERS[method](told)


def is_quantised(folder: Path) -> bool:
    """Returns whether the files of a model folder say that its weights are quantised, however that is."""
    return not is_off(_find_section(folder, read_json(folder / "config.json", is_optional=True))[0])


def _find_section(folder: Path, config: dict[str, Any]) -> tuple[Any, str]:
    """Returns what says how weights are quantised, in config.json or else in a file beside it, and its name."""
    section, where = config.get("quantization_config"), "config.json: quantization_config"
    if is_off(section):
        section = read_json(folder / "hf_quant_config.json", is_optional=True).get("quantization")
        where = "hf_quant_config.json: quantization"
        if isinstance(section, dict):  # without an algorithm the model was exported as it was
            section = {} if is_off(section.get("quant_algo")) else {"quant_method": "modelopt"} | section
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):  # AutoGPTQ's and AutoAWQ's
        if is_off(section):
            section, where = read_json(folder / name, is_optional=True), name
            if not is_off(section):
                method = section.get("quant_method") or ("awq" if "w_bit" in section else method)
                section |= {"quant_method": method}
    return section, where


def refuse_quantised(checkpoint: Checkpoint, called: str) -> None:
    """Raises ModelError for quantised weights of what is read in 16 bit alone; `called`: this, in the error.

    A config.json that is a copy of a quantised target's may lie beside weights in 16 bit.
    """
    kinds = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
    for name, stored in checkpoint.tensors.items():
        if stored.dtype.startswith(("F8", "I8", "U8")) or name.rpartition(".")[2] in kinds:
            raise ModelError(f"tensor {stored.name} is of quantised weights, which are not implemented for {called}")


def without_quantisation(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings without those of the weights."""
    return {name: value for name, value in config.items() if name != "quantization_config"}


class _Section:
    """Holds settings under one key, and refuses what is not implemented by the whole name."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def path(self, name: str) -> str:
        return f"{self.where}{': ' if self.where.endswith('.json') else '.'}{name}"

    def either(self, name: str, other: str) -> str:
        """Returns the one of two names of a setting that has a value, the first one where both or none have."""
        return other if is_empty(self.values.get(name)) and not is_empty(self.values.get(other)) else name

    def tell(self, name: str) -> str:
        """Returns a setting with its value; "" where it is off."""
        value = self.values.get(name)
        return "" if is_off(value) else f"{self.path(name)}={shown(value)}"

    def refuse(self, name: str, only: str) -> None:
        got = shown(self.values.get(name))
        raise ModelError(f"{self.path(name)}={got} is not implemented (only {only})")

    def one_of(self, name: str, *known: Any) -> Any:
        """Returns a value that must be one of `known`, the first of which an absent one means."""
        value = self.values.get(name)
        value = known[0] if is_empty(value) else value
        value = value.lower() if isinstance(value, str) else value
        if not any(type(value) is type(each) and value == each for each in known):
            self.refuse(name, ", ".join(repr(each) for each in known))
        return value

    def group_size(self, name: str = "group_size") -> int:
        value = self.values.get(name, -1)
        value = -1 if value is None else value
        if not is_integer(value) or value not in _GROUPS:
            self.refuse(name, ", ".join(map(str, _GROUPS)))
        return value

    def names(self, *keys: str) -> list[str]:
        """Returns lists of modules' names, joined."""
        found = []
        for key in keys:
            value = self.values.get(key)
            value = [] if is_off(value) else value
            if not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
                raise ModelError(f"{self.path(key)} must be a list of names, got {shown(value)}")
            found += value
        return found

    def inside(self, name: str) -> _Section | None:
        value = read_value(self.values, name, dict)
        return None if is_empty(value) else _Section(value, self.path(name))


def _read_awq(section: _Section) -> Quantisation:
    section.one_of(section.either("bits", "w_bit"), 4)
    section.one_of("version", "gemm")  # gemv and others pack in another order
    section.one_of("format", "gemm")
    section.one_of("zero_point", True, False)
    layout = LAYOUTS["awq"](section.group_size(section.either("group_size", "q_group_size")))
    return _unless(section, layout, _is_part, "modules_to_not_convert")


def _read_gptq(section: _Section) -> Quantisation:
    bits = section.one_of("bits", 4, 8)
    version = section.one_of("checkpoint_format", "gptq", "gptq_v2")
    section.one_of("pack_dtype", "int32")
    section.one_of("is_marlin_format", False)
    rules, where = section.values.get("dynamic") or {}, section.path("dynamic")  # {"-:NAME": {}} says something
    if not isinstance(rules, dict):
        section.refuse("dynamic", "-:NAME")
    excluded = [name[2:] for name in rules if name.startswith("-:")]
    for pattern in excluded:
        _matches(pattern, "", where)
    for name, value in rules.items():
        if not name.startswith("-:") and not is_off(value):
            raise ModelError(f"{where}: {shown(name)}: {shown(value)} is not implemented (only -:NAME)")
    size = section.group_size()
    layout = LAYOUTS["gptq"](size, bits, version == "gptq_v2")
    if is_off(section.values.get("static_groups")) and size != -1:  # groups of neighbouring columns otherwise
        layout = layout._replace(ordered_by=section.tell("desc_act"))
    made = _unless(section, layout, _is_part, "modules_to_not_convert")

    def is_listed(name: str) -> bool:
        return made.is_listed(name) or any(_matches(each, name, where) for each in excluded)

    return made._replace(is_listed=is_listed)


def _read_auto_round(section: _Section) -> Quantisation:
    # auto-round, export/export_to_autoround/export.py: tensors of GPTQ's first version, or of AWQ's gemm
    section.one_of("data_type", "int")
    form = section.one_of("packing_format", "auto_round:auto_gptq", "auto_round:auto_awq")
    if is_empty(section.values.get("packing_format")):
        section.refuse("packing_format", "auto_round:auto_gptq, auto_round:auto_awq")
    layers = section.inside("extra_config")
    for layer in [] if layers is None else filter(None, map(layers.inside, layers.values)):
        for name in ("bits", "group_size", "data_type"):
            whole = section.values.get(name)
            if layer.values.get("bits") != 16 and layer.values.get(name, whole) != whole:
                layer.refuse(name, f"{shown(whole)}, or bits=16")
    return (_read_gptq if form.endswith("gptq") else _read_awq)(section)


def _read_fp8(section: _Section) -> Quantisation:
    section.one_of("fmt", "e4m3", "float8_e4m3fn")
    section.one_of("activation_scheme", "dynamic", "static")
    block = section.values.get("weight_block_size")
    if not is_empty(block) and block != [128, 128]:
        section.refuse("weight_block_size", "[128, 128]")
    layout = LAYOUTS["fp8"]() if is_empty(block) else LAYOUTS["fp8"]("weight_scale_inv", in_blocks=True)
    return _unless(section, layout, _is_module, "modules_to_not_convert", "ignored_layers")


def _read_fbgemm(section: _Section) -> Quantisation:
    return _unless(section, LAYOUTS["fp8"](), _is_module, "modules_to_not_convert")


def _read_modelopt(section: _Section) -> Quantisation:
    algorithm = section.one_of("quant_algo", "fp8", "fp8_per_channel_per_token", "fp8_pb_wo")
    if is_empty(section.values.get("quant_algo")):
        section.refuse("quant_algo", "FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO")
    layout = LAYOUTS["fp8"](in_blocks=algorithm == "fp8_pb_wo")
    return _unless(section, layout, _is_pattern, "ignore", "exclude_modules")


def _read_compressed(section: _Section) -> Quantisation:
    for name in ("sparsity_config", "transform_config"):
        inner = section.inside(name)
        if inner is not None and inner.values.get("format") != "dense":
            section.refuse(name, "none")
    section.one_of("quantization_status", "compressed", "frozen")
    groups = section.inside("config_groups")
    if groups is None:
        if section.inside("kv_cache_scheme") is not None:  # only keys and values were calibrated
            return Quantisation("compressed-tensors", lambda name: None, LAYOUTS["16 bit"]())
        section.refuse("config_groups", "an object of groups")
    rules = []
    for name in groups.values:
        group = groups.inside(name)
        if group is not None:
            rules.append((group.names("targets"), _layout_of_group(group, section)))

    def layout_of(name: str) -> Layout | None:
        where = groups.path("targets")
        return next(
            (layout for targets, layout in rules if any(_is_target(each, name, where) for each in targets)), None
        )

    ignored = section.names("ignore")
    where = section.path("ignore")
    return Quantisation(
        "compressed-tensors",
        layout_of,
        LAYOUTS["16 bit"](),
        lambda name: any(_is_target(each, name, where) for each in ignored),
    )


def _layout_of_group(group: _Section, section: _Section) -> Layout:
    """Returns the layout of one of compressed-tensors' groups."""
    weights = group.inside("weights")
    if weights is None:
        group.refuse("weights", "an object")
    told = group if not is_empty(group.values.get("format")) else section
    form = told.one_of("format", "", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    if not form:
        section.refuse("format", "pack-quantized, int-quantized, float-quantized")
    kind = weights.one_of("type", "int", "float")
    bits = weights.one_of("num_bits", 8, *([4] if kind == "int" and form == "pack-quantized" else []))
    block = weights.one_of("strategy", "tensor", "channel", "group", *(["block"] if kind == "float" else []))
    form = f"{kind}-quantized" if form == "naive-quantized" else form
    if kind != ("float" if form == "float-quantized" else "int"):
        weights.refuse("type", "float for float-quantized, int for others")
    if form == "float-quantized":
        if block == "group":
            weights.refuse("strategy", "tensor, channel, block")
        if block == "block" and weights.values.get("block_structure") not in ([128, 128], "128x128"):
            weights.refuse("block_structure", "[128, 128]")
        return LAYOUTS["fp8"](in_blocks=block == "block")
    size = weights.group_size() if block == "group" else -1
    if form == "int-quantized":
        weights.one_of("symmetric", True)
        return LAYOUTS["int-quantized"](size)
    told = "" if weights.values.get("actorder") in ("weight", "static") or size == -1 else weights.tell("actorder")
    return LAYOUTS["pack-quantized"](size, bits)._replace(ordered_by=told)


def _read_mxfp4(section: _Section) -> Quantisation:
    # transformers, integrations/mxfp4.py: the experts of gpt-oss, whose tensors hold all of them
    layout = Layout(MXFP4, lambda n, k: {}, lambda *_: None, 4)
    return _unless(section, layout, _is_module, "modules_to_not_convert")._replace(
        layout_of=lambda name: layout if name.endswith(".experts") else None, is_listed=lambda name: False
    )


_READERS: dict[str, Callable[[_Section], Quantisation]] = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "auto-round": _read_auto_round,
    "compressed-tensors": _read_compressed,
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    "modelopt": _read_modelopt,
    "mxfp4": _read_mxfp4,
}


def _unless(section: _Section, layout: Layout, is_listed: Callable[[str, str, str], bool], *keys: str) -> Quantisation:
    """Returns one layout for all modules but those that are listed under one of the keys."""
    listed, where = section.names(*keys), section.path(keys[0])
    return Quantisation(
        section.values["quant_method"],
        lambda module: layout,
        LAYOUTS["16 bit"](),
        lambda module: any(is_listed(each, module, where) for each in listed),
    )


def _is_part(listed: str, name: str, where: str) -> bool:
    """Returns whether a name holds a listed one, as in AutoAWQ."""
    return listed in name


def _is_module(listed: str, name: str, where: str) -> bool:
    """Returns whether a listed name is a module's, or that of one around it, or its end; or a pattern that fits."""
    if listed.startswith("re:"):
        return _matches(listed[3:], name, where)
    listed = listed.removesuffix(".weight")
    return name == listed or name.startswith(f"{listed}.") or name.endswith(f".{listed}")


def _is_pattern(listed: str, name: str, where: str) -> bool:
    """Returns whether a pattern of ModelOpt's, with * for any text, fits."""
    return fnmatchcase(name, listed) or _is_module(listed, name, where)


def _is_target(listed: str, name: str, where: str) -> bool:
    """Returns whether a target of compressed-tensors fits: a class, a name or a pattern."""
    return listed == "Linear" or _is_module(listed, name, where)


def _matches(pattern: str, name: str, where: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise ModelError(f"{where}: {shown(pattern)} is no regular expression: {error}") from None
