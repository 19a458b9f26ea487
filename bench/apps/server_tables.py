"""Tables of the server's steps, requests and models, and the check of what was accepted."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from ..harness.markdown import markdown
from ..lab.log import read_lines
from .server_cases import (
    CASES,
    CHAINS,
    EVERY_SYSTEM,
    FA3,
    OWN,
    PLUGGED,
    QWEN3_BATCHES,
    RANK_CASES,
    STOCK,
    VLLM_CASES,
    VLLM_FA3,
)
from .server_rows import TREES, pair_case

OF_VLLM = " (vLLM's build of FlashAttention 3)"
RATIOS = {
    "sglang+flashinfer": "of sglang+flashinfer",
    "sglang+triton": "of sglang+triton (not the default on Hopper, the one on AMD)",
    FA3: f"of {FA3}{OF_VLLM}",
}
VLLM_RATIOS = {VLLM_FA3: f"of {VLLM_FA3}", "vllm+triton": "of vllm+triton (not the default on Hopper)"}
FRONT = ("4/3/8", 32, 0.0, 1.0)  # case, batch size, temperature and top-p of README's row
CASE_NAMES = [case.name for case in CASES]
REQUEST_CASES = [case.name for case in CASES if case.requests]
MODEL_CASES = [name for name in CASE_NAMES if name.startswith("Qwen3")]
STEPS = [name for name in CASE_NAMES if name not in (*REQUEST_CASES, *MODEL_CASES, *RANK_CASES)]
STEPS_ABOUT = (
    "Steps at the shape of llama-3.1-8b; *first token*: the time to it in place of a step's. *of*: tokens a second, as "
    "a multiple of that system's at the same commit. *sglang+match*: the plug-in by sample and match, in place of "
    "SGLang's rule of coins."
)
REQUESTS_ABOUT = (
    "500 requests sent at once, prompts and texts of 716 to 1,024 tokens, at most 48 running, at the shape of "
    "llama-3.1-8b. *of*: requests a second, as a multiple of that system's. Last, what the pull request of naive EAGLE "
    "measured with a 70B model, another machine and real drafts: there a single draft paid, and larger trees did not."
)
SEED_OF_REQUESTS = "in the pull request (70B, 2 H20)"
SEED_REQUESTS = {"plain": "0.62", "4/2/4": "0.52", "2/1/2": "0.56", "1/1/2": "0.68"}
MODELS_ABOUT = (
    "Shapes of Qwen3, prompts of 512 tokens, greedy: tokens a second of all requests together. Trees accept 2.5 tokens "
    "a step by simulation. Last, what tri-sds tells of itself and of SGLang on an MI300X, with real drafts. It "
    "does not say which of its models, 4B to 32B, and whether of one request or of all: so no ratio is made."
)
SEED_MODELS = (
    ("plain", "SGLang on an MI300X, by tri-sds", "41.5", "40.1", "39.3", "24.4", "-"),
    ("real EAGLE", "SGLang on an MI300X, by tri-sds", "95.2", "77.4", "61.2", "57.2", "-"),
    ("plain", "tri-sds on an MI300X", "30.6", "25.5", "24.1", "20.1", "-"),
    ("real EAGLE", "tri-sds on an MI300X", "76.1", "43.9", "37.5", "35.3", "-"),
)
RANKS_ABOUT = (
    "Tensor parallelism: steps of one engine on several GPUs, and on one where it was timed beside them, at the shapes "
    "of llama-3.1-8b and qwen3-32b, prompts of 512 tokens. *all-reduce*: how the GPUs add up, by the engine's kernel "
    "or by NCCL. On several GPUs a step of the 8B shape at B = 1 and 8 is as long as its host's, which differs by a "
    "third from one engine to the next, so its ratios do too; the last engines that were timed are shown."
)
VLLM_TREE_NAMES = [case.name for case in VLLM_CASES if case.is_beside_chains]
VLLM_NAMES = [case.name for case in VLLM_CASES if not case.is_beside_chains]
VLLM_ALL = [*VLLM_NAMES, *VLLM_TREE_NAMES]
VLLM_TREES_ABOUT = (
    "Trees in vLLM (topk/depth/nodes) beside its own chains, at the shape of llama-3.1-8b. *of the best chain*: tokens "
    "a second, as a multiple of those of the fastest of vLLM's chains. *of EAGLEInference's step*: a step's time, as a "
    "multiple of the one with the same tree in our own engine. *pair*: the embedded models with their prompts and real "
    "acceptance; elsewhere acceptance is simulated."
)
VLLM_ABOUT = (
    "vLLM's steps at the shape of llama-3.1-8b, plain and with chains of 3 and 7 drafts; *first token*: the time to it "
    "in place of a step's. *of*: that system's time, as a multiple of this one's at the same commit; where they took "
    "turns the median over turns, the least and the most. *vllm+fa3* is vLLM's choice on Hopper."
)
PROFILES_ABOUT = (
    "Where the time of a step goes, by PyTorch's profiler, which slows the host (`--profile`): how long the GPU works, "
    "and the host with pauses of at most 0.3 ms; what the host launches, and kernels in a step with their time."
)
PAIR_CASES = [pair_case(tree) for tree in TREES]
PAIR_ABOUT = (
    "What is accepted of the embedded pair's drafts (`--app server --check-only`), SGLang's own verification and the "
    "plug-in's: the share of steps whose drafts were accepted to each level, and the mean over levels."
)
MOST_LEVELS = max(steps for _, steps, _ in TREES.values())
# of accepted lengths; of vLLM's, which are drawn, three standard errors of the difference of two of one step
TOLERANCE, SPREAD = 0.01, 3.0
PACKAGES = {"vllm": "vLLM", "sglang": "SGLang", "sgl_kernel": "sgl_kernel", "flashinfer": "FlashInfer",
            "fa3": "FlashAttention 3 in", "torch": "torch", "triton": "triton"}  # fmt: skip


def setting(line: dict) -> tuple:
    """Returns what systems are compared at."""
    return line["case"], line["batch"], line["temperature"], line["top_p"]


def ranks(line: dict) -> tuple[int, str]:
    """Returns the GPUs of a line's engine, and how they add up; lines of different ones are never compared."""
    return line.get("tp", 1), line.get("all_reduce", "")


