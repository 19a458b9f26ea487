"""A server's engine in a child process that is ended at its limit: what is common to all engines.

sglang_engine.py and vllm_engine.py tell how theirs is started, sglang_child.py and vllm_child.py run it in the process.

An engine is what Python finds, or what lies in a folder (`pip install --target FOLDER sglang`). The plug-in of this
checkout is shown to it as an installed package would be; stock engines are told to load none of ours.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from . import engine_child

ROOT = Path(__file__).parents[2]
PLUGIN = "eagle_kernels"  # the plug-in's name
# beginnings of names that would change an engine, and are told to each
TOLD = ("EAGLE_KERNELS_SGLANG", "EAGLE_KERNELS_VLLM", "EAGLE_KERNELS_BACKEND", "TRITON_INTERPRET", "SGLANG_PLUGINS",
        "SGLANG_SIMULATE_ACC_", "SGLANG_IS_FLASHINFER_AVAILABLE")  # fmt: skip
OFFLINE = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # else each of an engine's processes compiles all of its package
}  # fmt: skip
# How the GPUs of an engine add up: by its own kernel, or by NCCL. Where the former cannot be used, an engine may take
# NCCL instead and say so in its log.
ALL_REDUCES = ("own", "nccl")
MODELS = Path(tempfile.gettempdir(), "eagle_kernels_models")
ROOM = 512  # tokens for drafts
POLL_S = 0.1
GONE_S = 10.0  # how long the killed processes of an engine may take to leave the GPU


class EngineFailure(Exception):
    """What went wrong in a child process, with its first traceback."""


class Installation(NamedTuple):
    """Folders in front of those where this Python looks; FlashInfer's comes first, since SGLang's may hold one too."""

    engine: Path | None = None
    flashinfer: Path | None = None
    package: str = "sglang"

    def folders(self, with_flashinfer: bool = True) -> list[Path]:
        """Returns the folders that were given."""
        given = [self.flashinfer if with_flashinfer else None, self.engine]
        return [folder.resolve() for folder in given if folder is not None]

    def is_here(self) -> bool:
        """Tells whether the engine is there, without importing it."""
        return self._found(self.package) is not None

    def has_own_fa3(self) -> bool:
        """Tells whether the kernels of SGLang hold its build of FlashAttention 3."""
        kernels = self._found("sgl_kernel")
        folders = [] if kernels is None else kernels.submodule_search_locations or []
        return any(file for folder in folders for file in Path(folder).glob("flash_ops*"))

    def _found(self, package: str) -> ModuleSpec | None:
        return PathFinder.find_spec(package, [*map(str, self.folders()), *sys.path])

    def flashinfer_version(self) -> str | None:
        """Returns the version of the FlashInfer that an engine would find; None without one."""
        paths = [*map(str, self.folders()), *sys.path]
        found = next(iter(distributions(name="flashinfer-python", path=paths)), None)
        return None if found is None else found.version


@dataclass(frozen=True)
class AnyOrder:
    """What an engine is started with: timed, or to serve texts that are compared.

    Each engine's adds `asked`, parts for the plug-in's variable (None: left unset; empty: a stock engine), `needed`,
    the parts that must be in use, `for_child`, which returns what `engine_child.py` reads, `write_plugins`, which
    writes the packages of plug-ins into a folder, and `environment`, that of an engine's process with this folder.
    """

    backend: str  # of attention
    _: KW_ONLY
    tree: tuple[int, int, int] | None = None  # topk, steps, nodes; None: plain decoding
    accept: float | None = None  # mean tokens of a step that the engine simulates
    tp: int = 1  # GPUs of the engine
    all_reduce: str = ALL_REDUCES[0]  # how they add up

    scripts: ClassVar[tuple[str, ...]]  # the file with the engine, and what it imports

    @property
    def is_plugged(self) -> bool:
        return self.asked != ""

    @property
    def allowed(self) -> frozenset[str]:
        """The parts that may be in use."""
        return self.needed

    def write_models(self, folder: Path) -> None:
        """Writes what the engine does not load from where it is."""

    def fault(self, log: str) -> str | None:
        """Returns what the log says against the engine, if anything."""


@dataclass(frozen=True)
class TimedOrder(AnyOrder):
    """One engine and what it generates; unless prompts are given, its weights are dummies, its texts mean nothing."""

    model: dict[str, Any]  # config.json of the target
    draft: dict[str, Any]  # and of the EAGLE-3 head
    batches: Sequence[int]
    sampling: Sequence[tuple[float, float]]  # temperatures with their top-p
    prompt_tokens: int
    lengths: tuple[int, int]
    repeats: int
    requests: Sequence[tuple[int, int]] = ()  # lengths of prompts and texts, sent at once in place of equal batches
    prompts: Sequence[Sequence[int]] = ()  # of the embedded pair, which is loaded, by turns; empty: random ones
    case: str = ""
    also: Sequence["TimedOrder"] = ()  # what this engine is timed with besides
    turns: Path | None = None  # a file that engines share of which one generates at a time
    profile: bool = False  # tell where the time of a step goes

    @property
    def context_length(self) -> int:
        """The longest text and room for drafts, in whole thousands."""
        longest = max(each.prompt_tokens + each.lengths[1] for each in (self, *self.also))
        return -(-(longest + ROOM) // 1024) * 1024

    def for_child(self, folder: Path) -> dict[str, Any]:
        """Returns what `engine_child.py` reads."""
        return {
            "engine": self.engine_arguments(folder), "vocab_size": self.model["vocab_size"], "case": self.case,
            "batches": list(self.batches), "prompt_tokens": self.prompt_tokens, "lengths": list(self.lengths),
            "sampling": [{"temperature": temperature, "top_p": top_p} for temperature, top_p in self.sampling],
            "repeats": self.repeats, "is_speculative": self.tree is not None, "requests": list(self.requests),
            "prompts": list(self.prompts), "profile": self.profile,
            "turns": self.turns and str(self.turns), "also": [other.for_child(folder) for other in self.also],
        }  # fmt: skip

    def write_models(self, folder: Path) -> None:
        """Writes the folders of the two models: a config.json each, the engine makes the weights."""
        for name, config in (("target", self.model), ("draft", self.draft)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def shared_environment(paths: Sequence[Path]) -> dict[str, str]:
    """Returns what the environments of all engines have in common. paths: where Python looks first."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(TOLD)} | OFFLINE
    inherited = [Path(path).resolve() for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [*paths, *inherited]))
    return environment | _cuda()


