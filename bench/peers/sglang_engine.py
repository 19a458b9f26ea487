"""SGLang's own engine, with dummy weights and simulated acceptance, in a child process that is ended at its limit.

SGLang is what Python finds, or what lies in a folder (`pip install --target FOLDER sglang`). The plug-in of this
checkout is shown to it as an installed package would be; stock engines are told to load no plug-in, except the one that
gives them FlashAttention 3 where SGLang's own build is missing (sglang_fa3.py).
"""

import contextlib
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

from eagle_kernels.integrations.sglang.parts import PARTS
from eagle_kernels.runtime.version import __version__

from . import fa3, sglang_child, sglang_fa3

ROOT = Path(__file__).parents[2]
PLUGIN = "eagle_kernels"  # the plug-in's name, and that of its attention backend
FA3 = "fa3"  # FlashAttention 3, as SGLang names the backend; also the plug-in that brings vLLM's build of it
NO_PLUGIN = "none_of_them"
# what would change an engine and is told to each
TOLD = (
    "SGLANG_SIMULATE_ACC_LEN",
    "SGLANG_SIMULATE_ACC_METHOD",
    "SGLANG_SIMULATE_ACC_TOKEN_MODE",
    "SGLANG_PLUGINS",
    "SGLANG_IS_FLASHINFER_AVAILABLE",
    "EAGLE_KERNELS_SGLANG",
    "EAGLE_KERNELS_SGLANG_VERIFY",
    "EAGLE_KERNELS_BACKEND",
    "TRITON_INTERPRET",
)
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # else each of an engine's processes compiles all of SGLang
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
}
# How the GPUs of an engine add up: by SGLang's own kernel, or by NCCL. Where the former cannot be used, SGLang takes
# NCCL instead and says so in its log.
ALL_REDUCES = ("sglang", "nccl")
FELL_BACK = re.compile(r"Setup Custom allreduce failed|CustomAll[Rr]educe\w* is disabled")
POLL_S = 0.1
GONE_S = 10.0  # how long the killed processes of an engine may take to leave the GPU


class EngineFailure(Exception):
    """What went wrong in a child process, with its first traceback."""


class Installation(NamedTuple):
    """Folders in front of those where this Python looks; FlashInfer's comes first, since SGLang's may hold one too."""

    sglang: Path | None = None
    flashinfer: Path | None = None

    def folders(self, with_flashinfer: bool = True) -> list[Path]:
        """Returns the folders that were given."""
        given = [self.flashinfer if with_flashinfer else None, self.sglang]
        return [folder.resolve() for folder in given if folder is not None]

    def has_sglang(self) -> bool:
        """Tells whether SGLang is there, without importing it."""
        return self._found("sglang") is not None

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
    """What an engine is started with: an `Order` here, or a `TextOrder` of sglang_texts.py.

    Each adds `asked`, for EAGLE_KERNELS_SGLANG (None: left unset; empty: a stock engine), `needed`, the parts that must
    be in use, and `for_child`, which returns what `sglang_child.py` reads.
    """

    backend: str  # of attention
    _: KW_ONLY
    tree: tuple[int, int, int] | None = None  # topk, steps, nodes; None: plain decoding
    accept: float | None = None  # mean tokens of a step that SGLang simulates
    rule: str | None = None  # for EAGLE_KERNELS_SGLANG_VERIFY; None: left unset
    tp: int = 1  # GPUs of the engine
    all_reduce: str = ALL_REDUCES[0]  # how these add up

    scripts: ClassVar[tuple[str, ...]] = (sglang_child.__file__,)  # the file that runs, and what it imports

    @property
    def is_plugged(self) -> bool:
        return self.asked != ""

    @property
    def allowed(self) -> frozenset[str]:
        """The parts that may be in use."""
        return self.needed

    def write_models(self, folder: Path) -> None:
        """Writes what SGLang does not load from where it is."""

    def shared_arguments(self, target: Path, draft: Path, load_format: str) -> dict[str, Any]:
        """Returns the arguments of `sglang.Engine` that do not depend on the kind of order."""
        arguments = {
            "model_path": str(target),
            "load_format": load_format,
            "attention_backend": self.backend,
            # with trees the first token of a text only; plain decoding is timed at temperature 0
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "skip_tokenizer_init": True,
            "disable_prefill_cuda_graph": True,
            "random_seed": 1,
            "log_level": "info",
        }
        if self.tp > 1:  # SGLang finds free ports itself
            arguments |= {"tp_size": self.tp, "disable_custom_all_reduce": self.all_reduce == "nccl"}
        if self.tree is not None:
            names = ("speculative_eagle_topk", "speculative_num_steps", "speculative_num_draft_tokens")
            arguments |= dict(zip(names, self.tree)) | {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": str(draft),
                "speculative_draft_load_format": load_format,
            }
        return arguments


