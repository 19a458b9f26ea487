"""What a caller can choose about where drafts come from, and by which rule they are kept."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...ops.tree.build_tree import MAX_NODES
from ...ops.tree.select_top_k_tokens import MAX_TOPK
from ..drafters.suffix_cache import MAX_TREE_DEPTH
from ..requests.sampling_params import SamplingParams

# kinds of draft models, each with its method
MODEL_KINDS = ("eagle", "mtp", "draft_model")
# whose drafts a model makes, some of them at least
MODEL_METHODS = (*MODEL_KINDS, "hybrid")
METHODS = (*MODEL_KINDS, "ngram", "suffix", "hybrid", "naive")
VERIFY_STRATEGIES = ("target_match", "greedy", "rejection", "topp", "typical")
# that draw by other rules than plain decoding, so that one seed gives another text
_OTHER_DRAWS = ("rejection", "topp", "typical")
NGRAM_PREFERENCES = ("latest", "earliest")
MAX_NGRAM = 32


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Fields of `EAGLEConfig`, which documents and checks them."""

    method: str | tuple[str, ...] | None = None
    max_ngram_size: int = 5
    min_ngram_size: int = 2
    ngram_prefer: str = "latest"
    num_model_steps: int | None = None
    suffix_decoding_max_tree_depth: int = 64
    suffix_decoding_max_cached_requests: int = -1
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    verify_strategy: str = "target_match"
    max_candidate_len: int = 5
    verify_window: int = 2
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3

    @property
    def methods(self) -> tuple[str | None, ...]:
        """Those that requests choose from."""
        return self.method if isinstance(self.method, tuple) else (self.method,)

    @property
    def needs_model(self) -> bool:
        """Whether drafts are a model's, some of them at least."""
        return any(method is None or method in MODEL_METHODS for method in self.methods)

    @property
    def num_model_levels(self) -> int:
        """Levels of drafts that a model makes, at most."""
        is_part = all(method == "hybrid" or method not in (None, *MODEL_METHODS) for method in self.methods)
        return self.num_model_steps if is_part and "hybrid" in self.methods else self.num_steps

    def _check_method(self) -> None:
        if isinstance(self.method, (tuple, list)):
            object.__setattr__(self, "method", tuple(self.method))
            is_choice = len(self.method) > 1 and len(set(self.method)) == len(self.method)
            is_choice = is_choice and all(method in METHODS for method in self.method)
            self._require(is_choice, "method", f"be at least two different ones of {list(METHODS)}")
            is_one = len(set(MODEL_KINDS).intersection(self.method)) < 2
            self._require(is_one, "method", "hold one of eagle, mtp and draft_model at most: there is one draft model")
            rule = "not be 'rejection' with several methods, whose drafts are not all drawn"
            self._require(self.verify_strategy != "rejection", "verify_strategy", rule)
        else:
            is_known = self.method is None or self.method in METHODS
            self._require(is_known, "method", f"be None, or one of {list(METHODS)} or several of them")
        self._require_integer("max_ngram_size", 1, MAX_NGRAM)
        self._require_integer("min_ngram_size", 1)
        rule = f"be at most max_ngram_size = {self.max_ngram_size}"
        self._require(self.min_ngram_size <= self.max_ngram_size, "min_ngram_size", rule)
        self._require(self.ngram_prefer in NGRAM_PREFERENCES, "ngram_prefer", f"be one of {list(NGRAM_PREFERENCES)}")
        self._require_integer("num_model_steps", 1, is_optional=True)
        self._require_integer("suffix_decoding_max_tree_depth", 2, MAX_TREE_DEPTH)
        self._require_integer("suffix_decoding_max_cached_requests", -1)
        for name in ("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"):
            self._require_number(name)
            self._require(getattr(self, name) >= 0, name, "be at least 0")
        self._require(self.suffix_decoding_min_token_prob <= 1, "suffix_decoding_min_token_prob", "lie in 0..1")
        is_known = self.verify_strategy in VERIFY_STRATEGIES
        self._require(is_known, "verify_strategy", f"be one of {list(VERIFY_STRATEGIES)}")
        self._require_integer("max_candidate_len", 2, MAX_TOPK)
        self._require_integer("verify_window", 0, MAX_NODES)
        for name in ("typical_epsilon", "typical_delta"):
            self._require_number(name)
            self._require(0 <= getattr(self, name) <= 1, name, "lie in 0..1")

    def _check_hybrid(self) -> None:
        """After num_draft_tokens, num_steps and topk."""
        if "hybrid" not in self.methods:
            rule = "be None or num_steps but for method='hybrid', where the model drafts some levels of all"
            self._require(self.num_model_steps in (None, self.num_steps), "num_model_steps", rule)
            return
        levels = self.num_model_steps
        rule = f"be given for method='hybrid', below num_steps = {self.num_steps}"
        self._require(levels is not None and levels < self.num_steps, "num_model_steps", rule)
        rule = f"exceed the 1 + topk * num_model_steps = {1 + self.topk * levels} nodes of the model's tree"
        self._require(self.num_verify_tokens > 1 + self.topk * levels, "num_draft_tokens", rule)
        rule = "not be 'rejection' for method='hybrid', some of whose drafts are not drawn"
        self._require(self.verify_strategy != "rejection", "verify_strategy", rule)

    def why_not_served(self, params: SamplingParams) -> str | None:
        """Why methods and `verify_strategy` cannot serve such a request; None: they can."""
        strategy = self.verify_strategy
        if strategy == "greedy" and params.temperature > 0:
            return f"verify_strategy='greedy' serves temperature=0 alone, got {params.temperature}"
        if strategy == "typical" and params.has_filters:
            return "verify_strategy='typical' knows no top_k, top_p and min_p"
        if strategy in _OTHER_DRAWS and params.logprobs:
            return f"verify_strategy={strategy!r} knows no logprobs"
        if params.drafter is not None and params.drafter not in self.methods:
            rule = f"None or one of the methods {list(self.methods)}"
            if self.method is None:
                rule = "None for method=None, with which the draft model drafts for all requests"
            return f"drafter must be {rule}, got {params.drafter!r}"
        return None


METHOD_FIELDS = tuple(field.name for field in fields(MethodOptions))