def _cuda() -> dict[str, str]:
    """Returns where the CUDA libraries of torch's own packages and the compiler are: ops of peers look for both."""
    libraries = sorted(Path(torch.__file__).parents[1].glob("nvidia/*/lib"))
    paths = [os.environ.get("LD_LIBRARY_PATH", ""), *map(str, libraries)]
    found = {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))} if any(paths) else {}
    compiler = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    if "CUDA_HOME" not in os.environ and compiler.exists():
        found["CUDA_HOME"] = str(compiler.resolve().parents[1])
    return found


def write_package(folder: Path, package: str, version: str, group: str, point: str) -> None:
    """Writes what an installed package tells about its plug-in, so that an engine finds it."""
    about = folder / f"{package}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{point}\n")


def run(
    order: AnyOrder, installation: Installation, log: Path, limit_s: float, with_flashinfer: bool
) -> Iterator[dict[str, Any]]:
    """Yields the engine's records as they come: `started`, what was ordered, and `done`.

    An order that is timed gives `measured` or `failed` by batch size and sampling, another one `texts` by wave, and
    vLLM's `counted`.
    An engine that has started, and one that has done all, wait until the next record is asked for.

    All processes of the engine are ended when it is done, after `limit_s`, and when the caller closes the generator.
    Raises EngineFailure at the limit, for a crash, and where another backend ran than was asked for. The time for which
    the engine waits, for the caller or for its turn, does not count towards the limit.

    log: the file that all its processes print to. with_flashinfer: whether SGLang may use FlashInfer.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as ending:
        made = tempfile.TemporaryDirectory(prefix="engine_", ignore_cleanup_errors=True)
        folder = Path(ending.enter_context(made))
        command, seen = _prepare(order, installation, folder), folder / "seen"
        output = ending.enter_context(log.open("wb"))
        records = ending.enter_context((folder / "records.jsonl").open(encoding="utf-8"))
        told = order.environment(installation, folder / "plugin", with_flashinfer)
        deadline_s = time.monotonic() + limit_s
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=told, cwd=folder,
            start_new_session=True,
        )  # fmt: skip
        ending.callback(_end, child)
        rest, has_ended, waits_since_s = "", False, None
        while not has_ended:
            has_ended = child.poll() is not None  # asked before the last records are read
            *lines, rest = (rest + records.read()).split("\n")
            for line in lines:
                record, told_s = json.loads(line), time.monotonic()
                if record["kind"] == "waits":
                    waits_since_s = told_s
                elif record["kind"] == "goes":
                    deadline_s, waits_since_s = deadline_s + told_s - waits_since_s, None
                else:
                    yield record | _checked(order, record, log)
                    deadline_s += time.monotonic() - told_s
                    (seen / record["kind"]).touch()
            if not has_ended:
                if waits_since_s is None and time.monotonic() > deadline_s:
                    raise EngineFailure(f"took longer than {limit_s:g} s\n{_told_by(log)}")
                time.sleep(POLL_S)
        if child.returncode:
            raise EngineFailure(f"ended with status {child.returncode}\n{_told_by(log)}")


def _prepare(order: AnyOrder, installation: Installation, folder: Path) -> list[str]:
    """Writes all that an engine needs into a folder; returns the command that starts it."""
    models = _models(order)
    order.write_plugins(folder / "plugin", installation)
    for name in ("script", "seen"):
        (folder / name).mkdir()
    script, order_file, records_file = folder / "script" / "engine.py", folder / "order.json", folder / "records.jsonl"
    shutil.copyfile(engine_child.__file__, script)
    for file in order.scripts:
        shutil.copy(file, script.parent)
    asked = order.for_child(models) | {"seen": str(folder / "seen"), "module": Path(order.scripts[0]).stem}
    order_file.write_text(json.dumps(asked, indent=1), encoding="utf-8")
    records_file.touch()
    return [sys.executable, *map(str, (script, order_file, records_file))]


def _models(order: AnyOrder) -> Path:
    """Writes an order's models; returns their folder, which has one name for the same files: vLLM finds what it has
    compiled for a model by the model's path."""
    MODELS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MODELS) as made:
        written = Path(made, "models")
        order.write_models(written)
        digest = hashlib.sha256()
        for file in sorted(each for each in written.rglob("*") if each.is_file()):
            digest.update(f"{file.relative_to(written)} {file.stat().st_size} ".encode() + file.read_bytes())
        folder = MODELS / digest.hexdigest()[:16]
        with contextlib.suppress(OSError):  # if it is there already
            written.rename(folder)
    return folder


