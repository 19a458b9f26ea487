"""One SGLang engine with the embedded pair of models, whose texts are compared: an order for `engine.run`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_kernels.engine.models.loading import demo_pair
from eagle_kernels.integrations.sglang.parts import PARTS

from . import sglang_child, sglang_traffic
from .engine import PLUGIN
from .sglang_engine import SGLangOrder

# Fewer than the requests that run at once: larger batches run without a graph, smaller ones in the next larger graph.
GRAPH_SIZES = (1, 4, 16)
MAX_RUNNING = 24
# prompts longer than this come in chunks, and wait for each other
CHUNK_TOKENS = 256
CONTEXT_LENGTH = 1024


@dataclass(frozen=True)
class TextOrder(SGLangOrder):
    """One engine, and the traffic that it serves."""

    asked: str | None
    page_size: int
    has_graphs: bool
    has_overlap: bool
    has_radix_cache: bool
    dtype: str
    traffic: dict[str, Any]

    scripts = (sglang_child.__file__, sglang_traffic.__file__)

    @property
    def needed(self) -> frozenset[str]:
        if self.asked is None:
            return frozenset(PARTS if self.backend == PLUGIN else ())
        return frozenset(PARTS) if self.asked == "all" else frozenset(filter(None, self.asked.split(",")))

    def engine_arguments(self) -> dict[str, Any]:
        """Returns the arguments of `sglang.Engine`, which loads the pair from where it is."""
        graphs = {"cuda_graph_bs_decode": list(GRAPH_SIZES), "cuda_graph_max_bs_decode": max(GRAPH_SIZES)}
        return self.shared_arguments(*demo_pair(), "auto") | {
            "dtype": self.dtype,
            **(graphs if self.has_graphs else {"disable_cuda_graph": True}),
            "disable_overlap_schedule": not self.has_overlap,
            "disable_radix_cache": not self.has_radix_cache,
            "page_size": self.page_size,
            "chunked_prefill_size": CHUNK_TOKENS,
            "context_length": CONTEXT_LENGTH,
            "max_total_tokens": 131072,
            "max_running_requests": MAX_RUNNING,
            "mem_fraction_static": 0.6,
        }

    def for_child(self, folder: Path) -> dict[str, Any]:
        return {"engine": self.engine_arguments(), "traffic": self.traffic}