@dataclass(frozen=True)
class Order(AnyOrder):
    """One engine and what it generates; its weights are dummies, its texts mean nothing."""

    model: dict[str, Any]  # config.json of the target
    draft: dict[str, Any]  # and of the EAGLE-3 head
    batches: Sequence[int]
    sampling: Sequence[tuple[float, float]]  # temperatures with their top-p
    prompt_tokens: int
    lengths: tuple[int, int]
    repeats: int
    requests: Sequence[tuple[int, int]] = ()  # lengths of prompts and texts, sent at once in place of equal batches
    turns: Path | None = None  # a file that engines share of which one generates at a time

    @property
    def asked(self) -> str:
        return "all" if self.backend == PLUGIN else ""

    @property
    def needed(self) -> frozenset[str]:
        return frozenset({"attention", *self._matching} if self.is_plugged else ())

    @property
    def allowed(self) -> frozenset[str]:
        return frozenset((*PARTS, *self._matching) if self.is_plugged else ())

    @property
    def _matching(self) -> tuple[str, ...]:
        return ("match",) if self.rule == "match" else ()

    @property
    def context_length(self) -> int:
        """The longest text and room for drafts, in whole thousands."""
        return -(-(self.prompt_tokens + self.lengths[1] + 512) // 1024) * 1024

    def engine_arguments(self, folder: Path) -> dict[str, Any]:
        """Returns the arguments of `sglang.Engine`; the models' folders are those of `write_models`."""
        return self.shared_arguments(folder / "target", folder / "draft", "dummy") | {
            "dtype": "bfloat16",
            "disable_radix_cache": True,
            "cuda_graph_bs_decode": sorted(self.batches),
            "cuda_graph_max_bs_decode": max(self.batches),
            "context_length": self.context_length,
            # a request reserves its longest text
            "max_total_tokens": max(32768, max(self.batches) * self.context_length),
            "max_running_requests": max(32, *self.batches),
            "mem_fraction_static": 0.9,  # the tokens above are the limit; other engines may take the rest
        }

    def for_child(self, folder: Path) -> dict[str, Any]:
        """Returns what `sglang_child.py` reads."""
        return {
            "engine": self.engine_arguments(folder),
            "vocab_size": self.model["vocab_size"],
            "batches": list(self.batches),
            "sampling": [{"temperature": temperature, "top_p": top_p} for temperature, top_p in self.sampling],
            "prompt_tokens": self.prompt_tokens,
            "lengths": list(self.lengths),
            "repeats": self.repeats,
            "is_speculative": self.tree is not None,
            "requests": list(self.requests),
            "turns": self.turns and str(self.turns),
        }

    def write_models(self, folder: Path) -> None:
        """Writes the folders of the two models: a config.json each, the weights are made by SGLang."""
        for name, config in (("target", self.model), ("draft", self.draft)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def plugin_of(order: AnyOrder, installation: Installation) -> str:
    """Returns the name of the only plug-in that an engine may load."""
    if order.is_plugged:
        return PLUGIN
    return FA3 if order.backend == FA3 and not installation.has_own_fa3() else NO_PLUGIN


def environment(order: AnyOrder, installation: Installation, plugin: Path, with_flashinfer: bool) -> dict[str, str]:
    """Returns the environment of an engine's process. plugin: the folder that `write_plugin` wrote."""
    told = {name: value for name, value in os.environ.items() if name not in TOLD} | OFFLINE
    folders, loaded = installation.folders(with_flashinfer), plugin_of(order, installation)
    paths = {PLUGIN: [plugin, ROOT], FA3: [plugin]}.get(loaded, []) + folders
    inherited = [Path(path).resolve() for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    told["PYTHONPATH"] = os.pathsep.join(map(str, [*paths, *inherited]))
    scripts = [str(folder / "bin") for folder in folders if (folder / "bin").is_dir()]  # FlashInfer's ninja
    told["PATH"] = os.pathsep.join([*scripts, os.environ.get("PATH", os.defpath)])
    told["SGLANG_PLUGINS"] = loaded
    if order.is_plugged and order.asked is not None:
        told["EAGLE_KERNELS_SGLANG"] = order.asked
    if order.rule is not None:
        told["EAGLE_KERNELS_SGLANG_VERIFY"] = order.rule
    if order.tp > 1:
        # engines that start together take memory of one GPU before that of the other
        told["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "false"
    if not with_flashinfer:
        told["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
    if order.accept is not None:
        told |= {"SGLANG_SIMULATE_ACC_LEN": str(order.accept), "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}
    return told | _cuda()


def _cuda() -> dict[str, str]:
    """Returns where the CUDA libraries of torch's own packages and the compiler are: ops of peers look for both."""
    libraries = sorted(Path(torch.__file__).parents[1].glob("nvidia/*/lib"))
    paths = [os.environ.get("LD_LIBRARY_PATH", ""), *map(str, libraries)]
    found = {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))} if any(paths) else {}
    compiler = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    if "CUDA_HOME" not in os.environ and compiler.exists():
        found["CUDA_HOME"] = str(compiler.resolve().parents[1])
    return found


def write_plugin(folder: Path, name: str = PLUGIN) -> None:
    """Writes what an installed package tells about its plug-in, so that SGLang finds it: this checkout's, or FA3."""
    package, version, module = "eagle_kernels", __version__, "eagle_kernels.integrations.sglang"
    folder.mkdir(parents=True, exist_ok=True)
    if name == FA3:
        package, version, module = "vllm_fa3", "vLLM's build", "sglang_fa3"
        shutil.copy(sglang_fa3.__file__, folder)
        fa3.place_library(folder)
    about = folder / f"{package}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {module}:register\n")


def run(
    order: AnyOrder, installation: Installation, log: Path, limit_s: float, with_flashinfer: bool
) -> Iterator[dict[str, Any]]:
    """Yields the engine's records as they come: `started`, what was ordered, and `done`.

    An `Order` gives `measured` or `failed` by batch size and sampling, a `TextOrder` (sglang_texts.py) `texts` by wave.
    An engine that has started, and one that has done all, wait until the next record is asked for.

    All processes of the engine are ended when it is done, after `limit_s`, and when the caller closes the generator.
    Raises EngineFailure at the limit, for a crash, and where another backend ran than was asked for. The time for which
    the engine waits, for the caller or for its turn, does not count towards the limit.

    log: the file that all its processes print to. with_flashinfer: whether SGLang may use FlashInfer.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as ending:
        made = tempfile.TemporaryDirectory(prefix="sglang_engine_", ignore_cleanup_errors=True)
        folder = Path(ending.enter_context(made))
        command, seen = _prepare(order, installation, folder), folder / "seen"
        output = ending.enter_context(log.open("wb"))
        records = ending.enter_context((folder / "records.jsonl").open(encoding="utf-8"))
        told = environment(order, installation, folder / "plugin", with_flashinfer)
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
    order.write_models(folder / "models")
    if (plugin := plugin_of(order, installation)) != NO_PLUGIN:
        write_plugin(folder / "plugin", plugin)
    for name in ("script", "seen"):
        (folder / name).mkdir()
    script, order_file, records_file = folder / "script" / "engine.py", folder / "order.json", folder / "records.jsonl"
    first, *beside = order.scripts
    shutil.copyfile(first, script)
    for file in beside:
        shutil.copy(file, script.parent)
    asked = order.for_child(folder / "models") | {"seen": str(folder / "seen")}
    order_file.write_text(json.dumps(asked, indent=1), encoding="utf-8")
    records_file.touch()
    return [sys.executable, *map(str, (script, order_file, records_file))]


def _checked(order: AnyOrder, record: dict[str, Any], log: Path) -> dict[str, Any]:
    """Returns the parts of ours that the log tells to be in use; raises EngineFailure where it was not as ordered."""
    if record["kind"] == "started" and record["attention_backend"] != order.backend:
        raise EngineFailure(f"ran with {record['attention_backend']}; asked for {order.backend}")
    text = log.read_text(encoding="utf-8", errors="replace")
    if order.tp > 1 and order.all_reduce == "sglang" and FELL_BACK.search(text):
        raise EngineFailure(f"SGLang's own all-reduce cannot be used here; --all-reduce nccl does without ({log})")
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