ONE_GPU = ranks({})


def off_stock(lines: Sequence[dict]) -> list[str]:
    """Returns a text for each accepted length that is farther from those of all stock systems than the tolerance."""
    texts = []
    for line in lines:
        key = (setting(line), ranks(line))
        stock = [other for other in lines if other["system"] in STOCK and (setting(other), ranks(other)) == key]
        lengths = [other["accept_length"] for other in stock]
        tolerance = TOLERANCE
        if stock and line["case"] in VLLM_NAMES:
            tolerance += SPREAD / (line["batch"] * sum(steps for *_, steps, _ in stock[0]["raw"])) ** 0.5
        if lengths and min(abs(line["accept_length"] / length - 1) for length in lengths) > tolerance:
            case, batch, temperature, _ = setting(line)
            texts.append(
                f"{case} B={batch} T={temperature:g} {line['system']}: accepted length {line['accept_length']:.3f}, "
                f"stock's is {' and '.join(f'{length:.3f}' for length in lengths)}"
            )
    return texts


def newest(
    lines: Sequence[dict],
    names: Sequence[str] = tuple(CASE_NAMES),
    of: tuple[int, str] = ONE_GPU,
    section: str | None = None,
) -> dict[tuple, dict[str, dict]]:
    """Returns the last line of each system by setting of these cases, in the order of the cases and systems.

    lines: any; only those of this section, of engines on such GPUs, count. names: of cases. of: as `ranks` returns it.
    """
    settings: dict[tuple, dict[str, dict]] = {}
    for line in lines:
        if ranks(line) == of and line.get("section") == section:
            settings.setdefault(setting(line), {})[line["system"]] = line
    ordered = sorted((names.index(item[0]), item) for item in settings if item[0] in names)
    return {
        item: {system: settings[item][system] for system in EVERY_SYSTEM if system in settings[item]}
        for _, item in ordered
    }


