"""What a caller can choose about drafting, sampling and stopping."""

from __future__ import annotations

from dataclasses import dataclass

from ..ops.tree.build_tree import MAX_NODES, TreeMaskMode

DEFAULT_MAX_DRAFT_TOKENS = 32
MAX_TOPK = 16


@dataclass(frozen=True)
class EAGLEConfig:
    """Drafting tree, sampling and limits; every value is validated here, with the rule in the message.

    Tree (EAGLE-2): `num_steps` levels; each keeps `topk` nodes and drafts `topk` children of each, so there are
    topk + (num_steps - 1) * topk^2 candidates; the best `num_draft_tokens - 1` of them are verified below the root.

    topk                branching, 1..16; 1 drafts a chain
    num_steps           levels, so at most num_steps drafts are accepted a step
    num_draft_tokens    nodes verified, root included; None: min(32, all candidates and the root)
    temperature         0: greedy
    top_k, top_p, min_p filters of sampling, in this order; 0, 1.0 and 0.0 turn them off
    eos_token_ids       a request ends with the first of these that it emits; None: those that the target's folder
                        names (`EAGLEInference.from_pretrained`), else none
    max_length          most tokens of a request, prompt included; None: what the models were made for
    page_size           tokens per page of the KV pools, a power of two up to 256
    tree_mask_mode      layout in which the tree mask is built (`eagle_kernels.TreeMaskMode`)
    """

    topk: int = 8
    num_steps: int = 5
    num_draft_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    eos_token_ids: tuple[int, ...] | None = None
    max_length: int | None = None
    page_size: int = 16
    tree_mask_mode: str = TreeMaskMode.PACKED

    def __post_init__(self) -> None:
        self._require(1 <= self.topk <= MAX_TOPK, "topk", f"lie in 1..{MAX_TOPK}")
        self._require(self.num_steps >= 1, "num_steps", "be at least 1")
        candidates = self.topk + (self.num_steps - 1) * self.topk**2
        if self.num_draft_tokens is None:
            object.__setattr__(self, "num_draft_tokens", min(DEFAULT_MAX_DRAFT_TOKENS, 1 + candidates))
        most = min(MAX_NODES, 1 + candidates)
        self._require(
            2 <= self.num_draft_tokens <= most,
            "num_draft_tokens",
            f"lie in 2..min({MAX_NODES}, 1 + topk + (num_steps - 1) * topk^2) = {most} for topk={self.topk}, "
            f"num_steps={self.num_steps} (the root counts)",
        )
        self._require(self.temperature >= 0, "temperature", "be at least 0")
        self._require(self.top_k >= 0, "top_k", "be at least 0 (0: off)")
        self._require(0 < self.top_p <= 1, "top_p", "lie in (0, 1] (1: off)")
        self._require(0 <= self.min_p <= 1, "min_p", "lie in 0..1 (0: off)")
        self._require(self.max_length is None or self.max_length >= 2, "max_length", "be at least 2")
        is_power_of_two = self.page_size > 0 and self.page_size & (self.page_size - 1) == 0
        self._require(is_power_of_two and self.page_size <= 256, "page_size", "be a power of two up to 256")
        modes = [str(mode) for mode in TreeMaskMode]
        self._require(str(self.tree_mask_mode) in modes, "tree_mask_mode", f"be one of {modes}")
        if self.tree_mask_mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
            self._require(self.num_draft_tokens <= 32, "num_draft_tokens", "be at most 32 for qlen_only_bitpacking")

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ValueError(f"EAGLEConfig: {name} must {rule}, got {getattr(self, name)!r}")
