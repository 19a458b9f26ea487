"""A server's steps: `python -m bench.run --app server [--engine vllm] [--sglang FOLDER] [--case NAME ...]`.

Times SGLang's own engine or vLLM's, stock and with our plug-in, and EAGLEInference, at the shape of Llama-3.1-8B with
an EAGLE-3 head, and of Qwen3 models: dummy weights in bf16, random prompts, simulated acceptance; batches of equal
requests, and 500 of different lengths (`requests ...`, SGLang alone). Prints a table and writes JSON lines to
`results/<gpu>/server.jsonl`. A system that cannot run says why, and the others run.

    sglang+flashinfer     the attention that SGLang chooses on NVIDIA for trees with more than one branch
    sglang+triton         the attention that it chooses on AMD
    sglang+fa3            FlashAttention 3, which it chooses on Hopper without trees and with one branch; vLLM's build
                          where SGLang's own is missing
    sglang+eagle_kernels  the plug-in, the parts that its flag turns on
    sglang+match          the plug-in by sample and match, where it samples
    vllm+fa3              FlashAttention 3, which vLLM chooses on Hopper
    vllm+triton           its Triton backend, which is not the default on Hopper
    vllm+fa3 chain3       and chain5, chain7: its chains, beside the plug-in's trees, which vLLM has not
    vllm+eagle_kernels    the plug-in, all its parts
    eagle_kernels         EAGLEInference, without a server

All SGLang systems of a case draw the same accepted lengths, EAGLEInference simulates the mean that stock had: the exit
status is 1 where an accepted length is more than 1 % (vLLM's: and chance) off each stock system's, or an engine failed.

`--engine vllm` decodes plainly and drafts chains, with prompts of 512 and 8,192 tokens, and times the first token of
the latter, in place of a step; then trees, beside vLLM's own chains. An engine is started once for all cases with its
drafts, all systems `--together`. Last, cases of the embedded pair, its prompts and what it really accepts.

`--tp 2` gives each engine two GPUs; those of SGLang have cases of their own, of an 8B and a 32B shape. EAGLEInference
runs on one GPU and is left out. Tables keep these lines apart.

`--check-only` compares texts in the place of this, and needs no options of the above but the folders: server_texts.py.
"""

import argparse
import contextlib
import re
import statistics
import tempfile
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch

from ..harness import results
from ..peers import engine, fa3, sglang_engine, vllm_engine
from ..peers.engine import ALL_REDUCES, EngineFailure, Installation, TimedOrder
from . import generation, prefixes, server_tables, server_texts
from .server_cases import (
    CHAINS,
    ENGINES,
    EVERY_CASE,
    EVERY_SYSTEM,
    MATCH,
    OWN,
    PAIR,
    RANK_CASES,
    STOCK,
    Case,
    models,
    ranks_of,
)
from .server_rows import ROWS
from .server_tables import TOLERANCE, all_tables, off_stock, setting

# tokens of the generations between which the slope is taken: of the shorter one, and of the longer one at most
SHORT, QUICK_LONG, PLAIN_LONG = 48, 176, 304
REPEATS = 3
# of an engine; SGLang needs about a minute to start, and FlashInfer compiles for some more the first time
LIMIT_S = 900.0
GPU_SHARE = 0.9  # of its memory, for the engines of vLLM that are there together
OWN_ROOM = 4096  # tokens after a prompt that EAGLEInference may hold
PAIR_REPEATS = 10  # whose prompts differ, and so does what is accepted
# prompts of the small shape, which tests use, are shorter by this
SMALLER = 16
QUICK_REQUESTS = 64


tables = server_tables.tables


