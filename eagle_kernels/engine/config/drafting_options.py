"""What a caller can choose about drafts: the tree, where drafts come from, and by which rule they are kept."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ...ops.attention.shared.drafts import MAX_DRAFT_KEYS, MAX_QUERY
from ...ops.draft.ngram_match import MAX_NGRAM
from ...ops.tree.organize_draft_results import MAX_CANDIDATES
from ...ops.tree.shared.levels import MAX_TOPK
from ...ops.tree.tree_from_mask import MAX_NODES
from ...runtime.validated import Rule, Validated, at_least, between, checked, integer, number, one_of
from ...runtime.values import as_tuples, is_int64, is_integer, is_word, scalar, several, shown
from ..models.quantising import read_quantize
from ..requests.sampling_params import SamplingParams

# kinds of draft models, each with its method
MODEL_KINDS = ("eagle", "mtp", "medusa", "hydra", "dflash", "draft_model")
# methods whose drafts come from a model, some of them at least; None: from a model of any kind
MODEL_METHODS = (None, *MODEL_KINDS, "hybrid")
METHODS = (*MODEL_KINDS, "ngram", "suffix", "hybrid", "naive")
# topk, num_steps, num_draft_tokens, and mean_draft_tokens of those that have one
Tree = tuple[int | None, ...]
# most tokens of a match and its drafts together, in a suffix tree
MAX_TREE_DEPTH = 2**16
FLAG: Rule = ("be True or False", lambda flag: isinstance(flag, bool))


@dataclass(frozen=True)
class DraftingOptions(Validated):
    """Holds the fields of `EAGLEConfig` about drafts; they are documented there."""

    # the tree of a step
    topk: int = integer(8, between(1, MAX_TOPK))
    num_steps: int = integer(5, at_least(1))
    num_draft_tokens: int | None = integer(None)
    mean_draft_tokens: int | None = integer(None, at_least(1))
    _: KW_ONLY
    # how weights are loaded
    quantize: str | tuple[tuple[str, str], ...] | None = None
    draft_quantize: str | tuple[tuple[str, str], ...] | None = None
    # the batch and its memory
    kv_cache_dtype: str = one_of("auto", "fp8", "fp8_e4m3", "int8")
    # where drafts come from
    method: str | tuple[str, ...] | None = None
    share_nodes: bool = checked(False, FLAG)
    max_ngram_size: int = integer(5, between(1, MAX_NGRAM))
    min_ngram_size: int = integer(2, at_least(1))
    ngram_prefer: str = one_of("latest", "earliest")
    num_model_steps: int | None = integer(None, at_least(1))
    suffix_decoding_max_tree_depth: int = integer(64, between(2, MAX_TREE_DEPTH))
    suffix_decoding_max_cached_requests: int = integer(-1, at_least(-1))
    suffix_decoding_max_spec_factor: float = number(1.0, at_least(0))
    suffix_decoding_min_token_prob: float = number(0.1, at_least(0), ("lie in 0..1", lambda share: share <= 1))
    # which drafts are kept
    verify_strategy: str = one_of("target_match", "greedy", "rejection", "topp", "typical")
    max_candidate_len: int = integer(5, between(2, MAX_TOPK))
    verify_window: int = integer(2, between(0, MAX_NODES))
    typical_epsilon: float = number(0.09, between(0, 1))
    typical_delta: float = number(0.3, between(0, 1))

    @property
    def methods(self) -> tuple[str | None, ...]:
        """The methods that requests choose from."""
        return self.method if isinstance(self.method, tuple) else (self.method,)

    @property
    def needs_model(self) -> bool:
        """Whether a model makes drafts, some of them at least."""
        return any(method in MODEL_METHODS for method in self.methods)

    @property
    def has_default_tree(self) -> bool:
        """Whether no other tree than the default one is asked for."""
        asked = ("topk", "num_steps", "num_draft_tokens", "mean_draft_tokens", "num_model_steps")
        return all(getattr(self, name) == getattr(DraftingOptions, name) for name in asked)

    @property
    def num_verify_tokens(self) -> int:
        """Nodes verified a step, root included: `num_draft_tokens`, or its default for this tree."""
        if self.num_draft_tokens is None:
            return min(32, 1 + self._num_candidates)
        return self.num_draft_tokens

    @property
    def most_accepted(self) -> int:
        """The most drafts that a step accepts: one a level, and no more than there are."""
        return min(self.num_steps, self.num_verify_tokens - 1)

    @property
    def num_model_levels(self) -> int:
        """The most levels of drafts that a model makes."""
        is_part = set(MODEL_METHODS).intersection(self.methods) == {"hybrid"}
        return self.num_model_steps if is_part else self.num_steps

    def why_not_served(self, params: SamplingParams) -> str | None:
        """Returns why methods and `verify_strategy` cannot serve such a request; None if they can."""
        strategy = self.verify_strategy
        if strategy == "greedy" and params.temperature > 0:
            return f"verify_strategy='greedy' serves only temperature=0, got {params.temperature}"
        if strategy == "typical" and params.has_filters:
            return "verify_strategy='typical' does not support top_k, top_p or min_p"
        if strategy not in ("target_match", "greedy") and params.logprobs:
            return f"verify_strategy={strategy!r} does not support logprobs"
        if params.drafter is not None and self.share_nodes:
            return f"drafter must be None with share_nodes=True, where all methods draft, got {shown(params.drafter)}"
        if params.drafter is not None and params.drafter not in self.methods:
            rule = f"None or one of the methods {list(self.methods)}"
            if self.method is None:
                rule = "None for method=None, with which the draft model drafts for all requests"
            return f"drafter must be {rule}, got {shown(params.drafter)}"
        return None

    @property
    def _has_probs(self) -> bool:
        """Whether all drafts have probabilities, which tell what each is worth: those of a model, or shared ones."""
        return self.method is None or self.method in MODEL_KINDS or self.share_nodes is True

    @property
    def _is_dynamic(self) -> bool:
        """Whether a model's beams choose the tree, level by level; for `naive` the tree's fields mean nothing."""
        if self.methods == ("naive",):
            return True
        others = {"ngram", "suffix", "hybrid"}.intersection(self.methods)
        return self.needs_model and not others and not is_word(self.verify_strategy, "rejection")

    @property
    def _num_candidates(self) -> int:
        if self._is_dynamic:
            return self.topk + (self.num_steps - 1) * self.topk**2
        return self.topk * self.num_steps

    @property
    def _most_steps(self) -> int:
        """The most levels that the ops hold.
        The beams of all levels but the last attend at once, all candidates are ranked at once, and the draft rereads an
        accepted path, which has num_steps + 1 tokens with its root, at once."""
        if not self.needs_model:
            return MAX_NODES - 1
        if self.method == "hybrid":  # its model drafts few of the levels
            return MAX_QUERY - 1
        levels_below_first = min(MAX_DRAFT_KEYS // self.topk, (MAX_CANDIDATES - self.topk) // self.topk**2)
        return min(1 + levels_below_first, MAX_QUERY - 1)

    def _check_drafting(self) -> None:
        """Checks the fields against each other."""
        for name in ("quantize", "draft_quantize"):
            parts = read_quantize(f"{type(self).__name__}: {name}", getattr(self, name))
            if not isinstance(getattr(self, name), str) and parts is not None:  # a dict has no hash
                object.__setattr__(self, name, tuple(parts.items()))
        self._check_method()
        self._check_sharing()
        rule = f"lie in 1..{self._most_steps} for topk={self.topk}"
        self._require(self.num_steps <= self._most_steps, "num_steps", rule)
        most_nodes = min(MAX_NODES, 1 + self._num_candidates)
        candidates = "topk + (num_steps - 1) * topk^2" if self._is_dynamic else "topk * num_steps"
        rule = f"lie in 2..min({MAX_NODES}, 1 + {candidates}) = {most_nodes} for topk={self.topk}, "
        rule += f"num_steps={self.num_steps} (the root counts)"
        self._require(2 <= self.num_verify_tokens <= most_nodes, "num_draft_tokens", rule)
        self._check_mean()
        rule = f"be at most max_ngram_size = {self.max_ngram_size}"
        self._require(self.min_ngram_size <= self.max_ngram_size, "min_ngram_size", rule)
        self._check_hybrid()

    def _check_mean(self) -> None:
        if self.mean_draft_tokens is None:
            return
        rule = f"be at most the {self.num_verify_tokens} nodes of a tree"
        self._require(self.mean_draft_tokens <= self.num_verify_tokens, "mean_draft_tokens", rule)
        rule = f"be None with method={self.method!r}: only drafts of a model have probabilities to compare them by"
        if isinstance(self.method, tuple):
            rule += ", unless share_nodes=True"
        self._require(self._has_probs, "mean_draft_tokens", rule)
        rule = "be None with verify_strategy='rejection', whose trees must not depend on what was drawn"
        self._require(self.verify_strategy != "rejection", "mean_draft_tokens", rule)

    def _check_method(self) -> None:
        if not isinstance(self.method, tuple):
            is_known = self.method is None or isinstance(self.method, str) and self.method in METHODS
            self._require(is_known, "method", f"be None, one of {list(METHODS)} or a tuple of several")
            return
        are_known = all(isinstance(method, str) and method in METHODS for method in self.method)
        is_choice = are_known and 1 < len(self.method) == len(set(self.method))
        self._require(is_choice, "method", f"be a tuple of two or more different methods of {list(METHODS)}")
        is_one = len(set(MODEL_KINDS).intersection(self.method)) < 2
        self._require(
            is_one,
            "method",
            "hold at most one of eagle, mtp, medusa, hydra, dflash and draft_model: there is one draft model",
        )
        rule = "not be 'rejection' with several methods, not all of which sample their drafts"
        self._require(self.verify_strategy != "rejection", "verify_strategy", rule)

    def _check_sharing(self) -> None:
        if not self.share_nodes:
            return
        rule = f"be False with method={self.method!r}: a tuple of two or more methods share nodes"
        self._require(isinstance(self.method, tuple), "share_nodes", rule)
        for name, reason in (("naive", "makes no drafts"), ("hybrid", "has no probability of each draft")):
            self._require(name not in self.methods, "method", f"not hold {name!r} with share_nodes=True: it {reason}")

    def _check_hybrid(self) -> None:
        if "hybrid" not in self.methods:
            rule = f"be None or num_steps = {self.num_steps} unless method='hybrid', where n-grams follow"
            self._require(self.num_model_steps in (None, self.num_steps), "num_model_steps", rule)
            rule = f"be None for method={self.method!r}, which has no model"
            self._require(self.num_model_steps is None or self.needs_model, "num_model_steps", rule)
            return
        levels = self.num_model_steps
        rule = f"be an int below num_steps = {self.num_steps} for method='hybrid'"
        self._require(levels is not None and levels < self.num_steps, "num_model_steps", rule)
        rule = f"exceed the 1 + topk * num_model_steps = {1 + self.topk * levels} nodes of the model's tree"
        self._require(self.num_verify_tokens > 1 + self.topk * levels, "num_draft_tokens", rule)
        rule = "not be 'rejection' for method='hybrid', since n-gram drafts are not sampled"
        self._require(self.verify_strategy != "rejection", "verify_strategy", rule)


def default_nodes(wanted: int, topk: Any, num_steps: Any, others: Mapping[str, Any]) -> int:
    """Returns the number of nodes of a tree: what is wanted, at most all that it has. Values are checked elsewhere."""
    topk, num_steps, method = scalar(topk), scalar(num_steps), as_tuples(others.get("method"))
    are_sizes = is_integer(topk) and is_integer(num_steps) and min(topk, num_steps) > 0
    if not (are_sizes and all(name is None or isinstance(name, str) for name in several(method) or ())):
        return wanted
    strategy = others.get("verify_strategy", DraftingOptions.verify_strategy)
    made = DraftingOptions(topk, num_steps, method=method, verify_strategy=strategy)
    return min(wanted, 1 + made._num_candidates)


def is_table(value: Any) -> bool:
    """Returns whether a value has the form of a table of trees, for ascending numbers of requests."""
    if not (isinstance(value, tuple) and all(isinstance(entry, tuple) and len(entry) == 2 for entry in value)):
        return False
    limits = [most for most, _ in value]
    is_ascending = all(map(is_int64, limits)) and limits == sorted(set(limits)) and bool(limits) and limits[0] > 0
    return is_ascending and all(tree is None or is_tree(tree) for _, tree in value)


def is_tree(value: Any, most: int = 3) -> bool:
    """Returns whether a value has the form of a tree: three to `most` numbers, whose rules are checked elsewhere."""
    is_long = isinstance(value, tuple) and 3 <= len(value) <= most
    return is_long and all(isinstance(number, (int, float, str, type(None))) for number in value)
