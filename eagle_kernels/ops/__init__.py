"""L2, the operators. `eagle_kernels.<op>` is the public function, `eagle_kernels.raw.<op>` the bare launcher."""

from ..runtime.library import operator
from .tree.build_tree import Output as BuildTreeOutput
from .tree.build_tree import TreeMaskMode
from .verify.verify_tree_greedy import Output as VerifyOutput

build_tree = operator("tree.build_tree")
draft_kv_indices = operator("kv.draft_kv_indices")
gqa_decode = operator("attention.gqa_decode")
move_accepted_kv = operator("kv.move_accepted_kv")
organize_draft_results = operator("tree.organize_draft_results")
sample_from_logits = operator("verify.sample_from_logits")
select_top_k_tokens = operator("tree.select_top_k_tokens")
tree_attention = operator("attention.tree_attention")
verify_tree_greedy = operator("verify.verify_tree_greedy")
verify_tree_sampled = operator("verify.verify_tree_sampled")

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
