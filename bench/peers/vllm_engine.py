"""vLLM's own engine: orders for `engine.run` with dummy weights and simulated acceptance, or with the embedded pair.

Acceptance is vLLM's own `synthetic` one, by its mean; drafts are chains, or trees of the plug-in's. What engines
compile is kept while the machine is there, apart for each attention backend, and for each of its chains beside trees,
so that engines that start together do not write the same files.
"""

import json
import re
import shutil
import tempfile
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from eagle_kernels.engine.models.loading import demo_pair
from eagle_kernels.runtime.version import __version__

from . import vllm_child
from .engine import PLUGIN, ROOM, ROOT, AnyOrder, Installation, TimedOrder, shared_environment, write_package

FA3, TRITON, CUSTOM = "FLASH_ATTN", "TRITON_ATTN", "CUSTOM"  # attention backends as vLLM names them; the last is ours
PARTS, TREES = ("attention", "verify", "draft"), "trees"
PLUGINS = {"dummy_head": "vllm_child", PLUGIN: "eagle_kernels.integrations.vllm.plugin"}
CACHES = Path(tempfile.gettempdir(), "eagle_kernels_vllm")
SET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
       "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_LOGGING_LEVEL": "INFO"}  # fmt: skip
# Of engines whose texts are compared: tokens of a prompt and its text, requests at once, and bytes of keys and values.
# The small pool holds two of the longest requests: 16 tokens of the pair have 57,344 bytes in 16 bits.
TEXT_LENGTH, TEXT_REQUESTS, POOL, SMALL_POOL = 1024, 24, 2**30, 7 * 2**20