def table(lines: Sequence[dict], names: Sequence[str] = tuple(STEPS)) -> list[list[str]]:
    """Returns a row for each system at each setting of steps, with its speed over stock's; nothing without any."""
    rows = []
    for (case, batch, temperature, top_p), systems in newest(lines, names).items():
        prompts = next(iter(systems.values()))["prompt_tokens"]
        name = f"{case}, prompts of {prompts}" if prompts > 512 else case
        for system in systems:
            rows.append([name, str(batch), _sampling(temperature, top_p), system, *_step(systems, system)])
    return [["case", "B", "sampling", "system", *_step_columns(lines)], *rows] if rows else []


def request_table(lines: Sequence[dict]) -> list[list[str]]:
    """Returns a row for each system and kind of drafts that served the requests; nothing without any."""
    rows = []
    for (case, *_), systems in newest(lines, REQUEST_CASES).items():
        drafts = case.removeprefix("requests ")
        for system, line in systems.items():
            numbers = [f"{line['requests_per_s']:.2f}", f"{line['tokens_per_s']:.0f}", f"{line['accept_length']:.2f}"]
            name = f"{drafts} (naive)" if line["tree"] and line["tree"][-1] == 2 and line["tree"][0] == 1 else drafts
            ratios = _ratios(systems, system, "requests_per_s")
            rows.append([name, system, *numbers, *ratios, SEED_REQUESTS.get(drafts, "-"), f"`{line['commit']}`"])
    header = ["drafts", "system", "requests/s", "tokens/s", "tokens a step", *_ratio_columns(lines), SEED_OF_REQUESTS]
    return [[*header, "at commit"], *rows] if rows else []


def model_table(lines: Sequence[dict]) -> list[list[str]]:
    """Returns a row for each Qwen3 model, plain and with trees, and system: tokens a second by batch size."""
    by_row: dict[tuple[str, str], dict[int, dict]] = {}
    for (case, batch, *_), systems in newest(lines, MODEL_CASES).items():
        for system, line in systems.items():
            by_row.setdefault((case, system), {})[batch] = line
    rows = []
    for (case, system), found in sorted(by_row.items(), key=lambda item: MODEL_CASES.index(item[0][0])):
        model, drafts = case.split()
        speeds = [f"{found[batch]['tokens_per_s']:.0f}" if batch in found else "-" for batch in QWEN3_BATCHES]
        rows.append([model, drafts, system, *speeds, f"`{next(iter(found.values()))['commit']}`"])
    header = ["model", "drafts", "system", *(f"B = {batch}" for batch in QWEN3_BATCHES)]
    seed = [["4B to 32B", *words] for words in SEED_MODELS]
    return [[*header, "at commit"], *rows, *seed] if rows else []


def tree_table(lines: Sequence[dict]) -> list[list[str]]:
    """Returns a row for each system at each setting of trees in vLLM; nothing without any."""
    rows = []
    for (case, batch, *sampling), systems in newest(lines, VLLM_TREE_NAMES).items():
        for system, line in systems.items():
            alike = [other for other in systems.values() if other["commit"] == line["commit"]]
            chains = [other["tokens_per_s"] for other in alike if other["system"] in CHAINS]
            own = [other["ms_per_step"] for other in alike if other["system"] == OWN and system not in CHAINS]
            speed = f"{line['tokens_per_s'] / max(chains):.2f}×" if chains else "-"
            step = f"{line['ms_per_step'] / own[0]:.2f}×" if own else "-"
            numbers = [f"{line['ms_per_step']:.3f}", f"{line['tokens_per_s']:.0f}", f"{line['accept_length']:.2f}"]
            row = [case.removeprefix("vllm "), str(batch), _sampling(*sampling), system, *numbers]
            rows.append([*row, speed, step, f"`{line['commit']}`"])
    header = ["tree", "B", "sampling", "system", "ms a step", "tokens/s", "tokens a step", "of the best chain"]
    return [[*header, "of EAGLEInference's step", "at commit"], *rows] if rows else []


