"""eagle_kernels: Triton kernels for speculative decoding with token trees, each paired with a PyTorch reference."""

from . import raw, reference
from .engine import EAGLEConfig, EAGLEInference
from .ops import (
    TreeMaskMode,
    build_tree,
    draft_kv_indices,
    gqa_decode,
    move_accepted_kv,
    organize_draft_results,
    sample_from_logits,
    select_top_k_tokens,
    tree_attention,
    verify_tree,
    verify_tree_greedy,
    verify_tree_sampled,
)

__all__ = [
    "EAGLEConfig",
    "EAGLEInference",
    "TreeMaskMode",
    "build_tree",
    "draft_kv_indices",
    "gqa_decode",
    "move_accepted_kv",
    "organize_draft_results",
    "raw",
    "reference",
    "sample_from_logits",
    "select_top_k_tokens",
    "tree_attention",
    "verify_tree",
    "verify_tree_greedy",
    "verify_tree_sampled",
]
