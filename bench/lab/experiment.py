"""What an experiment is made of: pairs, domains, methods and depths, crossed into cells."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from eagle_kernels.runtime.validated import Validated
from eagle_kernels.runtime.values import is_integer

from .config import METHODS, BenchmarkConfig
from .loader import DTYPES
from .prompts import Prompt
from .registry import get_pair
from .sources import DOMAINS


@dataclass(frozen=True)
class Experiment(Validated):
    """Every pair, domain, temperature and batch size, plainly and with every method and K."""

    pairs: tuple[str, ...] = ("embedded",)  # of `registry.list_pairs()`
    domains: tuple[str, ...] = DOMAINS
    methods: tuple[str, ...] = ("chain", "tree", "ngram")  # of `config.METHODS`
    k: tuple[int, ...] = (1, 2, 4, 8)  # drafts one after another, levels of a tree
    temperatures: tuple[float, ...] = (0.0,)
    batch_sizes: tuple[int, ...] = (1,)
    max_new_tokens: int = 128  # of each prompt
    prompts_per_domain: int = 8  # at most; they are repeated until every batch is full
    num_runs: int = 3  # of all prompts of a cell, some in a turn, after tokens that are not counted
    seed: int = 0  # of the sampling noise; prompt i has seed + i
    dtype: str | None = None  # of both models; None: what the pair says
    prompts: str | None = None  # a file of `python -m bench.lab.prompts`; None: those built in

    def __post_init__(self) -> None:
        for name in ("pairs", "domains", "methods", "k", "temperatures", "batch_sizes"):
            values = getattr(self, name)
            is_list = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
            is_flat = is_list and all(isinstance(value, (str, int, float)) for value in values)
            self._require(is_flat and len(set(values)) == len(values), name, "be a list of different values")
            object.__setattr__(self, name, tuple(values))
        for pair in self.pairs:
            get_pair(pair).check()
        for name, known in (("domains", DOMAINS), ("methods", tuple(METHODS))):
            rule = f"be among {', '.join(known)}"
            self._require(set(getattr(self, name)) <= set(known), name, rule)
        for name in ("prompts_per_domain", "num_runs"):
            value = getattr(self, name)
            self._require(is_integer(value) and value >= 1, name, "be an int of at least 1")
        is_timed = is_integer(self.max_new_tokens) and self.max_new_tokens >= 2
        self._require(is_timed, "max_new_tokens", "be an int of at least 2: tokens behind the first are timed")
        self._require(self.dtype is None or self.dtype in DTYPES, "dtype", f"be None or one of {', '.join(DTYPES)}")
        for cell in self.cells():  # which checks the rest
            if cell.is_speculative:  # now, not when the cells beside it have been measured
                cell.engine_config()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Experiment:
        """Of a file's content; what is absent is as in this class."""
        known = [item.name for item in fields(cls)]
        unknown = sorted(set(map(str, values)) - set(known))
        if unknown:
            raise ValueError(f"Experiment: there is no field {unknown[0]}; there are {', '.join(known)}")
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> Experiment:
        """A JSON or YAML object."""
        text = Path(path).read_text(encoding="utf-8")
        try:
            values = json.loads(text) if Path(path).suffix == ".json" else _read_yaml(text)
        except ValueError as error:
            raise ValueError(f"Experiment: {path} is not {Path(path).suffix.lstrip('.') or 'YAML'}: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"Experiment: {path} must hold an object, got {type(values).__name__}")
        return cls.from_dict(values)

    def cells(self) -> Iterator[BenchmarkConfig]:
        """Plain decoding before the cells that are held against it."""
        for pair in self.pairs:
            for domain in self.domains:
                for batch_size in self.batch_sizes:
                    for temperature in self.temperatures:
                        shared = (temperature, self.max_new_tokens, domain, self.seed)
                        yield BenchmarkConfig(pair, None, *shared, batch_size=batch_size)
                        for method in self.methods:
                            for count in self.k:
                                yield BenchmarkConfig(pair, count, *shared, method, batch_size)

    def describe_prompts(self, prompts: Sequence[Prompt]) -> str:
        """Which prompts these are, all domains together: where they come from, how many, and a hash of their texts."""
        source = "built in" if self.prompts is None else Path(self.prompts).name
        return f"{source}, {len(prompts)}, {_hash_texts(prompts)[:8]}"

    def cell_hash(self, config: BenchmarkConfig, prompts: Sequence[Prompt], **machine: Any) -> str:
        """Of everything that a cell's numbers depend on: 12 hex digits. machine: GPU, versions, commit, code."""
        texts = _hash_texts(prompts)
        values = [config.config_hash(), self.dtype, self.num_runs, texts, machine]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _hash_texts(prompts: Sequence[Prompt]) -> str:
    return hashlib.sha256("\0".join(prompt.raw_text for prompt in prompts).encode()).hexdigest()


def _read_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ValueError("reading it needs PyYAML (pip install pyyaml), or write JSON and call it .json") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).splitlines()[0]) from None
