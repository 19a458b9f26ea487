# Written by `python -m bench.api`; do not edit.
from . import engine as engine
from . import ops as ops
from . import raw as raw
from . import reference as reference
from . import types as types
from .engine.config.eagle_config import EAGLEConfig as EAGLEConfig
from .engine.inference import EAGLEInference as EAGLEInference
from .engine.requests.sampling_params import SamplingParams as SamplingParams
from .ops import TreeMaskMode as TreeMaskMode
from .ops import accepted_cache_locs as accepted_cache_locs
from .ops import align_evict_mask_to_page_size as align_evict_mask_to_page_size
from .ops import append_output as append_output
from .ops import assign_req_to_token as assign_req_to_token
from .ops import build_tree as build_tree
from .ops import build_tree_from_blocks as build_tree_from_blocks
from .ops import build_tree_from_scores as build_tree_from_scores
from .ops import cache_addresses as cache_addresses
from .ops import chain_kv_indices as chain_kv_indices
from .ops import compute_tree_statistics as compute_tree_statistics
from .ops import draft_cache_locs as draft_cache_locs
from .ops import draft_kv_indices as draft_kv_indices
from .ops import extend_cache_locs as extend_cache_locs
from .ops import find_slots as find_slots
from .ops import fused_experts as fused_experts
from .ops import generate_token_bitmask as generate_token_bitmask
from .ops import gqa_decode as gqa_decode
from .ops import kv_indices as kv_indices
from .ops import linear_decode as linear_decode
from .ops import linear_fp8 as linear_fp8
from .ops import linear_w4a16 as linear_w4a16
from .ops import linear_w8a16 as linear_w8a16
from .ops import merge_drafts as merge_drafts
from .ops import min_p_renorm as min_p_renorm
from .ops import mla_decode as mla_decode
from .ops import mla_prefill as mla_prefill
from .ops import mla_tree_attention as mla_tree_attention
from .ops import move_accepted_kv as move_accepted_kv
from .ops import ngram_match as ngram_match
from .ops import organize_draft_results as organize_draft_results
from .ops import pack_tree_mask as pack_tree_mask
from .ops import pack_verify_rows as pack_verify_rows
from .ops import penalize_logits as penalize_logits
from .ops import plan_attention as plan_attention
from .ops import prefill_attention as prefill_attention
from .ops import prune_trees as prune_trees
from .ops import reroot_drafts as reroot_drafts
from .ops import rms_norm as rms_norm
from .ops import rope as rope
from .ops import route_experts as route_experts
from .ops import sample_children as sample_children
from .ops import sample_from_logits as sample_from_logits
from .ops import select_from_head as select_from_head
from .ops import select_top_k_tokens as select_top_k_tokens
from .ops import share_drafts as share_drafts
from .ops import silu_and_mul as silu_and_mul
from .ops import top_k_renorm as top_k_renorm
from .ops import top_p_renorm as top_p_renorm
from .ops import tree_attention as tree_attention
from .ops import tree_from_mask as tree_from_mask
from .ops import tree_from_parents as tree_from_parents
from .ops import unpack_tree_mask as unpack_tree_mask
from .ops import verify_chain as verify_chain
from .ops import verify_commit as verify_commit
from .ops import verify_tree as verify_tree
from .ops import verify_tree_coins as verify_tree_coins
from .ops import verify_tree_greedy as verify_tree_greedy
from .ops import verify_tree_rejection as verify_tree_rejection
from .ops import verify_tree_sampled as verify_tree_sampled
from .ops import verify_tree_topp as verify_tree_topp
from .ops import verify_tree_traversal as verify_tree_traversal
from .ops import verify_tree_typical as verify_tree_typical
from .ops import write_kv as write_kv
from .ops import write_latent_kv as write_latent_kv

__version__: str

__all__ = [
    "EAGLEConfig",
    "EAGLEInference",
    "SamplingParams",
    "TreeMaskMode",
    "__version__",
    "accepted_cache_locs",
    "align_evict_mask_to_page_size",
    "append_output",
    "assign_req_to_token",
    "build_tree",
    "build_tree_from_blocks",
    "build_tree_from_scores",
    "cache_addresses",
    "chain_kv_indices",
    "compute_tree_statistics",
    "draft_cache_locs",
    "draft_kv_indices",
    "extend_cache_locs",
    "find_slots",
    "fused_experts",
    "generate_token_bitmask",
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
    "raw",
    "reference",
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
    "verify_tree",
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
