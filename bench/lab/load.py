"""The numbers of LOAD.md: `python -m bench.lab.load` writes them into the page, `--check` tells whether they are up to
date.

Steps are those that `python -m bench.run --app generation` and `--app load` have measured; shared budgets are measured
here, with the embedded pair, by `--measure`.
"""

import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from eagle_kernels import EAGLEInference
from eagle_kernels.engine.models.loading import demo_pair
from eagle_kernels.engine.serve.output import GenerationStats
from eagle_kernels.engine.step.choice import Fastest
from eagle_kernels.engine.step.stepper import Verified

from ..apps.load import load_table
from ..harness import results
from ..harness.markdown import fill_page, markdown
from . import experts_touched
from .log import read_lines
from .records import PLAIN, newest_steps

PAGE = Path(__file__).with_name("LOAD.md")
GPU = results.DIRECTORY / "NVIDIA_H100_80GB_HBM3"
PAIR = results.DIRECTORY / "CPU" / "embedded_pair.jsonl"
# rows that a step verifies for a request
ROWS = {"plain": 1, "naive_eagle": 2, "chain 3": 4, "tree 8/5/64": 64}
# steps after which a choice has settled
SETTLED = 400
# temperature, (topk, num_steps, num_draft_tokens), mean_draft_tokens
SHARED = [(heat, *each) for heat in (0.0, 0.8) for each in (((4, 4, 16), 4), ((4, 4, 32), 8), ((8, 5, 64), 16))]
# (topk, num_steps, num_draft_tokens, mean_draft_tokens) of steps that are weighed against each other
WEIGHED = (
    (1, 1, 2, None), (1, 3, 4, None), (1, 5, 6, 4), (4, 3, 8, None), (8, 5, 32, 8), (4, 4, 16, None), (8, 5, 64, 16),
    (8, 5, 64, None),
)  # fmt: skip
# probabilities of drafts that are counted together
LIKELY_FROM = (0.0, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 1.01)
NUM_PROMPTS, NEW_TOKENS = 16, 96
Steps = Mapping[str, Mapping[int, Mapping]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    return fill_page("bench.lab.load", PAGE, arguments, parts, measure)


def measure() -> None:
    """Measures what is of the embedded pair."""
    tables = {"budgets": shared_budgets, "accepted": accepted_tokens, "likely": likely_drafts}
    measured = [{"table": name} | line for name, measure in tables.items() for line in measure()]
    PAIR.write_text("".join(json.dumps(line) + "\n" for line in measured), encoding="utf-8")


def parts() -> dict[str, str]:
    """Returns what stands between the marks of the page."""
    pair: dict[str, list[dict]] = {}
    for line in read_lines(PAIR):
        pair.setdefault(line["table"], []).append(line)
    steps = measured_steps(read_lines(GPU / "generation.jsonl"))
    loads = [line for line in read_lines(GPU / "load.jsonl") if line["shape"] == "llama-3.1-8b"]
    return {
        "steps": step_table(steps),
        "even": even_table(steps),
        "choice": choice_table(steps),
        "joint": joint_table(read_lines(GPU / "prompt_rows.jsonl")),
        "budgets": budget_table(pair["budgets"]),
        "likely": likely_table(pair["likely"]),
        "worth": worth_table(read_lines(GPU / "tree_steps.jsonl"), pair["accepted"]),
        "load": load_table(loads),
        "experts": experts_touched.table(read_lines(experts_touched.RESULTS)),
    }


def measured_steps(lines: Sequence[Mapping]) -> Steps:
    """Returns the newest line of each preset and number of requests, of the 8B shape."""
    steps: dict[str, dict[int, Mapping]] = {name: {} for name in ROWS}
    for line in newest_steps(lines):
        if line["shape"] == "llama-3.1-8b" and line["provider"] in ROWS:
            steps[line["provider"]][int(line["case"].removeprefix("B="))] = line
    return steps


def step_table(steps: Steps) -> str:
    """Returns the milliseconds of a step by preset and number of requests."""
    table = [["requests", *(f"{name}, {rows} rows each" for name, rows in ROWS.items())]]
    for size in steps[PLAIN]:
        table.append([str(size), *(f"{steps[name][size]['step_ms']:.2f}" for name in ROWS)])
    return markdown(table)


def needed(steps: Steps, name: str, size: int) -> float:
    """Returns the tokens that a step of a preset has to bring a request to be as fast as plain decoding."""
    return steps[name][size]["step_ms"] / steps[PLAIN][size]["step_ms"]


def even_table(steps: Steps) -> str:
    """Returns these tokens by preset and number of requests; a dash where they are more than a step can bring."""
    most = {"naive_eagle": 2, "chain 3": 4, "tree 8/5/64": 6}
    table = [["requests", *(f"{name}, at most {count}" for name, count in most.items())]]
    for size in steps[PLAIN]:
        tokens = {name: needed(steps, name, size) for name in most}
        table.append([str(size), *(f"{tokens[name]:.2f}" if tokens[name] <= most[name] else "-" for name in most)])
    return markdown(table)


def chosen(steps: Steps, size: int, share: float) -> int:
    """Returns the rows of a request that `adaptive="auto"` settles on, if each preset brings `share` of the tokens that
    it brought in the measurement beyond the first."""
    names = list(ROWS)
    tokens = [1 + share * (steps[name][size]["accept_length"] - 1) for name in names]
    choice = Fastest([1, 2, 4, 6], None)
    for _ in range(SETTLED):
        number = choice.choose(size)
        choice.note(number, size, steps[names[number]][size]["step_ms"], tokens[number])
    return ROWS[names[choice.choose(size)]]


def choice_table(steps: Steps) -> str:
    """Returns the rows of a request that the automatic choice settles on."""
    shares = (1.0, 0.5, 0.25, 0.0)
    table = [["requests", *(f"{share:.0%} of the drafts that were accepted" for share in shares)]]
    for size in steps[PLAIN]:
        table.append([str(size), *(str(chosen(steps, size, share)) for share in shares)])
    return markdown(table)


def joint_table(lines: Sequence[Mapping]) -> str:
    """Returns the milliseconds of a step by the rows of prompts that it has beside its own."""
    kinds = {(line["provider"], line["batch"], line["rows"]): {} for line in lines}
    for line in lines:
        kinds[line["provider"], line["batch"], line["rows"]][line["prompt_rows"]] = line["step_ms"]
    sizes = sorted(next(iter(kinds.values())))
    table = [["step", "requests", "its own rows", *(f"{size} of prompts" for size in sizes)]]
    for (name, *numbers), times in kinds.items():
        table.append([name, *map(str, numbers), *(f"{times[size]:.2f}" for size in sizes)])
    return markdown(table)


def budget_table(lines: Sequence[Mapping]) -> str:
    """Returns the tokens of a step where trees have one size, and where they share the same number of rows."""
    table = [["temperature", "rows of a request", "the same for each", "up to", "shared", "gain"]]
    for line in lines:
        each, shared = line["each"], line["shared"]
        numbers = [f"{line['temperature']:g}", str(line["mean"]), f"{each:.3f}", str(line["most"]), f"{shared:.3f}"]
        table.append([*numbers, f"{shared / each - 1:+.1%}"])
    return markdown(table)


def worth_table(times: Sequence[Mapping], accepted: Sequence[Mapping]) -> str:
    """Returns the tokens a second beside plain decoding: of steps as measured, and tokens as the pair accepts them."""
    tokens = {tuple(line["tree"]): line["tokens"] for line in accepted}
    steps_ms: dict[int, dict[tuple | None, float]] = {}
    for line in times:
        steps_ms.setdefault(line["batch"], {})[line["tree"] and tuple(line["tree"])] = line["graph_ms"]
    table = [["requests", *map(_name, WEIGHED)]]
    for size, ms in steps_ms.items():
        table.append([str(size), *(f"{tokens[tree] * ms[None] / ms[tree]:.2f}" for tree in WEIGHED)])
    return markdown(table)


def likely_table(lines: Sequence[Mapping]) -> str:
    """Returns how many of the drafts were accepted that the draft model found as likely as a row says."""
    heats = list(dict.fromkeys(line["temperature"] for line in lines))
    bins: dict[float, list[str]] = {}
    for line in lines:
        shares = (f"{line[name]:.3f}" for name in ("said", "accepted"))
        bins.setdefault(line["from"], []).extend([str(line["drafts"]), *shares])
    of_heats = [f"{what}, temperature {heat:g}" for heat in heats for what in ("drafts", "said", "accepted")]
    return markdown([["probability from", *of_heats], *([f"{least:g}", *row] for least, row in bins.items())])


def _name(tree: Sequence[int | None]) -> str:
    *sizes, most, mean = tree
    return "/".join(map(str, (*sizes, most))) + ("" if mean is None else f", {mean} rows")


def shared_budgets(**sizes: int) -> list[dict]:
    """Measures the tokens of a step of the embedded pair, with equal numbers of nodes and with shared ones."""
    count, lines = counter(**sizes), []
    for temperature, (topk, num_steps, most), mean in SHARED:
        each, shared = (count((topk, num_steps, *nodes), temperature) for nodes in ((mean, None), (most, mean)))
        lines.append({"temperature": temperature, "mean": mean, "most": most, "each": each, "shared": shared})
    return lines


def accepted_tokens(**sizes: int) -> list[dict]:
    """Measures the tokens of each kind of step that is weighed, of the embedded pair at temperature 0.8."""
    count = counter(**sizes)
    return [{"tree": tree, "tokens": count(tree, 0.8)} for tree in WEIGHED]


def likely_drafts(num_prompts: int = NUM_PROMPTS, new_tokens: int = NEW_TOKENS) -> list[dict]:
    """Measures how many drafts of trees of 64 nodes are accepted, by their probability with all above them."""
    (engine, prompts), lines = _pair(num_prompts), []
    seen: list[torch.Tensor] = []  # [2, drafts]: probability, and whether a draft was accepted

    def look(verified: Verified) -> None:
        probs, index = verified.proposal.path_probs(), verified.committed.accept_index
        accepted = torch.zeros(probs.numel() + len(probs) + 1)
        accepted[torch.where(index < 0, len(accepted) - 1, index).flatten().long()] = 1
        accepted = accepted[:-1].view(len(probs), -1)[:, 1:]
        is_counted = (verified.batch.is_live > 0)[:, None] & ~probs.isnan()
        seen.append(torch.stack([probs[is_counted], accepted[is_counted]]))

    engine.on_tree = look
    for temperature in (0.0, 0.8):
        seen.clear()
        _decode(engine, prompts, new_tokens, temperature, (8, 5, 64, None))
        probs, accepted = torch.cat(seen, 1)
        for least, most in itertools.pairwise(LIKELY_FROM):
            is_in = (probs >= least) & (probs < most)
            said, kept = (round(values[is_in].mean().item(), 4) for values in (probs, accepted))
            about = {"temperature": temperature, "from": least, "drafts": int(is_in.sum())}
            lines.append(about | {"said": said, "accepted": kept})
    return lines


def counter(num_prompts: int = NUM_PROMPTS, new_tokens: int = NEW_TOKENS) -> Callable[[tuple, float], float]:
    """Returns a function of a tree with its mean and of a temperature, which gives the tokens of a step."""
    engine, prompts = _pair(num_prompts)

    def count(tree: tuple, temperature: float) -> float:
        stats = _decode(engine, prompts, new_tokens, temperature, tree)
        return round(1 + stats.accepted / stats.steps, 4)

    return count


def _pair(num_prompts: int) -> tuple[EAGLEInference, list[list[int]]]:
    """Returns an engine of the embedded pair, and its prompts."""
    target, draft = demo_pair()
    texts = json.loads((target.parent / "prompts.json").read_text(encoding="utf-8"))[:num_prompts]
    return EAGLEInference.from_pretrained(draft, target, device="cpu"), [list(text.encode()) for text in texts]


def _decode(engine: EAGLEInference, prompts: list, new_tokens: int, temperature: float, tree: tuple) -> GenerationStats:
    fields = dict(zip(("topk", "num_steps", "num_draft_tokens", "mean_draft_tokens"), tree))
    wanted = {"temperature": temperature, "seeds": list(range(len(prompts))), "max_batch": len(prompts)}
    return engine.generate(prompts, new_tokens, progress=False, **fields, **wanted).stats


if __name__ == "__main__":
    sys.exit(main())