class Bench:
    """Runs systems and keeps their lines; failures are told and counted."""

    def __init__(self, options: argparse.Namespace, directory: Path | None, about: dict):
        self.options, self.directory, self.about = options, directory, about
        self.is_vllm = options.engine == "vllm"
        self.installation = Installation(getattr(options, options.engine), options.flashinfer, options.engine)
        self.flashinfer = self.installation.flashinfer_version()
        self.others_use_flashinfer = self.flashinfer is not None
        self.lines: list[dict] = []
        self.profiles: list[dict] = []
        self.num_failures, self.num_together = 0, 1
        self._models: generation.Bench | None = None
        self._writing = threading.Lock()  # of engines that are there together

    def shape(self, case: Case) -> str:
        return case.shape if case.is_pair else self.options.shape or case.shape

    def prompt_tokens(self, case: Case) -> int:
        return case.prompt_tokens // SMALLER if self.shape(case) == "small" else case.prompt_tokens

    def requests(self, case: Case) -> list[tuple[int, int]]:
        if self.options.quick:
            return [(prompt // SMALLER, text // SMALLER) for prompt, text in case.requests[:QUICK_REQUESTS]]
        return list(case.requests)

    def lengths(self, case: Case) -> tuple[int, int]:
        if case.requests:
            return 0, max(text for _, text in self.requests(case))
        long = case.long if case.tree is not None else min(case.long, PLAIN_LONG)
        return SHORT if long > 1 else 0, min(long, QUICK_LONG) if self.options.quick else long

    def repeats(self, case: Case) -> int:
        return 1 if self.options.quick else max(self.options.repeats, PAIR_REPEATS * case.is_pair)

    def order(self, case: Case, system: str, turns: Path | None = None, also: Sequence[Case] = ()) -> TimedOrder:
        """Returns what an engine is to do. turns: as of `engine.TimedOrder`. also: cases that it is timed with too."""
        model, head = models(self.shape(case))
        tree, accept = case.drafts_of(system)
        asked = {
            "model": model, "draft": head,
            # sampled first, all systems at the same time: sample and match has nothing else
            "sampling": tuple(sorted(case.sampling_of(system), reverse=True)), "batches": case.batches,
            "prompt_tokens": self.prompt_tokens(case), "lengths": self.lengths(case), "repeats": self.repeats(case),
            "requests": self.requests(case), "prompts": case.prompts, "turns": turns, "tree": tree, "accept": accept,
            "tp": self.options.tp, "all_reduce": self.options.all_reduce, "case": case.name,
            "also": [self.order(other, system, turns) for other in also], "profile": self.options.profile,
        }  # fmt: skip
        if self.is_vllm:
            backend = vllm_engine.FA3 if system in CHAINS else STOCK.get(system, vllm_engine.CUSTOM)
            return vllm_engine.Order(
                backend, **asked, share=round(GPU_SHARE / self.num_together, 3),
                has_trees=case.is_beside_chains and system not in CHAINS,
                # engines that start together must not share a folder
                compiled="-".join([backend, *(map(str, tree) if case.is_beside_chains else ())]),
            )  # fmt: skip
        backend, rule = STOCK.get(system, engine.PLUGIN), "match" if system == MATCH else None
        return sglang_engine.Order(backend, **asked, rule=rule)

    def run_engines(self, cases: Sequence[Case], systems: Sequence[str]) -> None:
        """Runs an engine for each system and its drafts, with all cases that have them: one after the other, or all,
        which generate in turn."""
        engines: dict = {}
        for system, case in product(systems, cases):
            if case.sampling_of(system):
                engines.setdefault((system, case.drafts_of(system)[0]), []).append(case)
        if not self.options.together:
            for (system, _), alike in engines.items():
                self.run_engine(alike, system, threading.Barrier(1), None)
        elif engines:
            self.num_together, all_here = len(engines), threading.Barrier(len(engines))
            with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(engines)) as pool:
                turns = Path(folder) / "turns"
                run = lambda engine: self.run_engine(engines[engine], engine[0], all_here, turns)  # noqa: E731
                list(pool.map(run, engines))

    def run_engine(self, cases: Sequence[Case], system: str, all_here: threading.Barrier, turns: Path | None) -> None:
        """Runs one engine for all batch sizes and temperatures of some cases.

        all_here: where engines wait for each other, so that none is timed while another starts or is gone already.
        turns: as of `engine.TimedOrder`.
        """
        case, *also = cases
        is_flashinfer = STOCK.get(system) == "flashinfer"
        with_flashinfer = self.flashinfer is not None if is_flashinfer else self.others_use_flashinfer
        log = self.options.logs / f"{re.sub('[^A-Za-z0-9.]', '_', f'{case.name}_{system}')}.txt"
        start_s, versions, meetings, named = None, {}, ["started", "done"], {other.name: other for other in also}
        try:
            order = self.order(case, system, turns, also)
            running = engine.run(order, self.installation, log, self.options.limit, with_flashinfer)
            with contextlib.closing(running) as records:
                for record in records:
                    kind = record.pop("kind")
                    if kind in meetings:
                        meetings.remove(kind)
                        all_here.wait()
                    of = named.get(record.pop("case", ""), case)
                    if kind == "started":
                        start_s, versions = record["start_s"], record["versions"]
                    elif kind == "measured":
                        self.record(of, system, record | {"start_s": start_s, "versions": versions})
                    elif kind == "profiled":
                        about = {"shape": self.shape(of), "case": of.name, "system": system, "section": "profile"}
                        about |= {"versions": versions} | ranks_of(self.options.tp, self.options.all_reduce)
                        self.profiles.append(self.keep(about | record))
                    elif kind == "failed":
                        self.fail(of, system, f"B={record['batch']} T={record['temperature']}: {record['error']}")
        except EngineFailure as failure:
            self.fail(case, system, str(failure))
            if is_flashinfer and self.others_use_flashinfer:
                self.others_use_flashinfer = False
                print("from here on the other systems run without FlashInfer", flush=True)
        finally:
            for _ in meetings:
                all_here.wait()

    def run_own(self, case: Case) -> None:
        """Times EAGLEInference; what goes wrong is told."""
        try:
            self._time_own(case)
        except Exception:
            self.fail(case, OWN, traceback.format_exc())

    def _time_own(self, case: Case) -> None:
        """Times the number of tokens that SGLang makes, with the mean acceptance that stock had, where it was run."""
        for batch in case.batches:
            for temperature, top_p in case.sampling_of(OWN):
                line = {"case": case.name, "batch": batch, "temperature": temperature, "top_p": top_p}
                stock = [other for other in self.lines if other["system"] in STOCK and setting(other) == setting(line)]
                wanted = accept = (stock[0]["accept_length"] if stock else case.accept) if case.tree else 1.0
                for _ in range(1 if self.options.quick else 2):
                    raw = self._own_steps(case, batch, wanted, accept, (temperature, top_p))
                    length = statistics.mean(n for _, n in raw)
                    if abs(length / wanted - 1) <= TOLERANCE / 2:
                        break
                    accept *= wanted / length  # the first path of a tree may be less deep than was drawn
                numbers = {
                    "ms_per_step": statistics.median(step_ms for step_ms, _ in raw),
                    "tokens_per_s": round(statistics.median(1e3 * batch * n / step_ms for step_ms, n in raw), 2),
                    "accept_length": round(length, 4),
                }
                self.record(case, OWN, line | numbers | {"raw": raw})

    def _own_steps(
        self, case: Case, batch: int, wanted: float, accept: float, sampling: tuple[float, float]
    ) -> list[list[float]]:
        """Returns the time of a step and the tokens of a request in it, for each repeat."""
        bench, (short, long) = self.models(self.shape(case)), self.lengths(case)
        bench.prompt_tokens = self.prompt_tokens(case)
        bench.steps = max(1, round((long - short) / wanted))
        own = bench.engine(batch, case.tree, accept, max_length=bench.prompt_tokens + OWN_ROOM)
        if not short:  # until the first token; the first time compiles
            prompts = torch.randint(bench.target.vocab_size, (batch, bench.prompt_tokens)).tolist()
            return [[prefixes.serve(own, prompts, 1, shares=False)[0], 1.0] for _ in range(1 + self.repeats(case))][1:]
        chosen = dict(zip(("temperature", "top_p"), sampling)) if sampling[0] > 0 else {}
        raw = []
        for repeat in range(self.repeats(case)):
            seeds = [repeat * batch + request for request in range(batch)]
            step_ms, length = bench.step_ms(own, batch, is_plain=case.tree is None, seeds=seeds, **chosen)
            raw.append([round(step_ms, 4), round(length, 4)])
        return raw

    def models(self, shape: str) -> generation.Bench:
        """Returns our own models, which are made when no other engine needs the GPU any longer."""
        if self._models is None or self._models.shape != shape:
            self._models = None  # which frees those of another shape
            longest = max(map(self.prompt_tokens, EVERY_CASE)) + OWN_ROOM
            self._models = generation.Bench(shape, self.about["device"], steps=1, prompt_tokens=1, max_length=longest)
        return self._models

    def record(self, case: Case, system: str, numbers: dict) -> None:
        """Keeps a line, prints it, and adds it to the results of this GPU."""
        line = {"shape": self.shape(case), "case": case.name, "system": system}
        line |= {"prompt_tokens": self.prompt_tokens(case), "tree": case.drafts_of(system)[0], "start_s": None}
        line |= ranks_of(self.options.tp, self.options.all_reduce) | numbers
        name = f"{case.name:8} B={line['batch']:<3} T={line['temperature']:<4g} {system:22}"
        time = f"{line['requests_per_s']:9.3f} requests/s" if case.requests else f"{line['ms_per_step']:9.3f} ms"
        shown = f"tokens_per_s {line['tokens_per_s']:.1f}, accept_length {line['accept_length']:.3f}"
        print(f"{name} {time}   {shown}", flush=True)
        self.lines.append(self.keep(line))

    def keep(self, line: dict) -> dict:
        """Appends a line to the results of this GPU; returns it with what all lines of the run tell."""
        line = {"op": "server"} | line | {"versions": results.versions() | line.get("versions", {})}
        line |= {name: self.about[name] for name in ("gpu", "commit", "run")}
        line |= {"quick": self.options.quick, "together": self.options.together}
        with self._writing:
            if self.directory is not None:
                results.append(self.directory, line)
        return line

    def fail(self, case: Case, system: str, text: str) -> None:
        self.num_failures += 1
        print(f"{case.name} {system}: {text}", flush=True)


def main(arguments: Sequence[str], directory: Path | None, commit: str) -> int:
    """Runs what is asked for; returns the exit status."""
    options = parsed(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and options.shape is None:
        print("a model of this size needs a GPU")
        return 2
    if options.tp > 1 and device.type == "cuda" and torch.cuda.device_count() < options.tp:
        print(f"--tp {options.tp}: this machine has {torch.cuda.device_count()} GPUs")
        return 2
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    about = {"gpu": gpu, "commit": commit, "run": results.new_run(), "device": device}
    bench = Bench(options, directory if device.type == "cuda" else None, about)
    missing = f"{ENGINES[options.engine][0]} is not installed; --{options.engine} names a folder that holds it"
    if options.check_only:
        if not bench.installation.is_here():
            print(missing)
            return 2
        return server_texts.check(options, bench.installation, bench.keep)
    options.limit = options.limit or LIMIT_S
    systems = [system for system in EVERY_SYSTEM if system in options.system]
    if options.tp > 1 and OWN in systems:
        print(f"{OWN}: EAGLEInference runs on one GPU, and is left out of --tp {options.tp}")
        systems.remove(OWN)
    cases = [case for case in EVERY_CASE if case.name in options.case]
    if not bench.installation.is_here() and any(system != OWN for system in systems):
        print(missing)
        systems = [system for system in systems if system == OWN]
    if "sglang+flashinfer" in systems and bench.flashinfer is None:
        print("sglang+flashinfer: FlashInfer is not installed; --flashinfer names a folder that holds it")
        systems.remove("sglang+flashinfer")
    for system in [system for system in systems if "+fa3" in system]:
        if missing := missing_fa3(bench.installation, device):
            print(f"{system}: {missing}")
            systems.remove(system)
    options.system = systems
    of_engine: dict = {}  # vLLM needs a minute and more to start: once for all cases with the same drafts
    for case in cases:
        drafts = PAIR if case.is_pair else case.tree  # the pair's engines are small, and are all there together
        of_engine.setdefault(drafts if bench.is_vllm else case.name, []).append(case)
    for alike in of_engine.values():
        bench.run_engines(alike, [system for system in systems if system != OWN])
    if OWN in systems:
        for case in cases:
            if not case.requests:
                bench.run_own(case)
    if bench.lines:
        print("\n\n".join(["", *all_tables([*bench.lines, *bench.profiles])]), flush=True)
    # EAGLEInference draws for itself: of few steps, the mean is a matter of chance
    faults = off_stock([line for line in bench.lines if not (options.quick and line["system"] == OWN)])
    print("".join(f"{fault}\n" for fault in faults), end="", flush=True)
    return int(bool(faults) or bench.num_failures > 0)


def missing_fa3(installation: Installation, device: torch.device) -> str | None:
    """Returns why an engine cannot use FlashAttention 3 here; None where it can. vLLM has its own build."""
    if installation.package == "sglang" and not installation.has_own_fa3() and fa3.find_library() is None:
        return "neither SGLang's own build (sgl_kernel/flash_ops) nor vLLM's (.peers/vllm_fa3.so) is here"
    if device.type == "cuda" and not fa3.is_hopper():
        return "FlashAttention 3 needs a Hopper GPU"
    return None


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.run --app server", description=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--engine", choices=ENGINES, default="sglang", help="whose engine is timed (%(default)s)")
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="where vLLM is, if Python does not find it")
    names = [case.name for case in EVERY_CASE]
    parser.add_argument("--sglang", type=Path, metavar="FOLDER", help="where SGLang is, if Python does not find it")
    parser.add_argument("--flashinfer", type=Path, metavar="FOLDER", help="where FlashInfer is, likewise")
    parser.add_argument("--case", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--system", nargs="+", choices=EVERY_SYSTEM, metavar="NAME", help="as listed above")
    together = "start a case's engines at once, and time them in turn, as those of vLLM always are"
    parser.add_argument("--together", action="store_true", help=together)
    ranks = f"GPUs of an engine; SGLang's cases of several: {', '.join(RANK_CASES)}"
    parser.add_argument("--tp", type=int, default=1, help=ranks)
    add_up = "how several GPUs add up: by the engine's own kernel, where that works, or by NCCL"
    parser.add_argument("--all-reduce", choices=ALL_REDUCES, default=ALL_REDUCES[0], help=add_up)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="slopes of which the median counts (%(default)s)")
    profile = "tell where the time of a step goes, on the GPU and on the host (vLLM's)"
    parser.add_argument("--profile", action="store_true", help=profile)
    parser.add_argument("--quick", action="store_true", help="once and shorter; the tables leave such lines out")
    parser.add_argument("--limit", type=float, help="seconds that an engine may take, without waiting")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="for logs of engines (default: a temporary one)")
    parser.add_argument("--shape", choices=["small"], help="for tests, in place of the cases' own")
    check = parser.add_argument_group("texts", "the plug-in's texts against stock's, of the embedded pair")
    check.add_argument("--check-only", action="store_true", help="compare texts and acceptance, and time nothing")
    rows = {engine: [row.name for row in found if row.reference != row.name] for engine, found in ROWS.items()}
    check.add_argument("--row", nargs="+", metavar="NAME", help=", ".join([*rows["sglang"], "vLLM's:", *rows["vllm"]]))
    soak = "seconds of random requests in each row, most of them like others, aborted or preempted (vLLM's)"
    check.add_argument("--soak", type=float, metavar="SECONDS", help=soak)
    check.add_argument("--jobs", type=int, default=1, help="engines that run at once")
    check.add_argument("--dtype", choices=list(server_texts.ROUNDING), default="float16", help="of models and KV")
    options = parser.parse_args(arguments)
    for name in ("jobs", "tp", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: at least 1; got {getattr(options, name)}")
    _, systems, cases = ENGINES[options.engine]
    of_engine = [case.name for case in cases]
    of_ranks = RANK_CASES if options.tp > 1 and options.engine == "sglang" else of_engine
    options.case = options.case or of_ranks
    options.system = options.system or systems
    options.row = options.row or rows[options.engine]
    options.together |= options.engine == "vllm"
    of_engine = {"case": of_engine, "system": systems, "row": rows[options.engine]}
    for name, known in of_engine.items():
        chosen = getattr(options, name)
        if others := [each for each in chosen if each not in known]:
            parser.error(f"--{name}: of --engine {options.engine} are {', '.join(known)}; got {', '.join(others)}")
    if options.profile and options.engine != "vllm":
        parser.error("--profile: of --engine vllm alone")
    if others := [name for name in options.case if name not in of_ranks]:
        parser.error(f"--tp: cases are {', '.join(of_ranks)}; got {', '.join(others)}")
    for name in ("sglang", "flashinfer", "vllm"):
        folder = getattr(options, name)
        if folder is not None and not folder.is_dir():
            parser.error(f"--{name}: no folder {folder}")
    options.logs = (options.logs or Path(tempfile.mkdtemp(prefix="server_logs_"))).resolve()
    return options
