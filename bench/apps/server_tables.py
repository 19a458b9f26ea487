"""Tables of the server's steps, and the check of what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..harness.markdown import markdown
from ..lab.log import read_lines
from .server_cases import CASES, PLUGGED, STOCK, SYSTEMS

RATIOS = {
    "sglang+flashinfer": "of sglang+flashinfer",
    "sglang+triton": "of sglang+triton (not the default on Hopper, the one on AMD)",
}
FRONT = ("4/3/8", 32, 0.0, 1.0)  # case, batch size, temperature and top-p of README's row
TOLERANCE = 0.01  # of accepted lengths
PACKAGES = {"sglang": "SGLang", "sgl_kernel": "sgl_kernel", "flashinfer": "FlashInfer", "torch": "torch",
            "triton": "triton"}  # fmt: skip


def setting(line: dict) -> tuple:
    """Returns what systems are compared at."""
    return line["case"], line["batch"], line["temperature"], line["top_p"]


def off_stock(lines: Sequence[dict]) -> list[str]:
    """Returns a text for each accepted length that is farther from those of all stock systems than the tolerance."""
    texts = []
    for line in lines:
        stock = [other for other in lines if other["system"] in STOCK and setting(other) == setting(line)]
        lengths = [other["accept_length"] for other in stock]
        if lengths and min(abs(line["accept_length"] / length - 1) for length in lengths) > TOLERANCE:
            case, batch, temperature, _ = setting(line)
            texts.append(
                f"{case} B={batch} T={temperature:g} {line['system']}: accepted length {line['accept_length']:.3f}, "
                f"stock's is {' and '.join(f'{length:.3f}' for length in lengths)}"
            )
    return texts


def newest(lines: Sequence[dict]) -> dict[tuple, dict[str, dict]]:
    """Returns the last line of each system by setting, in the order of the cases."""
    settings: dict[tuple, dict[str, dict]] = {}
    for line in lines:
        settings.setdefault(setting(line), {})[line["system"]] = line
    names = [case.name for case in CASES]
    ordered = sorted((names.index(item[0]), item) for item in settings if item[0] in names)
    return {item: settings[item] for _, item in ordered}


def table(lines: Sequence[dict]) -> list[list[str]]:
    """Returns a row for each system at each setting, with its speed over stock's."""
    rows = [
        ["case", "B", "sampling", "system", "ms a step", "tokens/s", "tokens a step", *RATIOS.values(), "at commit"]
    ]
    for (case, batch, temperature, top_p), systems in newest(lines).items():
        prompts = next(iter(systems.values()))["prompt_tokens"]
        name = f"{case}, prompts of {prompts}" if prompts > 512 else case
        sampling = f"temperature {temperature:g}, top-p {top_p:g}" if temperature > 0 else "greedy"
        for system in SYSTEMS:
            if system not in systems:
                continue
            line = systems[system]
            ratios = [
                f"{line['tokens_per_s'] / systems[stock]['tokens_per_s']:.2f}×" if stock in systems else "-"
                for stock in RATIOS
            ]
            numbers = [f"{line['ms_per_step']:.3f}", f"{line['tokens_per_s']:.0f}", f"{line['accept_length']:.2f}"]
            rows.append([name, str(batch), sampling, system, *numbers, *ratios, f"`{line['commit']}`"])
    return rows


def front_row(file: Path) -> list[str] | None:
    """Returns README's row of FRONT: the step with the plug-in beside the faster stock system; None without both."""
    systems = newest(full_lines(file)).get(FRONT, {})
    stock = min(
        (systems[name] for name in STOCK if name in systems), key=lambda line: line["ms_per_step"], default=None
    )
    plugged = systems.get(PLUGGED)
    if stock is None or plugged is None:
        return None
    case, batch, *_ = FRONT
    name = f"K/S/N={case} B={batch}, 8B model, {plugged['gpu'].removeprefix('NVIDIA ')}"
    ratio = plugged["tokens_per_s"] / stock["tokens_per_s"]
    times = [f"{1e3 * line['ms_per_step']:.0f}" for line in (plugged, stock)]
    return ["SGLang's step, plugged", name, times[0], stock["system"], times[1], f"{ratio:.1f}×"]


def full_lines(file: Path) -> list[dict]:
    """Returns the lines of full measurements at a real shape."""
    return [line for line in read_lines(file) if not line["quick"] and line["shape"] != "small"]


def tables(file: Path) -> list[str]:
    """Returns a section of the newest full measurements of each system; nothing where there are none."""
    kept = [line for systems in newest(full_lines(file)).values() for line in systems.values()]
    if not kept:
        return []
    told = []
    for name, title in PACKAGES.items():
        found = sorted({line["versions"][name].partition("+")[0] for line in kept if line["versions"].get(name)})
        if found:
            told.append(f"{title} {' and '.join(found)}")
    shapes = " and ".join(sorted({line["shape"] for line in kept}))
    about = (
        f"Shape of {shapes}, dummy weights, simulated acceptance, trees as K/S/N (`--app server`). {', '.join(told)}. "
        "*of*: tokens a second, as a multiple of that system's."
    )
    return ["## SGLang, stock and with the plug-in", about, markdown(table(kept))]