def _checked(order: AnyOrder, record: dict[str, Any], log: Path) -> dict[str, Any]:
    """Returns the parts of ours that the log tells to be in use; raises EngineFailure where it was not as ordered."""
    if record["kind"] == "started" and record["attention_backend"] != order.backend:
        raise EngineFailure(f"ran with {record['attention_backend']}; asked for {order.backend}")
    text = log.read_text(encoding="utf-8", errors="replace")
    if fault := order.fault(text):
        raise EngineFailure(f"{fault} ({log})")
    if record["kind"] not in ("measured", "texts"):
        return {}
    parts = sorted(set(re.findall(r"eagle_kernels: (\w+) is in use", text)))
    if missing := sorted(order.needed - set(parts)):
        raise EngineFailure(f"the plug-in's {', '.join(missing)} was not used\n{_told_by(log)}")
    if more := sorted(set(parts) - order.allowed):
        raise EngineFailure(f"the plug-in's {', '.join(more)} was used, and not asked for")
    return {"attention_backend": order.backend, "parts": parts}


def _told_by(log: Path) -> str:
    """Returns the first traceback of a log, or its end without one, and where it is."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    first = next((number for number, line in enumerate(lines) if "Traceback" in line), max(0, len(lines) - 20))
    return "\n".join([*(line[:400] for line in lines[first : first + 40]), f"(the whole log: {log})"])


def _end(child: subprocess.Popen) -> None:
    """Kills the child's process group and waits until it is gone, so that the next engine finds the GPU free."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    deadline_s = time.monotonic() + GONE_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline_s:
            os.killpg(child.pid, 0)
            time.sleep(POLL_S)
