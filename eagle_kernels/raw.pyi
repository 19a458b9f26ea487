# Written by `python -m bench.api`; do not edit.
from .ops.attention.gqa_decode import gqa_decode as gqa_decode
from .ops.attention.plan_attention import plan_attention as plan_attention
from .ops.attention.prefill_attention import prefill_attention as prefill_attention
from .ops.attention.tree_attention import tree_attention as tree_attention
from .ops.draft.merge_drafts import merge_drafts as merge_drafts
from .ops.draft.ngram_match import ngram_match as ngram_match
from .ops.draft.reroot_drafts import reroot_drafts as reroot_drafts
from .ops.draft.share_drafts import share_drafts as share_drafts
from .ops.experts.fused_experts import fused_experts as fused_experts
from .ops.experts.route_experts import route_experts as route_experts
from .ops.kv.accepted_cache_locs import accepted_cache_locs as accepted_cache_locs
from .ops.kv.align_evict_mask_to_page_size import align_evict_mask_to_page_size as align_evict_mask_to_page_size
from .ops.kv.assign_req_to_token import assign_req_to_token as assign_req_to_token
from .ops.kv.chain_kv_indices import chain_kv_indices as chain_kv_indices
from .ops.kv.draft_cache_locs import draft_cache_locs as draft_cache_locs
from .ops.kv.draft_kv_indices import draft_kv_indices as draft_kv_indices
from .ops.kv.extend_cache_locs import extend_cache_locs as extend_cache_locs
from .ops.kv.find_slots import find_slots as find_slots
from .ops.kv.kv_indices import kv_indices as kv_indices
from .ops.kv.move_accepted_kv import move_accepted_kv as move_accepted_kv
from .ops.kv.write_kv import write_kv as write_kv
from .ops.latent.mla_decode import mla_decode as mla_decode
from .ops.latent.mla_prefill import mla_prefill as mla_prefill
from .ops.latent.mla_tree_attention import mla_tree_attention as mla_tree_attention
from .ops.latent.write_latent_kv import write_latent_kv as write_latent_kv
from .ops.linear.linear_decode import linear_decode as linear_decode
from .ops.linear.linear_fp8 import linear_fp8 as linear_fp8
from .ops.linear.linear_w4a16 import linear_w4a16 as linear_w4a16
from .ops.linear.linear_w8a16 import linear_w8a16 as linear_w8a16
from .ops.nn.rms_norm import rms_norm as rms_norm
from .ops.nn.rope import rope as rope
from .ops.nn.silu_and_mul import silu_and_mul as silu_and_mul
from .ops.rejection.sample_children import sample_children as sample_children
from .ops.rejection.verify_chain import verify_chain as verify_chain
from .ops.rejection.verify_tree_rejection import verify_tree_rejection as verify_tree_rejection
from .ops.rejection.verify_tree_traversal import verify_tree_traversal as verify_tree_traversal
from .ops.sampling.min_p_renorm import min_p_renorm as min_p_renorm
from .ops.sampling.penalize_logits import penalize_logits as penalize_logits
from .ops.sampling.sample_from_logits import sample_from_logits as sample_from_logits
from .ops.sampling.top_k_renorm import top_k_renorm as top_k_renorm
from .ops.sampling.top_p_renorm import top_p_renorm as top_p_renorm
from .ops.sampling.verify_tree_sampled import verify_tree_sampled as verify_tree_sampled
from .ops.tree.build_tree import build_tree as build_tree
from .ops.tree.build_tree_from_blocks import build_tree_from_blocks as build_tree_from_blocks
from .ops.tree.build_tree_from_scores import build_tree_from_scores as build_tree_from_scores
from .ops.tree.compute_tree_statistics import compute_tree_statistics as compute_tree_statistics
from .ops.tree.organize_draft_results import organize_draft_results as organize_draft_results
from .ops.tree.pack_tree_mask import pack_tree_mask as pack_tree_mask
from .ops.tree.prune_trees import prune_trees as prune_trees
from .ops.tree.select_from_head import select_from_head as select_from_head
from .ops.tree.select_top_k_tokens import select_top_k_tokens as select_top_k_tokens
from .ops.tree.tree_from_mask import tree_from_mask as tree_from_mask
from .ops.tree.tree_from_parents import tree_from_parents as tree_from_parents
from .ops.tree.unpack_tree_mask import unpack_tree_mask as unpack_tree_mask
from .ops.verify.append_output import append_output as append_output
from .ops.verify.pack_verify_rows import pack_verify_rows as pack_verify_rows
from .ops.verify.verify_commit import verify_commit as verify_commit
from .ops.verify.verify_tree_coins import verify_tree_coins as verify_tree_coins
from .ops.verify.verify_tree_greedy import verify_tree_greedy as verify_tree_greedy
from .ops.verify.verify_tree_topp import verify_tree_topp as verify_tree_topp
from .ops.verify.verify_tree_typical import verify_tree_typical as verify_tree_typical

__all__ = [
    "accepted_cache_locs",
    "align_evict_mask_to_page_size",
    "append_output",
    "assign_req_to_token",
    "build_tree",
    "build_tree_from_blocks",
    "build_tree_from_scores",
    "chain_kv_indices",
    "compute_tree_statistics",
    "draft_cache_locs",
    "draft_kv_indices",
    "extend_cache_locs",
    "find_slots",
    "fused_experts",
    "gqa_decode",
    "kv_indices",
    "linear_decode",
    "linear_fp8",
    "linear_w4a16",
    "linear_w8a16",
    "merge_drafts",
    "min_p_renorm",
    "mla_decode",
    "mla_prefill",
    "mla_tree_attention",
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
    "route_experts",
    "sample_children",
    "sample_from_logits",
    "select_from_head",
    "select_top_k_tokens",
    "share_drafts",
    "silu_and_mul",
    "top_k_renorm",
    "top_p_renorm",
    "tree_attention",
    "tree_from_mask",
    "tree_from_parents",
    "unpack_tree_mask",
    "verify_chain",
    "verify_commit",
    "verify_tree_coins",
    "verify_tree_greedy",
    "verify_tree_rejection",
    "verify_tree_sampled",
    "verify_tree_topp",
    "verify_tree_traversal",
    "verify_tree_typical",
    "write_kv",
    "write_latent_kv",
]
