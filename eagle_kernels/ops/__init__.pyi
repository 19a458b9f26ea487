# Written by `python -m bench.api`; do not edit.
from ..reference.ops.attention.gqa_decode import gqa_decode as _gqa_decode_reference
from ..reference.ops.attention.plan_attention import plan_attention as _plan_attention_reference
from ..reference.ops.attention.prefill_attention import prefill_attention as _prefill_attention_reference
from ..reference.ops.attention.tree_attention import tree_attention as _tree_attention_reference
from ..reference.ops.draft.merge_drafts import merge_drafts as _merge_drafts_reference
from ..reference.ops.draft.ngram_match import ngram_match as _ngram_match_reference
from ..reference.ops.draft.reroot_drafts import reroot_drafts as _reroot_drafts_reference
from ..reference.ops.draft.share_drafts import share_drafts as _share_drafts_reference
from ..reference.ops.experts.fused_experts import fused_experts as _fused_experts_reference
from ..reference.ops.experts.route_experts import route_experts as _route_experts_reference
from ..reference.ops.kv.accepted_cache_locs import accepted_cache_locs as _accepted_cache_locs_reference
from ..reference.ops.kv.align_evict_mask_to_page_size import align_evict_mask_to_page_size as _align_evict_mask_to_page_size_reference
from ..reference.ops.kv.assign_req_to_token import assign_req_to_token as _assign_req_to_token_reference
from ..reference.ops.kv.chain_kv_indices import chain_kv_indices as _chain_kv_indices_reference
from ..reference.ops.kv.draft_cache_locs import draft_cache_locs as _draft_cache_locs_reference
from ..reference.ops.kv.draft_kv_indices import draft_kv_indices as _draft_kv_indices_reference
from ..reference.ops.kv.extend_cache_locs import extend_cache_locs as _extend_cache_locs_reference
from ..reference.ops.kv.find_slots import find_slots as _find_slots_reference
from ..reference.ops.kv.kv_indices import kv_indices as _kv_indices_reference
from ..reference.ops.kv.move_accepted_kv import move_accepted_kv as _move_accepted_kv_reference
from ..reference.ops.kv.write_kv import write_kv as _write_kv_reference
from ..reference.ops.latent.mla_decode import mla_decode as _mla_decode_reference
from ..reference.ops.latent.mla_prefill import mla_prefill as _mla_prefill_reference
from ..reference.ops.latent.mla_tree_attention import mla_tree_attention as _mla_tree_attention_reference
from ..reference.ops.latent.write_latent_kv import write_latent_kv as _write_latent_kv_reference
from ..reference.ops.linear.linear_decode import linear_decode as _linear_decode_reference
from ..reference.ops.linear.linear_fp8 import linear_fp8 as _linear_fp8_reference
from ..reference.ops.linear.linear_w4a16 import linear_w4a16 as _linear_w4a16_reference
from ..reference.ops.linear.linear_w8a16 import linear_w8a16 as _linear_w8a16_reference
from ..reference.ops.nn.rms_norm import rms_norm as _rms_norm_reference
from ..reference.ops.nn.rope import rope as _rope_reference
from ..reference.ops.nn.silu_and_mul import silu_and_mul as _silu_and_mul_reference
from ..reference.ops.rejection.sample_children import sample_children as _sample_children_reference
from ..reference.ops.rejection.verify_chain import verify_chain as _verify_chain_reference
from ..reference.ops.rejection.verify_tree_rejection import verify_tree_rejection as _verify_tree_rejection_reference
from ..reference.ops.rejection.verify_tree_traversal import verify_tree_traversal as _verify_tree_traversal_reference
from ..reference.ops.sampling.min_p_renorm import min_p_renorm as _min_p_renorm_reference
from ..reference.ops.sampling.penalize_logits import penalize_logits as _penalize_logits_reference
from ..reference.ops.sampling.sample_from_logits import sample_from_logits as _sample_from_logits_reference
from ..reference.ops.sampling.top_k_renorm import top_k_renorm as _top_k_renorm_reference
from ..reference.ops.sampling.top_p_renorm import top_p_renorm as _top_p_renorm_reference
from ..reference.ops.sampling.verify_tree_sampled import verify_tree_sampled as _verify_tree_sampled_reference
from ..reference.ops.tree.build_tree import build_tree as _build_tree_reference
from ..reference.ops.tree.build_tree_from_blocks import build_tree_from_blocks as _build_tree_from_blocks_reference
from ..reference.ops.tree.build_tree_from_scores import build_tree_from_scores as _build_tree_from_scores_reference
from ..reference.ops.tree.compute_tree_statistics import compute_tree_statistics as _compute_tree_statistics_reference
from ..reference.ops.tree.organize_draft_results import organize_draft_results as _organize_draft_results_reference
from ..reference.ops.tree.pack_tree_mask import pack_tree_mask as _pack_tree_mask_reference
from ..reference.ops.tree.prune_trees import prune_trees as _prune_trees_reference
from ..reference.ops.tree.select_from_head import select_from_head as _select_from_head_reference
from ..reference.ops.tree.select_top_k_tokens import select_top_k_tokens as _select_top_k_tokens_reference
from ..reference.ops.tree.tree_from_mask import tree_from_mask as _tree_from_mask_reference
from ..reference.ops.tree.tree_from_parents import tree_from_parents as _tree_from_parents_reference
from ..reference.ops.tree.unpack_tree_mask import unpack_tree_mask as _unpack_tree_mask_reference
from ..reference.ops.verify.append_output import append_output as _append_output_reference
from ..reference.ops.verify.pack_verify_rows import pack_verify_rows as _pack_verify_rows_reference
from ..reference.ops.verify.verify_commit import verify_commit as _verify_commit_reference
from ..reference.ops.verify.verify_tree_coins import verify_tree_coins as _verify_tree_coins_reference
from ..reference.ops.verify.verify_tree_greedy import verify_tree_greedy as _verify_tree_greedy_reference
from ..reference.ops.verify.verify_tree_topp import verify_tree_topp as _verify_tree_topp_reference
from ..reference.ops.verify.verify_tree_typical import verify_tree_typical as _verify_tree_typical_reference
from ..reference.ops.verify_tree import verify_tree as _verify_tree_reference
from ..runtime.library import with_reference as _with_reference
from .attention.gqa_decode import gqa_decode as _gqa_decode
from .attention.plan_attention import plan_attention as _plan_attention
from .attention.prefill_attention import prefill_attention as _prefill_attention
from .attention.tree_attention import tree_attention as _tree_attention
from .cache_table import cache_addresses as cache_addresses
from .draft.merge_drafts import merge_drafts as _merge_drafts
from .draft.ngram_match import ngram_match as _ngram_match
from .draft.reroot_drafts import reroot_drafts as _reroot_drafts
from .draft.share_drafts import share_drafts as _share_drafts
from .experts.fused_experts import fused_experts as _fused_experts
from .experts.route_experts import route_experts as _route_experts
from .front_door import verify_tree as _verify_tree
from .kv.accepted_cache_locs import accepted_cache_locs as _accepted_cache_locs
from .kv.align_evict_mask_to_page_size import align_evict_mask_to_page_size as _align_evict_mask_to_page_size
from .kv.assign_req_to_token import assign_req_to_token as _assign_req_to_token
from .kv.chain_kv_indices import chain_kv_indices as _chain_kv_indices
from .kv.draft_cache_locs import draft_cache_locs as _draft_cache_locs
from .kv.draft_kv_indices import draft_kv_indices as _draft_kv_indices
from .kv.extend_cache_locs import extend_cache_locs as _extend_cache_locs
from .kv.find_slots import find_slots as _find_slots
from .kv.kv_indices import kv_indices as _kv_indices
from .kv.move_accepted_kv import move_accepted_kv as _move_accepted_kv
from .kv.write_kv import write_kv as _write_kv
from .latent.mla_decode import mla_decode as _mla_decode
from .latent.mla_prefill import mla_prefill as _mla_prefill
from .latent.mla_tree_attention import mla_tree_attention as _mla_tree_attention
from .latent.write_latent_kv import write_latent_kv as _write_latent_kv
from .linear.linear_decode import linear_decode as _linear_decode
from .linear.linear_fp8 import linear_fp8 as _linear_fp8
from .linear.linear_w4a16 import linear_w4a16 as _linear_w4a16
from .linear.linear_w8a16 import linear_w8a16 as _linear_w8a16
from .nn.rms_norm import rms_norm as _rms_norm
from .nn.rope import rope as _rope
from .nn.silu_and_mul import silu_and_mul as _silu_and_mul
from .rejection.sample_children import sample_children as _sample_children
from .rejection.verify_chain import verify_chain as _verify_chain
from .rejection.verify_tree_rejection import verify_tree_rejection as _verify_tree_rejection
from .rejection.verify_tree_traversal import verify_tree_traversal as _verify_tree_traversal
from .sampling.min_p_renorm import min_p_renorm as _min_p_renorm
from .sampling.penalize_logits import penalize_logits as _penalize_logits
from .sampling.sample_from_logits import sample_from_logits as _sample_from_logits
from .sampling.top_k_renorm import top_k_renorm as _top_k_renorm
from .sampling.top_p_renorm import top_p_renorm as _top_p_renorm
from .sampling.verify_tree_sampled import verify_tree_sampled as _verify_tree_sampled
from .token_bitmask import generate_token_bitmask as generate_token_bitmask
from .tree.build_tree import build_tree as _build_tree
from .tree.build_tree_from_blocks import build_tree_from_blocks as _build_tree_from_blocks
from .tree.build_tree_from_scores import build_tree_from_scores as _build_tree_from_scores
from .tree.compute_tree_statistics import compute_tree_statistics as _compute_tree_statistics
from .tree.organize_draft_results import organize_draft_results as _organize_draft_results
from .tree.pack_tree_mask import pack_tree_mask as _pack_tree_mask
from .tree.prune_trees import prune_trees as _prune_trees
from .tree.select_from_head import select_from_head as _select_from_head
from .tree.select_top_k_tokens import select_top_k_tokens as _select_top_k_tokens
from .tree.shared.tree_contract import Output as BuildTreeOutput
from .tree.shared.tree_mask import TreeMaskMode as TreeMaskMode
from .tree.tree_from_mask import tree_from_mask as _tree_from_mask
from .tree.tree_from_parents import tree_from_parents as _tree_from_parents
from .tree.unpack_tree_mask import unpack_tree_mask as _unpack_tree_mask
from .verify.append_output import append_output as _append_output
from .verify.pack_verify_rows import pack_verify_rows as _pack_verify_rows
from .verify.verify_commit import Output as CommitOutput
from .verify.verify_commit import verify_commit as _verify_commit
from .verify.verify_tree_coins import verify_tree_coins as _verify_tree_coins
from .verify.verify_tree_greedy import verify_tree_greedy as _verify_tree_greedy
from .verify.verify_tree_topp import verify_tree_topp as _verify_tree_topp
from .verify.verify_tree_typical import verify_tree_typical as _verify_tree_typical
from eagle_kernels.primitives.tree_walk import Output as VerifyOutput

