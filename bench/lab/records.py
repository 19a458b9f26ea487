"""What the lines of an experiment say, in the order and the groups in which it is shown."""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .config import METHODS

PLAIN = "plain"
# name -> {requests of a batch: tokens/s}
Curves = dict[str, dict[int, float]]


class Setting(NamedTuple):
    """What cells must share to stand in one picture."""

    pair: str
    batch_size: int
    temperature: float
    max_new_tokens: int
    seed: int
    dtype: str
    gpu: str
    prompts: str

    def __str__(self) -> str:
        parts = [self.pair, f"batch {self.batch_size}" * (self.batch_size > 0), f"temperature {self.temperature:g}"]
        parts += [f"{self.max_new_tokens} tokens", f"seed {self.seed}" * (self.seed != 0)]
        parts += [prompts_text(self.prompts), self.dtype, self.gpu]
        return ", ".join(filter(None, parts))


def setting_of(cell: Mapping[str, Any]) -> Setting:
    config = cell["config"]
    names = ("batch_size", "temperature", "max_new_tokens", "seed")
    shared = (cell["dtype"], cell["gpu"], cell.get("prompts", ""))  # older lines do not name prompts
    return Setting(config["model_pair_name"], *(config[name] for name in names), *shared)


def prompts_text(described: str) -> str:
    """What `Experiment.describe_prompts` wrote, in words: nobody shall take the hash for a commit."""
    found = re.fullmatch(r"(.*), (\d+), ([0-9a-f]{8})", described)
    if not found:
        return described and f"prompts {described}"
    source, count, digest = found.groups()
    which = f"{count} built-in prompts" if source == "built in" else f"{count} prompts of {source}"
    return f"{which} (text hash {digest})"


def method_of(cell: Mapping[str, Any]) -> str:
    return PLAIN if cell["config"]["K"] is None else cell["config"]["method"]


def label_of(cell: Mapping[str, Any]) -> str:
    return PLAIN if cell["config"]["K"] is None else f"{cell['config']['method']} K={cell['config']['K']}"


def newest_cells(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The last line of each cell of a machine; pairs, domains and settings as they first came, K ascending."""
    newest: dict[tuple, dict[str, Any]] = {}
    for line in lines:
        newest[setting_of(line), line["config"]["prompt_domain"], label_of(line)] = dict(line)
    settings = _places(setting for setting, _, _ in newest)
    pairs = _places(setting.pair for setting, _, _ in newest)
    domains = _places(domain for _, domain, _ in newest)
    methods = _places([PLAIN, *METHODS, *map(method_of, newest.values())])

    def place(item: tuple[tuple, dict[str, Any]]) -> tuple:
        (setting, domain, _), cell = item
        group = (pairs[setting.pair], settings[setting], domains[domain])
        return (*group, methods[method_of(cell)], cell["config"]["K"] or 0)

    return [cell for _, cell in sorted(newest.items(), key=place)]


def by_setting(cells: Iterable[dict[str, Any]]) -> dict[Setting, list[dict[str, Any]]]:
    groups: dict[Setting, list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault(setting_of(cell), []).append(cell)
    return groups


def distinct(cells: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    """Values of a field of the configuration as they first come."""
    return list(dict.fromkeys(cell["config"][name] for cell in cells))


def fastest(cells: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Over the plain decoding that each was measured with; of those where that is a number."""
    known = (cell for cell in cells if is_number(cell["speedup"]))
    return max(known, key=lambda cell: cell["speedup"], default=None)


def fastest_labels(cells: Iterable[dict[str, Any]]) -> list[str]:
    """Plain, and each method with the K whose speed-up is the largest in the mean of the domains."""
    speedups: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        if is_number(cell["speedup"]):
            of_label = speedups.setdefault(method_of(cell), {})
            of_label.setdefault(label_of(cell), []).append(cell["speedup"])
    return [max(of_label, key=lambda label: statistics.fmean(of_label[label])) for of_label in speedups.values()]


def crossover(curve: Mapping[int, float], plain: Mapping[int, float]) -> tuple[float, float] | None:
    """(batch, tokens/s) where plain decoding overtakes; None: nowhere among the batches that both were measured at.

    Between two batches both are straight lines on logarithmic axes, as they are drawn.
    """
    shared = sorted(size for size in set(curve) & set(plain) if curve[size] > 0 < plain[size])
    leads = [math.log(curve[size] / plain[size]) for size in shared]
    for low, high, before, after in zip(shared, shared[1:], leads, leads[1:]):
        if before > 0 >= after:
            part = before / (before - after)
            return low * (high / low) ** part, plain[low] * (plain[high] / plain[low]) ** part
    return None


def newest_steps(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Throughput of the generation app: the last line of each shape, preset and batch."""
    throughput = (line for line in lines if line.get("section") == "throughput")
    return list({(line["shape"], line["provider"], line["case"]): line for line in throughput}.values())


def preset_curves(lines: Iterable[Mapping[str, Any]]) -> dict[str, Curves]:
    """By shape of the target: throughput by preset, of presets with two batches at least."""
    shapes: dict[str, Curves] = {}
    for line in newest_steps(lines):
        size = int(line["case"].removeprefix("B="))
        shapes.setdefault(line["shape"], {}).setdefault(line["provider"], {})[size] = line["tokens_per_s"]
    return _drawable(shapes)


def cell_curves(cells: Sequence[dict[str, Any]]) -> dict[Setting, Curves]:
    """The same of an experiment over batches, mean of the domains; of a method the K that is fastest at the smallest
    batch. A setting's own batch size is 0."""
    groups: dict[Setting, list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault(setting_of(cell)._replace(batch_size=0), []).append(cell)
    found = {}
    for setting, group in groups.items():
        smallest = min(distinct(group, "batch_size"))
        kept = fastest_labels([cell for cell in group if cell["config"]["batch_size"] == smallest])
        speeds: dict[str, dict[int, list[float]]] = {}
        for cell in group:
            if label_of(cell) in kept and is_number(cell["tokens_per_second"]):
                of_size = speeds.setdefault(label_of(cell), {})
                of_size.setdefault(cell["config"]["batch_size"], []).append(cell["tokens_per_second"])
        # a mean of fewer domains is not comparable
        count = len(distinct(group, "prompt_domain"))
        found[setting] = {
            label: {size: statistics.fmean(values) for size, values in of_size.items() if len(values) == count}
            for label, of_size in speeds.items()
        }
    return _drawable(found)


def is_number(value: Any) -> bool:
    """A log writes numbers that are none as null."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def _drawable(groups: Mapping[Any, Curves]) -> dict[Any, Curves]:
    kept = {
        name: {label: dict(sorted(curve.items())) for label, curve in curves.items() if len(curve) > 1}
        for name, curves in groups.items()
    }
    return {name: curves for name, curves in kept.items() if PLAIN in curves and len(curves) > 1}


def _places(values: Iterable[Any]) -> dict[Any, int]:
    return {value: place for place, value in enumerate(dict.fromkeys(values))}
