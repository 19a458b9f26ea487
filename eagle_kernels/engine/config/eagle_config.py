"""What a caller can choose about drafting, sampling and stopping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ...ops.tree.build_tree import TreeMaskMode
from ...primitives.accept_policy import ACCEPT_POLICIES
from ...primitives.paging import MAX_PAGE_SIZE
from ...runtime.validated import Rule, above, at_least, checked, integer, is_number, number, one_of, same_as
from ...runtime.values import as_tuples, is_int64, is_integer, scalar, several, shown
from ..requests.names import agree, read_names, takes_other_names
from ..requests.sampling_params import SamplingFields, SamplingParams
from .drafting_options import FLAG, DraftingOptions, Tree, default_nodes, is_table, is_tree
from .speculative_config import FIELDS, add_fields, check_fields_are_read, read_speculative_config

# what adaptive="auto" tries beside its own tree: chains, its mean_draft_tokens or, where they cannot be, smaller trees
_CHAINS, _TREE_MEANS, _SMALLER_TREES = ((1, 1, 2), (1, 3, 4)), (8, 16), ((4, 3, 8), (4, 4, 16))
_TOKENS: Rule = ("be None or a tuple of token ids", lambda ids: all(map(is_int64, ids)))
_PAGE_SIZES = [2**power for power in range(MAX_PAGE_SIZE.bit_length())]
_SIMULATED = ("simulated_accept_length", "simulated_accept_lengths", "simulated_accept_rates")


@takes_other_names
@dataclass(frozen=True)
class EAGLEConfig(DraftingOptions):
    """Holds the tree, the source of drafts, sampling and limits. A value that breaks its rule raises ValueError.
    Other engines' names for fields work, too, such as max_num_seqs (`requests/names.py`).

    The tree of a step (EAGLE-2) has `num_steps` levels. A level keeps its best `topk` nodes, and `topk` children of
    each are drafted: topk + (num_steps - 1) * topk^2 candidates. The target verifies the root, which is the last token
    of the text, and the best `num_draft_tokens - 1` candidates.

    Args:
        The tree of a step.
        topk: Branching of the tree, 1..16; 1 drafts a chain.
        num_steps: Levels of drafts, and so the most drafts that a step accepts. Where no tree but the default one is
            asked for, a draft of fewer levels drafts those, and one that drafts chains alone a chain.
        num_draft_tokens: Nodes verified in a step, root included. None: 32, or all candidates and the root if fewer;
            `num_verify_tokens` is the number for the tree in use.
        mean_draft_tokens: Mean nodes per request, root included; a request has at most num_draft_tokens. The target
            verifies the drafts whose paths the draft model finds most probable in the whole batch: more for confident
            requests than for uncertain ones. None: each has num_draft_tokens.
        max_spec_batch: Most requests that step with drafts; a larger batch decodes plainly. None: no limit. 0: the
            draft is never used, and its maximum length limits no request.
        adaptive: Chooses the tree by the number of requests. ((8, (8, 5, 64)), (32, (1, 3, 4)), (64, None)) has trees
            of (topk, num_steps, num_draft_tokens) for up to 8 and up to 32 requests; None decodes plainly, as does a
            batch beyond the last entry. "auto" measures plain decoding, one draft, a chain with a mean of 4 rows
            (`mean_draft_tokens`) and this tree with 8, 16 and all of its rows, and uses the one with the most tokens a
            second; where mean_draft_tokens must be None, and for targets without `last_rows`, smaller trees instead,
            none wider than this one. Unless `warmup` has run, a GPU begins with the largest that has at most 256 rows
            for all requests, and measures another after every 128 steps or more. A tree that does not fit is dropped,
            with a warning.
            None: this tree; but "auto" on a GPU if a model drafts, topk, num_steps, num_draft_tokens, mean_draft_tokens
            and num_model_steps equal their defaults (num_draft_tokens=32 keeps the default tree), verify_strategy is
            "target_match" or "greedy", and accept_policy is "normal": the text then does not depend on the choice,
            except for ties within rounding in fp16 and bf16.
        Where drafts come from.
        method: One of these, or a tuple of several. With several, each request chooses one (`SamplingParams.drafter`),
            their trees have one size, and each drafts for all requests of a step. Trees of "ngram" and "suffix" have at
            most topk * num_steps drafts, and are chains if topk=1 (for "suffix", in all trees of an adaptive table).
            "eagle", "mtp", "medusa", "hydra", "dflash", "draft_model": The draft model, of this kind; None: of any
                kind. Medusa and Hydra heads and several next-token modules draft one level each, and a DFlash block one
                less than its size: num_steps is at most that, and modules need topk=1.
            "ngram": What followed the last tokens earlier in the prompt or output.
            "suffix": What followed the last tokens most often, there and in past responses.
            "hybrid": The draft model, and "ngram" after or beside it, or first if max_ngram_size tokens match.
            "naive": No drafts; the fields of the tree mean nothing.
        share_nodes: Whether several methods all draft for each request instead. Its tree has the drafts likeliest to be
            accepted, by what each method says of its own and has kept so far. Not for "hybrid" and "naive".
        num_model_steps: For "hybrid": the levels that the model drafts, with topk nodes each.
        max_ngram_size, min_ngram_size: For "ngram" and "hybrid": the most and fewest last tokens that an earlier
            place must match; the longest match comes first.
        ngram_prefer: Which of equally long matches comes first, "latest" or "earliest". The first topk form the tree.
        suffix_decoding_max_tree_depth: Longest string in the suffix trees, context and drafts together.
        suffix_decoding_max_cached_requests: How many of the latest responses are remembered. -1: all; 0: none.
        suffix_decoding_max_spec_factor: Most drafts of a step, as a multiple of the longest match's length; on a GPU,
            where the host learns of tokens late, of the last known match plus the tokens since.
        suffix_decoding_min_token_prob: Lowest probability of a draft, from the counts in the suffix trees.
        Which drafts are kept.
        verify_strategy: The rule that decides which drafts are kept.
            "target_match": Draws the target's token after each node as plain decoding does; keeps drafts that match.
            "greedy": The same, for requests with temperature 0 only.
            "rejection": The draft model samples its drafts, topk at the root and one below each; a draft is kept with
                probability min(1, target / draft). The text has the target's distribution, but is not what plain
                decoding writes with the same seed.
            "topp": LOSSY. Keeps drafts that are among the target's candidates.
            "typical": LOSSY. Keeps drafts of probability above min(typical_epsilon, typical_delta e^-entropy).
        max_candidate_len: For "topp": most candidates of a node, 2..16.
        verify_window: For "topp": nodes that must agree with the target below a draft that is its second candidate.
        typical_epsilon, typical_delta: For "typical", in the formula above.
        Sampling and ends, for requests that set no others.
        temperature, top_k, top_p, min_p: As in `SamplingParams`.
        eos_token_ids: A request ends with the first of these that it emits. None: with `from_pretrained`, those in
            the target's folder, otherwise none.
        max_length: Most tokens of a request, prompt included. None: the most that the models support.
        The batch and its memory.
        page_size: Tokens in a page of the KV pools, a power of two up to 256.
        tree_mask_mode: Layout of the tree mask (`eagle_kernels.TreeMaskMode`).
        max_batch: Most requests that step together; others wait.
        kv_cache_bytes: Size of the KV pools of both models together. None: enough for max_batch requests of full
            length, at most half of the device's free memory (1 GiB on the CPU).
        kv_cache_dtype: The type of the target's keys and values: "auto" (the weights'), "fp8", or "int8" (not for
            latents). Scales are the checkpoint's; else fp8 has none, and int8 measures each head's with random tokens.
        How prompts are read.
        prefill_chunk: Most prompt tokens to read in one step, or between two steps.
        share_prefixes: Whether a prefix that prompts share is read once, in whole pages: with running requests and,
            while there is room, with earlier ones. See `Request.shared_tokens`.
        max_step_ms: Most milliseconds that running requests should wait for a step while others' prompts are read: a
            step reads 64 or 192 prompt tokens beside its own rows, as the times so far allow. None: 192 in steps that
            are few, four at most, or of which one long prompt makes at most 256 rows each; otherwise whole prompts by
            themselves. Targets without `last_rows` read prompts between steps, with a limit 64 or more tokens at once.
        How weights are loaded.
        quantize, draft_quantize: How `from_pretrained` quantises linears: "wint4" ("w4a16"), "wint8" ("w8a16"), "fp8",
            "block_wise_fp8", or a dict of these for "dense", "experts" and "lm_head" (else 16 bit). None: not at all.
        How steps run.
        deterministic: Whether the bits of a step's logits depend only on a request's prompt, output and prefill_chunk.
            Then speculative text equals plain decoding's in fp16 and bf16, too; without it, two tokens that are equally
            likely within rounding may be swapped. Needs a GPU, a target that `from_pretrained` loads, and
            verify_strategy "target_match" or "greedy". Steps take longer, and attention needs more memory.
        cuda_graph: Whether steps are captured as CUDA graphs. None: on a GPU, if the mask's layout and the models allow
            it. On the CPU, True only refuses models that could not be captured on a GPU.
        phase_times: Whether events time the phases of some steps (`stats.phase_time_ms`). False: they are {}.
        For timing alone.
        accept_policy: "normal"; "reject_all" accepts no draft: plain decoding's text, one token per step. For timing,
            "accept_all" and "simulate" replace the target's tokens so that the path of first children is accepted
            whole, or to a random depth. The text is then not the target's, and may hold end tokens; with
            eos_token_ids=() every request reaches its full length.
        simulated_accept_length: Turns "simulate" on: the mean tokens per step, bonus token included.
        simulated_accept_lengths: Or, for adaptive, a length per tree, such as (((1, 3, 4), 2.6), ((8, 5, 64, 8), 3.2),
            ((8, 5, 64), 4.0)), where the second has mean_draft_tokens=8.
        simulated_accept_rates: Or P(at least 1, 2, .. num_steps drafts accepted), not increasing. A step ends where the
            path of first children ends, so trees may accept less; chains (topk=1) do not.
    """

    # sampling and ends, of requests that ask for no others
    temperature: float = same_as(SamplingParams, "temperature")
    top_k: int = same_as(SamplingParams, "top_k")
    top_p: float = same_as(SamplingParams, "top_p")
    min_p: float = same_as(SamplingParams, "min_p")
    eos_token_ids: tuple[int, ...] | None = checked(None, _TOKENS)
    max_length: int | None = integer(None, at_least(2))
    # the batch and its memory
    page_size: int = integer(16, (f"be a power of two up to {MAX_PAGE_SIZE}", lambda size: size in _PAGE_SIZES))
    tree_mask_mode: str = TreeMaskMode.PACKED
    max_batch: int = integer(32, at_least(1))
    kv_cache_bytes: int | None = integer(None, at_least(1))
    # how prompts are read
    prefill_chunk: int = integer(2048, at_least(1))
    share_prefixes: bool = checked(True, FLAG)
    max_step_ms: float | None = number(None, above(0))
    # how steps run
    deterministic: bool = checked(False, FLAG)
    cuda_graph: bool | None = checked(None, ("be True, False or None", lambda flag: isinstance(flag, bool)))
    phase_times: bool = checked(True, FLAG)
    # the tree of a step, by the number of requests
    max_spec_batch: int | None = integer(None, at_least(0))
    adaptive: str | tuple[tuple[int, Tree | None], ...] | None = None
    # for timing alone
    accept_policy: str = one_of(*ACCEPT_POLICIES)
    simulated_accept_length: float | None = number(None)
    simulated_accept_lengths: tuple[tuple[Tree, float], ...] | None = None
    simulated_accept_rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "eos_token_ids", several(self.eos_token_ids))
        for name in ("method", "adaptive", "simulated_accept_lengths", "simulated_accept_rates"):
            object.__setattr__(self, name, as_tuples(getattr(self, name)))
        if any(getattr(self, name) is not None for name in _SIMULATED) and self.accept_policy == "normal":
            object.__setattr__(self, "accept_policy", "simulate")
        self._check_each_field()
        self._check_drafting()
        self._check_mask()
        self._check_adaptive()
        self._check_accept_policy()
        for tree in self._tree_sizes() if self.adaptive is not None else ():
            self._with_tree(tree)  # which checks it
        is_plain = self.verify_strategy in ("target_match", "greedy")
        rule = f"be False with verify_strategy={self.verify_strategy!r}, whose text is not plain decoding's"
        self._require(is_plain or not self.deterministic, "deterministic", rule)
        rule = "be None with deterministic=True: bits depend on where prompts are cut, which would depend on times"
        self._require(self.max_step_ms is None or not self.deterministic, "max_step_ms", rule)

    @classmethod
    def naive_eagle(cls, **others: Any) -> EAGLEConfig:
        """Returns a configuration with one draft per step, the head's best, which pays off even in large batches."""
        return cls._fixing("naive_eagle", 1, others)

    @classmethod
    def chain(cls, num_drafts: int, **others: Any) -> EAGLEConfig:
        """Returns a configuration whose tree is a chain of `num_drafts` drafts; `others` are further fields."""
        num_drafts = scalar(num_drafts)
        if not is_integer(num_drafts) or num_drafts < 1:
            raise ValueError(f"EAGLEConfig.chain: num_drafts must be an int of at least 1, got {shown(num_drafts)}")
        return cls._fixing("chain", num_drafts, others)

    @classmethod
    def tree(cls, topk: int = 8, num_steps: int = 5, num_draft_tokens: int | None = None, **others: Any) -> EAGLEConfig:
        """Returns a configuration whose tree has `num_draft_tokens` nodes, root included.

        None: 64, or all candidates and the root if fewer. `topk`, `num_steps`, `others`: as in the class.
        """
        if num_draft_tokens is None:
            num_draft_tokens = default_nodes(64, topk, num_steps, others)
        return cls(topk=topk, num_steps=num_steps, num_draft_tokens=num_draft_tokens, **others)

    @classmethod
    def from_speculative_config(cls, fields: Mapping[str, Any], **others: Any) -> EAGLEConfig:
        """Translates FastDeploy's speculative configuration, and vLLM's where the two agree.

        Args:
            fields: Those in `speculative_config.FIELDS`, such as method and num_speculative_tokens. For a tree, give
                this class's topk, num_steps and num_draft_tokens in place of num_speculative_tokens; with none of
                these, one token is drafted. Other missing fields get this class's defaults, such as verify_strategy,
                which is `topp` (lossy) in FastDeploy and `target_match` here.
            others: Further fields, of this class or of such a configuration, which must not contradict `fields`.

        Raises:
            ValueError: A field is unknown, breaks its rule or contradicts another.
        """
        others = read_names("EAGLEConfig.from_speculative_config", others, {*CONFIG_FIELDS, *FIELDS} - {"model"})
        whole = add_fields(fields, others)
        made = cls(**read_speculative_config(whole), **{name: others[name] for name in others.keys() - FIELDS})
        check_fields_are_read(fields, made)
        return made

    @classmethod
    def _fixing(cls, name: str, num_drafts: int, others: Mapping[str, Any]) -> EAGLEConfig:
        """Returns a chain for one of the methods above; the other fields must not contradict it."""
        fixed = {"topk": 1, "num_steps": num_drafts, "num_draft_tokens": num_drafts + 1}
        others = read_names(f"EAGLEConfig.{name}", others, CONFIG_FIELDS)
        for field in sorted(fixed.keys() & others.keys()):
            if not agree(fixed[field], others[field]):
                reason = f"{name} makes a chain of {shown(num_drafts)} {'draft' if num_drafts == 1 else 'drafts'}"
                rule = f"{field} must be {shown(fixed[field])} or absent, since {reason}"
                raise ValueError(f"EAGLEConfig.{name}: {rule}, got {shown(others[field])}")
        return cls(**{**others, **fixed})

    def on(self, device: torch.device) -> EAGLEConfig:
        """Returns the configuration as a device serves it: a GPU chooses the tree if none is asked for."""
        is_free = self.has_default_tree and self.adaptive is None and self.accept_policy == "normal"
        is_free &= device.type == "cuda" and self._has_probs and self.verify_strategy in ("greedy", "target_match")
        return replace(self, adaptive="auto") if is_free else self

    @property
    def trees(self) -> tuple[tuple[int | None, EAGLEConfig | None], ...]:
        """The choices of a step: (most requests; None: any, configuration with one tree; None: plain decoding)."""
        return self.trees_for(takes_rows=True)

    def trees_for(self, takes_rows: bool) -> tuple[tuple[int | None, EAGLEConfig | None], ...]:
        """Returns `trees`; of an automatic choice, if not takes_rows, those that targets without `last_rows` verify."""
        if self.adaptive in (None, "auto"):
            most = self.max_spec_batch if self.adaptive is None else None
            return tuple((most, self._with_tree(tree)) for tree in self._tree_sizes(takes_rows))
        return tuple((most, None if tree is None else self._with_tree(tree)) for most, tree in self.adaptive)

    def _tree_sizes(self, takes_rows: bool = True) -> list[Tree]:
        """Returns (topk, num_steps, num_draft_tokens) of each tree of a choice, and mean_draft_tokens of some."""
        own = (self.topk, self.num_steps, self.num_verify_tokens)
        if self.adaptive is None:
            return [own]
        if self.adaptive != "auto":
            return [tree for _, tree in self.adaptive if tree is not None]
        most = self.num_verify_tokens if self.mean_draft_tokens is None else self.mean_draft_tokens
        shares_rows = takes_rows and self._has_probs and self.verify_strategy != "rejection"
        shares_rows &= self.tree_mask_mode == TreeMaskMode.PACKED
        smaller = [*_CHAINS, *([(*own, mean) for mean in _TREE_MEANS] if shares_rows else _SMALLER_TREES)]
        levels = self.num_model_steps if "hybrid" in self.methods else 0  # the model has a part in each tree
        return [
            tree
            for tree in smaller
            if tree[0] <= self.topk and levels < tree[1] <= self.num_steps and 1 + tree[0] * levels < tree[-1] < most
        ] + [own]

    @property
    def most_beams(self) -> int:
        """The most nodes of a level that have children, whichever tree a step has."""
        return max((topk for topk, *_ in self._tree_sizes()), default=self.topk)

    @property
    def sampling(self) -> SamplingFields:
        """The sampling of requests that ask for no other, by the fields' names."""
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}

    @property
    def keeps_text(self) -> bool:
        """Whether requests with this sampling get the text that plain decoding draws with the same seed."""
        is_drawn_alike = self.verify_strategy in ("greedy", "target_match")
        is_drawn_alike |= self.verify_strategy in ("rejection", "typical") and self.temperature == 0
        return self.accept_policy in ("normal", "reject_all") and is_drawn_alike

    @property
    def may_speculate(self) -> bool:
        """Whether any step may have drafts. If none may, the draft model reads nothing and limits no request."""
        is_wanted = self.methods != ("naive",) and self.max_spec_batch != 0
        is_table = self.adaptive not in (None, "auto")
        return is_wanted and (not is_table or any(tree is not None for _, tree in self.adaptive))

    @property
    def simulated_rates(self) -> list[float] | None:
        """P(at least 1, 2, .. num_steps drafts accepted) with accept_policy `simulate`; otherwise None.

        A simulated_accept_length of 1 + k + f, with the bonus token and f < 1, always accepts k drafts and one more
        with probability f. No other rates with this mean vary less.
        """
        mean, rates = self.simulated_accept_length, self.simulated_accept_rates
        if mean is not None:
            return [min(max(mean - 1 - depth, 0.0), 1.0) for depth in range(self.num_steps)]
        return None if rates is None else list(rates)

    def _with_tree(self, tree: Tree) -> EAGLEConfig:
        """Returns this configuration with one of `_tree_sizes`, and with what it simulates cut to the tree's size."""
        sizes = dict(zip(("topk", "num_steps", "num_draft_tokens"), tree))
        normal = {"accept_policy": "normal", **dict.fromkeys(_SIMULATED)}
        made = replace(self, **sizes, **normal, adaptive=None, max_spec_batch=None, mean_draft_tokens=None)
        policy, most = {"accept_policy": self.accept_policy}, made.most_accepted + 1
        mean = tree[3] if len(tree) > 3 else self.mean_draft_tokens
        if mean is not None and mean < made.num_verify_tokens:
            policy["mean_draft_tokens"] = mean
        if self.simulated_accept_length is not None:
            policy["simulated_accept_length"] = min(self.simulated_accept_length, most)
        if self.simulated_accept_lengths is not None:
            lengths, name = dict(self.simulated_accept_lengths), "simulated_accept_lengths"
            rule = f"have a number for the tree {tree}, which is tried with a target without last_rows"
            self._require(tree in lengths, name, rule)
            self._require(lengths[tree] <= most, name, f"be at most {most} for the tree {tree}")
            policy["simulated_accept_length"] = lengths[tree]
        if self.simulated_accept_rates is not None:
            rates = self.simulated_accept_rates[: most - 1]
            policy["simulated_accept_rates"] = (*rates, *(0,) * (made.num_steps - len(rates)))
        return replace(made, **policy)

    def _check_mask(self) -> None:
        modes = [str(mode) for mode in TreeMaskMode]
        is_mode = isinstance(self.tree_mask_mode, str) and str(self.tree_mask_mode) in modes
        self._require(is_mode, "tree_mask_mode", f"be one of {modes}")
        if self.tree_mask_mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
            self._require(self.num_verify_tokens <= 32, "num_draft_tokens", "be at most 32 for qlen_only_bitpacking")
        if self.tree_mask_mode == TreeMaskMode.FULL_MASK:
            rule = "not be True with tree_mask_mode='full_mask', whose size the host must know at each step"
            self._require(self.cuda_graph is not True, "cuda_graph", rule)
            self._require(len(self.methods) == 1, "tree_mask_mode", "not be 'full_mask' with several methods")
        is_served = self.tree_mask_mode == TreeMaskMode.PACKED or self.mean_draft_tokens is None
        self._require(is_served, "tree_mask_mode", "be 'packed' with mean_draft_tokens")

    def _check_accept_policy(self) -> None:
        is_planted = self.verify_strategy in ("target_match", "greedy")
        rule = f"be 'normal' with verify_strategy={self.verify_strategy!r} (others need 'target_match' or 'greedy')"
        self._require(is_planted or self.accept_policy == "normal", "accept_policy", rule)
        if self.accept_policy != "simulate":
            for name in _SIMULATED:
                self._require(getattr(self, name) is None, name, "come with accept_policy='simulate'")
            return
        rule = f"come with one of {', '.join(_SIMULATED)} for 'simulate'"
        self._require(sum(getattr(self, name) is not None for name in _SIMULATED) == 1, "accept_policy", rule)
        most, length, rates = self.most_accepted, self.simulated_accept_length, self.simulated_accept_rates
        if self.simulated_accept_lengths is not None:
            return self._check_accept_lengths()
        if length is not None:
            rule = f"lie in 1..min(num_steps + 1, num_draft_tokens) = {most + 1} (bonus token included)"
            return self._require(1 <= length <= most + 1, "simulated_accept_length", rule)
        is_rates = isinstance(rates, tuple) and len(rates) == self.num_steps and all(map(is_number, rates))
        is_falling = is_rates and all(1 >= above >= rate >= 0 for above, rate in zip((1, *rates), rates))
        rule = f"be num_steps = {self.num_steps} numbers in 0..1, none above the one before it"
        self._require(is_falling, "simulated_accept_rates", rule)
        rule = f"be 0 beyond the num_draft_tokens - 1 = {self.num_verify_tokens - 1} drafts of a step"
        self._require(not any(rates[most:]), "simulated_accept_rates", rule)

    def _check_accept_lengths(self) -> None:
        """Checks their form, and that each tree has one."""
        lengths, name = self.simulated_accept_lengths, "simulated_accept_lengths"
        rule = "be pairs of a tree (topk, num_steps, num_draft_tokens), and mean_draft_tokens of those that have one, "
        rule += "and a number of at least 1, each tree once"
        is_table = isinstance(lengths, tuple) and all(isinstance(entry, tuple) and len(entry) == 2 for entry in lengths)
        is_table = is_table and all(is_tree(tree, 4) and is_number(mean) and mean >= 1 for tree, mean in lengths)
        self._require(is_table and len(dict(lengths)) == len(lengths), name, rule)
        self._require(self.adaptive is not None, name, "come with adaptive; without it give simulated_accept_length")
        wanted, given = set(self._tree_sizes()), set(dict(lengths))
        missing, unknown = (", ".join(map(str, sorted(trees, key=str))) for trees in (wanted - given, given - wanted))
        self._require(not missing, name, f"have a number for each tree of adaptive, also for {missing}")
        self._require(not unknown, name, f"name only trees of adaptive, not {unknown}")

    def _check_adaptive(self) -> None:
        if self.adaptive is None:
            return
        rule = "be None with adaptive, whose trees have levels of their own, unless method='hybrid'"
        self._require(self.num_model_steps is None or "hybrid" in self.methods, "num_model_steps", rule)
        if self.adaptive == "auto":
            return
        rule = "be None, 'auto' or ascending ((most requests, (topk, num_steps, num_draft_tokens) or None), ...)"
        self._require(is_table(self.adaptive), "adaptive", rule)
        self._require(self.max_spec_batch is None, "max_spec_batch", "be None when adaptive is a table, which says it")


CONFIG_FIELDS = tuple(field.name for field in fields(EAGLEConfig))