def profile_table(lines: Sequence[dict]) -> list[list[str]]:
    """Returns rows of each system at each setting that was profiled: all of a step, and its kernels; or nothing."""
    rows = []
    for (case, batch, *sampling), systems in newest(lines, VLLM_ALL, section="profile").items():
        for system, found in systems.items():
            name = [case.removeprefix("vllm "), str(batch), _sampling(*sampling), system]
            times = [f"{found[each]:.3f}" for each in ("gpu_ms", "step_ms", "host_ms")]
            rows.append([*name, "all of a step", f"{found['launches']:.0f} launches", *times, f"`{found['commit']}`"])
            rows += [
                [*name, f"`{kernel}`", f"{calls:g}", f"{ms:.3f}", "", "", ""] for kernel, calls, ms in found["kernels"]
            ]
    header = ["case", "B", "sampling", "system", "kernel", "times", "ms on the GPU", "ms a step", "ms on the host"]
    return [[*header, "at commit"], *rows] if rows else []


def rank_table(lines: Sequence[dict]) -> list[list[str]]:
    """Returns a row for each system at each setting of engines on several GPUs, and on one; nothing without any."""
    rows = []
    for of in sorted({ranks(line) for line in lines}):
        for (case, batch, *sampling), systems in newest(lines, RANK_CASES, of).items():
            for system in systems:
                row = [case, str(batch), _sampling(*sampling), str(of[0]), of[1] or "-", system]
                rows.append(((RANK_CASES.index(case), batch, *sampling), [*row, *_step(systems, system)]))
    rows = [row for _, row in sorted(rows, key=lambda pair: pair[0])]  # those of other GPUs stay in their order
    return [["case", "B", "sampling", "GPUs", "all-reduce", "system", *_step_columns(lines)], *rows] if rows else []


def _in_pairs(line: dict, other: dict) -> str:
    """Returns the time of another system's step as a multiple of a line's, if both were timed at one commit."""
    if other.get("commit") != line["commit"]:
        return "-"
    if line is other or line["system"] == OWN or (line["run"], line["together"]) != (other["run"], True):
        return f"{other['ms_per_step'] / line['ms_per_step']:.2f}×"
    times = [[(long_s - short_s) / steps for short_s, long_s, steps, _ in each["raw"]] for each in (other, line)]
    pairs = sorted(others / own for others, own in zip(*times))
    return f"{statistics.median(pairs):.2f}× ({pairs[0]:.2f} to {pairs[-1]:.2f})"


def acceptance_table(lines: Sequence[dict]) -> list[list[str]]:
    """Returns what the embedded pair's drafts were accepted: a row for each tree, sampling and system."""
    rows = []
    for (case, _, temperature, top_p), systems in newest(lines, PAIR_CASES).items():
        for system, line in systems.items():
            steps, (_, depth, _) = line["accepted"], line["tree"]
            reached = [sum(steps[level:]) / sum(steps) for level in range(1, depth + 1)]
            shares = [f"{share:.1%}" for share in (sum(reached) / depth, *reached)]
            shares += ["-"] * (1 + MOST_LEVELS - len(shares))
            row = [case.removeprefix("pair "), _sampling(temperature, top_p), system, str(sum(steps))]
            rows.append([*row, f"{line['accept_length']:.3f}", *shares, f"`{line['commit']}`"])
    levels = [f"level {level}" for level in range(1, MOST_LEVELS + 1)]
    header = ["tree", "sampling", "system", "steps", "tokens a step", "of all levels", *levels, "at commit"]
    return [header, *rows] if rows else []


def _sampling(temperature: float, top_p: float) -> str:
    return f"temperature {temperature:g}, top-p {top_p:g}" if temperature > 0 else "greedy"


def _ratio_columns(lines: Sequence[dict]) -> list[str]:
    """Returns the titles of `_ratios`; lines tell whether FlashAttention 3 was SGLang's own build."""
    ratios = VLLM_RATIOS if any(line["case"] in VLLM_NAMES for line in lines) else RATIOS
    has_own = any(line["system"] == FA3 and "fa3" not in line["versions"] for line in lines)
    return [title.removesuffix(OF_VLLM) if has_own else title for title in ratios.values()]


def _step_columns(lines: Sequence[dict]) -> list[str]:
    return ["ms a step", "tokens/s", "tokens a step", *_ratio_columns(lines), "at commit"]


