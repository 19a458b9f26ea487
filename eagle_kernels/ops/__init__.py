"""L2, the operators. `eagle_kernels.<op>` is the public function, `eagle_kernels.raw.<op>` the bare launcher."""

from importlib import import_module

from ..runtime.library import operator
from .tree.build_tree import Output as BuildTreeOutput
from .tree.build_tree import TreeMaskMode
from .verify.verify_tree_greedy import Output as VerifyOutput


def _operator(path: str):
    """The public function of the op `eagle_kernels/ops/<path>.py` and its reference of the same name."""
    return operator(import_module("." + path, __name__), import_module("..reference.ops." + path, __name__))


build_tree = _operator("tree.build_tree")
draft_kv_indices = _operator("kv.draft_kv_indices")
gqa_decode = _operator("attention.gqa_decode")
move_accepted_kv = _operator("kv.move_accepted_kv")
organize_draft_results = _operator("tree.organize_draft_results")
sample_from_logits = _operator("verify.sample_from_logits")
select_top_k_tokens = _operator("tree.select_top_k_tokens")
tree_attention = _operator("attention.tree_attention")
verify_tree_greedy = _operator("verify.verify_tree_greedy")
verify_tree_sampled = _operator("verify.verify_tree_sampled")

__all__ = [
    "BuildTreeOutput",
    "TreeMaskMode",
    "VerifyOutput",
    "build_tree",
    "draft_kv_indices",
    "gqa_decode",
    "move_accepted_kv",
    "organize_draft_results",
    "sample_from_logits",
    "select_top_k_tokens",
    "tree_attention",
    "verify_tree_greedy",
    "verify_tree_sampled",
]
