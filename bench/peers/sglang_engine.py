"""SGLang's own engine, with dummy weights and simulated acceptance: an order for `engine.run`.

Stock engines are told to load no plug-in. Where SGLang's own build of FlashAttention 3 is missing, engines with that
backend are given vLLM's (sglang_fa3.py), and so are ours, which leave prompts to it.
"""

import os
import re
import shutil
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from eagle_kernels.integrations.sglang.parts import PARTS
from eagle_kernels.runtime.version import __version__

from . import fa3, sglang_child, sglang_fa3
from .engine import PLUGIN, ROOT, AnyOrder, Installation, TimedOrder, shared_environment, write_package

FA3 = "fa3"  # FlashAttention 3, as SGLang names the backend; also the plug-in that brings vLLM's build of it
NO_PLUGIN = "none_of_them"
SET = {"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
FELL_BACK = re.compile(r"Setup Custom allreduce failed|CustomAll[Rr]educe\w* is disabled")


@dataclass(frozen=True)
class SGLangOrder(AnyOrder):
    """What an engine of SGLang is started with: an `Order` here, or a `TextOrder` of sglang_texts.py."""

    _: KW_ONLY
    rule: str | None = None  # for EAGLE_KERNELS_SGLANG_VERIFY; None: left unset

    scripts = (sglang_child.__file__,)

    def write_plugins(self, folder: Path, installation: Installation) -> None:
        for plugin in plugins_of(self, installation):
            write_plugin(folder, plugin)

    def fault(self, log: str) -> str | None:
        if self.tp > 1 and self.all_reduce == "own" and FELL_BACK.search(log):
            return "SGLang's own all-reduce cannot be used here; --all-reduce nccl does without"
        return None

    def shared_arguments(self, target: Path, draft: Path, load_format: str) -> dict[str, Any]:
        """Returns the arguments of `sglang.Engine` that do not depend on the kind of order."""
        arguments = {
            "model_path": str(target), "load_format": load_format, "attention_backend": self.backend,
            # with trees the first token of a text only; plain decoding is timed at temperature 0
            "sampling_backend": "pytorch", "grammar_backend": "none", "skip_tokenizer_init": True,
            "disable_prefill_cuda_graph": True, "random_seed": 1, "log_level": "info",
        }  # fmt: skip
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

    def environment(self, installation: Installation, plugin: Path, with_flashinfer: bool) -> dict[str, str]:
        """Returns the environment of an engine's process. plugin: the folder that `write_plugin` wrote."""
        folders, loaded = installation.folders(with_flashinfer), plugins_of(self, installation)
        paths = [*([plugin] if loaded else []), *([ROOT] if PLUGIN in loaded else []), *folders]
        told = shared_environment(paths) | SET
        scripts = [str(folder / "bin") for folder in folders if (folder / "bin").is_dir()]  # FlashInfer's ninja
        told["PATH"] = os.pathsep.join([*scripts, os.environ.get("PATH", os.defpath)])
        told["SGLANG_PLUGINS"] = ",".join(loaded) or NO_PLUGIN
        if self.is_plugged and self.asked is not None:
            told["EAGLE_KERNELS_SGLANG"] = self.asked
        if self.rule is not None:
            told["EAGLE_KERNELS_SGLANG_VERIFY"] = self.rule
        if self.tp > 1:
            # engines that start together take memory of one GPU before that of the other
            told["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "false"
        if not with_flashinfer:
            told["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
        if self.accept is not None:
            told |= {"SGLANG_SIMULATE_ACC_LEN": str(self.accept), "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}
        return told


@dataclass(frozen=True)
class Order(TimedOrder, SGLangOrder):
    """One engine that is timed."""

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

    def engine_arguments(self, folder: Path) -> dict[str, Any]:
        """Returns the arguments of `sglang.Engine`; the models' folders are those of `write_models`."""
        return self.shared_arguments(folder / "target", folder / "draft", "dummy") | {
            "dtype": "bfloat16", "disable_radix_cache": True, "context_length": self.context_length,
            "cuda_graph_bs_decode": sorted(self.batches), "cuda_graph_max_bs_decode": max(self.batches),
            # a request reserves its longest text
            "max_total_tokens": max(32768, max(self.batches) * self.context_length),
            "max_running_requests": max(32, *self.batches),
            "mem_fraction_static": 0.9,  # the tokens above are the limit; other engines may take the rest
        }  # fmt: skip


def plugins_of(order: AnyOrder, installation: Installation) -> list[str]:
    """Returns the names of the only plug-ins that an engine may load."""
    reads_by_fa3 = order.is_plugged and fa3.is_hopper() and fa3.find_library() is not None
    is_given = (order.backend == FA3 or reads_by_fa3) and not installation.has_own_fa3()
    return [PLUGIN] * order.is_plugged + [FA3] * is_given


def write_plugin(folder: Path, name: str = PLUGIN) -> None:
    """Writes what an installed package tells about its plug-in, so that SGLang finds it: this checkout's, or FA3."""
    package, version, module = "eagle_kernels", __version__, "eagle_kernels.integrations.sglang"
    folder.mkdir(parents=True, exist_ok=True)
    if name == FA3:
        package, version, module = "vllm_fa3", "vLLM's build", "sglang_fa3"
        shutil.copy(sglang_fa3.__file__, folder)
        fa3.place_library(folder)
    write_package(folder, package, version, "sglang.srt.plugins", f"{name} = {module}:register")
