# Written by `python -m bench.api` from ops/registry.py; do not edit.
from .attention.gqa_decode import gqa_decode as gqa_decode
from .attention.plan_attention import plan_attention as plan_attention
from .attention.prefill_attention import prefill_attention as prefill_attention
from .attention.tree_attention import tree_attention as tree_attention
from .draft.merge_drafts import merge_drafts as merge_drafts
from .draft.ngram_match import ngram_match as ngram_match
from .draft.reroot_drafts import reroot_drafts as reroot_drafts
from .kv.accepted_cache_locs import accepted_cache_locs as accepted_cache_locs
from .kv.align_evict_mask_to_page_size import align_evict_mask_to_page_size as align_evict_mask_to_page_size
from .kv.assign_req_to_token import assign_req_to_token as assign_req_to_token
from .kv.chain_kv_indices import chain_kv_indices as chain_kv_indices
from .kv.draft_cache_locs import draft_cache_locs as draft_cache_locs
from .kv.draft_kv_indices import draft_kv_indices as draft_kv_indices
from .kv.extend_cache_locs import extend_cache_locs as extend_cache_locs
from .kv.find_slots import find_slots as find_slots
from .kv.kv_indices import kv_indices as kv_indices
from .kv.move_accepted_kv import move_accepted_kv as move_accepted_kv
from .kv.write_kv import write_kv as write_kv
from .nn.linear_decode import linear_decode as linear_decode
from .nn.rms_norm import rms_norm as rms_norm
from .nn.rope import rope as rope
from .nn.silu_and_mul import silu_and_mul as silu_and_mul
from .token_bitmask import generate_token_bitmask as generate_token_bitmask
from .tree.build_tree import build_tree as build_tree
from .tree.build_tree_from_scores import build_tree_from_scores as build_tree_from_scores
from .tree.compute_tree_statistics import compute_tree_statistics as compute_tree_statistics
from .tree.organize_draft_results import organize_draft_results as organize_draft_results
from .tree.pack_tree_mask import pack_tree_mask as pack_tree_mask
from .tree.prune_trees import prune_trees as prune_trees
from .tree.select_top_k_tokens import select_top_k_tokens as select_top_k_tokens
from .tree.shared.tree_contract import Output as BuildTreeOutput
from .tree.shared.tree_mask import TreeMaskMode as TreeMaskMode
from .tree.tree_from_mask import tree_from_mask as tree_from_mask
from .tree.tree_from_parents import tree_from_parents as tree_from_parents
from .tree.unpack_tree_mask import unpack_tree_mask as unpack_tree_mask
from .verify.append_output import append_output as append_output
from .verify.min_p_renorm import min_p_renorm as min_p_renorm
from .verify.pack_verify_rows import pack_verify_rows as pack_verify_rows
from .verify.penalize_logits import penalize_logits as penalize_logits
from .verify.sample_children import sample_children as sample_children
from .verify.sample_from_logits import sample_from_logits as sample_from_logits
from .verify.shared.tree_walk import Output as VerifyOutput
from .verify.top_k_renorm import top_k_renorm as top_k_renorm
from .verify.top_p_renorm import top_p_renorm as top_p_renorm
from .verify.verify_chain import verify_chain as verify_chain
from .verify.verify_commit import Output as CommitOutput
from .verify.verify_commit import verify_commit as verify_commit
from .verify.verify_tree_coins import verify_tree_coins as verify_tree_coins
from .verify.verify_tree_greedy import verify_tree_greedy as verify_tree_greedy
from .verify.verify_tree_rejection import verify_tree_rejection as verify_tree_rejection
from .verify.verify_tree_sampled import verify_tree_sampled as verify_tree_sampled
from .verify.verify_tree_topp import verify_tree_topp as verify_tree_topp
from .verify.verify_tree_traversal import verify_tree_traversal as verify_tree_traversal
from .verify.verify_tree_typical import verify_tree_typical as verify_tree_typical
from .verify_tree import verify_tree as verify_tree

__all__ = [
    "BuildTreeOutput",
    "CommitOutput",
    "TreeMaskMode",
    "VerifyOutput",
    "accepted_cache_locs",
    "align_evict_mask_to_page_size",
    "append_output",
    "assign_req_to_token",
    "build_tree",
    "build_tree_from_scores",
    "chain_kv_indices",
    "compute_tree_statistics",
    "draft_cache_locs",
    "draft_kv_indices",
    "extend_cache_locs",
    "find_slots",
    "generate_token_bitmask",
    "gqa_decode",
    "kv_indices",
    "linear_decode",
    "merge_drafts",
    "min_p_renorm",
    "move_accepted_kv",
    "ngram_match",
    "organize_draft_results",
    "pack_tree_mask",
    "pack_verify_rows",
    "penalize_logits",
    "plan_attention",
    "prefill_attention",
    "prune_trees",
    "reroot_drafts",
    "rms_norm",
    "rope",
    "sample_children",
    "sample_from_logits",
    "select_top_k_tokens",
    "silu_and_mul",
    "top_k_renorm",
    "top_p_renorm",
    "tree_attention",
    "tree_from_mask",
    "tree_from_parents",
    "unpack_tree_mask",
    "verify_chain",
    "verify_commit",
    "verify_tree",
    "verify_tree_coins",
    "verify_tree_greedy",
    "verify_tree_rejection",
    "verify_tree_sampled",
    "verify_tree_topp",
    "verify_tree_traversal",
    "verify_tree_typical",
    "write_kv",
]