def _step(systems: dict[str, dict], system: str) -> list[str]:
    """Returns a system's `_step_columns`."""
    line = systems[system]
    numbers = [f"{line['ms_per_step']:.3f}", f"{line['tokens_per_s']:.0f}", f"{line['accept_length']:.2f}"]
    ratios = _ratios(systems, system)
    if line["case"] in VLLM_NAMES:
        ratios = [_in_pairs(line, systems.get(stock, {})) for stock in VLLM_RATIOS]
    return [*numbers, *ratios, f"`{line['commit']}`"]


def _ratios(systems: dict[str, dict], system: str, what: str = "tokens_per_s") -> list[str]:
    """Returns a system's speed as a multiple of each stock system's, if both were timed at one commit."""
    line, others = systems[system], [systems.get(stock, {}) for stock in RATIOS]
    return [f"{line[what] / other[what]:.2f}×" if other.get("commit") == line["commit"] else "-" for other in others]


def all_tables(lines: Sequence[dict]) -> list[str]:
    """Returns the tables that these lines give, each with what it shows before it."""
    return [
        text
        for about, rows in ((STEPS_ABOUT, table(lines)), (REQUESTS_ABOUT, request_table(lines)),
                            (MODELS_ABOUT, model_table(lines)), (RANKS_ABOUT, rank_table(lines)),
                            (PAIR_ABOUT, acceptance_table(lines)), (VLLM_ABOUT, table(lines, VLLM_NAMES)),
                            (VLLM_TREES_ABOUT, tree_table(lines)), (PROFILES_ABOUT, profile_table(lines)))
        if rows
        for text in (about, markdown(rows))
    ]  # fmt: skip


def front_row(file: Path) -> list[str] | None:
    """Returns README's row of FRONT: the step with the plug-in beside the faster stock system; None without both."""
    systems = newest(full_lines(file)).get(FRONT, {})
    plugged = systems.get(PLUGGED)
    stock = [systems[name] for name in STOCK if name in systems]
    stock = [line for line in stock if plugged is not None and line["commit"] == plugged["commit"]]
    if not stock:
        return None
    stock = min(stock, key=lambda line: line["ms_per_step"])
    case, batch, *_ = FRONT
    name = f"K/S/N={case} B={batch}, 8B model, {plugged['gpu'].removeprefix('NVIDIA ')}"
    ratio = plugged["tokens_per_s"] / stock["tokens_per_s"]
    times = [f"{1e3 * line['ms_per_step']:.0f}" for line in (plugged, stock)]
    return ["SGLang's step, plugged", name, times[0], stock["system"], times[1], f"{ratio:.1f}×"]


def full_lines(file: Path) -> list[dict]:
    """Returns the lines of full measurements at a real shape."""
    return [line for line in read_lines(file) if not line["quick"] and line["shape"] != "small"]


def tables(file: Path) -> list[str]:
    """Returns a section of each engine of other projects that was timed."""
    return [*section(file, "SGLang"), *section(file, "vLLM")]


def section(file: Path, title: str) -> list[str]:
    """Returns a section of the newest full measurements of each system; nothing where there are none."""
    lines, is_vllm = full_lines(file), title == "vLLM"
    kept = [
        line
        for of in sorted({ranks(line) for line in lines})
        for section in (None, "profile")
        for systems in newest(lines, VLLM_ALL if is_vllm else [*CASE_NAMES, *PAIR_CASES], of, section).values()
        for line in systems.values()
    ]
    if not kept:
        return []
    told = []
    for name, package in PACKAGES.items():
        found = sorted({line["versions"][name].partition("+")[0] for line in kept if line["versions"].get(name)})
        if found:
            told.append(f"{package} {' and '.join(found)}")
    drafts = "chains and trees" if any(line["case"] in VLLM_TREE_NAMES for line in kept) else "chains"
    how = f"{drafts} (`--app server --engine vllm`)" if is_vllm else "trees as K/S/N (`--app server`)"
    about = f"Dummy weights, simulated acceptance, {how}. {', '.join(told)}."
    off = "".join(f"\n* {text}" for text in off_stock([line for line in kept if line["case"] in CASE_NAMES]))
    off = [f"Accepted lengths that are more than 1 % off stock's, and speeds with them:\n{off}"] if off else []
    return [f"## {title}, stock and with the plug-in", about, *all_tables(kept), *off]
