"""What was measured: one cell of an experiment, with a label for people and a hash for files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from eagle_kernels import EAGLEConfig
from eagle_kernels.engine.serve.output import record_of
from eagle_kernels.runtime.validated import Validated, is_number
from eagle_kernels.runtime.values import is_integer

TREE_TOPK = 4
# fields of EAGLEConfig by method of drafting, beside num_steps = K; `model` methods take whatever the pair's draft is.
# Past responses are not remembered: the same prompts come again and again.
METHODS: dict[str, dict[str, Any]] = {
    "chain": {"topk": 1},
    "tree": {"topk": TREE_TOPK},
    "ngram": {"method": "ngram", "topk": 1},
    "suffix": {"method": "suffix", "topk": 1, "suffix_decoding_max_cached_requests": 0},
}


@dataclass(frozen=True, repr=False)
class BenchmarkConfig(Validated):
    """K, a method and the rest; `engine.stream(prompt, config.max_new_tokens, **config.stream_options())` runs it."""

    model_pair_name: str  # of `registry.REGISTRY`, or any other name
    K: int | None  # drafts one after another, levels of a tree; None: plain decoding
    temperature: float  # 0: greedy
    max_new_tokens: int  # of each prompt
    prompt_domain: str  # of `prompts.DOMAINS`, or any other name
    seed: int  # of the sampling noise
    method: str = "chain"  # of `METHODS`: where drafts come from and what they look like
    batch_size: int = 1  # prompts that are decoded together

    def __post_init__(self) -> None:
        self._require(self.K is None or (is_integer(self.K) and self.K >= 1), "K", "be None or an int of at least 1")
        is_heat = is_number(self.temperature) and 0 <= self.temperature < float("inf")
        self._require(is_heat, "temperature", "be a number of at least 0")
        # 0 and 0.0 are the same experiment
        object.__setattr__(self, "temperature", float(self.temperature))
        for name in ("max_new_tokens", "batch_size"):
            value = getattr(self, name)
            self._require(is_integer(value) and value >= 1, name, "be an int of at least 1")
        self._require(is_integer(self.seed), "seed", "be an int")
        self._require(self.method in METHODS, "method", f"be one of {', '.join(METHODS)}")
        if self.K is None:  # plain decoding has no method, and one hash
            object.__setattr__(self, "method", "chain")

    @property
    def is_speculative(self) -> bool:
        return self.K is not None

    @property
    def decoder_label(self) -> str:
        """AR, SD-K4 for a chain, SD-tree-K4 for the other methods."""
        if self.K is None:
            return "AR"
        return f"SD-K{self.K}" if self.method == "chain" else f"SD-{self.method}-K{self.K}"

    def stream_options(self) -> dict[str, Any]:
        """Keyword arguments of `EAGLEInference.stream` and `generate`."""
        options: dict[str, Any] = {"seeds": self.seed, "temperature": self.temperature}
        options["speculative"] = self.is_speculative
        if self.is_speculative:
            options |= METHODS[self.method] | {"num_steps": self.K, "num_draft_tokens": None}
        return options

    def engine_config(self) -> EAGLEConfig:
        """That of a speculative cell's steps; the ValueError of `EAGLEConfig` where there are no such steps."""
        return EAGLEConfig(**METHODS[self.method], num_steps=self.K, max_batch=self.batch_size)

    def to_dict(self) -> dict[str, Any]:
        """Fields, label and hash, ready for JSON."""
        computed = {"is_speculative": self.is_speculative, "decoder_label": self.decoder_label}
        return asdict(self) | computed | {"config_hash": self.config_hash()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BenchmarkConfig:
        """Of what `to_dict` made; what is computed there is ignored."""
        return record_of(cls, values)

    def config_hash(self) -> str:
        """12 hex digits of SHA-256, the same in every process and version: fields that came later count only where they
        differ from their default, so that what was measured before keeps its hash."""
        values = {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.default is MISSING or getattr(self, item.name) != item.default
        }
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def __repr__(self) -> str:
        batch = f", batch {self.batch_size}" if self.batch_size > 1 else ""
        return (
            f"BenchmarkConfig({self.model_pair_name}, {self.decoder_label}, {self.prompt_domain}, "
            f"T={self.temperature:g}, {self.max_new_tokens} tokens, seed {self.seed}{batch}; {self.config_hash()})"
        )
