"""The names of all ops, by family: `ops/<family>/<name>.py` holds `<name>`."""

from __future__ import annotations

FAMILIES = {
    "attention": ("gqa_decode", "plan_attention", "prefill_attention", "tree_attention"),
    "draft": ("merge_drafts", "ngram_match", "reroot_drafts", "share_drafts"),
    "experts": ("fused_experts", "route_experts"),
    "kv": (
        "accepted_cache_locs",
        "align_evict_mask_to_page_size",
        "assign_req_to_token",
        "chain_kv_indices",
        "draft_cache_locs",
        "draft_kv_indices",
        "extend_cache_locs",
        "find_slots",
        "kv_indices",
        "move_accepted_kv",
        "write_kv",
    ),
    "latent": ("mla_decode", "mla_prefill", "mla_tree_attention", "write_latent_kv"),
    "linear": ("linear_decode", "linear_fp8", "linear_w4a16", "linear_w8a16"),
    "nn": ("rms_norm", "rope", "silu_and_mul"),
    "rejection": ("sample_children", "verify_chain", "verify_tree_rejection", "verify_tree_traversal"),
    "sampling": (
        "min_p_renorm",
        "penalize_logits",
        "sample_from_logits",
        "top_k_renorm",
        "top_p_renorm",
        "verify_tree_sampled",
    ),
    "tree": (
        "build_tree",
        "build_tree_from_blocks",
        "build_tree_from_scores",
        "compute_tree_statistics",
        "organize_draft_results",
        "pack_tree_mask",
        "prune_trees",
        "select_from_head",
        "select_top_k_tokens",
        "tree_from_mask",
        "tree_from_parents",
        "unpack_tree_mask",
    ),
    "verify": (
        "append_output",
        "pack_verify_rows",
        "verify_commit",
        "verify_tree_coins",
        "verify_tree_greedy",
        "verify_tree_topp",
        "verify_tree_typical",
    ),
}
# where each op is, as `tree.build_tree`
OPS = {name: f"{family}.{name}" for family, names in FAMILIES.items() for name in names}
