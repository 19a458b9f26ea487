"""vLLM's own engine: orders for `engine.run` with dummy weights and simulated acceptance, or with the embedded pair.

Acceptance is vLLM's own `synthetic` one, by its mean; drafts are chains. What engines compile is kept while the machine
is there, apart for each attention backend, so that engines that start together do not write the same files.
"""

import json
import re
import shutil
import tempfile
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eagle_kernels.engine.models.loading import demo_pair
from eagle_kernels.runtime.version import __version__

from . import vllm_child, vllm_dummy_head
from .engine import PLUGIN, ROOT, AnyOrder, TimedOrder, find, shared_environment, write_package

FA3, TRITON, CUSTOM = "FLASH_ATTN", "TRITON_ATTN", "CUSTOM"  # attention backends: vLLM's names; the last one is ours
PARTS = ("attention", "verify", "draft")
MODULE = "eagle_kernels.integrations.vllm.plugin"
HEAD = "dummy_head"
CACHES = Path(tempfile.gettempdir(), "eagle_kernels_vllm")
# what would change an engine and is told to each
TOLD = ("VLLM_PLUGINS", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "EAGLE_KERNELS_VLLM")
SET = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "INFO",  # tells the version of FlashAttention
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
FA_VERSION = re.compile(r"Using FlashAttention version (\d)")
CHUNK_TOKENS, TEXT_CHUNK_TOKENS = 8192, 256  # of prompts that are read in a step
LEAST_KV_TOKENS, TEXT_KV_BYTES = 32768, 2**30
MAX_RUNNING, CONTEXT_LENGTH = 24, 1024  # of the embedded pair's engines


class Installation(NamedTuple):
    """The folder in front of those where this Python looks."""

    vllm: Path | None = None

    def folders(self) -> list[Path]:
        """Returns the folders that were given."""
        return [] if self.vllm is None else [self.vllm.resolve()]

    def is_here(self) -> bool:
        """Tells whether vLLM is there, without importing it."""
        return find("vllm", self.folders()) is not None


@dataclass(frozen=True)
class VLLMOrder(AnyOrder):
    """What an engine of vLLM is started with: an `Order` or a `TextOrder`."""

    _: KW_ONLY
    share: float  # of the GPU's memory, which vLLM must find free

    scripts = (vllm_child.__file__,)

    @property
    def plugins(self) -> tuple[str, ...]:
        """The plug-ins that the engine may load."""
        return (PLUGIN,) if self.is_plugged else ()

    def write_plugins(self, folder: Path, installation: Installation) -> None:
        folder.mkdir()
        for name in self.plugins:
            module = MODULE if name == PLUGIN else Path(vllm_dummy_head.__file__).stem
            write_package(folder, name, __version__, "vllm.general_plugins", f"{name} = {module}:register")
            if name == HEAD:
                shutil.copy(vllm_dummy_head.__file__, folder)

    def environment(self, installation: Installation, plugin: Path) -> dict[str, str]:
        """Returns the environment of an engine's process. plugin: the folder that `write_plugins` wrote."""
        paths = [plugin, *([ROOT] if self.is_plugged else []), *installation.folders()]
        told = shared_environment(paths, TOLD) | SET | {"VLLM_PLUGINS": ",".join(self.plugins)}
        caches = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
        told |= {name: str(CACHES / self.backend / folder) for name, folder in caches.items()}
        return told | ({"EAGLE_KERNELS_VLLM": self.asked} if self.is_plugged else {})

    def fault(self, log: str) -> str | None:
        found = set(FA_VERSION.findall(log)) - {"3"} if self.backend == FA3 else ()
        return f"vLLM ran FlashAttention {' and '.join(sorted(found))} in place of 3" if found else None

    def shared_arguments(self, target: Path, draft: Path, load_format: str) -> dict[str, Any]:
        """Returns the arguments of `vllm.LLM` that do not depend on the kind of order."""
        arguments = {
            "model": str(target),
            "load_format": load_format,
            "attention_backend": self.backend,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "disable_log_stats": False,  # else drafts are not counted
            "gpu_memory_utilization": self.share,
            "seed": 1,
        }
        if self.tree is not None:
            _, steps, _ = self.tree
            drafts = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": steps}
            drafts["attention_backend"] = self.backend
            if self.accept is not None:
                drafts |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": self.accept}
            arguments["speculative_config"] = drafts
        return arguments


@dataclass(frozen=True)
class Order(TimedOrder, VLLMOrder):
    """One engine that is timed."""

    @property
    def asked(self) -> str:
        return "all" if self.backend == CUSTOM else ""

    @property
    def needed(self) -> frozenset[str]:
        return frozenset({"attention"} if self.is_plugged else ())

    @property
    def allowed(self) -> frozenset[str]:
        return frozenset(PARTS if self.is_plugged else ())

    @property
    def plugins(self) -> tuple[str, ...]:
        return (*super().plugins, HEAD)

    def engine_arguments(self, folder: Path) -> dict[str, Any]:
        """Returns the arguments of `vllm.LLM`; the models' folders are those of `write_models`."""
        model, texts = self.model, [(max(each.batches), each.prompt_tokens + each.lengths[1]) for each in self.all]
        tokens = max(LEAST_KV_TOKENS, self.context_length, *(batch * (length + 512) for batch, length in texts))
        layers = model["num_hidden_layers"] + (self.draft["num_hidden_layers"] if self.tree is not None else 0)
        return self.shared_arguments(folder / "target", folder / "draft", "dummy") | {
            "dtype": "bfloat16",
            "max_model_len": self.context_length,
            "max_num_seqs": max(batch for batch, _ in texts),
            "max_num_batched_tokens": CHUNK_TOKENS,
            # keys and values of two bytes; when told, vLLM does not measure, which other engines would disturb
            "kv_cache_memory_bytes": 4 * layers * model["num_key_value_heads"] * model["head_dim"] * tokens,
        }


@dataclass(frozen=True)
class TextOrder(VLLMOrder):
    """One engine with the embedded pair, and the requests that it serves."""

    asked: str
    dtype: str
    traffic: dict[str, Any]

    @property
    def needed(self) -> frozenset[str]:
        return frozenset((PARTS if self.tree is not None else PARTS[:1]) if self.is_plugged else ())

    @property
    def allowed(self) -> frozenset[str]:
        return frozenset(PARTS if self.is_plugged else ())

    def write_models(self, folder: Path) -> None:
        """Writes the pair's head as vLLM reads it.

        vLLM looks for the layers at the top of its configuration, and counts those before which it taps.
        """
        shutil.copytree(demo_pair()[1], folder / "draft")
        file = folder / "draft" / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        config["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in layers]
        file.write_text(json.dumps(config, indent=1), encoding="utf-8")

    def for_child(self, folder: Path) -> dict[str, Any]:
        """Returns what `engine_child.py` reads."""
        arguments = self.shared_arguments(demo_pair()[0], folder / "draft", "auto") | {
            "dtype": self.dtype,
            "max_model_len": CONTEXT_LENGTH,
            "max_num_seqs": MAX_RUNNING,
            "max_num_batched_tokens": TEXT_CHUNK_TOKENS,
            "kv_cache_memory_bytes": TEXT_KV_BYTES,
        }
        return {"engine": arguments, "traffic": self.traffic}
