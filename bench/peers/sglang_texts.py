"""One SGLang engine with the embedded pair of models, whose texts are compared: an order for `sglang_engine.run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from eagle_kernels.engine.models.loading import demo_pair
from eagle_kernels.integrations.sglang.parts import PARTS

from . import sglang_child, sglang_traffic
from .sglang_engine import ALL_REDUCES, PLUGIN, rank_arguments, speculation

# Fewer than the requests that run at once: larger batches run without a graph, smaller ones in the next larger graph.
GRAPH_SIZES = (1, 4, 16)
MAX_RUNNING = 24
# prompts longer than this come in chunks, and wait for each other
CHUNK_TOKENS = 256
CONTEXT_LENGTH = 1024


class TextOrder(NamedTuple):
    """One engine, and the traffic that it serves.

    tree: topk, steps, nodes. asked: parts for EAGLE_KERNELS_SGLANG; None: those that the backend turns on; empty: a
    stock engine. tp, all_reduce: as of an `Order`.
    """

    backend: str
    asked: str | None
    tree: tuple[int, int, int]
    page_size: int
    has_graphs: bool
    has_overlap: bool
    has_radix_cache: bool
    dtype: str
    traffic: dict[str, Any]
    tp: int = 1
    all_reduce: str = ALL_REDUCES[0]

    accept = None  # nothing is simulated
    rule = None
    scripts = (sglang_child.__file__, sglang_traffic.__file__)

    @property
    def is_plugged(self) -> bool:
        return self.asked != ""

    @property
    def needed(self) -> frozenset[str]:
        """The parts that must be in use."""
        if self.asked is None:
            return frozenset(PARTS if self.backend == PLUGIN else ())
        return frozenset(PARTS) if self.asked == "all" else frozenset(filter(None, self.asked.split(",")))

    @property
    def allowed(self) -> frozenset[str]:
        """The parts that may be in use."""
        return self.needed

    def write_models(self, folder: Path) -> None:
        """Does nothing: SGLang loads the pair from where it is."""

    def engine_arguments(self, folder: Path) -> dict[str, Any]:
        """Returns the arguments of `sglang.Engine`."""
        target, draft = demo_pair()
        graphs = {"cuda_graph_bs_decode": list(GRAPH_SIZES), "cuda_graph_max_bs_decode": max(GRAPH_SIZES)}
        return {
            "model_path": str(target),
            "load_format": "auto",
            "dtype": self.dtype,
            "attention_backend": self.backend,
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "skip_tokenizer_init": True,
            "disable_prefill_cuda_graph": True,
            **(graphs if self.has_graphs else {"disable_cuda_graph": True}),
            "disable_overlap_schedule": not self.has_overlap,
            "disable_radix_cache": not self.has_radix_cache,
            "page_size": self.page_size,
            "chunked_prefill_size": CHUNK_TOKENS,
            "context_length": CONTEXT_LENGTH,
            "max_total_tokens": 131072,
            "max_running_requests": MAX_RUNNING,
            "mem_fraction_static": 0.6,
            "random_seed": 1,
            "log_level": "info",
            **rank_arguments(self),
            **speculation(self.tree, draft, "auto"),
        }

    def for_child(self, folder: Path) -> dict[str, Any]:
        """Returns what `sglang_child.py` reads."""
        return {"engine": self.engine_arguments(folder), "traffic": self.traffic}