accepted_cache_locs = _with_reference(_accepted_cache_locs, _accepted_cache_locs_reference)
"""Lists the slots to copy so that accepted paths become contiguous, and the slots that become free."""
align_evict_mask_to_page_size = _with_reference(_align_evict_mask_to_page_size, _align_evict_mask_to_page_size_reference)
"""Clears the eviction marks on the page in which each request's accepted tokens end, in place."""
append_output = _with_reference(_append_output, _append_output_reference)
"""Appends the step's tokens to every request's tokens, in place, up to the token that ends the request."""
assign_req_to_token = _with_reference(_assign_req_to_token, _assign_req_to_token_reference)
"""Writes the slots of each request's tokens starts..ends - 1 into its row of `req_to_token`, in place."""
build_tree = _with_reference(_build_tree, _build_tree_reference)
"""Builds the verification tree of every request: mask, positions and links."""
build_tree_from_blocks = _with_reference(_build_tree_from_blocks, _build_tree_from_blocks_reference)
"""Builds the verification trees of drafts that were made in one pass, which gives a distribution for each depth."""
build_tree_from_scores = _with_reference(_build_tree_from_scores, _build_tree_from_scores_reference)
"""Keeps the best candidates of all draft levels and builds the verification tree of every request."""
chain_kv_indices = _with_reference(_chain_kv_indices, _chain_kv_indices_reference)
"""Lists the KV slots that each token of a chain attends to, as if every token were a request."""
compute_tree_statistics = _with_reference(_compute_tree_statistics, _compute_tree_statistics_reference)
"""Describes the tree of every request from its links: depth, branching, and the number of nodes at each depth."""
draft_cache_locs = _with_reference(_draft_cache_locs, _draft_cache_locs_reference)
"""Lists the slots that draft steps write, and the slots to copy first if branches have pages of their own."""
draft_kv_indices = _with_reference(_draft_kv_indices, _draft_kv_indices_reference)
"""Lists the KV slots that each branch attends to at every draft step: the prefix, then the branch's own drafts."""
extend_cache_locs = _with_reference(_extend_cache_locs, _extend_cache_locs_reference)
"""Lists slots and positions of a range of every request's tokens, one request after another."""
find_slots = _with_reference(_find_slots, _find_slots_reference)
"""Lists slots and positions of `count` tokens of every request, through its page table."""
fused_experts = _with_reference(_fused_experts, _fused_experts_reference)
"""Returns what the experts of each row compute, summed by their weights."""
gqa_decode = _with_reference(_gqa_decode, _gqa_decode_reference)
"""Attends one query token per request to the keys in its pages of the KV cache."""
kv_indices = _with_reference(_kv_indices, _kv_indices_reference)
"""Lists the slots or pages that every request attends to, one request after another."""
linear_decode = _with_reference(_linear_decode, _linear_decode_reference)
"""Returns x @ weight.T + bias for the tokens of a decoding step."""
linear_fp8 = _with_reference(_linear_fp8, _linear_fp8_reference)
"""Returns x @ W.T + bias for weights W of float8_e4m3fn, with a scale for each output or each 128 x 128 of them."""
linear_w4a16 = _with_reference(_linear_w4a16, _linear_w4a16_reference)
"""Returns x @ W.T + bias for weights W of 4 bits, in groups of columns that share a scale."""
linear_w8a16 = _with_reference(_linear_w8a16, _linear_w8a16_reference)
"""Returns x @ W.T + bias for weights W of 8 bits, in groups of columns that share a scale."""
merge_drafts = _with_reference(_merge_drafts, _merge_drafts_reference)
"""Merges two tries per request: the other one goes below a node of the first."""
min_p_renorm = _with_reference(_min_p_renorm, _min_p_renorm_reference)
"""Keeps the tokens of each row that are at least min_p times as likely as the most likely one, and renormalizes."""
mla_decode = _with_reference(_mla_decode, _mla_decode_reference)
"""Attends one query token per request to the latents in its pages (MLA in its absorbed form)."""
mla_prefill = _with_reference(_mla_prefill, _mla_prefill_reference)
"""Attends prompts, or chunks of prompts, to the latents in their pages, their own included (MLA, absorbed)."""
mla_tree_attention = _with_reference(_mla_tree_attention, _mla_tree_attention_reference)
"""Attends draft tokens to the latents of the prefix and to those of the drafts that a tree mask allows."""
move_accepted_kv = _with_reference(_move_accepted_kv, _move_accepted_kv_reference)
"""Moves the cached keys and values of accepted nodes so that each path is contiguous, in place, in all layers."""
ngram_match = _with_reference(_ngram_match, _ngram_match_reference)
"""Drafts what followed earlier occurrences of a request's last tokens in its own text."""
organize_draft_results = _with_reference(_organize_draft_results, _organize_draft_results_reference)
"""Keeps the best candidates of every request, over all draft levels."""
pack_tree_mask = _with_reference(_pack_tree_mask, _pack_tree_mask_reference)
"""Packs a tree mask of any layout into int64 words, one bit per draft key: the layout that attention reads."""
pack_verify_rows = _with_reference(_pack_verify_rows, _pack_verify_rows_reference)
"""Packs the first nodes of every request into rows without gaps, as a server's forward pass reads them."""
penalize_logits = _with_reference(_penalize_logits, _penalize_logits_reference)
"""Penalizes the logits of every tree node, and counts the drafts on the node's own path as output."""
plan_attention = _with_reference(_plan_attention, _plan_attention_reference)
"""Plans the attention of a batch, once for all layers with the same window."""
prefill_attention = _with_reference(_prefill_attention, _prefill_attention_reference)
"""Attends prompts, or chunks of prompts, to themselves and to what comes before them."""
prune_trees = _with_reference(_prune_trees, _prune_trees_reference)
"""Prunes the trees of a batch to max_rows nodes in all; the drafts with the highest scores stay."""
reroot_drafts = _with_reference(_reroot_drafts, _reroot_drafts_reference)
"""Moves the trie of every request to a later root: keeps what is below the tokens committed since."""
rms_norm = _with_reference(_rms_norm, _rms_norm_reference)
"""Normalizes each row of `x`, or of `x + residual`, by its root mean square."""
rope = _with_reference(_rope, _rope_reference)
"""Rotates queries and keys by the angles of their positions (rotary position embedding)."""
route_experts = _with_reference(_route_experts, _route_experts_reference)
"""Returns the experts of each row and their weights, as routers of mixtures of experts choose them."""
sample_children = _with_reference(_sample_children, _sample_children_reference)
"""Draws the children of tree nodes from the draft's distribution, without or with replacement."""
sample_from_logits = _with_reference(_sample_from_logits, _sample_from_logits_reference)
"""Draws one token from each row of logits, as plain decoding does."""
select_from_head = _with_reference(_select_from_head, _select_from_head_reference)
"""Selects the candidates and beams of one draft level from the rows that the draft model's output layer reads."""
select_top_k_tokens = _with_reference(_select_top_k_tokens, _select_top_k_tokens_reference)
"""Selects the candidates of one draft level, and the best of them as the beams that the next level expands."""
share_drafts = _with_reference(_share_drafts, _share_drafts_reference)
"""Merges the tries of several drafters per request, and keeps the drafts that are likeliest to be accepted."""
silu_and_mul = _with_reference(_silu_and_mul, _silu_and_mul_reference)
"""Returns silu(gate) * up, of two tensors or of the two halves of one."""
top_k_renorm = _with_reference(_top_k_renorm, _top_k_renorm_reference)
"""Keeps the top_k most likely tokens of each row of probabilities, and renormalizes."""
top_p_renorm = _with_reference(_top_p_renorm, _top_p_renorm_reference)
"""Keeps the smallest set of most likely tokens that holds top_p of each row's probability, and renormalizes."""
tree_attention = _with_reference(_tree_attention, _tree_attention_reference)
"""Attends draft tokens to the prefix in the KV cache and to the draft keys that a tree mask allows."""
tree_from_mask = _with_reference(_tree_from_mask, _tree_from_mask_reference)
"""Derives positions and links of every request's tree from its mask, for drafters that provide a mask."""
tree_from_parents = _with_reference(_tree_from_parents, _tree_from_parents_reference)
"""Builds the verification tree of every request from the parents of its drafts: mask, positions and links."""
unpack_tree_mask = _with_reference(_unpack_tree_mask, _unpack_tree_mask_reference)
"""Writes a packed tree mask in another layout."""
verify_chain = _with_reference(_verify_chain, _verify_chain_reference)
"""Verifies chains of drafts that were sampled from a draft distribution, without loss."""
verify_commit = _with_reference(_verify_commit, _verify_commit_reference)
"""Computes what the next step starts from: lengths, roots, the draft's inputs and rows to gather."""
verify_tree = _with_reference(_verify_tree, _verify_tree_reference)
"""Verifies trees from `build_tree`, greedily or by sampling; both are lossless."""
verify_tree_coins = _with_reference(_verify_tree_coins, _verify_tree_coins_reference)
"""Verifies token trees with given coins and target probabilities; lossless at the default thresholds."""
verify_tree_greedy = _with_reference(_verify_tree_greedy, _verify_tree_greedy_reference)
"""Verifies token trees greedily: follows the target's argmax, or given target ids, from the root down."""
verify_tree_rejection = _with_reference(_verify_tree_rejection, _verify_tree_rejection_reference)
"""Verifies token trees whose children were drawn from the draft's distribution, without loss: recursive rejection."""
verify_tree_sampled = _with_reference(_verify_tree_sampled, _verify_tree_sampled_reference)
"""Verifies token trees by sample and match: emits exactly the text that plain sampling would draw."""
verify_tree_topp = _with_reference(_verify_tree_topp, _verify_tree_topp_reference)
"""LOSSY: Accepts drafts that are among the target's most likely tokens, whatever their probability."""
verify_tree_traversal = _with_reference(_verify_tree_traversal, _verify_tree_traversal_reference)
"""Verifies token trees of sampled drafts from their leaves up, without loss: traversal verification."""
verify_tree_typical = _with_reference(_verify_tree_typical, _verify_tree_typical_reference)
"""LOSSY: Accepts drafts that the target finds likely enough, by Medusa's rule of typical acceptance."""
write_kv = _with_reference(_write_kv, _write_kv_reference)
"""Writes keys and values into the paged cache, and rotates keys and queries on the way."""
write_latent_kv = _with_reference(_write_latent_kv, _write_latent_kv_reference)
"""Writes latents and their keys into the paged cache, and rotates keys and queries on the way (MLA)."""

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