@dataclass(frozen=True)
class VLLMOrder(AnyOrder):
    """What an engine of vLLM is started with: an `Order` or a `TextOrder`."""

    _: KW_ONLY
    share: float  # of the GPU's memory, which vLLM must find free
    compiled: str  # names the folder for what it compiles, which engines that start together must not share
    has_trees: bool = False  # drafts are no chains

    scripts, allowed = (vllm_child.__file__,), frozenset((*PARTS, TREES))

    def write_plugins(self, folder: Path, installation: Installation) -> None:
        for name, module in PLUGINS.items():
            write_package(folder, name, __version__, "vllm.general_plugins", f"{name} = {module}:register")
        shutil.copy(vllm_child.__file__, folder)  # not all of vLLM's processes look where their script was

    def environment(self, installation: Installation, plugin: Path, with_flashinfer: bool = False) -> dict[str, str]:
        """Returns the environment of an engine's process. plugin: the folder that `write_plugins` wrote."""
        paths = [plugin, *([ROOT] if self.is_plugged else []), *installation.folders(with_flashinfer=False)]
        told = shared_environment(paths) | SET
        told["VLLM_PLUGINS"] = ",".join(list(PLUGINS)[: 1 + self.is_plugged])
        told |= {"EAGLE_KERNELS_VLLM": self.asked} if self.is_plugged else {}
        if self.tp > 1 and self.all_reduce == "nccl":
            told["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
        caches = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
        return told | {name: str(CACHES / self.compiled / folder) for name, folder in caches.items()}

    def fault(self, log: str) -> str | None:
        others = set(re.findall(r"Using FlashAttention version (\d)", log)) - {"3"} if self.backend == FA3 else ()
        return f"vLLM ran FlashAttention {' and '.join(sorted(others))} in place of 3" if others else None

    def shared_arguments(self, target: Path, draft: Path, load_format: str) -> dict[str, Any]:
        """Returns the arguments of `vllm.LLM` that do not depend on the kind of order."""
        arguments = {
            "model": str(target), "load_format": load_format, "attention_backend": self.backend, "seed": 1,
            "skip_tokenizer_init": True, "enable_prefix_caching": False, "gpu_memory_utilization": self.share,
            "disable_log_stats": False,  # else drafts are not counted
        }  # fmt: skip
        if self.tp > 1:
            is_nccl = self.all_reduce == "nccl"
            arguments |= {"tensor_parallel_size": self.tp, "disable_custom_all_reduce": is_nccl}
            if is_nccl:  # nor FlashInfer's, which vLLM fuses with norms where it finds it
                arguments["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
        if self.tree is not None:
            topk, depth, num_nodes = self.tree
            drafts = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": num_nodes - 1}
            drafts["attention_backend"] = self.backend
            if self.accept is not None:
                drafts |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": self.accept}
            arguments["speculative_config"] = drafts
            if self.has_trees:
                arguments["additional_config"] = {PLUGIN: {"topk": topk, "depth": depth}}
        return arguments


@dataclass(frozen=True)
class Order(TimedOrder, VLLMOrder):
    """One engine that is timed."""

    @property
    def asked(self) -> str:
        return "all" if self.backend == CUSTOM else ""

    def write_models(self, folder: Path) -> None:
        if self.prompts:
            write_head(folder)
        else:
            super().write_models(folder)

    @property
    def needed(self) -> frozenset[str]:
        parts = PARTS if self.tree is not None and self.accept is None else PARTS[:1]
        parts = (*PARTS, TREES) if self.has_trees else parts
        return frozenset(parts if self.is_plugged else ())

    def engine_arguments(self, folder: Path) -> dict[str, Any]:
        """Returns the arguments of `vllm.LLM`; the models' folders are those of `write_models`."""
        model, cases = self.model, (self, *self.also)
        most = [max(each.batches) * (each.prompt_tokens + each.lengths[1] + ROOM) for each in cases]
        tokens = max(self.context_length, *most)
        layers = model["num_hidden_layers"] + (self.draft["num_hidden_layers"] if self.tree is not None else 0)
        target, load_format = (demo_pair()[0], "auto") if self.prompts else (folder / "target", "dummy")
        traces = {"profiler": "torch", "torch_profiler_with_stack": False}
        traces["torch_profiler_dir"] = str(CACHES / self.compiled / "traces")
        profiled = {"profiler_config": traces} if self.profile else {}
        return profiled | self.shared_arguments(target, folder / "draft", load_format) | {
            "dtype": "bfloat16", "max_model_len": self.context_length, "max_num_batched_tokens": 8192,
            "max_num_seqs": max(max(each.batches) for each in cases),
            # keys and values of two bytes; when told, vLLM does not measure, which other engines would disturb
            "kv_cache_memory_bytes": 4 * layers * model["num_key_value_heads"] * model["head_dim"] * tokens,
        }  # fmt: skip


@dataclass(frozen=True)
class TextOrder(VLLMOrder):
    """One engine with the embedded pair, and the requests that it serves."""

    asked: str
    page_size: int
    has_graphs: bool
    has_overlap: bool
    has_radix_cache: bool  # a cache of prefixes
    dtype: str
    traffic: dict[str, Any]
    _: KW_ONLY
    chunk_tokens: int
    has_small_pool: bool

    @property
    def needed(self) -> frozenset[str]:
        parts = PARTS if self.asked == "all" else filter(None, self.asked.split(","))
        return frozenset(parts) - ({"draft"} if self.tree is None else set()) | ({TREES} if self.has_trees else set())

    def environment(self, installation: Installation, plugin: Path, with_flashinfer: bool = False) -> dict[str, str]:
        # else Triton multiplies fp32 in TF32, whose error depends on how a kernel splits a row
        exact = {"TRITON_F32_DEFAULT": "ieee"} if self.dtype == "float32" else {}
        if exact and self.backend == CUSTOM:  # FlashAttention 3 has no fp32
            exact["EAGLE_KERNELS_VLLM_PROMPTS"] = "ours"
        return super().environment(installation, plugin) | exact

    def write_models(self, folder: Path) -> None:
        write_head(folder)

    def for_child(self, folder: Path) -> dict[str, Any]:
        arguments = self.shared_arguments(demo_pair()[0], folder / "draft", "auto")
        arguments |= {
            "dtype": self.dtype, "max_model_len": TEXT_LENGTH, "max_num_seqs": TEXT_REQUESTS,
            "max_num_batched_tokens": self.chunk_tokens, "block_size": self.page_size,
            "kv_cache_memory_bytes": (SMALL_POOL if self.has_small_pool else POOL) // self.tp,
            "enforce_eager": not self.has_graphs, "async_scheduling": self.has_overlap,
            "enable_prefix_caching": self.has_radix_cache,
        }  # fmt: skip
        return {"engine": arguments, "traffic": self.traffic}


def write_head(folder: Path) -> None:
    """Writes the embedded head as vLLM reads it: it looks for the layers at the top, and taps before a layer."""
    shutil.copytree(demo_pair()[1], folder / "draft")
    file = folder / "draft" / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    file.write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers]}))
